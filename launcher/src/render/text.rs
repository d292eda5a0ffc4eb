//! Cells, columns, units, and escaping.

use serde::Serialize;
use serde_json::json;
use xlaunch_spec::quantities::count_text;

/// Escapes text and truncates its lines to `width` characters; truncated lines end in `...`.
pub(crate) fn fit(text: &str, width: usize) -> String {
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let line = escape(line.trim_end());
        match line.char_indices().nth(width) {
            Some(_) => out.extend(line.chars().take(width.saturating_sub(3)).chain("...".chars())),
            None => out += &line,
        }
        out.push('\n');
    }
    out
}

/// Escapes control characters, and those that change the direction of text, as `\u{1b}`.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts_on_terminal(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

fn acts_on_terminal(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns a value as indented JSON and a line feed. Characters that act on a terminal are written as `\u009b`.
pub(crate) fn json(value: &impl Serialize) -> String {
    escaped_json(&format!("{:#}", json!(value))) + "\n"
}

/// Returns a value like [`json()`], but on one line.
pub(crate) fn json_line(value: &serde_json::Value) -> String {
    escaped_json(&value.to_string()) + "\n"
}

fn escaped_json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // serde_json escapes those below U+0020 within strings. All others here are in the Basic Multilingual Plane.
        if c != '\n' && acts_on_terminal(c) {
            out += &format!("\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

/// Returns a table with two spaces between columns, each as wide as its widest cell. Cells are escaped.
pub(crate) fn columns(head: &[&str], rows: &[Vec<String>]) -> String {
    let head = head.iter().map(|&cell| cell.to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(&head)
        .chain(rows)
        .map(|row: &Vec<String>| row.iter().map(|cell| escape(cell)).collect())
        .collect();
    let cells = |column: usize| lines.iter().filter_map(move |row| row.get(column));
    let width = |column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for row in &lines {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        out += cells.collect::<Vec<_>>().join("  ").trim_end();
        out.push('\n');
    }
    out
}

/// Returns the value, or `-` if it is not known.
pub(crate) fn or_dash<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".into(), show)
}

pub(crate) fn percent(value: f64) -> String {
    format!("{value:.0}%")
}

#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub(crate) fn bytes(value: u64) -> String {
    count_text(value as f64)
}

#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub(crate) fn seconds(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn json_cannot_act_on_a_terminal_and_means_the_same() {
        let hostile = json!({ "name": "a\u{9b}2J\u{202e}b\u{61c}\u{7f}\u{1b}[2J\n\"\u{1f600}é" });
        for text in [json(&hostile), json_line(&hostile)] {
            let shown = text.trim_end_matches('\n').replace('\n', "");
            assert!(!shown.contains(acts_on_terminal), "{shown:?}");
            assert!(
                text.contains("\\u009b2J\\u202eb\\u061c\\u007f") && text.contains("\u{1f600}é"),
                "{text}"
            );
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), hostile);
        }
    }
}
