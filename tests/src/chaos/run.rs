//! Runs one job of a chaos run, injects its faults, and compares its result with that of an undisturbed job.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::kind::Kind;
use super::plan::{
    Action, Damage, EVALUATE_EVERY, FAULTS_PER_JOB, Fault, JobPlan, RANKS, SAVE_EVERY, STEPS, Settings,
    Trigger,
};
use crate::process::xlaunch_with_fail_points;
use crate::{Job, Process, children};

/// Interval at which a job is examined; its steps take about as long.
const EXAMINE_INTERVAL: Duration = Duration::from_millis(5);
/// Time for the launcher to notice the exit of a rank, which normally takes milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// A step takes milliseconds, a restart at most seconds. A job without a step for this long hangs.
const JOB_STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Parameters and moments by name.
type SavedState = BTreeMap<String, Vec<u8>>;

/// Runs the jobs of a chaos run.
#[derive(Debug)]
pub struct Runner {
    /// Final state and duration of an undisturbed job.
    undisturbed: BTreeMap<Settings, (SavedState, Duration)>,
}

/// Result of a job.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// Result of each fault.
    pub faults: Vec<FaultResult>,
    /// Wall time.
    pub wall: Duration,
    /// Wall time of an undisturbed job with the same settings.
    pub undisturbed: Duration,
    /// Number of restarts.
    pub restarts: usize,
    /// Description of a wrong result.
    pub problem: Option<String>,
}

/// Result of a fault.
#[derive(Clone, Copy, Debug)]
pub struct FaultResult {
    /// Kind of the fault.
    pub kind: Kind,
    /// True if the fault was injected. A job may not reach it, for example because a save was skipped or the job ended
    /// first.
    pub injected: bool,
    /// Seconds from the fault to the first step after the restart; `None` if there was no restart.
    pub recovery: Option<f64>,
}

impl Runner {
    /// Runs an undisturbed job with the settings of each plan.
    ///
    /// # Panics
    /// If one of them fails.
    pub fn prepare(plans: &[JobPlan]) -> Self {
        // Build this before anything is timed.
        xlaunch_with_fail_points();
        let mut undisturbed = BTreeMap::new();
        for JobPlan { settings, .. } in plans {
            undisturbed.entry(*settings).or_insert_with(|| {
                let (job, start) = (Job::with_fail_points(""), Instant::now());
                let output = job.run(&borrowed(&arguments(*settings)));
                assert_eq!(output.code, 0, "{}", output.stderr);
                (job.saved_state(STEPS), start.elapsed())
            });
        }
        Self { undisturbed }
    }

    /// Runs a job with these faults.
    pub fn run(&self, plan: &JobPlan) -> JobResult {
        let (expected, undisturbed) = &self.undisturbed[&plan.settings];
        let job = Job::with_fail_points(&plan.fail_points());
        let start = Instant::now();
        let mut process = job.spawn(&borrowed(&arguments(plan.settings)));
        let mut observed = Observed { sent: vec![None; plan.faults.len()], ..Observed::default() };
        let (mut bytes, mut last_progress) = (0, Instant::now());
        while process.is_running() && last_progress.elapsed() < JOB_STALL_TIMEOUT {
            observed.examine(plan, &job, &process);
            std::thread::sleep(EXAMINE_INTERVAL);
            let metrics = std::fs::metadata(job.run_dir().join("metrics.jsonl")).map_or(0, |file| file.len());
            if metrics != std::mem::replace(&mut bytes, metrics) {
                last_progress = Instant::now();
            }
        }
        observed.examine(plan, &job, &process);
        let (wall, undisturbed) = (start.elapsed(), *undisturbed);
        let restarts = observed.restarts.len();
        if process.is_running() {
            let problem = format!("the job hangs: {:?}\n{}", processes(process.pid()), process.stderr());
            let faults = plan.faults.iter();
            let faults = faults.map(|fault| FaultResult { kind: fault.kind, injected: true, recovery: None });
            return JobResult {
                faults: faults.collect(),
                wall,
                undisturbed,
                restarts,
                problem: Some(problem),
            };
        }
        let output = process.wait();
        let faults = observed.results(plan, &job);
        let problem =
            match output.code {
                0 if !job.run_dir().join(format!("checkpoints/step-{STEPS:08}")).exists() => {
                    Some("there is no last checkpoint".to_owned())
                }
                0 if job.saved_state(STEPS) != *expected => {
                    Some("the final state differs from the undisturbed run's".to_owned())
                }
                0 => plan.faults.iter().zip(&faults).find_map(|(fault, result)| {
                    unattributed(fault, &output.stderr).filter(|_| result.injected)
                }),
                code => Some(format!("exit code {code}")),
            };
        let problem = problem.map(|problem| format!("{problem}\n{}", output.stderr));
        JobResult { faults, wall, undisturbed, restarts, problem }
    }
}

fn borrowed(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

fn arguments(settings: Settings) -> Vec<String> {
    let Settings { muon, sharded, asynchronous } = settings;
    let keys = [
        format!("train.steps={STEPS}"),
        format!("train.optimizer={:?}", if muon { "muon" } else { "adamw" }),
        format!("train.eval_every={EVALUATE_EVERY}"),
        format!("checkpoint.every={SAVE_EVERY}"),
        format!("comm.shard={:?}", if sharded { "optimizer" } else { "none" }),
        format!("checkpoint.async={asynchronous}"),
        "checkpoint.keep=2".into(),
        "comm.bucket_mb=0.02".into(),
        format!("launch.max_restarts={}", 2 * FAULTS_PER_JOB + 2),
        // Compare after every step: a flipped bit that is detected later may have changed the gradients of all ranks.
        "observe.check_every=1".into(),
        "train.batch=2".into(),
        "launch.hang_timeout=2".into(),
    ];
    let keys = keys.into_iter().flat_map(|key| ["--set".to_owned(), key]);
    ["--nproc".to_owned(), RANKS.to_string()].into_iter().chain(keys).collect()
}

/// Checks that the output of a job attributes a fault to its rank. Returns a description of the missing text, if any.
fn unattributed(fault: &Fault, stderr: &str) -> Option<String> {
    let Action::FailPoints(rules) = &fault.action else { return None };
    let place = rules.split('@').nth(1).filter(|_| fault.kind == Kind::FlippedBit)?;
    let (rank, rest) = place.split_once(':')?;
    let step = rest.split('/').next()?;
    let expected = format!("replicas differ after step {step}: rank {rank};");
    (!stderr.contains(&expected)).then(|| format!("not reported: `{expected}`"))
}

/// Observations of a running job. Times are in seconds since 1970.
#[derive(Debug, Default)]
struct Observed {
    restarts: Vec<f64>,
    /// Attempt and time of the latest start of the ranks.
    started: Option<(u32, Instant)>,
    /// Times at which signals were sent, one per fault.
    sent: Vec<Option<f64>>,
    /// The fault whose signal was sent last to a starting rank, and the number of restarts until then.
    unanswered: Option<(usize, usize, Instant)>,
}

impl Observed {
    /// Records restarts, and sends the signal that is due.
    fn examine(&mut self, plan: &JobPlan, job: &Job, process: &Process) {
        let restarts = process.stderr().matches("; restarting").count();
        self.restarts.resize(restarts.max(self.restarts.len()), now());
        self.repeat_unanswered();
        let next = plan
            .faults
            .iter()
            .zip(&self.sent)
            .position(|(fault, sent)| sent.is_none() && matches!(fault.action, Action::Signal { .. }));
        let Some(index) = next else { return };
        let fault = &plan.faults[index];
        let Action::Signal { trigger, ranks, signal, resume_after_ms, damage } = &fault.action else {
            return;
        };
        let pids = rank_pids(process.pid(), fault.attempt);
        let Some(targets) = ranks.iter().map(|rank| pids.get(rank).copied()).collect::<Option<Vec<u32>>>()
        else {
            return;
        };
        let (_, started) = *self
            .started
            .filter(|(attempt, _)| *attempt == fault.attempt)
            .get_or_insert_with(|| (fault.attempt, Instant::now()));
        self.started = Some((fault.attempt, started));
        let delay = match trigger {
            Trigger::Start(delay) => Duration::from_millis(*delay).saturating_sub(started.elapsed()),
            Trigger::Step(step, delay) if last_step(job) >= Some(*step) => Duration::from_millis(*delay),
            Trigger::Step(..) => return,
        };
        std::thread::sleep(delay);
        if let Some(damage) = damage {
            damage_newest(&job.run_dir().join("checkpoints"), *damage);
        }
        self.sent[index] = Some(now());
        if matches!(trigger, Trigger::Start(_)) {
            self.unanswered = Some((index, self.restarts.len(), Instant::now()));
        }
        let signals = |signal| targets.iter().for_each(|pid| send(*pid, signal));
        signals(*signal);
        if *signal == Signal::SEGV {
            // Rust's standard library handles the first signal as a fault in the guard page of the stack, and restores
            // the default action for the next one.
            std::thread::sleep(EXAMINE_INTERVAL);
            signals(*signal);
        }
        if let Some(delay) = resume_after_ms {
            std::thread::sleep(Duration::from_millis(*delay));
            signals(Signal::CONT);
        }
    }

    /// Repeats a signal without effect: a rank that is killed while it waits for its attempt to begin is replaced
    /// without a restart, so later faults, which expect a restart, would not be reached.
    fn repeat_unanswered(&mut self) {
        let Some((fault, restarts, at)) = self.unanswered else { return };
        if self.restarts.len() > restarts {
            self.unanswered = None;
        } else if at.elapsed() > ANSWER_TIMEOUT {
            (self.sent[fault], self.unanswered) = (None, None);
        }
    }

    /// Returns which faults were injected, and how long the job took to recover from each.
    fn results(&self, plan: &JobPlan, job: &Job) -> Vec<FaultResult> {
        let logs = read_all(&job.run_dir().join("logs"));
        let steps: Vec<f64> = job.metrics().iter().filter_map(step_time).collect();
        let mut restarts = self.restarts.iter();
        let mut results = Vec::new();
        for (index, fault) in plan.faults.iter().enumerate() {
            let kind = fault.kind;
            let happened = match &fault.action {
                Action::FailPoints(rules) => {
                    let reached = |rule: &&str| logs.contains(&format!("fail point reached: {rule} "));
                    rules.split(';').filter(reached).count()
                }
                Action::Signal { .. } => usize::from(self.sent[index].is_some()),
            };
            let mut result = FaultResult { kind, injected: happened > 0, recovery: None };
            let mut own = restarts.by_ref().take(if kind.restarts() > 0 { happened } else { 0 });
            if let Some(first) = own.next() {
                let last = own.last().unwrap_or(first);
                // A fail point is reached within one step after the last reported step.
                let before = steps.iter().rfind(|time| *time < first).copied();
                let begin = self.sent[index].or(before);
                // A damaged checkpoint may cost a second restart.
                let last =
                    if kind == Kind::DamagedCheckpoint { self.restarts.last().unwrap_or(last) } else { last };
                let end = steps.iter().find(|time| *time > last);
                result.recovery = begin.zip(end).map(|(begin, end)| end - begin);
            }
            results.push(result);
        }
        results
    }
}

fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // This fails if the process has just exited.
        let _ = kill_process(pid, signal);
    }
}

/// Returns the process ids of the workers of this attempt, by rank.
fn rank_pids(launcher: u32, attempt: u32) -> BTreeMap<u32, u32> {
    let rank = |pid: u32| -> Option<u32> {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variables =
            environ.split(|byte| *byte == 0).filter_map(|variable| std::str::from_utf8(variable).ok());
        let variables: BTreeMap<&str, &str> =
            variables.filter_map(|variable| variable.split_once('=')).collect();
        (variables.get("XLAUNCH_ATTEMPT")?.parse() == Ok(attempt)).then_some(())?;
        variables.get("RANK")?.parse().ok()
    };
    children(launcher).into_iter().filter_map(|pid| Some((rank(pid)?, pid))).collect()
}

fn last_step(job: &Job) -> Option<u64> {
    let text = std::fs::read_to_string(job.run_dir().join("metrics.jsonl")).ok()?;
    // The last line may be incomplete.
    let line = text.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok())?;
    line["_step"].as_u64()
}

/// Returns state and wait channel of the workers of a launcher.
fn processes(launcher: u32) -> Vec<String> {
    let describe = |pid: u32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let state = read("status").lines().find(|line| line.starts_with("State:")).map(str::to_owned);
        format!("process {pid}: {}, {}", state.unwrap_or_default(), read("wchan"))
    };
    children(launcher).into_iter().map(describe).collect()
}

/// Returns the time at which a step was reported.
fn step_time(line: &Value) -> Option<f64> {
    line["train/loss"].as_f64().and(line["_timestamp"].as_f64())
}

/// Damages the newest checkpoint, if there is one.
fn damage_newest(dir: &Path, damage: Damage) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let complete = entries.map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"))
            && path.join("manifest.json").exists()
    });
    let Some(newest) = complete.max() else { return };
    // If the job is about to end, the signal comes too late: its result must not be damaged.
    if newest.ends_with(format!("step-{STEPS:08}")) {
        return;
    }
    // It may have been deleted because a newer one was saved.
    let _ = damage_checkpoint(&newest, damage);
}

fn damage_checkpoint(path: &Path, damage: Damage) -> std::io::Result<()> {
    let weights = path.join("model.safetensors");
    if damage == Damage::NoManifest {
        return std::fs::remove_file(path.join("manifest.json"));
    }
    let mut bytes = std::fs::read(&weights)?;
    let last = bytes.pop().unwrap_or_default();
    if damage == Damage::ChangedByte {
        bytes.push(last ^ 1);
    }
    std::fs::write(weights, bytes)
}

/// Returns the contents of all files below a directory.
fn read_all(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let read = |path: PathBuf| {
        if path.is_dir() {
            read_all(&path)
        } else {
            std::fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
        }
    };
    entries.map(|entry| read(entry.path())).collect()
}
