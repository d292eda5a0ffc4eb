//! PyTorch scripts on two hosts, under xlaunch and under torchrun.

use std::process::Command;

use xlaunch_tests::{Hosts, Output, Process, requirements, xlaunch_path};

use crate::TOKEN;

xlaunch_harness::tests! {
    needs requirements::torch_on_hosts:
    ddp_on_two_hosts_has_the_losses_of_torchrun,
    killed_worker_is_restarted_on_two_hosts_and_training_continues;
}

/// Runs a script of `peers` with one worker on each of two hosts.
fn run(hosts: &Hosts, launcher: impl Fn(usize) -> Command, arguments: &[&str]) -> [Output; 2] {
    let [script, arguments @ ..] = arguments else { panic!("no script") };
    let script = format!("{}/peers/{script}", env!("CARGO_MANIFEST_DIR"));
    let launches = [0, 1].map(|index| {
        let mut command = launcher(index);
        command.args([
            "--nnodes=2",
            &format!("--node-rank={index}"),
            "--nproc-per-node=1",
            "--max-restarts=3",
        ]);
        command.args(["--master-addr=10.77.0.10", "--master-port=29600", &script]).args(arguments);
        command.env("OMP_NUM_THREADS", "1").env("XLAUNCH_TOKEN", TOKEN);
        command.env("PYTHON_EXEC", requirements::python_path()).current_dir(hosts.path());
        Process::spawn_inside(&mut command)
    });
    launches.map(Process::wait)
}

fn losses(output: &Output) -> Vec<String> {
    let steps = output.stdout.lines().filter(|line| line.starts_with("step "));
    steps.map(|line| line.split(' ').take(4).collect::<Vec<_>>().join(" ")).collect()
}

fn ddp_on_two_hosts_has_the_losses_of_torchrun() {
    let hosts = Hosts::new(2);
    let ours = run(&hosts, |index| hosts[index].command(xlaunch_path()), &["ddp.py"]);
    let torchrun = |index: usize| {
        let mut command = hosts[index].command(requirements::python_path());
        // xlaunch sets this variable by itself.
        command.args(["-m", "torch.distributed.run"]).env("GLOO_SOCKET_IFNAME", "eth0");
        command
    };
    let theirs = run(&hosts, torchrun, &["ddp.py"]);
    for output in ours.iter().chain(&theirs) {
        assert_eq!(output.code, 0, "{}", output.stderr);
    }
    assert_eq!((losses(&ours[0]).len(), losses(&ours[0])), (20, losses(&theirs[0])), "{}", ours[0].stdout);
}

fn killed_worker_is_restarted_on_two_hosts_and_training_continues() {
    let hosts = Hosts::new(2);
    let state = hosts.shared().display().to_string();
    let script = ["resume.py", "--state", &state, "--kill-at", "3"];
    let outputs = run(&hosts, |index| hosts[index].command(xlaunch_path()), &script);
    for output in &outputs {
        assert_eq!(output.code, 0, "{}", output.stderr);
    }
    let steps: Vec<String> = losses(&outputs[0]).iter().map(|line| line[..6].to_owned()).collect();
    assert_eq!(steps, ["step 0", "step 1", "step 2", "step 3", "step 4", "step 5"], "{}", outputs[0].stdout);
    let reported = outputs.iter().filter(|output| output.stderr.contains("SIGKILL"));
    assert!(reported.count() > 0, "{outputs:?}");
}
