//! One HTML file of panels.

use std::fmt::Write;

use super::{CHART_STYLE, escaped};

/// A table: numbers are right-aligned but for the first column.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Heads of the columns; none where rows are names with what they name.
    pub heads: Vec<String>,
    /// Cells by row.
    pub rows: Vec<Vec<String>>,
}

/// What a panel holds.
#[derive(Clone, Debug)]
pub enum Part {
    /// A chart's SVG, as [`super::chart`] makes it.
    Chart(String),
    /// A table.
    Table(Table),
    /// A paragraph.
    Text(String),
    /// A paragraph about something that went wrong.
    Failure(String),
    /// A text as it is, below a head that may be empty.
    Quote {
        /// Above it.
        head: String,
        /// Its lines.
        text: String,
    },
}

/// A card of the page.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// Its head.
    pub title: String,
    /// Below the head.
    pub subtitle: String,
    /// From top to bottom.
    pub parts: Vec<Part>,
}

/// A page.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Its head, and the window's.
    pub title: String,
    /// Below the head.
    pub subtitle: String,
    /// The panels.
    pub panels: Vec<Panel>,
}

const STYLE: &str = include_str!("page.css");

impl Page {
    /// The whole file.
    pub fn html(&self) -> String {
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta name=\"color-scheme\" content=\"light dark\">\
             <title>{0}</title>\n<style>\n{CHART_STYLE}{STYLE}</style></head>\n<body><header>\
             <h1>{0}</h1><p>{1}</p></header>\n<main>\n",
            escaped(&self.title),
            escaped(&self.subtitle)
        );
        for panel in &self.panels {
            writeln!(
                html,
                "<section><h2>{}</h2><p class=\"sub\">{}</p>",
                escaped(&panel.title),
                escaped(&panel.subtitle)
            )
            .ok();
            for part in &panel.parts {
                match part {
                    // Narrow screens scroll: labels stay readable.
                    Part::Chart(svg) => {
                        write!(html, "<div class=\"wide\">{svg}</div>").ok();
                    }
                    Part::Table(table) => table.write(&mut html),
                    Part::Text(text) => html.push_str(&format!("<p>{}</p>", escaped(text))),
                    Part::Quote { head, text } => {
                        if !head.is_empty() {
                            write!(html, "<h3>{}</h3>", escaped(head)).ok();
                        }
                        write!(html, "<pre>{}</pre>", escaped(text)).ok();
                    }
                    Part::Failure(text) => {
                        html.push_str(&format!("<p class=\"bad\">{}</p>", escaped(text)));
                    }
                }
                html.push('\n');
            }
            html.push_str("</section>\n");
        }
        html + "</main></body></html>\n"
    }
}

impl Table {
    fn write(&self, html: &mut String) {
        if self.heads.is_empty() {
            html.push_str("<div class=\"wide\"><table class=\"pairs\"><tbody>");
        } else {
            html.push_str("<div class=\"wide\"><table><thead><tr>");
            for head in &self.heads {
                write!(html, "<th scope=\"col\">{}</th>", escaped(head)).ok();
            }
            html.push_str("</tr></thead><tbody>");
        }
        for row in &self.rows {
            html.push_str("<tr>");
            for cell in row {
                write!(html, "<td>{}</td>", escaped(cell)).ok();
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table></div>");
    }
}
