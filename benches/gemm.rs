//! How fast are the CPU device's products and attention at a small model's shapes?
//!
//! Prints one JSON line an operation: the best time of several runs, and the mean processor time,
//! which says more on a machine that others use too. Threads are `RAYON_NUM_THREADS`; run it once
//! with 1 and once with 2. Dimensions are SmolLM2-135M's. For elementwise operations the "flops"
//! are elements. Arguments `T N K …` measure those products alone.

use std::time::Instant;

use terrace::device::ops::AttentionShape;
use terrace::device::{Device, Dtype, View};

/// Hands out views one after another.
struct Cutter {
    device: Device,
    next: u64,
}

impl Cutter {
    fn cut(&mut self, count: u64) -> View {
        let view = View::new(self.next, count, Dtype::F32);
        self.next = (self.next + view.bytes()).next_multiple_of(64);
        let mut state = self.next | 1;
        let values: Vec<f32> = (0..count)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
            })
            .collect();
        self.device.write_f32(view, &values);
        view
    }
}

/// Seconds of processor time that all threads of this process have used.
fn processor_seconds() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").expect("the list of threads");
    let used = threads.filter_map(|thread| {
        let path = thread.ok()?.path().join("schedstat");
        let text = std::fs::read_to_string(path).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    used.sum::<f64>() * 1e-9
}

/// Least seconds of a run, and mean seconds of processor time, of up to 20 runs within a second.
fn measure(mut run: impl FnMut()) -> (f64, f64) {
    run();
    let (start, processor) = (Instant::now(), processor_seconds());
    let (mut best, mut count) = (f64::INFINITY, 0);
    while count < 20 && start.elapsed().as_secs_f64() < 1.0 {
        let begin = Instant::now();
        run();
        best = best.min(begin.elapsed().as_secs_f64());
        count += 1;
    }
    (best, (processor_seconds() - processor) / f64::from(count))
}

fn report(op: &str, shape: &str, flops: f64, (seconds, processor): (f64, f64)) {
    let threads = rayon::current_num_threads();
    println!(
        "{{\"op\":\"{op}\",\"shape\":\"{shape}\",\"threads\":{threads},\"ms\":{:.3},\
         \"gflops\":{:.1},\"processor_ms\":{:.3},\"gflops_a_core\":{:.1}}}",
        seconds * 1e3,
        flops / seconds / 1e9,
        processor * 1e3,
        flops / processor / 1e9
    );
}

fn linear(t: u64, n: u64, k: u64) {
    let device = Device::cpu(4 * (2 * t * k + 2 * t * n + n * k) + 4096).expect("arena");
    let mut cutter = Cutter { device, next: 0 };
    let (x, y, w) = (cutter.cut(t * k), cutter.cut(t * n), cutter.cut(n * k));
    let device = &cutter.device;
    let shape = format!("T={t} N={n} K={k}");
    let flops = 2.0 * (t * n * k) as f64;
    let run = || device.linear_forward(x, w, None, y, k, false);
    report("linear_forward", &shape, flops, measure(run));
    let run = || device.linear_backward_input(y, w, x, k, false);
    report("linear_backward_input", &shape, flops, measure(run));
    let run = || device.linear_backward_weight(y, x, w, k);
    report("linear_backward_weight", &shape, flops, measure(run));
}

fn attention(t: u64, sequences: u32) {
    let (heads, kv_heads, head_dim) = (9, 3, 64);
    let (wide, narrow) = (t * heads * head_dim, t * kv_heads * head_dim);
    let device = Device::cpu(4 * (4 * wide + 4 * narrow + heads * t) + 8192).expect("arena");
    let mut cutter = Cutter { device, next: 0 };
    let [q, o, do_, dq] = [(); 4].map(|()| cutter.cut(wide));
    let [k, v, dk, dv] = [(); 4].map(|()| cutter.cut(narrow));
    let lse = cutter.cut(heads * t);
    let bounds: Vec<u32> = (0..=sequences).map(|i| i * t as u32 / sequences).collect();
    let shape = AttentionShape {
        heads,
        kv_heads,
        head_dim,
        window: None,
        bounds: &bounds,
    };
    let device = &cutter.device;
    let length = t as f64 / f64::from(sequences);
    let flops = 2.0 * t as f64 * length * (heads * head_dim) as f64;
    let text = format!("T={t} sequences={sequences} heads=9/3 D=64");
    let run = || device.attention_forward(q, k, v, o, lse, shape);
    report("attention_forward", &text, flops, measure(run));
    let run = || device.attention_backward(q, k, v, o, lse, do_, dq, dk, dv, shape);
    report("attention_backward", &text, 2.5 * flops, measure(run));
}

fn rows(t: u64, hidden: u64, inner: u64, vocab: u64) {
    let loss_rows = 256;
    let elements = 3 * t * inner + 4 * t * hidden + loss_rows * vocab + 2 * t;
    let device = Device::cpu(4 * elements + 65536).expect("arena");
    let mut cutter = Cutter { device, next: 0 };
    let [g, u, a] = [(); 3].map(|()| cutter.cut(t * inner));
    let [x, y, dx] = [(); 3].map(|()| cutter.cut(t * hidden));
    let [w, dw] = [(); 2].map(|()| cutter.cut(hidden));
    let inv = cutter.cut(t);
    let z = cutter.cut(loss_rows * vocab);
    let losses = cutter.cut(loss_rows);
    let targets: Vec<u32> = (0..loss_rows as u32).map(|i| i * 17).collect();
    let d = &cutter.device;
    let shape = format!("T={t}");
    let elements = (t * inner) as f64;
    report(
        "swiglu_forward",
        &shape,
        elements,
        measure(|| d.swiglu_forward(g, u, a)),
    );
    let run = || d.swiglu_backward(g, u, a, g, u);
    report("swiglu_backward", &shape, elements, measure(run));
    let elements = (t * hidden) as f64;
    let run = || d.rmsnorm_forward(x, w, y, inv, 1e-5);
    report("rmsnorm_forward", &shape, elements, measure(run));
    let run = || d.rmsnorm_backward(x, w, inv, y, dx, dw, false);
    report("rmsnorm_backward", &shape, elements, measure(run));
    report("add", &shape, elements, measure(|| d.add(x, y, x)));
    let run = || d.cross_entropy(z, &targets, 1.0, losses);
    report(
        "cross_entropy",
        "R=256",
        (loss_rows * vocab) as f64,
        measure(run),
    );
}

fn main() {
    let t = 1024;
    let sizes: Vec<u64> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    if !sizes.is_empty() {
        sizes.chunks_exact(3).for_each(|s| linear(s[0], s[1], s[2]));
        return;
    }
    for (n, k) in [(576, 576), (192, 576), (1536, 576), (576, 1536)] {
        linear(t, n, k);
    }
    linear(2048, 1536, 576);
    linear(256, 49152, 576);
    linear(1024, 49152, 576);
    attention(1024, 1);
    attention(2048, 1);
    attention(2048, 4);
    rows(t, 576, 1536, 49152);
}
