//! Comparisons with other programs, which are scripts in `tests/peers`.

use std::path::Path;
use std::process::Command;

use crate::{Process, requirements};

/// Returns a command that runs a script of `tests/peers` on CPUs, without a network.
pub fn peer(script: &str) -> Command {
    let mut command = Command::new(requirements::python_path());
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(script));
    command.env("HF_HUB_OFFLINE", "1").env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// Runs a command to its end, and returns what it prints.
///
/// # Panics
/// If it does not end with exit code 0.
pub fn run_ok(command: &mut Command) -> String {
    let output = Process::spawn(command).wait();
    assert_eq!(output.code, 0, "{}\n{}", output.stdout, output.stderr);
    output.stdout
}
