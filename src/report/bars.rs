//! Rows of bars, each with its name at the left and its number at the right.

use std::fmt::Write;

use super::escaped;

const WIDTH: f64 = 680.0;
/// Where bars begin.
const LEFT: f64 = 150.0;
/// What the numbers at the right take.
const RIGHT: f64 = 170.0;
const TOP: f64 = 30.0;
const ROW: f64 = 30.0;
const THICK: f64 = 16.0;

/// A bar of one or more parts.
#[derive(Clone, Debug, Default)]
pub struct Bar {
    /// At its left.
    pub name: String,
    /// At its right.
    pub text: String,
    /// (series, length), from the left; what is not a number or below 0 has no length.
    pub parts: Vec<(usize, f64)>,
    /// An outline of that length around it.
    pub limit: Option<f64>,
}

/// Bars with a common scale, or each with its own.
#[derive(Clone, Debug, Default)]
pub struct BarChart {
    /// Above the bars.
    pub title: String,
    /// Names of the series, from 1 on.
    pub legend: Vec<String>,
    /// From top to bottom.
    pub bars: Vec<Bar>,
    /// Each bar's limit, or its own length, takes the whole width.
    pub own_scales: bool,
}

impl Bar {
    fn length(&self) -> f64 {
        let parts = self.parts.iter().map(|(_, length)| length.max(0.0));
        let parts: f64 = parts.filter(|length| length.is_finite()).sum();
        parts.max(self.limit.unwrap_or(0.0))
    }
}

impl BarChart {
    /// The chart.
    pub fn svg(&self) -> String {
        let legend = if self.legend.is_empty() { 0.0 } else { 20.0 };
        let height = TOP + legend + ROW * self.bars.len() as f64 + 6.0;
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{0}\">\
             <text class=\"title\" x=\"0\" y=\"14\">{0}</text>",
            escaped(&self.title)
        );
        let mut x = 0.0;
        for (index, name) in self.legend.iter().enumerate() {
            write!(
                svg,
                "<rect class=\"bar s{}\" x=\"{x:.1}\" y=\"29\" width=\"10\" height=\"8\" \
                 rx=\"2\"/><text class=\"tick\" x=\"{:.1}\" y=\"37\">{}</text>",
                index + 1,
                x + 15.0,
                escaped(name)
            )
            .ok();
            x += 34.0 + 6.4 * name.chars().count() as f64;
        }
        let longest = self.bars.iter().map(Bar::length).fold(0.0, f64::max);
        for (index, bar) in self.bars.iter().enumerate() {
            let top = TOP + legend + ROW * index as f64;
            let full = if self.own_scales {
                bar.length()
            } else {
                longest
            };
            bar.draw(
                &mut svg,
                top,
                (WIDTH - LEFT - RIGHT) / full.max(f64::MIN_POSITIVE),
            );
        }
        svg + "</svg>"
    }
}

impl Bar {
    fn draw(&self, svg: &mut String, top: f64, scale: f64) {
        let base = top + THICK - 4.0;
        write!(
            svg,
            "<text class=\"name\" text-anchor=\"end\" x=\"{}\" y=\"{base}\">{}</text>\
             <text class=\"tick\" x=\"{}\" y=\"{base}\">{}</text>",
            LEFT - 10.0,
            escaped(&self.name),
            WIDTH - RIGHT + 10.0,
            escaped(&self.text)
        )
        .ok();
        let mut x = LEFT;
        for (series, length) in &self.parts {
            let width = length.max(0.0) * scale;
            if width.is_finite() && width > 0.0 {
                write!(
                    svg,
                    "<rect class=\"bar s{series}\" x=\"{x:.2}\" y=\"{top}\" width=\"{:.2}\" \
                     height=\"{THICK}\"/>",
                    width.max(0.5)
                )
                .ok();
                x += width;
            }
        }
        if let Some(limit) = self.limit {
            write!(
                svg,
                "<rect class=\"limit\" x=\"{LEFT}\" y=\"{top}\" width=\"{:.2}\" \
                 height=\"{THICK}\" rx=\"2\"/>",
                (limit * scale).max(0.5)
            )
            .ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_hold_any_numbers() {
        let bar = |parts: &[f64], limit| Bar {
            name: "<host>".to_string(),
            text: "1 & 2".to_string(),
            parts: parts.iter().map(|length| (1, *length)).collect(),
            limit,
        };
        for bars in [
            vec![],
            vec![bar(&[], None)],
            vec![bar(&[0.0], Some(0.0))],
            vec![bar(&[f64::NAN, 1.0, f64::INFINITY, -5.0], Some(4.0))],
            vec![bar(&[1e300, 1e300], None), bar(&[1.0], None)],
        ] {
            for own_scales in [false, true] {
                let chart = BarChart {
                    title: "a & b".to_string(),
                    legend: vec!["x".to_string()],
                    bars: bars.clone(),
                    own_scales,
                };
                let svg = chart.svg();
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
                assert!(!svg.contains("<host>"));
            }
        }
    }
}
