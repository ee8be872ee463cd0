//! The update's stream: extents of each tile that are spilled, or live on the device, read ahead,
//! updated, written behind.
//!
//! - Reads, arithmetic and writes of neighbouring spans go on at once, over the slab ring.
//! - A span is one extent of every section. All its slabs are taken before any of the next span's,
//!   so a ring of one span's slabs is enough to go on.
//! - Read-ahead crosses from tile to tile, but never reads an extent whose write is in flight.
//! - A tile is settled when the last of its writes has completed.
//!
//! The arithmetic is the caller's.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::Tiers;
use crate::error::Result;
use crate::host::Lease;
use crate::stats::Wait;
use crate::store::disk::Direction;
use crate::store::{Completion, ExtentKey};
use crate::tile::{SECTION_COUNT, Section};

/// Slabs left while reading ahead to those who move weights and anchors of the store: without one
/// they could wait for an update that in turn waits for them.
const SLABS_FOR_OTHERS: usize = 4;
/// How long to wait for a completion before looking at the ring again.
const RING_POLL: Duration = Duration::from_millis(1);

/// Slabs of a span's sections that pass through the ring, by section.
pub type SpanSlabs = [Option<Lease>; SECTION_COUNT];

struct Span {
    layer: u16,
    extent: u32,
    slabs: SpanSlabs,
    missing: usize,
}

/// The stream of a run; it lives on the update lane.
pub struct StateStream<'a> {
    tiers: &'a Tiers,
    /// Slabs left to others while reading ahead.
    for_others: usize,
    /// Spans that are to be read, in the order of updates.
    ahead: VecDeque<(u16, u32)>,
    /// Spans whose reads have begun.
    reading: VecDeque<Span>,
    writing: HashSet<ExtentKey>,
    /// Writes in flight by layer.
    unsettled: Vec<u32>,
    reply: Sender<Completion>,
    done: Receiver<Completion>,
}

impl<'a> StateStream<'a> {
    /// An idle stream.
    pub fn new(tiers: &'a Tiers) -> StateStream<'a> {
        let (reply, done) = crossbeam_channel::unbounded();
        StateStream {
            tiers,
            for_others: match tiers.ring_is_shared() {
                true => SLABS_FOR_OTHERS,
                false => 0,
            },
            ahead: VecDeque::new(),
            reading: VecDeque::new(),
            writing: HashSet::new(),
            unsettled: vec![0; tiers.layouts().len()],
            reply,
            done,
        }
    }

    /// Names tiles that will be updated, in that order; their spans are read ahead.
    pub fn announce(&mut self, layers: impl Iterator<Item = u16>) {
        for layer in layers {
            if self.streamed(layer).next().is_some() {
                let extents = 0..self.tiers.layout(layer).extent_count();
                self.ahead.extend(extents.map(|extent| (layer, extent)));
            }
        }
    }

    /// Reads ahead as far as free slabs allow.
    pub fn advance(&mut self) -> Result<()> {
        self.read_on(self.for_others)
    }

    fn read_on(&mut self, spare: usize) -> Result<()> {
        while let Some(&(layer, extent)) = self.ahead.front() {
            let keys = self.keys(layer, extent);
            // Only a span that is wanted this instant may take the last slabs.
            let spare = if self.reading.is_empty() {
                spare
            } else {
                self.for_others
            };
            let blocked = keys.iter().any(|key| self.writing.contains(key));
            if blocked || self.tiers.ring.free_count() < keys.len() + spare {
                break;
            }
            let slabs: Vec<Lease> = keys
                .iter()
                .map_while(|_| self.tiers.ring.try_take())
                .collect();
            if slabs.len() < keys.len() {
                break;
            }
            self.ahead.pop_front();
            let missing = keys.len();
            self.reading.push_back(Span {
                layer,
                extent,
                slabs: Default::default(),
                missing,
            });
            for (key, slab) in keys.into_iter().zip(slabs) {
                self.tiers.read_extent(key, slab, &self.reply)?;
            }
        }
        Ok(())
    }

    /// The slabs of a span that was announced, once they are read: spans come in announced order.
    /// A span of a tile that is at home in host has none.
    pub fn take(&mut self, layer: u16, extent: u32) -> Result<SpanSlabs> {
        if self.streamed(layer).next().is_none() {
            return Ok(SpanSlabs::default());
        }
        let started = Instant::now();
        self.read_on(0)?;
        while self.reading.front().is_none_or(|span| span.missing > 0) {
            self.wait()?;
            self.read_on(0)?;
        }
        self.tiers
            .stats
            .waited(Wait::UpdateForStore, started.elapsed());
        let span = self.reading.pop_front().expect("the loop above filled it");
        assert_eq!(
            (span.layer, span.extent),
            (layer, extent),
            "spans come as announced"
        );
        Ok(span.slabs)
    }

    /// Writes a span back.
    pub fn put(&mut self, layer: u16, extent: u32, slabs: SpanSlabs) -> Result<()> {
        for (section, slab) in Section::ALL.into_iter().zip(slabs) {
            let Some(slab) = slab else { continue };
            let key = ExtentKey {
                tile: self.tiers.layout(layer).id,
                section,
                extent,
            };
            self.writing.insert(key);
            self.unsettled[usize::from(layer)] += 1;
            self.tiers.write_extent(key, slab, &self.reply)?;
        }
        while let Ok(completion) = self.done.try_recv() {
            self.complete(completion)?;
        }
        self.advance()
    }

    /// Whether every write of the layer has completed.
    pub fn is_settled(&self, layer: u16) -> bool {
        self.unsettled[usize::from(layer)] == 0
    }

    /// Waits a little for a completion, and reads on.
    pub fn wait(&mut self) -> Result<()> {
        match self.done.recv_timeout(RING_POLL) {
            Ok(completion) => self.complete(completion)?,
            // A thread that panicked answers nobody.
            Err(_) => {
                if let Some(error) = self.tiers.carriers_failure() {
                    return Err(error);
                }
            }
        }
        self.advance()
    }

    fn streamed(&self, layer: u16) -> impl Iterator<Item = Section> + '_ {
        Section::ALL
            .into_iter()
            .filter(move |section| self.tiers.is_streamed(layer, *section))
    }

    fn keys(&self, layer: u16, extent: u32) -> Vec<ExtentKey> {
        let tile = self.tiers.layout(layer).id;
        self.streamed(layer)
            .map(move |section| ExtentKey {
                tile,
                section,
                extent,
            })
            .collect()
    }

    fn complete(&mut self, completion: Completion) -> Result<()> {
        let Completion {
            key,
            kind,
            slab,
            result,
        } = completion;
        result?;
        match kind {
            Direction::Write => {
                assert!(self.writing.remove(&key), "a write completes once");
                self.unsettled[usize::from(key.tile.layer)] -= 1;
            }
            Direction::Read => {
                let span = self
                    .reading
                    .iter_mut()
                    .find(|span| (span.layer, span.extent) == (key.tile.layer, key.extent))
                    .expect("a read belongs to a span");
                span.slabs[key.section as usize] = Some(slab);
                span.missing -= 1;
            }
        }
        Ok(())
    }
}
