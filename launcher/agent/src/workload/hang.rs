//! Hang detection for jobs of the built-in trainer. Pure: no clock, no IO.
//!
//! All ranks take part in every step, so one rank that hangs stalls the whole job. A thread of each worker sends
//! heartbeats with the phase that the training thread is in. Once the job has made no progress for the stall timeout,
//! the culprits are the first non-empty group of:
//! 1. ranks without heartbeats: the process is stopped or its host is gone (this needs no stall, only
//!    [`HEARTBEAT_TIMEOUT`]);
//! 2. ranks in a phase that waits for no other rank: anything but all-reduce and read back;
//! 3. ranks that are a step behind the others;
//! 4. all ranks: they wait for the network or for a GPU.
//!
//! The detector only reports; a person decides what to do.
//!
//! Invariants:
//! - the timeout adapts to the job: max(`launch.stall_timeout`, 4 x the 99th percentile of the last 200 step times),
//!   with fixed minimums for the first step and for work between steps;
//! - time during which the agent itself was suspended never counts;
//! - a set of culprits is reported once, and so is its recovery.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::Phase;
use xlaunch_proto::v1::worker_report::Report;

/// Heartbeats are sent every second. A rank that misses them for this long is stopped, or its host is.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(15);
/// The detector is polled every second. A longer gap means that the agent itself was suspended, so the clock restarts.
pub(super) const AGENT_SUSPENDED_AFTER: Duration = Duration::from_secs(5);
/// Minimum for an attempt's first step, which may compile kernels and time algorithms.
const FIRST_STEP_TIMEOUT: Duration = Duration::from_secs(300);
/// Minimum for evaluation, checkpoints and samples, which may wait for a slow disk.
const BETWEEN_STEPS_TIMEOUT: Duration = Duration::from_secs(600);
/// Stall timeout as a multiple of the 99th percentile of the last [`STEP_HISTORY`] step times.
const SLOW_STEP_FACTOR: f64 = 4.0;
const STEP_HISTORY: usize = 200;

/// What the ranks of one attempt last reported.
#[derive(Debug)]
pub(crate) struct HangDetector {
    stall_timeout: Duration,
    /// Ranks with an open session.
    ranks: BTreeMap<u32, RankActivity>,
    /// Step times of rank 0, in seconds; kept across attempts.
    step_seconds: VecDeque<f64>,
    /// Whether this attempt has completed a step.
    stepped: bool,
    last_progress: Instant,
    last_poll: Instant,
    reported: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug)]
struct RankActivity {
    last_heartbeat: Instant,
    /// Completed steps.
    steps: u64,
    phase: Phase,
}

/// A change of the culprits, for the user and for status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HangReport {
    /// One line.
    pub(crate) message: String,
    /// Shown by status beside each culprit; empty after a recovery.
    pub(crate) rank_hints: BTreeMap<u32, String>,
}

impl HangDetector {
    pub(crate) fn new(stall_timeout: Duration, now: Instant) -> Self {
        Self {
            stall_timeout,
            ranks: BTreeMap::new(),
            step_seconds: VecDeque::new(),
            stepped: false,
            last_progress: now,
            last_poll: now,
            reported: BTreeSet::new(),
        }
    }

    pub(crate) fn begin_attempt(&mut self, now: Instant) {
        self.ranks.clear();
        self.reported.clear();
        (self.stepped, self.last_progress, self.last_poll) = (false, now, now);
    }

    pub(crate) fn session_opened(&mut self, rank: u32, now: Instant) {
        self.ranks.insert(rank, RankActivity { last_heartbeat: now, steps: 0, phase: Phase::Unspecified });
        self.last_progress = now;
    }

    /// The rank has closed its session or exited.
    pub(crate) fn session_closed(&mut self, rank: u32) {
        self.ranks.remove(&rank);
    }

    /// Every report proves that the process runs; all but heartbeats are progress.
    pub(crate) fn record(&mut self, rank: u32, report: &Report, now: Instant) {
        let Some(activity) = self.ranks.get_mut(&rank) else { return };
        activity.last_heartbeat = now;
        match report {
            Report::Heartbeat(heartbeat) => {
                (activity.steps, activity.phase) = (heartbeat.step, heartbeat.phase());
                return;
            }
            Report::Step(step) => {
                self.stepped = true;
                if rank == 0 {
                    if self.step_seconds.len() == STEP_HISTORY {
                        self.step_seconds.pop_front();
                    }
                    self.step_seconds.push_back(step.step_seconds);
                }
            }
            _ => {}
        }
        self.last_progress = now;
    }

    /// Call once a second. `None` if the culprits, if any, have been reported before.
    pub(crate) fn poll(&mut self, now: Instant) -> Option<HangReport> {
        let since_poll = now.saturating_duration_since(std::mem::replace(&mut self.last_poll, now));
        if since_poll > AGENT_SUSPENDED_AFTER {
            self.last_progress = now;
            self.ranks.values_mut().for_each(|rank| rank.last_heartbeat = now);
        }
        let report = self
            .unresponsive(now)
            .or_else(|| self.stalled(now))
            .unwrap_or_else(|| HangReport { message: "steps continue".into(), rank_hints: BTreeMap::new() });
        if report.rank_hints.keys().eq(&self.reported) {
            return None;
        }
        self.reported = report.rank_hints.keys().copied().collect();
        Some(report)
    }

    /// Ranks whose heartbeats are missing.
    fn unresponsive(&self, now: Instant) -> Option<HangReport> {
        let timeout = self.stall_timeout.min(HEARTBEAT_TIMEOUT);
        let missed = |rank: &RankActivity| now.saturating_duration_since(rank.last_heartbeat);
        let culprits = self.select(|rank| missed(rank) > timeout)?;
        let longest = culprits.values().map(missed).max().unwrap_or_default();
        let message = format!(
            "{} sent no heartbeat for {} s{}",
            ranks_text(culprits.keys()),
            longest.as_secs(),
            self.waiting_text(&culprits)
        );
        let hint = |rank: &RankActivity| format!("no heartbeat for {} s", missed(rank).as_secs());
        let rank_hints = culprits.iter().map(|(number, rank)| (*number, hint(rank))).collect();
        Some(HangReport { message, rank_hints })
    }

    /// The culprits if the job makes no progress though all ranks send heartbeats.
    fn stalled(&self, now: Instant) -> Option<HangReport> {
        let stalled = now.saturating_duration_since(self.last_progress);
        if stalled <= self.progress_timeout() {
            return None;
        }
        let most_steps = self.ranks.values().map(|rank| rank.steps).max()?;
        let culprits = self
            .select(|rank| !matches!(rank.phase, Phase::AllReduce | Phase::ReadBack))
            .or_else(|| self.select(|rank| rank.steps < most_steps))
            .or_else(|| self.select(|_| true))?;
        let seconds = stalled.as_secs();
        let place = |rank: &RankActivity| format!("(phase: {}, step {})", rank.phase.name(), rank.steps + 1);
        let message = format!(
            "{} made no progress for {seconds} s {}{}",
            ranks_text(culprits.keys()),
            culprits.values().next().map(place).unwrap_or_default(),
            self.waiting_text(&culprits)
        );
        let hint = |rank: &RankActivity| format!("no progress for {seconds} s {}", place(rank));
        let rank_hints = culprits.iter().map(|(number, rank)| (*number, hint(rank))).collect();
        Some(HangReport { message, rank_hints })
    }

    /// The ranks for which `predicate` holds; `None` instead of an empty set.
    fn select(&self, predicate: impl Fn(&RankActivity) -> bool) -> Option<BTreeMap<u32, RankActivity>> {
        let selected = self.ranks.iter().filter(|(_, rank)| predicate(rank));
        let selected: BTreeMap<_, _> = selected.map(|(number, rank)| (*number, *rank)).collect();
        (!selected.is_empty()).then_some(selected)
    }

    /// `; ranks 0-2 are waiting for it`.
    fn waiting_text(&self, culprits: &BTreeMap<u32, RankActivity>) -> String {
        let victims: Vec<&u32> = self.ranks.keys().filter(|rank| !culprits.contains_key(rank)).collect();
        let them = if culprits.len() == 1 { "it" } else { "them" };
        match victims.len() {
            0 if culprits.len() == 1 => String::new(),
            0 => "; all ranks are waiting: check the network and the GPUs".into(),
            1 => format!("; {} is waiting for {them}", ranks_text(victims)),
            _ => format!("; {} are waiting for {them}", ranks_text(victims)),
        }
    }

    /// How long the job may go without progress.
    fn progress_timeout(&self) -> Duration {
        let between_steps =
            |rank: &RankActivity| matches!(rank.phase, Phase::Evaluation | Phase::Checkpoint | Phase::Sample);
        if self.ranks.values().any(between_steps) {
            return self.stall_timeout.max(BETWEEN_STEPS_TIMEOUT);
        }
        if !self.stepped {
            return self.stall_timeout.max(FIRST_STEP_TIMEOUT);
        }
        let mut sorted: Vec<f64> = self.step_seconds.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let slow = sorted.get(sorted.len() * 99 / 100).copied().unwrap_or(0.0);
        // A worker may report any number.
        let adapted = Duration::try_from_secs_f64(SLOW_STEP_FACTOR * slow).unwrap_or(BETWEEN_STEPS_TIMEOUT);
        self.stall_timeout.max(adapted)
    }
}

/// `rank 3`, or `ranks 0-2, 5`.
pub(super) fn ranks_text<'a>(ranks: impl IntoIterator<Item = &'a u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for rank in ranks.into_iter().copied() {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let noun = if matches!(ranges[..], [(first, last)] if first == last) { "rank" } else { "ranks" };
    let text = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    format!("{noun} {}", ranges.iter().map(text).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests;
