//! Applies the rules of `XLAUNCH_FAIL` in the process of one rank.

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use xlaunch_proto::env;

use super::Place;
use super::rules::{self, Action, Rule};

/// Duration of one sleep of a thread that hangs.
const HANG_SLEEP: Duration = Duration::from_secs(3600);

static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

// The step that the calling thread works on; 0 outside steps.
thread_local!(static STEP: Cell<u64> = const { Cell::new(0) });

/// A rule for this rank and attempt.
#[derive(Debug)]
struct Armed {
    rule: Rule,
    /// True if the first use of the rule was reported.
    reported: AtomicBool,
}

/// Reads the rules for this rank and attempt from the environment. An error begins with the name of the variable.
pub(crate) fn arm(rank: u32, attempt: u32) -> Result<(), String> {
    let value = super::variable().unwrap_or_default();
    let applies = parse(&value)?.into_iter().filter(|rule| rule.applies_to(rank, attempt));
    let armed = applies.map(|rule| Armed { rule, reported: AtomicBool::new(false) });
    // Fails only if it was set before, from the same environment.
    let _ = ARMED.set(armed.collect());
    Ok(())
}

pub(super) fn parse(value: &str) -> Result<Vec<Rule>, String> {
    rules::parse(value).map_err(|error| format!("{}: {error}", env::FAIL))
}

/// Sets the step, from 1, that the calling thread works on.
pub(crate) fn set_step(step: u64) {
    STEP.set(step);
}

/// Marks that the calling thread has reached a place: crashes, hangs, sleeps or exits if a rule says so.
pub(crate) fn at(place: Place) {
    for action in reached(place) {
        match action {
            Action::Crash => {
                // This does not return. If the signal is refused, the process ends below.
                let _ = kill_process(getpid(), Signal::KILL);
                std::process::abort();
            }
            Action::Hang => loop {
                thread::sleep(HANG_SLEEP);
            },
            Action::Slow(milliseconds) => thread::sleep(Duration::from_millis(milliseconds)),
            #[expect(clippy::exit, reason = "the rule says to exit")]
            Action::Exit(code) => std::process::exit(i32::from(code)),
            Action::Errno(_) | Action::Corrupt(_) | Action::Skip => {}
        }
    }
}

/// Same as [`at`], before a file operation, which fails if a rule says so.
pub(crate) fn io(place: Place) -> io::Result<()> {
    at(place);
    let error = reached(place).find_map(|action| match action {
        Action::Errno(number) => Some(io::Error::from_raw_os_error(number)),
        _ => None,
    });
    error.map_or(Ok(()), Err)
}

/// Same as [`at`], before an operation. Returns whether a rule says to skip it.
pub(crate) fn skips(place: Place) -> bool {
    at(place);
    reached(place).any(|action| action == Action::Skip)
}

/// Returns the bit to flip in the data of a place, if a rule says so.
pub(crate) fn flipped_bit(place: Place) -> Option<u64> {
    reached(place).find_map(|action| match action {
        Action::Corrupt(bit) => Some(bit),
        _ => None,
    })
}

/// Returns the actions of the rules for this place in the current step of the thread. Reports the first use of each
/// rule.
#[expect(clippy::print_stderr, reason = "the agent reports the tail of a failed worker's stderr")]
fn reached(place: Place) -> impl Iterator<Item = Action> {
    let armed = ARMED.get().map(Vec::as_slice).unwrap_or_default();
    armed.iter().filter(move |armed| armed.rule.is_reached(place, STEP.get())).map(|armed| {
        if !armed.reported.swap(true, Ordering::Relaxed) {
            eprintln!("fail point reached: {} (step {})", armed.rule.text, STEP.get());
        }
        armed.rule.action
    })
}
