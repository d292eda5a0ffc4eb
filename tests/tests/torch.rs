//! PyTorch's scripts under xlaunch and under torchrun: the same losses, and a failure that says what happened.
//!
//! Needs a Python with torch: `XLAUNCH_TEST_PYTHON`, or `python3`. Without one, every test says so and is skipped.

#![expect(clippy::print_stdout, reason = "a skipped test says why")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use xlaunch_tests::Launch;

/// The interpreter, if it has this module.
fn python_with(module: &str) -> Option<PathBuf> {
    let python = std::env::var_os("XLAUNCH_TEST_PYTHON").unwrap_or_else(|| "python3".into());
    let mut import = Command::new(&python);
    import.args(["-c", &format!("import torch, {module}")]).stdout(Stdio::null()).stderr(Stdio::null());
    if import.status().is_ok_and(|status| status.success()) {
        return Some(python.into());
    }
    println!("skipped: {} has no {module}; XLAUNCH_TEST_PYTHON names a Python", python.display());
    None
}

fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(name).display().to_string()
}

/// Both launchers print the same losses.
fn same_losses(module: &str, name: &str, steps: usize) {
    let Some(python) = python_with(module) else { return };
    let (ours, theirs) = (Launch::new(), Launch::of(&python));
    let mut xlaunch = ours.command(&["--standalone", "--nproc-per-node", "2", &script(name)]);
    let xlaunch = xlaunch_tests::Running::start(xlaunch.env("PYTHON_EXEC", &python)).finish();
    let torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", &script(name)];
    let torchrun = theirs.run(&torchrun);
    let losses = |stdout: &str| -> Vec<String> {
        stdout.lines().filter(|line| line.starts_with("step ")).map(str::to_owned).collect()
    };
    assert_eq!((xlaunch.code, torchrun.code), (0, 0), "{}\n{}", xlaunch.stderr, torchrun.stderr);
    assert_eq!(losses(&xlaunch.stdout), losses(&torchrun.stdout));
    assert_eq!(losses(&xlaunch.stdout).len(), steps, "{}", xlaunch.stdout);
}

#[test]
fn data_parallel_training_has_torchruns_losses() {
    same_losses("torch", "ddp.py", 20);
}

#[test]
fn accelerate_has_torchruns_losses() {
    same_losses("accelerate", "with_accelerate.py", 8);
}

#[test]
fn lightning_has_torchruns_losses() {
    same_losses("lightning", "with_lightning.py", 8);
}

#[test]
fn an_exception_in_one_rank_is_the_reports_first_line() {
    let Some(python) = python_with("torch") else { return };
    let launch = Launch::new();
    let mut command = launch.command(&["--nproc-per-node", "2", &script("ddp.py"), "--fail", "1"]);
    let run = xlaunch_tests::Running::start(command.env("PYTHON_EXEC", &python)).finish();
    assert_eq!(run.code, 1, "{}", run.stderr);
    let report = run.stderr.split("the job failed").nth(1).unwrap_or_default();
    let root = report.split("then:").next().unwrap_or_default();
    assert!(root.contains("rank 1") && root.contains("RuntimeError: the disk is on fire"), "{}", run.stderr);
    assert!(root.contains("ddp.py"), "{report}");
}
