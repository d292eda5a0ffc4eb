//! Harness for end-to-end tests: real `xlaunch` processes in temporary directories.
//!
//! - [`Job`]: a training configuration and text; runs the built-in trainer or scripted workers.
//! - [`Launch`]: a directory in which any command can be launched.
//! - [`Hosts`]: hosts on this machine with a network that can fail; [`Sshd`] and [`Slurm`] on them.
//! - [`Node`]: a daemon with its state, its jobs and, optionally, simulated GPUs.
//! - [`served`]: `xlaunch serve` and its clients.
//! - [`requirements`]: requirements of tests on the machine; see `xlaunch_harness`.
//!
//! Nothing outlives a test: dropping a handle kills the process groups below it. Timeouts only catch hangs; no test
//! uses them to measure time.

#![expect(clippy::expect_used, reason = "a harness fails its test by panicking")]

mod c_library;
mod cgroup;
pub mod chaos;
mod freeze;
mod hang;
mod hosts;
mod job;
mod launch;
mod node;
mod peer;
mod process;
pub mod requirements;
pub mod served;
mod slurm;

pub use cgroup::LimitedCgroup;
pub use freeze::FrozenThread;
pub use hang::{HangMode, InjectedHang};
pub use hosts::{Host, Hosts, ProcessInfo, Sshd};
pub use job::{Job, read_state};
pub use launch::Launch;
pub use node::{NOBODY, Node, build_nvml, spawn_daemon};
pub use peer::{peer, run_ok};
pub use process::{
    BINARY_VARIABLE, Output, Process, children, forget_package, has_program, is_alive, process_name,
    send_signal, suspend, xlaunch_path, xlaunch_with_fail_points,
};
pub use slurm::Slurm;

use std::time::{Duration, Instant};

/// Maximum time of any wait in a test before the test counts as hung. Generous, as machines may be shared and slow.
pub const HANG_TIMEOUT: Duration = Duration::from_secs(900);

/// Returns the lines of a text, sorted: ranks write in any order.
pub fn sorted_lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// Polls `ready` until it returns a value.
///
/// # Panics
/// After [`HANG_TIMEOUT`], naming `what`.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < HANG_TIMEOUT, "timed out after {HANG_TIMEOUT:?} waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
