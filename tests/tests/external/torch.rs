//! Scripts for PyTorch under xlaunch and under torchrun.

use std::path::Path;

use xlaunch_tests::{Launch, Output, Process, requirements};

xlaunch_harness::tests! {
    needs requirements::torch:
    ddp_has_the_losses_of_torchrun,
    exception_in_one_rank_is_the_root_cause;
    needs requirements::accelerate:
    accelerate_has_the_losses_of_torchrun;
    needs requirements::lightning:
    lightning_has_the_losses_of_torchrun;
}

fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(name).display().to_string()
}

/// Runs xlaunch with the Python that has torch.
fn xlaunch(args: &[&str]) -> Output {
    let launch = Launch::new();
    Process::spawn(launch.command(args).env("PYTHON_EXEC", requirements::python_path())).wait()
}

/// Runs a script under both launchers and compares the losses that it prints, one per step.
fn assert_same_losses(name: &str, steps: usize) {
    let args = ["--standalone", "--nproc-per-node", "2", &script(name)];
    let ours = xlaunch(&args);
    let torchrun = Launch::with_program(requirements::python_path());
    let theirs = torchrun.run(&[&["-m", "torch.distributed.run"], &args[..]].concat());
    let losses = |stdout: &str| -> Vec<String> {
        stdout.lines().filter(|line| line.starts_with("step ")).map(str::to_owned).collect()
    };
    assert_eq!((ours.code, theirs.code), (0, 0), "{}\n{}", ours.stderr, theirs.stderr);
    assert_eq!(losses(&ours.stdout), losses(&theirs.stdout));
    assert_eq!(losses(&ours.stdout).len(), steps, "{}", ours.stdout);
}

fn ddp_has_the_losses_of_torchrun() {
    assert_same_losses("ddp.py", 20);
}

fn accelerate_has_the_losses_of_torchrun() {
    assert_same_losses("with_accelerate.py", 8);
}

fn lightning_has_the_losses_of_torchrun() {
    assert_same_losses("with_lightning.py", 8);
}

fn exception_in_one_rank_is_the_root_cause() {
    let run = xlaunch(&["--nproc-per-node", "2", &script("ddp.py"), "--fail", "1"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    for words in ["rank 1", "RuntimeError: the disk is on fire", "ddp.py"] {
        assert!(run.root_cause().contains(words), "{words} in {}", run.stderr);
    }
}
