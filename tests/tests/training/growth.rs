//! Training that grows from one node and shrinks again, in random histories: every announced checkpoint is complete,
//! and no step is lost. Nodes are agents on loopback. They share the run directory, or each one has its own under the
//! same path.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Output, Process, free_endpoint, wait_for};

xlaunch_harness::tests! {
    growing_and_shrinking_with_a_shared_directory_loses_no_checkpoint_that_was_announced,
    growing_and_shrinking_with_separate_directories_loses_no_checkpoint_that_was_announced;
}

/// Variable with a seed that selects other histories.
const SEED_VARIABLE: &str = "XLAUNCH_TEST_SEED";
const MOST_NODES: usize = 3;
/// Number of changes and checkpoints in a history.
const EVENTS: u32 = 6;
/// A path that is a different directory in each process.
const SEPARATE: &str = "/proc/self/cwd/runs";

fn growing_and_shrinking_with_a_shared_directory_loses_no_checkpoint_that_was_announced() {
    run_histories(true);
}

fn growing_and_shrinking_with_separate_directories_loses_no_checkpoint_that_was_announced() {
    run_histories(false);
}

fn run_histories(shared: bool) {
    let count = if xlaunch_harness::is_long() { 25 } else { 2 };
    let first = std::env::var(SEED_VARIABLE).ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u64);
    for seed in first..first + count {
        let mut history = History::new(seed, shared);
        history.run();
    }
}

/// A job and its history.
struct History {
    seed: u64,
    random: u64,
    job: Job,
    shared: bool,
    endpoint: String,
    /// Runs outside the nodes, so that each of them may leave.
    coordinator: Process,
    /// Running nodes by number.
    running: BTreeMap<usize, Process>,
    /// The node with rank 0, which has the only directory of checkpoints unless that is shared.
    first: usize,
    /// Steps and paths of announced checkpoints.
    announced: BTreeSet<(u64, PathBuf)>,
    events: Vec<String>,
}

impl History {
    fn new(seed: u64, shared: bool) -> Self {
        let job = Job::new();
        (0..MOST_NODES).for_each(|node| std::fs::create_dir(job.path().join(format!("n{node}"))).unwrap());
        let endpoint = free_endpoint();
        let mut command = job.command(&["rendezvous", "--rdzv-insecure", "--listen", &endpoint]);
        let coordinator = Process::spawn(&mut command);
        coordinator.wait_for_stderr("coordinating one job");
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (running, announced) = (BTreeMap::new(), BTreeSet::new());
        let events = Vec::new();
        Self { seed, random, job, shared, endpoint, coordinator, running, first: 0, announced, events }
    }

    fn run(&mut self) {
        self.join(0);
        self.wait_for_steps(3);
        self.join(1);
        for _ in 0..EVENTS {
            let pause = self.below(400);
            std::thread::sleep(Duration::from_millis(pause));
            match self.below(5) {
                0 | 1 if self.running.len() < MOST_NODES => {
                    let node = (0..MOST_NODES).find(|node| !self.running.contains_key(node)).unwrap();
                    self.join(node);
                }
                0..3 => self.leave(),
                3 => self.save(),
                _ => self.wait_for_steps(5),
            }
        }
        self.wait_for_steps(3);
        self.save();
        self.stop();
        self.check();
    }

    /// Knuth's MMIX.
    fn below(&mut self, end: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    fn node_dir(&self, node: usize) -> PathBuf {
        self.job.path().join(format!("n{node}"))
    }

    /// Returns `xlaunch ARGS` on a node.
    fn command(&self, node: usize, args: &[&str]) -> Command {
        let mut command = self.job.command(args);
        let dir = self.node_dir(node);
        command.env("XDG_RUNTIME_DIR", &dir).env("TMPDIR", &dir).current_dir(dir);
        command.env("RUST_BACKTRACE", "0").env("OMP_NUM_THREADS", "1");
        command
    }

    /// Returns `xlaunch train.toml` on a node, with the job's settings.
    fn training(&self, node: usize, flags: &[&str], steps: u64) -> Command {
        let shared = self.job.path().join("runs");
        let output = format!("job.output={}", if self.shared { shared.to_str().unwrap() } else { SEPARATE });
        let (config, steps) = (self.job.path().join("train.toml"), format!("train.steps={steps}"));
        let settings = ["--set", &output, "--set", &steps, "--set", "checkpoint.keep=0", "--set"];
        let args = [flags, &[config.to_str().unwrap()], &settings, &["checkpoint.every=150"]].concat();
        self.command(node, &args)
    }

    fn join(&mut self, node: usize) {
        self.events.push(format!("join {node}"));
        let nodes = format!("1:{MOST_NODES}");
        let place = ["--nnodes", &nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", &self.endpoint];
        let conf = ["--rdzv-conf", "is_host=0,last_call_timeout=0", "--rdzv-insecure", "--nproc", "1"];
        let flags = [&place[..], &conf, &["--local-addr", "127.0.0.1", "--max-restarts", "3"]].concat();
        let mut command = self.training(node, &flags, 10_000_000);
        self.running.insert(node, Process::spawn(&mut command));
    }

    /// Makes one node leave; neither the last one, nor the one with the only checkpoints.
    fn leave(&mut self) {
        let mut may_leave: Vec<usize> = self.running.keys().copied().collect();
        may_leave.retain(|node| self.shared || *node != self.first);
        if self.running.len() < 2 || !self.can_leave() {
            return;
        }
        let end = may_leave.len() as u64;
        let node = may_leave[usize::try_from(self.below(end)).unwrap()];
        self.events.push(format!("leave {node}"));
        let process = self.running.remove(&node).unwrap();
        process.signal(Signal::TERM);
        let output = process.wait();
        assert_eq!(output.code, 143, "{self}\n{}", output.stderr);
        if node == self.first {
            self.first = usize::MAX;
        }
    }

    /// Returns whether all nodes are members, so that SIGTERM to one of them does not stop the job.
    fn can_leave(&self) -> bool {
        let node = *self.running.keys().next().unwrap();
        let output = Process::spawn(&mut self.command(node, &["status", "--json", "train"])).wait();
        let status: Value = serde_json::from_str(&output.stdout).unwrap_or_default();
        status["nodes"].as_array().is_some_and(|nodes| nodes.len() == self.running.len())
    }

    /// Requests a checkpoint from any node. While the group changes there may be none, and the node says so.
    fn save(&mut self) {
        let nodes: Vec<usize> = self.running.keys().copied().collect();
        let end = nodes.len() as u64;
        let node = nodes[usize::try_from(self.below(end)).unwrap()];
        let output = Process::spawn(&mut self.command(node, &["checkpoint", "--json", "train"])).wait();
        self.events.push(format!("checkpoint at {node}: {} {}", output.stdout, output.stderr));
        if output.code == 0 {
            let saved: Value = serde_json::from_str(&output.stdout).unwrap();
            let (step, path) = (saved["step"].as_u64().unwrap(), saved["path"].as_str().unwrap());
            self.announced.insert((step, self.on_disk(Path::new(path))));
        }
    }

    /// Converts a path as seen by a node to a path as seen from here.
    fn on_disk(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(SEPARATE) {
            Ok(rest) => self.node_dir(self.first).join("runs").join(rest),
            Err(_) => path.to_owned(),
        }
    }

    /// Returns the directory of the only run.
    fn run_dir(&self) -> PathBuf {
        let runs = if self.shared { self.job.path().join("runs") } else { self.node_dir(0).join("runs") };
        runs.join("train/latest").canonicalize().unwrap_or_default()
    }

    /// Returns the steps in the curve of the run.
    fn steps(&self) -> Vec<u64> {
        let text = std::fs::read_to_string(self.run_dir().join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| line["_step"].as_u64()).collect()
    }

    fn wait_for_steps(&mut self, count: u64) {
        let from = self.steps().last().copied().unwrap_or(0);
        wait_for("steps", || {
            let running = self.running.values_mut().all(Process::is_running);
            assert!(running, "a node has ended: {self}");
            (self.steps().last().copied().unwrap_or(0) >= from + count).then_some(())
        });
    }

    /// Stops the job and records the checkpoint that it reports as the last one.
    fn stop(&mut self) {
        let node = *self.running.keys().next().unwrap();
        self.events.push(format!("stop at {node}"));
        let stopped = Process::spawn(&mut self.command(node, &["stop", "train"])).wait();
        assert_eq!(stopped.code, 0, "{self}\n{}", stopped.stderr);
        let outputs: Vec<Output> =
            std::mem::take(&mut self.running).into_values().map(Process::wait).collect();
        let codes: Vec<i32> = outputs.iter().map(|output| output.code).collect();
        assert_eq!(codes, vec![143; codes.len()], "{self}\n{outputs:#?}");
    }

    fn check(&mut self) {
        let steps = self.steps();
        assert!(steps.iter().copied().eq(1..=steps.len() as u64), "{self}\nnot one curve: {steps:?}");
        let last = *steps.last().unwrap();
        // The job was stopped with 143, and therefore with a checkpoint of its last step.
        let dir = self.run_dir().join("checkpoints");
        self.announced.insert((last, dir.join(format!("step-{last:08}"))));
        let runs = std::fs::read_dir(self.run_dir().parent().unwrap()).unwrap();
        let runs = runs.filter(|run| run.as_ref().unwrap().path().join("job.json").exists());
        // This includes the link to the run.
        assert_eq!(runs.count(), 2, "{self}");
        for (step, path) in &self.announced {
            // A job with no steps left to train reads all of a checkpoint.
            let resume = format!("--resume={}", path.display());
            let output = Process::spawn(&mut self.training(0, &[&resume], *step)).wait();
            let is_complete = output.code == 0 && output.stderr.contains("nothing is left to train");
            assert!(is_complete, "{self}\n{}: {}", path.display(), output.stderr);
        }
        let resumed = Process::spawn(&mut self.training(0, &["--resume"], last)).wait();
        let newest = format!("step-{last:08} has all {last} steps");
        assert!(resumed.stderr.contains(&newest), "{self}\n{}", resumed.stderr);
        self.coordinator.signal(Signal::TERM);
    }
}

impl std::fmt::Display for History {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sharing = if self.shared { "shared" } else { "separate" };
        write!(f, "seed {}, {sharing}: {:#?}", self.seed, self.events)?;
        for (node, process) in &self.running {
            write!(f, "\nnode {node}:\n{}", process.stderr())?;
        }
        Ok(())
    }
}
