//! The disk on io_uring: registered file, registered buffers where allowed, one ring a disk.
//!
//! - A lease given to the kernel stays in the table of flights until the completion that carries
//!   its number is reaped. Drop drains the ring; what cannot be drained is leaked, never freed.
//! - In flight is at most [`DEPTH`] and one poll, less than the completion queue: no overflow.
//! - Submission repeats until the kernel has taken the entry: a signal before that would otherwise
//!   leave a wait without a completion.
//! - Once the kernel refuses `io_uring_enter` for good, nothing more is handed to it: entries that
//!   it has not taken fail, those that it has are waited for by looking at the queue.
//!
//! No polling modes (SQPOLL, IOPOLL) and no linked or provided buffers.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::disk::{
    DEPTH, Direction, Disk, Finished, Next, Operation, Progress, Waker, is_transient,
};
use super::sys;
use crate::host::Span;

const SQ_ENTRIES: u32 = 64;
const CQ_ENTRIES: u32 = 128;
const _: () = assert!(
    DEPTH + 1 < SQ_ENTRIES as usize && SQ_ENTRIES < CQ_ENTRIES,
    "every operation in flight has room in both queues"
);
/// Number of the poll on the waker; flights have small numbers.
const WAKE: u64 = u64::MAX;
/// Refusals of `io_uring_enter` in a row after which the ring counts as broken.
const REFUSALS_MAX: u32 = 1000;
/// Most bytes that the kernel registers as one buffer.
const REGISTERED_BYTES_MAX: usize = 1 << 30;
/// Most buffers that the kernel registers.
const REGISTERED_COUNT_MAX: usize = 1024;

struct Flight {
    operation: Operation,
    progress: Progress,
}

/// Memory that the kernel has pinned, by its index.
struct Registered {
    start: usize,
    end: usize,
}

pub(super) struct UringDisk {
    ring: IoUring,
    /// Open as long as the ring: registration holds it too.
    file: Arc<File>,
    bytes: u64,
    flights: [Option<Flight>; DEPTH],
    in_flight: usize,
    ready: VecDeque<Finished>,
    registered: Vec<Registered>,
    /// Keeps registered memory mapped.
    _memory: Vec<Span>,
    event: Arc<File>,
    /// A poll on `event` is in the ring.
    polled: bool,
    /// The waker was used and no wait has returned for it.
    woken: bool,
    broken: Option<i32>,
    note: Option<String>,
}

impl UringDisk {
    /// A ring on `file`. `direct` says that it was opened with O_DIRECT.
    pub(super) fn new(
        file: Arc<File>,
        bytes: u64,
        direct: bool,
        memory: &[Span],
    ) -> io::Result<UringDisk> {
        let build = |cooperative: bool| {
            let mut builder = IoUring::builder();
            builder.dontfork().setup_cqsize(CQ_ENTRIES);
            if cooperative {
                builder.setup_coop_taskrun();
            }
            builder.build(SQ_ENTRIES)
        };
        // Kernels before 5.19 know no cooperative task running.
        let ring = build(true).or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => build(false),
            _ => Err(error),
        })?;
        if !ring.params().is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        if !direct {
            // Buffered writes run on kernel threads: two, not one a processor.
            ring.submitter().register_iowq_max_workers(&mut [2, 2]).ok();
        }
        let mut disk = UringDisk {
            ring,
            file,
            bytes,
            flights: [const { None }; DEPTH],
            in_flight: 0,
            ready: VecDeque::with_capacity(DEPTH),
            registered: Vec::new(),
            _memory: memory.to_vec(),
            event: Arc::new(sys::event_counter()?),
            polled: false,
            woken: false,
            broken: None,
            note: None,
        };
        disk.register(memory);
        Ok(disk)
    }

    /// What was not allowed, if anything.
    pub(super) fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    fn register(&mut self, memory: &[Span]) {
        let mut pieces: Vec<Registered> = Vec::new();
        for span in memory {
            let piece = (REGISTERED_BYTES_MAX / span.stride()).max(1) * span.stride();
            let (start, end) = (span.address(), span.address() + span.bytes());
            pieces.extend((start..end).step_by(piece).map(|at| Registered {
                start: at,
                end: (at + piece).min(end),
            }));
        }
        if pieces.is_empty() {
            return;
        }
        pieces.truncate(REGISTERED_COUNT_MAX);
        let vectors: Vec<libc::iovec> = pieces
            .iter()
            .map(|piece| libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(piece.start),
                iov_len: piece.end - piece.start,
            })
            .collect();
        // SAFETY: the ranges belong to arenas that `_memory` keeps mapped until after the ring,
        // declared before it, is closed.
        match unsafe { self.ring.submitter().register_buffers(&vectors) } {
            Ok(()) => self.registered = pieces,
            Err(error) => self.note = Some(format!("buffers are not registered: {error}")),
        }
    }

    fn buffer_index(&self, address: usize, bytes: usize) -> Option<u16> {
        let holds = |piece: &Registered| piece.start <= address && address + bytes <= piece.end;
        self.registered
            .iter()
            .position(holds)
            .map(|index| index as u16)
    }

    /// Hands the rest of a flight to the kernel.
    fn send(&mut self, number: usize) {
        let flight = self.flights[number].as_mut().expect("a flight is sent");
        let done = flight.progress.done;
        let operation = &mut flight.operation;
        let bytes = operation.bytes - done;
        // wrapping_add: in bounds by `check`, and needs no unsafe.
        let address = operation.slab.as_mut_ptr().wrapping_add(done);
        let (direction, offset) = (operation.direction, operation.offset + done as u64);
        let length = u32::try_from(bytes).expect("an operation is far below 4 GiB");
        let file = types::Fixed(0);
        let entry = match (direction, self.buffer_index(address.addr(), bytes)) {
            (Direction::Read, Some(index)) => opcode::ReadFixed::new(file, address, length, index)
                .offset(offset)
                .build(),
            (Direction::Write, Some(index)) => {
                opcode::WriteFixed::new(file, address, length, index)
                    .offset(offset)
                    .build()
            }
            (Direction::Read, None) => opcode::Read::new(file, address, length)
                .offset(offset)
                .build(),
            (Direction::Write, None) => opcode::Write::new(file, address, length)
                .offset(offset)
                .build(),
        };
        if !self.push(&entry.user_data(number as u64)) {
            let errno = self.broken.unwrap_or(libc::EIO);
            self.settle(number, Err(io::Error::from_raw_os_error(errno)));
        }
    }

    /// Puts one entry into the ring and makes the kernel take it. `false`: it never will.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        if self.broken.is_some() {
            return false;
        }
        // SAFETY: the entry's memory belongs to a lease in `flights`, which stays there until the
        // completion with this number is reaped, or to nobody (a poll).
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("the submission queue is emptied by every push");
        let mut refusals = 0;
        while !self.ring.submission().is_empty() {
            let Err(error) = self.ring.submit() else {
                continue;
            };
            self.reap();
            if !self.survives(&error, &mut refusals) {
                return false;
            }
        }
        true
    }

    /// Whether to try `io_uring_enter` again after its refusal.
    fn survives(&mut self, error: &io::Error, refusals: &mut u32) -> bool {
        *refusals += 1;
        if !is_transient(error) || *refusals > REFUSALS_MAX {
            self.broken = Some(error.raw_os_error().unwrap_or(libc::EIO));
            return false;
        }
        if error.raw_os_error() != Some(libc::EINTR) {
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Takes completions off the queue.
    fn reap(&mut self) {
        assert_eq!(
            self.ring.completion().overflow(),
            0,
            "in flight exceeds the queue"
        );
        loop {
            let Some(entry) = self.ring.completion().next() else {
                return;
            };
            if entry.user_data() == WAKE {
                self.polled = false;
                self.woken = true;
                // Empty already if a wake came with the poll's arming.
                (&*self.event).read_exact(&mut [0; 8]).ok();
                continue;
            }
            let number = entry.user_data() as usize;
            let moved = match entry.result() {
                errno if errno < 0 => Err(io::Error::from_raw_os_error(-errno)),
                bytes => Ok(bytes as usize),
            };
            self.settle(number, moved);
        }
    }

    fn settle(&mut self, number: usize, moved: io::Result<usize>) {
        let flight = self.flights[number]
            .as_mut()
            .expect("a completion has a flight");
        let result = match flight.progress.advance(&flight.operation, moved) {
            Next::Again if self.broken.is_none() => return self.send(number),
            Next::Again => Err(io::Error::from_raw_os_error(
                self.broken.unwrap_or(libc::EIO),
            )),
            Next::Done => Ok(()),
            Next::Failed(error) => Err(error),
        };
        let flight = self.flights[number].take().expect("looked at above");
        self.ready.push_back(Finished {
            operation: flight.operation,
            result,
        });
    }

    fn poll_event(&mut self) {
        if !self.polled {
            let fd = types::Fd(self.event.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            self.polled = true;
            self.polled = self.push(&entry.user_data(WAKE));
        }
    }

    /// Waits for a completion or a wake.
    fn wait_ready(&mut self) {
        let mut refusals = 0;
        loop {
            self.reap();
            if std::mem::take(&mut self.woken) || !self.ready.is_empty() {
                return;
            }
            if self.broken.is_some() {
                // The kernel posts what it has taken when the thread next enters it.
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            if let Err(error) = self.ring.submit_and_wait(1) {
                self.survives(&error, &mut refusals);
            }
        }
    }
}

impl Disk for UringDisk {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn start(&mut self, operation: Operation) {
        operation.check(self.bytes);
        assert!(self.in_flight < DEPTH, "more than {DEPTH} in flight");
        let number = self
            .flights
            .iter()
            .position(Option::is_none)
            .expect("fewer flights than the table holds");
        self.in_flight += 1;
        self.flights[number] = Some(Flight {
            operation,
            progress: Progress::default(),
        });
        self.send(number);
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        if self.in_flight == 0 {
            return;
        }
        self.poll_event();
        if self.ready.is_empty() {
            self.wait_ready();
        }
        self.in_flight -= self.ready.len();
        finished.extend(self.ready.drain(..));
    }

    fn flush(&mut self) -> io::Result<()> {
        assert_eq!(self.in_flight, 0, "a flush covers only what finished");
        self.file.sync_data()
    }

    fn waker(&self) -> Waker {
        let event = self.event.clone();
        Waker::new(move || {
            // Refused only when the counter is full: then it is raised already.
            (&*event).write_all(&1u64.to_ne_bytes()).ok();
        })
    }
}

impl Drop for UringDisk {
    fn drop(&mut self) {
        let mut finished = Vec::new();
        while self.in_flight > 0 && self.broken.is_none() {
            self.wait(&mut finished);
        }
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            // The kernel may still touch these bytes.
            std::mem::forget(flight);
        }
    }
}
