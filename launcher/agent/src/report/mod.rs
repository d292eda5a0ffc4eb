//! The failure report, printed to stderr at the end. It is ordered by what the user needs first: root cause, last lines
//! of the rank that caused it, subsequent failures, location of the logs.
//!
//! Control characters in the output of workers are escaped, so that a worker cannot forge a report.

mod cause;
pub mod error_file;
mod python;

use std::fmt::Write;
use std::time::SystemTime;

use xlaunch_host::spawn::Exit;
use xlaunch_spec::exit::ExitCode;

use crate::ending::{Ending, Evidence, Failure};
pub(crate) use xlaunch_host::escape::escaped;

pub(crate) use cause::{MAX_SYMPTOM_AGE, Symptom, symptom};
use cause::{cause, cause_of_root};

/// Maximum number of stderr lines in a report.
const MAX_STDERR_LINES: usize = 20;
/// Advice if rank 0 exited while other ranks needed it. torchrun hosts the store in the agent instead.
const STORE_HELP: &str = "rank 0 hosts the store of torch.distributed, which the other ranks lose when it exits: \
                          let it exit last, for example by torch.distributed.barrier() at the end of the script";

/// Returns all lines for stderr at the end: lost output, and the failure report.
pub fn at_end(ending: &Ending) -> String {
    let losses = ending.losses.iter().map(|line| format!("{line}\n"));
    losses.chain(text(ending)).collect()
}

/// Returns the reason for the exit code, in one line; empty for a job that is done.
pub fn reason(ending: &Ending) -> String {
    let meaning = if ending.exit == ExitCode::Done { "" } else { ending.exit.meaning() };
    headline(ending).unwrap_or_else(|| meaning.into())
}

/// Returns the failure report; `None` if nothing failed.
pub fn text(ending: &Ending) -> Option<String> {
    if let Some(elsewhere) = &ending.elsewhere {
        // The node that failed has the evidence, and prints it.
        return Some(format!(
            "xlaunch: the job ended with exit code {}: {}\n",
            ending.exit.code(),
            escaped(elsewhere)
        ));
    }
    let (root, first_rank) = (ending.root.as_ref()?, ending.first_rank);
    let evidence = ending.evidence_of(root);
    let what = if root.preempted { "was preempted" } else { "failed" };
    let mut out = format!("xlaunch: the job {what}\n");
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "  {}{}",
        describe(root, first_rank, evidence, ""),
        evidence.map(at).unwrap_or_default()
    );
    if let Some(evidence) = evidence {
        explain(&mut out, root, first_rank, evidence);
    }
    if !ending.others.is_empty() {
        out.push_str("  then:\n");
    }
    let known = evidence.map_or("", |evidence| evidence.host.as_str());
    for other in &ending.others {
        let of_other = ending.evidence_of(other);
        let later = evidence.zip(of_other).map(|(root, other)| later(root, other)).unwrap_or_default();
        // For a signal, its name is enough.
        let coded = of_other.filter(|evidence| matches!(evidence.exit, Some(Exit::Code(_))));
        let why = coded.and_then(cause).map_or(String::new(), |cause| format!(": {}", escaped(&cause.what)));
        let _ = writeln!(out, "    {}{later}{why}", describe(other, first_rank, of_other, known));
    }
    if let Some(note) = &ending.note {
        let _ = writeln!(out, "  {}", escaped(note));
    }
    if let Some(logs) = &ending.logs {
        let _ = writeln!(out, "  logs: {}", logs.display());
    }
    let _ = writeln!(out, "  exit code {} ({})", ending.exit.code(), ending.exit.meaning());
    Some(out)
}

/// Returns the root cause in one line; `None` if nothing failed.
pub fn headline(ending: &Ending) -> Option<String> {
    if let Some(elsewhere) = &ending.elsewhere {
        return Some(escaped(elsewhere));
    }
    let root = ending.root.as_ref()?;
    let evidence = ending.evidence_of(root);
    let known = evidence.map_or("", |evidence| evidence.host.as_str());
    let cause = evidence.filter(|_| !root.hung).and_then(cause_of_root);
    let cause = cause.map(|cause| format!(": {}", escaped(&cause.what)));
    Some(format!("{}{}", describe(root, ending.first_rank, evidence, known), cause.unwrap_or_default()))
}

/// Writes the cause of the root failure, advice, and the last lines of its rank.
fn explain(out: &mut String, root: &Failure, first_rank: u32, evidence: &Evidence) {
    if let Some(file) = evidence.hang_file.as_ref().filter(|_| root.hung) {
        let _ = writeln!(out, "  evidence: {}", escaped(&file.to_string_lossy()));
    }
    // Found in the stacks that the rank's Python program printed before it was killed.
    if let Some(place) = python::fault(&evidence.stderr).filter(|_| root.hung) {
        let _ = writeln!(out, "  location: {}", escaped(&place.to_string()));
    }
    // xlaunch itself terminated a hung rank, so the way it exited explains nothing.
    if let Some(cause) = cause_of_root(evidence).filter(|_| !root.hung) {
        let _ = writeln!(out, "  cause: {}", escaped(&cause.what));
        if let Some(help) = cause.help {
            let _ = writeln!(out, "  help: {}", escaped(&help));
        }
    } else if evidence.exit == Some(Exit::Code(0)) && root.rank.is_some_and(|rank| first_rank + rank == 0) {
        let _ = writeln!(out, "  help: {STORE_HELP}");
    }
    let last = &evidence.stderr[evidence.stderr.len().saturating_sub(MAX_STDERR_LINES)..];
    if !last.is_empty() {
        out.push_str("  its last lines on stderr:\n");
    }
    for line in last {
        let _ = writeln!(out, "    {}", escaped(line));
    }
}

/// Describes a failure: rank, local rank, process id, node, host unless it is `known`, and how the process ended.
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

/// Formats the time of the exit, such as `, at 14:03:05 UTC`.
fn at(evidence: &Evidence) -> String {
    let since =
        evidence.exit_time.and_then(|exit_time| exit_time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(String::new(), |since| {
        let time = xlaunch_host::clock::timestamp(since.as_secs());
        let clock = time.split_once('-').map_or("", |(_, clock)| clock);
        format!(", at {}:{}:{} UTC", &clock[..2], &clock[2..4], &clock[4..])
    })
}

/// Formats the time between two exits, such as `, 0.3 s later`.
fn later(root: &Evidence, other: &Evidence) -> String {
    let between =
        root.exit_time.zip(other.exit_time).and_then(|(first, then)| then.duration_since(first).ok());
    between.map_or(String::new(), |time| format!(", {:.1} s later", time.as_secs_f64()))
}

#[cfg(test)]
mod tests;
