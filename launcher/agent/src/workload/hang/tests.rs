use super::super::recent::RECENT_HISTORY;
use super::*;
use xlaunch_proto::v1::{EvalReport, Heartbeat, StepReport};

/// Simulates three ranks that send a heartbeat every second and a detector that is polled every second. Records the
/// messages with their times.
struct Simulation {
    detector: HangDetector,
    start: Instant,
    seconds: u64,
    /// Step and phase of each rank; `None` if it sends nothing.
    ranks: [Option<(u64, Phase)>; 3],
    /// Number of collectives that each rank has started.
    collectives: [u64; 3],
    marks: [u64; 3],
    /// Progress counter of each rank between steps.
    progress: [u64; 3],
    /// Ranks whose process is stopped.
    stopped: Vec<u32>,
    messages: Vec<(u64, String)>,
}

impl Simulation {
    fn new() -> Self {
        Self::with_timeout(45)
    }

    fn with_timeout(minimum: u64) -> Self {
        Self::with(settings(minimum))
    }

    fn with(settings: Settings) -> Self {
        let start = Instant::now();
        let mut detector = HangDetector::new(settings, start);
        detector.begin_attempt(start);
        (0..3).for_each(|rank| detector.session_opened(rank, start));
        Self {
            detector,
            start,
            seconds: 0,
            ranks: [Some((0, Phase::Forward)); 3],
            collectives: [0; 3],
            marks: [0; 3],
            progress: [0; 3],
            stopped: Vec::new(),
            messages: Vec::new(),
        }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.seconds)
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.seconds += 1;
            for (rank, state) in (0..).zip(self.ranks) {
                let Some((step, phase)) = state else { continue };
                let (collectives, progress) = (self.collectives[rank as usize], self.progress[rank as usize]);
                let phase_seconds = 0.0;
                let marks = self.marks[rank as usize];
                let heartbeat =
                    Heartbeat { step, phase: phase.into(), phase_seconds, progress, collectives, marks };
                self.detector.record(rank, &Report::Heartbeat(heartbeat), self.now());
            }
            self.poll();
        }
    }

    fn poll(&mut self) {
        if let Some(report) = self.detector.poll(self.now(), |rank| self.stopped.contains(&rank)) {
            self.messages.push((self.seconds, report.message));
        }
    }

    /// All ranks complete a step that takes this long.
    fn step(&mut self, seconds: u32) {
        self.run(seconds.into());
        for rank in 0..3 {
            let step = StepReport { step_seconds: seconds.into(), ..StepReport::default() };
            self.detector.record(rank, &Report::Step(step), self.now());
        }
        self.poll();
    }

    fn messages(&mut self) -> Vec<(u64, String)> {
        std::mem::take(&mut self.messages)
    }
}

fn settings(minimum: u64) -> Settings {
    Settings { minimum: Duration::from_secs(minimum), ends: true, gpus: true }
}

fn not_stopped(_: u32) -> bool {
    false
}

fn step_report(step_seconds: f64) -> Report {
    Report::Step(StepReport { step_seconds, ..StepReport::default() })
}

#[test]
fn rank_in_its_own_phase_is_the_culprit_and_reported_once_until_recovery() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [(1, Phase::AllReduce), (1, Phase::WaitForData), (1, Phase::AllReduce)].map(Some);
    job.run(120);
    let message =
        "rank 1 made no progress for 46 s (phase: wait for data, step 2); ranks 0, 2 are waiting for it";
    assert_eq!(job.messages(), [(47, message.to_owned())]);
    job.step(1);
    assert_eq!(job.messages(), [(122, "steps continue".to_owned())]);
}

#[test]
fn report_carries_a_hint_for_each_culprit() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [(8, Phase::Forward), (8, Phase::AllReduce), (8, Phase::Backward)].map(Some);
    job.run(45);
    let report = job.detector.poll(job.now() + Duration::from_secs(1), not_stopped).unwrap();
    let message = "ranks 0, 2 made no progress for 46 s (phase: forward, step 9); rank 1 is waiting for them";
    assert_eq!(report.message, message);
    let hints = [(0, "forward"), (2, "backward")]
        .map(|(rank, phase)| (rank, format!("no progress for 46 s (phase: {phase}, step 9)")));
    assert_eq!(report.rank_hints, hints.into());
}

#[test]
fn rank_a_step_behind_is_the_culprit_and_all_ranks_if_none_differs() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [(9, Phase::ReadBack), (8, Phase::ReadBack), (9, Phase::AllReduce)].map(Some);
    job.run(60);
    let message =
        "rank 1 made no progress for 46 s (phase: read back, step 9); ranks 0, 2 are waiting for it";
    assert_eq!(job.messages()[0].1, message);
    job.step(1);
    job.messages();
    job.ranks = [Some((9, Phase::ReadBack)); 3];
    job.run(60);
    let message = "ranks 0-2 made no progress for 46 s (phase: read back, step 10); \
                   all ranks are waiting: check the network and the GPUs";
    assert_eq!(job.messages()[0].1, message);
}

#[test]
fn hang_timeout_is_exclusive() {
    let start = Instant::now();
    let mut detector = HangDetector::new(settings(10), start);
    detector.session_opened(0, start);
    detector.record(0, &step_report(1.0), start);
    let heartbeat = |detector: &mut HangDetector, now| {
        detector.record(0, &Report::Heartbeat(Heartbeat { step: 1, ..Heartbeat::default() }), now);
        detector.poll(now, not_stopped)
    };
    for second in 1..=10 {
        assert_eq!(heartbeat(&mut detector, start + Duration::from_secs(second)), None);
    }
    let report = heartbeat(&mut detector, start + Duration::from_millis(10_001)).unwrap();
    assert_eq!(report.message, "rank 0 made no progress for 10 s (phase: between phases, step 2)");
}

#[test]
fn step_history_holds_200_steps_of_rank_0() {
    let now = Instant::now();
    let mut detector = HangDetector::new(settings(1), now);
    (0..2).for_each(|rank| detector.session_opened(rank, now));
    detector.record(1, &step_report(500.0), now);
    assert_eq!(detector.timeout(), Duration::from_secs(1), "only rank 0 counts");
    // The 99th percentile of 200 is the second slowest.
    (0..2).for_each(|_| detector.record(0, &step_report(100.0), now));
    (0..RECENT_HISTORY - 2).for_each(|_| detector.record(0, &step_report(2.0), now));
    assert_eq!(detector.timeout(), Duration::from_secs(500));
    detector.record(0, &step_report(2.0), now);
    assert_eq!(detector.timeout(), Duration::from_secs(10), "one slow step in 200 is an outlier");
    (0..RECENT_HISTORY).for_each(|_| detector.record(0, &step_report(f64::NAN), now));
    assert_eq!(detector.timeout(), CHECKPOINT_TIMEOUT, "no usable number");
}

#[test]
fn time_in_which_the_agent_was_suspended_does_not_count() {
    let mut job = Simulation::new();
    job.step(1);
    job.seconds += 1000;
    job.poll();
    job.run(45);
    assert_eq!(job.messages(), []);
    job.run(1);
    assert_eq!(job.messages().len(), 1, "the clock restarted at the first poll");
}

#[test]
fn new_attempt_starts_without_earlier_culprits() {
    let mut job = Simulation::new();
    job.step(1);
    job.run(100);
    assert_eq!(job.messages().len(), 1);
    job.detector.begin_attempt(job.now());
    job.poll();
    assert_eq!(job.messages(), []);
}

#[test]
fn reports_of_a_rank_without_a_session_are_ignored() {
    let now = Instant::now();
    let mut detector = HangDetector::new(settings(1), now);
    detector.record(0, &step_report(9.0), now);
    assert!(detector.step_times.slow().is_zero() && !detector.stepped);
}

#[test]
fn stopped_process_is_the_culprit_after_the_heartbeat_timeout() {
    let mut job = Simulation::new();
    job.step(1);
    (job.ranks[2], job.stopped) = (None, vec![2]);
    job.run(200);
    let message = "rank 2 is stopped and sent no heartbeat for 16 s; ranks 0-1 are waiting for it";
    assert_eq!(job.messages(), [(17, message.to_owned())]);
    job.detector.session_closed(2);
    job.step(1);
    job.run(40);
    assert_eq!(job.messages().pop().unwrap().1, "steps continue", "a rank that has exited is no culprit");
}

#[test]
fn rank_that_is_overloaded_but_not_stopped_gets_the_hang_timeout() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [Some((1, Phase::AllReduce)), None, Some((1, Phase::AllReduce))];
    job.run(60);
    let message = "rank 1 sent no heartbeat for 46 s (phase: forward, step 1); ranks 0, 2 are waiting for it";
    assert_eq!(job.messages(), [(47, message.to_owned())]);
}

#[test]
fn heartbeat_timeout_is_exclusive_and_never_longer_than_the_hang_timeout() {
    for (minimum, limit) in [(45, HEARTBEAT_TIMEOUT), (3, Duration::from_secs(3))] {
        let start = Instant::now();
        let mut detector = HangDetector::new(settings(minimum), start);
        detector.session_opened(0, start);
        // Polls in between: a gap would count as a suspended agent.
        for second in 1..=limit.as_secs() {
            assert_eq!(detector.poll(start + Duration::from_secs(second), |_| true), None);
        }
        let report = detector.poll(start + limit + Duration::from_millis(1), |_| true).unwrap();
        let seconds = limit.as_secs();
        assert_eq!(report.message, format!("rank 0 is stopped and sent no heartbeat for {seconds} s"));
        assert_eq!(report.rank_hints[&0], format!("stopped, no heartbeat for {seconds} s"));
    }
}

#[test]
fn rank_that_skipped_a_collective_is_the_culprit() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [Some((1, Phase::AllReduce)); 3];
    job.collectives = [12, 12, 11];
    job.run(60);
    let message =
        "rank 2 made no progress for 46 s (phase: all-reduce, step 2); ranks 0-1 are waiting for it";
    assert_eq!(job.messages(), [(47, message.to_owned())]);
}

#[test]
fn rank_whose_gpu_hangs_is_the_culprit_though_all_hosts_wait() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [Some((1, Phase::ReadBack)); 3];
    (job.collectives, job.marks) = ([12; 3], [4, 3, 4]);
    job.run(60);
    let message =
        "rank 1 made no progress for 46 s (phase: read back, step 2); ranks 0, 2 are waiting for it";
    assert_eq!(job.messages(), [(47, message.to_owned())]);
}

#[test]
fn evaluation_waits_for_the_rank_with_fewer_collectives() {
    let mut job = Simulation::with(Settings { gpus: false, ..settings(45) });
    job.step(1);
    job.ranks = [Some((1, Phase::Evaluation)); 3];
    job.collectives = [5, 4, 5];
    job.run(60);
    assert!(job.messages()[0].1.starts_with("rank 1 made no progress for 46 s (phase: evaluation"));
}

#[test]
fn hang_describes_the_first_culprit_and_lasts_until_a_change() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks = [(1, Phase::Forward), (1, Phase::AllReduce), (1, Phase::Backward)].map(Some);
    job.run(45);
    let hang = job.detector.poll(job.now() + Duration::from_secs(1), not_stopped).unwrap().hang.unwrap();
    assert_eq!((&hang.culprits[..], hang.ends), (&[0, 2][..], true));
    let cause = "no progress for 46 s (phase: forward, step 2); rank 1 is waiting for them";
    assert_eq!(hang.cause, cause);
    assert!(job.detector.lasts(&hang));
    job.run(3);
    assert!(job.detector.lasts(&hang), "it goes on as before");
    job.step(1);
    assert!(!job.detector.lasts(&hang), "steps continue");
    job.ranks[1] = Some((1, Phase::Forward));
    job.run(60);
    assert!(!job.detector.lasts(&hang), "another hang");
}

#[test]
fn hang_is_only_reported_if_the_job_says_so() {
    let mut job = Simulation::with(Settings { ends: false, ..settings(45) });
    job.step(1);
    job.run(45);
    let report = job.detector.poll(job.now() + Duration::from_secs(1), not_stopped).unwrap();
    assert!(!report.hang.unwrap().ends);
}

#[test]
fn rank_that_does_not_open_its_session_is_ended_if_it_is_stopped_or_the_others_have() {
    let start = Instant::now();
    let waits = "; rank 0 is waiting for it";
    let late = "joined 21 s ago and has not opened the communicator";
    for (opened, stopped, second, ends, message) in [
        (true, true, 16, true, format!("rank 1 is stopped and sent no heartbeat for 16 s{waits}")),
        (true, false, 21, true, format!("rank 1 {late}{waits}")),
        (false, true, 16, true, format!("rank 1 is stopped and sent no heartbeat for 16 s{waits}")),
        (
            false,
            false,
            21,
            false,
            "ranks 0-1 joined 21 s ago and have not opened the communicator; all ranks are waiting: check the \
             network and the GPUs"
                .into(),
        ),
    ] {
        let mut detector = HangDetector::new(settings(20), start);
        detector.begin_attempt(start);
        detector.all_joined(2, start);
        if opened {
            detector.session_opened(0, start);
        }
        let mut reports = Vec::new();
        for second in 1..40 {
            let now = start + Duration::from_secs(second);
            if opened {
                detector.record(0, &Report::Heartbeat(Heartbeat::default()), now);
            }
            reports.extend(detector.poll(now, |rank| stopped && rank == 1).map(|report| (second, report)));
        }
        let (at, report) = &reports[0];
        assert_eq!((*at, report.message.as_str()), (second, message.as_str()));
        assert_eq!((report.hang.as_ref().unwrap().ends, reports.len()), (ends, 1));
    }
}

#[test]
fn rank_stuck_in_initialization_is_the_culprit_unless_it_makes_progress() {
    let mut job = Simulation::with(Settings { gpus: false, ..settings(45) });
    job.ranks = [(0, Phase::AllReduce), (0, Phase::Initialize), (0, Phase::AllReduce)].map(Some);
    for _ in 0..10 {
        job.run(40);
        job.progress[1] += 1;
    }
    assert_eq!(job.messages(), [], "it reads a checkpoint");
    job.run(60);
    assert!(job.messages()[0].1.starts_with("rank 1 made no progress for 46 s (phase: initialize, step 1)"));
}

#[test]
fn progress_of_a_checkpoint_in_the_background_does_not_hide_a_hang() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks[1] = Some((1, Phase::Backward));
    for _ in 0..60 {
        job.run(1);
        job.progress[0] += 1;
    }
    assert_eq!(job.messages().len(), 1);
}

#[test]
fn evaluation_and_checkpoints_with_progress_are_not_hangs() {
    for (phase, limit) in [(Phase::Evaluation, 300), (Phase::Sample, 300), (Phase::Checkpoint, 600)] {
        let mut job = Simulation::new();
        job.step(1);
        job.ranks = [(9, phase), (9, Phase::AllReduce), (9, Phase::AllReduce)].map(Some);
        for _ in 0..5 {
            job.run(limit - 1);
            job.progress[0] += 1;
        }
        assert_eq!(job.messages(), [], "{phase:?}");
        job.run(limit + 2);
        let place = format!("(phase: {}, step 10)", phase.label());
        let message = &job.messages()[0].1;
        assert!(message.starts_with("rank 0 made no progress for ") && message.contains(&place), "{message}");
    }
}

#[test]
fn first_step_on_gpus_may_take_five_minutes_in_every_attempt() {
    let mut job = Simulation::new();
    for attempt in 0..2 {
        job.run(300);
        assert_eq!(job.messages(), [], "attempt {attempt}: kernels are compiled");
        job.run(1);
        assert_eq!(job.messages().len(), 1);
        job.detector.record(1, &step_report(1.0), job.now());
        job.run(46);
        assert_eq!(job.messages().len(), 2, "recovery, then a hang by the normal timeout");
        job.detector.begin_attempt(job.now());
        (0..3).for_each(|rank| job.detector.session_opened(rank, job.now()));
    }
}

#[test]
fn timeout_is_sixty_seconds_by_default_and_five_times_the_slow_steps() {
    let mut job = Simulation::with_timeout(0);
    job.step(1);
    job.run(60);
    assert_eq!(job.messages(), []);
    job.run(1);
    assert_eq!(job.messages().len(), 1);
    let mut job = Simulation::new();
    for seconds in [20, 30, 25, 30] {
        job.step(seconds);
    }
    job.run(150);
    assert_eq!(job.messages(), []);
    job.run(1);
    assert_eq!(job.messages().len(), 1);
}

#[test]
fn longer_hang_timeout_overrides_the_minimums() {
    let mut job = Simulation::with_timeout(1000);
    job.run(1000);
    job.ranks[0] = Some((0, Phase::Checkpoint));
    assert_eq!(job.messages(), [], "first step");
    job.detector.record(0, &Report::Eval(EvalReport::default()), job.now());
    job.run(1000);
    assert_eq!(job.messages(), [], "between steps");
    job.run(1);
    assert_eq!(job.messages().len(), 1);
}

#[test]
fn poll_gap_of_exactly_the_limit_is_not_a_suspension() {
    for (gap, reports) in [(AGENT_SUSPENDED_AFTER, 1), (AGENT_SUSPENDED_AFTER + Duration::from_millis(1), 0)]
    {
        let mut job = Simulation::new();
        job.ranks = [None; 3];
        job.run(12);
        let report = job.detector.poll(job.now() + gap, |_| true);
        assert_eq!(report.iter().count(), reports, "{gap:?}");
    }
}
