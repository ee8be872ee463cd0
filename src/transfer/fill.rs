//! Whole sections written from outside: at the start of a run, and at resume.
//!
//! Extents of spilled sections go through the slab ring, several in flight, those of the device one
//! by one; homes in host are written where they are. Only while the lanes stand still.

use crossbeam_channel::{Receiver, Sender};

use super::{Tiers, byte_range};
use crate::error::Result;
use crate::host::Lease;
use crate::store::{Completion, ExtentKey};
use crate::tile::{Precision, Section, join_master, split_master};

/// Writes extents into their homes.
pub struct Fill<'a> {
    tiers: &'a Tiers,
    reply: Sender<Completion>,
    done: Receiver<Completion>,
    outstanding: u32,
}

impl<'a> Fill<'a> {
    /// Nothing written yet.
    pub fn new(tiers: &'a Tiers) -> Fill<'a> {
        let (reply, done) = crossbeam_channel::unbounded();
        Fill {
            tiers,
            reply,
            done,
            outstanding: 0,
        }
    }

    /// Writes one extent: `with` gets its bytes, without padding, and must set them all.
    pub fn put(&mut self, key: ExtentKey, with: impl FnOnce(&mut [u8])) -> Result<()> {
        let layer = key.tile.layer;
        let elements = self.tiers.layout(layer).extent_elements(key.extent);
        let width = key.section.element_bytes(self.tiers.precision());
        if let Some(mut home) = self.tiers.home_mut(layer, key.section) {
            with(&mut home.as_mut_slice::<u8>()[byte_range(&elements, width)]);
            return Ok(());
        }
        if let Some(offset) = self.tiers.device_home(layer, key.section) {
            let range = byte_range(&elements, width);
            let mut slab = self.take_slab()?;
            let bytes = &mut slab.as_mut_slice::<u8>()[..range.len()];
            with(bytes);
            self.tiers
                .device
                .copy_in(offset + range.start as u64, bytes);
            return self.tiers.device.check();
        }
        let mut slab = self.take_slab()?;
        let bytes = usize::try_from(self.tiers.extent_bytes(key)).expect("an extent fits");
        with(&mut slab.as_mut_slice::<u8>()[..bytes]);
        self.outstanding += 1;
        self.tiers.write_extent(key, slab, &self.reply)
    }

    fn take_slab(&mut self) -> Result<Lease> {
        loop {
            if let Some(slab) = self.tiers.ring.try_take() {
                return Ok(slab);
            }
            assert!(
                self.outstanding > 0,
                "the ring is this function's while lanes stand still"
            );
            self.reap()?;
        }
    }

    /// Waits for all writes.
    pub fn finish(mut self) -> Result<()> {
        while self.outstanding > 0 {
            self.reap()?;
        }
        Ok(())
    }

    fn reap(&mut self) -> Result<()> {
        let completion = self.tiers.answer(&self.done)?;
        self.outstanding -= 1;
        completion.result
    }
}

impl Tiers {
    /// Every extent of every section, tile by tile.
    pub fn extents(&self) -> impl Iterator<Item = ExtentKey> + '_ {
        self.layouts().iter().flat_map(move |layout| {
            self.sections().flat_map(move |section| {
                (0..layout.extent_count()).map(move |extent| ExtentKey {
                    tile: layout.id,
                    section,
                    extent,
                })
            })
        })
    }

    /// Sets weights and master from `values`, which fills an element range of a tile with f32, and
    /// the moments to zero.
    pub fn initialise(
        &self,
        mut values: impl FnMut(u16, std::ops::Range<u64>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut fill = Fill::new(self);
        let mut master = Vec::new();
        for layout in self.layouts() {
            for extent in 0..layout.extent_count() {
                let elements = layout.extent_elements(extent);
                master.resize((elements.end - elements.start) as usize, 0.0f32);
                values(layout.id.layer, elements, &mut master)?;
                for section in self.sections() {
                    let key = ExtentKey {
                        tile: layout.id,
                        section,
                        extent,
                    };
                    fill.put(key, |bytes| write_master(section, &master, bytes))?;
                }
            }
        }
        fill.finish()
    }

    /// The fp32 master of an element range within one extent of a tile.
    pub fn read_master(&self, layer: u16, extent: u32, out: &mut [f32]) -> Result<()> {
        let layout = self.layout(layer);
        let mut sections: [Vec<u8>; 2] = Default::default();
        for (section, kept) in [Section::Weight, Section::Residual]
            .into_iter()
            .zip(&mut sections)
        {
            if section.element_bytes(self.precision()) > 0 {
                self.read_extent_into(
                    ExtentKey {
                        tile: layout.id,
                        section,
                        extent,
                    },
                    kept,
                )?;
            }
        }
        let [weight, residual] = sections;
        match self.precision() {
            Precision::Bf16 | Precision::Bf16Moments => {
                let pairs = weight.chunks_exact(2).zip(residual.chunks_exact(2));
                for ((hi, lo), value) in pairs.zip(out) {
                    let hi = u16::from_le_bytes([hi[0], hi[1]]);
                    *value = join_master(hi, i16::from_le_bytes([lo[0], lo[1]]));
                }
            }
            Precision::Fp32 => {
                for (bytes, value) in weight.chunks_exact(4).zip(out) {
                    *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
        }
        Ok(())
    }

    /// Copies one extent, without padding, out of its home.
    pub fn read_extent_into(&self, key: ExtentKey, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        let layer = key.tile.layer;
        if let Some(home) = self.home(layer, key.section) {
            let elements = self.layout(layer).extent_elements(key.extent);
            let width = key.section.element_bytes(self.precision());
            out.extend_from_slice(&home.as_slice::<u8>()[byte_range(&elements, width)]);
            return Ok(());
        }
        if let Some(offset) = self.device_home(layer, key.section) {
            let elements = self.layout(layer).extent_elements(key.extent);
            let range = byte_range(&elements, key.section.element_bytes(self.precision()));
            out.resize(range.len(), 0);
            self.device.copy_out(offset + range.start as u64, out);
            return self.device.check();
        }
        let (reply, done) = crossbeam_channel::bounded(1);
        self.read_extent(key, self.ring.take(), &reply)?;
        let completion = self.answer(&done)?;
        completion.result?;
        let bytes = usize::try_from(self.extent_bytes(key)).expect("an extent fits");
        out.extend_from_slice(&completion.slab.as_slice::<u8>()[..bytes]);
        Ok(())
    }
}

/// The bytes of a section of an fp32 master; zero for moments.
fn write_master(section: Section, master: &[f32], bytes: &mut [u8]) {
    let width = bytes.len() / master.len();
    match (section, width) {
        (Section::Weight, 2) => {
            for (value, out) in master.iter().zip(bytes.chunks_exact_mut(2)) {
                out.copy_from_slice(&split_master(*value).0.to_le_bytes());
            }
        }
        (Section::Residual, _) => {
            for (value, out) in master.iter().zip(bytes.chunks_exact_mut(2)) {
                out.copy_from_slice(&split_master(*value).1.to_le_bytes());
            }
        }
        (Section::Weight, _) => {
            for (value, out) in master.iter().zip(bytes.chunks_exact_mut(4)) {
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
        (Section::Moment1 | Section::Moment2, _) => bytes.fill(0),
        (Section::Anchor, _) => unreachable!("an anchor is no section of a tile"),
    }
}
