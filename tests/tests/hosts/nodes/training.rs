//! The trainer on several nodes that fail, come and go: losses and weights equal those of an undisturbed run.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use xlaunch_tests::{Job, Process, is_alive, requirements, send_signal, wait_for, xlaunch_path};

use super::Group;

xlaunch_harness::tests! {
    needs requirements::hosts:
    training_goes_on_after_a_kill_with_the_weights_of_an_undisturbed_run,
    initial_weights_on_the_first_node_are_enough,
    training_saves_before_a_node_joins_and_before_one_leaves,
    training_that_has_grown_is_stopped_with_a_checkpoint_from_which_both_nodes_resume,
    training_survives_a_cut_that_heals;
    needs requirements::hosts, xlaunch_harness::long:
    ten_random_failures_leave_the_weights_of_an_undisturbed_run;
}

/// Variable with a seed that selects other failures.
const SEED_VARIABLE: &str = "XLAUNCH_TEST_SEED";

/// Flags of a job of two nodes.
const FLAGS: &str = "--rdzv-conf keep_alive_max_attempt=4,last_call_timeout=1 --max-restarts 30";

/// Hosts that train a job in a directory that they share.
struct Training {
    group: Group,
    job: Job,
    /// Arguments after `train.toml`.
    arguments: Vec<String>,
}

impl Training {
    fn new(group: Group, steps: u64) -> Self {
        let arguments = [format!("train.steps={steps}"), "checkpoint.every=10".into()];
        let arguments = arguments.into_iter().flat_map(|setting| ["--set".to_owned(), setting]);
        Self { group, job: Job::new(), arguments: arguments.collect() }
    }

    fn start(&self, host: usize) -> Process {
        let mut command = self.group.hosts[host].command_in(self.job.path(), xlaunch_path());
        command.env("XLAUNCH_TOKEN", "a token of the tests").env("RUST_BACKTRACE", "0");
        command.args(&self.group.flags).args(["--nproc", "2"]);
        if !self.group.flags.iter().any(|flag| flag == "c10d") {
            command.args(["--node-rank", &host.to_string()]);
        }
        Process::spawn_inside(command.arg("train.toml").args(&self.arguments))
    }

    /// Returns the training lines in the run's metrics so far.
    fn steps(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.job.run_dir().join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| line["train/loss"].is_number()).collect()
    }

    fn last_step(&self) -> u64 {
        self.steps().last().and_then(|line| line["_step"].as_u64()).unwrap_or(0)
    }

    fn wait_for_step(&self, step: u64, launches: &mut [Process]) {
        wait_for(&format!("step {step}"), || {
            let running = launches.iter_mut().all(Process::is_running);
            let errors = || launches.iter().map(Process::stderr).collect::<Vec<_>>().join("---\n");
            assert!(running || self.last_step() >= step, "ended at step {}:\n{}", self.last_step(), errors());
            (self.last_step() >= step).then_some(())
        });
    }

    /// Returns the process ids of the workers on a host.
    fn workers(&self, host: usize) -> Vec<u32> {
        let processes = self.group.hosts[host].processes().into_iter();
        processes.filter(|process| process.command.contains(" worker")).map(|process| process.pid).collect()
    }

    /// Returns the losses of all steps, each of which must occur once.
    fn losses(&self) -> Vec<f64> {
        let lines = self.steps();
        let steps: Vec<u64> = lines.iter().filter_map(|line| line["_step"].as_u64()).collect();
        assert!(steps.iter().copied().eq(1..=steps.len() as u64), "not one curve: {steps:?}");
        lines.iter().filter_map(|line| line["train/loss"].as_f64()).collect()
    }
}

/// Trains with four ranks on one node.
fn undisturbed(steps: u64) -> Job {
    let job = Job::new();
    let steps = format!("train.steps={steps}");
    job.run_ok(&["--nproc", "4", "--set", &steps, "--set", "checkpoint.every=10"]);
    job
}

fn expect_equal(training: &Training, reference: &Job, steps: u64) {
    assert_eq!((training.losses().len() as u64, training.losses()), (steps, reference.losses()));
    assert!(training.job.saved_state(steps) == reference.saved_state(steps), "weights differ");
}

fn training_goes_on_after_a_kill_with_the_weights_of_an_undisturbed_run() {
    const STEPS: u64 = 1000;
    let reference = undisturbed(STEPS);
    let training = Training::new(Group::fixed(2, FLAGS), STEPS);
    let mut launches = vec![training.start(0), training.start(1)];
    training.wait_for_step(15, &mut launches);
    send_signal(training.workers(1)[0], Signal::KILL);
    launches[0].wait_for_stderr("restarting (1 of 30");
    let step = training.last_step();
    training.wait_for_step(step + 30, &mut launches);
    launches[1].signal(Signal::KILL);
    assert_eq!(std::mem::replace(&mut launches[1], training.start(1)).wait().code, 137);
    let outputs = training.group.expect_codes(launches, 0);
    let notes = outputs.iter().map(|output| output.stderr.matches("no snapshots in memory").count());
    assert_eq!(notes.collect::<Vec<_>>(), [1, 0], "node 0 says it once");
    expect_equal(&training, &reference, STEPS);
}

/// The nodes do not share the run directory, and no key of `[model]` is set.
fn initial_weights_on_the_first_node_are_enough() {
    const CONFIG: &str = "[data]\ntrain = [\"text/*.txt\"]\n[train]\nsteps = 8\nbatch = 4\neval_every = 0\nsample = 0\n\
        [engine]\ndevice = \"cpu\"\n[checkpoint]\ninit = \"first\"\n";
    let first = Job::new();
    first.run_ok(&[]);
    let reference = Job::new();
    let training = Training::new(Group::fixed(2, "--rdzv-conf join_timeout=20"), 8);
    for job in [&reference, &training.job] {
        job.write("train.toml", CONFIG);
        std::os::unix::fs::symlink(first.run_dir(), job.path().join("first")).unwrap();
    }
    reference.run_ok(&["--nproc", "4", "--set", "train.steps=8", "--set", "checkpoint.every=10"]);
    // The second host has another directory of this name, without the weights.
    let dir = training.job.path().display();
    let hide = format!("cp -r {dir} /run/own && rm /run/own/first && mount --bind /run/own {dir}");
    let hidden = Process::spawn_inside(training.group.hosts[1].command("sh").args(["-c", &hide])).wait();
    assert_eq!(hidden.code, 0, "{}", hidden.stderr);
    let outputs = training.group.expect_codes(vec![training.start(0), training.start(1)], 0);
    assert!(outputs[0].stderr.contains("nodes do not share"), "{}", outputs[0].stderr);
    expect_equal(&training, &reference, 8);
}

fn training_saves_before_a_node_joins_and_before_one_leaves() {
    const STEPS: u64 = 1_000_000;
    let mut training = Training::new(Group::elastic(2, "1:2", FLAGS), STEPS);
    // Only checkpoints requested by membership changes are saved.
    training.arguments.extend(["--set", "checkpoint.every=100000"].map(String::from));
    let mut launches = vec![training.start(0)];
    training.wait_for_step(20, &mut launches);
    launches.push(training.start(1));
    launches[0].wait_for_stderr("joins");
    wait_for("workers on the new node", || (training.workers(1).len() == 2).then_some(()));
    let joined = training.last_step();
    training.wait_for_step(joined + 20, &mut launches);
    launches[1].signal(Signal::TERM);
    let left = launches.remove(1).wait();
    assert_eq!(left.code, 143, "{}", left.stderr);
    let step = training.last_step();
    training.wait_for_step(step + 20, &mut launches);
    // No step was lost or repeated, and training did not start over.
    assert!(training.losses().len() as u64 > step);
    launches[0].signal(Signal::TERM);
    training.group.expect_codes(launches, 143);
}

fn training_that_has_grown_is_stopped_with_a_checkpoint_from_which_both_nodes_resume() {
    let mut training = Training::new(Group::elastic(2, "1:2", FLAGS), 1_000_000);
    training.arguments.extend(["--set", "checkpoint.every=100000"].map(String::from));
    let mut launches = vec![training.start(0)];
    training.wait_for_step(20, &mut launches);
    launches.push(training.start(1));
    wait_for("workers on the new node", || (training.workers(1).len() == 2).then_some(()));
    let joined = training.last_step();
    training.wait_for_step(joined + 20, &mut launches);
    let mut stop = training.group.hosts[0].command_in(training.job.path(), xlaunch_path());
    let stop = Process::spawn_inside(stop.arg("stop")).wait();
    assert_eq!(stop.code, 0, "{}", stop.stderr);
    training.group.expect_codes(launches, 143);
    let steps = training.last_step() + 20;
    training.arguments.extend(["--resume", "--set", &format!("train.steps={steps}")].map(String::from));
    training.group.expect_codes(vec![training.start(0), training.start(1)], 0);
    // No step was lost or repeated.
    assert_eq!(training.losses().len() as u64, steps);
}

fn training_survives_a_cut_that_heals() {
    let training = Training::new(Group::fixed(2, "--max-restarts 1"), 1_000_000);
    let mut launches = vec![training.start(0), training.start(1)];
    training.wait_for_step(10, &mut launches);
    let pids = [0, 1].map(|host| training.workers(host)).concat();
    assert_eq!(pids.len(), 4);
    training.group.hosts[1].cut();
    // Half of the lease: the rest is left to a busy machine for connecting again.
    std::thread::sleep(Duration::from_secs(6));
    training.group.hosts[1].heal();
    let step = training.last_step();
    training.wait_for_step(step + 50, &mut launches);
    assert!(pids.iter().all(|pid| is_alive(*pid)), "{}", launches[0].stderr());
    launches[1].signal(Signal::TERM);
    training.group.expect_codes(launches, 143);
    // All steps were made in one attempt.
    assert!(training.losses().len() as u64 >= step + 50);
}

/// A failure of a job on two nodes.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Worker(usize),
    Agent,
    Power,
    /// A cut of this many seconds.
    Cut(u64),
    OneWay(usize, usize),
    Loss,
    Reset,
}

impl Failure {
    fn random(random: &mut impl FnMut(u64) -> u64) -> Self {
        match random(8) {
            0 | 1 => Self::Worker(usize::try_from(random(2)).unwrap()),
            2 => Self::Agent,
            3 => Self::Power,
            4 => Self::Cut(1 + random(10)),
            5 => {
                if random(2) == 0 {
                    Self::OneWay(0, 1)
                } else {
                    Self::OneWay(1, 0)
                }
            }
            6 => Self::Loss,
            _ => Self::Reset,
        }
    }

    fn inject(self, training: &Training, launches: &mut [Process]) {
        let host = &training.group.hosts[1];
        let heal_after = |seconds| {
            std::thread::sleep(Duration::from_secs(seconds));
            host.heal();
        };
        match self {
            Self::Worker(index) => {
                let workers = training.workers(index);
                // The host may be between two attempts.
                workers.first().into_iter().for_each(|pid| send_signal(*pid, Signal::KILL));
            }
            Self::Agent => {
                launches[1].signal(Signal::KILL);
                launches[1] = training.start(1);
            }
            Self::Power => {
                host.kill();
                host.boot();
                launches[1] = training.start(1);
            }
            Self::Cut(seconds) => {
                host.cut();
                heal_after(seconds);
            }
            Self::OneWay(from, to) => {
                training.group.hosts.cut_one_way(from, to);
                heal_after(3);
            }
            Self::Loss => {
                host.loss(10);
                heal_after(5);
            }
            Self::Reset => host.reset_connections(Duration::from_millis(300)),
        }
    }
}

fn ten_random_failures_leave_the_weights_of_an_undisturbed_run() {
    const STEPS: u64 = 4000;
    let seed = std::env::var(SEED_VARIABLE).ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u64);
    let mut state = seed;
    let mut random = move |below: u64| {
        // Knuth's MMIX.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let reference = undisturbed(STEPS);
    let training = Training::new(Group::fixed(2, FLAGS), STEPS);
    let mut launches = vec![training.start(0), training.start(1)];
    let (start, mut history) = (Instant::now(), Vec::new());
    for _ in 0..10 {
        let step = training.last_step();
        training.wait_for_step(step + 5 + random(30), &mut launches);
        let failure = Failure::random(&mut random);
        history.push((start.elapsed().as_secs(), training.last_step(), failure));
        failure.inject(&training, &mut launches);
    }
    assert!(training.last_step() < STEPS, "the run ended before the last failure: {history:?}");
    let outputs: Vec<_> = launches.into_iter().map(Process::wait).collect();
    assert!(outputs.iter().all(|output| output.code == 0), "seed {seed}: {history:?}\n{outputs:#?}");
    expect_equal(&training, &reference, STEPS);
}
