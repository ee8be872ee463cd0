//! The disk without io_uring: threads that call pread and pwrite.
//!
//! - As many threads as operations may be in flight, so none waits for another's.
//! - Completions and wakes come by one channel: waiting uses no CPU.
//!
//! Safe code: a lease is a slice, and std has pread and pwrite.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};

use super::disk::{DEPTH, Direction, Disk, Finished, Next, Operation, Progress, Waker};

enum Reply {
    Finished(Finished),
    Wake,
}

pub(super) struct PoolDisk {
    file: Arc<File>,
    bytes: u64,
    /// `None` only while dropping.
    work: Option<Sender<Operation>>,
    replies: Receiver<Reply>,
    reply: Sender<Reply>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl PoolDisk {
    pub(super) fn new(file: Arc<File>, bytes: u64) -> io::Result<PoolDisk> {
        let (work, orders) = crossbeam_channel::bounded::<Operation>(DEPTH);
        let (reply, replies) = crossbeam_channel::unbounded();
        let mut disk = PoolDisk {
            file,
            bytes,
            work: Some(work),
            replies,
            reply,
            threads: Vec::with_capacity(DEPTH),
            in_flight: 0,
        };
        for index in 0..DEPTH {
            let (orders, reply, file) = (orders.clone(), disk.reply.clone(), disk.file.clone());
            let thread = std::thread::Builder::new()
                .name(format!("terrace-io-{index}"))
                .spawn(move || {
                    for operation in orders {
                        // The disk that would receive it is gone only when it was dropped.
                        reply.send(Reply::Finished(transfer(&file, operation))).ok();
                    }
                })?;
            disk.threads.push(thread);
        }
        Ok(disk)
    }
}

fn transfer(file: &File, mut operation: Operation) -> Finished {
    let mut progress = Progress::default();
    loop {
        let (from, to) = (progress.done, operation.bytes);
        let offset = operation.offset + from as u64;
        let moved = match operation.direction {
            Direction::Read => file.read_at(&mut operation.slab.as_mut_slice()[from..to], offset),
            Direction::Write => file.write_at(&operation.slab.as_slice()[from..to], offset),
        };
        let result = match progress.advance(&operation, moved) {
            Next::Again => continue,
            Next::Done => Ok(()),
            Next::Failed(error) => Err(error),
        };
        return Finished { operation, result };
    }
}

impl Disk for PoolDisk {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn start(&mut self, operation: Operation) {
        operation.check(self.bytes);
        assert!(self.in_flight < DEPTH, "more than {DEPTH} in flight");
        self.in_flight += 1;
        self.work
            .as_ref()
            .expect("only drop takes the channel")
            .send(operation)
            .expect("threads live as long as the disk");
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        if self.in_flight == 0 {
            return;
        }
        let mut next = Some(self.replies.recv().expect("the disk holds a sender"));
        while let Some(reply) = next {
            if let Reply::Finished(done) = reply {
                self.in_flight -= 1;
                finished.push(done);
            }
            next = self.replies.try_recv().ok();
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        assert_eq!(self.in_flight, 0, "a flush covers only what finished");
        self.file.sync_data()
    }

    fn waker(&self) -> Waker {
        let reply = self.reply.clone();
        Waker::new(move || {
            reply.send(Reply::Wake).ok();
        })
    }
}

impl Drop for PoolDisk {
    fn drop(&mut self) {
        self.work = None;
        for thread in self.threads.drain(..) {
            thread.join().ok();
        }
    }
}
