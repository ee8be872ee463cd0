//! Which embedding rows the next step names: its updates of the step before begin with these.
//!
//! The rows are known when the next step begins, or never, when the lanes are drained. The update
//! lane waits for that only so long: then it updates all rows at once, with the same result.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::ops::SortedTokens;

/// How long updates may wait for the next step.
const PATIENCE: Duration = Duration::from_millis(100);

/// The rows that the step after a pass names.
#[derive(Default)]
pub(super) struct NamedRows {
    /// The pass before that step, and its rows in ascending order.
    known: Mutex<(u64, Arc<[u32]>)>,
    changed: Condvar,
}

impl NamedRows {
    /// Names the rows of the step after `pass`; none of them where no step follows at once.
    pub(super) fn name(&self, pass: u64, sorted: &[SortedTokens]) {
        let mut rows: Vec<u32> = sorted
            .iter()
            .flat_map(|micro| &micro.ids)
            .copied()
            .collect();
        rows.sort_unstable();
        rows.dedup();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 < pass {
            *known = (pass, rows.into());
        }
        self.changed.notify_all();
    }

    /// The rows of the step after `pass`; `None` if nobody named them in time.
    pub(super) fn after(&self, pass: u64) -> Option<Arc<[u32]>> {
        let until = Instant::now() + PATIENCE;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        while known.0 < pass {
            let left = until.checked_duration_since(Instant::now())?;
            let waited = self.changed.wait_timeout(known, left);
            known = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(known.1.clone())
    }
}
