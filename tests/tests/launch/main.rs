//! The launcher: commands under torchrun's contract, scripted workers, failures, signals, and the status of a run.

#![expect(clippy::unwrap_used, reason = "tests")]

mod cleanup;
mod commands;
mod doctor;
mod environment;
mod failures;
mod first_cause;
mod hangs;
mod heartbeats;
mod input;
mod limits;
mod preload;
mod restarts;
mod signals;
mod status;
mod stopping;

/// The scripted worker of [`xlaunch_tests::Job::scripted`].
const FAKE_WORKER: &str = env!("CARGO_BIN_EXE_fake_worker");

xlaunch_harness::suite! {
    modules cleanup, commands, doctor, environment, failures, first_cause, hangs, heartbeats, input, limits, preload,
        restarts, signals, status, stopping;
}

/// Lines of a text, sorted: ranks write in any order.
fn sorted_lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}
