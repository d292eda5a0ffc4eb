//! Past usage of users, for fair shares: the integral of (GPUs + cores / all cores) over time, which decays with a
//! half-life. Pure.
//!
//! With half-life h, a rate r held from s to e adds the integral of r 2^-((e - t) / h) dt for t in [s, e], which is r h
//! / ln 2 (1 - 2^-((e - s) / h)). The usage of ended jobs is stored as one number per user; running jobs are added when
//! the queue is sorted.

use std::collections::BTreeMap;

use super::{Jobs, Phase, Record, Submitted};

/// Half-life until a record sets another one: 7 days.
const DEFAULT_HALF_LIFE_SECONDS: u64 = 7 * 86_400;

/// Past usage of all users.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FairShares {
    pub(crate) half_life_seconds: u64,
    users: BTreeMap<u32, Used>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Used {
    gpu_seconds: f64,
    /// Time at which the usage had this value, in milliseconds on the node's clock.
    at: u64,
}

impl Default for FairShares {
    fn default() -> Self {
        Self { half_life_seconds: DEFAULT_HALF_LIFE_SECONDS, users: BTreeMap::new() }
    }
}

impl FairShares {
    pub(super) fn set(&mut self, uid: u32, gpu_seconds: f64, at: u64) {
        self.users.insert(uid, Used { gpu_seconds, at });
    }

    pub(super) fn set_half_life(&mut self, seconds: u64) {
        self.half_life_seconds = seconds.max(1);
    }

    /// Adds the usage of a job from `started` to `ended`. If one of the times is 0, which means unknown, nothing is
    /// added.
    pub(super) fn charge(&mut self, submitted: &Submitted, started: u64, ended: u64) {
        if started == 0 || ended == 0 {
            return;
        }
        let half_life = self.half_life_seconds;
        let used = self.users.entry(submitted.uid).or_default();
        // Records of version 0.2 have times on the system clock, which may have been set back.
        let at = used.at.max(ended);
        let gpu_seconds = used.decayed(at, half_life) + held(submitted, started, ended, half_life);
        *used = Used { gpu_seconds, at };
    }

    /// Returns the records that reproduce this value.
    pub(super) fn records(&self) -> impl Iterator<Item = Record> {
        let changed = self.half_life_seconds != DEFAULT_HALF_LIFE_SECONDS;
        let half_life = changed.then_some(Record::HalfLife { seconds: self.half_life_seconds });
        let used =
            self.users.iter().map(|(&uid, &Used { gpu_seconds, at })| Record::Used { uid, gpu_seconds, at });
        half_life.into_iter().chain(used)
    }
}

impl Used {
    fn decayed(self, now: u64, half_life_seconds: u64) -> f64 {
        self.gpu_seconds * (-seconds(self.at, now) / half_life_seconds as f64).exp2()
    }
}

impl Jobs {
    /// Returns the usage of each user up to now, including running jobs.
    pub(super) fn used(&self, now: u64) -> BTreeMap<u32, f64> {
        let half_life = self.usage.half_life_seconds;
        let ended = self.usage.users.iter().map(|(uid, used)| (*uid, used.decayed(now, half_life)));
        let mut all: BTreeMap<u32, f64> = ended.collect();
        for (_, entry) in self.active() {
            if let Phase::Active { at, .. } = entry.phase {
                *all.entry(entry.submitted.uid).or_default() += held(&entry.submitted, at, now, half_life);
            }
        }
        all
    }
}

/// Returns the usage of a job between `from` and `to`, decayed to `to`.
fn held(submitted: &Submitted, from: u64, to: u64, half_life_seconds: u64) -> f64 {
    let rate = match submitted.rate {
        0 => f64::from(submitted.gpus),
        thousandths => f64::from(thousandths) / 1000.0,
    };
    let half_life = half_life_seconds as f64;
    // 1 - 2^-x, without cancellation for small x.
    let decayed = -(-seconds(from, to) / half_life * std::f64::consts::LN_2).exp_m1();
    rate * half_life / std::f64::consts::LN_2 * decayed
}

fn seconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400_000;

    fn one_gpu(uid: u32) -> Submitted {
        Submitted { uid, gpus: 1, rate: 1000, ..Submitted::default() }
    }

    #[test]
    fn usage_halves_every_half_life() {
        let mut usage = FairShares::default();
        usage.charge(&one_gpu(1), DAY, DAY + 1000);
        let jobs = |usage: &FairShares| Jobs { usage: usage.clone(), ..Jobs::default() };
        let at = |days: u64| jobs(&usage).used(DAY + 1000 + days * DAY)[&1];
        assert!((at(0) - 1.0).abs() < 1e-5, "{}", at(0));
        assert!((at(7) - 0.5).abs() < 1e-5 && (at(14) - 0.25).abs() < 1e-5);
        usage.set_half_life(86_400);
        assert!((jobs(&usage).used(DAY + 1000 + DAY)[&1] - 0.5).abs() < 1e-5);
    }

    #[test]
    fn usage_of_two_halves_equals_the_whole() {
        let (mut whole, mut halves) = (FairShares::default(), FairShares::default());
        whole.charge(&one_gpu(1), DAY, 21 * DAY);
        halves.charge(&one_gpu(1), DAY, 11 * DAY);
        halves.charge(&one_gpu(1), 11 * DAY, 21 * DAY);
        let (whole, halves) = (whole.users[&1].gpu_seconds, halves.users[&1].gpu_seconds);
        assert!((whole / halves - 1.0).abs() < 1e-9, "{whole} {halves}");
        assert!(whole < 20.0 * 86_400.0 && whole > 7.0 * 86_400.0, "{whole}");
    }

    #[test]
    fn clock_set_back_does_not_reduce_usage() {
        let mut usage = FairShares::default();
        usage.charge(&one_gpu(1), 10 * DAY, DAY);
        assert_eq!(usage.users[&1].gpu_seconds, 0.0);
        usage.charge(&one_gpu(1), 0, DAY);
        assert_eq!(usage.users[&1].gpu_seconds, 0.0, "a start at an unknown time");
    }
}
