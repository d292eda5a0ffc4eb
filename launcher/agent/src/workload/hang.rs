//! Hang detection for jobs of the built-in trainer. Pure: no clock, no IO.
//!
//! All ranks take part in every step, so one rank that hangs stalls the whole job. A thread of each worker sends
//! heartbeats with the phase that the training thread is in. The culprits are
//! 1. ranks whose process is stopped and that sent no heartbeat for [`HEARTBEAT_TIMEOUT`];
//! 2. after the hang timeout without progress, the ranks that remain after these conditions, of which one is skipped
//!    if no rank meets it: no heartbeats; a phase that waits for no other rank (anything but all-reduce and read back);
//!    the fewest steps; the fewest collectives, as a rank that skipped one has started fewer than the others; the
//!    fewest marks that their GPU has passed, as the host only enqueues work and does not see which GPU waits.
//!
//! If no rank differs, all ranks are culprits: they wait for the network or for a GPU.
//!
//! Between the rendezvous and its session a rank opens the communicator, with all other ranks. If some have done so, a
//! rank that has not after the hang timeout is a culprit. If none has, it may only take long: ranks are then pointed
//! out, so that there is evidence, and the deadline of the sessions ends the attempt.
//!
//! Invariants:
//! - the timeout adapts to the job: max(60 s or `launch.hang_timeout`, 5 x the 99th percentile of the last 200 step
//!   times), with fixed minimums for work that reports no progress;
//! - what counts as progress is a report, and between steps a rise of the counter in a heartbeat;
//! - time during which the agent itself was suspended never counts;
//! - a set of culprits is reported once, and so is its recovery.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Heartbeat, Phase};

use super::recent::RecentDurations;

/// Heartbeats are sent every second. A rank that misses them for this long is stopped, or its host is overloaded.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(15);
/// The detector is polled every second. A longer gap means that the agent itself was suspended, so the clock restarts.
pub(super) const AGENT_SUSPENDED_AFTER: Duration = Duration::from_secs(5);
/// Minimum of the hang timeout unless the user has set one.
const DEFAULT_MINIMUM: Duration = Duration::from_secs(60);
/// Minimum on GPUs for the first step, and for evaluation and samples: they may compile kernels and time algorithms.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(300);
/// Minimum for checkpoints: syncing a file to a slow disk reports no progress.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(600);
/// Hang timeout as a multiple of the 99th percentile of the last step times.
const SLOW_STEP_FACTOR: u32 = 5;

/// What the detector has to know of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// `launch.hang_timeout`; zero for the default.
    pub(crate) minimum: Duration,
    /// Ranks that hang are ended, not only reported.
    pub(crate) ends: bool,
    /// Workers compile kernels.
    pub(crate) gpus: bool,
}

/// What the ranks of one attempt last reported.
#[derive(Debug)]
pub(crate) struct HangDetector {
    settings: Settings,
    /// Ranks that have joined, until their sessions close.
    ranks: BTreeMap<u32, RankActivity>,
    /// Step times of rank 0; kept across attempts.
    step_times: RecentDurations,
    /// Whether this attempt has completed a step.
    stepped: bool,
    last_progress: Instant,
    last_poll: Instant,
    /// The ranks that were reported, and whether they are to be ended.
    reported: (BTreeSet<u32>, bool),
    /// Number of the last report.
    reports: u64,
}

#[derive(Clone, Copy, Debug)]
struct RankActivity {
    /// Has opened its session: it sends heartbeats.
    opened: bool,
    /// Or when it joined.
    last_heartbeat: Instant,
    /// Completed steps.
    steps: u64,
    phase: Phase,
    /// The counters of its last heartbeat.
    progress: u64,
    collectives: u64,
    marks: u64,
}

type Culprits = BTreeMap<u32, RankActivity>;

/// A change of the culprits, for the user and for status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HangReport {
    /// One line.
    pub(crate) message: String,
    /// Shown by status beside each culprit; empty after a recovery.
    pub(crate) rank_hints: BTreeMap<u32, String>,
    /// `None` after a recovery.
    pub(crate) hang: Option<Hang>,
}

/// Ranks that hang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hang {
    /// Tells it from others of the job.
    pub(crate) number: u64,
    /// The first is the root cause. As the driver gets them: those of this node, or none.
    pub(crate) culprits: Vec<u32>,
    /// What the first culprit does, and who waits for it.
    pub(crate) cause: String,
    /// The attempt is to be ended, unless a debugger is attached.
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
        self.ranks.clear();
        self.reported.0.clear();
        (self.stepped, self.last_progress, self.last_poll) = (false, now, now);
    }

    /// All ranks have joined.
    pub(crate) fn all_joined(&mut self, world: u32, now: Instant) {
        (0..world).for_each(|rank| self.add(rank, false, now));
    }

    pub(crate) fn session_opened(&mut self, rank: u32, now: Instant) {
        self.add(rank, true, now);
    }

    /// A rank of another node has reported, so it has opened its session.
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

    /// The rank has closed its session or exited.
    pub(crate) fn session_closed(&mut self, rank: u32) {
        self.ranks.remove(&rank);
    }

    /// Every report proves that the process runs; all but heartbeats are progress.
    pub(crate) fn record(&mut self, rank: u32, report: &Report, now: Instant) {
        let Some(activity) = self.ranks.get_mut(&rank) else { return };
        activity.last_heartbeat = now;
        let is_progress = match report {
            Report::Heartbeat(heartbeat) => activity.update(heartbeat),
            Report::Step(step) => {
                self.stepped = true;
                if rank == 0 {
                    // A worker may report any number.
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

    /// Call once a second. `None` if the culprits, if any, have been reported before. `is_stopped` tells whether the
    /// process of a rank is stopped by a signal; it is called only for ranks that have not been heard of.
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

    /// Whether this hang is the one that was reported last, and still lasts.
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

    /// Ranks whose process is stopped, after they missed heartbeats.
    fn stopped(&self, now: Instant, is_stopped: impl Fn(u32) -> bool) -> Option<Found> {
        let timeout = self.settings.minimum.min(HEARTBEAT_TIMEOUT);
        let silent = select(&self.ranks, |rank| rank.silent(now) > timeout)?;
        let culprits: Culprits = silent.into_iter().filter(|(rank, _)| is_stopped(*rank)).collect();
        (!culprits.is_empty()).then_some(Found { culprits, what: What::Stopped(now), ends: true })
    }

    /// Ranks that have joined and do not open their session.
    fn without_session(&self, now: Instant) -> Option<Found> {
        let late = |rank: &RankActivity| !rank.opened && rank.silent(now) > self.settings.minimum;
        let culprits = select(&self.ranks, late)?;
        let ends = self.ranks.values().any(|rank| rank.opened);
        Some(Found { culprits, what: What::WithoutSession(now), ends })
    }

    /// The culprits if the job makes no progress.
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

    /// `; ranks 0-2 are waiting for it`.
    fn waiting_text(&self, culprits: &Culprits) -> String {
        let victims: Vec<&u32> = self.ranks.keys().filter(|rank| !culprits.contains_key(rank)).collect();
        match victims.is_empty() && culprits.len() != 1 {
            true => "; all ranks are waiting: check the network and the GPUs".into(),
            false => waiting_text(culprits.len(), &victims),
        }
    }

    /// How long the job may go without progress.
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
    /// Takes over a heartbeat. Returns whether it shows progress of work between steps; within a step, the counter is
    /// that of a checkpoint in the background.
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

    /// Since its last heartbeat.
    fn silent(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_heartbeat)
    }

    fn place(&self) -> String {
        format!("(phase: {}, step {})", self.phase.name(), self.steps + 1)
    }
}

/// What a poll finds. The default is nothing.
#[derive(Debug, Default)]
struct Found {
    culprits: Culprits,
    what: What,
    ends: bool,
}

/// What is wrong with the culprits.
#[derive(Clone, Copy, Debug)]
enum What {
    /// At this time.
    Stopped(Instant),
    Silent(Instant),
    WithoutSession(Instant),
    /// For this long.
    Stalled(Duration),
}

impl Default for What {
    fn default() -> Self {
        Self::Stalled(Duration::ZERO)
    }
}

impl What {
    /// About one culprit, after its name and a colon.
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

    /// A sentence about all of them, after their names.
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

/// The ranks for which `predicate` holds; `None` instead of an empty set.
fn select(ranks: &Culprits, predicate: impl Fn(&RankActivity) -> bool) -> Option<Culprits> {
    let selected = ranks.iter().filter(|(_, rank)| predicate(rank));
    let selected: Culprits = selected.map(|(number, rank)| (*number, *rank)).collect();
    (!selected.is_empty()).then_some(selected)
}

/// `; ranks 0-2 are waiting for it`, for this number of culprits; empty if no rank waits.
pub(super) fn waiting_text(culprits: usize, waiting: &[&u32]) -> String {
    let them = if culprits == 1 { "it" } else { "them" };
    let are = match waiting.len() {
        0 => return String::new(),
        1 => "is",
        _ => "are",
    };
    format!("; {} {are} waiting for {them}", ranks_text(waiting.iter().copied()))
}

/// `rank 3`, or `ranks 0-2, 5`.
pub(crate) fn ranks_text<'a>(ranks: impl IntoIterator<Item = &'a u32>) -> String {
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
