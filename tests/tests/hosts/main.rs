//! Several hosts: tests of the namespaces that represent them, with ssh and Slurm, and of jobs on several nodes.

#![expect(clippy::unwrap_used, reason = "tests")]

mod environment;
mod network;
mod nodes;
mod security;
mod slurm;
mod slurm_launch;
mod ssh;
mod ssh_launch;
mod torch;

xlaunch_harness::suite! {
    threads_per_core 2;
    modules environment, network, nodes, security, slurm, slurm_launch, ssh, ssh_launch, torch;
}

/// Program that answers messages; see its documentation.
const ECHO: &str = env!("CARGO_BIN_EXE_echo");
/// A job's token, which must not appear anywhere.
const TOKEN: &str = "a token that must be seen nowhere";
