//! PyTorch scripts under xlaunch and under torchrun.

use std::collections::BTreeMap;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Launch, Output, Process, requirements, wait_for};

xlaunch_harness::tests! {
    needs requirements::torch:
    ddp_has_the_losses_of_torchrun,
    preloaded_workers_have_the_losses_of_plain_ones,
    exception_in_one_rank_is_the_root_cause,
    hanging_rank_is_named_with_its_python_function_and_the_job_restarts,
    launchers_own_error_file_is_that_of_torchrun,
    workers_have_all_variables_of_torchrun;
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

/// Launches a script that saves every step. After a rank of the preloaded workers is killed, they are restarted and
/// resume.
fn preloaded_workers_have_the_losses_of_plain_ones() {
    let launch = Launch::new();
    let losses = |state: &str, options: &[&str], target: &[&str]| {
        let state = launch.path().join(state);
        std::fs::create_dir(&state).unwrap();
        let (script, state) = (script("resume.py"), state.display().to_string());
        let run =
            xlaunch(&[options, &["--nproc-per-node", "2", &script, "--state", &state], target].concat());
        assert_eq!(run.code, 0, "{}", run.stderr);
        let steps = run.stdout.lines().filter(|line| line.starts_with("step "));
        let losses: Vec<String> = steps.map(|line| line.split(' ').take(4).collect()).collect();
        assert_eq!(losses.len(), 6, "{}", run.stdout);
        (losses, run.stderr)
    };
    let (plain, _) = losses("plain", &[], &[]);
    let options = ["--max-restarts", "1", "--preload", "torch,torch._dynamo"];
    let (preloaded, stderr) = losses("preloaded", &options, &["--kill-at", "3"]);
    assert!(stderr.contains("SIGKILL: killed); restarting"), "{stderr}");
    assert!(!stderr.contains("preloading failed"), "{stderr}");
    assert_eq!(preloaded, plain);
}

fn exception_in_one_rank_is_the_root_cause() {
    let run = xlaunch(&["--nproc-per-node", "2", &script("ddp.py"), "--fail", "1"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    for words in ["rank 1", "RuntimeError: the disk is on fire", "ddp.py"] {
        assert!(run.root_cause().contains(words), "{words} in {}", run.stderr);
    }
}

fn hanging_rank_is_named_with_its_python_function_and_the_job_restarts() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/ddp.py").display().to_string();
    let flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--hang-timeout", "10"];
    let arguments = [&*example, "--steps", "150", "--hang-at", "120"];
    let run = xlaunch(&[&flags[..], &arguments[..]].concat());
    assert_eq!(run.code, 0, "{}\n{}", run.stdout, run.stderr);
    let hang = "rank 1 sent no heartbeat for ";
    let line = run.stderr.lines().find(|line| line.contains(hang)).unwrap_or_default();
    assert!(line.ends_with(" s (step 119); rank 0 is waiting for it"), "{}", run.stderr);
    // This is in the stack that faulthandler prints.
    assert!(run.stderr.contains(" in load_batch"), "{}", run.stderr);
    assert!(run.stderr.contains("; restarting (1 of 1)"), "{}", run.stderr);
    for line in ["resuming at step 100 from ", "step 150  loss "] {
        assert!(run.stdout.contains(line), "{line} in {}", run.stdout);
    }
}

/// A script with a recorded main function that fails or waits.
const RECORDED: &str = "
import sys, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if sys.argv[1] == 'fail':
        raise ValueError('bad')
    print('ready', flush=True)
    time.sleep(1000)
main()
";

fn launchers_own_error_file_is_that_of_torchrun() {
    let launchers = [(Launch::new(), &[][..]), {
        (Launch::with_program(requirements::python_path()), &["-m", "torch.distributed.run"][..])
    }];
    let [ours, theirs] = launchers.map(|(launch, launcher)| {
        let script = launch.write("recorded.py", RECORDED).display().to_string();
        let file = launch.path().join("own.json");
        ["fail", "wait"].map(|what| {
            let mut command = launch.command(&[launcher, &["--nproc-per-node", "1", &script, what]].concat());
            command.env("PYTHON_EXEC", requirements::python_path()).env("TORCHELASTIC_ERROR_FILE", &file);
            let run = Process::spawn(&mut command);
            if what == "wait" {
                wait_for("the worker", || run.stdout().contains("ready").then_some(()));
                run.signal(Signal::TERM);
            }
            let pid = run.pid().to_string();
            let code = run.wait().code;
            assert_ne!(code, 0);
            let mut error: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
            let info = error["message"]["extraInfo"].as_object_mut().unwrap();
            for differing in ["py_callstack", "timestamp"] {
                assert!(info.remove(differing).unwrap().is_string(), "{differing}");
            }
            error.to_string().replace(&pid, "PID")
        })
    });
    assert_eq!(ours, theirs);
}

/// Returns the variables in the environment of a worker of one of two ranks that this process does not have.
fn worker_variables(launch: &Launch, launcher: &[&str]) -> BTreeMap<String, String> {
    const OF_SHELL_AND_TEST: [&str; 6] = ["_", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "XDG_RUNTIME_DIR"];
    let dump = launch.path().join("environment");
    let print = format!("test $RANK = 0 || env -0 > {}", dump.display());
    let worker = ["--standalone", "--no-python", "--nproc-per-node", "2", "sh", "-c", &print];
    let run = launch.run(&[launcher, &worker[..]].concat());
    assert_eq!(run.code, 0, "{}", run.stderr);
    let text = std::fs::read_to_string(dump).unwrap();
    let pairs = text.split('\0').filter_map(|pair| pair.split_once('='));
    pairs
        .filter(|(name, _)| !OF_SHELL_AND_TEST.contains(name))
        .filter(|(name, value)| std::env::var(name).ok().as_deref() != Some(*value))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn workers_have_all_variables_of_torchrun() {
    const OF_ONE_RUN: [&str; 3] = ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"];
    // The key-value store is served by torchrun's agent, and by rank 0 under xlaunch.
    const OF_STORE: [&str; 2] = ["MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"];
    let ours = worker_variables(&Launch::new(), &[]);
    let torchrun = Launch::with_program(requirements::python_path());
    let theirs = worker_variables(&torchrun, &["-m", "torch.distributed.run"]);
    assert_eq!(theirs["RANK"], "1");
    for (name, value) in &theirs {
        let found = ours.get(name).unwrap_or_else(|| panic!("{name}={value} is missing"));
        if !OF_ONE_RUN.iter().chain(&OF_STORE).any(|differing| differing == name) {
            assert_eq!(found, value, "{name}");
        }
    }
}
