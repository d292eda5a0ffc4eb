//! Plans the faults of each job of a chaos run. Pure: a seed gives the same plan everywhere.
//!
//! A job gets [`FAULTS_PER_JOB`] faults, one after the other. Each one has its own window of steps, so that the next
//! one follows after the job has recovered. A fault that ends the attempt is followed by one in the next attempt.

use std::fmt::Write;

use rustix::process::Signal;

use super::kind::Kind::{self, *};

/// Number of ranks of a job.
pub(super) const RANKS: u32 = 4;
/// Number of steps of a job.
pub(super) const STEPS: u64 = WINDOW_START + FAULTS_PER_JOB * WINDOW_INTERVAL + 9;
/// Steps between checkpoints.
pub(super) const SAVE_EVERY: u64 = 7;
/// Steps between evaluations.
pub(super) const EVALUATE_EVERY: u64 = 12;
/// Number of consecutive faults of a job.
pub const FAULTS_PER_JOB: u64 = 10;

/// Number of steps in a fault's window: after the first checkpoint, and before the last steps, in which a rank may
/// exit.
const WINDOW: u64 = 18;
const WINDOW_START: u64 = 7;
/// Number of steps from the start of one window to the start of the next.
const WINDOW_INTERVAL: u64 = 22;
/// Maximum time from the start of a rank to a signal: the rank may be starting, joining, training or saving.
const MAX_START_DELAY_MS: u64 = 300;
/// Maximum time from a step to a signal.
const MAX_STEP_DELAY_MS: u64 = 30;
/// Number of bits of the parameters; a fail point takes larger numbers modulo this.
const PARAMETER_BITS: u64 = 1 << 20;

/// A job and its faults, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlan {
    /// The faults.
    pub faults: Vec<Fault>,
    /// Settings of the job.
    pub settings: Settings,
}

/// Settings that differ between jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Settings {
    /// True if `train.optimizer` is "muon": ranks own whole matrices.
    pub muon: bool,
    /// True if `comm.shard` is "optimizer".
    pub sharded: bool,
    /// Value of `checkpoint.async`.
    pub asynchronous: bool,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: Kind,
    /// The attempt in which it happens.
    pub attempt: u32,
    /// Way in which it is injected.
    pub action: Action,
}

/// Way in which a fault is injected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Rules for `XLAUNCH_FAIL`.
    FailPoints(String),
    /// Signals to ranks.
    Signal {
        /// Time of the signal.
        trigger: Trigger,
        /// Ranks that get the signal.
        ranks: Vec<u32>,
        /// The signal.
        signal: Signal,
        /// Milliseconds after which SIGCONT follows.
        resume_after_ms: Option<u64>,
        /// Damage done to the newest checkpoint before the signal.
        damage: Option<Damage>,
    },
}

/// Time at which a signal is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Milliseconds after the ranks of the attempt have started.
    Start(u64),
    /// Milliseconds after a step was reported.
    Step(u64, u64),
}

/// Kind of damage to a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The last byte of the weights is changed.
    ChangedByte,
    /// The last byte of the weights is cut off.
    Truncated,
    /// The manifest is removed.
    NoManifest,
}

impl JobPlan {
    /// Returns the plan of job `number` of a run.
    pub fn new(seed: u64, number: u64) -> Self {
        let mut random = Random::new(seed, number);
        let mut faults: Vec<Fault> = Vec::new();
        let mut attempt = 0;
        for index in 0..FAULTS_PER_JOB {
            let is_last = index + 1 == FAULTS_PER_JOB;
            // Kinds are taken in turn, so that all of them are equally frequent.
            let turn = number * FAULTS_PER_JOB + index;
            let kind = Kind::ALL[(turn % Kind::ALL.len() as u64) as usize];
            let first = WINDOW_START + index * WINDOW_INTERVAL;
            let action = action(kind, attempt, first, is_last, &mut random);
            faults.push(Fault { kind, attempt, action });
            attempt += kind.restarts();
        }
        let any = |matches: fn(Kind) -> bool| faults.iter().any(|fault| matches(fault.kind));
        // A flipped bit of a shard, or of a matrix at its owner, reaches all ranks in the same way, and cannot be
        // detected.
        let may_divide = !any(|kind| kind == FlippedBit);
        let sharded = random.below(2) == 1 && may_divide;
        // Otherwise a save would be skipped, with its faults, if the previous one takes long.
        let asynchronous = random.below(2) == 1 && !any(Kind::is_in_save);
        Self {
            faults,
            settings: Settings { muon: number.is_multiple_of(2) && may_divide, sharded, asynchronous },
        }
    }

    /// Returns the value of `XLAUNCH_FAIL`.
    pub fn fail_points(&self) -> String {
        let mut all = String::new();
        for fault in &self.faults {
            if let Action::FailPoints(rules) = &fault.action {
                // Writing to a string succeeds.
                let _ = write!(all, "{rules};");
            }
        }
        all
    }
}

fn action(kind: Kind, attempt: u32, first: u64, is_last: bool, random: &mut Random) -> Action {
    let rank = random.rank();
    let other = (rank + 1 + random.rank() % (RANKS - 1)) % RANKS;
    let step = first + random.below(WINDOW);
    let next_multiple = |of: u64| first.next_multiple_of(of);
    let (save, evaluation) = (next_multiple(SAVE_EVERY), next_multiple(EVALUATE_EVERY));
    let rule = |place: &str, rank: u32, step: u64, action: &str| {
        Action::FailPoints(format!("{place}@{rank}:{step}/{attempt}={action}"))
    };
    let any_step = |place: &str, rank: u32, action: &str| {
        Action::FailPoints(format!("{place}@{rank}:*/{attempt}={action}"))
    };
    let at_step = Trigger::Step(step, random.below(MAX_STEP_DELAY_MS));
    let signal = |signal: Signal, ranks: Vec<u32>, trigger: Trigger| Action::Signal {
        trigger,
        ranks,
        signal,
        resume_after_ms: None,
        damage: None,
    };
    match kind {
        KillRank => signal(Signal::KILL, vec![rank], at_step),
        KillTwoRanks => signal(Signal::KILL, vec![rank, other], at_step),
        KillStartingRank => {
            signal(Signal::KILL, vec![rank], Trigger::Start(random.below(MAX_START_DELAY_MS)))
        }
        SegmentationFault => signal(Signal::SEGV, vec![rank], at_step),
        Abort => signal(Signal::ABORT, vec![rank], at_step),
        StoppedRank => signal(Signal::STOP, vec![rank], at_step),
        ExitEarly => rule("forward", rank, step, "exit(0)"),
        CrashForward => rule("forward", rank, step, "crash"),
        CrashBackward => rule("backward", rank, step, "crash"),
        CrashAllReduce => rule("all_reduce", rank, step, "crash"),
        CrashOptimizer => rule("optimizer", rank, step, "crash"),
        CrashEvaluation => rule("evaluation", rank, evaluation, "crash"),
        CrashSnapshot => rule("snapshot", rank, save, "crash"),
        CrashSaveWrite => rule("save_write", rank, save, "crash"),
        CrashSaveSync => rule("save_sync", rank, save, "crash"),
        CrashCommit => rule("save_commit", 0, save, "crash"),
        CrashDelete => any_step("save_delete", 0, "crash"),
        CrashResume => Action::FailPoints(format!(
            "forward@{rank}:{step}/{attempt}=crash;resume@{other}:0/{}=crash",
            attempt + 1
        )),
        DiskFull => rule("save_write", rank, save, "errno(28)"),
        DiskError => rule("save_sync", rank, save, "errno(5)"),
        SlowDisk => any_step("save_sync", rank, "slow(200)"),
        SlowRank => any_step("forward", rank, "slow(20)"),
        FlippedBit => rule("parameters", rank, step, &format!("corrupt({})", random.below(PARAMETER_BITS))),
        PausedRank => Action::Signal {
            trigger: at_step,
            ranks: vec![rank],
            signal: Signal::STOP,
            resume_after_ms: Some(300),
            damage: None,
        },
        DamagedCheckpoint => {
            let damages = [Damage::Truncated, Damage::NoManifest, Damage::ChangedByte];
            // A worker detects the changed byte, which leads to a second restart, unless a newer checkpoint has
            // completed: the attempts after that cannot be predicted.
            let candidates = if is_last { 3 } else { 2 };
            let damage = Some(damages[random.below(candidates) as usize]);
            let ranks = vec![rank];
            Action::Signal { trigger: at_step, ranks, signal: Signal::KILL, resume_after_ms: None, damage }
        }
    }
}

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a number below `bound`. The bias is negligible for small bounds.
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn rank(&mut self) -> u32 {
        (self.next() % u64::from(RANKS)) as u32
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn plans(seed: u64, count: u64) -> Vec<JobPlan> {
        (0..count).map(|number| JobPlan::new(seed, number)).collect()
    }

    #[test]
    fn a_seed_gives_one_plan() {
        assert_eq!(plans(7, 50), plans(7, 50));
        assert_ne!(plans(7, 50), plans(8, 50));
    }

    #[test]
    fn every_kind_is_equally_frequent() {
        let mut counts: BTreeMap<Kind, u32> = BTreeMap::new();
        for plan in plans(7, 250) {
            plan.faults.iter().for_each(|fault| *counts.entry(fault.kind).or_default() += 1);
        }
        assert_eq!(counts.len(), Kind::ALL.len());
        assert!(counts.values().all(|count| u64::from(*count) == 10 * FAULTS_PER_JOB), "{counts:?}");
    }

    #[test]
    fn faults_follow_each_other_in_the_attempts_that_they_cause() {
        for plan in plans(3, 500) {
            let mut attempt = 0;
            for fault in &plan.faults {
                assert_eq!(fault.attempt, attempt, "{plan:?}");
                if let Action::FailPoints(rules) = &fault.action {
                    assert!(rules.contains(&format!("/{attempt}=")), "{rules}");
                }
                attempt += fault.kind.restarts();
            }
        }
    }

    #[test]
    fn ranks_and_steps_exist() {
        let steps = |rules: &str| -> Vec<(u32, u64)> {
            let rules = rules.split(';');
            let place = rules.filter_map(|rule| rule.split_once('@')?.1.split_once(':'));
            place
                .map(|(rank, rest)| (rank, rest.split_once('/').unwrap().0))
                .map(|(rank, step)| (rank.parse().unwrap(), step.parse().unwrap_or(1)))
                .collect()
        };
        for plan in plans(9, 500) {
            for fault in &plan.faults {
                let found = match &fault.action {
                    Action::FailPoints(rules) => steps(rules),
                    Action::Signal { trigger, ranks, .. } => {
                        let step = match trigger {
                            Trigger::Start(_) => 1,
                            Trigger::Step(step, _) => *step,
                        };
                        ranks.iter().map(|rank| (*rank, step)).collect()
                    }
                };
                let distinct: BTreeSet<u32> = found.iter().map(|(rank, _)| *rank).collect();
                assert_eq!(distinct.len(), found.len(), "{fault:?}");
                assert!(!found.is_empty());
                assert!(found.iter().all(|(rank, step)| *rank < RANKS && *step < STEPS), "{fault:?}");
            }
        }
    }
}
