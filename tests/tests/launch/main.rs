//! The launcher: commands under torchrun's contract, scripted workers, failures, signals, and the status of a run.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bare_hosts;
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
mod nodes_status;
mod placement;
mod preload;
mod rendezvous_load;
mod restarts;
mod signals;
mod ssh;
mod status;
mod stopping;
mod terminal;
mod waiting;

/// The scripted worker of [`xlaunch_tests::Job::scripted`].
const FAKE_WORKER: &str = env!("CARGO_BIN_EXE_fake_worker");

xlaunch_harness::suite! {
    threads_per_core 2;
    modules bare_hosts, cleanup, commands, doctor, environment, failures, first_cause, hangs, heartbeats, input, limits,
        nodes_status, placement, preload, rendezvous_load, restarts, signals, ssh, status, stopping, terminal, waiting;
}

/// The ssh client that runs commands on this machine.
const FAKE_SSH: &str = env!("CARGO_BIN_EXE_fake_ssh");

/// Returns the lines of a text, sorted: ranks write in any order.
fn sorted_lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}
