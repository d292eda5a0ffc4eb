//! `xlaunch data inspect`: tables and JSON.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::Args;
use xlaunch_data::{Lengths, Part, Report, Run};
use xlaunch_spec::exit::ExitCode;

use super::super::output::{QueryError, print};
use super::super::top::has_colours;
use super::refusal;
use crate::render::text::{self, columns, escape, or_dash};

/// Options of `xlaunch data inspect`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Inspect {
    /// Prepared directories, or token files
    #[arg(value_name = "DIR|SHARD", required = true)]
    paths: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: &Inspect) -> Result<ExitCode, QueryError> {
    let mut reports = Vec::new();
    let colours = io::stdout().is_terminal() && has_colours(std::env::var_os("NO_COLOR").as_deref());
    for path in &options.paths {
        let report = xlaunch_data::inspect(path).map_err(refusal)?;
        if !options.json {
            let separator = if reports.is_empty() { "" } else { "\n" };
            print(format!("{separator}{}", text(&report, colours)).as_bytes())?;
        }
        reports.push(report);
    }
    if options.json {
        print(text::json(&serde_json::json!(reports)).as_bytes())?;
    }
    Ok(ExitCode::Done)
}

fn text(report: &Report, colours: bool) -> String {
    let tokenizer = report.tokenizer.as_deref().unwrap_or("unknown");
    let vocab = report.vocab.map_or_else(String::new, |vocab| format!(", {vocab} ids"));
    let end = report.end_of_text.map_or_else(String::new, |id| format!(", end of text {id}"));
    let path = report.path.display().to_string();
    let pairs = if report.preferences { ", pairs of a better and a worse answer" } else { "" };
    let mut out = format!("{}: tokenizer {}{vocab}{end}{pairs}\n", escape(&path), escape(tokenizer));
    let mut head =
        vec!["part", "documents", "bytes", "tokens", "shards", "min", "median", "p99", "max", "hashes"];
    let mut rows: Vec<Vec<String>> = report.parts.iter().map(row).collect();
    if report.parts.iter().any(|part| part.supervised.is_some()) {
        head.insert(4, "supervised");
        for (row, part) in rows.iter_mut().zip(&report.parts) {
            row.insert(4, or_dash(part.supervised, |count| count.to_string()));
        }
    }
    out += &columns(&head, &rows);
    for part in &report.parts {
        for sample in &part.samples {
            let sample: String = sample.chars().take(240).collect();
            let _ = writeln!(out, "{}: {}", escape(&part.name), escape(&sample.replace('\n', " ")));
        }
        for (index, chat) in part.chats.iter().enumerate() {
            let answer = if report.preferences { [", chosen", ", rejected"][index % 2] } else { "" };
            let _ = writeln!(out, "{}{answer}: {}", escape(&part.name), marked(chat, colours));
        }
    }
    out
}

/// Returns a chat in which the text that is trained on is green, or between `[train]` and `[/train]`.
fn marked(chat: &[Run], colours: bool) -> String {
    let (open, close) = if colours { ("\x1b[32m", "\x1b[0m") } else { ("[train]", "[/train]") };
    let mut out = String::new();
    for Run { supervised, text } in chat {
        let text = escape(&text.replace('\n', " ")).to_string();
        out.extend(if *supervised { [open, &text, close] } else { ["", &text, ""] });
    }
    out
}

fn row(part: &Part) -> Vec<String> {
    let number = |value: Option<u64>| or_dash(value, |value| value.to_string());
    let length = |of: fn(Lengths) -> u64| number(part.lengths.map(of));
    vec![
        part.name.clone(),
        number(part.documents),
        number(part.bytes),
        part.tokens.to_string(),
        part.shards.to_string(),
        length(|lengths| lengths.min),
        length(|lengths| lengths.median),
        length(|lengths| lengths.p99),
        length(|lengths| lengths.max),
        if part.verified == Some(true) { "match".into() } else { "-".into() },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_is_trained_on_is_marked_with_and_without_colours() {
        let run = |supervised, text: &str| Run { supervised, text: text.into() };
        let chat = [run(false, "user:\nHi\u{1b}[31m"), run(true, "Hello."), run(false, "")];
        assert_eq!(marked(&chat, false), "user: Hi\\u{1b}[31m[train]Hello.[/train]");
        assert_eq!(marked(&chat, true), "user: Hi\\u{1b}[31m\u{1b}[32mHello.\u{1b}[0m");
        let no_color = |value: &str| has_colours(Some(value.as_ref()));
        assert!(has_colours(None) && no_color("") && !no_color("1"));
    }
}
