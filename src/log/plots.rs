//! Charts of a run: curves over steps, what tiers hold, seconds of a step, stalls.

use std::collections::BTreeSet;

use serde_json::Value;

use super::history::{History, Row, Spread};
use crate::plan::bytes_text;
use crate::report::bars::{Bar, BarChart};
use crate::report::chart::{Line, LineChart, Unit, axis_from};
use crate::stats::{WAIT_NAMES, Wait};

/// Steps that are left out of what is compared with the plan: they fill caches.
const WARM_UP: u64 = 2;

/// Charts by name; those without numbers are left out.
pub(super) fn charts(history: &History) -> Vec<(&'static str, String)> {
    let curves = curves(history).into_iter();
    let others = [
        ("plan", tiers(history)),
        ("hops", lanes(history)),
        ("stalls", stalls(history)),
    ];
    let others = others
        .into_iter()
        .filter_map(|(name, chart)| Some((name, chart?.svg())));
    curves
        .map(|(name, chart)| (name, chart.svg()))
        .chain(others)
        .collect()
}

fn points(rows: &[Row], value: impl Fn(&Row) -> f64) -> Vec<(f64, f64)> {
    rows.iter()
        .map(|row| (row.step as f64, value(row)))
        .collect()
}

/// Curves over steps, by name.
pub(super) fn curves(history: &History) -> Vec<(&'static str, LineChart)> {
    let joined = history.rows.iter().any(|row| row.count > 1);
    let line = |name: &str, of: fn(&Row) -> Spread| Line {
        name: name.to_string(),
        series: 1,
        points: points(&history.rows, |row| of(row).mean()),
        spreads: match joined {
            true => history.rows.iter().map(|row| of(row).ends()).collect(),
            false => Vec::new(),
        },
    };
    let evaluations = history.evaluations.iter();
    let evaluations: Vec<_> = evaluations.map(|(at, loss)| (*at as f64, *loss)).collect();
    let mut loss = vec![line("training", |row| row.loss)];
    if !evaluations.is_empty() {
        loss.push(Line {
            name: "held-out".to_string(),
            series: 2,
            points: evaluations,
            spreads: Vec::new(),
        });
    }
    let rate = Line {
        name: String::new(),
        series: 1,
        points: points(&history.rows, Row::tokens_per_second),
        spreads: Vec::new(),
    };
    let learning_rate = vec![line("", |row| row.learning_rate)];
    let norm = vec![line("", |row| row.grad_norm)];
    let norm_title = "Gradient norm, before clipping";
    let all = [
        ("loss", "Loss", Unit::Of("nats"), loss),
        ("learning_rate", "Learning rate", Unit::Plain, learning_rate),
        ("gradient_norm", norm_title, Unit::Plain, norm),
        (
            "tokens_per_second",
            "Tokens a second",
            Unit::Of("tokens/s"),
            vec![rate],
        ),
    ];
    let finite = |lines: &[Line]| {
        let points = lines.iter().flat_map(|line| &line.points);
        let finite = points.filter(|(_, y)| y.is_finite()).map(|(_, y)| *y);
        finite.collect::<Vec<f64>>()
    };
    let charts = all.into_iter().filter_map(|(name, title, y_unit, lines)| {
        let values = finite(&lines);
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let chart = LineChart {
            title: title.to_string(),
            x_label: "step".to_string(),
            x_whole: true,
            y_unit,
            x_from: None,
            y_from: (name == "loss").then(|| axis_from(least, most)),
            lines,
        };
        (!values.is_empty()).then_some((name, chart))
    });
    charts.collect()
}

/// Bytes of a tier by what they are: weights, states, gradients, all else.
fn tier_bytes(plan: &Value, tier: &str) -> [u64; 4] {
    let bytes = |value: &Value| value.as_u64().unwrap_or(0);
    let section = |name: &str| bytes(&plan["sections"][name][tier]);
    let weights = section("weight");
    let states = section("residual") + section("moment1") + section("moment2");
    let (gradients, total) = match tier {
        "device" => (
            bytes(&plan["gradients_on_device"]),
            bytes(&plan["device_arena"]["total"]) + bytes(&plan["device_fixed"]),
        ),
        "host" => (
            bytes(&plan["host"]["gradients"]),
            bytes(&plan["host"]["total"]),
        ),
        _ => (0, bytes(&plan["store"]["total"])),
    };
    let named = weights + states + gradients;
    [weights, states, gradients, total.saturating_sub(named)]
}

/// Tiers as the plan fills them.
pub fn tier_totals(run: &Value) -> Vec<(&'static str, [u64; 4], u64)> {
    let plan = &run["plan"];
    let tiers = ["device", "host", "store"].map(|tier| {
        let budget = plan["budgets"][tier].as_u64().unwrap_or(0);
        (tier, tier_bytes(plan, tier), budget)
    });
    let used = tiers
        .into_iter()
        .filter(|(_, parts, _)| parts.iter().any(|bytes| *bytes > 0));
    used.collect()
}

pub(super) fn tiers(history: &History) -> Option<BarChart> {
    let mut bars: Vec<Bar> = tier_totals(&history.run)
        .into_iter()
        .map(|(tier, parts, budget)| {
            let total = parts.iter().sum::<u64>();
            let parts = parts.iter().enumerate();
            Bar {
                name: tier.to_string(),
                text: format!("{} of {}", bytes_text(total), bytes_text(budget)),
                parts: parts.map(|(at, bytes)| (at + 1, *bytes as f64)).collect(),
                limit: Some(budget as f64),
            }
        })
        .collect();
    let checkpoints = history.run["plan"]["checkpoint"]["total"].as_u64();
    if let Some(bytes) = checkpoints.filter(|bytes| *bytes > 0) {
        bars.push(Bar {
            name: "checkpoints".to_string(),
            text: bytes_text(bytes),
            parts: vec![(5, bytes as f64)],
            limit: None,
        });
    }
    let legend = [
        "weights",
        "optimizer state",
        "gradients",
        "activations and buffers",
    ];
    (!bars.is_empty()).then(|| BarChart {
        title: "What each tier holds, of its budget".to_string(),
        legend: legend.map(str::to_string).to_vec(),
        bars,
        own_scales: true,
    })
}

/// Steps after the warm-up, joined. One that follows an evaluation or a sample is left out where it
/// is told apart: updates that run under the next step were waited for before it.
pub(super) fn settled(history: &History) -> Option<Row> {
    let evaluations = history.evaluations.iter().map(|(step, _)| *step);
    let samples = history.samples.iter().map(|sample| sample.step);
    let stops: BTreeSet<u64> = evaluations.chain(samples).collect();
    let is_whole = |row: &&Row| row.count > 1 || !stops.contains(&(row.step.saturating_sub(1)));
    let late = || history.rows.iter().filter(|row| row.step > WARM_UP);
    let joined = |rows: &mut dyn Iterator<Item = &Row>| {
        let rows = rows.copied();
        rows.reduce(|sum, row| sum.join(&row))
    };
    let whole = joined(&mut late().filter(is_whole));
    whole
        .or_else(|| joined(&mut late()))
        .or_else(|| history.total())
}

/// Name, predicted and measured seconds a step of each lane.
fn lane_seconds(history: &History) -> Option<Vec<(&'static str, f64, f64)>> {
    let row = settled(history)?;
    let prediction = &history.run["plan"]["prediction"];
    let predicted = |name: &str| prediction[name].as_f64().unwrap_or(0.0);
    let compute = [
        Wait::ComputeForWeights,
        Wait::ComputeForDemote,
        Wait::ComputeForAnchors,
    ];
    let waits: f64 = compute.map(|wait| row.stalls[wait as usize]).iter().sum();
    let lanes = [
        ("step", "step_seconds", row.seconds),
        ("compute", "compute_seconds", (row.seconds - waits).max(0.0)),
        ("promote", "promote_seconds", row.busy[0]),
        ("demote", "demote_seconds", row.busy[1]),
        ("store", "store_seconds", row.store_seconds),
        ("AdamW", "update_seconds", row.update_core_seconds),
    ];
    let count = row.count as f64;
    let lanes = lanes.map(|(name, key, seconds)| (name, predicted(key), seconds / count));
    let told = prediction.is_object();
    told.then(|| {
        let there = |(_, a, b): &(&str, f64, f64)| *a > 0.0 || *b > 0.0;
        lanes.into_iter().filter(there).collect()
    })
}

pub(super) fn lanes(history: &History) -> Option<BarChart> {
    let mut bars = Vec::new();
    for (name, predicted, measured) in lane_seconds(history)? {
        let text = |seconds: f64| Unit::Nanoseconds.text(seconds * 1e9);
        bars.push(Bar {
            name: name.to_string(),
            text: text(predicted),
            parts: vec![(1, predicted)],
            limit: None,
        });
        let apart = match measured / predicted {
            times if !times.is_finite() => String::new(),
            times if times >= 10.0 => format!(" ({times:.0} ×)"),
            times => format!(" ({:+.0} %)", 100.0 * (times - 1.0)),
        };
        bars.push(Bar {
            text: format!("{}{apart}", text(measured)),
            parts: vec![(2, measured)],
            ..Bar::default()
        });
    }
    Some(BarChart {
        title: "Seconds of a step".to_string(),
        legend: vec!["predicted".to_string(), "measured".to_string()],
        bars,
        own_scales: false,
    })
}

/// What waits are, for people, by [`crate::stats::Wait`].
pub const WAITS: [&str; WAIT_NAMES.len()] = [
    "compute: weights",
    "compute: demotion",
    "promotion: update",
    "update: store",
    "update: commit",
    "compute: anchors",
];

pub(super) fn stalls(history: &History) -> Option<BarChart> {
    let total = history.total().filter(|total| total.seconds > 0.0)?;
    let bars = WAITS.iter().zip(total.stalls).map(|(name, seconds)| Bar {
        name: name.to_string(),
        text: format!(
            "{} ({:.1} %)",
            duration_text(seconds),
            100.0 * seconds / total.seconds
        ),
        parts: vec![(2, seconds)],
        limit: None,
    });
    Some(BarChart {
        title: "Seconds that a lane stood still, of all steps".to_string(),
        legend: Vec::new(),
        bars: bars.collect(),
        own_scales: false,
    })
}

/// 59 s, 3 min 20 s, 2 h 5 min, 3 d 4 h.
pub fn duration_text(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..10 => format!("{seconds:.1} s"),
        10..60 => format!("{whole} s"),
        60..3_600 => format!("{} min {} s", whole / 60, whole % 60),
        3_600..86_400 => format!("{} h {} min", whole / 3_600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3_600 % 24),
    }
}
