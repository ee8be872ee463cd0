//! What is on the screen, and where.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, Paragraph, Wrap};
use terrace::log::history::{History, Row};
use terrace::log::plots::{WAITS, duration_text, tier_totals};
use terrace::log::status::{LaneStatus, State, Status};
use terrace::plan::{bytes_text, count_text};
use terrace::stats::HOP_NAMES;

/// Rows of steps from which rates, stalls and the time left are taken.
const RECENT: usize = 50;
/// Points of the loss curve.
const POINTS: usize = 400;
/// Seconds without a new status after which the process is taken to be gone.
const SILENT_SECONDS: f64 = 10.0;

/// A run at one moment.
pub(crate) struct Screen {
    title: String,
    state: String,
    is_bad: bool,
    /// Why it failed, whole.
    failure: Option<String>,
    step: u64,
    total_steps: u64,
    /// Of the steps that are left.
    seconds_left: Option<f64>,
    last: Option<Row>,
    tiers: Vec<(&'static str, u64, u64)>,
    /// Bytes a second and bytes a step by hop.
    hops: Vec<(String, f64, u64)>,
    lanes: Vec<LaneStatus>,
    /// Layers of the model and micro-batches of a step.
    of: (u64, u64),
    /// Shares of the steps' time.
    stalls: Vec<(&'static str, f64)>,
    loss: Vec<(f64, f64)>,
    evaluations: Vec<(f64, f64)>,
    resident: u64,
}

impl Screen {
    /// The run; `looks` are its last statuses, from which rates are taken while it runs.
    pub(crate) fn of(history: &History, looks: &[Status]) -> Screen {
        let run = &history.run;
        let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
        let status = history.status.clone().unwrap_or_default();
        let (state, is_bad) = state_text(history);
        let runs = history.status.is_some() && status.state == State::Running && !is_bad;
        let recent = &history.rows[history.rows.len().saturating_sub(RECENT)..];
        let recent = recent.iter().copied().reduce(|sum, row| sum.join(&row));
        let step = history.rows.last().map_or(status.step, |row| row.step);
        let total_steps = number(&run["total_steps"])
            .max(status.total_steps)
            .max(step);
        let left = recent.map(|row| row.seconds / row.count as f64 * (total_steps - step) as f64);
        let parameters = run["model"]["parameters"].as_u64();
        let model = parameters.map(|count| {
            let family = run["model"]["family"].as_str().unwrap_or_default();
            format!("  {family} {}", count_text(count))
        });
        let device = run["device"].as_str().map(|device| format!(" on {device}"));
        let tiers = tier_totals(run).into_iter();
        Screen {
            title: format!(
                "{}{}{}",
                history.dir().display(),
                model.unwrap_or_default(),
                device.unwrap_or_default()
            ),
            state,
            is_bad,
            failure: status.failure.clone().filter(|_| is_bad),
            step,
            total_steps,
            seconds_left: left.filter(|_| runs && step < total_steps),
            last: history.rows.last().copied(),
            tiers: tiers
                .map(|(name, parts, budget)| (name, parts.iter().sum(), budget))
                .collect(),
            hops: hops(recent, looks),
            lanes: if runs { status.lanes } else { Vec::new() },
            of: (
                number(&run["model"]["blocks"]) + 2,
                number(&run["plan"]["micro_batches"]),
            ),
            stalls: stalls(recent),
            loss: loss(&history.rows),
            evaluations: history
                .evaluations
                .iter()
                .map(|(at, loss)| (*at as f64, *loss))
                .filter(|(_, loss)| loss.is_finite())
                .collect(),
            resident: if runs { status.resident_bytes } else { 0 },
        }
    }
}

fn state_text(history: &History) -> (String, bool) {
    let Some(status) = &history.status else {
        return ("no status.json".to_string(), false);
    };
    let age = status.age();
    match status.state {
        State::Finished if status.step < status.total_steps => {
            ("finished: early stopping".to_string(), false)
        }
        State::Finished => ("finished".to_string(), false),
        State::Interrupted => ("ended on request".to_string(), false),
        State::Failed => {
            let words = status.failure.as_deref().unwrap_or("no reason told");
            (format!("failed: {words}"), true)
        }
        State::Running if age < SILENT_SECONDS && status.doing.is_empty() => {
            ("starting".to_string(), false)
        }
        State::Running if age < SILENT_SECONDS => (status.doing.clone(), false),
        State::Running => (format!("silent for {}", duration_text(age)), true),
    }
}

/// Rates between the first and the last look; without two, of the last steps.
fn hops(recent: Option<Row>, looks: &[Status]) -> Vec<(String, f64, u64)> {
    let between = match looks {
        [first, .., last] if last.updated_at > first.updated_at => Some((first, last)),
        _ => None,
    };
    let hops = HOP_NAMES.iter().enumerate().map(|(hop, name)| {
        let row = recent.filter(|row| row.seconds > 0.0);
        let a_step = recent.map_or(0, |row| row.bytes[hop] / row.count.max(1));
        let of_steps = row.map_or(0.0, |row| row.bytes[hop] as f64 / row.seconds);
        let rate = between.map_or(of_steps, |(first, last)| {
            let bytes = last.bytes[hop].saturating_sub(first.bytes[hop]);
            bytes as f64 / (last.updated_at - first.updated_at)
        });
        (name.replace('_', " "), rate, a_step)
    });
    hops.collect()
}

fn stalls(recent: Option<Row>) -> Vec<(&'static str, f64)> {
    let Some(row) = recent.filter(|row| row.seconds > 0.0) else {
        return Vec::new();
    };
    let shares = row.stalls.map(|seconds| seconds / row.seconds);
    WAITS.into_iter().zip(shares).collect()
}

/// The curve's points: means of neighbours.
fn loss(rows: &[Row]) -> Vec<(f64, f64)> {
    let joined = rows.len().div_ceil(POINTS).max(1);
    let points = rows.chunks(joined).filter_map(|rows| {
        let row = rows.iter().copied().reduce(|sum, row| sum.join(&row))?;
        Some((row.step as f64, row.loss.mean()))
    });
    points.filter(|(_, loss)| loss.is_finite()).collect()
}

/// Draws the screen; what does not fit is left out from below.
pub(crate) fn draw(frame: &mut Frame<'_>, screen: &Screen) {
    let rows = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Min(0),
        Constraint::Length(1),
    ]);
    let [head, steps, top, middle, bottom, foot] = rows.areas(frame.area());
    let halves = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]);
    let [tiers, hops] = halves.areas(top);
    let [loss, stalls] =
        Layout::horizontal([Constraint::Min(20), Constraint::Length(36)]).areas(bottom);
    draw_head(frame, head, screen);
    draw_steps(frame, steps, screen);
    draw_tiers(frame, tiers, screen);
    draw_hops(frame, hops, screen);
    draw_lanes(frame, middle, screen);
    draw_loss(frame, loss, screen);
    draw_stalls(frame, stalls, screen);
    let memory = match screen.resident {
        0 => String::new(),
        bytes => format!("   memory of the process {}", bytes_text(bytes)),
    };
    let foot_line = Line::from(vec!["q".bold(), " quits".into(), memory.into()]);
    frame.render_widget(foot_line.dim(), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let color = if screen.is_bad {
        Color::Red
    } else {
        Color::Green
    };
    // The state is to be seen whatever the directory's name takes.
    let taken = (screen.state.chars().count() + 2).min(usize::from(area.width) / 2);
    let line = Line::from(vec![
        end_of(&screen.title, usize::from(area.width) - taken).bold(),
        "  ".into(),
        Span::styled(screen.state.clone(), Style::new().fg(color)),
    ]);
    frame.render_widget(line, area);
}

/// The last `most` characters of a text, those before them as a mark.
fn end_of(text: &str, most: usize) -> String {
    let count = text.chars().count();
    match count <= most {
        true => text.to_string(),
        false => {
            let end = text.chars().skip(count + 1 - most.max(1));
            "…".chars().chain(end).collect()
        }
    }
}

fn draw_steps(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let share = screen.step as f64 / screen.total_steps.max(1) as f64;
    let mut text = format!(" step {} of {}", screen.step, screen.total_steps);
    if let Some(last) = &screen.last {
        let rate = last.tokens_per_second();
        text += &format!("  loss {:.4}  {rate:.0} tok/s", last.loss.mean());
    }
    if let Some(left) = screen.seconds_left {
        text += &format!("  {} left", duration_text(left));
    }
    let width = usize::from(area.width).saturating_sub(text.chars().count());
    let mut spans = bar(share, width.clamp(8, 40), Color::Green);
    spans.push(text.into());
    frame.render_widget(Line::from(spans), area);
}

/// A bar of `width` cells, filled by `share`.
fn bar(share: f64, width: usize, color: Color) -> Vec<Span<'static>> {
    let share = if share.is_finite() { share } else { 0.0 };
    let filled = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    vec![
        Span::styled("█".repeat(filled), Style::new().fg(color)),
        Span::styled("░".repeat(width - filled), Style::new().fg(Color::DarkGray)),
    ]
}

fn block(title: &str) -> Block<'static> {
    Block::bordered()
        .border_style(Style::new().fg(Color::DarkGray))
        .title(format!(" {title} ").bold())
}

fn draw_tiers(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let inside = usize::from(area.width).saturating_sub(2);
    let lines = screen.tiers.iter().map(|(name, used, budget)| {
        let text = format!(" {}/{}", bytes_text(*used), bytes_text(*budget));
        let width = inside.saturating_sub(7 + text.len());
        let share = *used as f64 / (*budget).max(1) as f64;
        let mut spans = vec![Span::raw(format!("{name:<7}"))];
        spans.extend(bar(share, width, Color::Blue));
        spans.push(text.into());
        Line::from(spans)
    });
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(
        Paragraph::new(lines).block(block("tiers: planned of budget")),
        area,
    );
}

fn rate_text(rate: f64) -> String {
    format!("{}/s", bytes_text(rate.max(0.0) as u64))
}

fn draw_hops(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let lines = screen.hops.iter().map(|(name, rate, step)| {
        let (rate, step) = (rate_text(*rate), bytes_text(*step));
        Line::from(format!("{name:<11} {rate:>12} {step:>10}"))
    });
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(
        Paragraph::new(lines).block(block("hops: rate, a step")),
        area,
    );
}

fn draw_lanes(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let inside = usize::from(area.width).saturating_sub(2);
    let (layers, micros) = screen.of;
    let lines = screen.lanes.iter().map(|lane| {
        let mut what = lane.action.clone();
        if let Some(layer) = lane.layer {
            what += &match u64::from(layer) {
                0 => " embed".to_string(),
                last if last + 1 == layers => " head".to_string(),
                block => format!(" block {} of {}", block - 1, layers.saturating_sub(2)),
            };
        }
        if let Some(micro) = lane.micro {
            what += &format!(" micro {} of {micros}", micro + 1);
        }
        if lane.action.is_empty() {
            what = "done".to_string();
        }
        if lane.previous {
            what += " (step before)";
        }
        let text = format!(" {:>5}/{}", lane.done, lane.of);
        let width = inside.saturating_sub(8 + 42 + text.len()).max(4);
        let mut spans = vec![Span::raw(format!("{:<8}{what:<42.42}", lane.lane))];
        let share = lane.done as f64 / lane.of.max(1) as f64;
        spans.extend(bar(share, width, Color::Magenta));
        spans.push(text.into());
        Line::from(spans)
    });
    let mut lines: Vec<Line<'_>> = lines.collect();
    if lines.is_empty() {
        lines.push(match &screen.failure {
            Some(words) => Line::styled(words.clone(), Style::new().fg(Color::Red)),
            None => Line::from("no step is under way").dim(),
        });
    }
    let lanes = Paragraph::new(lines).block(block("schedule: lanes of a step"));
    frame.render_widget(
        match screen.lanes.is_empty() {
            true => lanes.wrap(Wrap { trim: true }),
            false => lanes,
        },
        area,
    );
}

fn draw_loss(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let all = || screen.loss.iter().chain(&screen.evaluations);
    let fold = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| {
            (a.min(value), b.max(value))
        })
    };
    let (first, last) = fold(&mut all().map(|point| point.0));
    let (low, high) = fold(&mut all().map(|point| point.1));
    if all().next().is_none() {
        let nothing = Paragraph::new("no step is done").dim();
        frame.render_widget(nothing.block(block("loss")), area);
        return;
    }
    let room = ((high - low) * 0.05).max(1e-3);
    let (low, high) = (low - room, high + room);
    let line = |name: &'static str, points, kind, color| {
        Dataset::default()
            .name(name)
            .marker(Marker::Braille)
            .graph_type(kind)
            .style(Style::new().fg(color))
            .data(points)
    };
    let mut sets = vec![line("loss", &screen.loss[..], GraphType::Line, Color::Cyan)];
    if !screen.evaluations.is_empty() {
        let points = &screen.evaluations[..];
        sets.push(line("held-out", points, GraphType::Scatter, Color::Yellow));
    }
    let chart = Chart::new(sets)
        .block(block("loss, nats by step"))
        .legend_position(None)
        .x_axis(
            Axis::default()
                .bounds([first, last.max(first + 1.0)])
                .labels([format!("{first:.0}"), format!("{last:.0}")])
                .style(Style::new().fg(Color::DarkGray)),
        )
        .y_axis(
            Axis::default()
                .bounds([low, high])
                .labels([format!("{low:.3}"), format!("{high:.3}")])
                .style(Style::new().fg(Color::DarkGray)),
        );
    frame.render_widget(chart, area);
}

fn draw_stalls(frame: &mut Frame<'_>, area: Rect, screen: &Screen) {
    let inside = usize::from(area.width).saturating_sub(2);
    let lines = screen.stalls.iter().map(|(name, share)| {
        let text = format!("{:>6.1} %", 100.0 * share);
        let width = inside.saturating_sub(18 + text.len());
        let mut spans = vec![Span::raw(format!("{name:<18}"))];
        spans.extend(bar(*share, width, Color::Red));
        spans.push(text.into());
        Line::from(spans)
    });
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(
        Paragraph::new(lines).block(block("stalls: of a step")),
        area,
    );
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn lines(screen: &Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, screen)).unwrap();
        let cells = terminal.backend().buffer().content();
        let lines = cells.chunks(usize::from(width));
        let lines = lines.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>());
        lines.map(|line| line.trim_end().to_string()).collect()
    }

    fn history(dir: &std::path::Path) -> History {
        let run = r#"{"total_steps": 40, "device": "cpu",
            "model": {"family": "Llama", "parameters": 134500000, "blocks": 30},
            "plan": {"micro_batches": 4, "sections": {"weight": {"host": 1073741824}},
                "host": {"total": 2147483648}, "budgets": {"host": 4294967296}}}"#;
        std::fs::write(dir.join("run.json"), run).unwrap();
        let step = |at: u64| {
            format!(
                "{{\"step\":{at},\"loss\":{},\"tokens\":100,\"step_seconds\":2.0,\
                 \"bytes\":{{\"promote\":2147483648}},\
                 \"stall_seconds\":{{\"compute_for_weights\":0.5}}}}\n",
                4.0 - at as f64 / 10.0
            )
        };
        let text: String = (1..=10).map(step).collect();
        let text = text + "{\"step\":10,\"eval_loss\":3.2}\n";
        std::fs::write(dir.join("metrics.jsonl"), text).unwrap();
        History::open(dir).unwrap()
    }

    fn status(state: State) -> Status {
        Status {
            state,
            doing: "training".to_string(),
            step: 10,
            updated_at: terrace::log::status::now(),
            lanes: vec![LaneStatus {
                lane: "compute".to_string(),
                done: 30,
                of: 60,
                action: "backward".to_string(),
                layer: Some(12),
                micro: Some(1),
                previous: false,
            }],
            ..Status::default()
        }
    }

    #[test]
    fn a_run_under_way_fits_eighty_columns_and_twenty_four_lines() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = history(dir.path());
        history.status = Some(status(State::Running));
        let shown = lines(&Screen::of(&history, &[]), 80, 24);
        let has = |line: usize, words: &str| {
            assert!(shown[line].contains(words), "{words}: {shown:#?}");
        };
        has(0, "  Llama 134.5 M on cpu  training");
        has(1, "███████░░░░░░");
        has(1, " step 10 of 40  loss 3.0000  50 tok/s  1 min 0 s left");
        has(3, "host   ████");
        has(3, " 2.00 GiB/4.00 GiB│");
        has(3, "promote       1.00 GiB/s   2.00 GiB");
        has(9, "compute backward block 11 of 30 micro 2 of 4 ");
        has(9, "    30/60│");
        assert!(shown[15].starts_with("┌ loss, nats by step ─"));
        has(16, "compute: weights  ██░░░░░░");
        has(16, "  25.0 %│");
        has(23, "q quits");
    }

    #[test]
    fn rates_are_taken_between_looks() {
        let dir = tempfile::tempdir().unwrap();
        let history = history(dir.path());
        let mut looks = [status(State::Running), status(State::Running)];
        looks[1].updated_at = looks[0].updated_at + 2.0;
        looks[1].bytes = [8 << 20, 0, 0, 0];
        let shown = lines(&Screen::of(&history, &looks), 80, 24);
        assert!(shown[3].contains("promote       4.00 MiB/s"), "{shown:#?}");
    }

    #[test]
    fn runs_that_have_ended_say_how() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = history(dir.path());
        let mut says = |state: State, age: f64, words: &str| {
            let mut status = status(state);
            status.updated_at -= age;
            status.failure = Some("a disk is full".to_string());
            history.status = Some(status);
            let shown = lines(&Screen::of(&history, &[]), 80, 24);
            assert!(shown[0].ends_with(words), "{shown:#?}");
            let under_way = shown[9].contains("compute");
            assert!(!under_way && !shown[1].contains("left"), "{shown:#?}");
        };
        says(State::Finished, 1e6, "  finished");
        says(State::Interrupted, 0.0, "  ended on request");
        says(State::Failed, 0.0, "  failed: a disk is full");
        says(State::Running, 100.0, "  silent for 1 min 40 s");
        history.status = None;
        history.rows.clear();
        history.run = serde_json::Value::Null;
        let shown = lines(&Screen::of(&history, &[]), 80, 24);
        assert!(shown[0].ends_with("no status.json"), "{shown:#?}");
    }

    #[test]
    fn a_long_directory_hides_neither_the_state_nor_why_a_run_failed() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = history(dir.path());
        history.status = Some(Status {
            failure: Some(format!(
                "step 11: gradient norm is NaN; {}",
                "look ".repeat(40)
            )),
            ..status(State::Failed)
        });
        let mut screen = Screen::of(&history, &[]);
        screen.title = format!("{}/the-run  Llama 1 B on cpu", "directory/".repeat(20));
        let shown = lines(&screen, 80, 24);
        assert!(shown[0].starts_with('…'), "{shown:#?}");
        let parts = ["/the-run  Llama 1 B on cpu  failed: step 11: gradient norm"];
        assert!(
            parts.iter().all(|part| shown[0].contains(part)),
            "{shown:#?}"
        );
        let told = shown[8..15].join("");
        assert_eq!(told.matches("look").count(), 40, "{shown:#?}");
        history.status = Some(Status {
            total_steps: 40,
            ..status(State::Finished)
        });
        let shown = lines(&Screen::of(&history, &[]), 80, 24);
        assert!(
            shown[0].ends_with("  finished: early stopping"),
            "{shown:#?}"
        );
    }

    #[test]
    fn any_terminal_is_large_enough_to_be_drawn_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = history(dir.path());
        history.status = Some(status(State::Running));
        let screen = Screen::of(&history, &[]);
        for (width, height) in [(1, 1), (10, 3), (20, 8), (40, 12), (79, 23), (300, 100)] {
            assert_eq!(lines(&screen, width, height).len(), usize::from(height));
        }
    }
}
