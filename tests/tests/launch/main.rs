//! The launcher: hangs, cleanup, several nodes by ssh, terminals, preloaded Python, and hosts that lack something.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bare_hosts;
mod cleanup;
mod doctor;
mod hangs;
mod heartbeats;
mod limits;
mod nodes_status;
mod placement;
mod preload;
mod rendezvous_load;
mod ssh;
mod stopping;
mod terminal;
mod waiting;

/// The scripted worker of [`xlaunch_tests::Job::scripted`].
const FAKE_WORKER: &str = env!("CARGO_BIN_EXE_fake_worker");

xlaunch_harness::suite! {
    threads_per_core 2;
    modules bare_hosts, cleanup, doctor, hangs, heartbeats, limits, nodes_status, placement, preload, rendezvous_load,
        ssh, stopping, terminal, waiting;
}

/// The ssh client that runs commands on this machine.
const FAKE_SSH: &str = env!("CARGO_BIN_EXE_fake_ssh");
