//! Accounts for the wall time of a job. Pure: fed with the events that change the board, each with its time.
//!
//! ```text
//! start of the job     first step          failure        next attempt      first step
//!        |--- start ---|--- step, evaluation, ---|--- down ---|--- start ---|--- repeated, then step ---> now
//!                           checkpoint, hang
//! ```
//! Time is assigned, up to `settled`, once it is known what it was used for. The time since then counts as `current`,
//! so that a reply between two events is complete too.
//!
//! Invariant: at any moment, the kinds add up to the time since the start of the job.

mod checkpoint_interval;
mod restart;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Accounting, RestartCount, StepReport};
use xlaunch_spec::quantities::seconds;

pub(crate) use checkpoint_interval::{CheckpointInterval, Measured, suggestion};
pub(crate) use restart::RestartTimes;

/// Uses of time; each is an index into [`TimeAccount::spent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Step,
    Repeated,
    Checkpoint,
    Evaluation,
    Start,
    Hang,
    Down,
}

/// The account of one job.
#[derive(Clone, Debug)]
pub(crate) struct TimeAccount {
    spent: [Duration; 7],
    started: Instant,
    /// All time before this is assigned.
    settled: Instant,
    /// Use that the time since then counts as.
    current: Use,
    /// Ranks were reported to hang, and have not completed a step since.
    hangs_now: bool,
    /// The job has ended.
    is_over: bool,
    /// The furthest step of all attempts.
    furthest: u64,
    /// Number of the last step of the job.
    total_steps: u64,
    stopping: bool,
    /// Completed steps, repeated ones included.
    steps: u64,
    /// Saves that delayed a step.
    saves: u64,
    /// Time that writing the last checkpoint took.
    write_seconds: f64,
    failures: u64,
    hangs: u64,
    replica_mismatches: u64,
    skipped_saves: u64,
    failed_saves: u64,
    restarts: BTreeMap<&'static str, u64>,
    times: RestartTimes,
}

impl TimeAccount {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            spent: [Duration::ZERO; 7],
            started: now,
            settled: now,
            current: Use::Start,
            hangs_now: false,
            is_over: false,
            furthest: 0,
            total_steps: 0,
            stopping: false,
            steps: 0,
            saves: 0,
            write_seconds: 0.0,
            failures: 0,
            hangs: 0,
            replica_mismatches: 0,
            skipped_saves: 0,
            failed_saves: 0,
            restarts: BTreeMap::new(),
            times: RestartTimes::default(),
        }
    }

    /// An attempt starts.
    pub(crate) fn begin_attempt(&mut self, now: Instant) {
        self.settle(now);
        (self.current, self.hangs_now) = (Use::Start, false);
        self.times.start = Some(now);
    }

    /// All processes of the attempt have been started. If `runs` (for commands), it is running from then on.
    pub(crate) fn spawned(&mut self, runs: bool, now: Instant) {
        self.times.spawned = Some(now);
        if runs && self.current == Use::Start {
            self.settle(now);
            self.current = Use::Step;
            self.times.end = Some(now);
        }
    }

    /// All ranks have joined.
    pub(crate) fn joined(&mut self, now: Instant) {
        self.times.joined = Some(now);
    }

    /// Handles a report of rank 0.
    pub(crate) fn reported(&mut self, report: &Report, now: Instant) {
        match report {
            Report::TrainStarted(started) => {
                self.total_steps = started.total_steps;
                self.times.train_started = Some(now);
            }
            Report::Step(step) => self.step(step, now),
            Report::Eval(eval) => {
                self.settle_as(Use::Evaluation, now);
                self.stopping |= eval.stopped_after > 0;
            }
            // A text that is sampled before the first step is part of the start.
            Report::Sample(_) if self.current != Use::Start => self.settle_as(Use::Evaluation, now),
            Report::Checkpoint(saved) => {
                self.write_seconds = saved.seconds;
                // Before the last step, training continues while checkpoints are written.
                if self.furthest == self.total_steps || self.stopping {
                    self.settle_as(Use::Checkpoint, now);
                }
            }
            Report::CheckpointSkipped(_) => self.skipped_saves += 1,
            Report::CheckpointFailed(_) => self.failed_saves += 1,
            _ => {}
        }
    }

    fn step(&mut self, step: &StepReport, now: Instant) {
        if self.is_over || self.current == Use::Down {
            return;
        }
        if self.current == Use::Start {
            self.settle(now.checked_sub(seconds(step.step_seconds)).unwrap_or(now));
            (self.times.first_step, self.times.end) = (Some(now), Some(now));
        }
        if self.hangs_now {
            self.settle_as(Use::Hang, now);
        }
        let delay = seconds(step.checkpoint_seconds);
        self.saves += u64::from(!delay.is_zero());
        self.settle_as(Use::Checkpoint, now.min(self.settled + delay));
        self.current = if step.step > self.furthest { Use::Step } else { Use::Repeated };
        self.settle(now);
        (self.steps, self.hangs_now) = (self.steps + 1, false);
        self.furthest = self.furthest.max(step.step);
        self.current = match step.step {
            // The last evaluation and sample follow.
            last if last == self.total_steps => Use::Evaluation,
            earlier if earlier < self.furthest => Use::Repeated,
            _ => Use::Step,
        };
    }

    /// A rank of a command has sent a heartbeat, so it was not hanging until now.
    pub(crate) fn heartbeat(&mut self, now: Instant) {
        if !self.hangs_now {
            self.settle(now);
        }
    }

    /// Ranks were reported to hang: there has been no progress since the last report.
    pub(crate) fn hung(&mut self) {
        if !self.hangs_now {
            self.hangs += 1;
        }
        self.hangs_now = true;
    }

    /// The ranks that were reported to hang have resumed.
    pub(crate) fn continues(&mut self, now: Instant) {
        if std::mem::take(&mut self.hangs_now) {
            self.settle_as(Use::Hang, now);
        }
    }

    /// A stop was requested, so the job waits for the checkpoint that follows.
    pub(crate) fn stopping(&mut self) {
        self.stopping = true;
    }

    /// The first failure of an attempt was noticed at `now`.
    pub(crate) fn failed(&mut self, now: Instant) {
        if self.current == Use::Down || self.is_over {
            return;
        }
        if self.hangs_now {
            self.settle_as(Use::Hang, now);
        }
        self.settle(now);
        (self.current, self.hangs_now) = (Use::Down, false);
        self.failures += 1;
        self.times = RestartTimes { failed: Some(now), ..RestartTimes::default() };
    }

    /// The last process of a failed attempt is gone, and another attempt follows because of `cause`.
    pub(crate) fn restarts(&mut self, cause: &'static str, now: Instant) {
        self.times.stopped = Some(now);
        *self.restarts.entry(cause).or_default() += 1;
        self.replica_mismatches += u64::from(cause == "replicas");
    }

    /// The job has ended.
    pub(crate) fn end(&mut self, now: Instant) {
        self.settle(now);
        self.is_over = true;
    }

    /// Returns how long the restart took, once: after the first step that follows it, or for a command when it runs
    /// again.
    pub(crate) fn take_restart_times(&mut self) -> Option<String> {
        let text = self.times.text()?;
        self.times = RestartTimes::default();
        Some(text)
    }

    /// Returns the measurements that determine the best checkpoint interval; `None` before a failure or a save.
    pub(crate) fn measured(&self, now: Instant) -> Option<Measured> {
        let wall = now.saturating_duration_since(self.started).as_secs_f64();
        let stepping = self.spent[Use::Step as usize] + self.spent[Use::Repeated as usize];
        let stall = self.spent[Use::Checkpoint as usize];
        let known = self.failures > 0 && self.saves > 0 && self.steps > 0;
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        known.then(|| Measured {
            failures: self.failures,
            wall_seconds: wall,
            stall_seconds: stall.as_secs_f64() / self.saves as f64,
            write_seconds: self.write_seconds,
            step_seconds: stepping.as_secs_f64() / self.steps as f64,
        })
    }

    /// Returns the account at `now`.
    pub(crate) fn accounting(&self, now: Instant) -> Accounting {
        let mut spent = self.spent;
        if !self.is_over {
            let open = if self.hangs_now { Use::Hang } else { self.current };
            spent[open as usize] += now.saturating_duration_since(self.settled);
        }
        let [step, repeated, checkpoint, evaluation, start, hang, down] = spent.map(|it| it.as_secs_f64());
        let count = |(cause, restarts): (&&str, &u64)| RestartCount {
            cause: (*cause).to_owned(),
            restarts: *restarts,
        };
        Accounting {
            step_seconds: step,
            repeated_seconds: repeated,
            checkpoint_seconds: checkpoint,
            evaluation_seconds: evaluation,
            start_seconds: start,
            hang_seconds: hang,
            down_seconds: down,
            hangs: self.hangs,
            replica_mismatches: self.replica_mismatches,
            skipped_saves: self.skipped_saves,
            failed_saves: self.failed_saves,
            restarts: self.restarts.iter().map(count).collect(),
        }
    }

    fn settle(&mut self, until: Instant) {
        self.settle_as(self.current, until);
    }

    /// Assigns the time up to `until`, unless it is already assigned.
    fn settle_as(&mut self, to: Use, until: Instant) {
        if self.is_over {
            return;
        }
        // A failed attempt is over, although its last reports may still arrive.
        let to = if self.current == Use::Down { Use::Down } else { to };
        self.spent[to as usize] += until.saturating_duration_since(self.settled);
        self.settled = self.settled.max(until);
    }
}

#[cfg(test)]
mod tests;
