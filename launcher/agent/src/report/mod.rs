//! The failure report, in the order in which the user needs it: the root cause, the last lines of its rank, the
//! failures that followed, where the logs are. Printed last, to stderr.
//!
//! Control characters in the output of workers are escaped, so that a worker cannot forge a report.

mod cause;
pub mod error_file;
mod python;

use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(crate) use crate::escape::escaped;
use crate::run_dir;
use crate::spawn::{Exit, OomKills};
use crate::state::{Failure, Outcome};

pub(crate) use cause::{MAX_SYMPTOM_AGE, Symptom, symptom};
use cause::{cause, cause_of_root};

/// Lines of stderr in a report.
const MAX_STDERR_LINES: usize = 20;

/// What is known about a rank in addition to its [`Failure`]. The default is nothing.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Process id; 0 if it was never started.
    pub pid: u32,
    pub host: String,
    /// The rank of its node, if the job has several.
    pub node_rank: Option<u32>,
    /// How the process ended. `None` if it has not, and for exit codes of the built-in trainer, whose meaning is in the
    /// failure's message.
    pub exit: Option<Exit>,
    /// When it ended.
    pub exit_time: Option<SystemTime>,
    /// Whether xlaunch had sent it a signal before.
    pub signalled: bool,
    /// Its last lines of stderr, oldest first.
    pub stderr: Vec<String>,
    /// How many of these it had written more than [`MAX_SYMPTOM_AGE`] before it exited.
    pub old_lines: usize,
    /// The contents of `TORCHELASTIC_ERROR_FILE`.
    pub error_file: Option<String>,
    /// What was found out about its hang, or about its waiting for a rank that hung.
    pub hang_file: Option<PathBuf>,
    /// OOM kills during the attempt.
    pub oom_kills: OomKills,
    /// The error number of a failed start.
    pub spawn_error: Option<i32>,
    /// The program that was started; empty for the built-in trainer.
    pub program: OsString,
    /// The `PATH` that was searched for it.
    pub search_path: OsString,
}

/// The report; `None` if nothing failed. `evidence` is by rank; `logs` is the directory of logs that are kept.
pub fn text(outcome: &Outcome, evidence: &[Evidence], logs: Option<&Path>) -> Option<String> {
    if let Some(elsewhere) = &outcome.elsewhere {
        // That node has the evidence, and prints it.
        return Some(format!(
            "xlaunch: the job ended with exit code {}: {}\n",
            outcome.exit.code(),
            escaped(elsewhere)
        ));
    }
    let (root, first_rank) = (outcome.root.as_ref()?, outcome.first_rank);
    let of = |failure: &Failure| failure.rank.and_then(|rank| evidence.get(rank as usize));
    let what = if root.preempted { "was preempted" } else { "failed" };
    let mut out = format!("xlaunch: the job {what}\n");
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "  {}{}",
        describe(root, first_rank, of(root), ""),
        of(root).map(at).unwrap_or_default()
    );
    if let Some(evidence) = of(root) {
        explain(&mut out, root, evidence);
    }
    if !outcome.others.is_empty() {
        out.push_str("  then:\n");
    }
    let known = of(root).map_or("", |evidence| evidence.host.as_str());
    for other in &outcome.others {
        let later = of(root).zip(of(other)).map(|(root, other)| later(root, other)).unwrap_or_default();
        // The name of a signal says enough.
        let coded = of(other).filter(|evidence| matches!(evidence.exit, Some(Exit::Code(_))));
        let why = coded.and_then(cause).map_or(String::new(), |cause| format!(": {}", escaped(&cause.what)));
        let _ = writeln!(out, "    {}{later}{why}", describe(other, first_rank, of(other), known));
    }
    if let Some(note) = &outcome.note {
        let _ = writeln!(out, "  {}", escaped(note));
    }
    if let Some(logs) = logs {
        let _ = writeln!(out, "  logs: {}", logs.display());
    }
    let _ = writeln!(out, "  exit code {} ({})", outcome.exit.code(), outcome.exit.meaning());
    Some(out)
}

/// The root cause in one line; `None` if nothing failed.
pub fn headline(outcome: &Outcome, evidence: &[Evidence]) -> Option<String> {
    if let Some(elsewhere) = &outcome.elsewhere {
        return Some(escaped(elsewhere));
    }
    let root = outcome.root.as_ref()?;
    let evidence = root.rank.and_then(|rank| evidence.get(rank as usize));
    let known = evidence.map_or("", |evidence| evidence.host.as_str());
    let cause = evidence.filter(|_| !root.hung).and_then(cause_of_root);
    let cause = cause.map(|cause| format!(": {}", escaped(&cause.what)));
    Some(format!("{}{}", describe(root, outcome.first_rank, evidence, known), cause.unwrap_or_default()))
}

/// The cause of the root failure, what to do about it, and the last lines of its rank.
fn explain(out: &mut String, root: &Failure, evidence: &Evidence) {
    if let Some(file) = evidence.hang_file.as_ref().filter(|_| root.hung) {
        let _ = writeln!(out, "  evidence: {}", escaped(&file.to_string_lossy()));
    }
    // From the stacks that its Python program printed before it was ended.
    if let Some(place) = python::fault(&evidence.stderr).filter(|_| root.hung) {
        let _ = writeln!(out, "  location: {}", escaped(&place.to_string()));
    }
    // A rank that hung was ended by xlaunch, whatever it made of that.
    if let Some(cause) = cause_of_root(evidence).filter(|_| !root.hung) {
        let _ = writeln!(out, "  cause: {}", escaped(&cause.what));
        if let Some(help) = cause.help {
            let _ = writeln!(out, "  help: {}", escaped(&help));
        }
    }
    let last = &evidence.stderr[evidence.stderr.len().saturating_sub(MAX_STDERR_LINES)..];
    if !last.is_empty() {
        out.push_str("  its last lines on stderr:\n");
    }
    for line in last {
        let _ = writeln!(out, "    {}", escaped(line));
    }
}

/// Rank, local rank, process id, node and host unless it is `known`, and how the process ended.
fn describe(failure: &Failure, first_rank: u32, evidence: Option<&Evidence>, known: &str) -> String {
    let Some(local_rank) = failure.rank else { return escaped(&failure.message) };
    let mut who = format!("rank {}", first_rank + local_rank);
    let Some(evidence) = evidence else { return format!("{who}: {}", escaped(&failure.message)) };
    let local = evidence.node_rank.map(|_| format!("local rank {local_rank}"));
    let pid = Some(evidence.pid).filter(|pid| *pid != 0).map(|pid| format!("pid {pid}"));
    let ids: Vec<String> = local.into_iter().chain(pid).collect();
    if !ids.is_empty() {
        let _ = write!(who, " ({})", ids.join(", "));
    }
    let host = escaped(&evidence.host);
    let _ = match evidence.node_rank {
        _ if evidence.host == known => Ok(()),
        Some(node) => write!(who, " on node {node} ({host})"),
        None => write!(who, " on {host}"),
    };
    match evidence.exit {
        _ if failure.hung || failure.preempted => format!("{who}: {}", escaped(&failure.message)),
        // Only the command knows the meaning of its exit codes.
        Some(Exit::Code(code @ 1..)) => format!("{who}: exit code {code}"),
        Some(exit @ Exit::Signal(2 | 9 | 15)) if evidence.signalled => {
            let text = exit.to_string();
            format!("{who}: {}), sent by xlaunch", text.split([':', ')']).next().unwrap_or_default())
        }
        _ => format!("{who}: {}", escaped(&failure.message)),
    }
}

/// `, at 14:03:05 UTC`.
fn at(evidence: &Evidence) -> String {
    let since =
        evidence.exit_time.and_then(|exit_time| exit_time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(String::new(), |since| {
        let time = run_dir::timestamp(since.as_secs());
        let clock = time.split_once('-').map_or("", |(_, clock)| clock);
        format!(", at {}:{}:{} UTC", &clock[..2], &clock[2..4], &clock[4..])
    })
}

/// `, 0.3 s later`.
fn later(root: &Evidence, other: &Evidence) -> String {
    let between =
        root.exit_time.zip(other.exit_time).and_then(|(first, then)| then.duration_since(first).ok());
    between.map_or(String::new(), |time| format!(", {:.1} s later", time.as_secs_f64()))
}

#[cfg(test)]
mod tests;
