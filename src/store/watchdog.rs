//! Says which I/O does not come back.
//!
//! - An operation or a flush that takes longer than the timeout gets a line that names it, then one
//!   whenever its time has doubled. Nothing is ended: a drive that recovers goes on.
//! - Its thread sleeps until the oldest operation is due, or, with none in flight, until one
//!   begins.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ExtentKey;

/// Seconds after which a line is said, where nobody sets others.
pub const IO_TIMEOUT_SECONDS: u64 = 60;

/// Where lines go.
pub type Say = Arc<dyn Fn(&str) + Send + Sync>;

/// What is under way.
#[derive(Clone, Copy)]
pub(super) struct Flight {
    /// `read`, `write` or `flush`.
    pub(super) action: &'static str,
    /// `None`: structures of the store's own.
    pub(super) key: Option<ExtentKey>,
    pub(super) offset: u64,
}

struct Watched {
    flight: Flight,
    started: Instant,
    /// Its time when the next line is due.
    due: Duration,
}

struct State {
    flights: HashMap<u64, Watched>,
    /// `None` is off.
    timeout: Option<Duration>,
    say: Say,
    /// The thread waits for a flight or for its end.
    parked: bool,
    ended: bool,
}

struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    wake: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The watching side of one file's I/O. Dropping it ends its thread.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The side that reports what begins and ends.
#[derive(Clone)]
pub(super) struct Reporter(Arc<Shared>);

impl Watchdog {
    pub(super) fn spawn(path: &Path) -> io::Result<Watchdog> {
        let shared = Arc::new(Shared {
            path: path.to_path_buf(),
            state: Mutex::new(State {
                flights: HashMap::new(),
                timeout: Some(Duration::from_secs(IO_TIMEOUT_SECONDS)),
                say: Arc::new(|line| eprintln!("terrace: warning: {line}")),
                parked: false,
                ended: false,
            }),
            wake: Condvar::new(),
        });
        let watched = shared.clone();
        let thread = std::thread::Builder::new()
            .name("terrace-watch".to_string())
            .spawn(move || watch(&watched))?;
        Ok(Watchdog {
            shared,
            thread: Some(thread),
        })
    }

    pub(super) fn reporter(&self) -> Reporter {
        Reporter(self.shared.clone())
    }

    /// Sets the timeout, zero is off, and where lines go, for what begins from here on.
    pub(super) fn set(&self, timeout: Duration, say: Option<Say>) {
        let mut state = self.shared.state();
        state.timeout = (!timeout.is_zero()).then_some(timeout);
        if let Some(say) = say {
            state.say = say;
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

impl Reporter {
    pub(super) fn begin(&self, number: u64, flight: Flight) {
        let mut state = self.0.state();
        let Some(due) = state.timeout else { return };
        let watched = Watched {
            flight,
            started: Instant::now(),
            due,
        };
        state.flights.insert(number, watched);
        if state.parked {
            state.parked = false;
            self.0.wake.notify_one();
        }
    }

    pub(super) fn end(&self, number: u64) {
        self.0.state().flights.remove(&number);
    }
}

fn watch(shared: &Shared) {
    let mut state = shared.state();
    while !state.ended {
        let now = Instant::now();
        let mut lines = Vec::new();
        let mut next = None;
        for watched in state.flights.values_mut() {
            let waited = now.duration_since(watched.started);
            if waited >= watched.due {
                lines.push(line(&shared.path, &watched.flight, waited));
                watched.due = waited * 2;
            }
            let left = watched.due - waited;
            next = Some(next.map_or(left, |next: Duration| next.min(left)));
        }
        if !lines.is_empty() {
            let say = state.say.clone();
            drop(state);
            lines.iter().for_each(|line| say(line));
            state = shared.state();
            continue;
        }
        state = match next {
            Some(left) => {
                let waited = shared.wake.wait_timeout(state, left);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                state.parked = true;
                let waited = shared.wake.wait(state);
                waited.unwrap_or_else(PoisonError::into_inner)
            }
        };
    }
}

fn line(path: &Path, flight: &Flight, waited: Duration) -> String {
    let Flight {
        action,
        key,
        offset,
    } = flight;
    let path = path.display();
    let seconds = waited.as_secs_f64();
    match key {
        Some(key) => format!(
            "{action} of {}, extent {}: {path} at byte {offset} has taken {seconds:.1} s so far; \
             look at the drive and the system's log",
            key.place(),
            key.extent
        ),
        None => format!(
            "{action}: {path} at byte {offset} has taken {seconds:.1} s so far; look at the drive \
             and the system's log"
        ),
    }
}
