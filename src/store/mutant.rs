//! Mistakes that a test can switch on, to see that the suite catches them: those that no disk
//! beneath the store can make for it. Release builds have none.

use std::sync::atomic::{AtomicU8, Ordering};

/// A mistake of this process' stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutant {
    /// None.
    None,
    /// What is read is not compared with its checksum.
    ChecksumUnchecked,
    /// A manifest counts that is whole, whichever the superblock names.
    GenerationUnchecked,
    /// Of superblocks that two copies agree on, the oldest counts.
    SequenceUnchecked,
    /// A transfer that moved a part counts as done.
    ShortAccepted,
    /// A failure of a write or a flush does not end the use of the store.
    FailureForgotten,
}

impl Mutant {
    /// All but [`Mutant::None`].
    pub const ALL: [Mutant; 5] = [
        Mutant::ChecksumUnchecked,
        Mutant::GenerationUnchecked,
        Mutant::SequenceUnchecked,
        Mutant::ShortAccepted,
        Mutant::FailureForgotten,
    ];
}

static ACTIVE: AtomicU8 = AtomicU8::new(Mutant::None as u8);

/// Switches a mistake on for the whole process. `false`: this build has none.
pub fn switch(mutant: Mutant) -> bool {
    ACTIVE.store(mutant as u8, Ordering::SeqCst);
    cfg!(debug_assertions)
}

/// Whether this mistake is to be made.
pub(super) fn is(mutant: Mutant) -> bool {
    cfg!(debug_assertions) && ACTIVE.load(Ordering::Relaxed) == mutant as u8
}
