//! Slurm on hosts.

use xlaunch_tests::{Slurm, requirements, wait_for};

xlaunch_harness::tests! {
    needs requirements::slurm:
    srun_starts_a_task_on_every_node_as_an_ordinary_user,
    job_is_preempted_and_requeued_by_one_of_the_high_partition;
}

fn srun_starts_a_task_on_every_node_as_an_ordinary_user() {
    let slurm = Slurm::start(4);
    let task = "echo $(uname -n) $SLURM_NODEID $(id -un)";
    let output = slurm.run("srun", &["-N4", "--ntasks-per-node=1", "sh", "-c", task]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let mut lines: Vec<&str> = output.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["h0 0 nobody", "h1 1 nobody", "h2 2 nobody", "h3 3 nobody"]);
    assert_eq!(
        slurm
            .run("srun", &["-N2", "--ntasks-per-node=1", "sh", "-c", "munge -n | unmunge -o /dev/null"])
            .code,
        0
    );
    assert_eq!(slurm.run("srun", &["-N1", "sh", "-c", "exit 75"]).code, 75);
}

fn job_is_preempted_and_requeued_by_one_of_the_high_partition() {
    let slurm = Slurm::start(2);
    // Ignores the SIGTERM at the start of the grace time: a batch script that ends because of it counts as finished and
    // is not requeued.
    let script = "trap '' TERM\n\
        srun --ntasks-per-node=1 sh -c \"trap '' TERM; touch started.\\$SLURM_NODEID; sleep 1000\"";
    let job = slurm.submit(&["-N2", "--exclusive"], script);
    wait_for("both tasks", || {
        ["started.0", "started.1"].iter().all(|file| slurm.home().join(file).exists()).then_some(())
    });
    let preempting =
        slurm.run("srun", &["--partition=high", "-N2", "--exclusive", "--ntasks-per-node=1", "true"]);
    assert_eq!(preempting.code, 0, "{}", preempting.stderr);
    slurm.wait_for_state(&job, "PENDING");
    assert_eq!(slurm.run("scancel", &[&job]).code, 0);
    slurm.wait_for_state(&job, "CANCELLED");
}
