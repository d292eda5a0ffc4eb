//! Tests which ranks are reported as hung, and when.

use super::*;
use xlaunch_spec::quantities::ranks_text;

/// A monitor that gets heartbeats at given seconds and is polled every second, as by the agent.
struct Run {
    monitor: HeartbeatMonitor,
    start: Instant,
    second: u64,
}

impl Run {
    fn new(timeout: Option<u64>) -> Self {
        let start = Instant::now();
        Self { monitor: HeartbeatMonitor::new(timeout.map(Duration::from_secs), start), start, second: 0 }
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.second)
    }

    /// Advances by a second, in which these ranks have written these steps.
    fn second(&mut self, heartbeats: &[(u32, Option<u64>)]) -> bool {
        self.second += 1;
        let now = self.now();
        for (rank, step) in heartbeats {
            self.monitor.record(*rank, *step, Duration::ZERO, now);
        }
        self.monitor.tick(now);
        self.is_overdue()
    }

    fn is_overdue(&self) -> bool {
        let now = self.now();
        self.monitor.ranks.keys().any(|rank| self.monitor.is_overdue(*rank, now))
    }

    /// Runs the ranks in lockstep from step `first` to step `last`, one step per second.
    fn steps(&mut self, ranks: &[u32], first: u64, last: u64) {
        for step in first..=last {
            let heartbeats: Vec<_> = ranks.iter().map(|rank| (*rank, Some(step))).collect();
            assert!(!self.second(&heartbeats), "step {step}");
        }
    }

    fn silence(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.second(&[]);
        }
    }

    /// Runs without heartbeats until a rank hangs. Returns the number of seconds and the hung ranks.
    fn silence_until_hang(&mut self, stopped: &[u32]) -> (u64, Found) {
        for waited in 1..10_000 {
            let overdue = self.second(&[]);
            let hang = self.monitor.find(&stopped.iter().copied().collect(), self.now());
            if let Some(hang) = hang {
                assert!(overdue);
                return (waited, hang);
            }
        }
        panic!("no hang");
    }
}

#[test]
fn rank_at_the_lowest_step_hangs_and_the_others_wait() {
    let mut run = Run::new(Some(10));
    run.steps(&[0, 1, 2], 1, 5);
    assert!(!run.second(&[(0, Some(6)), (2, Some(6))]));
    let (waited, hang) = run.silence_until_hang(&[]);
    assert_eq!((waited, hang.ranks.as_slice()), (10, &[1][..]));
    assert_eq!(hang.message, "sent no heartbeat for 11 s (step 5); ranks 0, 2 are waiting for it");
    assert_eq!(hang.hints, [(1, "sent no heartbeat for 11 s (step 5)".into())].into());
}

#[test]
fn report_uses_the_given_names_of_hung_ranks() {
    let mut run = Run::new(Some(10));
    run.steps(&[4, 5], 1, 5);
    assert!(!run.second(&[(4, Some(6))]));
    run.silence(10);
    run.second += 1;
    let names = |ranks: &[u32]| format!("h1: {ranks:?}");
    let report = run.monitor.poll(run.now(), BTreeSet::new, names).unwrap();
    assert_eq!(report.message, "h1: [5] sent no heartbeat for 12 s (step 5); rank 4 is waiting for it");
    assert_eq!(report.hang.unwrap().culprits, [5]);
}

#[test]
fn steps_of_other_nodes_are_compared_and_are_not_progress_of_this_one() {
    let mut run = Run::new(Some(10));
    run.steps(&[0], 1, 5);
    run.monitor.record_remote(2, Some(6), Duration::ZERO, run.now());
    run.second += 1;
    let now = run.now();
    assert!(run.monitor.record(0, Some(6), Duration::ZERO, now));
    run.monitor.record_remote(3, Some(5), Duration::ZERO, now);
    let (_, hang) = run.silence_until_hang(&[]);
    assert_eq!(hang.message, "sent no heartbeat for 11 s (step 5); ranks 0, 2 are waiting for it");
    assert_eq!(hang.ranks, [3]);
}

#[test]
fn ranks_that_fell_silent_in_the_same_step_are_all_named() {
    let mut run = Run::new(Some(10));
    run.steps(&[0, 1], 1, 5);
    let (_, hang) = run.silence_until_hang(&[]);
    assert_eq!(
        (hang.ranks.as_slice(), hang.message.as_str()),
        (&[0, 1][..], "sent no heartbeat for 11 s (step 5)")
    );
}

#[test]
fn without_steps_the_rank_that_is_silent_for_longest_hangs() {
    let mut run = Run::new(Some(20));
    (0..5).for_each(|_| assert!(!run.second(&[(0, None), (1, None)])));
    (0..9).for_each(|_| assert!(!run.second(&[(0, None)])));
    let (waited, hang) = run.silence_until_hang(&[]);
    assert_eq!((waited, hang.ranks.as_slice()), (12, &[1][..]));
    assert_eq!(hang.message, "sent no heartbeat for 21 s; rank 0 is waiting for it");
}

#[test]
fn ranks_that_wait_for_a_slow_rank_do_not_hang() {
    let mut run = Run::new(Some(5));
    run.steps(&[0, 1], 1, 3);
    run.second(&[(0, Some(4))]);
    for _ in 0..60 {
        run.second(&[(1, Some(3))]);
        assert_eq!(run.monitor.find(&BTreeSet::new(), run.now()), None);
    }
}

#[test]
fn stopped_process_is_the_culprit_at_any_step() {
    let mut run = Run::new(Some(5));
    run.steps(&[0, 1], 1, 3);
    run.second(&[(1, Some(4))]);
    let (_, hang) = run.silence_until_hang(&[1]);
    assert_eq!(hang.ranks, [1], "rank 0 is overdue first, but it waits");
    let message = "sent no heartbeat for 5 s (step 4); its process is stopped; rank 0 is waiting for it";
    assert_eq!(hang.message, message);
}

#[test]
fn default_timeout_is_a_minute_or_five_slow_intervals() {
    let mut run = Run::new(None);
    run.steps(&[0], 1, 10);
    assert_eq!(run.silence_until_hang(&[]).0, 61);
    for step in 11..30 {
        run.silence(29);
        run.second(&[(0, Some(step))]);
    }
    assert_eq!(run.silence_until_hang(&[]).0, 5 * 91 + 1, "the longest interval was 91 s");
}

#[test]
fn first_heartbeats_get_five_minutes() {
    for (count, timeout) in [(1, 300), (2, 300), (3, 60)] {
        let mut run = Run::new(None);
        run.steps(&[0], 1, count);
        assert_eq!(run.silence_until_hang(&[]).0, timeout + 1, "after {count} heartbeats");
    }
}

#[test]
fn ranks_without_heartbeats_never_hang_and_zero_turns_detection_off() {
    for timeout in [Some(5), None] {
        let mut run = Run::new(timeout);
        assert!((0..2000).all(|_| !run.second(&[])));
    }
    let mut run = Run::new(Some(0));
    run.steps(&[0], 1, 5);
    assert!((0..100_000).all(|_| !run.second(&[])));
}

#[test]
fn rank_that_has_exited_or_removed_its_file_does_not_hang() {
    let mut run = Run::new(Some(5));
    run.steps(&[0, 1], 1, 3);
    run.monitor.remove(1);
    assert_eq!(run.silence_until_hang(&[1]).1.ranks, [0]);
    run.monitor.remove(0);
    assert!(!run.second(&[]));
    assert_eq!(run.monitor.step(), None);
}

#[test]
fn suspended_agent_does_not_count() {
    let mut run = Run::new(Some(30));
    run.steps(&[0], 1, 3);
    run.silence(20);
    run.second += 3600;
    assert!(!run.second(&[]));
    let (waited, hang) = run.silence_until_hang(&[]);
    assert_eq!((waited, hang.message.as_str()), (11, "sent no heartbeat for 31 s (step 3)"));
}

#[test]
fn age_of_a_file_cannot_exceed_the_time_since_the_last_poll() {
    let mut run = Run::new(Some(10));
    run.steps(&[0], 1, 3);
    run.second += 1;
    let now = run.now();
    run.monitor.record(0, Some(4), Duration::from_secs(86_400), now);
    run.monitor.tick(now);
    assert!(!run.is_overdue());
    assert_eq!(run.silence_until_hang(&[]).0, 10, "the clock of the file system is ignored");
}

#[test]
fn step_of_the_job_is_the_lowest_and_a_touch_keeps_it() {
    let mut run = Run::new(None);
    run.second(&[(0, Some(7)), (1, Some(9)), (2, None)]);
    assert_eq!(run.monitor.step(), Some(7));
    run.second(&[(0, None)]);
    assert_eq!(run.monitor.step(), Some(7));
}

#[test]
fn intervals_of_the_last_attempt_are_remembered() {
    let mut run = Run::new(None);
    for step in 1..=5 {
        run.silence(39);
        run.second(&[(0, Some(step))]);
    }
    run.monitor.begin_attempt(run.now());
    assert!((0..1000).all(|_| !run.second(&[])), "no heartbeat in this attempt");
    run.steps(&[0], 1, 5);
    assert_eq!(run.silence_until_hang(&[]).0, 5 * 40 + 1);
}

#[test]
fn step_beyond_the_furthest_of_all_attempts_is_progress() {
    let mut run = Run::new(None);
    let mut beat = |rank, step| {
        let now = run.now();
        run.monitor.record(rank, step, Duration::ZERO, now)
    };
    assert!(beat(0, None) && beat(0, None), "no rank has written a step");
    assert!(beat(1, Some(0)) && beat(0, Some(4)) && !beat(1, Some(3)) && !beat(1, Some(4)));
    assert!(!beat(0, None), "a touch of a job that writes steps");
    run.monitor.begin_attempt(run.now());
    let now = run.now();
    let mut beat = |step| run.monitor.record(0, Some(step), Duration::ZERO, now);
    assert!(!beat(3) && !beat(4) && beat(5));
}

#[test]
fn hang_is_reported_once_and_lasts_until_heartbeats_continue() {
    let mut run = Run::new(Some(10));
    run.steps(&[0, 1], 1, 3);
    run.second(&[(0, Some(4))]);
    let mut reports = Vec::new();
    for second in 0..40 {
        run.second += 1;
        let now = run.now();
        if second == 30 {
            run.monitor.record(1, Some(4), Duration::ZERO, now);
            run.monitor.record(0, Some(5), Duration::ZERO, now);
        }
        reports.extend(run.monitor.poll(now, BTreeSet::new, |ranks| ranks_text(ranks)));
        if let [HangReport { hang: Some(hang), .. }] = &reports[..] {
            assert!(run.monitor.lasts(hang) && run.monitor.reported().contains(&1));
        }
    }
    let [HangReport { hang: Some(hang), message, .. }, over] = &reports[..] else { panic!("{reports:?}") };
    assert_eq!(message, "rank 1 sent no heartbeat for 11 s (step 3); rank 0 is waiting for it");
    assert_eq!((hang.culprits.as_slice(), hang.ends), (&[1][..], true));
    assert_eq!((over.message.as_str(), &over.hang), ("heartbeats continue", &None));
    assert!(!run.monitor.lasts(hang) && run.monitor.reported().is_empty());
}
