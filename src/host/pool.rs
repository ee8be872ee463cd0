//! The threads that walk host memory: rayon's, each kept near its share of it.
//!
//! - [`by_share`] gives thread i of n the i-th n-th of what there is, so the pages of a home are
//!   touched first, and used in every step, by the same thread; who is done helps the others.
//! - [`keep_near`] binds each thread to some of the CPUs, before any work. Which ones, if any, is
//!   decided by `machine`; threads of I/O and of lanes stay free.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};

/// Starts the pool with a thread for each entry, bound to its CPUs.
///
/// # Errors
/// [`Error::Io`] if threads cannot be started, or the pool has been.
pub fn keep_near(cpus: Vec<Vec<usize>>) -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(cpus.len())
        .start_handler(move |thread| bind(&cpus[thread]));
    pool.build_global().map_err(|error| {
        Error::io(
            "start threads",
            "the pool".as_ref(),
            std::io::Error::other(error),
        )
    })
}

/// Binds the calling thread; a refusal leaves it where the kernel likes it.
fn bind(cpus: &[usize]) {
    // SAFETY: a set of bits, of which none is a value too many.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus.iter().filter(|cpu| **cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: within the set, as just checked.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    // SAFETY: the set outlives the call, which copies it; 0 is the calling thread.
    unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
}

/// Time that the calling thread has had a processor.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure outlives the call, which fills it.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Does `work` with every piece, on all threads: each begins with its own share of the pieces,
/// which follow each other, then takes what others have left, from their ends. Returns the time
/// that its threads had a processor for it, the mean of those that there were pieces for.
pub fn by_share<T: Send>(pieces: Vec<T>, work: impl Fn(T) + Sync) -> Duration {
    let (count, threads) = (pieces.len(), rayon::current_num_threads());
    if count <= 1 || threads == 1 {
        return timed(|| pieces.into_iter().for_each(work));
    }
    let mut pieces = pieces.into_iter();
    let ends =
        (0..threads).map(|thread| (count * thread / threads, count * (thread + 1) / threads));
    let shares: Vec<Mutex<VecDeque<T>>> = ends
        .map(|(start, end)| Mutex::new(pieces.by_ref().take(end - start).collect()))
        .collect();
    let next = |share: usize, own: bool| {
        // Nothing under the lock can panic.
        let mut share = shares[share].lock().unwrap_or_else(PoisonError::into_inner);
        if own {
            share.pop_front()
        } else {
            share.pop_back()
        }
    };
    let walk = || {
        let own = rayon::current_thread_index().unwrap_or(0);
        for turn in 0..threads {
            while let Some(piece) = next((own + turn) % threads, turn == 0) {
                work(piece);
            }
        }
    };
    let nanoseconds = AtomicU64::new(0);
    let workers = threads.min(count);
    rayon::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|_| {
                let taken = timed(walk).as_nanos() as u64;
                nanoseconds.fetch_add(taken, Ordering::Relaxed);
            });
        }
    });
    Duration::from_nanos(nanoseconds.into_inner() / workers as u64)
}

/// Time of a processor that the calling thread takes for `work`.
pub fn timed(work: impl FnOnce()) -> Duration {
    let before = thread_time();
    work();
    thread_time().saturating_sub(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_worked_once_whoever_is_slow() {
        for (threads, count) in [(1, 5), (3, 0), (3, 1), (3, 2), (3, 100), (8, 9)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().expect("a pool");
            let worked = Mutex::new(Vec::new());
            pool.install(|| {
                by_share((0..count).collect(), |piece: usize| {
                    if piece == 0 {
                        std::thread::sleep(std::time::Duration::from_millis(20));
                    }
                    worked.lock().expect("no panic").push(piece);
                });
            });
            let mut worked = worked.into_inner().expect("no panic");
            worked.sort_unstable();
            assert_eq!(worked, (0..count).collect::<Vec<_>>(), "{threads} threads");
        }
    }

    #[test]
    fn a_bound_thread_runs_where_it_is_bound() {
        let allowed = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").expect("procfs");
            let list = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            list.expect("a list").trim().to_string()
        };
        let before = allowed();
        let first: usize = before
            .split(['-', ','])
            .next()
            .and_then(|n| n.parse().ok())
            .expect("a CPU");
        let bound = std::thread::spawn(move || {
            bind(&[first]);
            allowed()
        });
        assert_eq!(bound.join().expect("no panic"), first.to_string());
        assert_eq!(allowed(), before);
    }
}
