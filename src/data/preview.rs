//! What a run would train on, for eyes: sequences as text with the masked tokens marked.
//!
//! - On a terminal, masked text is dim; elsewhere it stands in `⟦…⟧`.
//! - Control characters of the text are shown as escapes: a dataset cannot drive the terminal.

use std::io::{self, Write};
use std::path::Path;

use super::cursor::{efficiency, plan_in_order};
use super::packing::EpochPlan;
use super::{Dataset, LENGTH_BINS, Row, TextTokenizer};
use crate::config::DataConfig;
use crate::error::{Error, Result, printable};

/// How [`preview`] prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreviewOptions {
    /// Sequences to print.
    pub sequences: u64,
    /// Mark masked text by terminal codes instead of brackets.
    pub colour: bool,
    /// Print token ids below each row.
    pub ids: bool,
}

/// Writes the first sequences of `dataset` in file order, packed as configured, then its numbers.
/// Without a tokenizer rows are shown as ids.
pub fn preview(
    dataset: &Dataset,
    config: &DataConfig,
    tokenizer: Option<&TextTokenizer>,
    options: PreviewOptions,
    out: &mut dyn Write,
) -> Result<()> {
    let plan = plan_in_order(dataset, config);
    for sequence in 0..plan.sequences().min(options.sequences) {
        let rows = plan.rows(sequence);
        let tokens: u64 = rows.iter().map(|&row| dataset.row_len(row)).sum();
        write(writeln!(
            out,
            "sequence {sequence}: {} rows, {tokens} of {} tokens",
            rows.len(),
            config.seq_len
        ))?;
        for &row in rows {
            write_row(dataset, row, tokenizer, options, out)?;
        }
    }
    write_numbers(dataset, config, &plan, out)
}

fn write_numbers(
    dataset: &Dataset,
    config: &DataConfig,
    plan: &EpochPlan,
    out: &mut dyn Write,
) -> Result<()> {
    let stats = dataset.stats();
    let sequences = plan.sequences();
    write(writeln!(
        out,
        "{} rows, {} tokens, {} trained on ({:.1} %), longest row {}, mean {:.1}",
        stats.rows,
        stats.tokens,
        stats.targets,
        100.0 * stats.targets as f64 / stats.tokens as f64,
        stats.longest,
        stats.tokens as f64 / stats.rows as f64,
    ))?;
    write(writeln!(
        out,
        "{sequences} sequences of at most {} tokens, {:.1} % full; {} rows cut, {} empty \
         texts left out{}",
        config.seq_len,
        100.0 * efficiency(dataset, plan, config.seq_len),
        stats.truncated,
        stats.left_out,
        stats.without_targets_text(),
    ))?;
    let sources = dataset.sources();
    if sources.len() > 1 {
        let total: u64 = sources.iter().map(|source| source.tokens).sum();
        for source in &sources {
            write(writeln!(
                out,
                "source {}: {} rows, {} tokens ({:.1} %), {:.1} % of an epoch's rows",
                printable(&source.name),
                source.rows,
                source.tokens,
                100.0 * source.tokens as f64 / total.max(1) as f64,
                100.0 * source.share,
            ))?;
        }
    }
    write_lengths(dataset, out)
}

/// Columns of the longest bar.
const BAR: u64 = 40;

/// Row lengths as they are trained on in percentiles, and as the files have them as a histogram.
fn write_lengths(dataset: &Dataset, out: &mut dyn Write) -> Result<()> {
    let mut lengths: Vec<u64> = (0..dataset.rows())
        .map(|row| dataset.row_len(row))
        .collect();
    lengths.sort_unstable();
    let at = |percent: usize| lengths[(lengths.len() - 1) * percent / 100];
    write(writeln!(
        out,
        "row lengths: half are at most {} tokens, 90 % {}, 99 % {}",
        at(50),
        at(90),
        at(99)
    ))?;
    let counts = dataset.stats().lengths;
    let most = counts.iter().copied().max().unwrap_or(0);
    let used = |&bin: &usize| counts[bin] > 0;
    let (Some(first), Some(last)) = ((0..LENGTH_BINS).find(used), (0..LENGTH_BINS).rfind(used))
    else {
        return Ok(());
    };
    write(writeln!(
        out,
        "rows of the files by tokens, before they are cut or split:"
    ))?;
    for (bin, &count) in counts.iter().enumerate().take(last + 1).skip(first) {
        let (low, high) = ((1u64 << bin) / 2 + 1, 1u64 << bin);
        let bar = usize::try_from((count * BAR).div_ceil(most)).unwrap_or(0);
        let range = match bin {
            0 | 1 => high.to_string(),
            _ if bin == LENGTH_BINS - 1 => format!("{low} or more"),
            _ => format!("{low}–{high}"),
        };
        let line = format!("{range:>17} {:█<bar$} {}", "", count);
        write(writeln!(out, "{line}"))?;
    }
    Ok(())
}

fn write_row(
    dataset: &Dataset,
    row: u32,
    tokenizer: Option<&TextTokenizer>,
    options: PreviewOptions,
    out: &mut dyn Write,
) -> Result<()> {
    let Row { ids, trained } = dataset.row(row)?;
    write(writeln!(
        out,
        "--- {}, {} tokens",
        dataset.place(row),
        ids.len()
    ))?;
    // The first token is predicted by nothing, so it counts as masked.
    let trained = |index: usize| index > 0 && trained[index];
    let (open, close) = if options.colour {
        ("\x1b[2m", "\x1b[0m")
    } else {
        ("⟦", "⟧")
    };
    let mut start = 0;
    while start < ids.len() {
        let end = (start..ids.len())
            .find(|&index| trained(index) != trained(start))
            .unwrap_or(ids.len());
        let text = match tokenizer {
            Some(tokenizer) => escaped(&tokenizer.decode(&ids[start..end], false)?),
            None => listed(&ids[start..end]),
        };
        let (open, close) = if trained(start) {
            ("", "")
        } else {
            (open, close)
        };
        write(write!(out, "{open}{text}{close}"))?;
        start = end;
    }
    write(writeln!(out))?;
    if options.ids {
        write(writeln!(out, "ids {}", listed(&ids)))?;
    }
    Ok(())
}

fn listed(ids: &[u32]) -> String {
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    words.join(" ")
}

/// The text with line ends and tabs as they are, and other control characters as escapes.
fn escaped(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        let direction = matches!(c, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}')
            || matches!(c, '\u{2066}'..='\u{2069}');
        if (c.is_control() && c != '\n' && c != '\t') || direction {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

fn write(result: io::Result<()>) -> Result<()> {
    result.map_err(|error| Error::io("write", Path::new("standard output"), error))
}
