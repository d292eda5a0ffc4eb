//! Who holds up the others where a job of the built-in trainer makes no more steps: pure.
//!
//! Ranks make every step together, so one that hangs stops all. Their heartbeats come from threads of their own, and say
//! what each is doing: whoever waits for sums or for its GPU waits for others, or for hardware; whoever does anything else
//! for long keeps them waiting. Nobody is ended for it: a person decides.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::Phase;
use xlaunch_proto::v1::worker_report::Report;

/// Heartbeats come every second: a rank that is missed for so long has stopped, or its host has.
const HEARTBEATS: Duration = Duration::from_secs(15);
/// Looks come every second too: where they have not, this process was stopped itself.
const LOOKS: Duration = Duration::from_secs(5);
/// A first step may compile kernels, and choose algorithms by time.
const FIRST: Duration = Duration::from_secs(300);
/// What is done between steps may wait for a slow disk.
const BETWEEN: Duration = Duration::from_secs(600);
/// Steps are waited for so many times as long as slow ones took,
const SLOW: f64 = 4.0;
/// of the last so many.
const STEPS: usize = 200;

/// What ranks of one attempt were last heard to do.
#[derive(Debug)]
pub(crate) struct Watch {
    stall_timeout: Duration,
    /// Those with an open session.
    ranks: BTreeMap<u32, Rank>,
    /// Seconds that the last steps took, of all attempts.
    steps: VecDeque<f64>,
    /// This attempt has made a step.
    stepped: bool,
    /// When the job was last seen to get on.
    moved: Instant,
    looked: Instant,
    pointed_out: BTreeMap<u32, String>,
}

#[derive(Clone, Copy, Debug)]
struct Rank {
    heard: Instant,
    step: u64,
    phase: Phase,
    since: Instant,
}

/// What a look has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// For the user: one line.
    pub(crate) line: String,
    /// For status: what stands out, by rank.
    pub(crate) hints: BTreeMap<u32, String>,
}

impl Watch {
    /// Points ranks out after `silence` without a step, or later where steps take long.
    pub(crate) fn new(stall_timeout: Duration, now: Instant) -> Self {
        Self {
            stall_timeout,
            ranks: BTreeMap::new(),
            steps: VecDeque::new(),
            stepped: false,
            moved: now,
            looked: now,
            pointed_out: BTreeMap::new(),
        }
    }

    /// A new attempt begins.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.ranks.clear();
        self.pointed_out.clear();
        (self.stepped, self.moved, self.looked) = (false, now, now);
    }

    /// A rank has opened its session.
    pub(crate) fn opened(&mut self, rank: u32, now: Instant) {
        self.ranks.insert(rank, Rank { heard: now, step: 0, phase: Phase::Unspecified, since: now });
        self.moved = now;
    }

    /// A rank has closed its session, or ended.
    pub(crate) fn closed(&mut self, rank: u32) {
        self.ranks.remove(&rank);
    }

    /// A rank has said something.
    pub(crate) fn heard(&mut self, rank: u32, report: &Report, now: Instant) {
        let Some(rank) = self.ranks.get_mut(&rank) else { return };
        rank.heard = now;
        match report {
            Report::Heartbeat(beat) => {
                let lasts = Duration::try_from_secs_f64(beat.phase_seconds).unwrap_or_default();
                (rank.step, rank.phase) = (beat.step, beat.phase());
                rank.since = now.checked_sub(lasts).unwrap_or(now);
                return;
            }
            Report::Step(step) => {
                self.stepped = true;
                if self.steps.len() == STEPS {
                    self.steps.pop_front();
                }
                self.steps.push_back(step.step_seconds);
            }
            _ => {}
        }
        self.moved = now;
    }

    /// All processes of the job were stopped, and go on now.
    fn resumed(&mut self, now: Instant) {
        self.moved = now;
        for rank in self.ranks.values_mut() {
            (rank.heard, rank.since) = (now, now);
        }
    }

    /// Looks again; `None` where what stands out, if anything, was told before.
    pub(crate) fn look(&mut self, now: Instant) -> Option<Change> {
        if now.saturating_duration_since(std::mem::replace(&mut self.looked, now)) > LOOKS {
            self.resumed(now);
        }
        let found = self.found(now);
        if found.keys().eq(self.pointed_out.keys()) {
            return None;
        }
        let line = match found.iter().next() {
            None => "steps go on".to_owned(),
            Some((rank, hint)) if found.len() == 1 => format!("rank {rank} may hang: {hint}"),
            Some((_, hint)) => {
                let ranks: Vec<String> = found.keys().map(u32::to_string).collect();
                format!("ranks {} may hang: {hint}", ranks.join(", "))
            }
        };
        self.pointed_out.clone_from(&found);
        Some(Change { line, hints: found })
    }

    /// What stands out, by rank.
    fn found(&self, now: Instant) -> BTreeMap<u32, String> {
        let missed = |rank: &Rank| now.saturating_duration_since(rank.heard);
        let patience = self.stall_timeout.min(HEARTBEATS);
        let all = || self.ranks.iter().map(|(number, rank)| (*number, rank));
        let silent = all().filter(|(_, rank)| missed(rank) > patience);
        let silent: BTreeMap<_, _> = silent
            .map(|(number, rank)| (number, format!("not heard of for {} s", missed(rank).as_secs())))
            .collect();
        let still = now.saturating_duration_since(self.moved);
        if !silent.is_empty() || still <= self.patience() {
            return silent;
        }
        let hint = |(number, rank): (u32, &Rank)| {
            let lasts = now.saturating_duration_since(rank.since).as_secs();
            let (step, phase) = (rank.step + 1, rank.phase.name());
            (number, format!("no step for {} s; in `{phase}` of step {step} for {lasts} s", still.as_secs()))
        };
        let newest = all().map(|(_, rank)| rank.step).max().unwrap_or_default();
        let works = |rank: &Rank| !matches!(rank.phase, Phase::AllReduce | Phase::ReadBack);
        let those = |stands_out: &dyn Fn(&Rank) -> bool| -> BTreeMap<_, _> {
            all().filter(|(_, rank)| stands_out(rank)).map(hint).collect()
        };
        // Where nobody works and nobody is behind, all wait: for the network, or for a GPU.
        let mut groups = [those(&works), those(&|rank| rank.step < newest), those(&|_| true)].into_iter();
        groups.find(|group| !group.is_empty()).unwrap_or_default()
    }

    /// How long the job may take to get on.
    fn patience(&self) -> Duration {
        let between =
            |rank: &Rank| matches!(rank.phase, Phase::Evaluation | Phase::Checkpoint | Phase::Sample);
        if self.ranks.values().any(between) {
            return self.stall_timeout.max(BETWEEN);
        }
        if !self.stepped {
            return self.stall_timeout.max(FIRST);
        }
        let mut steps: Vec<f64> = self.steps.iter().copied().collect();
        steps.sort_by(f64::total_cmp);
        let slow = steps.get(steps.len() * 99 / 100).copied().unwrap_or(0.0);
        self.stall_timeout.max(Duration::try_from_secs_f64(SLOW * slow).unwrap_or(BETWEEN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_proto::v1::{Heartbeat, StepReport};

    /// Three ranks that beat every second, and what was told.
    struct Play {
        watch: Watch,
        start: Instant,
        now: u64,
        phases: [Option<(u64, Phase)>; 3],
        told: Vec<(u64, String)>,
    }

    impl Play {
        fn new() -> Self {
            let start = Instant::now();
            let mut watch = Watch::new(Duration::from_secs(45), start);
            watch.begin(start);
            (0..3).for_each(|rank| watch.opened(rank, start));
            Self { watch, start, now: 0, phases: [Some((0, Phase::Forward)); 3], told: Vec::new() }
        }

        fn at(&self) -> Instant {
            self.start + Duration::from_secs(self.now)
        }

        /// Nobody gets on for so long.
        fn wait(&mut self, seconds: u64) {
            let begin = self.now;
            for _ in 0..seconds {
                self.now += 1;
                for (rank, phase) in (0..).zip(self.phases) {
                    let Some((step, phase)) = phase else { continue };
                    let phase_seconds = f64::from(u32::try_from(self.now - begin).unwrap());
                    let beat = Heartbeat { step, phase: phase.into(), phase_seconds };
                    self.watch.heard(rank, &Report::Heartbeat(beat), self.at());
                }
                self.look();
            }
        }

        fn look(&mut self) {
            if let Some(change) = self.watch.look(self.at()) {
                self.told.push((self.now, change.line));
            }
        }

        /// All make a step that takes so long.
        fn step(&mut self, seconds: u32) {
            self.wait(seconds.into());
            for rank in 0..3 {
                let step = StepReport { step_seconds: seconds.into(), ..StepReport::default() };
                self.watch.heard(rank, &Report::Step(step), self.at());
            }
            self.look();
        }

        fn told(&mut self) -> Vec<(u64, String)> {
            std::mem::take(&mut self.told)
        }
    }

    #[test]
    fn whoever_does_not_wait_for_the_others_holds_them_up() {
        let mut play = Play::new();
        play.step(1);
        play.phases =
            [Some((1, Phase::AllReduce)), Some((1, Phase::WaitForData)), Some((1, Phase::AllReduce))];
        play.wait(120);
        let line = "rank 1 may hang: no step for 46 s; in `wait for data` of step 2 for 46 s";
        assert_eq!(play.told(), [(47, line.to_owned())], "once");
        play.step(1);
        assert_eq!(play.told(), [(122, "steps go on".to_owned())]);
    }

    #[test]
    fn a_rank_that_is_not_heard_of_is_named_soon() {
        let mut play = Play::new();
        play.step(1);
        play.phases[2] = None;
        play.wait(200);
        assert_eq!(play.told(), [(17, "rank 2 may hang: not heard of for 16 s".to_owned())]);
        play.watch.closed(2);
        play.step(1);
        play.wait(40);
        let (_, last) = play.told().pop().unwrap();
        assert_eq!(last, "steps go on", "it has ended");
    }

    #[test]
    fn whoever_is_a_step_behind_is_named_and_all_where_nobody_stands_out() {
        let mut play = Play::new();
        play.step(1);
        play.phases = [(9, Phase::ReadBack), (8, Phase::ReadBack), (9, Phase::AllReduce)].map(Some);
        play.wait(60);
        assert_eq!(play.told()[0].1, "rank 1 may hang: no step for 46 s; in `read back` of step 9 for 46 s");
        play.step(1);
        play.told();
        play.phases = [Some((9, Phase::ReadBack)); 3];
        play.wait(60);
        assert!(play.told()[0].1.starts_with("ranks 0, 1, 2 may hang: no step for 46 s; in `read back`"));
    }

    #[test]
    fn slow_steps_first_steps_and_what_is_done_between_steps_are_no_hangs() {
        let mut play = Play::new();
        play.wait(270);
        assert_eq!(play.told(), [], "kernels are compiled");
        for seconds in [20, 30, 25, 30] {
            play.step(seconds);
        }
        play.wait(119);
        assert_eq!(play.told(), [], "four times 30 s");
        play.wait(2);
        assert_eq!(play.told().len(), 1);
        play.step(1);
        play.told();
        play.phases =
            [Some((9, Phase::Checkpoint)), Some((9, Phase::AllReduce)), Some((9, Phase::AllReduce))];
        play.wait(590);
        assert_eq!(play.told(), [], "a slow disk");
        play.wait(20);
        assert!(play.told()[0].1.starts_with("rank 0 may hang: no step for 601 s; in `checkpoint`"));
    }

    #[test]
    fn a_job_that_was_stopped_by_its_user_does_not_hang() {
        for told_so in [true, false] {
            let mut play = Play::new();
            play.step(1);
            play.now += 1000;
            if told_so {
                play.watch.resumed(play.at());
            }
            play.look();
            play.wait(40);
            assert_eq!(play.told(), []);
        }
    }

    #[test]
    fn a_new_attempt_begins_without_the_last_ones_trouble() {
        let mut play = Play::new();
        play.step(1);
        play.wait(100);
        assert_eq!(play.told().len(), 1);
        play.watch.begin(play.at());
        play.look();
        assert_eq!(play.told(), []);
    }
}
