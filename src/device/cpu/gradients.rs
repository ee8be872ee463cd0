//! What crosses between the arena and host in another format than it has there.

use half::bf16;

use super::CpuDevice;
use crate::device::{Dtype, View};

/// Elements rounded at a time: a piece is read whole before its front half is written.
const PIECE: usize = 1 << 12;

impl CpuDevice {
    pub(in crate::device) fn round_in_place(&self, x: View) {
        assert_eq!(x.dtype, Dtype::F32);
        let mut rounded = [0u8; PIECE * 2];
        let count = usize::try_from(x.count).expect("a view fits the arena");
        // Ascending: the bf16 of elements i.. lie at bytes 2i.., never beyond the f32 read so far.
        for start in (0..count).step_by(PIECE) {
            let piece = x.slice(start as u64, PIECE.min(count - start) as u64);
            for (value, out) in self.input(piece).iter().zip(rounded.chunks_exact_mut(2)) {
                out.copy_from_slice(&bf16::from_f32(*value).to_bits().to_le_bytes());
            }
            let bytes = piece.count as usize * 2;
            self.copy_in(x.offset + start as u64 * 2, &rounded[..bytes]);
        }
    }

    pub(in crate::device) fn copy_converted_in(&self, dtype: Dtype, bytes: &[u8], out: View) {
        assert_eq!(bytes.len() as u64, out.count * dtype.bytes());
        match dtype {
            Dtype::F32 => self.copy_in(out.offset, bytes),
            Dtype::Bf16 => {
                let values: Vec<f32> = bytes
                    .chunks_exact(2)
                    .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
                    .collect();
                self.write_f32(out, &values);
            }
        }
    }
}
