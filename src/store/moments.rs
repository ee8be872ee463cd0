//! Moments on their way to the scratch store and back: sign and exponent compressed, the rest as it
//! is.
//!
//! - The last byte of a little-endian f32 or bf16 is its sign and seven bits of its exponent.
//!   Within an extent they are few values; the bits below them are noise. So the last bytes become
//!   one zstd frame behind the others, which move together: `low bytes of all elements, frame`.
//! - The frame has no matches, only literals in zstd's Huffman code: matches in a few values that
//!   come in no order save nothing, and looking for them takes most of a level's time.
//! - In place: a coder has one buffer of an extent's size. What would not save a page is left.
//! - Decoding checks all that it is told, and writes at most the payload and its padding.
//!
//! Stored forms live as long as the process: they are in no file's format. Checksums are taken of
//! them, by `engine`, and compared before they are decoded.

use std::io;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch, Strategy};

use crate::host::Lease;
use crate::tile::{PAGE_BYTES, Section};

const PAGE: usize = PAGE_BYTES as usize;
/// Elements that are taken apart or joined at once.
const BLOCK: usize = 32;

/// Whether extents of a section with elements of that size can be coded.
pub(super) fn takes(section: Section, element_bytes: u64) -> bool {
    section.is_moment() && matches!(element_bytes, 2 | 4)
}

/// Codes extents of moments, one at a time.
pub struct MomentCoder {
    staging: Lease,
    compressor: Compressor<'static>,
    decompressor: Decompressor<'static>,
}

impl MomentCoder {
    /// A coder for extents of at most the bytes of `staging`.
    ///
    /// # Errors
    /// If memory is refused.
    pub fn new(staging: Lease) -> io::Result<MomentCoder> {
        let mut compressor = Compressor::new(1)?;
        for parameter in [
            CParameter::Strategy(Strategy::ZSTD_fast),
            CParameter::WindowLog(20),
            CParameter::HashLog(6),
            // Between looks for a match: a whole block.
            CParameter::TargetLength(1 << 17),
            CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        ] {
            compressor.set_parameter(parameter)?;
        }
        Ok(MomentCoder {
            staging,
            compressor,
            decompressor: Decompressor::new()?,
        })
    }

    /// Turns the payload at the beginning of `slab` into its stored form and returns the length of
    /// that, or leaves it where it would not save a page.
    ///
    /// # Panics
    /// If elements have not 2 or 4 bytes, the payload is not whole elements, or is longer than the
    /// slab or an extent.
    pub fn encode(
        &mut self,
        slab: &mut [u8],
        payload: usize,
        element_bytes: usize,
    ) -> Option<usize> {
        let count = elements(payload, element_bytes);
        let low = payload - count;
        let room = (payload.next_multiple_of(PAGE) - PAGE).checked_sub(low)?;
        let (last, frame) = self.staging.as_mut_slice::<u8>()[..payload].split_at_mut(count);
        let frame = &mut frame[..room];
        let payload = &mut slab[..payload];
        match element_bytes {
            2 => last_bytes::<2>(payload, last),
            _ => last_bytes::<4>(payload, last),
        }
        // Its only refusal of a valid call is that the result does not fit.
        let bytes = self.compressor.compress_to_buffer(&*last, frame).ok()?;
        match element_bytes {
            2 => pack::<2>(payload, count),
            _ => pack::<4>(payload, count),
        }
        slab[low..low + bytes].copy_from_slice(&frame[..bytes]);
        Some(low + bytes)
    }

    /// Turns `stored` bytes at the beginning of `slab` back into a payload of `payload` bytes, with
    /// zeros up to a page.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if they are not the stored form of that length.
    ///
    /// # Panics
    /// As [`MomentCoder::encode`], or if `stored` is longer than the slab.
    pub fn decode(
        &mut self,
        slab: &mut [u8],
        stored: usize,
        payload: usize,
        element_bytes: usize,
    ) -> io::Result<()> {
        let count = elements(payload, element_bytes);
        let last = &mut self.staging.as_mut_slice::<u8>()[..count];
        let refused = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let frame = slab[..stored].get(payload - count..).unwrap_or_default();
        let length = self
            .decompressor
            .decompress_to_buffer(frame, last)
            .map_err(|error| refused(format!("zstd: {error}")))?;
        if length != count {
            return Err(refused(format!("zstd: {length} bytes, expected {count}")));
        }
        slab[payload..payload.next_multiple_of(PAGE)].fill(0);
        let payload = &mut slab[..payload];
        match element_bytes {
            2 => unpack::<2>(payload, last),
            _ => unpack::<4>(payload, last),
        }
        Ok(())
    }
}

fn elements(payload: usize, element_bytes: usize) -> usize {
    assert!(matches!(element_bytes, 2 | 4), "{element_bytes}");
    assert!(payload.is_multiple_of(element_bytes), "{payload}");
    payload / element_bytes
}

/// Copies each element's last byte.
fn last_bytes<const WIDTH: usize>(bytes: &[u8], last: &mut [u8]) {
    for (element, last) in bytes.chunks_exact(WIDTH).zip(last) {
        *last = element[WIDTH - 1];
    }
}

/// Moves the bytes of `count` elements together, without each one's last.
fn pack<const WIDTH: usize>(bytes: &mut [u8], count: usize) {
    let whole = count - count % BLOCK;
    for first in (0..whole).step_by(BLOCK) {
        let mut block = [[0u8; WIDTH]; BLOCK];
        block
            .as_flattened_mut()
            .copy_from_slice(&bytes[first * WIDTH..][..BLOCK * WIDTH]);
        let to = &mut bytes[first * (WIDTH - 1)..][..BLOCK * (WIDTH - 1)];
        for (to, element) in to.chunks_exact_mut(WIDTH - 1).zip(&block) {
            to.copy_from_slice(&element[..WIDTH - 1]);
        }
    }
    for index in whole..count {
        bytes.copy_within(index * WIDTH..(index + 1) * WIDTH - 1, index * (WIDTH - 1));
    }
}

/// The inverse of [`pack`]: the last come first, since elements move up.
fn unpack<const WIDTH: usize>(bytes: &mut [u8], last: &[u8]) {
    let count = last.len();
    let whole = count - count % BLOCK;
    for index in (whole..count).rev() {
        let from = index * (WIDTH - 1);
        bytes.copy_within(from..from + WIDTH - 1, index * WIDTH);
        bytes[(index + 1) * WIDTH - 1] = last[index];
    }
    for first in (0..whole).step_by(BLOCK).rev() {
        let mut block = [[0u8; WIDTH]; BLOCK];
        let from = &bytes[first * (WIDTH - 1)..][..BLOCK * (WIDTH - 1)];
        let from = from
            .chunks_exact(WIDTH - 1)
            .zip(&last[first..first + BLOCK]);
        for (element, (low, last)) in block.iter_mut().zip(from) {
            element[..WIDTH - 1].copy_from_slice(low);
            element[WIDTH - 1] = *last;
        }
        bytes[first * WIDTH..][..BLOCK * WIDTH].copy_from_slice(block.as_flattened());
    }
}

/// Fills `values` as moments are: normal numbers whose scale differs from row to row, here by
/// factors of two. For measurements where there is no training.
pub fn like_moments(values: &mut [f32]) {
    let mut state = 0x9E37_79B9u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    const ROW: usize = 512;
    for row in values.chunks_mut(ROW) {
        let scale = 1e-3 * (2.0 * random() - 1.0).exp2();
        for value in row {
            let normal: f32 = (0..4).map(|_| random() - 0.5).sum();
            *value = normal * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostArena;
    use crate::store::sim::mix;
    use crate::tile::EXTENT_BYTES_MAX;

    fn coder() -> MomentCoder {
        let mut cutter = HostArena::take(EXTENT_BYTES_MAX).unwrap();
        MomentCoder::new(cutter.cut(EXTENT_BYTES_MAX)).unwrap()
    }

    /// Payloads of `bytes`, which are whole elements: name, bytes, whether they shrink if long.
    fn payloads(bytes: usize, width: usize) -> Vec<(&'static str, Vec<u8>, bool)> {
        let mut values = vec![0.0f32; bytes.div_ceil(width)];
        like_moments(&mut values);
        let word = |value: &f32| value.to_bits().to_le_bytes()[4 - width..].to_vec();
        let moments: Vec<u8> = values.iter().flat_map(word).collect();
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-45];
        let patterns = (0..bytes / width).map(|i| odd[mix(i as u64) as usize % odd.len()]);
        let special: Vec<u8> = patterns.flat_map(|value| word(&value)).collect();
        let random = (0..bytes).map(|i| mix(i as u64) as u8).collect();
        vec![
            ("moments", moments, true),
            ("zeros", vec![0; bytes], true),
            ("constant", vec![0x5a; bytes], true),
            ("NaN and infinities", special, true),
            ("random", random, false),
        ]
    }

    #[test]
    fn every_length_comes_back_bit_for_bit_or_stays_as_it_was() {
        let mut coder = coder();
        for width in [2, 4] {
            let lengths = [
                1,
                2,
                31,
                32,
                33,
                1023,
                1024,
                1025,
                8191,
                8192,
                50_001,
                1 << 20,
            ];
            for bytes in lengths.map(|count| count * width) {
                for (name, payload, shrinks) in payloads(bytes, width) {
                    let what = format!("{name}, {bytes} bytes of {width}");
                    let mut slab = payload.clone();
                    slab.resize(bytes.next_multiple_of(PAGE), 0xee);
                    let stored = coder.encode(&mut slab, bytes, width);
                    let pages = |bytes: usize| bytes.div_ceil(PAGE);
                    if let Some(stored) = stored {
                        assert!(pages(stored) < pages(bytes), "{what}: saves a page");
                        slab[stored..].fill(0x11);
                        coder.decode(&mut slab, stored, bytes, width).unwrap();
                        assert!(slab[bytes..].iter().all(|byte| *byte == 0), "{what}");
                    }
                    assert!(slab[..bytes] == payload, "{what}");
                    if pages(bytes) > 8 {
                        assert_eq!(stored.is_some(), shrinks, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn moments_shrink_by_more_than_half_of_a_byte_an_element() {
        let bytes = 4 << 20;
        let mut slab = payloads(bytes, 4).swap_remove(0).1;
        let stored = coder().encode(&mut slab, bytes, 4).unwrap();
        assert!(stored < bytes * 7 / 8, "{stored} of {bytes}");
    }

    /// Cut short, of another length, or not what was stored: an error or other bytes of the
    /// payload's length, never more, never a panic.
    #[test]
    fn what_was_not_stored_is_refused_or_decoded_within_its_payload() {
        let mut coder = coder();
        for width in [2, 4] {
            let bytes = 40_000;
            let payload = payloads(bytes, width).swap_remove(0).1;
            let mut right = payload.clone();
            right.resize(bytes.next_multiple_of(PAGE), 0);
            let stored = coder.encode(&mut right, bytes, width).unwrap();
            let low = bytes - bytes / width;
            let mut refused = |stored: usize, bytes: usize| {
                let error = coder.decode(&mut right.clone(), stored, bytes, width);
                assert_eq!(error.unwrap_err().kind(), io::ErrorKind::InvalidData);
            };
            for short in [0, 1, low - 1, low, low + 1, stored - 1] {
                refused(short, bytes);
            }
            refused(stored, bytes - width);
            refused(stored, bytes + width);
            let mut state = 7;
            for _ in 0..2000 {
                state = mix(state);
                let mut slab = right.clone();
                slab[state as usize % stored] ^= 1 << (state >> 60 & 7);
                slab.push(0xee);
                coder.decode(&mut slab, stored, bytes, width).ok();
                assert_eq!(slab.last(), Some(&0xee));
            }
            // A frame that claims far more than an extent.
            let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
            let mut slab = right.clone();
            slab[low..low + bomb.len()].copy_from_slice(&bomb);
            let error = coder.decode(&mut slab, low + bomb.len(), bytes, width);
            assert_eq!(error.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
