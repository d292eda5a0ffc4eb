//! Hang detection for arbitrary commands, from the heartbeats of their ranks. Pure: no clock, no IO.
//!
//! ```text
//! files --changes--> HeartbeatMonitor --progress, HangReport--> the workload
//! ```
//! A rank's first heartbeat turns detection on for that rank. A rank is overdue if it has sent no heartbeat for the
//! hang timeout. Once a rank is overdue, the first rule that applies separates the hung ranks from those that wait for
//! them:
//! 1. ranks whose process is stopped, and which have been silent for half of the timeout;
//! 2. if all ranks report steps: overdue ranks at the lowest step. While no rank at the lowest step is overdue, the
//!    others wait for a slow rank, and no rank hangs;
//! 3. overdue ranks.
//!
//! Rules 2 and 3 select the rank that has been silent for the longest time. Ranks that run in lockstep with it fell
//! silent within one interval of it. They cannot be distinguished from it, and are all named.
//!
//! Invariants:
//! - a rank that has sent no heartbeat in this attempt, or has exited, is never reported;
//! - time during which the agent itself was suspended never counts;
//! - a set of hung ranks is reported once, and so is its recovery.

pub(super) mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::hang::{AGENT_SUSPENDED_AFTER, Hang, HangReport, waiting_text};
use super::recent::RecentDurations;

/// Minimum of the default timeout.
const MIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum of the default timeout up to heartbeat number [`WARM_UP_HEARTBEATS`]: the first steps compile kernels.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(300);
const WARM_UP_HEARTBEATS: usize = 3;
/// Default timeout as a multiple of the 99th percentile of the rank's recent intervals.
const SLOW_INTERVAL_FACTOR: u32 = 5;

/// Detects hangs from the heartbeats of an attempt's ranks. Ranks are global ranks.
#[derive(Debug)]
pub(super) struct HeartbeatMonitor {
    /// Timeout from the command line: zero turns detection off, `None` is the default.
    timeout: Option<Duration>,
    /// The ranks that have sent a heartbeat.
    ranks: BTreeMap<u32, RankHeartbeats>,
    /// Intervals between the heartbeats of each rank; kept across attempts.
    intervals: BTreeMap<u32, RecentDurations>,
    last_poll: Instant,
    /// The highest step that any rank has reported in any attempt.
    furthest: Option<u64>,
    /// The ranks reported last.
    reported: BTreeSet<u32>,
    /// Number of the last report.
    reports: u64,
}

#[derive(Clone, Copy, Debug)]
struct RankHeartbeats {
    last: Instant,
    count: usize,
    /// The last step that the rank has written.
    step: Option<u64>,
}

/// Hung ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    /// The hung ranks; never empty.
    ranks: Vec<u32>,
    /// Description without a subject, such as `sent no heartbeat for 62 s (step 12); rank 0 is waiting for it`.
    message: String,
    /// Hint that the status shows for each rank.
    hints: BTreeMap<u32, String>,
}

impl HeartbeatMonitor {
    pub(super) fn new(timeout: Option<Duration>, now: Instant) -> Self {
        Self {
            timeout,
            ranks: BTreeMap::new(),
            intervals: BTreeMap::new(),
            last_poll: now,
            furthest: None,
            reported: BTreeSet::new(),
            reports: 0,
        }
    }

    pub(super) fn begin_attempt(&mut self, now: Instant) {
        let intervals = std::mem::take(&mut self.intervals);
        let (furthest, reports) = (self.furthest, self.reports);
        *self = Self { intervals, furthest, reports, ..Self::new(self.timeout, now) };
    }

    /// Records a heartbeat that was sent `age` ago. A heartbeat without a step keeps the rank's last step. Returns
    /// whether it is progress: a step beyond the furthest of all attempts, or any heartbeat as long as no rank has
    /// reported a step.
    pub(super) fn record(&mut self, rank: u32, step: Option<u64>, age: Duration, now: Instant) -> bool {
        let advances = self.furthest.is_none_or(|furthest| step.is_some_and(|step| step > furthest));
        self.furthest = self.furthest.max(step);
        self.record_remote(rank, step, age, now);
        advances
    }

    /// Records a heartbeat of a rank on another node. That node's agent decides whether it is progress.
    pub(super) fn record_remote(&mut self, rank: u32, step: Option<u64>, age: Duration, now: Instant) {
        // The heartbeat was found by this poll and not by the last one, whatever the clock of the file system says.
        let age = age.min(now.saturating_duration_since(self.last_poll));
        let at = now.checked_sub(age).unwrap_or(now);
        let Some(known) = self.ranks.get_mut(&rank) else {
            self.ranks.insert(rank, RankHeartbeats { last: at, count: 1, step });
            return;
        };
        self.intervals.entry(rank).or_default().record(at.saturating_duration_since(known.last));
        *known = RankHeartbeats { last: at, count: known.count + 1, step: step.or(known.step) };
    }

    /// Removes a rank that sends no more heartbeats because it has exited or removed its file.
    pub(super) fn remove(&mut self, rank: u32) {
        self.ranks.remove(&rank);
    }

    /// Returns whether any rank has reported a step in this attempt or an earlier one.
    pub(super) fn has_steps(&self) -> bool {
        self.furthest.is_some()
    }

    /// Returns the ranks that have been reported as hung and still are.
    pub(super) fn reported(&self) -> &BTreeSet<u32> {
        &self.reported
    }

    /// Returns whether this hang was the last one reported, and still lasts.
    pub(super) fn lasts(&self, hang: &Hang) -> bool {
        hang.number == self.reports && !self.reported.is_empty()
    }

    /// Looks for hangs. Must be called once a second, after the heartbeats of that second were recorded. Returns `None`
    /// if the set of hung ranks, which may be empty, has not changed. `stopped` finds the ranks whose process is
    /// stopped by a signal; it is called only if a rank is overdue. `names` formats the hung ranks for the message.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        stopped: impl FnOnce() -> BTreeSet<u32>,
        names: impl FnOnce(&[u32]) -> String,
    ) -> Option<HangReport> {
        self.tick(now);
        let is_overdue = self.ranks.keys().any(|rank| self.is_overdue(*rank, now));
        let found = if is_overdue { self.find(&stopped(), now) } else { None };
        let ranks: BTreeSet<u32> = found.iter().flat_map(|found| &found.ranks).copied().collect();
        if ranks == self.reported {
            return None;
        }
        self.reported = ranks;
        self.reports += 1;
        let Some(Found { ranks, message, hints }) = found else {
            let message = "heartbeats continue".into();
            return Some(HangReport { message, rank_hints: BTreeMap::new(), hang: None });
        };
        let line = format!("{} {message}", names(&ranks));
        let hang = Hang { number: self.reports, culprits: ranks, cause: message, ends: true };
        Some(HangReport { message: line, rank_hints: hints, hang: Some(hang) })
    }

    /// Returns the lowest current step of the ranks that report steps.
    fn step(&self) -> Option<u64> {
        self.ranks.values().filter_map(|rank| rank.step).min()
    }

    /// Keeps track of time on nodes that do not call [`poll`](Self::poll). Must be called once a second. Returns
    /// whether any rank has been silent for half of its timeout.
    pub(super) fn tick(&mut self, now: Instant) -> bool {
        let since_poll = now.saturating_duration_since(std::mem::replace(&mut self.last_poll, now));
        if since_poll > AGENT_SUSPENDED_AFTER {
            self.ranks.values_mut().for_each(|rank| rank.last = (rank.last + since_poll).min(now));
        }
        self.ranks.keys().any(|rank| self.is_silent(*rank, now))
    }

    /// Returns whether a rank has been silent for half of its timeout.
    pub(super) fn is_silent(&self, number: u32, now: Instant) -> bool {
        self.ranks.get(&number).is_some_and(|rank| silence(rank, now) > self.timeout(number) / 2)
    }

    /// Finds the hung ranks. `stopped` are the ranks whose process is stopped by a signal.
    fn find(&self, stopped: &BTreeSet<u32>, now: Instant) -> Option<Found> {
        let overdue = |number: &u32| self.is_overdue(*number, now);
        if !self.ranks.keys().any(overdue) {
            return None;
        }
        let is_stopped = |number: &u32| stopped.contains(number) && self.is_silent(*number, now);
        let mut ranks: Vec<u32> = self.ranks.keys().copied().filter(is_stopped).collect();
        if ranks.is_empty() {
            let has_steps = self.ranks.values().all(|rank| rank.step.is_some());
            let lowest = self.step().filter(|_| has_steps);
            let candidates = || {
                self.ranks.iter().filter(|(_, rank)| lowest.is_none_or(|lowest| rank.step == Some(lowest)))
            };
            let longest = candidates()
                .filter(|(number, _)| overdue(number))
                .map(|(_, rank)| silence(rank, now))
                .max()?;
            let in_lockstep = |(number, rank): &(&u32, &RankHeartbeats)| {
                silence(rank, now) + self.lockstep(**number) >= longest
            };
            ranks = candidates().filter(in_lockstep).map(|(number, _)| *number).collect();
        }
        (!ranks.is_empty()).then(|| self.describe(ranks, stopped, now))
    }

    fn describe(&self, ranks: Vec<u32>, stopped: &BTreeSet<u32>, now: Instant) -> Found {
        let hint = |number: &u32| {
            let rank = self.ranks.get(number)?;
            let state = if stopped.contains(number) { "; its process is stopped" } else { "" };
            let step = rank.step.map_or(String::new(), |step| format!(" (step {step})"));
            Some(format!("sent no heartbeat for {} s{step}{state}", silence(rank, now).as_secs()))
        };
        let hints: BTreeMap<u32, String> =
            ranks.iter().filter_map(|number| Some((*number, hint(number)?))).collect();
        let is_waiting = |number: &&u32| !ranks.contains(number) && self.is_silent(**number, now);
        let waiting: Vec<&u32> = self.ranks.keys().filter(is_waiting).collect();
        let waiting = waiting_text(ranks.len(), &waiting);
        let first = ranks.first().and_then(|first| hints.get(first)).cloned().unwrap_or_default();
        Found { ranks, message: first + &waiting, hints }
    }

    fn is_overdue(&self, number: u32, now: Instant) -> bool {
        self.ranks.get(&number).is_some_and(|rank| silence(rank, now) > self.timeout(number))
    }

    fn timeout(&self, number: u32) -> Duration {
        if let Some(timeout) = self.timeout {
            return if timeout.is_zero() { Duration::MAX } else { timeout };
        }
        let warms_up = self.ranks.get(&number).is_none_or(|rank| rank.count < WARM_UP_HEARTBEATS);
        let least = if warms_up { WARM_UP_TIMEOUT } else { MIN_TIMEOUT };
        least.max(self.slow_interval(number).saturating_mul(SLOW_INTERVAL_FACTOR))
    }

    /// Time within which ranks that run in lockstep with this rank send their heartbeats of the same step.
    fn lockstep(&self, number: u32) -> Duration {
        self.slow_interval(number).min(self.timeout(number) / 4)
    }

    fn slow_interval(&self, number: u32) -> Duration {
        self.intervals.get(&number).map(RecentDurations::slow).unwrap_or_default()
    }
}

fn silence(rank: &RankHeartbeats, now: Instant) -> Duration {
    now.saturating_duration_since(rank.last)
}

#[cfg(test)]
mod tests;
