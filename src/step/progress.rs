//! What is done: a table of actions that lanes wait on, and the run's first failure.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

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

/// For each action of a schedule, the last pass in which it was done.
pub(super) struct Progress {
    done: Mutex<Vec<u64>>,
    changed: Condvar,
    failure: Arc<Failure>,
}

impl Progress {
    /// Nothing is done.
    pub(super) fn new(actions: usize, failure: Arc<Failure>) -> Progress {
        Progress {
            done: Mutex::new(vec![0; actions]),
            changed: Condvar::new(),
            failure,
        }
    }

    /// The action is done in `pass`.
    pub(super) fn mark(&self, action: usize, pass: u64) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(
            done[action] + 1,
            pass,
            "an action is done once a pass, in order"
        );
        done[action] = pass;
        self.changed.notify_all();
    }

    /// Wakes all that wait, so that they see the failure.
    pub(super) fn wake(&self) {
        let _done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        self.changed.notify_all();
    }

    /// Whether the action is done in `pass`.
    pub(super) fn is_done(&self, action: u32, pass: u64) -> bool {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)[action as usize] >= pass
    }

    /// Waits for the action; false if a lane has failed.
    pub(super) fn wait(&self, action: u32, pass: u64) -> bool {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if self.failure.is_set() {
                return false;
            }
            if done[action as usize] >= pass {
                return true;
            }
            done = self
                .changed
                .wait(done)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until every action of `pass` is done.
    pub(super) fn wait_all(&self, pass: u64) -> Result<()> {
        for action in 0.. {
            if action as usize
                == self
                    .done
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .len()
            {
                return Ok(());
            }
            if !self.wait(action, pass) {
                return self.failure.check();
            }
        }
        Ok(())
    }
}
