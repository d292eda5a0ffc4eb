//! The restart policy: decides whether and when another attempt follows a failed one. Pure.
//!
//! A failed attempt is the last one if, checked in this order,
//! 1. its exit code is final: the next attempt would end in the same way;
//! 2. the parameters on a device differed from those of other ranks for the second time;
//! 3. the budget is spent: `max_restarts` over the whole job, as with torchrun, or within `restart_window`;
//! 4. it was a trainer's last of [`MAX_FRUITLESS_ATTEMPTS`] consecutive attempts without progress, however long each
//!    one took. Too little is known of a command's progress to withhold restarts that its user asked for.
//!
//! The next attempt starts at once after progress: a job that advances between failures is worth restarting. After a
//! first attempt without progress the next one starts at once too; later ones wait for [`RETRY_DELAY`] plus up to a
//! quarter, so that jobs that failed together do not restart together.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::NodeEnded;
use xlaunch_spec::command::Restarts;

/// Number of consecutive attempts without progress that ends a training job.
const MAX_FRUITLESS_ATTEMPTS: u32 = 3;
/// Delay after the second of such attempts and later ones, without jitter.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The consequence of a failed attempt.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Restart {
        delay: Duration,
        /// Number of this restart within the window, from 1; `None` if it is not counted.
        number: Option<u32>,
    },
    /// The job ends. Holds the reason, unless it is obvious.
    Final(Option<String>),
}

#[derive(Debug)]
pub struct Policy {
    restarts: Restarts,
    is_trainer: bool,
    seed: u64,
    /// Times of the restarts within the window, oldest first; of all restarts if there is no window.
    recent: VecDeque<Instant>,
    /// Number of consecutive attempts without progress.
    fruitless: u32,
    /// Devices whose parameters have differed.
    differed: BTreeSet<String>,
}

impl Policy {
    pub fn new(restarts: Restarts, is_trainer: bool, seed: u64) -> Self {
        let (recent, differed) = (VecDeque::new(), BTreeSet::new());
        Self { restarts, is_trainer, seed, recent, fruitless: 0, differed }
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns whether failures are followed by restarts at all.
    pub fn has_budget(&self) -> bool {
        self.restarts.most > 0
    }

    /// Number of consecutive attempts without progress, including the one decided on last.
    pub fn fruitless(&self) -> u32 {
        self.fruitless
    }

    /// Text of the budget, to follow the number of a restart: `of 3`, or `of 3 within 3600 s`.
    pub fn budget_text(&self) -> String {
        format!("of {}{}", self.restarts.most, self.window_text())
    }

    /// Decides on the next step after an attempt that ended like this on all nodes together, and counts a restart.
    pub fn decide(&mut self, ended: &NodeEnded, now: Instant) -> Decision {
        let code = ended.root.as_ref().and_then(|root| root.code);
        if code.is_some_and(|code| self.restarts.free.contains(&code)) {
            return Decision::Restart { delay: Duration::ZERO, number: None };
        }
        if !self.has_budget() {
            return Decision::Final(None);
        }
        self.fruitless = if ended.progressed { 0 } else { self.fruitless + 1 };
        if let Some(reason) = self.is_final(ended).or_else(|| self.is_spent(now)) {
            return Decision::Final(Some(reason));
        }
        self.differed.extend(ended.differing.iter().cloned());
        self.recent.push_back(now);
        let delay = match self.fruitless {
            0 | 1 => Duration::ZERO,
            _ => RETRY_DELAY.mul_f64(1.0 + self.jitter() / 4.0),
        };
        Decision::Restart { delay, number: u32::try_from(self.recent.len()).ok() }
    }

    /// Returns the reason why the next attempt would fail in the same way.
    fn is_final(&self, ended: &NodeEnded) -> Option<String> {
        let is_final = |code: i32| self.restarts.not_after.contains(&code);
        if let Some(root) = ended.root.as_ref().filter(|root| root.code.is_some_and(is_final)) {
            return Some(format!("no restart: {} is final", root.code_text));
        }
        let again: Vec<&str> =
            ended.differing.iter().filter(|it| self.differed.contains(*it)).map(String::as_str).collect();
        (!again.is_empty()).then(|| {
            let devices = again.join(" and ");
            format!("no restart: the parameters on {devices} differed for the second time; test its memory")
        })
    }

    /// Returns the reason why the job is not worth another attempt.
    fn is_spent(&mut self, now: Instant) -> Option<String> {
        let window = self.restarts.window;
        if !window.is_zero() {
            self.recent.retain(|at| now.saturating_duration_since(*at) < window);
        }
        if self.recent.len() >= self.restarts.most as usize {
            let within = self.window_text();
            return Some(match self.restarts.most {
                1 => format!("the 1 restart allowed{within} is used up"),
                most => format!("all {most} restarts{within} are used up"),
            });
        }
        (self.is_trainer && self.fruitless >= MAX_FRUITLESS_ATTEMPTS)
            .then(|| format!("no restart: {MAX_FRUITLESS_ATTEMPTS} attempts in a row made no progress"))
    }

    fn window_text(&self) -> String {
        if self.restarts.window.is_zero() {
            String::new()
        } else {
            format!(" within {} s", self.restarts.window.as_secs_f64())
        }
    }

    /// Returns a number in [0, 1) that depends on the seed and the number of recent restarts.
    #[expect(clippy::cast_precision_loss, reason = "jitter needs no precision")]
    fn jitter(&self) -> f64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, self.recent.len()).hash(&mut hasher);
        (hasher.finish() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::RootCause;

    use super::*;

    fn restarts(most: u32) -> Restarts {
        Restarts { most, not_after: [2, 79].into(), free: [78].into(), ..Restarts::default() }
    }

    fn policy(most: u32) -> Policy {
        Policy::new(restarts(most), true, 7)
    }

    /// The end of an attempt with this exit code of the root cause.
    fn ended(code: i32, progressed: bool) -> NodeEnded {
        let code_text = format!("exit code {code}");
        let root = Some(RootCause { code: Some(code), code_text, ..RootCause::default() });
        NodeEnded { root, progressed, ..NodeEnded::default() }
    }

    fn fruitless() -> NodeEnded {
        ended(1, false)
    }

    fn progressed() -> NodeEnded {
        ended(1, true)
    }

    fn delay(decision: &Decision) -> f64 {
        match decision {
            Decision::Restart { delay, .. } => delay.as_secs_f64(),
            Decision::Final(reason) => panic!("final: {reason:?}"),
        }
    }

    fn reason(decision: Decision) -> String {
        match decision {
            Decision::Final(Some(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn job_that_makes_progress_is_restarted_at_once_up_to_its_budget() {
        let (mut policy, now) = (policy(500), Instant::now());
        for number in 1..=500 {
            let expected = Decision::Restart { delay: Duration::ZERO, number: Some(number) };
            assert_eq!(policy.decide(&progressed(), now), expected);
        }
        assert_eq!(reason(policy.decide(&progressed(), now)), "all 500 restarts are used up");
    }

    #[test]
    fn third_attempt_without_progress_is_the_last_however_long_it_took() {
        let (mut policy, now) = (policy(100), Instant::now());
        let hour = Duration::from_secs(3600);
        assert_eq!(delay(&policy.decide(&fruitless(), now)), 0.0);
        let second = delay(&policy.decide(&fruitless(), now + hour));
        assert!((1.0..1.25).contains(&second), "{second}");
        let last = reason(policy.decide(&fruitless(), now + 2 * hour));
        assert_eq!(last, "no restart: 3 attempts in a row made no progress");
    }

    #[test]
    fn command_gets_all_of_its_restarts() {
        let (mut policy, now) = (Policy::new(restarts(5), false, 7), Instant::now());
        let delays: Vec<f64> = (0..5).map(|_| delay(&policy.decide(&fruitless(), now)).floor()).collect();
        assert_eq!(delays, [0.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(reason(policy.decide(&fruitless(), now)), "all 5 restarts are used up");
    }

    #[test]
    fn progress_starts_the_count_again() {
        let (mut policy, now) = (policy(100), Instant::now());
        for progressed in [false, false, true, false, false] {
            delay(&policy.decide(&ended(1, progressed), now));
        }
        reason(policy.decide(&fruitless(), now));
    }

    #[test]
    fn restarts_before_the_window_are_not_counted() {
        let window = Duration::from_secs(3600);
        let mut policy = Policy::new(Restarts { window, ..restarts(2) }, true, 7);
        let start = Instant::now();
        let mut decide = |seconds| policy.decide(&progressed(), start + Duration::from_secs(seconds));
        for (seconds, number) in [(0, 1), (10, 2), (3600, 2), (3610, 2)] {
            let expected = Decision::Restart { delay: Duration::ZERO, number: Some(number) };
            assert_eq!(decide(seconds), expected, "{seconds}");
        }
        assert_eq!(reason(decide(7199)), "all 2 restarts within 3600 s are used up");
        assert_eq!(policy.budget_text(), "of 2 within 3600 s");
    }

    #[test]
    fn final_codes_and_a_job_without_restarts_end_with_the_first_failure() {
        let now = Instant::now();
        assert_eq!(policy(0).decide(&progressed(), now), Decision::Final(None));
        assert_eq!(reason(policy(5).decide(&ended(79, true), now)), "no restart: exit code 79 is final");
        let mut one = policy(1);
        delay(&one.decide(&fruitless(), now));
        assert_eq!(reason(one.decide(&fruitless(), now)), "the 1 restart allowed is used up");
    }

    #[test]
    fn device_that_differs_twice_ends_the_job_and_others_do_not() {
        let devices = ["GPU-a", "GPU-b", "GPU-c"].map(String::from);
        let differs =
            |range: std::ops::Range<usize>| NodeEnded { differing: devices[range].to_vec(), ..progressed() };
        let (mut policy, now) = (policy(9), Instant::now());
        delay(&policy.decide(&differs(0..1), now));
        delay(&policy.decide(&differs(1..2), now));
        delay(&policy.decide(&progressed(), now));
        let expected =
            "no restart: the parameters on GPU-b differed for the second time; test its memory".to_owned();
        assert_eq!(reason(policy.decide(&differs(1..3), now)), expected);
    }

    #[test]
    fn free_restart_is_immediate_and_not_counted() {
        let now = Instant::now();
        for most in [0, 1] {
            let mut policy = policy(most);
            for _ in 0..5 {
                let decision = policy.decide(&ended(78, false), now);
                assert_eq!(decision, Decision::Restart { delay: Duration::ZERO, number: None });
            }
            let counted =
                matches!(policy.decide(&fruitless(), now), Decision::Restart { number: Some(1), .. });
            assert_eq!(counted, most == 1);
        }
    }

    #[test]
    fn jobs_that_fail_together_wait_for_different_times() {
        let second = |seed| {
            let mut policy = Policy::new(restarts(5), true, seed);
            policy.decide(&fruitless(), Instant::now());
            delay(&policy.decide(&fruitless(), Instant::now()))
        };
        assert_ne!(second(1), second(2));
        assert_eq!(second(1), second(1));
        let mean = (0..1000).map(second).sum::<f64>() / 1000.0;
        assert!((1.11..1.14).contains(&mean), "{mean}");
    }
}
