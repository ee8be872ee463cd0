//! Disks that make one mistake on purpose. The suite's checks must catch each of them: a check that
//! catches none guards nothing.
#![allow(dead_code, reason = "each test file uses a part")]

use std::io;

use terrace::store::disk::{Direction, Disk, Finished, Operation, Waker};
use terrace::store::format::{self, Geometry, Region, Superblock};

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// None: the checks must pass.
    None,
    /// Of each commit's four flushes the one of this number is left out: after the extents, the
    /// manifests, the first and the second half of the superblock copies.
    FlushLeftOut(u64),
    /// Manifests reach the disk only with the flush of the first superblock copies.
    SuperblockBeforeManifest,
    /// The second copy of each manifest is not written.
    OneManifestCopy,
    /// Superblock copies 2 and 3 are never written.
    TwoSuperblockCopies,
    /// What is written to the free region goes to the newest commit's too.
    ActiveRegionOverwritten,
    /// The oldest commit is given up before the next one is whole.
    OldestFreedEarly,
    /// A transfer that moved a part counts as done.
    ShortAccepted,
    /// A failed write counts as done.
    WriteErrorIgnored,
    /// A failed flush counts as done.
    FlushErrorIgnored,
    /// A failed flush is tried again, and its second answer believed.
    FlushRetried,
    /// Before the first commit after an open, the superblock copies are left as they are.
    StaleCopiesLeft,
}

impl Mistake {
    /// All but [`Mistake::None`].
    pub(crate) const ALL: [Mistake; 14] = [
        Mistake::FlushLeftOut(0),
        Mistake::FlushLeftOut(1),
        Mistake::FlushLeftOut(2),
        Mistake::FlushLeftOut(3),
        Mistake::SuperblockBeforeManifest,
        Mistake::OneManifestCopy,
        Mistake::TwoSuperblockCopies,
        Mistake::ActiveRegionOverwritten,
        Mistake::OldestFreedEarly,
        Mistake::ShortAccepted,
        Mistake::WriteErrorIgnored,
        Mistake::FlushErrorIgnored,
        Mistake::FlushRetried,
        Mistake::StaleCopiesLeft,
    ];
}

/// What was last written, to tell a commit's flushes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrote {
    Nothing,
    Extents,
    Manifest,
    Superblock(usize),
}

/// A disk that makes a mistake on its way to the real one.
pub(crate) struct Canary {
    inner: Box<dyn Disk>,
    geometry: Geometry,
    mistake: Mistake,
    wrote: Wrote,
    /// Superblock copies written since the disk was opened count only after the first extent.
    began: bool,
    superblock: Option<Superblock>,
    /// Manifests held back, by offset.
    held: Vec<(u64, Vec<u8>)>,
    /// Answered here, without the real disk.
    done: Vec<Finished>,
    /// Tokens of writes whose answer is for nobody.
    own: Vec<Finished>,
}

/// Token of the canary's own writes.
const OWN: u64 = u64::MAX;

impl Canary {
    /// Wraps a disk of a store of these sizes.
    pub(crate) fn new(inner: Box<dyn Disk>, geometry: Geometry, mistake: Mistake) -> Canary {
        Canary {
            inner,
            geometry,
            mistake,
            wrote: Wrote::Nothing,
            began: false,
            superblock: None,
            held: Vec::new(),
            done: Vec::new(),
            own: Vec::new(),
        }
    }

    fn place(&self, offset: u64) -> Wrote {
        let Some(inside) = offset.checked_sub(format::REGIONS_START) else {
            return Wrote::Superblock((offset / format::SUPERBLOCK_STRIDE) as usize);
        };
        let manifests = format::MANIFEST_COPIES * self.geometry.manifest_bytes_max;
        match inside % self.geometry.region_bytes < manifests {
            true => Wrote::Manifest,
            false => Wrote::Extents,
        }
    }

    /// Notes the newest superblock that is written or read.
    fn look(&mut self, operation: &Operation) {
        if let Wrote::Superblock(copy) = self.place(operation.offset)
            && let Ok(Ok(found)) = Superblock::decode(&operation.slab.as_slice()[..4096], copy)
            && self
                .superblock
                .as_ref()
                .is_none_or(|known| known.sequence < found.sequence)
        {
            self.superblock = Some(found);
        }
    }

    /// Region of the newest commit.
    fn newest(&self) -> Option<u64> {
        let regions = self.superblock.as_ref()?.regions.iter().enumerate();
        let committed = regions.filter_map(|(index, region)| match region {
            Region::Free => None,
            Region::Committed { generation, .. } => Some((*generation, index as u64)),
        });
        committed.max().map(|(_, index)| index)
    }

    /// Writes bytes of the canary's own and waits for it.
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut cutter = terrace::host::HostArena::take(bytes.len() as u64).unwrap();
        let mut slab = cutter.cut(bytes.len().next_multiple_of(4096) as u64);
        slab.as_mut_slice::<u8>()[..bytes.len()].copy_from_slice(bytes);
        // Room for one more: the store fills the disk to its depth.
        while self.inner.in_flight() >= self.inner.depth() {
            self.settle();
        }
        self.inner.start(Operation {
            direction: Direction::Write,
            offset,
            bytes: slab.len(),
            slab,
            token: OWN,
        });
    }

    /// Takes what the real disk finished.
    fn settle(&mut self) {
        let mut finished = Vec::new();
        self.inner.wait(&mut finished);
        for mut done in finished {
            if done.operation.token == OWN {
                self.own.push(done);
                continue;
            }
            if done.operation.direction == Direction::Read {
                self.look(&done.operation);
            } else if self.mistake == Mistake::WriteErrorIgnored {
                done.result = Ok(());
            }
            self.done.push(done);
        }
    }

    fn drop_oldest(&mut self) {
        let Some(mut superblock) = self.superblock.clone() else {
            return;
        };
        let regions = superblock.regions.iter().enumerate();
        let committed = regions.filter_map(|(index, region)| match region {
            Region::Free => None,
            Region::Committed { generation, .. } => Some((*generation, index)),
        });
        let committed: Vec<(u64, usize)> = committed.collect();
        if committed.len() == superblock.keep as usize {
            let (_, oldest) = committed.into_iter().min().expect("keep is at least 1");
            superblock.regions[oldest] = Region::Free;
            for copy in 0..format::SUPERBLOCK_COPIES {
                self.write(format::superblock_offset(copy), &superblock.encode(copy));
            }
        }
    }

    /// Whether the operation goes on to the real disk.
    fn passes(&mut self, operation: &Operation, place: Wrote) -> bool {
        let bytes = || operation.slab.as_slice::<u8>()[..operation.bytes].to_vec();
        match (self.mistake, place) {
            (Mistake::SuperblockBeforeManifest, Wrote::Manifest) => {
                let bytes = bytes();
                self.held.push((operation.offset, bytes));
                false
            }
            (Mistake::OneManifestCopy, Wrote::Manifest) => {
                let inside =
                    (operation.offset - format::REGIONS_START) % self.geometry.region_bytes;
                inside < self.geometry.manifest_bytes_max
            }
            (Mistake::TwoSuperblockCopies, Wrote::Superblock(copy)) => copy < 2,
            (Mistake::StaleCopiesLeft, Wrote::Superblock(_)) => self.began,
            (Mistake::ActiveRegionOverwritten, Wrote::Extents) => {
                if let Some(region) = self.newest() {
                    let inside =
                        (operation.offset - format::REGIONS_START) % self.geometry.region_bytes;
                    let start = format::REGIONS_START + region * self.geometry.region_bytes;
                    let bytes = bytes();
                    self.write(start + inside, &bytes);
                }
                true
            }
            (Mistake::OldestFreedEarly, Wrote::Extents) if self.wrote != Wrote::Extents => {
                self.drop_oldest();
                true
            }
            _ => true,
        }
    }
}

impl Disk for Canary {
    fn depth(&self) -> usize {
        // Room for writes of its own.
        self.inner.depth() - 4
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.done.len()
    }

    fn start(&mut self, mut operation: Operation) {
        if operation.direction == Direction::Read {
            return self.inner.start(operation);
        }
        let place = self.place(operation.offset);
        let passes = self.passes(&operation, place);
        self.wrote = place;
        self.began |= place == Wrote::Extents;
        self.look(&operation);
        if !passes {
            let result = Ok(());
            return self.done.push(Finished { operation, result });
        }
        if self.mistake == Mistake::ShortAccepted && operation.bytes > 4096 {
            // The real disk moves a part; the answer speaks of the whole.
            operation.bytes /= 4096 * 2;
            operation.bytes = operation.bytes.max(1) * 4096;
        }
        self.inner.start(operation);
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        if self.done.is_empty() && self.inner.in_flight() > 0 {
            self.settle();
        }
        finished.append(&mut self.done);
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.inner.in_flight() > 0 {
            self.settle();
        }
        let number = match self.wrote {
            Wrote::Extents => Some(0),
            Wrote::Manifest => Some(1),
            Wrote::Superblock(copy) => Some(2 + copy as u64 / 2),
            Wrote::Nothing => None,
        };
        if matches!(self.mistake, Mistake::FlushLeftOut(left) if Some(left) == number) {
            return Ok(());
        }
        let outcome = self.inner.flush();
        if number == Some(2) && self.mistake == Mistake::SuperblockBeforeManifest {
            for (offset, bytes) in std::mem::take(&mut self.held) {
                self.write(offset, &bytes);
            }
            while self.inner.in_flight() > 0 {
                self.settle();
            }
        }
        match self.mistake {
            Mistake::FlushErrorIgnored => Ok(()),
            Mistake::FlushRetried => outcome.or_else(|_| self.inner.flush()),
            _ => outcome,
        }
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}
