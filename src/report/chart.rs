//! Charts as SVG: lines over time, histograms over a logarithmic axis.
//!
//! Both have the same frame, so that charts below each other have their axes aligned.

use std::fmt::Write;

use super::escaped;

const WIDTH: f64 = 680.0;
const HEIGHT: f64 = 230.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 38.0;
/// Points of a line; more are joined to their means, with a band from the least to the greatest.
const POINTS_MAX: usize = 600;
/// Points of a line up to which each has a dot.
const DOTS_MAX: usize = 40;
/// Pixels that a marker's label takes.
const LABEL_WIDTH: f64 = 110.0;

/// What a number counts, and so how it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// B/s, KiB/s, MiB/s, GiB/s.
    BytesPerSecond,
    /// ns, µs, ms, s; of nanoseconds.
    Nanoseconds,
    /// Seconds as they are.
    Seconds,
    /// Percent as they are.
    Percent,
    /// A number without a unit.
    Plain,
    /// FLOPS, GFLOPS, TFLOPS.
    Flops,
    /// Numbers of what is named, as they are.
    Of(&'static str),
}

impl Unit {
    /// The divisor and name that suit numbers up to `largest`.
    pub fn scale(self, largest: f64) -> (f64, &'static str) {
        let steps: &[(f64, &str)] = match self {
            Unit::BytesPerSecond => &[
                (1.0, "B/s"),
                (1024.0, "KiB/s"),
                (1024.0 * 1024.0, "MiB/s"),
                (1024.0 * 1024.0 * 1024.0, "GiB/s"),
            ],
            Unit::Nanoseconds => &[(1.0, "ns"), (1e3, "µs"), (1e6, "ms"), (1e9, "s")],
            Unit::Seconds => &[(1.0, "s")],
            Unit::Percent => &[(1.0, "%")],
            Unit::Plain => &[(1.0, "")],
            Unit::Flops => &[(1.0, "FLOPS"), (1e9, "GFLOPS"), (1e12, "TFLOPS")],
            Unit::Of(name) => return (1.0, name),
        };
        let fits = steps.iter().rev().find(|(step, _)| largest >= *step);
        *fits.unwrap_or(&steps[0])
    }

    /// A number with its unit and three digits.
    pub fn text(self, value: f64) -> String {
        let (scale, name) = self.scale(value);
        let value = value / scale;
        let digits = match value.abs() {
            size if size >= 100.0 || size == 0.0 => 0,
            size if size >= 10.0 => 1,
            _ => 2,
        };
        format!("{value:.digits$} {name}").trim_end().to_string()
    }
}

/// A series of a [`LineChart`].
#[derive(Clone, Debug)]
pub struct Line {
    /// For the legend.
    pub name: String,
    /// Its colour, 1 to 4.
    pub series: usize,
    /// x ascending; not a number is a gap.
    pub points: Vec<(f64, f64)>,
    /// The least and the greatest of what each point is the mean of; empty where points are
    /// values.
    pub spreads: Vec<(f64, f64)>,
}

/// Lines over linear axes.
#[derive(Clone, Debug)]
pub struct LineChart {
    /// Above the chart.
    pub title: String,
    /// Below the axis.
    pub x_label: String,
    /// x counts something: no tick is between whole numbers.
    pub x_whole: bool,
    /// Of y.
    pub y_unit: Unit,
    /// Where x begins; `None` is at the first point.
    pub x_from: Option<f64>,
    /// Where y begins; `None` is 0.
    pub y_from: Option<f64>,
    /// The lines.
    pub lines: Vec<Line>,
}

/// Counts over a logarithmic axis.
#[derive(Clone, Debug)]
pub struct HistogramChart {
    /// Above the chart.
    pub title: String,
    /// Of x.
    pub x_unit: Unit,
    /// (from, to, percent), ascending.
    pub bars: Vec<(f64, f64, f64)>,
    /// Places to be marked, with their names.
    pub markers: Vec<(f64, String)>,
    /// Least and greatest x; `None` is of the bars.
    pub range: Option<(f64, f64)>,
    /// Its colour, 1 to 4.
    pub series: usize,
}

/// A round number at or below `least`, where an axis up to `most` may begin: 0 where most of the
/// axis would be there in any case.
pub fn axis_from(least: f64, most: f64) -> f64 {
    if !(least.is_finite() && most.is_finite()) || least < 0.5 * most || most <= least {
        return least.clamp(f64::MIN, 0.0);
    }
    let marks = ticks(least, most, 4.0);
    match marks[..] {
        [first, second, ..] => (least / (second - first)).floor() * (second - first),
        _ => 0.0,
    }
}

/// Steps of 1, 2 or 5 times a power of ten, at most `count` of them from `low` to `high`.
fn ticks(low: f64, high: f64, count: f64) -> Vec<f64> {
    let rough = (high - low).max(f64::MIN_POSITIVE) / count;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough * 0.999)
        .unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let last = (high / step * 1.000_001).floor() as i64;
    (first..=last)
        .take(50)
        .map(|index| index as f64 * step)
        .collect()
}

fn number(value: f64) -> String {
    let text = match value.abs() {
        size if size >= 1e6 || (size > 0.0 && size < 1e-3) => {
            let text = format!("{value:.3e}");
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            let digits = digits.trim_end_matches('0').trim_end_matches('.');
            return format!("{digits}e{power}");
        }
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 0.01 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        text
    }
}

/// The y axis: its greatest value, and grid lines with labels.
fn y_axis(svg: &mut String, low: f64, high: f64, unit: Unit) -> f64 {
    let (scale, name) = unit.scale(high);
    let high = if high > low { high } else { low + scale };
    let marks = ticks(low / scale, high / scale * 1.0001, 4.0);
    let step = marks.get(1).map_or(1.0, |second| second - marks[0]);
    // The grid ends above the greatest value.
    let last = marks.last().copied().unwrap_or(1.0);
    let top = if last * scale < high - 1e-3 * (high - low) {
        last + step
    } else {
        last
    } * scale;
    let mut value = marks.first().copied().unwrap_or(0.0);
    while value * scale <= top * 1.000_001 {
        let y = place_y(value * scale, low, top);
        let class = if value * scale <= low { "axis" } else { "grid" };
        write!(
            svg,
            "<line class=\"{class}\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
            number(value)
        )
        .ok();
        value += step;
    }
    write!(
        svg,
        "<text class=\"unit\" text-anchor=\"end\" x=\"{}\" y=\"14\">{name}</text>",
        LEFT - 8.0
    )
    .ok();
    top
}

fn place_y(value: f64, low: f64, top: f64) -> f64 {
    let share = ((value - low) / (top - low)).clamp(0.0, 1.0);
    HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
}

fn x_tick(svg: &mut String, x: f64, label: &str) {
    let base = HEIGHT - BOTTOM;
    write!(
        svg,
        "<line class=\"axis\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{base}\" y2=\"{}\"/>\
         <text class=\"tick\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{}\">{}</text>",
        base + 4.0,
        base + 17.0,
        escaped(label)
    )
    .ok();
}

fn frame(title: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\">\
         <text class=\"title\" x=\"{LEFT}\" y=\"14\">{0}</text>",
        escaped(title)
    )
}

impl LineChart {
    /// The chart.
    pub fn svg(&self) -> String {
        let mut svg = frame(&self.title);
        let finite = || {
            let points = self.lines.iter().flat_map(|line| &line.points);
            points.filter(|(x, y)| x.is_finite() && y.is_finite())
        };
        let spreads = self.lines.iter().flat_map(|line| &line.spreads);
        let spread = spreads.map(|(_, most)| *most).filter(|y| y.is_finite());
        let highest = finite().map(|(_, y)| *y).chain(spread).fold(0.0, f64::max);
        let first = finite().map(|(x, _)| *x).fold(f64::INFINITY, f64::min);
        let first = self.x_from.map_or(first, |from| from.min(first));
        let last = finite().map(|(x, _)| *x).fold(f64::NEG_INFINITY, f64::max);
        let (first, last) = match last - first {
            span if span > 0.0 => (first, last),
            _ if first.is_finite() => (first - 0.5, first + 0.5),
            _ => (0.0, 1.0),
        };
        let low = self.y_from.unwrap_or(0.0);
        let top = y_axis(&mut svg, low, highest, self.y_unit);
        let place_x = |x: f64| LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT);
        let whole = |tick: &f64| !self.x_whole || tick.fract() == 0.0;
        for tick in ticks(first, last, 8.0).into_iter().filter(whole) {
            x_tick(&mut svg, place_x(tick), &number(tick));
        }
        self.legend(&mut svg);
        for line in &self.lines {
            let (mut path, mut joined) = (String::new(), false);
            let points = thinned(line);
            if points.len() < line.points.len() || !line.spreads.is_empty() {
                band(&mut svg, &points, line.series, place_x, |y| {
                    place_y(y, low, top)
                });
            }
            for Point { x, y, .. } in points {
                if !(x.is_finite() && y.is_finite()) {
                    joined = false;
                    continue;
                }
                let letter = if joined { 'L' } else { 'M' };
                write!(
                    path,
                    "{letter}{:.1} {:.1}",
                    place_x(x),
                    place_y(y, low, top)
                )
                .ok();
                joined = true;
            }
            write!(svg, "<path class=\"line s{}\" d=\"{path}\"/>", line.series).ok();
            // A few are to be seen one by one, and so is one between gaps.
            let few = line.points.len() <= DOTS_MAX;
            let points = line
                .points
                .iter()
                .filter(|(x, y)| few && x.is_finite() && y.is_finite());
            for (x, y) in points {
                let (x, y) = (place_x(*x), place_y(*y, low, top));
                write!(
                    svg,
                    "<circle class=\"dot s{}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>",
                    line.series
                )
                .ok();
            }
        }
        x_label(&mut svg, &self.x_label);
        svg + "</svg>"
    }

    /// Names of the lines at the right of the title, where there are several.
    fn legend(&self, svg: &mut String) {
        if self.lines.len() < 2 {
            return;
        }
        let mut x = WIDTH - RIGHT;
        for line in self.lines.iter().rev() {
            write!(
                svg,
                "<text class=\"tick\" text-anchor=\"end\" x=\"{x:.1}\" y=\"14\">{}</text>",
                escaped(&line.name)
            )
            .ok();
            x -= 7.0 * line.name.chars().count() as f64 + 8.0;
            let series = line.series;
            write!(
                svg,
                "<rect class=\"bar s{series}\" x=\"{:.1}\" y=\"8\" width=\"10\" height=\"4\" \
                 rx=\"2\"/>",
                x - 8.0
            )
            .ok();
            x -= 24.0;
        }
    }
}

/// A point of a line, of one value or of several.
#[derive(Clone, Copy)]
struct Point {
    x: f64,
    /// Their mean.
    y: f64,
    least: f64,
    most: f64,
}

/// At most [`POINTS_MAX`] points: neighbours are joined. Of values that are not finite no more is
/// left than a gap where a point has no others.
fn thinned(line: &Line) -> Vec<Point> {
    let joined = line.points.len().div_ceil(POINTS_MAX).max(1);
    let means = line
        .points
        .chunks(joined)
        .enumerate()
        .map(|(index, chunk)| {
            let spreads = line.spreads.chunks(joined).nth(index).unwrap_or_default();
            let all = chunk.iter().map(|point| point.1);
            let spread = spreads.iter().flat_map(|(least, most)| [*least, *most]);
            let all = all.chain(spread).filter(|y| y.is_finite());
            let finite = chunk.iter().map(|point| point.1).filter(|y| y.is_finite());
            let count = finite.clone().count() as f64;
            Point {
                x: chunk.iter().map(|point| point.0).sum::<f64>() / chunk.len() as f64,
                y: finite.sum::<f64>() / count,
                least: all.clone().fold(f64::INFINITY, f64::min),
                most: all.fold(f64::NEG_INFINITY, f64::max),
            }
        });
    means.collect()
}

/// From the least to the greatest of the values that a point joins.
fn band(
    svg: &mut String,
    points: &[Point],
    series: usize,
    place_x: impl Fn(f64) -> f64,
    place_y: impl Fn(f64) -> f64,
) {
    for run in points.split(|point| !(point.x.is_finite() && point.y.is_finite())) {
        if run.is_empty() {
            continue;
        }
        write!(svg, "<path class=\"band s{series}\" d=\"").ok();
        let over = run.iter().map(|point| (point.x, point.most));
        let under = run.iter().rev().map(|point| (point.x, point.least));
        for (index, (x, y)) in over.chain(under).enumerate() {
            let letter = if index == 0 { 'M' } else { 'L' };
            write!(svg, "{letter}{:.1} {:.1}", place_x(x), place_y(y)).ok();
        }
        svg.push_str("Z\"/>");
    }
}

fn x_label(svg: &mut String, label: &str) {
    let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
    write!(
        svg,
        "<text class=\"unit\" text-anchor=\"middle\" x=\"{middle}\" y=\"{}\">{}</text>",
        HEIGHT - 5.0,
        escaped(label)
    )
    .ok();
}

impl HistogramChart {
    /// The chart.
    pub fn svg(&self) -> String {
        let mut svg = frame(&self.title);
        let tallest = self.bars.iter().map(|bar| bar.2).fold(0.0, f64::max);
        let top = y_axis(&mut svg, 0.0, tallest, Unit::Percent);
        let low = self.bars.first().map_or(1.0, |bar| bar.0);
        let high = self.bars.last().map_or(10.0, |bar| bar.1);
        let (low, high) = self.range.unwrap_or((low, high));
        let low = low.max(1.0);
        let high = high.max(low * 1.5);
        let place_x = |x: f64| {
            let share = (x.max(low) / low).ln() / (high / low).ln();
            LEFT + share.clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
        };
        for (value, label) in log_ticks(low, high, self.x_unit) {
            x_tick(&mut svg, place_x(value), &label);
        }
        for (from, to, percent) in &self.bars {
            let (x, end) = (place_x(*from), place_x(*to));
            let y = place_y(*percent, 0.0, top);
            if *percent > 0.0 {
                // A gap of a pixel keeps neighbours apart.
                let width = (end - x - 1.0).max(1.0);
                let height = (HEIGHT - BOTTOM - y).max(1.0);
                write!(
                    svg,
                    "<rect class=\"bar s{}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" \
                     height=\"{height:.1}\" rx=\"1.5\">\
                     <title>{} to {}: {percent:.2} %</title></rect>",
                    self.series,
                    HEIGHT - BOTTOM - height,
                    self.x_unit.text(*from),
                    self.x_unit.text(*to)
                )
                .ok();
            }
        }
        self.draw_markers(&mut svg, place_x);
        x_label(&mut svg, "latency");
        svg + "</svg>"
    }

    /// A label stands right of its line where there is room, else left; one that would lie on
    /// another goes a row lower.
    fn draw_markers(&self, svg: &mut String, place_x: impl Fn(f64) -> f64) {
        let mut taken: Vec<(usize, f64, f64)> = Vec::new();
        let mut labels = String::new();
        for (value, name) in &self.markers {
            let x = place_x(*value);
            let right = x + LABEL_WIDTH < WIDTH - RIGHT;
            let (from, to) = if right {
                (x, x + LABEL_WIDTH)
            } else {
                (x - LABEL_WIDTH, x)
            };
            let free = |row: usize| {
                !taken
                    .iter()
                    .any(|(other, a, b)| *other == row && from < *b && *a < to)
            };
            let row = (0..6).find(|row| free(*row)).unwrap_or(6);
            taken.push((row, from, to));
            let y = TOP + 10.0 + 14.0 * row as f64;
            let (anchor, at) = if right {
                ("start", x + 4.0)
            } else {
                ("end", x - 4.0)
            };
            let base = HEIGHT - BOTTOM;
            write!(
                svg,
                "<line class=\"mark\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{base}\"/>"
            )
            .ok();
            write!(
                labels,
                "<text class=\"label\" text-anchor=\"{anchor}\" x=\"{at:.1}\" y=\"{y:.1}\">\
                 {} {}</text>",
                escaped(name),
                self.x_unit.text(*value)
            )
            .ok();
        }
        // Over all lines, each with a rim of the background.
        svg.push_str(&labels);
    }
}

/// 1, 2 and 5 of each power of ten, as many as have room.
fn log_ticks(low: f64, high: f64, unit: Unit) -> Vec<(f64, String)> {
    let decades = (high / low).log10();
    let factors: &[f64] = match decades {
        wide if wide > 4.0 => &[1.0],
        wide if wide > 1.0 => &[1.0, 2.0, 5.0],
        _ => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    };
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let mut marks = Vec::new();
    for power in first..=last {
        for factor in factors {
            let value = factor * 10f64.powi(power);
            if (low..=high).contains(&value) {
                let (scale, name) = unit.scale(value * 1.000_001);
                marks.push((value, format!("{} {name}", number(value / scale))));
            }
        }
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(0.0, 10.0, 5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.0, 0.7, 4.0), [0.0, 0.2, 0.4, 0.6000000000000001]);
        for (low, high) in [(0.0, 1e-9), (0.0, 3e12), (5.0, 5.1), (0.0, 0.0)] {
            assert!(ticks(low, high, 8.0).len() <= 50);
        }
    }

    #[test]
    fn an_axis_that_begins_near_its_end_holds_every_value() {
        let mut svg = String::new();
        for (low, high) in [(6.95, 6.9684), (0.0, 0.7), (2.0, 2.0)] {
            assert!(
                y_axis(&mut svg, low, high, Unit::Plain) >= high,
                "{low} to {high}"
            );
        }
        assert!((axis_from(6.954, 6.9684) - 6.95).abs() < 1e-9);
        assert_eq!(axis_from(1.0, 10.0), 0.0);
    }

    #[test]
    fn numbers_read_with_their_units() {
        assert_eq!(
            Unit::BytesPerSecond.text(1.5 * 1024.0 * 1024.0),
            "1.50 MiB/s"
        );
        assert_eq!(Unit::Nanoseconds.text(12_345.0), "12.3 µs");
        assert_eq!(Unit::Nanoseconds.text(0.0), "0 ns");
        assert_eq!(Unit::Plain.text(123.4), "123");
    }

    #[test]
    fn charts_hold_any_numbers_and_escape_names() {
        let lines = |points: Vec<(f64, f64)>| LineChart {
            title: "<a & b>".to_string(),
            x_label: "seconds".to_string(),
            x_whole: false,
            y_unit: Unit::BytesPerSecond,
            x_from: Some(0.0),
            y_from: None,
            lines: vec![Line {
                name: "read".to_string(),
                series: 1,
                points,
                spreads: Vec::new(),
            }],
        };
        for points in [
            vec![],
            vec![(1.0, 5.0)],
            vec![(0.0, 0.0), (1.0, 0.0)],
            vec![(0.0, f64::NAN), (1.0, 2.0), (2.0, f64::INFINITY)],
            (0..10_000).map(|i| (f64::from(i), 1e9)).collect(),
        ] {
            let svg = lines(points).svg();
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>"));
            assert!(svg.contains("&lt;a &amp; b&gt;"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        let chart = HistogramChart {
            title: "latency".to_string(),
            x_unit: Unit::Nanoseconds,
            bars: vec![],
            markers: vec![(5.0, "p50".to_string())],
            range: None,
            series: 1,
        };
        let svg = chart.svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
