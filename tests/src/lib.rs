//! Harness for end-to-end tests: real `xlaunch` processes in directories of their own.
//!
//! A [`Job`] is a temporary directory with text to train on and a configuration; [`Job::run`] runs `xlaunch` on it to its
//! end, [`Job::start`] leaves it running. Nothing outlives a test: processes are killed by group when their handle is
//! dropped. Deadlines are for hangs: no test measures time with them.

#![expect(clippy::expect_used, reason = "a harness fails its test by panicking")]

mod job;
mod launch;
mod node;
mod process;

pub use job::Job;
pub use launch::Launch;
pub use node::Node;
pub use process::{Finished, Running, alive, children, name, xlaunch};

use std::time::{Duration, Instant};

/// Longest time that anything in a test may take before it counts as hung.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Waits until `ready` gives a value.
///
/// # Panics
/// At the [`DEADLINE`], naming `what`.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < DEADLINE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}
