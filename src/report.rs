//! Pages for people: charts as SVG, tables, one HTML file that needs nothing else.
//!
//! - No script, no font, no address of another place: a page can be mailed and opened in ten years.
//! - Colours are variables of the page's style, so that light and dark both read well; a chart
//!   names series by number, and the page gives them their colours.
//! - Text is escaped here; callers give plain strings.
//!
//! Nothing here knows what it draws: benchmarks and runs bring their own numbers.

pub mod bars;
pub mod chart;
pub mod page;

/// Colours and marks of charts.
const CHART_STYLE: &str = include_str!("report/chart.css");

/// A chart as a file of its own, with a background, for readers in light and dark.
pub fn svg_file(svg: &str) -> String {
    let opened = svg.replacen(
        "<svg ",
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"680\" font-family=\"sans-serif\" ",
        1,
    );
    let within = format!(
        ">\n<style>\n{CHART_STYLE}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"var(--card)\"/>\n"
    );
    opened.replacen('>', &within, 1) + "\n"
}

/// UTC as `2026-11-29T23:42:24Z`, from seconds since 1970.
pub fn date_text(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01: years then end with February, and leap days with a cycle of 400.
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (400 * cycle + year, month + 3),
        _ => (400 * cycle + year + 1, month - 9),
    };
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// `text` with what HTML and SVG read as markup escaped.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            letter if letter.is_control() && letter != '\n' => out.push('\u{fffd}'),
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_995_744, "2026-11-29T23:42:24Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date_text(seconds), text);
        }
    }
}
