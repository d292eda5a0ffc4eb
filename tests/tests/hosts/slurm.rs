//! Slurm on hosts.

use xlaunch_tests::{Slurm, requirements};

xlaunch_harness::tests! {
    needs requirements::slurm:
    srun_starts_a_task_on_every_node_as_an_ordinary_user;
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
