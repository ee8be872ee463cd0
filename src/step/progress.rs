//! What is done, and what may not begin yet: a table of actions that lanes wait on; and the run's
//! first failure.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// The first failure of any lane. Later ones follow from it and are dropped.
#[derive(Default)]
pub(super) struct Failure {
    first: Mutex<(Option<Error>, Option<String>)>,
}

impl Failure {
    /// Keeps `error` if it is the first.
    pub(super) fn set(&self, error: Error) {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        if first.1.is_none() {
            first.1 = Some(error.to_string());
            first.0 = Some(error);
        }
    }

    /// Whether a lane has failed.
    pub(super) fn is_set(&self) -> bool {
        self.first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .1
            .is_some()
    }

    /// The first failure's words, for who must not take it from the lanes' caller.
    pub(super) fn words(&self) -> Option<String> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.1.clone()
    }

    /// The first failure itself to the first who asks, and its words to all later ones.
    pub(super) fn check(&self) -> Result<()> {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        match (first.0.take(), &first.1) {
            (Some(error), _) => Err(error),
            (None, Some(words)) => Err(Error::StoreFailed {
                first: words.clone(),
            }),
            (None, None) => Ok(()),
        }
    }

    /// The first failure if it has not been given out, else `error`.
    pub(super) fn first_or(&self, error: Error) -> Error {
        self.set(error);
        self.check().expect_err("a failure was just kept")
    }
}

/// For each action of a schedule, the last pass in which it was done, and whether the next may
/// begin.
pub(super) struct Progress {
    table: Mutex<Vec<Entry>>,
    changed: Condvar,
    failure: Arc<Failure>,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// The last pass in which the action was done.
    done: u64,
    /// It may not begin in any pass after this one.
    held: Option<u64>,
}

impl Progress {
    /// Nothing is done, nothing is held.
    pub(super) fn new(actions: usize, failure: Arc<Failure>) -> Progress {
        Progress {
            table: Mutex::new(vec![Entry::default(); actions]),
            changed: Condvar::new(),
            failure,
        }
    }

    fn table(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The action is done in `pass`.
    pub(super) fn mark(&self, action: usize, pass: u64) {
        let mut table = self.table();
        let done = &mut table[action].done;
        assert_eq!(*done + 1, pass, "an action is done once a pass, in order");
        *done = pass;
        self.changed.notify_all();
    }

    /// Wakes all that wait, so that they see the failure.
    pub(super) fn wake(&self) {
        let _table = self.table();
        self.changed.notify_all();
    }

    /// Keeps the action from beginning in passes after `pass`.
    pub(super) fn hold(&self, action: u32, pass: u64) {
        self.table()[action as usize].held = Some(pass);
    }

    /// Lets the action begin again.
    pub(super) fn release(&self, action: u32) {
        self.table()[action as usize].held = None;
        self.changed.notify_all();
    }

    /// How many of a lane's `actions`, which are done in their order, are done in `pass`; `None`
    /// if a lane has the table just now.
    pub(super) fn count_done(&self, actions: &[usize], pass: u64) -> Option<usize> {
        let table = self.table.try_lock().ok()?;
        Some(actions.partition_point(|action| table[*action].done >= pass))
    }

    /// Whether the action is done in `pass`.
    pub(super) fn is_done(&self, action: u32, pass: u64) -> bool {
        self.table()[action as usize].done >= pass
    }

    /// Whether nobody holds the action in `pass`.
    pub(super) fn is_free(&self, action: usize, pass: u64) -> bool {
        self.table()[action].is_free(pass)
    }

    /// Waits for the action; false if a lane has failed.
    pub(super) fn wait(&self, action: u32, pass: u64) -> bool {
        self.wait_until(|table| table[action as usize].done >= pass, true)
    }

    /// As [`Progress::wait`], but an action that is done counts, whatever failed after it.
    pub(super) fn wait_despite_failure(&self, action: u32, pass: u64) -> bool {
        self.wait_until(|table| table[action as usize].done >= pass, false)
    }

    /// Waits until nobody holds the action in `pass`; false if a lane has failed.
    pub(super) fn wait_free(&self, action: usize, pass: u64) -> bool {
        self.wait_until(|table| table[action].is_free(pass), true)
    }

    /// Waits for `ready`. A failure ends the wait; with `strict` it counts even if ready.
    fn wait_until(&self, ready: impl Fn(&[Entry]) -> bool, strict: bool) -> bool {
        let mut table = self.table();
        loop {
            let is_ready = ready(&table);
            if is_ready && !strict {
                return true;
            }
            if self.failure.is_set() {
                return false;
            }
            if is_ready {
                return true;
            }
            table = self
                .changed
                .wait(table)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until every action of `pass` is done.
    pub(super) fn wait_all(&self, pass: u64) -> Result<()> {
        let actions = self.table().len();
        for action in 0..u32::try_from(actions).expect("fewer than 2^32 actions") {
            if !self.wait(action, pass) {
                return self.failure.check();
            }
        }
        Ok(())
    }
}

impl Entry {
    fn is_free(&self, pass: u64) -> bool {
        self.held.is_none_or(|held| pass <= held)
    }
}
