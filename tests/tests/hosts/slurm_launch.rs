//! Launches under a real Slurm by an ordinary user: just `srun xlaunch`, authenticated by munge.

use std::path::Path;

use rustix::process::Signal;
use xlaunch_tests::{Job, Process, Slurm, requirements, wait_for, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::slurm:
    srun_alone_starts_a_group_with_ranks_of_slurm_and_no_token,
    other_token_is_named_at_once_although_other_ports_refuse,
    two_jobs_on_the_same_nodes_do_not_disturb_each_other,
    job_that_a_worker_submits_uses_its_own_nodes,
    cancelled_job_leaves_no_process_on_any_node,
    lost_node_ends_the_launches_on_the_others_with_75,
    preempted_job_saves_is_queued_again_and_resumes,
    job_is_queued_again_after_the_kill_of_a_launch_and_at_its_time_limit_but_not_after_a_users_stop;
}

fn xlaunch() -> String {
    xlaunch_path().display().to_string()
}

/// Returns the lines in an order that does not depend on time.
fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// Writes the configuration and data of a training job into the user's directory.
fn write_job(slurm: &Slurm) {
    let job = Job::new();
    for file in ["train.toml", "text/a.txt"] {
        let to = slurm.home().join(file);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(job.path().join(file), to).unwrap();
    }
}

/// Returns the processes of launches and workers on a node.
fn processes(slurm: &Slurm, node: usize) -> Vec<String> {
    let daemons = ["munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "srun"];
    let processes = slurm.hosts()[node].processes().into_iter();
    processes.filter(|process| !daemons.contains(&&*process.name)).map(|process| process.command).collect()
}

fn srun_alone_starts_a_group_with_ranks_of_slurm_and_no_token() {
    let slurm = Slurm::start(2);
    let script = "echo $(uname -n) $RANK/$WORLD_SIZE $MASTER_ADDR $(id -un) ${XLAUNCH_TOKEN-none}";
    let run = slurm.run("srun", &["-N2", &xlaunch(), "--nproc-per-node=2", "--", "sh", "-c", script]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let line = |(rank, host)| format!("{host} {rank}/4 10.77.0.10 nobody none");
    let expected = [(0, "h0"), (1, "h0"), (2, "h1"), (3, "h1")].map(line);
    assert_eq!(sorted(&run.stdout), expected, "{}", run.stderr);
    assert!(!run.stderr.contains("plain TCP"), "{}", run.stderr);

    write_job(&slurm);
    let run = slurm.run("srun", &["-N2", &xlaunch(), "train.toml"]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let metrics = std::fs::read_to_string(slurm.home().join("runs/train/latest/metrics.jsonl")).unwrap();
    assert_eq!(metrics.matches("\"train/loss\"").count(), 8, "{metrics}");

    let batch = slurm.home().join("out");
    let output = format!("--output={}", batch.display());
    // As `sbatch` passes the variables on inside a step of another job.
    let inside = "--export=ALL,SLURM_STEP_ID=0,SLURM_STEP_NUM_NODES=1,SLURM_STEP_NODELIST=h0";
    for export in ["--export=ALL", inside] {
        let job = slurm.submit(&["-N2", &output, export], &format!("{} -- true", xlaunch()));
        slurm.wait_for_state(&job, "FAILED");
        let text = std::fs::read_to_string(&batch).unwrap();
        assert!(text.contains("start one launch on each node with `srun -N 2 -n 2 xlaunch ...`"), "{text}");
        std::fs::remove_file(&batch).unwrap();
    }
}

fn other_token_is_named_at_once_although_other_ports_refuse() {
    let slurm = Slurm::start(2);
    // The coordinator waits long, but the other node must not. Without `-K`, which would end the coordinator at once.
    let script = format!("XLAUNCH_TOKEN=the-token-of-node-$SLURM_NODEID exec {} -- true", xlaunch());
    let mut run = Process::spawn_inside(slurm.command("srun").args(["-N2", "sh", "-c", &script]));
    for said in ["its token differs; give all nodes the same", "xlaunch: refused a caller at "] {
        wait_for(said, || (run.stderr().contains(said) || !run.is_running()).then_some(()));
        assert!(run.stderr().contains(said), "{}", run.stderr());
    }
}

fn two_jobs_on_the_same_nodes_do_not_disturb_each_other() {
    let slurm = Slurm::start(2);
    // Each launch waits until the four workers of both exist.
    let script =
        "touch $1.$RANK; while test $(ls one.* two.* | wc -l) -lt 4; do sleep 0.05; done; echo $1 $RANK";
    let start = |name: &str| {
        let program = xlaunch();
        let args =
            ["-N2", "-n2", "-c1", &program, "--nproc-per-node=1", "--", "sh", "-c", script, "sh", name];
        Process::spawn_inside(slurm.command("srun").args(args))
    };
    let runs = [start("one"), start("two")];
    for (run, name) in runs.into_iter().zip(["one", "two"]) {
        let run = run.wait();
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(sorted(&run.stdout), [format!("{name} 0"), format!("{name} 1")], "{}", run.stderr);
    }
}

fn job_that_a_worker_submits_uses_its_own_nodes() {
    let slurm = Slurm::start(2);
    let next = slurm.home().join("next");
    let script = format!("#!/bin/sh\nsrun {} -- sh -c 'echo $RANK/$WORLD_SIZE'\n", xlaunch());
    std::fs::write(&next, script).unwrap();
    // The number of tasks would be inherited, too.
    let submit = ["sbatch", "--parsable", "-N2", "-n2", "--output=out", next.to_str().unwrap()];
    let run = slurm.run("srun", &[&["-N1", &xlaunch(), "--"], &submit[..]].concat());
    assert_eq!(run.code, 0, "{}", run.stderr);
    slurm.wait_for_state(run.stdout.trim(), "COMPLETED");
    let output = std::fs::read_to_string(slurm.home().join("out")).unwrap();
    assert!(["0/2", "1/2"].iter().all(|rank| output.lines().any(|line| line == *rank)), "{output}");
}

fn cancelled_job_leaves_no_process_on_any_node() {
    let slurm = Slurm::start(2);
    let worker = "setsid sleep 1000 & touch started.$RANK; sleep 1000";
    let script = format!("srun --ntasks-per-node=1 {} -- sh -c '{worker}'", xlaunch());
    let job = slurm.submit(&["-N2"], &script);
    wait_for("both workers", || {
        ["started.0", "started.1"].iter().all(|file| slurm.home().join(file).exists()).then_some(())
    });
    assert!((0..2).all(|node| !processes(&slurm, node).is_empty()));
    assert_eq!(slurm.run("scancel", &[&job]).code, 0);
    slurm.wait_for_state(&job, "CANCELLED");
    for node in 0..2 {
        wait_for("all processes to end", || processes(&slurm, node).is_empty().then_some(()));
    }
}

fn lost_node_ends_the_launches_on_the_others_with_75() {
    let slurm = Slurm::start(2);
    let launch = format!("{} --rdzv-conf keep_alive_max_attempt=3 -- sh -c", xlaunch());
    let worker = "touch started.$RANK; sleep 1000";
    // Slurm itself notices much later.
    let task = format!("{launch} '{worker}' 2> stderr.$SLURM_NODEID; echo $? > code.$SLURM_NODEID");
    let _srun = Process::spawn_inside(slurm.command("srun").args(["-N2", "sh", "-c", &task]));
    let file = |name: &str| std::fs::read_to_string(slurm.home().join(name));
    wait_for("both workers", || file("started.0").and(file("started.1")).ok());
    slurm.hosts()[1].kill();
    let code = wait_for("the exit code", || file("code.0").ok().filter(|code| code.ends_with('\n')));
    let stderr = file("stderr.0").unwrap();
    assert_eq!(code, "75\n", "{stderr}");
    assert!(stderr.contains("h1"), "{stderr}");
}

/// Submits `deploy/slurm/train.sbatch` for endless training. Returns the job's number.
fn submit_training(slurm: &Slurm) -> String {
    write_job(slurm);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/slurm/train.sbatch");
    let path = format!("{}:{}", xlaunch_path().parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut sbatch = slurm.command("sbatch");
    sbatch.args(["--parsable", "--output=out"]).arg(script).args([
        "train.toml",
        "--set",
        "train.steps=1000000",
    ]);
    let submitted = Process::spawn_inside(sbatch.env("PATH", path)).wait();
    assert_eq!(submitted.code, 0, "{}", submitted.stderr);
    submitted.stdout.trim().to_owned()
}

/// Makes a requeued job start now.
fn start_now(slurm: &Slurm, job: &str) {
    // Otherwise Slurm would make it wait for two minutes. Slurm refuses a job that starts in the second of its requeue.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(slurm.run("scontrol", &["update", &format!("jobid={job}"), "StartTime=now"]).code, 0);
}

fn job_is_queued_again_after_the_kill_of_a_launch_and_at_its_time_limit_but_not_after_a_users_stop() {
    let slurm = Slurm::start(2);
    let job = submit_training(&slurm);
    let output = || std::fs::read_to_string(slurm.home().join("out")).unwrap_or_default();
    let steps = || output().matches("  loss ").count();
    let wait_for_steps = |since: usize| wait_for("training", || (steps() > since).then_some(()));
    wait_for_steps(0);
    // srun exits with 137, the exit code of that launch.
    let is_launch = |process: &&xlaunch_tests::ProcessInfo| {
        process.command.contains("xlaunch train.toml") && !process.command.contains("srun ")
    };
    let killed = slurm.hosts()[1].processes().iter().find(is_launch).unwrap().pid;
    xlaunch_tests::send_signal(killed, Signal::KILL);
    slurm.wait_for_state(&job, "PENDING");

    start_now(&slurm, &job);
    wait_for_steps(steps());
    // Slurm does the same before the time limit.
    assert_eq!(slurm.run("scancel", &["--batch", "--signal=TERM", &job]).code, 0);
    slurm.wait_for_state(&job, "PENDING");

    start_now(&slurm, &job);
    wait_for_steps(steps());
    assert_eq!(slurm.run(&xlaunch(), &["stop"]).code, 0);
    slurm.wait_for_state(&job, "FAILED");
    let shown = slurm.run("scontrol", &["show", "--oneliner", "job", &job]).stdout;
    assert!(shown.contains("ExitCode=143:0"), "{shown}");
}

fn preempted_job_saves_is_queued_again_and_resumes() {
    let slurm = Slurm::start(2);
    let job = &*submit_training(&slurm);
    let output = || std::fs::read_to_string(slurm.home().join("out")).unwrap_or_default();
    wait_for("training", || output().contains("  loss ").then_some(()));
    let urgent =
        slurm.run("srun", &["--partition=high", "-N2", "--exclusive", "--ntasks-per-node=1", "true"]);
    assert_eq!(urgent.code, 0, "{}", urgent.stderr);
    slurm.wait_for_state(job, "PENDING");
    let checkpoints = slurm.home().join("runs/train/latest/checkpoints");
    let saved = std::fs::read_dir(checkpoints).map_or(0, Iterator::count);
    assert_eq!(saved, 1, "{}", output());
    start_now(&slurm, job);
    wait_for("the job to go on", || output().contains("resuming at step ").then_some(()));
    assert_eq!(slurm.run("scancel", &[job]).code, 0);
    slurm.wait_for_state(job, "CANCELLED");
}
