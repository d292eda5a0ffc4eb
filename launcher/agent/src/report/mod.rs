//! Why a job failed, in the order in which a person wants to know it: the root cause, the last words of its rank, what
//! failed in its wake, where to read more. Printed last, to stderr.
//!
//! What workers wrote is shown with its control characters escaped: a report cannot be made to look like another.

mod cause;
mod python;

use std::ffi::OsString;
use std::fmt::Write;
use std::path::Path;
use std::time::SystemTime;

use crate::run_dir;
use crate::spawn::Exit;
use crate::spawn::oom::OomKills;
use crate::state::{Failure, Outcome};

pub use cause::{Cause, cause};

/// Last lines of stderr that are shown.
const LINES: usize = 20;

/// What is known of a rank beside the state machine's words: by default nothing.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// Process id; 0 where it was never started.
    pub pid: u32,
    /// The host that it ran on.
    pub host: String,
    /// How a worker ended; `None` where it has not, and for codes of the built-in trainer, which have meanings of their
    /// own.
    pub exit: Option<Exit>,
    /// When it ended.
    pub died: Option<SystemTime>,
    /// Whether xlaunch had sent it a signal before it ended.
    pub signalled: bool,
    /// Its last lines of stderr.
    pub stderr: Vec<String>,
    /// What it left in `TORCHELASTIC_ERROR_FILE`.
    pub error_file: Option<String>,
    /// What the kernel killed for lack of memory.
    pub oom_kills: OomKills,
    /// The system's error number, where the process could not be started.
    pub spawn_error: Option<i32>,
    /// The program that was started; empty for the built-in trainer.
    pub program: OsString,
    /// The `PATH` that it was looked for in.
    pub search_path: OsString,
}

/// The text, or `None` if nothing failed. `evidence` is by rank, `logs` is where they are, if they are kept.
pub fn text(outcome: &Outcome, evidence: &[Evidence], logs: Option<&Path>) -> Option<String> {
    let root = outcome.root.as_ref()?;
    let of = |failure: &Failure| failure.rank.and_then(|rank| evidence.get(rank as usize));
    let mut out = String::from("xlaunch: the job failed\n");
    // Writing to a String cannot fail.
    let _ = writeln!(out, "  {}{}", describe(root, of(root), ""), of(root).map(at).unwrap_or_default());
    if let Some(evidence) = of(root) {
        tell(&mut out, evidence);
    }
    if !outcome.others.is_empty() {
        out.push_str("  then:\n");
    }
    let known = of(root).map_or("", |evidence| evidence.host.as_str());
    for other in &outcome.others {
        let later = of(root).zip(of(other)).map(|(root, other)| later(root, other)).unwrap_or_default();
        // A signal says enough by its name.
        let coded = of(other).filter(|evidence| matches!(evidence.exit, Some(Exit::Code(_))));
        let why = coded.and_then(cause).map_or(String::new(), |cause| format!(": {}", escaped(&cause.what)));
        let _ = writeln!(out, "    {}{later}{why}", describe(other, of(other), known));
    }
    if let Some(logs) = logs {
        let _ = writeln!(out, "  logs: {}", logs.display());
    }
    let _ = writeln!(out, "  exit code {} ({})", outcome.exit.code(), outcome.exit.meaning());
    Some(out)
}

/// Who failed first, how, and why where that is known, in one line; `None` if nothing failed.
pub fn headline(outcome: &Outcome, evidence: &[Evidence]) -> Option<String> {
    let root = outcome.root.as_ref()?;
    let evidence = root.rank.and_then(|rank| evidence.get(rank as usize));
    let known = evidence.map_or("", |evidence| evidence.host.as_str());
    let cause = evidence.and_then(cause).map(|cause| format!(": {}", escaped(&cause.what)));
    Some(format!("{}{}", describe(root, evidence, known), cause.unwrap_or_default()))
}

/// What happened to the root, what to do about it, and its last words.
fn tell(out: &mut String, evidence: &Evidence) {
    if let Some(cause) = cause(evidence) {
        let _ = writeln!(out, "  cause: {}", escaped(&cause.what));
        if let Some(advice) = cause.advice {
            let _ = writeln!(out, "  to do: {}", escaped(&advice));
        }
    }
    let last = &evidence.stderr[evidence.stderr.len().saturating_sub(LINES)..];
    if !last.is_empty() {
        out.push_str("  its last lines on stderr:\n");
    }
    for line in last {
        let _ = writeln!(out, "    {}", escaped(line));
    }
}

/// Who, on which host if not the one that is known, and how it ended.
fn describe(failure: &Failure, evidence: Option<&Evidence>, known: &str) -> String {
    let Some(rank) = failure.rank else { return escaped(&failure.what) };
    let mut who = format!("rank {rank}");
    let Some(evidence) = evidence else { return format!("{who}: {}", escaped(&failure.what)) };
    if evidence.pid != 0 {
        let _ = write!(who, " (pid {})", evidence.pid);
    }
    if evidence.host != known {
        let _ = write!(who, " on {}", escaped(&evidence.host));
    }
    match evidence.exit {
        // A command's codes mean what the command says.
        Some(Exit::Code(code)) => format!("{who}: exit code {code}"),
        Some(exit @ Exit::Signal(2 | 9 | 15)) if evidence.signalled => {
            let words = exit.to_string();
            format!("{who}: {}), sent by xlaunch", words.split([':', ')']).next().unwrap_or_default())
        }
        _ => format!("{who}: {}", escaped(&failure.what)),
    }
}

/// `, at 14:03:05 UTC`.
fn at(evidence: &Evidence) -> String {
    let since = evidence.died.and_then(|died| died.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(String::new(), |since| {
        let time = run_dir::timestamp(since.as_secs());
        let clock = time.split_once('-').map_or("", |(_, clock)| clock);
        format!(", at {}:{}:{} UTC", &clock[..2], &clock[2..4], &clock[4..])
    })
}

/// `, 0.3 s later`.
fn later(root: &Evidence, other: &Evidence) -> String {
    let between = root.died.zip(other.died).and_then(|(first, then)| then.duration_since(first).ok());
    between.map_or(String::new(), |time| format!(", {:.1} s later", time.as_secs_f64()))
}

/// The text without anything that moves a cursor, changes a colour, or turns the direction of writing.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match c {
            '\t' => out.push(c),
            _ if c.is_control() || turns => out.extend(c.escape_default()),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
