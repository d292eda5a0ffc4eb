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
pub use peer::{peer, run_ok, transformers_peer};
pub use process::{
    BINARY_VARIABLE, Output, Process, children, forget_package, has_program, in_shell, is_alive,
    process_name, reaper, send_signal, suspend, xlaunch_path, xlaunch_with_fail_points,
};
pub use slurm::Slurm;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
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

/// Returns the address of a port of this host on which nothing listens. The kernel takes ports of outgoing connections,
/// and of listeners that name none, from a range above: other tests would take such a port before it is used.
///
/// # Panics
/// If all ports are in use.
pub fn free_endpoint() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const PORTS: std::ops::Range<u32> = 10_000..20_000;
    let mut free = PORTS.map(|_| {
        // Programs that run at once begin at different ports.
        let number = std::process::id() * 101 + u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        format!("127.0.0.1:{}", PORTS.start + number % (PORTS.end - PORTS.start))
    });
    free.find(|endpoint| TcpListener::bind(endpoint).is_ok()).expect("no port is free")
}
