//! `xlaunch --hosts a,b`: one launch on several hosts, started over ssh and shown on one console.
//!
//! ```text
//! flags --hosts--> Vec<Host> --plan--> Description per host          here | on each host
//!                                        |                                |
//! launch: all connections     --connection: ssh HOST 'exec xlaunch remote'---> remote: the same launch as by hand,
//!   signals, exit codes            stdin: description, go, signals --------->  with `--nnodes`, `--node-rank`, ...
//!   outcome: what they mean        stdout, stderr <--output-------------------
//! ```
//! - [`hosts`] (pure): `--hosts` and `--hostfile`; [`plan`] (pure): the description for each host; [`outcome`] (pure):
//!   messages and exit codes;
//! - [`wire`]: the bytes on the remote standard input and output before the job starts;
//! - [`launch`]: the launching process; [`connection`]: one ssh client; [`output`]: its output on the console;
//! - [`remote`]: the other end.
//!
//! Invariants:
//! - The token and the environment are sent on standard input, never in an argument.
//! - No host starts the job before all hosts are ready.
//! - The end of standard input ends the job on a host at once: a killed ssh client leaves its remote command running,
//!   but closes its standard input.
//!
//! Membership, restarts and the end of the job are handled by the agents; to this module, a host is a command with an
//! exit code.

mod connection;
pub(crate) mod hosts;
mod launch;
mod outcome;
mod output;
pub(crate) mod plan;
pub(crate) mod remote;
mod wire;

pub(crate) use launch::run;
