//! Whether a failed attempt is followed by another one, and when: pure.
//!
//! A restart comes at once after a first failure, then later and later, up to [`LONGEST`], spread by up to a quarter so that
//! jobs that failed together do not start together; an attempt that lived for [`HEALTHY`] starts this anew. Attempts that
//! fail in the same way as soon as they start are given up before the budget is spent: nothing changes between them.

use std::time::Duration;

use crate::command::Restarts;

/// Delay before the second restart in a row; it doubles from there.
const FIRST: Duration = Duration::from_secs(1);
/// Longest delay, unspread.
const LONGEST: Duration = Duration::from_secs(30);
/// An attempt that lived so long was no start-up failure.
const HEALTHY: Duration = Duration::from_secs(60);
/// One that ended sooner did no work.
const QUICK: Duration = Duration::from_secs(5);
/// So many quick ends in the same way, one after the other, and no more are tried.
const LOOP: u32 = 3;

/// What follows a failed attempt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Decision {
    /// Another one.
    Again {
        /// After this time.
        after: Duration,
    },
    /// None, for a reason that the user may not know.
    Final(Option<String>),
}

/// How an attempt failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended<'a> {
    /// Who and how, in words: the same words are the same failure.
    pub(crate) what: &'a str,
    /// The root cause's exit code.
    pub(crate) code: Option<i32>,
    /// Time since its start.
    pub(crate) lived: Duration,
}

/// The rules, and what has happened under them.
#[derive(Debug)]
pub(crate) struct Policy {
    restarts: Restarts,
    seed: u64,
    used: u32,
    /// Restarts since the last healthy attempt.
    in_a_row: u32,
    /// Quick ends in the same way, and which.
    quick: (u32, String),
}

impl Policy {
    pub(crate) fn new(restarts: Restarts, seed: u64) -> Self {
        Self { restarts, seed, used: 0, in_a_row: 0, quick: (0, String::new()) }
    }

    /// Restarts allowed in all.
    pub(crate) fn most(&self) -> u32 {
        self.restarts.most
    }

    /// What follows this end. A decision for another attempt is counted.
    pub(crate) fn decide(&mut self, ended: Ended<'_>) -> Decision {
        if self.restarts.most == 0 {
            return Decision::Final(None);
        }
        if let Some(code) = ended.code.filter(|code| self.restarts.not_after.contains(code)) {
            return Decision::Final(Some(format!("no restart: exit code {code} is final")));
        }
        self.quick = match &mut self.quick {
            (count, what) if ended.lived < QUICK && what == ended.what => (*count + 1, std::mem::take(what)),
            _ => (u32::from(ended.lived < QUICK), ended.what.to_owned()),
        };
        if self.used >= self.restarts.most {
            return Decision::Final(Some(format!("all {} restarts are used up", self.restarts.most)));
        }
        if self.quick.0 >= LOOP {
            let seconds = QUICK.as_secs();
            let reason = format!("no restart: {LOOP} attempts ended in the same way within {seconds} s");
            return Decision::Final(Some(reason));
        }
        if ended.lived >= HEALTHY {
            self.in_a_row = 0;
        }
        let doubled = self.in_a_row.checked_sub(1).map(|times| FIRST * 2_u32.pow(times.min(10)));
        let after =
            doubled.map_or(Duration::ZERO, |delay| delay.min(LONGEST).mul_f64(1.0 + self.spread() / 4.0));
        self.used += 1;
        self.in_a_row += 1;
        Decision::Again { after }
    }

    /// A number in [0, 1), another one for every seed and restart (the finalizer of MurmurHash3).
    #[expect(clippy::cast_precision_loss, reason = "a spread needs no precision")]
    fn spread(&self) -> f64 {
        let mut x = self.seed ^ u64::from(self.used).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        ((x ^ (x >> 33)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(most: u32) -> Policy {
        Policy::new(Restarts { most, not_after: [2, 78].into() }, 7)
    }

    fn ended(what: &str, code: i32, seconds: u64) -> Ended<'_> {
        Ended { what, code: Some(code), lived: Duration::from_secs(seconds) }
    }

    fn after(decision: &Decision) -> f64 {
        match decision {
            Decision::Again { after } => after.as_secs_f64(),
            Decision::Final(reason) => panic!("final: {reason:?}"),
        }
    }

    #[test]
    fn the_first_restart_comes_at_once_and_later_ones_later_up_to_a_limit() {
        let mut policy = policy(100);
        let delays: Vec<f64> = (0..12).map(|_| after(&policy.decide(ended("a", 1, 10)))).collect();
        assert_eq!(delays[0], 0.0);
        for (delay, least) in delays[1..].iter().zip([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]) {
            assert!((least..least * 1.25).contains(delay), "{delays:?}");
        }
        assert_eq!(after(&policy.decide(ended("a", 1, 60))), 0.0);
    }

    #[test]
    fn jobs_that_fail_together_do_not_start_together() {
        let second = |seed| {
            let mut policy = Policy::new(Restarts { most: 5, not_after: [].into() }, seed);
            policy.decide(ended("a", 1, 10));
            after(&policy.decide(ended("a", 1, 10)))
        };
        assert_ne!(second(1), second(2));
        assert_eq!(second(1), second(1));
    }

    #[test]
    fn the_budget_final_codes_and_loops_end_it_with_a_reason() {
        assert_eq!(policy(0).decide(ended("a", 1, 9)), Decision::Final(None));
        let mut spent = policy(1);
        after(&spent.decide(ended("a", 1, 9)));
        let reason = |decision| match decision {
            Decision::Final(Some(reason)) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(reason(spent.decide(ended("b", 1, 9))), "all 1 restarts are used up");
        assert!(reason(policy(5).decide(ended("a", 78, 9))).contains("exit code 78 is final"));
        let mut looping = policy(9);
        after(&looping.decide(ended("a", 1, 1)));
        after(&looping.decide(ended("a", 1, 1)));
        assert!(reason(looping.decide(ended("a", 1, 1))).contains("3 attempts ended in the same way"));
    }

    #[test]
    fn failures_that_differ_or_take_time_are_no_loop() {
        let mut policy = policy(100);
        for round in 0..8 {
            after(&policy.decide(ended(["a", "b"][round % 2], 1, 1)));
        }
        for _ in 0..8 {
            after(&policy.decide(ended("a", 1, 5)));
        }
    }
}
