//! Threads that code extents beside the disk's thread. Jobs that wait hold slabs, and slabs are
//! few.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};

/// Where the disk's thread leaves jobs; `None` ends a thread.
pub(super) type Jobs<J> = Sender<Option<J>>;

/// The threads; dropping this lets them finish what was handed over.
pub(super) struct Workers<J> {
    jobs: Jobs<J>,
    work: Receiver<Option<J>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<J: Send + 'static> Workers<J> {
    /// None yet.
    pub(super) fn new() -> Workers<J> {
        // Unbounded: the disk's thread must never wait for a coder that waits for the disk.
        let (jobs, work) = crossbeam_channel::unbounded();
        Workers {
            jobs,
            work,
            threads: Mutex::default(),
        }
    }

    /// The sending side, for the disk's thread.
    pub(super) fn jobs(&self) -> Jobs<J> {
        self.jobs.clone()
    }

    /// Starts as many threads as are missing of `count`, each with what `make` makes.
    pub(super) fn start<W: FnMut(J) + Send + 'static>(
        &self,
        count: usize,
        mut make: impl FnMut() -> io::Result<W>,
    ) -> io::Result<()> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        while threads.len() < count {
            let (work, mut on) = (self.work.clone(), make()?);
            let thread = std::thread::Builder::new()
                .name(format!("terrace-zstd-{}", threads.len()))
                .spawn(move || work.into_iter().map_while(|job| job).for_each(&mut on))?;
            threads.push(thread);
        }
        Ok(())
    }

    /// Hands a job over; [`Workers::start`] came before.
    pub(super) fn submit(&self, job: J) {
        let sent = self.jobs.send(Some(job));
        sent.expect("the receiving side is kept too");
    }
}

impl<J> Drop for Workers<J> {
    fn drop(&mut self) {
        let threads = self
            .threads
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for _ in &*threads {
            self.jobs.send(None).ok();
        }
        for thread in threads.drain(..) {
            thread.join().ok();
        }
    }
}
