use super::*;
use xlaunch_proto::v1::{EvalReport, Heartbeat, StepReport};

/// Three ranks that send a heartbeat every second, polled every second, and the messages with their times.
struct Simulation {
    detector: HangDetector,
    start: Instant,
    seconds: u64,
    /// `None`: the rank sends nothing.
    ranks: [Option<(u64, Phase)>; 3],
    messages: Vec<(u64, String)>,
}

impl Simulation {
    fn new() -> Self {
        Self::with_timeout(45)
    }

    fn with_timeout(stall_timeout: u64) -> Self {
        let start = Instant::now();
        let mut detector = HangDetector::new(Duration::from_secs(stall_timeout), start);
        detector.begin_attempt(start);
        (0..3).for_each(|rank| detector.session_opened(rank, start));
        Self { detector, start, seconds: 0, ranks: [Some((0, Phase::Forward)); 3], messages: Vec::new() }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.seconds)
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.seconds += 1;
            for (rank, state) in (0..).zip(self.ranks) {
                let Some((step, phase)) = state else { continue };
                let heartbeat = Heartbeat { step, phase: phase.into(), ..Heartbeat::default() };
                self.detector.record(rank, &Report::Heartbeat(heartbeat), self.now());
            }
            self.poll();
        }
    }

    fn poll(&mut self) {
        if let Some(report) = self.detector.poll(self.now()) {
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
    let report = job.detector.poll(job.now() + Duration::from_secs(1)).unwrap();
    let message = "ranks 0, 2 made no progress for 46 s (phase: forward, step 9); rank 1 is waiting for them";
    assert_eq!(report.message, message);
    let hints = [(0, "forward"), (2, "backward")]
        .map(|(rank, phase)| (rank, format!("no progress for 46 s (phase: {phase}, step 9)")));
    assert_eq!(report.rank_hints, hints.into());
}

#[test]
fn rank_without_heartbeats_is_reported_before_the_stall_timeout() {
    let mut job = Simulation::new();
    job.step(1);
    job.ranks[2] = None;
    job.run(200);
    let message = "rank 2 sent no heartbeat for 16 s; ranks 0-1 are waiting for it";
    assert_eq!(job.messages(), [(17, message.to_owned())]);
    job.detector.session_closed(2);
    job.step(1);
    job.run(40);
    assert_eq!(job.messages().pop().unwrap().1, "steps continue", "a rank that has exited is no culprit");
}

#[test]
fn heartbeat_timeout_is_exclusive_and_never_longer_than_the_stall_timeout() {
    for (stall_timeout, limit) in [(45, HEARTBEAT_TIMEOUT), (3, Duration::from_secs(3))] {
        let start = Instant::now();
        let mut detector = HangDetector::new(Duration::from_secs(stall_timeout), start);
        detector.session_opened(0, start);
        // Polls in between: a gap would count as a suspended agent.
        for second in 1..=limit.as_secs() {
            assert_eq!(detector.poll(start + Duration::from_secs(second)), None);
        }
        let report = detector.poll(start + limit + Duration::from_millis(1)).unwrap();
        assert_eq!(report.message, format!("rank 0 sent no heartbeat for {} s", limit.as_secs()));
        assert_eq!(report.rank_hints[&0], format!("no heartbeat for {} s", limit.as_secs()));
    }
}

#[test]
fn message_names_the_longest_of_several_heartbeat_gaps() {
    let mut job = Simulation::new();
    job.ranks[1] = None;
    job.run(5);
    job.ranks[0] = None;
    job.run(10);
    job.detector.session_closed(2);
    job.poll();
    assert_eq!(job.messages(), []);
    // Both expire between two polls: the first message is about both.
    let report = job.detector.poll(job.now() + Duration::from_secs(5)).map(|report| report.message);
    assert_eq!(report.unwrap(), "rank 1 sent no heartbeat for 20 s; rank 0 is waiting for it");
    let report = job.detector.poll(job.now() + Duration::from_secs(6)).unwrap();
    let all = "ranks 0-1 sent no heartbeat for 21 s; all ranks are waiting: check the network and the GPUs";
    assert_eq!(report.message, all);
    assert_eq!(report.rank_hints[&0], "no heartbeat for 16 s");
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
fn stall_timeout_is_exclusive() {
    let start = Instant::now();
    let mut detector = HangDetector::new(Duration::from_secs(10), start);
    detector.session_opened(0, start);
    detector.record(0, &step_report(1.0), start);
    let heartbeat = |detector: &mut HangDetector, now| {
        detector.record(0, &Report::Heartbeat(Heartbeat { step: 1, ..Heartbeat::default() }), now);
        detector.poll(now)
    };
    for second in 1..=10 {
        assert_eq!(heartbeat(&mut detector, start + Duration::from_secs(second)), None);
    }
    let report = heartbeat(&mut detector, start + Duration::from_millis(10_001)).unwrap();
    assert_eq!(report.message, "rank 0 made no progress for 10 s (phase: between phases, step 2)");
}

#[test]
fn first_step_may_take_five_minutes_in_every_attempt() {
    let mut job = Simulation::new();
    for attempt in 0..2 {
        job.run(300);
        assert_eq!(job.messages(), [], "attempt {attempt}: kernels are compiled");
        job.run(1);
        assert_eq!(job.messages().len(), 1);
        job.detector.record(1, &step_report(1.0), job.now());
        job.run(46);
        assert_eq!(job.messages().len(), 2, "recovery, then a stall by the normal timeout");
        job.detector.begin_attempt(job.now());
        (0..3).for_each(|rank| job.detector.session_opened(rank, job.now()));
    }
}

#[test]
fn work_between_steps_may_take_ten_minutes() {
    for phase in [Phase::Evaluation, Phase::Checkpoint, Phase::Sample] {
        let mut job = Simulation::new();
        job.step(1);
        job.ranks = [(9, phase), (9, Phase::AllReduce), (9, Phase::AllReduce)].map(Some);
        job.run(600);
        assert_eq!(job.messages(), [], "{phase:?}");
        job.run(1);
        let place = format!("rank 0 made no progress for 601 s (phase: {}, step 10)", phase.name());
        assert!(job.messages()[0].1.starts_with(&place));
    }
}

#[test]
fn a_longer_stall_timeout_overrides_the_minimums() {
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
fn timeout_is_four_times_the_slowest_recent_step() {
    let mut job = Simulation::new();
    for seconds in [20, 30, 25, 30] {
        job.step(seconds);
    }
    job.run(120);
    assert_eq!(job.messages(), []);
    job.run(1);
    assert_eq!(job.messages().len(), 1);
}

#[test]
fn step_history_holds_200_steps_of_rank_0() {
    let now = Instant::now();
    let mut detector = HangDetector::new(Duration::from_secs(1), now);
    (0..2).for_each(|rank| detector.session_opened(rank, now));
    detector.record(1, &step_report(500.0), now);
    assert_eq!(detector.progress_timeout(), Duration::from_secs(1), "only rank 0 counts");
    // The 99th percentile of 200 is the second slowest.
    (0..2).for_each(|_| detector.record(0, &step_report(100.0), now));
    (0..STEP_HISTORY - 2).for_each(|_| detector.record(0, &step_report(2.0), now));
    assert_eq!(detector.step_seconds.len(), STEP_HISTORY);
    assert_eq!(detector.progress_timeout(), Duration::from_secs(400));
    detector.record(0, &step_report(2.0), now);
    assert_eq!(detector.step_seconds.len(), STEP_HISTORY);
    assert_eq!(detector.progress_timeout(), Duration::from_secs(8), "one slow step in 200 is an outlier");
    (0..STEP_HISTORY).for_each(|_| detector.record(0, &step_report(f64::NAN), now));
    assert_eq!(detector.progress_timeout(), BETWEEN_STEPS_TIMEOUT, "no usable number");
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
fn a_poll_gap_of_exactly_the_limit_is_no_suspension() {
    for (gap, reports) in [(AGENT_SUSPENDED_AFTER, 1), (AGENT_SUSPENDED_AFTER + Duration::from_millis(1), 0)]
    {
        let mut job = Simulation::new();
        job.ranks = [None; 3];
        job.run(12);
        let report = job.detector.poll(job.now() + gap);
        assert_eq!(report.iter().count(), reports, "{gap:?}");
    }
}

#[test]
fn new_attempt_starts_without_the_last_ones_culprits() {
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
    let mut detector = HangDetector::new(Duration::from_secs(1), now);
    detector.record(0, &step_report(9.0), now);
    assert!(detector.step_seconds.is_empty() && !detector.stepped);
}

#[test]
fn rank_lists_are_compressed_to_ranges() {
    let text = |ranks: &[u32]| ranks_text(ranks);
    assert_eq!(text(&[3]), "rank 3");
    assert_eq!(text(&[0, 1, 2]), "ranks 0-2");
    assert_eq!(text(&[0, 2, 3, 9]), "ranks 0, 2-3, 9");
}
