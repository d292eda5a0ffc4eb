//! `xlaunch data inspect`: tables and JSON.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use xlaunch_data::{Lengths, Part, Report};
use xlaunch_spec::exit::ExitCode;

use super::super::output::{QueryError, print};
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
    for path in &options.paths {
        let report = xlaunch_data::inspect(path).map_err(refusal)?;
        if !options.json {
            let separator = if reports.is_empty() { "" } else { "\n" };
            print(format!("{separator}{}", text(&report)).as_bytes())?;
        }
        reports.push(report);
    }
    if options.json {
        print(text::json(&serde_json::json!(reports)).as_bytes())?;
    }
    Ok(ExitCode::Done)
}

fn text(report: &Report) -> String {
    let tokenizer = report.tokenizer.as_deref().unwrap_or("unknown");
    let vocab = report.vocab.map_or_else(String::new, |vocab| format!(", {vocab} ids"));
    let end = report.end_of_text.map_or_else(String::new, |id| format!(", end of text {id}"));
    let path = report.path.display().to_string();
    let mut out = format!("{}: tokenizer {}{vocab}{end}\n", escape(&path), escape(tokenizer));
    let head = ["part", "documents", "bytes", "tokens", "shards", "min", "median", "p99", "max", "hashes"];
    out += &columns(&head, &report.parts.iter().map(row).collect::<Vec<_>>());
    for part in &report.parts {
        for sample in &part.samples {
            let sample: String = sample.chars().take(240).collect();
            let _ = writeln!(out, "{}: {}", escape(&part.name), escape(&sample.replace('\n', " ")));
        }
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
