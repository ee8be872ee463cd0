//! Moves tiles one hop at a time, through host: the only room that does.
//!
//! - [`Tiers`] holds what the plan cut: homes, gradient slots and the slab ring in host, the
//!   device, the scratch store. Each home has a lock of its own; the schedule already keeps users
//!   apart, so a lock is never waited for long.
//! - A section that is spilled, or a state of the device, streams extent by extent through slabs; a
//!   slab in flight belongs to the store, or to a thread of [`carriers`], until its completion, and
//!   nobody sees bytes of the store that are not verified.
//! - Queues are bounded by the ring: a transfer waits for a slab, it never takes memory.
//!
//! When a transfer starts is `step`'s to say. The update's own stream over spilled states is
//! [`states`]; [`capture`] copies tiles out for commits.

mod anchors;
pub mod capture;
mod carriers;
pub mod fill;
pub mod states;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use anchors::Anchors;
use carriers::{Carriers, Load};
use crossbeam_channel::{Receiver, Sender};

use crate::device::{Device, Dtype, View};
use crate::error::{Error, Result};
use crate::host::{HostCutter, Lease, Ring};
use crate::plan::{GradientHome, Home, Plan};
use crate::schedule::GradientSlot;
use crate::stats::{Hop, Stats};
use crate::store::disk::Direction;
use crate::store::{Completion, ExtentKey, Request, Scratch, StoredSection};
use crate::tile::{Precision, SECTION_COUNT, Section, TileLayout};

/// Bytes of embedding rows that are gathered at once, at least one row.
const GATHER_BYTES: usize = 1 << 20;
/// Slabs that one promotion or gather keeps in flight at most.
const STREAM_DEPTH: usize = 4;

/// Every tier's memory of a run.
pub struct Tiers {
    /// The device.
    pub device: Arc<Device>,
    /// Ring of slabs that extents travel in.
    pub ring: Ring,
    /// Ring of slabs that commits are written through; absent where checkpoints are off.
    pub commit_ring: Option<Ring>,
    /// Scratch store; absent when nothing is spilled.
    pub store: Option<Scratch>,
    /// Counters.
    pub stats: Arc<Stats>,
    /// Tests set it: places are filled with NaN once they are released.
    pub poison: bool,
    precision: Precision,
    layouts: Vec<TileLayout>,
    homes: Vec<[Option<RwLock<Lease>>; SECTION_COUNT]>,
    spilled: Vec<[bool; SECTION_COUNT]>,
    /// In order.
    present: Vec<Section>,
    /// By layer and section: where it is on the device, if it lives there.
    device_homes: Vec<[Option<u64>; SECTION_COUNT]>,
    carriers: Carriers,
    /// Tiles' own gradient slots, by layer.
    own_gradients: Vec<Option<Mutex<Lease>>>,
    /// Two for blocks and the wide one, where the plan has them.
    shared_gradients: [Option<Mutex<Lease>>; 3],
    weight_slots: [Option<Mutex<Lease>>; 2],
    /// Anchors that leave the device.
    anchors: Anchors,
}

impl Tiers {
    /// Cuts the host arena as the plan says. `store` must hold [`stored`] of the plan.
    /// [`Error::Io`](crate::Error::Io) if a thread cannot be started.
    pub fn new(
        plan: &Plan,
        device: Device,
        mut cutter: HostCutter,
        ring: Ring,
        store: Option<Scratch>,
        stats: Stats,
    ) -> Result<Tiers> {
        assert_eq!(
            plan.spills(),
            store.is_some(),
            "a store exactly when something is spilled"
        );
        let (device, stats) = (Arc::new(device), Arc::new(stats));
        if let Some(store) = &store {
            store.count_into(&stats);
        }
        let commit_ring = (plan.host.commit_slabs > 0).then(|| {
            let slabs = usize::try_from(plan.host.commit_slabs).expect("slabs are capped");
            cutter.cut_ring(slabs, plan.host.slab_bytes)
        });
        let mut homes = Vec::new();
        let mut spilled = Vec::new();
        for tile in &plan.tiles {
            let mut cut = |section: Section| match tile.homes[section as usize] {
                Some(Home::Host) => {
                    let bytes = tile.layout.section_bytes(section, plan.precision);
                    Some(RwLock::new(cutter.cut(bytes)))
                }
                Some(Home::Device | Home::Store) | None => None,
            };
            homes.push(Section::ALL.map(&mut cut));
            spilled.push(tile.homes.map(|home| home == Some(Home::Store)));
        }
        let mut slot = |bytes: u64| (bytes > 0).then(|| Mutex::new(cutter.cut(bytes)));
        let own = |tile: &crate::plan::TilePlan| match tile.gradient {
            GradientHome::Host => tile.layout.elements * plan.gradient_bytes,
            GradientHome::Shared | GradientHome::Device => 0,
        };
        let own_gradients = plan.tiles.iter().map(|tile| slot(own(tile))).collect();
        let host = &plan.host;
        let shared = [host.block_slot, host.block_slot, host.wide_slot];
        let shared_gradients = shared.map(&mut slot);
        let weight_slots = [host.weight_slot; 2].map(&mut slot);
        let anchors = Anchors::cut(plan, &mut cutter);
        let carriers = match plan.states_on_device() {
            true => Carriers::start(&device, &stats)?,
            false => Carriers::default(),
        };
        Ok(Tiers {
            device,
            ring,
            commit_ring,
            store,
            stats,
            poison: false,
            precision: plan.precision,
            layouts: plan.tiles.iter().map(|tile| tile.layout.clone()).collect(),
            homes,
            spilled,
            present: plan.sections().collect(),
            device_homes: plan.map.homes.clone(),
            carriers,
            own_gradients,
            shared_gradients,
            weight_slots,
            anchors,
        })
    }

    /// Layout of a layer's tile.
    pub fn layout(&self, layer: u16) -> &TileLayout {
        &self.layouts[usize::from(layer)]
    }

    /// Layouts of all tiles.
    pub fn layouts(&self) -> &[TileLayout] {
        &self.layouts
    }

    /// Format of weights.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Sections that have a home, in order.
    pub fn sections(&self) -> impl Iterator<Item = Section> + '_ {
        self.present.iter().copied()
    }

    /// Whether a section lives in the store.
    pub fn is_spilled(&self, layer: u16, section: Section) -> bool {
        self.spilled[usize::from(layer)][section as usize]
    }

    /// Whether a section passes through the ring for its update: it is spilled, or a state that
    /// lives on the device.
    pub fn is_streamed(&self, layer: u16, section: Section) -> bool {
        let on_device = self.device_home(layer, section).is_some();
        self.is_spilled(layer, section) || on_device && section != Section::Weight
    }

    /// Whether others than the updates take slabs in a step: for weights or anchors of the store.
    fn ring_is_shared(&self) -> bool {
        let weight = |spilled: &[bool; SECTION_COUNT]| spilled[Section::Weight as usize];
        self.spilled.iter().any(weight) || self.anchors.are_stored()
    }

    /// A section's home in host, to read; `None` if it lives elsewhere.
    pub fn home(&self, layer: u16, section: Section) -> Option<RwLockReadGuard<'_, Lease>> {
        let home = self.homes[usize::from(layer)][section as usize].as_ref()?;
        Some(home.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// A section's home in host, to write; `None` if it lives elsewhere.
    pub fn home_mut(&self, layer: u16, section: Section) -> Option<RwLockWriteGuard<'_, Lease>> {
        let home = self.homes[usize::from(layer)][section as usize].as_ref()?;
        Some(home.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// The place of a waiting gradient.
    pub fn gradient(&self, slot: GradientSlot) -> MutexGuard<'_, Lease> {
        let place = match slot {
            GradientSlot::Tile(layer) => &self.own_gradients[usize::from(layer)],
            GradientSlot::Block(index) => &self.shared_gradients[index as usize],
            GradientSlot::Wide => &self.shared_gradients[2],
        };
        let place = place
            .as_ref()
            .expect("the plan has every slot that its schedule names");
        place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a weight section of the device while it is updated.
    pub fn weight_slot(&self, slot: u32) -> MutexGuard<'_, Lease> {
        let place = self.weight_slots[slot as usize].as_ref();
        let place = place.expect("the plan has weight slots where weights live on the device");
        place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Byte offset in the device's arena of a section that lives there.
    pub fn device_home(&self, layer: u16, section: Section) -> Option<u64> {
        self.device_homes[usize::from(layer)][section as usize]
    }

    /// The scratch store.
    pub fn scratch(&self) -> &Scratch {
        self.store.as_ref().expect("a spilled section has a store")
    }

    /// The next completion, or the store's failure where none comes: a thread of it that panicked
    /// answers nobody.
    fn answer(&self, done: &Receiver<Completion>) -> Result<Completion> {
        const POLL: Duration = Duration::from_millis(100);
        loop {
            match (done.recv_timeout(POLL), self.scratch().failure()) {
                (Ok(completion), _) => return Ok(completion),
                (Err(_), Some(error)) => return Err(error),
                (Err(_), None) => {}
            }
        }
    }

    /// The failure of who carries extents, where nobody answers any more.
    fn carriers_failure(&self) -> Option<Error> {
        let of_store = self.store.as_ref().and_then(Scratch::failure);
        of_store.or_else(|| self.carriers.failure())
    }

    /// Starts the read of an extent of the store, or of the device, into a slab.
    pub fn read_extent(
        &self,
        key: ExtentKey,
        slab: Lease,
        reply: &Sender<Completion>,
    ) -> Result<()> {
        self.submit(Direction::Read, key, slab, reply)
    }

    /// Starts the write of an extent of the store, or of the device, from a slab.
    pub fn write_extent(
        &self,
        key: ExtentKey,
        slab: Lease,
        reply: &Sender<Completion>,
    ) -> Result<()> {
        self.submit(Direction::Write, key, slab, reply)
    }

    fn submit(
        &self,
        kind: Direction,
        key: ExtentKey,
        slab: Lease,
        reply: &Sender<Completion>,
    ) -> Result<()> {
        let reply = reply.clone();
        if let Some(home) = self.home_on_device(key) {
            let elements = self.layout(key.tile.layer).extent_elements(key.extent);
            let range = byte_range(&elements, key.section.element_bytes(self.precision));
            return self.carriers.submit(Load {
                kind,
                key,
                offset: home + range.start as u64,
                bytes: range.len(),
                slab,
                reply,
            });
        }
        let bytes = self.scratch().payload_bytes(key);
        self.scratch().submit(Request {
            kind,
            key,
            bytes,
            slab,
            reply,
        })
    }

    fn home_on_device(&self, key: ExtentKey) -> Option<u64> {
        match key.section {
            Section::Anchor => None,
            section => self.device_home(key.tile.layer, section),
        }
    }

    /// Bytes of an extent, without padding.
    pub fn extent_bytes(&self, key: ExtentKey) -> u64 {
        let elements = self.layout(key.tile.layer).extent_elements(key.extent);
        (elements.end - elements.start) * key.section.element_bytes(self.precision)
    }

    /// Calls `with` for each extent of a section in order, with its bytes: from the home in host,
    /// or read from the store with a few slabs in flight.
    pub fn stream_section(
        &self,
        layer: u16,
        section: Section,
        mut with: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let layout = self.layout(layer);
        let width = section.element_bytes(self.precision);
        if let Some(home) = self.home(layer, section) {
            let bytes = home.as_slice::<u8>();
            for extent in 0..layout.extent_count() {
                let elements = layout.extent_elements(extent);
                with(extent, &bytes[byte_range(&elements, width)])?;
            }
            return Ok(());
        }
        if let Some(offset) = self.device_home(layer, section) {
            let mut slab = self.ring.take();
            for extent in 0..layout.extent_count() {
                let range = byte_range(&layout.extent_elements(extent), width);
                let bytes = &mut slab.as_mut_slice::<u8>()[..range.len()];
                self.device.copy_out(offset + range.start as u64, bytes);
                self.device.check()?;
                with(extent, bytes)?;
            }
            return Ok(());
        }
        let key = |extent| ExtentKey {
            tile: layout.id,
            section,
            extent,
        };
        self.stream_spilled(layout.extent_count(), &key, &mut with)
    }

    /// Calls `with` for each of `count` extents of the store in order, with its bytes.
    fn stream_spilled(
        &self,
        count: u32,
        key: &dyn Fn(u32) -> ExtentKey,
        with: &mut dyn FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (reply, done) = crossbeam_channel::unbounded();
        let (mut asked, mut given) = (0, 0);
        let mut early: Vec<(u32, Lease)> = Vec::with_capacity(STREAM_DEPTH);
        while given < count {
            while asked < count && ((asked - given) as usize) < STREAM_DEPTH {
                let slab = match self.ring.try_take() {
                    Some(slab) => slab,
                    // With nothing in flight, wait: others give their slabs back.
                    None if asked == given => self.ring.take(),
                    None => break,
                };
                self.read_extent(key(asked), slab, &reply)?;
                asked += 1;
            }
            let completion = self.answer(&done)?;
            completion.result?;
            early.push((completion.key.extent, completion.slab));
            while let Some(at) = early.iter().position(|(extent, _)| *extent == given) {
                let (extent, slab) = early.swap_remove(at);
                let bytes = self.scratch().payload_bytes(key(extent));
                with(extent, &slab.as_slice::<u8>()[..bytes])?;
                given += 1;
            }
        }
        Ok(())
    }

    /// Promotes a layer's weight section to the device, at byte `offset` of its arena.
    pub fn promote_weight(&self, layer: u16, offset: u64) -> Result<()> {
        let width = Section::Weight.element_bytes(self.precision);
        if let Some(home) = self.home(layer, Section::Weight) {
            // In one piece: a copy over PCIe is at its best rate from 16 MiB on.
            let bytes = byte_range(&(0..self.layout(layer).elements), width);
            let bytes = &home.as_slice::<u8>()[bytes];
            self.device.copy_in(offset, bytes);
            self.stats.crossed(Hop::Promote, bytes.len() as u64);
            return Ok(());
        }
        self.stream_section(layer, Section::Weight, |extent, bytes| {
            let start = self.layout(layer).extent_elements(extent).start * width;
            self.device.copy_in(offset + start, bytes);
            self.stats.crossed(Hop::Promote, bytes.len() as u64);
            Ok(())
        })
    }

    /// Copies the embedding rows of `tokens` to `out`, act `[T, H]`. Only rows that are named
    /// cross.
    pub fn gather_rows(&self, tokens: &[u32], hidden: u64, out: View) -> Result<()> {
        let width = Section::Weight.element_bytes(self.precision);
        let row_bytes = hidden * width;
        let dtype = match self.precision {
            Precision::Bf16 | Precision::Bf16Moments => Dtype::Bf16,
            Precision::Fp32 => Dtype::F32,
        };
        if let Some(home) = self.home(0, Section::Weight) {
            let table = &home.as_slice::<u8>()[byte_range(&(0..self.layout(0).elements), width)];
            if self
                .device
                .gather_host_rows(dtype, table, tokens, out, hidden)
            {
                self.stats
                    .crossed(Hop::Promote, tokens.len() as u64 * row_bytes);
                return Ok(());
            }
        }
        let all_bytes = tokens.len() as u64 * row_bytes;
        let row_bytes = usize::try_from(row_bytes).expect("a row fits");
        // What a piece takes of memory is in no plan.
        let at_once = (GATHER_BYTES / row_bytes).max(1);
        let piece = |index: usize, rows: &[u8]| {
            let (start, count) = (index * at_once, rows.len() / row_bytes);
            let out = out.slice(start as u64 * hidden, count as u64 * hidden);
            self.device.copy_converted_in(dtype, rows, out);
        };
        self.stats.crossed(Hop::Promote, all_bytes);
        if let Some(home) = self.home(0, Section::Weight) {
            let table = home.as_slice::<u8>();
            let mut rows = Vec::with_capacity(at_once * row_bytes);
            for (index, tokens) in tokens.chunks(at_once).enumerate() {
                rows.clear();
                for token in tokens {
                    let start = *token as usize * row_bytes;
                    rows.extend_from_slice(&table[start..start + row_bytes]);
                }
                piece(index, &rows);
            }
            return Ok(());
        }
        let mut rows = vec![0u8; usize::try_from(all_bytes).expect("rows fit memory")];
        self.stream_section(0, Section::Weight, |extent, bytes| {
            let first = self.layout(0).extent_elements(extent).start * width;
            let last = first + bytes.len() as u64;
            for (token, row) in tokens.iter().zip(rows.chunks_exact_mut(row_bytes)) {
                let start = u64::from(*token) * row_bytes as u64;
                let (from, to) = (start.max(first), (start + row_bytes as u64).min(last));
                if from < to {
                    let target = (from - start) as usize..(to - start) as usize;
                    row[target]
                        .copy_from_slice(&bytes[(from - first) as usize..(to - first) as usize]);
                }
            }
            Ok(())
        })?;
        for (index, rows) in rows.chunks(at_once * row_bytes).enumerate() {
            piece(index, rows);
        }
        Ok(())
    }

    /// Demotes a weight section that lives on the device to a slot for its update.
    pub fn demote_weight(&self, layer: u16, slot: u32) {
        let (offset, bytes) = self.device_weight(layer);
        let mut place = self.weight_slot(slot);
        self.device
            .copy_out(offset, &mut place.as_mut_slice::<u8>()[..bytes]);
        self.stats.crossed(Hop::Demote, bytes as u64);
    }

    /// Promotes an updated weight section from its slot to its home on the device.
    pub fn return_weight(&self, layer: u16, slot: u32) {
        let (offset, bytes) = self.device_weight(layer);
        let place = self.weight_slot(slot);
        self.device
            .copy_in(offset, &place.as_slice::<u8>()[..bytes]);
        self.stats.crossed(Hop::Promote, bytes as u64);
    }

    fn device_weight(&self, layer: u16) -> (u64, usize) {
        let offset = self.device_home(layer, Section::Weight);
        let bytes = self
            .layout(layer)
            .section_bytes(Section::Weight, self.precision);
        (
            offset.expect("the schedule moves weights that live on the device"),
            usize::try_from(bytes).expect("a section fits memory"),
        )
    }

    /// Demotes a finished gradient to where it waits.
    pub fn demote_gradient(&self, gradient: View, slot: GradientSlot) {
        let mut place = self.gradient(slot);
        let bytes = usize::try_from(gradient.bytes()).expect("a gradient fits its slot");
        self.device
            .copy_out(gradient.offset, &mut place.as_mut_slice::<u8>()[..bytes]);
        self.stats.crossed(Hop::Demote, gradient.bytes());
    }
}

/// What the plan has in the store: spilled sections of tiles, then anchors.
pub fn stored(plan: &Plan) -> Vec<StoredSection> {
    let spilled = plan.tiles.iter().flat_map(|tile| {
        let section = |section| StoredSection::of(&tile.layout, section, plan.precision);
        tile.spilled().map(section)
    });
    spilled.chain(anchors::stored(plan)).collect()
}

/// The bytes of an element range of `width` bytes each.
pub fn byte_range(elements: &std::ops::Range<u64>, width: u64) -> std::ops::Range<usize> {
    let byte = |element: u64| usize::try_from(element * width).expect("a section fits memory");
    byte(elements.start)..byte(elements.end)
}
