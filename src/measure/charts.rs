//! Outcomes as a page: one panel a job, bandwidth over time and latencies of each direction.

use super::outcome::Outcome;
use super::profile::date_text;
use crate::report::chart::{HistogramChart, Line, LineChart, Unit};
use crate::report::page::{Page, Panel, Part, Table};

/// Steps of a doubling in a histogram.
const BARS_PER_OCTAVE: usize = 8;
/// Least points of a line, where the run was long enough.
const POINTS: u64 = 60;
const NAMES: [&str; 2] = ["read", "write"];
const TITLES: [&str; 2] = ["Read", "Write"];

/// The page, complete in itself.
pub fn page(outcomes: &[Outcome]) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let date = date_text(now.unwrap_or_default().as_secs());
    let count = outcomes.len();
    let jobs = if count == 1 {
        "1 job".to_string()
    } else {
        format!("{count} jobs")
    };
    Page {
        title: "terrace-bench".to_string(),
        subtitle: format!("{jobs}, {date}, version {}", env!("CARGO_PKG_VERSION")),
        panels: outcomes.iter().map(panel).collect(),
    }
    .html()
}

fn panel(outcome: &Outcome) -> Panel {
    let given = outcome.job.given.iter();
    let options: Vec<String> = given
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let mut parts = Vec::new();
    if let Some(error) = &outcome.error {
        parts.push(Part::Failure(error.to_string()));
    }
    if outcome.sides.iter().any(|side| side.count > 0) {
        parts.push(Part::Table(table(outcome)));
        parts.push(Part::Chart(bandwidth(outcome).svg()));
        parts.extend(
            latencies(outcome)
                .iter()
                .map(|chart| Part::Chart(chart.svg())),
        );
    }
    parts.extend(outcome.notes.iter().cloned().map(Part::Text));
    Panel {
        title: outcome.job.name.clone(),
        subtitle: options.join("  "),
        parts,
    }
}

fn active(outcome: &Outcome) -> impl Iterator<Item = usize> + '_ {
    [0, 1]
        .into_iter()
        .filter(|side| outcome.sides[*side].count > 0)
}

fn table(outcome: &Outcome) -> Table {
    let heads = [
        "",
        "bandwidth",
        "IOPS",
        "mean",
        "p50",
        "p99",
        "p99.9",
        "max",
    ];
    let rows = active(outcome).map(|index| {
        let side = &outcome.sides[index];
        let mut row = vec![
            NAMES[index].to_string(),
            Unit::BytesPerSecond.text(outcome.bytes_per_second(index)),
            Unit::Plain.text(outcome.count_per_second(index)),
            Unit::Nanoseconds.text(side.total.mean()),
        ];
        let percentiles = [50.0, 99.0, 99.9].map(|percent| side.total.percentile(percent));
        let values = percentiles.into_iter().chain([side.total.max()]);
        row.extend(values.map(|value| Unit::Nanoseconds.text(value as f64)));
        row
    });
    Table {
        heads: heads.map(str::to_string).to_vec(),
        rows: rows.collect(),
    }
}

fn bandwidth(outcome: &Outcome) -> LineChart {
    let lines = active(outcome).map(|index| {
        let series = &outcome.sides[index].series;
        let length_ms = series.bytes.len() as u64 * series.interval_ms;
        // Second by second in a long run, finer in a short one.
        let interval = (length_ms / POINTS / 100 * 100).clamp(series.interval_ms.max(200), 60_000);
        let interval = interval.max(series.interval_ms);
        let seconds = interval as f64 / 1e3;
        let rates = series.rates(interval);
        let points = rates.iter().enumerate();
        let points = points
            .map(|(at, rate)| ((at as f64 + 0.5) * seconds, *rate))
            .collect();
        Line {
            name: NAMES[index].to_string(),
            series: index + 1,
            points,
            spreads: Vec::new(),
        }
    });
    LineChart {
        title: "Bandwidth".to_string(),
        x_label: "seconds".to_string(),
        x_whole: false,
        y_unit: Unit::BytesPerSecond,
        x_from: Some(0.0),
        y_from: None,
        lines: lines.collect(),
    }
}

/// One chart a direction, over the same range.
fn latencies(outcome: &Outcome) -> Vec<HistogramChart> {
    let sides = || active(outcome).map(|index| &outcome.sides[index].total);
    let bars: Vec<_> = sides()
        .map(|histogram| histogram.bars(BARS_PER_OCTAVE))
        .collect();
    let least = bars
        .iter()
        .filter_map(|bars| bars.first())
        .map(|bar| bar.0)
        .min();
    let most = bars
        .iter()
        .filter_map(|bars| bars.last())
        .map(|bar| bar.1)
        .max();
    let range = least
        .zip(most)
        .map(|(least, most)| (least as f64, most as f64));
    let charts = active(outcome).zip(bars).map(|(index, bars)| {
        let histogram = &outcome.sides[index].total;
        let count = histogram.count().max(1) as f64;
        let percent = |count_in: u64| 100.0 * count_in as f64 / count;
        HistogramChart {
            title: format!("{} latency, share of {}", TITLES[index], histogram.count()),
            x_unit: Unit::Nanoseconds,
            bars: bars
                .iter()
                .map(|(a, b, n)| (*a as f64, *b as f64, percent(*n)))
                .collect(),
            markers: [(50.0, "p50"), (99.0, "p99"), (99.9, "p99.9")]
                .map(|(at, name)| (histogram.percentile(at) as f64, name.to_string()))
                .to_vec(),
            range,
            series: index + 1,
        }
    });
    charts.collect()
}
