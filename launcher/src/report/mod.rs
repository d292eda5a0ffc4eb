//! Why a job failed, in the order in which a person wants to know it. Printed last, to stderr.

use std::fmt::Write;
use std::path::Path;

use crate::agent::state::{Failure, Outcome};

/// What the report adds to a failed rank.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Process id.
    pub pid: u32,
    /// Its last lines of stderr.
    pub stderr: Vec<String>,
}

/// The text, or `None` if nothing failed. `evidence` is by rank.
pub fn text(outcome: &Outcome, evidence: &[Evidence], logs: &Path) -> Option<String> {
    let root = outcome.root.as_ref()?;
    let mut out = String::from("xlaunch: the job failed\n");
    // Writing to a String cannot fail.
    let _ = writeln!(out, "  {}", describe(root, evidence));
    if let Some(rank) = root.rank {
        let lines = evidence.get(rank as usize).map_or(&[][..], |evidence| &evidence.stderr);
        if !lines.is_empty() {
            let _ = writeln!(out, "  its last lines on stderr:");
            for line in lines {
                let _ = writeln!(out, "    {line}");
            }
        }
    }
    if !outcome.others.is_empty() {
        let _ = writeln!(out, "  then:");
        for other in &outcome.others {
            let _ = writeln!(out, "    {}", describe(other, evidence));
        }
    }
    let _ = writeln!(out, "  logs: {}", logs.display());
    let _ = writeln!(out, "  exit code {} ({})", outcome.exit.code(), outcome.exit.meaning());
    Some(out)
}

fn describe(failure: &Failure, evidence: &[Evidence]) -> String {
    match failure.rank {
        None => failure.what.clone(),
        Some(rank) => match evidence.get(rank as usize).map(|evidence| evidence.pid) {
            Some(pid) if pid != 0 => format!("rank {rank} (pid {pid}): {}", failure.what),
            _ => format!("rank {rank}: {}", failure.what),
        },
    }
}
