//! Outcomes as fio prints them.

use std::fmt::Write;

use super::fio_json::{Samples, shares};
use super::histogram::{Histogram, PERCENTILES};
use super::outcome::{Outcome, Side};

/// The report of all jobs.
pub fn report(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for outcome in outcomes {
        job(&mut text, outcome).expect("a String takes all");
    }
    summary(&mut text, outcomes).expect("a String takes all");
    text
}

type Written = std::fmt::Result;

fn job(text: &mut String, outcome: &Outcome) -> Written {
    let error = match &outcome.error {
        None => "0".to_string(),
        Some(error) => format!("({error})"),
    };
    writeln!(
        text,
        "\n{}: (groupid={}, jobs={}): err= {error}",
        outcome.job.name, outcome.group, outcome.copies
    )?;
    for note in &outcome.notes {
        writeln!(text, "  {note}")?;
    }
    for (index, name) in ["read", "write"].iter().enumerate() {
        if outcome.sides[index].count > 0 {
            side(text, outcome, index, name)?;
        }
    }
    if outcome.flushes.count() > 0 {
        let name = "fdatasync";
        latency(text, name, &outcome.flushes, 2)?;
    }
    for (unit, table) in ["nsec", "usec", "msec"].iter().zip(shares(outcome)) {
        let shown: Vec<String> = table
            .iter()
            .filter(|(_, share)| *share >= 0.005)
            .map(|(bound, share)| format!("{bound}={share:.2}%"))
            .collect();
        if !shown.is_empty() {
            writeln!(text, "  lat ({unit})   : {}", shown.join(", "))?;
        }
    }
    tail(text, outcome)
}

fn tail(text: &mut String, outcome: &Outcome) -> Written {
    let (user, system) = outcome.cpu_percent();
    let usage = &outcome.usage;
    writeln!(
        text,
        "  cpu          : usr={user:.2}%, sys={system:.2}%, ctx={}, majf={}, minf={}",
        usage.switches, usage.major_faults, usage.minor_faults
    )?;
    let bytes = (outcome.sides[0].bytes + outcome.sides[1].bytes) as f64;
    if bytes > 0.0 {
        let cores = (usage.user_seconds + usage.system_seconds) / (bytes / GIB);
        let checked = match outcome.checked.seconds {
            seconds if seconds > 0.0 => {
                format!(
                    ", of which checksums {:.2}%",
                    100.0 * seconds / (bytes / GIB)
                )
            }
            _ => String::new(),
        };
        writeln!(
            text,
            "  cpu/GiB/s    : {:.2}% of a core{checked}",
            100.0 * cores
        )?;
    }
    let shares = |values: [f64; 7], labels: [&str; 7]| {
        let pairs = labels.iter().zip(values);
        pairs
            .map(|(label, value)| format!("{label}={value:.1}%"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let levels = shares(
        outcome.depth_percents(),
        ["1", "2", "4", "8", "16", "32", ">=64"],
    );
    writeln!(text, "  IO depths    : {levels}")?;
    let labels = ["0", "4", "8", "16", "32", "64", ">=64"];
    writeln!(
        text,
        "     complete  : {}",
        shares(outcome.batch_percents(), labels)
    )?;
    let [reads, writes] = &outcome.sides;
    writeln!(
        text,
        "     issued rwts: total={},{},0,{}",
        reads.count,
        writes.count,
        outcome.flushes.count()
    )
}

const GIB: f64 = (1u64 << 30) as f64;

fn side(text: &mut String, outcome: &Outcome, index: usize, name: &str) -> Written {
    let side = &outcome.sides[index];
    writeln!(
        text,
        "  {name}: IOPS={}, BW={} ({})({}/{}msec)",
        count_text(outcome.count_per_second(index)),
        binary(outcome.bytes_per_second(index), "/s"),
        decimal(outcome.bytes_per_second(index), "/s"),
        binary(side.bytes as f64, ""),
        side.runtime.as_millis()
    )?;
    latency(text, "slat", &side.submission, 4)?;
    latency(text, "clat", &side.completion, 4)?;
    latency(text, "lat", &side.total, 5)?;
    percentiles(text, &side.completion)?;
    samples(text, outcome, side)
}

fn samples(text: &mut String, outcome: &Outcome, side: &Side) -> Written {
    let samples = Samples::of(side);
    if samples.count == 0 {
        return Ok(());
    }
    writeln!(
        text,
        "   bw (  KiB/s): min={:.0}, max={:.0}, avg={:.2}, stdev={:.2}, samples={}",
        samples.min, samples.max, samples.mean, samples.deviation, samples.count
    )?;
    let block = outcome.job.block_bytes as f64 / 1024.0;
    writeln!(
        text,
        "   iops        : min={:.0}, max={:.0}, avg={:.2}, stdev={:.2}, samples={}",
        samples.min / block,
        samples.max / block,
        samples.mean / block,
        samples.deviation / block,
        samples.count
    )
}

/// The unit in which a latency reads well: its nanoseconds and name.
fn unit(histogram: &Histogram) -> (u64, &'static str) {
    match (histogram.min(), histogram.max()) {
        (min, max) if min > 2_000_000 && max > 99_999_000 => (1_000_000, "msec"),
        (min, max) if min > 2_000 && max > 99_999 => (1_000, "usec"),
        (_, max) if max > 9_999_999 => (1_000, "usec"),
        _ => (1, "nsec"),
    }
}

fn latency(text: &mut String, name: &str, histogram: &Histogram, indent: usize) -> Written {
    let (unit, unit_name) = unit(histogram);
    writeln!(
        text,
        "{:indent$}{name} ({unit_name}): min={}, max={}, avg={:.2}, stdev={:.2}",
        "",
        histogram.min() / unit,
        histogram.max() / unit,
        histogram.mean() / unit as f64,
        histogram.deviation() / unit as f64
    )
}

fn percentiles(text: &mut String, histogram: &Histogram) -> Written {
    let (unit, name) = unit(histogram);
    writeln!(text, "    clat percentiles ({name}):")?;
    let values = PERCENTILES.map(|percent| histogram.percentile(percent) / unit);
    let width = values[PERCENTILES.len() - 1].to_string().len();
    let pairs: Vec<String> = PERCENTILES
        .iter()
        .zip(values)
        .map(|(percent, value)| format!("{percent:5.2}th=[{value:>width$}]"))
        .collect();
    for (index, row) in pairs.chunks(4).enumerate() {
        let end = if (index + 1) * 4 < pairs.len() {
            ","
        } else {
            ""
        };
        writeln!(text, "     | {}{end}", row.join(", "))?;
    }
    Ok(())
}

fn summary(text: &mut String, outcomes: &[Outcome]) -> Written {
    let mut group = None;
    for outcome in outcomes {
        if group == Some(outcome.group) {
            continue;
        }
        group = Some(outcome.group);
        writeln!(text, "\nRun status group {} (all jobs):", outcome.group)?;
        let of_group: Vec<&Outcome> = outcomes
            .iter()
            .filter(|other| other.group == outcome.group)
            .collect();
        for (index, name) in ["READ", "WRITE"].iter().enumerate() {
            group_line(text, &of_group, index, name)?;
        }
    }
    Ok(())
}

fn group_line(text: &mut String, outcomes: &[&Outcome], index: usize, name: &str) -> Written {
    let active: Vec<&&Outcome> = outcomes
        .iter()
        .filter(|o| o.sides[index].count > 0)
        .collect();
    if active.is_empty() {
        return Ok(());
    }
    let bytes: u64 = active.iter().map(|o| o.sides[index].bytes).sum();
    let times = active
        .iter()
        .map(|o| o.sides[index].runtime.as_millis().max(1));
    let (shortest, longest) = (times.clone().min().unwrap_or(1), times.max().unwrap_or(1));
    let rates = active.iter().map(|o| o.bytes_per_second(index));
    let (slowest, fastest) = (
        rates.clone().fold(f64::INFINITY, f64::min),
        rates.fold(0.0, f64::max),
    );
    let all = bytes as f64 / (longest as f64 / 1e3);
    writeln!(
        text,
        "{name:>7}: bw={} ({}), {}-{} ({}-{}), io={} ({}), run={shortest}-{longest}msec",
        binary(all, "/s"),
        decimal(all, "/s"),
        binary(slowest, "/s"),
        binary(fastest, "/s"),
        decimal(slowest, "/s"),
        decimal(fastest, "/s"),
        binary(bytes as f64, ""),
        decimal(bytes as f64, ""),
    )
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = 0;
    while value >= 10.0 * step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    match value {
        value if value < 10.0 => format!("{value:.2}{}", units[unit]),
        value if value < 100.0 => format!("{value:.1}{}", units[unit]),
        _ => format!("{value:.0}{}", units[unit]),
    }
}

fn binary(value: f64, per: &str) -> String {
    scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"]) + per
}

fn decimal(value: f64, per: &str) -> String {
    scaled(value, 1000.0, &["B", "kB", "MB", "GB", "TB"]) + per
}

fn count_text(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.1}k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
