//! Compressed extents of checkpoints: bytes shuffled by element width, then one zstd frame.
//!
//! - In place: an extent's slab holds its payload before and its stored form after, or the other
//!   way round. A coder has one buffer of an extent's size; nothing else is taken.
//! - A form that does not save a page is not kept: the payload is back in the slab, stored plain.
//! - Decoding writes at most the payload's length, which its manifest fixes: what a frame claims of
//!   itself takes no memory.
//! - The same payload, level and version of zstd give the same bytes.
//!
//! Threads around it are `workers`'; checksums are taken of the stored form, by `engine`.

use std::io;

use crossbeam_channel::Sender;

use super::engine::{Handle, Order};
use super::format::Stored;
use super::reader::{Outcome, Tag};
use super::workers::Workers;
use crate::tile::{EXTENT_BYTES_MAX, PAGE_BYTES};

/// Highest level of zstd that is offered: those above take far more memory.
pub const LEVEL_MAX: u64 = 19;
/// Threads that code: enough for the rate of a fast drive at low levels.
const THREADS_MAX: usize = 4;
const PAGE: usize = PAGE_BYTES as usize;

/// Groups the bytes of elements: all first bytes, then all second ones. Bytes after the last whole
/// element stay at the end.
fn shuffle(from: &[u8], width: usize, to: &mut [u8]) {
    let count = from.len() / width;
    for (place, plane) in to.chunks_exact_mut(count.max(1)).take(width).enumerate() {
        for (element, byte) in from.chunks_exact(width).zip(plane) {
            *byte = element[place];
        }
    }
    to[count * width..].copy_from_slice(&from[count * width..]);
}

/// The inverse of [`shuffle`].
fn unshuffle(from: &[u8], width: usize, to: &mut [u8]) {
    let count = from.len() / width;
    for (place, plane) in from.chunks_exact(count.max(1)).take(width).enumerate() {
        for (element, byte) in to.chunks_exact_mut(width).zip(plane) {
            element[place] = *byte;
        }
    }
    to[count * width..].copy_from_slice(&from[count * width..]);
}

/// Codes extents, one at a time, in one buffer of its own.
pub struct Coder {
    staging: Vec<u8>,
    compressor: Option<(i32, zstd::bulk::Compressor<'static>)>,
    decompressor: zstd::bulk::Decompressor<'static>,
}

impl Coder {
    /// A coder for extents of any size.
    ///
    /// # Errors
    /// If memory is refused.
    pub fn new() -> io::Result<Coder> {
        Ok(Coder {
            staging: vec![0; EXTENT_BYTES_MAX as usize],
            compressor: None,
            decompressor: zstd::bulk::Decompressor::new()?,
        })
    }

    /// Turns the payload at the beginning of `slab` into its stored form, or leaves it.
    /// `element_bytes` is 1 to 4, `level` 1 to 19.
    ///
    /// # Errors
    /// If zstd refuses for another reason than space; the slab holds the payload then too.
    ///
    /// # Panics
    /// If the payload is longer than the slab or an extent.
    pub fn encode(
        &mut self,
        slab: &mut [u8],
        payload: usize,
        element_bytes: usize,
        level: i32,
    ) -> io::Result<Stored> {
        let staging = &mut self.staging[..payload];
        let room = payload.next_multiple_of(PAGE) - PAGE;
        if room == 0 {
            return Ok(Stored::Plain);
        }
        shuffle(&slab[..payload], element_bytes, staging);
        let compressor = match &mut self.compressor {
            Some((of, compressor)) if *of == level => compressor,
            other => &mut other.insert((level, zstd::bulk::Compressor::new(level)?)).1,
        };
        // Its only refusal of a valid call is that the result does not fit.
        match compressor.compress_to_buffer(&*staging, &mut slab[..room]) {
            Ok(bytes) => Ok(Stored::Zstd {
                bytes: u32::try_from(bytes).expect("an extent is at most 4 MiB"),
            }),
            Err(_) => {
                unshuffle(staging, element_bytes, &mut slab[..payload]);
                Ok(Stored::Plain)
            }
        }
    }

    /// Turns `stored` bytes at the beginning of `slab` back into a payload of exactly `payload`
    /// bytes, with zeros up to a page.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if they are not one frame of that length.
    ///
    /// # Panics
    /// If either is longer than the slab or an extent.
    pub fn decode(
        &mut self,
        slab: &mut [u8],
        stored: usize,
        payload: usize,
        element_bytes: usize,
    ) -> io::Result<()> {
        let staging = &mut self.staging[..payload];
        let refused = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let length = self
            .decompressor
            .decompress_to_buffer(&slab[..stored], staging)
            .map_err(|error| refused(format!("zstd: {error}")))?;
        if length != payload {
            return Err(refused(format!("zstd: {length} bytes, expected {payload}")));
        }
        let padded = payload.next_multiple_of(PAGE);
        unshuffle(staging, element_bytes, &mut slab[..payload]);
        slab[payload..padded].fill(0);
        Ok(())
    }
}

/// What a read needs to be decoded before its owner sees it.
#[derive(Clone, Copy)]
pub(super) struct Decoding {
    /// Bytes of the frame.
    pub(super) stored: usize,
    /// Bytes of the payload.
    pub(super) payload: usize,
    pub(super) element_bytes: usize,
    /// Of the padded stored bytes: others are not decoded.
    pub(super) checksum: u128,
}

/// Work for a coder's thread.
pub(super) enum Job {
    /// Encode the order's slab, then hand it to the disk.
    Encode {
        order: Order<Tag>,
        element_bytes: usize,
        level: i32,
    },
    /// Decode the outcome's slab, then answer.
    Decode {
        outcome: Outcome,
        decoding: Decoding,
        reply: Sender<Outcome>,
    },
}

/// Starts the threads of a store if they are not there.
pub(super) fn start(workers: &Workers<Job>, disk: &Handle<Tag>) -> io::Result<()> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    workers.start(count.min(THREADS_MAX), || {
        let (disk, mut coder) = (disk.clone(), Coder::new()?);
        Ok(move |job| work_on(job, &disk, &mut coder))
    })
}

fn work_on(job: Job, disk: &Handle<Tag>, coder: &mut Coder) {
    match job {
        Job::Encode {
            mut order,
            element_bytes,
            level,
        } => {
            let slab = order.slab.as_mut_slice::<u8>();
            match coder.encode(slab, order.payload, element_bytes, level) {
                Ok(stored) => {
                    if let Stored::Zstd { bytes } = stored {
                        order.payload = bytes as usize;
                        order.bytes = order.payload.next_multiple_of(PAGE);
                        order.tag.stored = stored;
                    }
                    let (number, reply) = (order.tag.number, order.tag.reply.clone());
                    if disk.submit(order).is_err() {
                        refuse(
                            number,
                            &reply,
                            io::Error::other("the store's thread has ended"),
                        );
                    }
                }
                Err(error) => refuse(order.tag.number, &order.tag.reply, error),
            }
        }
        Job::Decode {
            mut outcome,
            decoding,
            reply,
        } => {
            if let Some(slab) = &mut outcome.slab {
                outcome.result = coder.decode(
                    slab.as_mut_slice(),
                    decoding.stored,
                    decoding.payload,
                    decoding.element_bytes,
                );
            }
            reply.send(outcome).ok();
        }
    }
}

fn refuse(number: usize, reply: &Sender<Outcome>, error: io::Error) {
    let outcome = Outcome {
        number,
        slab: None,
        checksum: 0,
        stored: Stored::Plain,
        result: Err(error),
    };
    reply.send(outcome).ok();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sim::mix;

    fn values(count: usize, seed: u64) -> Vec<u8> {
        let value = |index| {
            let random = mix(seed ^ mix(index as u64));
            ((random % 2001) as f32 - 1000.0) * 1e-6
        };
        (0..count)
            .flat_map(|index| f32::to_le_bytes(value(index)))
            .collect()
    }

    #[test]
    fn every_length_and_width_comes_back_or_stays_plain() {
        let mut coder = Coder::new().unwrap();
        let mut kinds = [0, 0];
        for length in [
            1usize,
            2,
            3,
            4095,
            4096,
            4097,
            8192,
            12289,
            100_000,
            1 << 22,
        ] {
            for width in 1..=4 {
                let random: Vec<u8> = (0..length).map(|i| mix(i as u64) as u8).collect();
                for payload in [values(length.div_ceil(4), 1)[..length].to_vec(), random] {
                    let mut slab = payload.clone();
                    slab.resize(length.next_multiple_of(PAGE), 0xee);
                    let stored = coder.encode(&mut slab, length, width, 1).unwrap();
                    if let Stored::Zstd { bytes } = stored {
                        let bytes = bytes as usize;
                        assert!(bytes.next_multiple_of(PAGE) < slab.len(), "saves a page");
                        let again = slab[..bytes].to_vec();
                        let mut other = payload.clone();
                        other.resize(slab.len(), 1);
                        Coder::new()
                            .unwrap()
                            .encode(&mut other, length, width, 1)
                            .unwrap();
                        assert!(other[..bytes] == again, "the same bytes again");
                        coder.decode(&mut slab, bytes, length, width).unwrap();
                        assert!(slab[length..].iter().all(|byte| *byte == 0));
                        kinds[1] += 1;
                    } else {
                        kinds[0] += 1;
                    }
                    assert!(slab[..length] == payload, "{length} {width}");
                }
            }
        }
        assert!(kinds[0] > 40 && kinds[1] > 10, "{kinds:?}");
    }

    /// A frame of other lengths than the manifest's, cut short, or not a frame: an error, and never
    /// more memory than the payload's.
    #[test]
    fn a_frame_that_is_not_the_payload_is_refused() {
        let mut coder = Coder::new().unwrap();
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
        let right = zstd::bulk::compress(&vec![7; 8192], 1).unwrap();
        let short = &right[..right.len() - 1];
        for (frame, payload) in [
            (&bomb[..], 8192),
            (&right, 8191),
            (&right, 8193),
            (short, 8192),
            (&[0; 100], 8192),
            (&[], 8192),
        ] {
            let mut slab = vec![0; 16384];
            slab[..frame.len()].copy_from_slice(frame);
            let refused = coder
                .decode(&mut slab, frame.len(), payload, 4)
                .unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{refused}");
        }
        let mut state = 1;
        for _ in 0..2000 {
            let mut slab = vec![0; 16384];
            slab[..right.len()].copy_from_slice(&right);
            state = mix(state);
            slab[state as usize % right.len()] ^= 1 << (state >> 60 & 7);
            coder.decode(&mut slab, right.len(), 8192, 4).ok();
        }
    }
}
