//! How near AdamW comes to what memory allows: the update of a split master with bf16 gradients,
//! beside an in-place read-modify-write stream of the same threads over the same arrays.
//!
//! `cargo bench --bench adamw [-- [--bytes N] [--runs N] [--isa scalar|avx2|avx512]]`; threads are
//! rayon's (`RAYON_NUM_THREADS`). The two alternate; rates are medians, and the percentage is the
//! median over pairs, so that a neighbour's load falls on both. AdamW moves 26 bytes a parameter
//! (14 read, 12 written); the stream reads and writes each of its bytes once.

use std::time::Instant;

use rayon::prelude::*;
use terrace::host::{HostArena, Lease};
use terrace::optimizer::{
    AdamwStep, GradientSpan, Isa, MomentSpan, PIECE_ELEMENTS, WeightSpan, adamw_parallel,
};

/// Bytes of a parameter in memory: weight, residual, two moments, bf16 gradient.
const PARAMETER_BYTES: u64 = 14;
/// Bytes that an update moves: all are read, all but the gradient written.
const TRAFFIC_BYTES: u64 = 26;

fn main() {
    let (bytes, runs, isa) = arguments();
    let count = (bytes / PARAMETER_BYTES).next_multiple_of(PIECE_ELEMENTS as u64);
    // A page over for each of five sections.
    let mut cutter = HostArena::take(count * PARAMETER_BYTES + 5 * 4096).expect("host memory");
    let mut sections = [2, 2, 4, 4, 2].map(|width| cutter.cut(count * width));
    sections[4].as_mut_slice::<u16>().fill(0x3c00);
    let (mut update, mut stream) = (Vec::new(), Vec::new());
    for t in 0..=runs {
        let start = Instant::now();
        run_update(isa, &mut sections, t as u64 + 1);
        let update_seconds = start.elapsed().as_secs_f64();
        let start = Instant::now();
        run_stream(isa, &mut sections);
        // The first of each warms up.
        if t > 0 {
            update.push(update_seconds);
            stream.push(start.elapsed().as_secs_f64());
        }
    }
    let byte_ratio = TRAFFIC_BYTES as f64 / (2 * PARAMETER_BYTES) as f64;
    let pairs = update.iter().zip(&stream);
    let mut percents: Vec<f64> = pairs.map(|(u, s)| 100.0 * byte_ratio * s / u).collect();
    let percent = median(&mut percents);
    let update_rate = (count * TRAFFIC_BYTES) as f64 / median(&mut update) / 1e9;
    let stream_rate = (count * PARAMETER_BYTES * 2) as f64 / median(&mut stream) / 1e9;
    let parameters = count as f64 / median(&mut update);
    let threads = rayon::current_num_threads();
    println!(
        "adamw {isa}, {threads} threads, {:.2} GiB: {:.3e} parameters/s, {TRAFFIC_BYTES} B each, \
         {update_rate:.2} GB/s; stream {stream_rate:.2} GB/s; {percent:.1} %",
        (count * PARAMETER_BYTES) as f64 / (1u64 << 30) as f64,
        parameters,
    );
    println!(
        "{{\"bench\":\"adamw\",\"isa\":\"{isa}\",\"threads\":{threads},\"parameters\":{count},\
         \"runs\":{runs},\"parameters_per_second\":{parameters:.0},\
         \"bytes_per_parameter\":{TRAFFIC_BYTES},\"update_gb_per_second\":{update_rate:.3},\
         \"stream_gb_per_second\":{stream_rate:.3},\"percent\":{percent:.2}}}"
    );
}

fn run_update(isa: Isa, sections: &mut [Lease; 5], t: u64) {
    let step = AdamwStep::new(1e-4, [0.9, 0.999], 1e-8, 0.01, t, 1.0);
    let [weight, residual, moment1, moment2, gradient] = sections;
    let count = weight.len() / 2;
    let weight = WeightSpan::Split {
        weight: weight.as_mut_slice(),
        residual: residual.as_mut_slice(),
    };
    let gradient = GradientSpan::Bf16(gradient.as_slice());
    let moments = MomentSpan::F32 {
        moment1: moment1.as_mut_slice(),
        moment2: moment2.as_mut_slice(),
    };
    adamw_parallel(isa, &step, count / 2, weight, moments, gradient);
}

/// Adds 0 to every 32-bit word, section after section, so that the update finds its numbers again.
fn run_stream(isa: Isa, sections: &mut [Lease; 5]) {
    for section in sections {
        let zero = std::hint::black_box(0);
        section
            .as_mut_slice::<u32>()
            .par_chunks_mut(PIECE_ELEMENTS)
            .for_each(|piece| match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `arguments` has checked that the processor runs this.
                Isa::Avx512 => unsafe { stream_avx512(piece, zero) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as for AVX-512.
                Isa::Avx2 => unsafe { stream_avx2(piece, zero) },
                _ => stream(piece, zero),
            });
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn stream_avx512(piece: &mut [u32], zero: u32) {
    stream(piece, zero);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn stream_avx2(piece: &mut [u32], zero: u32) {
    stream(piece, zero);
}

#[inline(always)]
fn stream(piece: &mut [u32], zero: u32) {
    for word in piece {
        *word = word.wrapping_add(zero);
    }
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn arguments() -> (u64, usize, Isa) {
    let (mut bytes, mut runs, mut isa) = (2 << 30, 9, Isa::detect());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            // What `cargo bench` itself passes.
            "--bench" => {}
            "--bytes" => bytes = value().parse().expect("--bytes takes a number"),
            "--runs" => runs = value().parse().expect("--runs takes a number"),
            "--isa" => {
                let name = value();
                let known = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
                isa = known.expect("--isa takes scalar, avx2 or avx512");
            }
            _ => panic!("unknown argument {word}"),
        }
    }
    assert!(runs > 0, "--runs takes at least 1");
    assert!(isa.available(), "this processor has no {isa}");
    (bytes, runs, isa)
}
