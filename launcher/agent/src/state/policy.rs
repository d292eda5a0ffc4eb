//! The restart policy: whether a failed attempt is followed by another, and when. Pure.
//!
//! The first restart is immediate; the delay before the next ones doubles from [`FIRST_DELAY`] to [`MAX_DELAY`], plus
//! up to a quarter so that jobs that failed together do not restart together. An attempt that ran for [`HEALTHY_AFTER`]
//! resets the delay. [`CRASH_LOOP_ATTEMPTS`] attempts in a row that fail early and in the same way end the job before
//! the budget is spent: another attempt would fail, too.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use crate::command::Restarts;

/// Delay before the second restart in a row.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay, before jitter.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// An attempt that ran this long did not fail during start-up.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// An attempt that failed sooner did no work.
const EARLY_FAILURE: Duration = Duration::from_secs(5);
/// Identical early failures in a row that count as a crash loop.
const CRASH_LOOP_ATTEMPTS: u32 = 3;

/// What follows a failed attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Decision {
    Restart {
        delay: Duration,
        /// Counts from 1; `None` if this restart is not counted.
        number: Option<u32>,
    },
    /// The job ends; the reason, unless it is obvious.
    Final(Option<String>),
}

/// How an attempt failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptFailure<'a> {
    /// Rank and message of the root cause. Equal messages are the same failure.
    pub(crate) message: &'a str,
    /// The exit code of the root cause.
    pub(crate) code: Option<i32>,
    /// From the start of the attempt to its end.
    pub(crate) duration: Duration,
}

#[derive(Debug)]
pub(crate) struct Policy {
    restarts: Restarts,
    seed: u64,
    used: u32,
    /// Restarts since the last healthy attempt.
    in_a_row: u32,
    /// Number and message of the identical early failures in a row.
    early_failures: (u32, String),
}

impl Policy {
    pub(crate) fn new(restarts: Restarts, seed: u64) -> Self {
        Self { restarts, seed, used: 0, in_a_row: 0, early_failures: (0, String::new()) }
    }

    pub(crate) fn max_restarts(&self) -> u32 {
        self.restarts.most
    }

    /// Decides what follows, and counts a restart.
    pub(crate) fn decide(&mut self, failure: AttemptFailure<'_>) -> Decision {
        if failure.code.is_some_and(|code| self.restarts.free.contains(&code)) {
            return Decision::Restart { delay: Duration::ZERO, number: None };
        }
        if self.restarts.most == 0 {
            return Decision::Final(None);
        }
        if let Some(code) = failure.code.filter(|code| self.restarts.not_after.contains(code)) {
            return Decision::Final(Some(format!("no restart: exit code {code} is final")));
        }
        let early = failure.duration < EARLY_FAILURE;
        self.early_failures = match &mut self.early_failures {
            (count, message) if early && message == failure.message => (*count + 1, std::mem::take(message)),
            _ => (u32::from(early), failure.message.to_owned()),
        };
        if self.used >= self.restarts.most {
            return Decision::Final(Some(format!("all {} restarts are used up", self.restarts.most)));
        }
        if self.early_failures.0 >= CRASH_LOOP_ATTEMPTS {
            let seconds = EARLY_FAILURE.as_secs();
            let reason = format!(
                "no restart: {CRASH_LOOP_ATTEMPTS} attempts in a row failed in the same way within {seconds} s"
            );
            return Decision::Final(Some(reason));
        }
        if failure.duration >= HEALTHY_AFTER {
            self.in_a_row = 0;
        }
        // The exponent is limited so that the power cannot overflow.
        let doubled = self.in_a_row.checked_sub(1).map(|times| FIRST_DELAY * 2_u32.pow(times.min(10)));
        let delay =
            doubled.map_or(Duration::ZERO, |delay| delay.min(MAX_DELAY).mul_f64(1.0 + self.jitter() / 4.0));
        self.used += 1;
        self.in_a_row += 1;
        Decision::Restart { delay, number: Some(self.used) }
    }

    /// A number in [0, 1) that differs between seeds and restarts.
    #[expect(clippy::cast_precision_loss, reason = "jitter needs no precision")]
    fn jitter(&self) -> f64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, self.used).hash(&mut hasher);
        (hasher.finish() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(most: u32) -> Policy {
        Policy::new(Restarts { most, not_after: [2, 79].into(), free: [78].into() }, 7)
    }

    fn failed(message: &str, code: i32, seconds: u64) -> AttemptFailure<'_> {
        AttemptFailure { message, code: Some(code), duration: Duration::from_secs(seconds) }
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
    fn delays_double_from_the_second_restart_up_to_a_limit() {
        let mut policy = policy(100);
        let delays: Vec<f64> = (0..14).map(|_| delay(&policy.decide(failed("a", 1, 10)))).collect();
        assert_eq!(delays[0], 0.0);
        let unspread = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 30.0, 30.0, 30.0, 30.0];
        for (delay, least) in delays[1..].iter().zip(unspread) {
            assert!((least..least * 1.25).contains(delay), "{delays:?}");
        }
    }

    #[test]
    fn an_attempt_of_sixty_seconds_resets_the_delay_and_a_shorter_one_does_not() {
        for (milliseconds, resets) in [(59_999, false), (60_000, true)] {
            let mut policy = policy(100);
            (0..3).for_each(|_| drop(policy.decide(failed("a", 1, 10))));
            let duration = Duration::from_millis(milliseconds);
            let after = delay(&policy.decide(AttemptFailure { duration, ..failed("a", 1, 0) }));
            assert_eq!(after == 0.0, resets, "{milliseconds} ms");
        }
    }

    #[test]
    fn jitter_is_known_for_a_seed_and_restart_and_stays_below_a_quarter() {
        let jitter = |seed, used| {
            let restarts = Restarts { most: 5, ..Restarts::default() };
            Policy { used, ..Policy::new(restarts, seed) }.jitter()
        };
        let all: Vec<f64> = (0..1000).map(|seed| jitter(seed, 1)).collect();
        assert!(all.iter().all(|number| (0.0..1.0).contains(number)));
        let mean = all.iter().sum::<f64>() / 1000.0;
        assert!((0.45..0.55).contains(&mean), "{mean}");
        assert_ne!(jitter(1, 1), jitter(2, 1));
        assert_ne!(jitter(1, 1), jitter(1, 2));
        assert_eq!(jitter(1, 1), jitter(1, 1));
    }

    #[test]
    fn jobs_that_fail_together_restart_at_different_times() {
        let second = |seed| {
            let mut policy = Policy::new(Restarts { most: 5, ..Restarts::default() }, seed);
            policy.decide(failed("a", 1, 10));
            delay(&policy.decide(failed("a", 1, 10)))
        };
        assert_ne!(second(1), second(2));
        assert_eq!(second(1), second(1));
    }

    #[test]
    fn budget_final_codes_and_crash_loops_end_the_job_with_a_reason() {
        assert_eq!(policy(0).decide(failed("a", 1, 9)), Decision::Final(None));
        let mut spent = policy(1);
        delay(&spent.decide(failed("a", 1, 9)));
        assert_eq!(reason(spent.decide(failed("b", 1, 9))), "all 1 restarts are used up");
        assert_eq!(reason(policy(5).decide(failed("a", 79, 9))), "no restart: exit code 79 is final");
        let mut looping = policy(9);
        delay(&looping.decide(failed("a", 1, 1)));
        delay(&looping.decide(failed("a", 1, 1)));
        let loop_reason = "no restart: 3 attempts in a row failed in the same way within 5 s";
        assert_eq!(reason(looping.decide(failed("a", 1, 1))), loop_reason);
    }

    #[test]
    fn a_spent_budget_is_the_reason_even_in_a_crash_loop() {
        let mut policy = policy(2);
        (0..2).for_each(|_| drop(policy.decide(failed("a", 1, 1))));
        assert_eq!(reason(policy.decide(failed("a", 1, 1))), "all 2 restarts are used up");
    }

    #[test]
    fn restart_that_costs_nothing_is_immediate_and_not_counted() {
        for most in [0, 1] {
            let mut policy = policy(most);
            for _ in 0..5 {
                let decision = policy.decide(failed("a", 78, 1));
                assert_eq!(decision, Decision::Restart { delay: Duration::ZERO, number: None });
            }
            let counted =
                matches!(policy.decide(failed("a", 1, 1)), Decision::Restart { number: Some(1), .. });
            assert_eq!(counted, most == 1);
        }
    }

    #[test]
    fn failures_that_differ_or_come_late_are_no_crash_loop() {
        let mut policy = policy(100);
        for round in 0..8 {
            delay(&policy.decide(failed(["a", "b"][round % 2], 1, 1)));
        }
        for _ in 0..8 {
            delay(&policy.decide(failed("a", 1, 5)));
        }
        // A late failure starts the count again.
        for seconds in [1, 1, 5, 1, 1] {
            delay(&policy.decide(failed("c", 1, seconds)));
        }
        reason(policy.decide(failed("c", 1, 4)));
    }
}
