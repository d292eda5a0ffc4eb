//! Comparisons with other programs, which are scripts in `tests/peers`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::{Process, requirements};

/// Returns a command that runs a script of `tests/peers` on CPUs, without a network.
pub fn peer(script: &str) -> Command {
    python(&[&path(script)])
}

/// Same, for a script that imports transformers: it runs in a fork of a process that has done so, which is started for
/// the first one and ends with this process.
pub fn transformers_peer(script: &str) -> Command {
    static SERVER: OnceLock<Child> = OnceLock::new();
    let forked = path("forked.py");
    let name = format!("xlaunch-peers-{}", std::process::id());
    SERVER.get_or_init(|| {
        let mut server = python(&[&forked, Path::new("serve"), Path::new(&name)]);
        // Otherwise glibc returns the memory of every large tensor to the system: a quarter of the time of training.
        server.env("MALLOC_MMAP_THRESHOLD_", "1073741824").env("MALLOC_TRIM_THRESHOLD_", "4294967296");
        let server = server.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut server = server.expect("start Python");
        let stdout = server.stdout.take().expect("stdout is a pipe");
        BufReader::new(stdout).read_line(&mut String::new()).expect("read from Python");
        server
    });
    python(&[&forked, Path::new("ask"), Path::new(&name), &path(script)])
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

fn path(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(script)
}

fn python(arguments: &[&Path]) -> Command {
    let mut command = Command::new(requirements::python_path());
    command.args(arguments).env("HF_HUB_OFFLINE", "1").env("CUDA_VISIBLE_DEVICES", "");
    command
}
