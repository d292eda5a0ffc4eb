//! Hang detection for jobs of the built-in trainer. Pure: no clock, no IO.
//!
//! All ranks take part in every step, so one hung rank stalls the whole job. A thread of each worker sends heartbeats
//! with the phase of the training thread. The culprits are
//! 1. ranks whose process is stopped and that sent no heartbeat for [`HEARTBEAT_TIMEOUT`];
//! 2. after the hang timeout without progress, the ranks that pass all of these filters, applied in order; a filter
//!    that no rank passes is skipped:
//!    - the rank sends no heartbeats;
//!    - its phase does not wait for other ranks (any phase except all-reduce and read back);
//!    - it has completed the fewest steps;
//!    - it has started the fewest collectives: a rank that skipped one has started fewer than the others;
//!    - its GPU has passed the fewest marks: the host only enqueues work and does not see which GPU waits.
//!
//! All ranks are culprits if they do not differ: they wait for the network or for a GPU.
//!
//! A rank opens the communicator between the rendezvous and its session, together with all other ranks. If some ranks
//! have opened it, a rank that has not done so within the hang timeout is a culprit. If no rank has, opening may just
//! be slow: the ranks are then reported so that evidence is collected, and the deadline of the sessions ends the
//! attempt.
//!
//! Invariants:
//! - the timeout adapts to the job: max(60 s or `launch.hang_timeout`, 5 x the 99th percentile of the last 200 step
//!   times), with fixed minimums for work that reports no progress;
//! - progress is any report except a heartbeat, and between steps also a heartbeat with an increased counter;
//! - time during which the agent itself was suspended never counts;
//! - a set of culprits is reported once, and so is its recovery.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Heartbeat, Phase};
use xlaunch_spec::quantities::ranks_text;

use super::recent::RecentDurations;

/// Heartbeats are sent every second. If they are missing for this long, the rank is stopped or its host is overloaded.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(15);
/// The detector is polled every second. A longer gap means that the agent itself was suspended, so the clock restarts.
pub(super) const AGENT_SUSPENDED_AFTER: Duration = Duration::from_secs(5);
/// Minimum of the hang timeout unless the user has set one.
const DEFAULT_MINIMUM: Duration = Duration::from_secs(60);
/// Minimum timeout on GPUs for the first step, and for evaluation and samples: they may compile kernels and time
/// algorithms.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(300);
/// Minimum timeout for checkpoints: syncing a file to a slow disk reports no progress.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(600);
/// Hang timeout as a multiple of the 99th percentile of recent step times.
const SLOW_STEP_FACTOR: u32 = 5;

/// Properties of a job that the detector depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// `launch.hang_timeout`; zero for the default.
    pub(crate) minimum: Duration,
    /// True if hung ranks are terminated rather than only reported.
    pub(crate) ends: bool,
    /// True if workers use GPUs, and so compile kernels.
    pub(crate) gpus: bool,
}

/// Detects hangs from the last reports of an attempt's ranks.
#[derive(Debug)]
pub(crate) struct HangDetector {
    settings: Settings,
    /// Ranks from the rendezvous until their sessions close.
    ranks: BTreeMap<u32, RankActivity>,
    /// Step times of rank 0; kept across attempts.
    step_times: RecentDurations,
    /// True if this attempt has completed a step.
    stepped: bool,
    last_progress: Instant,
    last_poll: Instant,
    /// The ranks reported last, and whether they are to be terminated.
    reported: (BTreeSet<u32>, bool),
    /// Number of the last report.
    reports: u64,
}

#[derive(Clone, Copy, Debug)]
struct RankActivity {
    /// True if the rank has opened its session. From then on it sends heartbeats.
    opened: bool,
    /// Time of the last heartbeat, or before the first one the time at which the rank joined.
    last_heartbeat: Instant,
    /// Number of completed steps.
    steps: u64,
    phase: Phase,
    /// Progress counter of the last heartbeat; the next two fields are also from it.
    progress: u64,
    collectives: u64,
    marks: u64,
}

type Culprits = BTreeMap<u32, RankActivity>;

/// A change of the set of culprits, for the user and the status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HangReport {
    /// Message for the user, in one line.
    pub(crate) message: String,
    /// Hint that the status shows for each culprit; empty after a recovery.
    pub(crate) rank_hints: BTreeMap<u32, String>,
    /// The hang; `None` after a recovery.
    pub(crate) hang: Option<Hang>,
}

/// A hang of one or several ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hang {
    /// Number that identifies the hang within the job.
    pub(crate) number: u64,
    /// The hung ranks. The first one is the root cause. In hangs that the driver gets: only those of this node, which
    /// may be none.
    pub(crate) culprits: Vec<u32>,
    /// Describes the state of the first culprit and the ranks that wait for it.
    pub(crate) cause: String,
    /// True if the attempt is to be ended, unless a debugger is attached.
    pub(crate) ends: bool,
}

impl HangDetector {
    pub(crate) fn new(settings: Settings, now: Instant) -> Self {
        let minimum = if settings.minimum.is_zero() { DEFAULT_MINIMUM } else { settings.minimum };
        Self {
            settings: Settings { minimum, ..settings },
            ranks: BTreeMap::new(),
            step_times: RecentDurations::default(),
            stepped: false,
            last_progress: now,
            last_poll: now,
            reported: (BTreeSet::new(), false),
            reports: 0,
        }
    }

    pub(crate) fn begin_attempt(&mut self, now: Instant) {
        let step_times = std::mem::take(&mut self.step_times);
        *self = Self { step_times, reports: self.reports, ..Self::new(self.settings, now) };
    }

    /// Starts to monitor all ranks, which have joined.
    pub(crate) fn all_joined(&mut self, world: u32, now: Instant) {
        (0..world).for_each(|rank| self.add(rank, false, now));
    }

    pub(crate) fn session_opened(&mut self, rank: u32, now: Instant) {
        self.add(rank, true, now);
    }

    /// Records that a rank of another node has reported, which implies that it has opened its session.
    pub(crate) fn heard_of(&mut self, rank: u32, now: Instant) {
        if self.ranks.get(&rank).is_some_and(|activity| !activity.opened) {
            self.add(rank, true, now);
        }
    }

    fn add(&mut self, rank: u32, opened: bool, now: Instant) {
        let (last_heartbeat, phase) = (now, Phase::Unspecified);
        let (steps, progress, collectives, marks) = (0, 0, 0, 0);
        let activity = RankActivity { opened, last_heartbeat, steps, phase, progress, collectives, marks };
        self.ranks.insert(rank, activity);
        self.last_progress = now;
    }

    /// Stops monitoring a rank that has closed its session or exited.
    pub(crate) fn session_closed(&mut self, rank: u32) {
        self.ranks.remove(&rank);
    }

    /// Records a report. Every report proves that the process runs; every report except a heartbeat is progress.
    pub(crate) fn record(&mut self, rank: u32, report: &Report, now: Instant) {
        let Some(activity) = self.ranks.get_mut(&rank) else { return };
        activity.last_heartbeat = now;
        let is_progress = match report {
            Report::Heartbeat(heartbeat) => activity.update(heartbeat),
            Report::Step(step) => {
                self.stepped = true;
                if rank == 0 {
                    // A worker may report any number, even one that is not a valid duration.
                    let time = Duration::try_from_secs_f64(step.step_seconds);
                    self.step_times.record(time.unwrap_or(CHECKPOINT_TIMEOUT / SLOW_STEP_FACTOR));
                }
                true
            }
            _ => true,
        };
        if is_progress {
            self.last_progress = now;
        }
    }

    /// Looks for hangs. Must be called once a second. Returns `None` if the set of culprits, which may be empty, has
    /// not changed. `is_stopped` tells whether the process of a rank is stopped by a signal; it is called only for
    /// ranks that have missed heartbeats.
    pub(crate) fn poll(&mut self, now: Instant, is_stopped: impl Fn(u32) -> bool) -> Option<HangReport> {
        let since_poll = now.saturating_duration_since(std::mem::replace(&mut self.last_poll, now));
        if since_poll > AGENT_SUSPENDED_AFTER {
            self.last_progress = now;
            self.ranks.values_mut().for_each(|rank| rank.last_heartbeat = now);
        }
        let found = self
            .stopped(now, is_stopped)
            .or_else(|| self.without_session(now))
            .or_else(|| self.stalled(now))
            .unwrap_or_default();
        let ends = found.ends && self.settings.ends;
        if found.culprits.keys().eq(&self.reported.0)
            && (found.culprits.is_empty() || ends == self.reported.1)
        {
            return None;
        }
        self.reported = (found.culprits.keys().copied().collect(), ends);
        self.reports += 1;
        Some(self.report(found, ends))
    }

    /// Returns whether this hang was the last one reported, and still lasts.
    pub(crate) fn lasts(&self, hang: &Hang) -> bool {
        hang.number == self.reports && !self.reported.0.is_empty()
    }

    fn report(&self, found: Found, ends: bool) -> HangReport {
        let Found { culprits, what, .. } = found;
        if culprits.is_empty() {
            let message = "steps continue".into();
            return HangReport { message, rank_hints: BTreeMap::new(), hang: None };
        }
        let waiting = self.waiting_text(&culprits);
        let rank_hints = culprits.iter().map(|(rank, activity)| (*rank, what.hint(activity))).collect();
        let cause = culprits.values().next().map(|activity| what.hint(activity)).unwrap_or_default();
        let hang = Hang {
            number: self.reports,
            culprits: culprits.keys().copied().collect(),
            cause: format!("{cause}{waiting}"),
            ends,
        };
        let message = format!("{} {}{waiting}", ranks_text(culprits.keys()), what.sentence(&culprits));
        HangReport { message, rank_hints, hang: Some(hang) }
    }

    /// Finds ranks that have missed heartbeats and whose process is stopped.
    fn stopped(&self, now: Instant, is_stopped: impl Fn(u32) -> bool) -> Option<Found> {
        let timeout = self.settings.minimum.min(HEARTBEAT_TIMEOUT);
        let silent = select(&self.ranks, |rank| rank.silent(now) > timeout)?;
        let culprits: Culprits = silent.into_iter().filter(|(rank, _)| is_stopped(*rank)).collect();
        (!culprits.is_empty()).then_some(Found { culprits, what: What::Stopped(now), ends: true })
    }

    /// Finds ranks that have joined but not opened their session in time.
    fn without_session(&self, now: Instant) -> Option<Found> {
        let late = |rank: &RankActivity| !rank.opened && rank.silent(now) > self.settings.minimum;
        let culprits = select(&self.ranks, late)?;
        let ends = self.ranks.values().any(|rank| rank.opened);
        Some(Found { culprits, what: What::WithoutSession(now), ends })
    }

    /// Finds the culprits if the job makes no progress.
    fn stalled(&self, now: Instant) -> Option<Found> {
        let stalled = now.saturating_duration_since(self.last_progress);
        if stalled <= self.timeout() || self.ranks.values().any(|rank| !rank.opened) {
            return None;
        }
        let silent = select(&self.ranks, |rank| rank.silent(now) > HEARTBEAT_TIMEOUT);
        let is_silent = silent.is_some();
        let candidates = silent.unwrap_or_else(|| self.ranks.clone());
        let waits = |rank: &RankActivity| matches!(rank.phase, Phase::AllReduce | Phase::ReadBack);
        let candidates = select(&candidates, |rank| !waits(rank)).unwrap_or(candidates);
        let steps = candidates.values().map(|rank| rank.steps).min()?;
        let candidates = select(&candidates, |rank| rank.steps == steps)?;
        let collectives = candidates.values().map(|rank| rank.collectives).min()?;
        let candidates = select(&candidates, |rank| rank.collectives == collectives)?;
        let marks = candidates.values().map(|rank| rank.marks).min()?;
        let culprits = select(&candidates, |rank| rank.marks == marks)?;
        let what = if is_silent { What::Silent(now) } else { What::Stalled(stalled) };
        Some(Found { culprits, what, ends: true })
    }

    /// Formats the ranks that wait for the culprits, such as `; ranks 0-2 are waiting for it`.
    fn waiting_text(&self, culprits: &Culprits) -> String {
        let victims: Vec<&u32> = self.ranks.keys().filter(|rank| !culprits.contains_key(rank)).collect();
        if victims.is_empty() && culprits.len() != 1 {
            "; all ranks are waiting: check the network and the GPUs".into()
        } else {
            waiting_text(culprits.len(), &victims)
        }
    }

    /// Returns the longest time that the job may currently go without progress.
    fn timeout(&self) -> Duration {
        let minimum = self.settings.minimum;
        let any = |phases: &[Phase]| self.ranks.values().any(|rank| phases.contains(&rank.phase));
        if any(&[Phase::Checkpoint]) {
            return minimum.max(CHECKPOINT_TIMEOUT);
        }
        if self.settings.gpus && (!self.stepped || any(&[Phase::Evaluation, Phase::Sample])) {
            return minimum.max(COMPILE_TIMEOUT);
        }
        minimum.max(self.step_times.slow().saturating_mul(SLOW_STEP_FACTOR))
    }
}

impl RankActivity {
    /// Stores the contents of a heartbeat. Returns whether it shows progress of work between steps. Within a step, the
    /// counter is that of a background checkpoint and does not count.
    fn update(&mut self, heartbeat: &Heartbeat) -> bool {
        (self.steps, self.phase) = (heartbeat.step, heartbeat.phase());
        (self.collectives, self.marks) = (heartbeat.collectives, heartbeat.marks);
        let rises = heartbeat.progress > std::mem::replace(&mut self.progress, heartbeat.progress);
        let between_steps = matches!(
            self.phase,
            Phase::Unspecified | Phase::Initialize | Phase::Evaluation | Phase::Checkpoint | Phase::Sample
        );
        rises && between_steps
    }

    /// Time since the last heartbeat.
    fn silent(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_heartbeat)
    }

    fn place(&self) -> String {
        format!("(phase: {}, step {})", self.phase.label(), self.steps + 1)
    }
}

/// Result of a poll. The default is no culprits.
#[derive(Debug, Default)]
struct Found {
    culprits: Culprits,
    what: What,
    ends: bool,
}

/// The problem of the culprits.
#[derive(Clone, Copy, Debug)]
enum What {
    /// The process is stopped; the time is that of the poll, as in the next two variants.
    Stopped(Instant),
    Silent(Instant),
    WithoutSession(Instant),
    /// The job has made no progress for this long.
    Stalled(Duration),
}

impl Default for What {
    fn default() -> Self {
        Self::Stalled(Duration::ZERO)
    }
}

impl What {
    /// Describes the problem of one culprit; follows its name and a colon.
    fn hint(self, rank: &RankActivity) -> String {
        match self {
            Self::Stopped(now) => format!("stopped, no heartbeat for {} s", rank.silent(now).as_secs()),
            Self::Silent(now) => {
                format!("no heartbeat for {} s {}", rank.silent(now).as_secs(), rank.place())
            }
            Self::WithoutSession(now) => {
                format!("communicator not open {} s after the rendezvous", rank.silent(now).as_secs())
            }
            Self::Stalled(time) => format!("no progress for {} s {}", time.as_secs(), rank.place()),
        }
    }

    /// Describes the problem of all culprits in a sentence that follows their names.
    fn sentence(self, culprits: &Culprits) -> String {
        let single = culprits.len() == 1;
        let longest =
            |now| culprits.values().map(|rank| rank.silent(now)).max().unwrap_or_default().as_secs();
        let place = culprits.values().next().map(RankActivity::place).unwrap_or_default();
        match self {
            Self::Stopped(now) => {
                let are = if single { "is" } else { "are" };
                format!("{are} stopped and sent no heartbeat for {} s", longest(now))
            }
            Self::Silent(now) => format!("sent no heartbeat for {} s {place}", longest(now)),
            Self::WithoutSession(now) => {
                let have = if single { "has" } else { "have" };
                format!("joined {} s ago and {have} not opened the communicator", longest(now))
            }
            Self::Stalled(time) => format!("made no progress for {} s {place}", time.as_secs()),
        }
    }
}

/// Selects the ranks for which `predicate` holds; `None` instead of an empty set.
fn select(ranks: &Culprits, predicate: impl Fn(&RankActivity) -> bool) -> Option<Culprits> {
    let selected = ranks.iter().filter(|(_, rank)| predicate(rank));
    let selected: Culprits = selected.map(|(number, rank)| (*number, *rank)).collect();
    (!selected.is_empty()).then_some(selected)
}

/// Formats the ranks that wait for this number of culprits, such as `; ranks 0-2 are waiting for it`. Empty if no rank
/// waits.
pub(super) fn waiting_text(culprits: usize, waiting: &[&u32]) -> String {
    let them = if culprits == 1 { "it" } else { "them" };
    let are = match waiting.len() {
        0 => return String::new(),
        1 => "is",
        _ => "are",
    };
    format!("; {} {are} waiting for {them}", ranks_text(waiting.iter().copied()))
}

#[cfg(test)]
mod tests;
