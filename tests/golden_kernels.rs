//! Goal: every operation of the CUDA device computes what the CPU device computes, forward and
//! backward, in bf16 and in f32, for aligned and odd shapes; it writes its outputs and nothing
//! else; two runs give the same bits.
//!
//! Method: the same random numbers, already rounded to the activation format, are given to both
//! devices. The CPU's operations are held to f64 elsewhere, so they are the reference here. With e
//! the unit roundoff of the output's format and n the longest sum, an element may be off by
//! 2·e·|want| + (4·√n·2⁻²⁴ + inner)·max|want|: the rounding of the result, f32 sums in another
//! order, and what an operation says it rounds on its way (`inner`; attention's probabilities in
//! bf16). Between views lies memory that must stay as it was. A table of all cases is printed at
//! the end. Without a card, or a library, the test says so and passes.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::cell::RefCell;

use terrace::device::cuda::card_count;
use terrace::device::ops::{AttentionShape, SortedTokens};
use terrace::device::{Device, Dtype, View};
use terrace::host::HostArena;

/// Bytes of the card's arena; the CPU's has twice as many.
const ARENA_BYTES: u64 = 256 << 20;
/// Bytes between views.
const GAP_BYTES: u64 = 256;
/// Unit roundoffs.
const BF16: f64 = 1.0 / 256.0 / 2.0;
const F32: f64 = 1.0 / (1u64 << 24) as f64;

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
}

/// A tensor on both devices.
#[derive(Clone, Copy)]
struct Pair {
    cpu: View,
    cuda: View,
}

/// What a case compares: an output, its longest sum, and what is rounded inside.
struct Output {
    name: &'static str,
    pair: Pair,
    terms: u64,
    inner: f64,
}

/// A line of the table.
struct Line {
    case: String,
    output: &'static str,
    /// Largest error over its limit.
    ratio: f64,
    /// Largest error over the largest value.
    error: f64,
}

/// Both devices, arenas handed out view after view.
struct Desk {
    cpu: Device,
    cuda: Device,
    act: Dtype,
    next: u64,
    /// First byte and end of what must stay as it was.
    gaps: Vec<(u64, u64)>,
    random: Random,
    lines: RefCell<Vec<Line>>,
}

impl Desk {
    fn new(act: Dtype) -> Result<Desk, terrace::Error> {
        let cuda = Device::cuda(0, ARENA_BYTES, act)?;
        Ok(Desk {
            cpu: Device::cpu(2 * ARENA_BYTES)?,
            cuda,
            act,
            next: 0,
            gaps: Vec::new(),
            random: Random(0x7e55_ace5),
            lines: RefCell::default(),
        })
    }

    /// Starts a case: all memory is free again.
    fn clear(&mut self) {
        self.next = 0;
        self.gaps.clear();
    }

    /// Room for `count` elements, `skew` elements past a 256-byte boundary, with a gap behind it.
    fn cut(&mut self, count: u64, dtype: Dtype, skew: u64) -> Pair {
        let from = self.next;
        let start = from + GAP_BYTES + skew * dtype.bytes();
        let end = start + count * dtype.bytes();
        self.next = end.next_multiple_of(GAP_BYTES);
        let all = (self.next + GAP_BYTES - from) / 4;
        self.cuda.poison(View::new(from, all, Dtype::F32));
        self.gaps.push((from, start));
        self.gaps.push((end, self.next + GAP_BYTES));
        // The CPU's activations are f32: twice the offset keeps its views apart too.
        let pair = Pair {
            cpu: View::new(2 * start, count, Dtype::F32),
            cuda: View::new(start, count, dtype),
        };
        self.cpu.poison(pair.cpu);
        pair
    }

    fn blank(&mut self, count: u64) -> Pair {
        self.cut(count, self.act, 0)
    }

    fn blank_f32(&mut self, count: u64) -> Pair {
        self.cut(count, Dtype::F32, 0)
    }

    fn put(&mut self, values: &[f32], dtype: Dtype, skew: u64) -> Pair {
        let pair = self.cut(values.len() as u64, dtype, skew);
        self.cuda.write_f32(pair.cuda, values);
        self.cpu.write_f32(pair.cpu, &self.cuda.read_f32(pair.cuda));
        pair
    }

    fn numbers(&mut self, count: u64, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.random.number() * scale).collect()
    }

    /// Random activations.
    fn any(&mut self, count: u64) -> Pair {
        self.any_scaled(count, 1.0)
    }

    fn any_scaled(&mut self, count: u64, scale: f32) -> Pair {
        let values = self.numbers(count, scale);
        self.put(&values, self.act, 0)
    }

    fn any_skewed(&mut self, count: u64, skew: u64) -> Pair {
        let values = self.numbers(count, 1.0);
        self.put(&values, self.act, skew)
    }

    fn any_f32(&mut self, count: u64) -> Pair {
        let values = self.numbers(count, 1.0);
        self.put(&values, Dtype::F32, 0)
    }

    /// Runs an operation on both devices and compares its outputs.
    fn run(
        &self,
        case: &str,
        outputs: &[Output],
        operation: impl Fn(&Device, &dyn Fn(Pair) -> View),
    ) {
        operation(&self.cpu, &|pair| pair.cpu);
        operation(&self.cuda, &|pair| pair.cuda);
        self.cuda.settle();
        if let Err(error) = self.cuda.check() {
            panic!("{case}: {error}");
        }
        for output in outputs {
            let want = self.cpu.read_f32(output.pair.cpu);
            let got = self.cuda.read_f32(output.pair.cuda);
            let unit = match output.pair.cuda.dtype {
                Dtype::Bf16 => BF16,
                Dtype::F32 => F32,
            };
            self.compare(case, output, unit, &got, &want);
        }
        for (start, end) in &self.gaps {
            let mut bytes = vec![0u8; (end - start) as usize];
            self.cuda.copy_out(*start, &mut bytes);
            let untouched = bytes.iter().all(|byte| *byte == 0xff);
            assert!(untouched, "{case}: wrote between views, in {start}..{end}");
        }
    }

    fn compare(&self, case: &str, output: &Output, unit: f64, got: &[f32], want: &[f32]) {
        let largest = want.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
        let sums = (4.0 * (output.terms as f64).sqrt() * F32 + output.inner) * largest;
        let (mut ratio, mut error) = (0.0f64, 0.0f64);
        for (got, want) in got.iter().zip(want) {
            let (got, want) = (f64::from(*got), f64::from(*want));
            let off = (got - want).abs();
            let over = off / (2.0 * unit * want.abs() + sums).max(f64::MIN_POSITIVE);
            // A NaN is as wrong as can be.
            ratio = ratio.max(if over.is_nan() { f64::INFINITY } else { over });
            error = error.max(if off.is_nan() { f64::INFINITY } else { off });
        }
        self.lines.borrow_mut().push(Line {
            case: format!("{case} {:?}", self.act),
            output: output.name,
            ratio,
            error: error / largest.max(f64::MIN_POSITIVE),
        });
    }
}

fn output(name: &'static str, pair: Pair, terms: u64) -> Output {
    Output {
        name,
        pair,
        terms,
        inner: 0.0,
    }
}

fn elementwise(desk: &mut Desk) {
    for (count, skew) in [(1u64, 0), (7, 1), (4096, 0), (100_003, 3)] {
        desk.clear();
        let (a, b) = (desk.any_skewed(count, skew), desk.any_skewed(count, skew));
        let (sum, filled) = (desk.blank(count), desk.blank(count));
        let case = format!("elementwise {count}+{skew}");
        desk.run(
            &case,
            &[output("add", sum, 2), output("fill", filled, 1)],
            |device, at| {
                device.add(at(a), at(b), at(sum));
                device.fill(at(filled), -0.375);
            },
        );
        desk.run(&case, &[output("add in place", a, 2)], |device, at| {
            device.add(at(a), at(b), at(a));
        });
        let (wide, back) = (desk.blank_f32(count), desk.blank(count));
        desk.run(
            &case,
            &[output("to f32", wide, 1), output("from f32", back, 1)],
            |device, at| {
                device.convert(at(b), at(wide));
                device.convert(at(wide), at(back));
            },
        );
        // Gate and up stay within ±4, where silu bends.
        let (g, u) = (desk.any_scaled(count, 4.0), desk.any_scaled(count, 4.0));
        let (da, a) = (desk.any(count), desk.blank(count));
        desk.run(&case, &[output("swiglu", a, 4)], |device, at| {
            device.swiglu_forward(at(g), at(u), at(a));
        });
        let outputs = [output("swiglu dg", g, 8), output("swiglu du", u, 8)];
        desk.run(&case, &outputs, |device, at| {
            device.swiglu_backward(at(g), at(u), at(da), at(g), at(u));
        });
    }
}

fn norms(desk: &mut Desk) {
    for (rows, columns) in [
        (1u64, 8u64),
        (5, 33),
        (700, 64),
        (300, 128),
        (64, 576),
        (33, 896),
        (40, 3584),
        (9, 16384),
    ] {
        desk.clear();
        let (x, w, dy) = (
            desk.any(rows * columns),
            desk.any(columns),
            desk.any(rows * columns),
        );
        let (y, inv) = (desk.blank(rows * columns), desk.blank_f32(rows));
        let case = format!("rmsnorm {rows}x{columns}");
        desk.run(
            &case,
            &[output("y", y, columns), output("inv", inv, columns)],
            |device, at| {
                device.rmsnorm_forward(at(x), at(w), at(y), at(inv), 1e-5);
            },
        );
        let inv_values = desk.cpu.read_f32(inv.cpu);
        let inv = desk.put(&inv_values, Dtype::F32, 0);
        let (dx, dw) = (desk.any(rows * columns), desk.any_f32(columns));
        let outputs = [output("dx added", dx, columns), output("dw", dw, rows)];
        desk.run(&case, &outputs, |device, at| {
            let (dx, dw) = (at(dx), at(dw));
            device.rmsnorm_backward(at(x), at(w), at(inv), at(dy), dx, dw, true);
        });
        desk.run(
            &case,
            &[output("dx in place", dy, columns)],
            |device, at| {
                let (dy, dw) = (at(dy), at(dw));
                device.rmsnorm_backward(at(x), at(w), at(inv), dy, dy, dw, false);
            },
        );
    }
}

fn rotations(desk: &mut Desk) {
    for (tokens, heads, width) in [(1u64, 1u64, 8u64), (130, 14, 64), (65, 3, 128), (9, 5, 12)] {
        desk.clear();
        let table = desk.any_f32(2 * tokens * width);
        let positions: Vec<u32> = (0..tokens).map(|t| (t * 7 % (2 * tokens)) as u32).collect();
        for inverse in [false, true] {
            let x = desk.any(tokens * heads * width);
            let case = format!("rope {tokens}x{heads}x{width} inverse {inverse}");
            desk.run(&case, &[output("x", x, 2)], |device, at| {
                device.rope(at(x), heads, width, at(table), &positions, inverse);
            });
        }
    }
}

fn products(desk: &mut Desk) {
    // Tokens, inner, outer, skew of the weight: aligned, a token alone, and at last odd in every
    // side.
    for (t, k, n, skew) in [
        (128u64, 256u64, 512u64, 0u64),
        (1, 896, 128, 0),
        (333, 576, 1536, 8),
        (2048, 3584, 512, 0),
        (64, 64, 49152, 0),
        (77, 49, 35, 3),
    ] {
        desk.clear();
        let case = format!("linear {t}x{k}x{n}+{skew}");
        let (x, w) = (desk.any(t * k), desk.any_skewed(n * k, skew));
        let (bias, y) = (desk.any_skewed(n, skew + 1), desk.blank(t * n));
        desk.run(&case, &[output("y", y, k)], |device, at| {
            device.linear_forward(at(x), at(w), None, at(y), k, false);
        });
        // cublasLt may round a product before something is added to it, as a linear layer and then
        // a sum do in PyTorch.
        let inner = if desk.act == Dtype::Bf16 {
            2.0 * BF16
        } else {
            0.0
        };
        let onto = |name, pair, terms| Output {
            name,
            pair,
            terms,
            inner,
        };
        let more = desk.any(t * n);
        desk.run(&case, &[onto("y added", more, k)], |device, at| {
            device.linear_forward(at(x), at(w), None, at(more), k, true);
        });
        desk.run(&case, &[onto("y with bias", y, k)], |device, at| {
            device.linear_forward(at(x), at(w), Some(at(bias)), at(y), k, false);
        });
        let start = desk.any(t * n);
        desk.run(
            &case,
            &[onto("y with bias added", start, k)],
            |device, at| {
                device.linear_forward(at(x), at(w), Some(at(bias)), at(start), k, true);
            },
        );
        let (dy, dx) = (desk.any(t * n), desk.blank(t * k));
        desk.run(&case, &[output("dx", dx, n)], |device, at| {
            device.linear_backward_input(at(dy), at(w), at(dx), k, false);
        });
        let added = desk.any(t * k);
        desk.run(&case, &[onto("dx added", added, n)], |device, at| {
            device.linear_backward_input(at(dy), at(w), at(added), k, true);
        });
        let (dw, db) = (desk.any_f32(n * k), desk.any_f32(n));
        desk.run(
            &case,
            &[output("dw", dw, t), output("db", db, t)],
            |device, at| {
                device.linear_backward_weight(at(dy), at(x), at(dw), k);
                device.bias_backward(at(dy), at(db));
            },
        );
    }
}

/// Heads, key heads, width, window, bounds.
type Heads = (u64, u64, u64, Option<u64>, Vec<u32>);

fn attention(desk: &mut Desk) {
    let cases: Vec<Heads> = vec![
        (2, 1, 16, None, vec![0, 37]),
        (4, 2, 64, None, vec![0, 200]),
        (3, 3, 64, Some(33), vec![0, 150, 151, 400]),
        (4, 1, 80, None, vec![0, 65, 130]),
        (2, 2, 96, Some(64), vec![0, 257]),
        (8, 2, 128, None, vec![0, 512]),
        (4, 4, 128, Some(100), vec![0, 1, 129, 513, 700]),
        (2, 1, 256, None, vec![0, 190]),
    ];
    let inner = if desk.act == Dtype::Bf16 {
        2.0 * BF16
    } else {
        16.0 * F32
    };
    for (heads, kv_heads, head_dim, window, bounds) in cases {
        desk.clear();
        let tokens = u64::from(*bounds.last().expect("an end"));
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
            window,
            bounds: &bounds,
        };
        let case = format!("attention {tokens}x{heads}/{kv_heads}x{head_dim} window {window:?}");
        let (wide, narrow) = (tokens * heads * head_dim, tokens * kv_heads * head_dim);
        let (q, k) = (desk.any_scaled(wide, 2.0), desk.any_scaled(narrow, 2.0));
        let (v, do_) = (desk.any(narrow), desk.any(wide));
        let (o, lse) = (desk.blank(wide), desk.blank_f32(heads * tokens));
        let of = |name, pair, inner| Output {
            name,
            pair,
            terms: tokens,
            inner,
        };
        let outputs = [of("o", o, inner), of("lse", lse, 16.0 * F32)];
        desk.run(&case, &outputs, |device, at| {
            device.attention_forward(at(q), at(k), at(v), at(o), at(lse), shape);
        });
        let (o, lse) = (desk.cpu.read_f32(o.cpu), desk.cpu.read_f32(lse.cpu));
        let (o, lse) = (desk.put(&o, desk.act, 0), desk.put(&lse, Dtype::F32, 0));
        let (dq, dk, dv) = (desk.blank(wide), desk.blank(narrow), desk.blank(narrow));
        let inner = 2.0 * inner;
        let outputs = [
            of("dq", dq, inner),
            of("dk", dk, inner),
            of("dv", dv, inner),
        ];
        desk.run(&case, &outputs, |device, at| {
            device.attention_backward(
                at(q),
                at(k),
                at(v),
                at(o),
                at(lse),
                at(do_),
                at(dq),
                at(dk),
                at(dv),
                shape,
            );
        });
    }
}

fn losses(desk: &mut Desk) {
    for (rows, vocab) in [(1u64, 5u64), (37, 1000), (64, 49152), (16, 151_936)] {
        desk.clear();
        let z = desk.any_scaled(rows * vocab, 8.0);
        let (only, both) = (desk.blank_f32(rows), desk.blank_f32(rows));
        let targets: Vec<u32> = (0..rows).map(|r| (r * 7919 % vocab) as u32).collect();
        let case = format!("loss {rows}x{vocab}");
        desk.run(&case, &[output("losses", only, vocab)], |device, at| {
            device.cross_entropy_loss(at(z), &targets, at(only));
        });
        desk.run(
            &case,
            &[output("losses", both, vocab), output("dz", z, vocab)],
            |device, at| {
                device.cross_entropy(at(z), &targets, 0.125, at(both));
            },
        );
    }
}

fn rows(desk: &mut Desk) {
    for (height, columns) in [(50u64, 7u64), (400, 576), (64, 4104)] {
        desk.clear();
        let (x, target) = (desk.any(height * columns), desk.any(height * columns));
        let rows: Vec<u32> = (0..height as u32).rev().step_by(3).collect();
        let out = desk.blank(rows.len() as u64 * columns);
        let case = format!("rows {height}x{columns}");
        let outputs = [output("gather", out, 1), output("scatter", target, 1)];
        desk.run(&case, &outputs, |device, at| {
            device.gather_rows(at(x), &rows, at(out), columns);
            device.scatter_rows(at(out), &rows, at(target), columns);
        });
        let mut order = SortedTokens::default();
        // Ids 1, 4, 7, …: the first has half of all positions.
        let mut positions = 0..height as u32;
        order.starts.push(0);
        for (index, share) in [height / 2, 1, height / 4, 3].into_iter().enumerate() {
            order.ids.push(1 + 3 * index as u32);
            order
                .positions
                .extend(positions.by_ref().take(share as usize));
            order.starts.push(order.positions.len() as u32);
        }
        order.ids.push(13);
        order.positions.extend(positions);
        order.starts.push(order.positions.len() as u32);
        let (dy, dw) = (desk.any(height * columns), desk.any_f32(20 * columns));
        desk.run(&case, &[output("embed dw", dw, height)], |device, at| {
            device.embed_backward(at(dy), &order, at(dw), columns);
        });
    }
}

/// Rows that the card reads from pinned host memory; from memory that is not, it must refuse.
fn host_rows(desk: &mut Desk) {
    let (height, columns) = (300u64, 200u64);
    desk.clear();
    let width = desk.act.bytes();
    let values = desk.numbers(height * columns, 1.0);
    let table = desk.put(&values, desk.act, 0);
    let mut cutter = HostArena::take(height * columns * width).unwrap();
    let Device::Cuda(cuda) = &desk.cuda else {
        unreachable!("the desk has a card");
    };
    cuda.pin(cutter.span()).unwrap();
    let mut home = cutter.cut(height * columns * width);
    desk.cuda.copy_out(table.cuda.offset, home.as_mut_slice());
    let unpinned = home.as_slice::<u8>().to_vec();
    let rows: Vec<u32> = (0..1000).map(|i| i * 7 % 300).collect();
    let out = desk.blank(1000 * columns);
    let act = desk.act;
    desk.run(
        "rows of the host",
        &[output("gather", out, 1)],
        |device, at| match device {
            Device::Cpu(_) => device.gather_rows(at(table), &rows, at(out), columns),
            Device::Cuda(_) => {
                let bytes = home.as_slice::<u8>();
                assert!(device.gather_host_rows(act, bytes, &rows, at(out), columns));
                assert!(!device.gather_host_rows(act, &unpinned, &rows, at(out), columns));
            }
        },
    );
}

fn sums(desk: &mut Desk) {
    for count in [1u64, 3, 8191, 8193, 40_000, 3_000_001] {
        desk.clear();
        let x = desk.any_f32(count);
        let case = format!("sums {count}");
        for squared in [true, false] {
            let of = |device: &Device, view| {
                let number = match squared {
                    true => device.squared_norm(view),
                    false => device.sum(view),
                };
                device.settle();
                device.number(number)
            };
            let (want, got) = (of(&desk.cpu, x.cpu), of(&desk.cuda, x.cuda));
            let name = if squared { "squared norm" } else { "sum" };
            let scale = if squared { want } else { (count as f64).sqrt() };
            let ratio = (got - want).abs() / (1e-13 * scale.max(1.0) * (count as f64).sqrt());
            desk.lines.borrow_mut().push(Line {
                case: case.clone(),
                output: name,
                ratio: if ratio.is_nan() { f64::INFINITY } else { ratio },
                error: (got - want).abs() / scale,
            });
        }
        // Both round to bf16 in place: bit for bit.
        desk.cpu.round_in_place(x.cpu);
        desk.cuda.round_in_place(x.cuda);
        let half = |view: View| View::new(view.offset, count, Dtype::Bf16);
        let same = desk.cpu.read_f32(half(x.cpu)) == desk.cuda.read_f32(half(x.cuda));
        assert!(same, "{case}: round in place");
    }
}

fn print_table(lines: &[Line]) {
    println!(
        "{:52} {:18} {:>10} {:>8}",
        "case", "output", "error/max", "of limit"
    );
    for line in lines {
        let mark = if line.ratio <= 1.0 { "" } else { "  <-- FAILS" };
        println!(
            "{:52} {:18} {:10.2e} {:8.3}{mark}",
            line.case, line.output, line.error, line.ratio
        );
    }
}

/// A case that stops the test still shows what was before it.
impl Drop for Desk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            print_table(&self.lines.borrow());
        }
    }
}

/// All cases on one device pair; the table's lines.
fn all(act: Dtype) -> Result<Vec<Line>, terrace::Error> {
    let mut desk = Desk::new(act)?;
    elementwise(&mut desk);
    norms(&mut desk);
    rotations(&mut desk);
    attention(&mut desk);
    losses(&mut desk);
    rows(&mut desk);
    host_rows(&mut desk);
    sums(&mut desk);
    products(&mut desk);
    desk.cuda.check()?;
    Ok(desk.lines.take())
}

#[test]
fn cuda_computes_what_the_cpu_computes() {
    match card_count() {
        Ok(0) => return println!("SKIP: the driver sees no card"),
        Err(error) => return println!("SKIP: {error}"),
        Ok(_) => {}
    }
    let mut lines = Vec::new();
    for act in [Dtype::F32, Dtype::Bf16] {
        let (once, again) = (all(act).unwrap(), all(act).unwrap());
        for (a, b) in once.iter().zip(&again) {
            // The same error to the last bit: two runs agree.
            assert_eq!(
                a.error.to_bits(),
                b.error.to_bits(),
                "{} {}",
                a.case,
                a.output
            );
        }
        lines.extend(once);
    }
    print_table(&lines);
    let failed = lines.iter().filter(|line| line.ratio > 1.0).count();
    assert_eq!(failed, 0, "{failed} of {} outputs are off", lines.len());
}
