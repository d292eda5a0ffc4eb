//! `summary.json` in the directory of a training run: how the run ended, and how its time was spent.
//!
//! ```text
//! { "version": 1, "exit_code": 0, "reason": "", "seconds": 93.1, "attempts": 1,
//!   "accounting": { "seconds": { "step": 80.2, ... }, "useful_percent": 88.9, ... } }
//! ```
//! The file is absent while the run trains, and if xlaunch itself was killed.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

use crate::ending::Ending;
use crate::report;
use crate::sinks::summary::Summary;
use xlaunch_proto::json;
use xlaunch_proto::v1::SourceReport;

pub const SUMMARY_FILE: &str = "summary.json";

/// Writes the file. `seconds` is the duration of the run; `summary` is that of its reports.
pub fn write(dir: &Path, ending: &Ending, seconds: f64, summary: &Summary) -> io::Result<()> {
    let reason =
        report::headline(ending).or(summary.early_stop().map(|reason| format!("stopped early: {reason}")));
    let value = json!({
        "version": 1,
        "exit_code": ending.exit.code(),
        "reason": reason.unwrap_or_default(),
        "seconds": json::number(seconds),
        "attempts": ending.status.attempt + 1,
        "accounting": ending.status.accounting,
        "sources": summary.sources().iter().map(source).collect::<Vec<_>>(),
    });
    crate::environment_file::write_json(&dir.join(SUMMARY_FILE), &value)
}

fn source(SourceReport { name, share, tokens, epochs }: &SourceReport) -> Value {
    json!({ "name": name, "share": share, "tokens": tokens, "epochs": epochs })
}
