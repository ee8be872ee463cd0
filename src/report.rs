//! Pages for people: charts as SVG, tables, one HTML file that needs nothing else.
//!
//! - No script, no font, no address of another place: a page can be mailed and opened in ten years.
//! - Colours are variables of the page's style, so that light and dark both read well; a chart
//!   names series by number, and the page gives them their colours.
//! - Text is escaped here; callers give plain strings.
//!
//! Nothing here knows what it draws: benchmarks and runs bring their own numbers.

pub mod chart;
pub mod page;

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
