//! Host memory: snapshots that a restart resumes from, which do not affect the result, and limits.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::process::Signal;
use xlaunch_tests::{
    Job, LimitedCgroup, Output, Process, children, in_shell, read_state, requirements, send_signal, suspend,
    wait_for,
};

xlaunch_harness::tests! {
    restart_resumes_from_memory_and_opens_no_checkpoint,
    second_restart_resumes_from_a_snapshot_of_the_first,
    damaged_snapshot_is_passed_over_for_the_checkpoint,
    restart_without_memory_snapshots_reads_the_checkpoint,
    worker_killed_while_a_checkpoint_is_written_resumes_after_its_step;
    needs requirements::memory_cgroup:
    state_without_memory_for_a_copy_is_saved_in_pieces_with_the_same_bytes,
    job_that_does_not_fit_into_its_cgroup_is_refused_before_it_trains,
    worker_ended_by_the_oom_killer_is_out_of_memory;
}

const STEPS: u64 = 400;
const EVERY: u64 = 20;
const FROM_MEMORY: &str = "from a memory snapshot";

/// Returns the arguments of a job with 400 steps of some milliseconds each that saves every 20 steps to `saved`.
fn args<'a>(ranks: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let settings = [
        "train.steps=400",
        "train.batch=8",
        "checkpoint.every=20",
        "checkpoint.dir=\"saved\"",
        "launch.max_restarts=2",
        "comm.bucket_mb=0.02",
    ];
    let settings = settings.iter().chain(more).flat_map(|setting| ["--set", *setting]);
    ["--nproc", ranks].into_iter().chain(settings).collect()
}

fn saved(job: &Job) -> PathBuf {
    job.path().join("saved")
}

fn entries(job: &Job) -> Vec<String> {
    let entries = std::fs::read_dir(saved(job)).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Returns the steps of the checkpoints on disk.
fn steps(job: &Job) -> Vec<u64> {
    let mut steps: Vec<u64> =
        entries(job).iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Waits for a checkpoint of this step or a later one, and suspends the workers.
fn suspend_after(job: &Job, process: &Process, step: u64) -> Vec<u32> {
    wait_for("a checkpoint", || steps(job).last().is_some_and(|last| *last >= step).then_some(()));
    suspend_workers(process)
}

fn suspend_workers(process: &Process) -> Vec<u32> {
    let workers = children(process.pid());
    workers.iter().copied().for_each(suspend);
    workers
}

/// Returns the steps with which the attempts after the first one began, and the source of their state.
fn resumed(output: &Output) -> Vec<(u64, &str)> {
    let line = |line: &'_ str| -> Option<(u64, usize)> {
        let (step, _) = line.strip_prefix("resuming at step ")?.split_once(' ')?;
        Some((step.parse().ok()?, line.find("from ")?))
    };
    output.stderr.lines().filter_map(|text| line(text).map(|(step, from)| (step, &text[from..]))).collect()
}

/// Returns the last state of the job, run without interruption or memory snapshots.
fn undisturbed(ranks: &str, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let job = Job::new();
    job.run_ok(&args(ranks, &[&["checkpoint.memory=off"], more].concat()));
    last_state(&job)
}

/// Same, for two ranks; computed once for all tests.
fn undisturbed_2() -> &'static BTreeMap<String, Vec<u8>> {
    static STATE: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    STATE.get_or_init(|| undisturbed("2", &[]))
}

fn last_state(job: &Job) -> BTreeMap<String, Vec<u8>> {
    read_state(&saved(job).join(format!("step-{STEPS:08}")))
}

/// Overwrites every file of the checkpoints, so that none of them can be read.
fn spoil(job: &Job) -> Vec<u64> {
    let steps = steps(job);
    for step in &steps {
        for file in std::fs::read_dir(saved(job).join(format!("step-{step:08}"))).unwrap() {
            std::fs::write(file.unwrap().path(), "spoiled").unwrap();
        }
    }
    steps
}

fn restart_resumes_from_memory_and_opens_no_checkpoint() {
    let cases: [(&str, &[&str]); 4] = [
        ("3", &["comm.shard=\"none\""]),
        ("2", &["comm.shard=\"optimizer\""]),
        ("2", &["comm.shard=\"parameters\""]),
        ("1", &["checkpoint.async=false"]),
    ];
    for (ranks, settings) in cases {
        let job = Job::new();
        let process = job.spawn(&args(ranks, settings));
        let workers = suspend_after(&job, &process, EVERY);
        // A checkpoint that was opened would be reported and renamed.
        let spoiled = spoil(&job);
        send_signal(workers[workers.len() - 1], Signal::KILL);
        let output = process.wait();
        assert_eq!(output.code, 0, "{}", output.stderr);
        let [(step, from)] = resumed(&output)[..] else { panic!("{}", output.stderr) };
        assert_eq!(from, FROM_MEMORY, "{}", output.stderr);
        assert!(step > spoiled[spoiled.len() - 1] && (step - 1).is_multiple_of(EVERY), "{step}, {spoiled:?}");
        let entries = entries(&job);
        assert!(entries.iter().all(|name| !name.ends_with(".damaged")), "{entries:?}");
        // The launcher checks each checkpoint when a worker has saved it, perhaps after it was spoiled.
        let opened = |line: &str| line.contains("complete checkpoint") && !line.contains("was not saved");
        assert!(!output.stderr.lines().any(opened), "{}", output.stderr);
        assert!(last_state(&job) == undisturbed(ranks, settings), "{ranks} ranks, {settings:?}");
    }
}

fn second_restart_resumes_from_a_snapshot_of_the_first() {
    let job = Job::new();
    // There are several checkpoints before the end, however long writing one takes.
    let process = job.spawn(&args("2", &["checkpoint.async=false"]));
    let mut spoiled = Vec::new();
    for killed in [0, 1] {
        let step = 3 * EVERY + spoiled.last().copied().unwrap_or(0);
        let workers = suspend_after(&job, &process, step);
        spoiled = spoil(&job);
        send_signal(workers[killed], Signal::KILL);
        let attempts = killed + 1;
        wait_for("another attempt", || {
            (process.stderr().matches(FROM_MEMORY).count() == attempts).then_some(())
        });
    }
    let output = process.wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    let [(first, _), (second, from)] = resumed(&output)[..] else { panic!("{}", output.stderr) };
    assert!(first < second && second > spoiled[spoiled.len() - 1], "{first}, {second}, {spoiled:?}");
    assert_eq!(from, FROM_MEMORY);
    assert!(last_state(&job) == *undisturbed_2());
}

/// Returns the memory files that a launcher keeps for its workers.
fn memory_files(launcher: u32) -> Vec<File> {
    let entries = std::fs::read_dir(format!("/proc/{launcher}/fd")).unwrap();
    let paths = entries.flatten().map(|entry| entry.path());
    let is_memory = |path: &PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:xlaunch-snapshot")
    };
    let open = |path: PathBuf| File::options().read(true).write(true).open(path).unwrap();
    paths.filter(is_memory).map(open).collect()
}

fn damaged_snapshot_is_passed_over_for_the_checkpoint() {
    let job = Job::new();
    let process = job.spawn(&args("2", &["launch.max_restarts=1"]));
    let workers = suspend_after(&job, &process, EVERY);
    let files = memory_files(process.pid());
    assert_eq!(files.len(), 4, "two for each rank");
    for file in files {
        // The damage is in the first value of the parameters: rank 0 or 1 finds it, whichever is first.
        let (at, mut byte) = (64 << 10, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    send_signal(workers[0], Signal::KILL);
    let output = process.wait();
    // The restart because of the damage does not count.
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.stderr.contains("does not match its hash"), "{}", output.stderr);
    let [(_, from)] = resumed(&output)[..] else { panic!("{}", output.stderr) };
    assert!(from.contains("saved/step-"), "{}", output.stderr);
    assert!(last_state(&job) == *undisturbed_2());
}

fn restart_without_memory_snapshots_reads_the_checkpoint() {
    let job = Job::new();
    let process = job.spawn(&args("2", &["checkpoint.memory=off"]));
    let workers = suspend_after(&job, &process, EVERY);
    assert_eq!(memory_files(process.pid()).len(), 0);
    send_signal(workers[0], Signal::KILL);
    let output = process.wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    let [(_, from)] = resumed(&output)[..] else { panic!("{}", output.stderr) };
    assert!(from.contains("saved/step-"), "{}", output.stderr);
}

fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

fn worker_killed_while_a_checkpoint_is_written_resumes_after_its_step() {
    let job = Job::new();
    let process = job.spawn(&args("2", &["checkpoint.every=100"]));
    // Do this before the first checkpoint: saves that are due while it is written are skipped.
    let metrics = || std::fs::read(job.run_dir().join("metrics.jsonl")).unwrap_or_default();
    wait_for("a step", || (!metrics().is_empty()).then_some(()));
    let workers = suspend_workers(&process);
    let on_disk = steps(&job).last().copied().unwrap_or(0);
    // Opening it waits for a reader, so the next checkpoint is never written.
    for step in (on_disk + 100..=STEPS).step_by(100) {
        let blocked = saved(&job).join(format!(".tmp-step-{step:08}"));
        // The directory exists if the workers were suspended while they wrote it.
        std::fs::create_dir_all(&blocked).unwrap();
        let _ = std::fs::remove_file(blocked.join("model.safetensors"));
        make_fifo(&blocked.join("model.safetensors"));
    }
    workers.iter().for_each(|pid| send_signal(*pid, Signal::CONT));
    // On a slow machine some may be skipped because of an earlier one: the first one that is not skipped is blocked.
    let skipped = |text: &str| -> Vec<u64> {
        let steps =
            text.lines().filter_map(|line| line.strip_prefix("checkpoint of step ")?.split(' ').next());
        steps.filter_map(|step| step.parse().ok()).collect()
    };
    wait_for("a checkpoint that blocks those after it", || {
        let skipped = skipped(&process.stderr());
        let last = skipped.last()?;
        ((last - on_disk) / 100 > skipped.len() as u64).then_some(())
    });
    send_signal(workers[1], Signal::KILL);
    let output = process.wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    let [(step, from)] = resumed(&output)[..] else { panic!("{}", output.stderr) };
    assert_eq!(from, FROM_MEMORY);
    assert!(step > on_disk + 100, "{on_disk} is on disk: {}", output.stderr);
    assert!(last_state(&job) == *undisturbed_2());
}

/// A model whose state takes 50 MB: far more than the difference between two runs of the same program.
const LARGE: [&str; 8] = [
    "--set",
    "model.dim=256",
    "--set",
    "model.ffn=1024",
    "--set",
    "model.layers=4",
    "--set",
    "train.steps=4",
];

/// Runs `xlaunch train.toml ARGS` in a cgroup with this limit.
fn run_limited(job: &Job, name: &str, limit_bytes: u64, args: &[&str]) -> Output {
    let cgroup = LimitedCgroup::with_memory(&format!("xlaunch-test-{name}"), limit_bytes).unwrap();
    let command = job.command(&[&["train.toml"], args].concat());
    let enter = format!("echo $$ > {}", cgroup.procs_file().display());
    Process::spawn(&mut in_shell(&enter, &command)).wait()
}

/// Returns the bytes that each rank needs according to `--dry-run`, plus the other memory of a process.
fn training_bytes(job: &Job, args: &[&str]) -> u64 {
    let report = job.run(&[args, &["--dry-run"]].concat());
    let line = report.stdout.lines().find_map(|line| line.strip_prefix("each rank")).unwrap();
    let mib: f64 = line.trim().strip_suffix(" MiB").unwrap().parse().unwrap();
    (mib as u64 + 96) << 20
}

fn state_without_memory_for_a_copy_is_saved_in_pieces_with_the_same_bytes() {
    let undisturbed = Job::new();
    let output = undisturbed.run_ok(&LARGE);
    assert!(!output.stderr.contains("training waits"), "{}", output.stderr);
    let job = Job::new();
    let limit = training_bytes(&job, &LARGE) + (30 << 20);
    let output = run_limited(&job, "pieces", limit, &LARGE);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let note = "training waits while a checkpoint is written: a copy of the state needs ";
    assert!(output.stderr.contains(note), "{}", output.stderr);
    assert!(job.saved_state(4) == undisturbed.saved_state(4));
    let dry = run_limited(&job, "pieces", limit, &[&LARGE[..], &["--dry-run"]].concat());
    assert!(dry.code == 0 && dry.stdout.contains("checkpoints   training waits"), "{dry:?}");
}

fn job_that_does_not_fit_into_its_cgroup_is_refused_before_it_trains() {
    let job = Job::new();
    let limit = training_bytes(&job, &LARGE) - (20 << 20);
    let output = run_limited(&job, "refused", limit, &LARGE);
    assert_eq!(output.code, 2, "{}", output.stderr);
    assert!(output.stderr.contains("the ranks of this node need "), "{}", output.stderr);
    assert!(!job.path().join("runs").exists(), "a run was created");
    let dry = run_limited(&job, "refused", limit, &[&LARGE[..], &["--dry-run"]].concat());
    assert!(dry.code == 2 && dry.stdout.contains("fits          no, there is "), "{dry:?}");
}

fn worker_ended_by_the_oom_killer_is_out_of_memory() {
    let job = Job::scripted(env!("CARGO_BIN_EXE_fake_worker"), "join allocate");
    let output = run_limited(&job, "killed", 400 << 20, &["--nproc", "1"]);
    assert_eq!(output.code, 76, "{}", output.stderr);
    assert!(output.stderr.contains("OOM killer"), "{}", output.stderr);
}
