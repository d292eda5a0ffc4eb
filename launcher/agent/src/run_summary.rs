//! `summary.json` in the directory of a training run: how the run ended, and how its time was spent.
//!
//! ```text
//! { "version": 1, "exit_code": 0, "reason": "", "seconds": 93.1, "attempts": 1,
//!   "accounting": { "seconds": { "step": 80.2, ... }, "useful_percent": 88.9, ... } }
//! ```
//! The file is absent while the run trains, and if xlaunch itself was killed.

use std::io;
use std::path::Path;

use serde_json::json;

use crate::ending::Ending;
use crate::report;
use xlaunch_proto::json;

pub const SUMMARY_FILE: &str = "summary.json";

/// Writes the file. `seconds` is the duration of the run.
pub fn write(dir: &Path, ending: &Ending, seconds: f64) -> io::Result<()> {
    let value = json!({
        "version": 1,
        "exit_code": ending.exit.code(),
        "reason": report::headline(ending).unwrap_or_default(),
        "seconds": json::number(seconds),
        "attempts": ending.status.attempt + 1,
        "accounting": ending.status.accounting,
    });
    crate::environment_file::write_json(&dir.join(SUMMARY_FILE), &value)
}
