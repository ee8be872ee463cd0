//! Goal: every operation computes its formula, overwrites what it says it overwrites, and gives the
//! same bits for any number of threads.
//!
//! Method: each is run on random numbers, into outputs that were poisoned before, and compared with
//! a naive f64 reference; gradients with the f64 reference's analytic gradient, and that with
//! finite differences. Errors are measured against the largest value of the reference.

use std::ops::Range;

use super::ops::{AttentionShape, SortedTokens};
use super::*;

/// Random numbers from a seed: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In −1..1.
    fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn numbers(&mut self, count: u64) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }
}

/// A device whose arena is handed out view after view.
struct Desk {
    device: Device,
    next: u64,
    random: Random,
}

impl Desk {
    fn new(seed: u64) -> Desk {
        Desk {
            device: Device::cpu(32 << 20).unwrap(),
            next: 0,
            random: Random(seed),
        }
    }

    fn known(&self, number: Number) -> f64 {
        self.device.number(number)
    }

    fn cut(&mut self, count: u64, dtype: Dtype) -> View {
        let view = View::new(self.next, count, dtype);
        self.next = (self.next + view.bytes()).next_multiple_of(64);
        view
    }

    /// A view of NaN.
    fn blank(&mut self, count: u64) -> View {
        let view = self.cut(count, Dtype::F32);
        self.device.poison(view);
        view
    }

    /// A view of `values`.
    fn put(&mut self, values: &[f32]) -> View {
        let view = self.cut(values.len() as u64, Dtype::F32);
        self.device.write_f32(view, values);
        view
    }

    /// A view of random numbers.
    fn any(&mut self, count: u64) -> View {
        let values = self.random.numbers(count);
        self.put(&values)
    }

    fn read(&self, view: View) -> Vec<f32> {
        self.device.read_f32(view)
    }

    fn wide(&self, view: View) -> Vec<f64> {
        self.read(view).into_iter().map(f64::from).collect()
    }
}

/// Asserts |got − want| ≤ tolerance · max|want|.
#[track_caller]
fn assert_near(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let scale = want.iter().fold(1e-6f64, |largest, w| largest.max(w.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(
            error <= tolerance * scale,
            "{what}[{index}]: {got} for {want}, scale {scale}"
        );
    }
}

/// Central differences of `loss` in every element of `x`.
fn differences(x: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let held = x[i];
            x[i] = held + step;
            let above = loss(&x);
            x[i] = held - step;
            let below = loss(&x);
            x[i] = held;
            (above - below) / (2.0 * step)
        })
        .collect()
}

fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|v| *v as f32).collect()
}

#[test]
fn convert_agrees_with_half_on_every_pattern() {
    let mut desk = Desk::new(1);
    let bits: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let short = desk.cut(1 << 16, Dtype::Bf16);
    let long = desk.blank(1 << 16);
    desk.device.copy_in(short.offset, &bits);
    desk.device.convert(short, long);
    for (pattern, got) in desk.read(long).into_iter().enumerate() {
        let want = half::bf16::from_bits(pattern as u16).to_f32();
        assert_eq!(got.to_bits() >> 16, pattern as u32);
        assert!(got == want || (got.is_nan() && want.is_nan()));
    }
    // Ties, both ways, the largest finite, infinities, NaN whose upper half is an infinity's.
    let mut values: Vec<f32> = (0..60_000)
        .map(|_| f32::from_bits(desk.random.next() as u32))
        .collect();
    let corners = [
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_8001,
        0x3f80_7fff,
        0x7f7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7f80_0001,
        0xffff_ffff,
        0x8000_0000,
        0x0000_8000,
        0x0001_8000,
    ];
    values.extend(corners.map(f32::from_bits));
    let from = desk.put(&values);
    let to = desk.cut(values.len() as u64, Dtype::Bf16);
    desk.device.convert(from, to);
    let mut got = vec![0u8; 2 * values.len()];
    desk.device.copy_out(to.offset, &mut got);
    for (value, got) in values.iter().zip(got.chunks_exact(2)) {
        let got = u16::from_le_bytes([got[0], got[1]]);
        let want = half::bf16::from_f32(*value).to_bits();
        assert_eq!(got, want, "{:08x}", value.to_bits());
    }
    let copy = desk.blank(from.count);
    desk.device.convert(from, copy);
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(desk.read(copy)), bits(values));
}

#[test]
fn fill_and_add() {
    let mut desk = Desk::new(2);
    for n in [1, 17, 40_000] {
        let (a, b, out) = (desk.any(n), desk.any(n), desk.blank(n));
        let want: Vec<f32> = (desk.read(a).iter().zip(desk.read(b)))
            .map(|(a, b)| a + b)
            .collect();
        desk.device.add(a, b, out);
        assert_eq!(desk.read(out), want);
        desk.device.add(a, b, b);
        assert_eq!(desk.read(b), want);
        desk.device.add(out, a, out);
        let twice: Vec<f32> = want.iter().zip(desk.read(a)).map(|(w, a)| w + a).collect();
        assert_eq!(desk.read(out), twice);
        desk.device.add(a, a, b);
        let doubled: Vec<f32> = desk.read(a).iter().map(|a| a + a).collect();
        assert_eq!(desk.read(b), doubled);
        desk.device.add(a, a, a);
        assert_eq!(desk.read(a), doubled);
        desk.device.fill(a, 1.5);
        assert!(desk.read(a).iter().all(|v| *v == 1.5));
        let short = desk.cut(n, Dtype::Bf16);
        desk.device.fill(short, 1.001);
        assert!(desk.read(short).iter().all(|v| *v == 1.0));
    }
}

fn norm(x: &[f64], w: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let mut inv = Vec::new();
    let mut y = Vec::new();
    for x in x.chunks(w.len()) {
        let mean = inner(x, x) / w.len() as f64;
        inv.push(1.0 / (mean + eps).sqrt());
        let last = inv[inv.len() - 1];
        y.extend(x.iter().zip(w).map(|(x, w)| x * last * w));
    }
    (y, inv)
}

#[test]
fn rmsnorm_and_its_gradient() {
    let eps = 1e-5f32;
    for (rows, columns) in [(1, 3), (1, 7), (3, 5), (70, 33), (9, 600)] {
        let mut desk = Desk::new(rows * 1000 + columns);
        let n = rows * columns;
        let (x, w) = (desk.any(n), desk.any(columns));
        let (y, inv) = (desk.blank(n), desk.blank(rows));
        desk.device.rmsnorm_forward(x, w, y, inv, eps);
        let (x64, w64) = (desk.wide(x), desk.wide(w));
        let (want, want_inv) = norm(&x64, &w64, f64::from(eps));
        assert_near("y", &desk.read(y), &want, 3e-7);
        assert_near("inv", &desk.read(inv), &want_inv, 2e-7);

        let (dy, dx, dw) = (desk.any(n), desk.blank(n), desk.any(columns));
        let (dy64, dw64) = (desk.wide(dy), desk.wide(dw));
        let device = &desk.device;
        device.rmsnorm_backward(x, w, inv, dy, dx, dw, false);
        let loss = |x: &[f64], w: &[f64]| inner(&norm(x, w, f64::from(eps)).0, &dy64);
        let mut want = Vec::new();
        for (row, part) in x64.chunks(columns as usize).enumerate() {
            let dy = &dy64[row * columns as usize..][..columns as usize];
            let loss = |x: &[f64]| inner(&norm(x, &w64, f64::from(eps)).0, dy);
            want.extend(differences(part, loss));
        }
        let got = desk.read(dx);
        assert_near("dx", &got, &want, 2e-6);
        let mut want_dw = differences(&w64, |w| loss(&x64, w));
        want_dw.iter_mut().zip(&dw64).for_each(|(d, old)| *d += old);
        assert_near("dw", &desk.read(dw), &want_dw, 1e-6);

        // Accumulating adds the same numbers; in place they come to lie in dy.
        let sum = desk.any(n);
        let before = desk.read(sum);
        let device = &desk.device;
        device.rmsnorm_backward(x, w, inv, dy, sum, dw, true);
        let total: Vec<f32> = before.iter().zip(&got).map(|(b, g)| b + g).collect();
        assert_eq!(desk.read(sum), total);
        device.rmsnorm_backward(x, w, inv, dy, dy, dw, false);
        assert_eq!(desk.read(dy), got);
        let steps: Vec<f64> = want_dw
            .iter()
            .zip(&dw64)
            .map(|(w, o)| 3.0 * w - 2.0 * o)
            .collect();
        assert_near("dw thrice", &desk.read(dw), &steps, 2e-6);
    }
}

#[test]
fn rope_turns_pairs_and_its_inverse_turns_back() {
    for (tokens, heads, dim) in [(1, 1, 2), (5, 3, 6), (40, 2, 64)] {
        let mut desk = Desk::new(tokens + dim);
        let positions: Vec<u32> = (0..tokens).map(|_| desk.random.below(9) as u32).collect();
        let half = dim as usize / 2;
        let mut table = Vec::new();
        for position in 0..9 {
            let angle = |i: usize| f64::from(position) * 100f64.powf(-(i as f64) / half as f64);
            table.extend((0..half).map(|i| angle(i).cos() as f32));
            table.extend((0..half).map(|i| angle(i).sin() as f32));
        }
        let x = desk.any(tokens * heads * dim);
        let before = desk.wide(x);
        let view = desk.put(&table);
        desk.device.rope(x, heads, dim, view, &positions, false);
        let mut want = before.clone();
        for (index, head) in want.chunks_mut(dim as usize).enumerate() {
            let position = positions[index / heads as usize] as usize;
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                let cos = f64::from(table[position * 2 * half + i]);
                let sin = f64::from(table[position * 2 * half + half + i]);
                (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        assert_near("turned", &desk.read(x), &want, 2e-7);
        desk.device.rope(x, heads, dim, view, &positions, true);
        assert_near("turned back", &desk.read(x), &before, 4e-7);
    }
}

/// a\[m, k\]·b\[k, n\] with each read through a function.
fn product(
    [m, n, k]: [usize; 3],
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            out.push((0..k).map(|p| a(i, p) * b(p, j)).sum());
        }
    }
    out
}

fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[test]
fn linear_and_its_gradients() {
    let shapes = [
        (1, 1, 1),
        (1, 600, 33),
        (3, 5, 2),
        (600, 7, 65),
        (37, 1100, 20),
        (530, 530, 9),
        (70, 300, 128),
        (20, 70, 1024),
        (16, 5, 512),
    ];
    for (t, n, k) in shapes {
        let mut desk = Desk::new(t * 7 + n * 3 + k);
        let (x, w, bias) = (desk.any(t * k), desk.any(n * k), desk.any(n));
        let (x64, w64, b64) = (desk.wide(x), desk.wide(w), desk.wide(bias));
        let [tt, nn, kk] = [t as usize, n as usize, k as usize];
        let want = product([tt, nn, kk], |i, p| x64[i * kk + p], |p, j| w64[j * kk + p]);
        let biased: Vec<f64> = want
            .iter()
            .enumerate()
            .map(|(i, y)| y + b64[i % nn])
            .collect();
        let y = desk.blank(t * n);
        desk.device.linear_forward(x, w, None, y, k, false);
        assert_near("y", &desk.read(y), &want, 2e-6);
        desk.device.poison(y);
        desk.device.linear_forward(x, w, Some(bias), y, k, false);
        assert_near("y + bias", &desk.read(y), &biased, 2e-6);
        let held = desk.wide(y);
        desk.device.linear_forward(x, w, Some(bias), y, k, true);
        assert_near("y += bias", &desk.read(y), &plus(&held, &biased), 2e-6);
        let held = desk.wide(y);
        desk.device.linear_forward(x, w, None, y, k, true);
        assert_near("y +=", &desk.read(y), &plus(&held, &want), 2e-6);

        let (dy, dx) = (desk.any(t * n), desk.blank(t * k));
        let dy64 = desk.wide(dy);
        desk.device.linear_backward_input(dy, w, dx, k, false);
        let want = product(
            [tt, kk, nn],
            |i, p| dy64[i * nn + p],
            |p, j| w64[p * kk + j],
        );
        assert_near("dx", &desk.read(dx), &want, 2e-6);
        let held = desk.wide(dx);
        desk.device.linear_backward_input(dy, w, dx, k, true);
        assert_near("dx +=", &desk.read(dx), &plus(&held, &want), 2e-6);

        let (dw, db) = (desk.any(n * k), desk.any(n));
        let (old, old_bias) = (desk.wide(dw), desk.wide(db));
        desk.device.linear_backward_weight(dy, x, dw, k);
        let want = product(
            [nn, kk, tt],
            |i, p| dy64[p * nn + i],
            |p, j| x64[p * kk + j],
        );
        assert_near("dw", &desk.read(dw), &plus(&old, &want), 2e-6);
        desk.device.bias_backward(dy, db);
        let want = product([1, nn, tt], |_, _| 1.0, |p, j| dy64[p * nn + j]);
        assert_near("db", &desk.read(db), &plus(&old_bias, &want), 5e-7);
    }
}

/// An attention problem in f64.
struct Attention<'a> {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    shape: AttentionShape<'a>,
}

impl Attention<'_> {
    /// Calls `row(head, query, keys seen)` for every row of the score matrix.
    fn rows(&self, mut row: impl FnMut(usize, usize, Range<usize>)) {
        for ends in self.shape.bounds.windows(2) {
            let (start, end) = (ends[0] as usize, ends[1] as usize);
            for head in 0..self.shape.heads as usize {
                for i in start..end {
                    let window = self.shape.window.unwrap_or(u64::MAX);
                    let seen = |j: &usize| ((i - j) as u64) < window;
                    let first = (start..=i).find(seen).unwrap();
                    row(head, i, first..i + 1);
                }
            }
        }
    }

    fn sizes(&self) -> (usize, usize, usize, usize) {
        let (heads, kv_heads) = (self.shape.heads as usize, self.shape.kv_heads as usize);
        (
            heads,
            kv_heads,
            heads / kv_heads,
            self.shape.head_dim as usize,
        )
    }

    /// Offsets of a query of `head` and of key `j` that it meets.
    fn offsets(&self, head: usize, i: usize, j: usize) -> (usize, usize) {
        let (heads, kv_heads, group, dim) = self.sizes();
        (
            (i * heads + head) * dim,
            (j * kv_heads + head / group) * dim,
        )
    }

    /// Probabilities of a row, and its log-sum-exp.
    fn probabilities(&self, head: usize, i: usize, keys: Range<usize>) -> (Vec<f64>, f64) {
        let dim = self.sizes().3;
        let scores: Vec<f64> = keys
            .map(|j| {
                let (at, key) = self.offsets(head, i, j);
                inner(&self.q[at..at + dim], &self.k[key..key + dim]) / (dim as f64).sqrt()
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
        (scores.iter().map(|s| (s - lse).exp()).collect(), lse)
    }

    fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let (heads, _, _, dim) = self.sizes();
        let mut o = vec![0.0; self.q.len()];
        let tokens = o.len() / (heads * dim);
        let mut lse = vec![0.0; heads * tokens];
        self.rows(|head, i, keys| {
            let (p, sum) = self.probabilities(head, i, keys.clone());
            lse[head * tokens + i] = sum;
            for (p, j) in p.iter().zip(keys) {
                let (at, key) = self.offsets(head, i, j);
                for c in 0..dim {
                    o[at + c] += p * self.v[key + c];
                }
            }
        });
        (o, lse)
    }

    fn backward(&self, dout: &[f64]) -> [Vec<f64>; 3] {
        let dim = self.sizes().3;
        let scale = 1.0 / (dim as f64).sqrt();
        let mut dq = vec![0.0; self.q.len()];
        let (mut dk, mut dv) = (vec![0.0; self.k.len()], vec![0.0; self.k.len()]);
        self.rows(|head, i, keys| {
            let (p, _) = self.probabilities(head, i, keys.clone());
            let dp: Vec<f64> = keys
                .clone()
                .map(|j| {
                    let (at, key) = self.offsets(head, i, j);
                    inner(&dout[at..at + dim], &self.v[key..key + dim])
                })
                .collect();
            let delta = inner(&p, &dp);
            for ((p, dp), j) in p.iter().zip(dp).zip(keys) {
                let (at, key) = self.offsets(head, i, j);
                let ds = p * (dp - delta) * scale;
                for c in 0..dim {
                    dq[at + c] += ds * self.k[key + c];
                    dk[key + c] += ds * self.q[at + c];
                    dv[key + c] += p * dout[at + c];
                }
            }
        });
        [dq, dk, dv]
    }
}

const fn heads(heads: u64, kv_heads: u64, head_dim: u64, window: u64) -> [u64; 4] {
    [heads, kv_heads, head_dim, window]
}

fn attention_shape(
    [heads, kv_heads, head_dim, window]: [u64; 4],
    bounds: &[u32],
) -> AttentionShape<'_> {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        window: (window > 0).then_some(window),
        bounds,
    }
}

#[test]
fn attention_and_its_gradient() {
    // Window 0 stands for none. Blocks are 256 keys and 8 to 128 queries.
    let cases: &[([u64; 4], &[u32])] = &[
        (heads(1, 1, 2, 0), &[0, 1]),
        (heads(4, 2, 8, 3), &[0, 5, 6, 13]),
        (heads(2, 2, 6, 1), &[0, 9]),
        (heads(3, 1, 16, 0), &[0, 300, 300, 371]),
        (heads(2, 2, 10, 5), &[0, 290]),
        (heads(3, 1, 16, 257), &[0, 530]),
        (heads(2, 1, 12, 100), &[0, 3, 420]),
        (heads(6, 2, 4, 1000), &[0, 64, 65, 193]),
        (heads(40, 1, 4, 0), &[0, 30]),
    ];
    for (sizes, bounds) in cases {
        let shape = attention_shape(*sizes, bounds);
        let tokens = u64::from(bounds[bounds.len() - 1]);
        let mut desk = Desk::new(tokens + sizes[0]);
        let wide = tokens * shape.heads * shape.head_dim;
        let slim = tokens * shape.kv_heads * shape.head_dim;
        // Scores of some size, so that the running maximum moves.
        let q: Vec<f32> = desk.random.numbers(wide).iter().map(|v| 4.0 * v).collect();
        let q = desk.put(&q);
        let (k, v, dout) = (desk.any(slim), desk.any(slim), desk.any(wide));
        let (o, lse) = (desk.blank(wide), desk.blank(tokens * shape.heads));
        let (dq, dk, dv) = (desk.blank(wide), desk.blank(slim), desk.blank(slim));
        let reference = Attention {
            q: desk.wide(q),
            k: desk.wide(k),
            v: desk.wide(v),
            shape,
        };
        desk.device.attention_forward(q, k, v, o, lse, shape);
        let (want_o, want_lse) = reference.forward();
        assert_near("o", &desk.read(o), &want_o, 2e-6);
        assert_near("lse", &desk.read(lse), &want_lse, 1e-6);
        let device = &desk.device;
        device.attention_backward(q, k, v, o, lse, dout, dq, dk, dv, shape);
        let wanted = reference.backward(&desk.wide(dout));
        for ((name, got), want) in ["dq", "dk", "dv"].iter().zip([dq, dk, dv]).zip(wanted) {
            assert_near(&format!("{name} {shape:?}"), &desk.read(got), &want, 1e-5);
        }
    }
}

#[test]
fn attention_reference_agrees_with_finite_differences() {
    let mut random = Random(77);
    let shape = attention_shape(heads(4, 2, 4, 3), &[0, 2, 7]);
    let mut wide = |n: u64| {
        random
            .numbers(n)
            .into_iter()
            .map(f64::from)
            .collect::<Vec<_>>()
    };
    let (q, k, v, dout) = (wide(7 * 16), wide(7 * 8), wide(7 * 8), wide(7 * 16));
    let at = |q: &[f64], k: &[f64], v: &[f64]| Attention {
        q: q.to_vec(),
        k: k.to_vec(),
        v: v.to_vec(),
        shape,
    };
    let [dq, dk, dv] = at(&q, &k, &v).backward(&dout);
    let loss = |x: Attention<'_>| inner(&x.forward().0, &dout);
    assert_near(
        "dq",
        &narrow(&dq),
        &differences(&q, |q| loss(at(q, &k, &v))),
        1e-6,
    );
    assert_near(
        "dk",
        &narrow(&dk),
        &differences(&k, |k| loss(at(&q, k, &v))),
        1e-6,
    );
    assert_near(
        "dv",
        &narrow(&dv),
        &differences(&v, |v| loss(at(&q, &k, v))),
        1e-6,
    );
}

#[test]
fn swiglu_and_its_gradient() {
    for n in [1, 19, 20_000] {
        let mut desk = Desk::new(n);
        let g: Vec<f32> = desk.random.numbers(n).iter().map(|v| 9.0 * v).collect();
        let g = desk.put(&g);
        let (u, a) = (desk.any(n), desk.blank(n));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let (g64, u64_) = (desk.wide(g), desk.wide(u));
        desk.device.swiglu_forward(g, u, a);
        let want: Vec<f64> = g64.iter().zip(&u64_).map(|(g, u)| silu(*g) * u).collect();
        assert_near("a", &desk.read(a), &want, 3e-7);
        let (da, dg, du) = (desk.any(n), desk.blank(n), desk.blank(n));
        let da64 = desk.wide(da);
        desk.device.swiglu_backward(g, u, da, dg, du);
        let slope = |g: f64| (silu(g + 1e-5) - silu(g - 1e-5)) / 2e-5;
        let want_g: Vec<f64> = (0..n as usize)
            .map(|i| da64[i] * u64_[i] * slope(g64[i]))
            .collect();
        let want_u: Vec<f64> = (0..n as usize).map(|i| da64[i] * silu(g64[i])).collect();
        assert_near("dg", &desk.read(dg), &want_g, 1e-6);
        assert_near("du", &desk.read(du), &want_u, 3e-7);
        desk.device.swiglu_backward(g, u, da, g, u);
        assert_eq!((desk.read(g), desk.read(u)), (desk.read(dg), desk.read(du)));
    }
    // Far out, silu is 0 or x and nothing is NaN.
    let mut desk = Desk::new(3);
    let (g, u) = (desk.put(&[-200.0, 200.0]), desk.put(&[2.0, 2.0]));
    let a = desk.blank(2);
    desk.device.swiglu_forward(g, u, a);
    assert_eq!(desk.read(a), [0.0, 400.0]);
    let da = desk.put(&[2.0, 2.0]);
    desk.device.swiglu_backward(g, u, da, g, u);
    assert_eq!(
        (desk.read(g), desk.read(u)),
        (vec![0.0, 4.0], vec![0.0, 400.0])
    );
}

#[test]
fn rows_are_gathered_and_scattered() {
    for (tokens, columns) in [(1, 1), (50, 7)] {
        let mut desk = Desk::new(tokens);
        let x = desk.any(tokens * columns);
        let rows: Vec<u32> = (0..tokens as u32).rev().step_by(2).collect();
        let count = rows.len() as u64 * columns;
        let (out, back) = (desk.blank(count), desk.any(tokens * columns));
        let untouched = desk.read(back);
        desk.device.gather_rows(x, &rows, out, columns);
        desk.device.scatter_rows(out, &rows, back, columns);
        let (x, got, back) = (desk.read(x), desk.read(out), desk.read(back));
        for (index, row) in rows.iter().enumerate() {
            let width = columns as usize;
            let from = &x[*row as usize * width..][..width];
            assert_eq!(&got[index * width..][..width], from);
            assert_eq!(&back[*row as usize * width..][..width], from);
        }
        for row in (0..tokens as u32).filter(|row| !rows.contains(row)) {
            let range = row as usize * columns as usize..(row as usize + 1) * columns as usize;
            assert_eq!(back[range.clone()], untouched[range]);
        }
    }
}

#[test]
fn cross_entropy_and_its_gradient() {
    for (rows, vocab) in [(1, 1), (1, 50), (5, 1003), (20, 33)] {
        let mut desk = Desk::new(rows * vocab);
        let z: Vec<f32> = desk
            .random
            .numbers(rows * vocab)
            .iter()
            .map(|v| 20.0 * v)
            .collect();
        let z = desk.put(&z);
        let z64 = desk.wide(z);
        let targets: Vec<u32> = (0..rows).map(|_| desk.random.below(vocab) as u32).collect();
        let (losses, again) = (desk.blank(rows), desk.blank(rows));
        let scale = 0.125f32;
        desk.device.cross_entropy_loss(z, &targets, losses);
        assert_eq!(desk.wide(z), z64, "z stays");
        desk.device.cross_entropy(z, &targets, scale, again);
        assert_eq!(desk.read(losses), desk.read(again));
        let (mut want, mut gradient) = (Vec::new(), Vec::new());
        for (z, target) in z64.chunks(vocab as usize).zip(&targets) {
            let sum: f64 = z.iter().map(|z| z.exp()).sum();
            want.push(sum.ln() - z[*target as usize]);
            gradient.extend(z.iter().enumerate().map(|(i, z)| {
                let hit = f64::from(u8::from(i == *target as usize));
                (z.exp() / sum - hit) * f64::from(scale)
            }));
        }
        assert_near("losses", &desk.read(losses), &want, 4e-7);
        assert_near("dz", &desk.read(z), &gradient, 4e-7);
        let total: f64 = desk.wide(losses).iter().sum();
        assert_eq!(desk.known(desk.device.sum(losses)), total);
    }
    // Large logits do not overflow, and a NaN among them reaches the loss.
    let mut desk = Desk::new(9);
    let z = desk.put(&[3e4, 3e4, -3e4, 0.0, f32::NAN, 1.0]);
    let losses = desk.blank(2);
    desk.device.cross_entropy_loss(z, &[0, 0], losses);
    let losses = desk.read(losses);
    assert!((losses[0] - std::f32::consts::LN_2).abs() < 1e-7);
    assert!(losses[1].is_nan());
}

/// Positions of random tokens, grouped by id.
fn sorted_tokens(tokens: &[u32]) -> SortedTokens {
    let mut order = SortedTokens {
        positions: (0..tokens.len() as u32).collect(),
        ..SortedTokens::default()
    };
    order.positions.sort_by_key(|p| tokens[*p as usize]);
    for (index, position) in order.positions.iter().enumerate() {
        let id = tokens[*position as usize];
        if order.ids.last() != Some(&id) {
            order.ids.push(id);
            order.starts.push(index as u32);
        }
    }
    order.starts.push(tokens.len() as u32);
    order
}

#[test]
fn embedding_gradient_and_norms() {
    for (tokens, vocab, hidden) in [(1, 1, 1), (70, 40, 9), (300, 1000, 33)] {
        let mut desk = Desk::new(tokens + vocab);
        let ids: Vec<u32> = (0..tokens)
            .map(|_| desk.random.below(vocab) as u32)
            .collect();
        let (dy, dw) = (desk.any(tokens * hidden), desk.any(vocab * hidden));
        let (dy64, mut want) = (desk.wide(dy), desk.wide(dw));
        desk.device
            .embed_backward(dy, &sorted_tokens(&ids), dw, hidden);
        for (id, dy) in ids.iter().zip(dy64.chunks(hidden as usize)) {
            let row = &mut want[*id as usize * hidden as usize..][..hidden as usize];
            row.iter_mut().zip(dy).for_each(|(w, d)| *w += d);
        }
        assert_near("dw", &desk.read(dw), &want, 1e-6);
        let square = inner(&want, &want);
        assert!((desk.known(desk.device.squared_norm(dw)) - square).abs() <= 1e-6 * square);
    }
    let mut desk = Desk::new(4);
    let x = desk.any(200_001);
    let x64 = desk.wide(x);
    let square = inner(&x64, &x64);
    assert!((desk.known(desk.device.squared_norm(x)) - square).abs() <= 1e-12 * square);
}

/// Runs every operation at shapes of several pieces and returns the arena's used bytes.
fn run_everything(attention: &[([u64; 4], &[u32])]) -> Vec<u8> {
    let mut desk = Desk::new(1234);
    let (t, n, k) = (1040, 560, 72);
    let (x, w, bias, y) = (
        desk.any(t * k),
        desk.any(n * k),
        desk.any(n),
        desk.blank(t * n),
    );
    desk.device.linear_forward(x, w, Some(bias), y, k, false);
    let (dx, dw, db) = (desk.blank(t * k), desk.any(n * k), desk.any(n));
    desk.device.linear_backward_input(y, w, dx, k, false);
    desk.device.linear_backward_weight(y, x, dw, k);
    desk.device.bias_backward(y, db);
    let (norm_w, norm, inv) = (desk.any(k), desk.blank(t * k), desk.blank(t));
    desk.device.rmsnorm_forward(x, norm_w, norm, inv, 1e-5);
    let (dnorm, dnorm_w) = (desk.blank(t * k), desk.any(k));
    let device = &desk.device;
    device.rmsnorm_backward(x, norm_w, inv, dx, dnorm, dnorm_w, false);
    let table = desk.any(50 * 8);
    let positions: Vec<u32> = (0..t as u32).map(|i| i % 50).collect();
    desk.device.rope(norm, k / 8, 8, table, &positions, false);
    let (g, u, a) = (desk.any(t * k), desk.any(t * k), desk.blank(t * k));
    desk.device.swiglu_forward(g, u, a);
    desk.device.swiglu_backward(g, u, a, g, u);
    let (sum, squares) = (desk.blank(t * k), desk.blank(2));
    desk.device.add(a, g, sum);
    let total = [
        desk.known(desk.device.squared_norm(y)) as f32,
        desk.known(desk.device.sum(y)) as f32,
    ];
    desk.device.write_f32(squares, &total);
    let targets: Vec<u32> = (0..t as u32).map(|i| i % n as u32).collect();
    let (losses, alone) = (desk.blank(t), desk.blank(t));
    desk.device.cross_entropy_loss(y, &targets, alone);
    desk.device.cross_entropy(y, &targets, 0.5, losses);
    let tokens: Vec<u32> = (0..t as u32).map(|i| i * i % 97).collect();
    let embed = desk.any(97 * k);
    desk.device
        .embed_backward(sum, &sorted_tokens(&tokens), embed, k);
    let (gathered, scattered) = (desk.blank(t * k), desk.any(t * k));
    let rows: Vec<u32> = (0..t as u32).rev().collect();
    desk.device.gather_rows(sum, &rows, gathered, k);
    desk.device.scatter_rows(gathered, &rows, scattered, k);
    let short = desk.cut(t * k, Dtype::Bf16);
    desk.device.convert(scattered, short);
    for (sizes, bounds) in attention {
        let shape = attention_shape(*sizes, bounds);
        let tokens = u64::from(bounds[bounds.len() - 1]);
        let wide = tokens * shape.heads * shape.head_dim;
        let slim = tokens * shape.kv_heads * shape.head_dim;
        let (q, k, v, dout) = (
            desk.any(wide),
            desk.any(slim),
            desk.any(slim),
            desk.any(wide),
        );
        let (o, lse) = (desk.blank(wide), desk.blank(tokens * shape.heads));
        let (dq, dk, dv) = (desk.blank(wide), desk.blank(slim), desk.blank(slim));
        desk.device.attention_forward(q, k, v, o, lse, shape);
        let device = &desk.device;
        device.attention_backward(q, k, v, o, lse, dout, dq, dk, dv, shape);
    }
    let mut bytes = vec![0; desk.next as usize];
    desk.device.copy_out(0, &mut bytes);
    bytes
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let attention: &[([u64; 4], &[u32])] = &[
        (heads(3, 1, 16, 0), &[0, 700, 1100]),
        (heads(4, 4, 8, 300), &[0, 900]),
    ];
    let mut first = None;
    for threads in [1, 2, 3, 5, 5, 5] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let bytes = pool.install(|| run_everything(attention));
        let first = first.get_or_insert_with(|| bytes.clone());
        let differs = first.iter().zip(&bytes).position(|(a, b)| a != b);
        assert_eq!(differs, None, "first differing byte with {threads} threads");
    }
}

#[test]
fn poison_shows() {
    let mut desk = Desk::new(5);
    let (x, y) = (desk.any(64), desk.blank(64));
    let short = desk.cut(64, Dtype::Bf16);
    desk.device.poison(short);
    assert!(desk.read(y).iter().all(|v| v.is_nan()));
    assert!(desk.read(short).iter().all(|v| v.is_nan()));
    let neighbour = desk.read(x);
    assert!(neighbour.iter().all(|v| v.is_finite()));
    desk.device.add(x, y, x);
    assert!(desk.read(x).iter().all(|v| v.is_nan()));
}

#[test]
fn copies_run_beside_operations() {
    let mut desk = Desk::new(6);
    let (x, y) = (desk.any(1 << 16), desk.blank(1 << 16));
    let other = desk.cut(1 << 20, Dtype::F32);
    let device = &desk.device;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..20u8 {
                let sent = vec![round; 4 << 20];
                device.copy_in(other.offset, &sent);
                let mut back = vec![0; 4 << 20];
                device.copy_out(other.offset, &mut back);
                assert_eq!(sent, back);
            }
        });
        for _ in 0..100 {
            device.convert(x, y);
        }
    });
    assert_eq!(desk.read(x), desk.read(y));
}

#[test]
fn misuse_is_refused() {
    let mut desk = Desk::new(7);
    let (x, w, y) = (desk.any(12), desk.any(12), desk.any(16));
    let short = desk.cut(12, Dtype::Bf16);
    let device = &desk.device;
    let end = device.arena_bytes();
    let refused: &[(&str, &dyn Fn())] = &[
        ("overlap", &|| device.convert(x, x)),
        ("half overlap", &|| {
            device.add(x.slice(0, 8), w.slice(0, 8), x.slice(4, 8))
        }),
        ("output in input", &|| {
            device.linear_forward(y, w, None, y, 4, false)
        }),
        ("length", &|| device.linear_forward(x, w, None, y, 4, false)),
        ("format", &|| device.add(x, short, w)),
        ("bounds", &|| {
            device.fill(View::new(end - 4, 2, Dtype::F32), 0.0)
        }),
        ("wrap", &|| device.copy_in(u64::MAX, &[1])),
        ("target", &|| {
            device.cross_entropy_loss(x, &[4, 0, 0], y.slice(0, 3))
        }),
        ("row twice", &|| {
            device.scatter_rows(x.slice(0, 4), &[1, 1], w, 2)
        }),
        ("alignment", &|| {
            device.fill(View::new(2, 1, Dtype::F32), 0.0)
        }),
    ];
    let passed: Vec<&str> = refused
        .iter()
        .filter(|(_, call)| std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_ok())
        .map(|(name, _)| *name)
        .collect();
    assert!(passed.is_empty(), "accepted: {passed:?}");
    assert!(Device::cpu(u64::MAX).is_err());
    assert!(Device::cpu(1 << 60).is_err());
}
