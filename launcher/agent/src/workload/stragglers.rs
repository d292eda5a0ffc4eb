//! Finds ranks that are slower than the others. Pure.
//!
//! All ranks make a step together, so the slowest sets the pace of all. Each rank reports how long a step took without
//! the time that it waited for others. A rank whose own time is above [`SLOW_FACTOR`] x the median over all ranks, in
//! [`WINDOWS`] windows of [`WINDOW_STEPS`] steps in a row, is a straggler, until the first window in which it is not.
//! Stragglers are reported, never ended.
//!
//! A window counts when every rank has completed it. With two ranks the lower time is the median.

use std::collections::{BTreeMap, VecDeque};

/// Steps of a window. A rank's time in a window is the median of its steps: a single slow step does not count.
const WINDOW_STEPS: usize = 20;
/// Windows in a row that make a straggler.
const WINDOWS: u32 = 5;
const SLOW_FACTOR: f64 = 1.3;
/// Differences below this are noise of the clock and the scheduler.
const LEAST_EXCESS_SECONDS: f64 = 0.002;

/// The own times of all ranks of an attempt.
#[derive(Debug)]
pub(super) struct Stragglers {
    ranks: Vec<RankTimes>,
}

#[derive(Debug, Default)]
struct RankTimes {
    /// Of the window that is not complete.
    seconds: Vec<f64>,
    /// Median of each complete window that other ranks have not completed.
    windows: VecDeque<f64>,
    /// Windows in a row in which it was slow.
    slow: u32,
    /// Own time as a multiple of the median, while the rank is a straggler.
    factor: Option<f64>,
}

impl Stragglers {
    /// No step was made.
    pub(super) fn new(world: u32) -> Self {
        Self { ranks: (0..world).map(|_| RankTimes::default()).collect() }
    }

    /// Records a step of a rank. Returns a line for each rank that has become a straggler or ceased to be one.
    pub(super) fn record(&mut self, rank: u32, own_seconds: f64) -> Vec<String> {
        let Some(times) = self.ranks.get_mut(rank as usize) else { return Vec::new() };
        times.seconds.push(own_seconds);
        if times.seconds.len() < WINDOW_STEPS {
            return Vec::new();
        }
        let seconds = std::mem::take(&mut times.seconds);
        times.windows.push_back(lower_median(seconds));
        let complete: Vec<f64> =
            self.ranks.iter().filter_map(|times| times.windows.front().copied()).collect();
        if complete.len() < self.ranks.len() {
            return Vec::new();
        }
        let median = lower_median(complete);
        let numbered = (0..).zip(&mut self.ranks);
        numbered.filter_map(|(rank, times): (u32, _)| times.compare(rank, median)).collect()
    }

    /// Shown by status beside each straggler.
    pub(super) fn hints(&self) -> BTreeMap<u32, String> {
        let stragglers = (0..).zip(&self.ranks).filter_map(|(rank, times)| Some((rank, times.factor?)));
        stragglers
            .map(|(rank, factor)| (rank, format!("steps take {factor:.1} x the median of all ranks")))
            .collect()
    }
}

impl RankTimes {
    /// Takes the oldest complete window.
    fn compare(&mut self, rank: u32, median: f64) -> Option<String> {
        let own = self.windows.pop_front()?;
        let is_slow = own > SLOW_FACTOR * median && own - median > LEAST_EXCESS_SECONDS;
        self.slow = if is_slow { self.slow.saturating_add(1) } else { 0 };
        let was_straggler = self.factor.is_some();
        self.factor = (self.slow >= WINDOWS).then(|| own / median.max(f64::MIN_POSITIVE));
        match self.factor {
            Some(factor) if !was_straggler => Some(format!(
                "rank {rank} slows the others down: its steps take {factor:.1} x the median of all ranks \
                 ({:.0} ms, without waiting)",
                own * 1e3
            )),
            None if was_straggler => Some(format!("rank {rank} is as fast as the others again")),
            _ => None,
        }
    }
}

/// The lower one of the two in the middle if the count is even; 0 without numbers.
fn lower_median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows in which each rank has this own time in milliseconds; returns what is reported.
    fn run(stragglers: &mut Stragglers, windows: u32, ms: &[f64]) -> Vec<String> {
        let mut lines = Vec::new();
        for _ in 0..windows as usize * WINDOW_STEPS {
            for (rank, ms) in (0..).zip(ms) {
                lines.extend(stragglers.record(rank, ms / 1e3));
            }
        }
        lines
    }

    #[test]
    fn rank_slow_in_five_windows_in_a_row_is_reported_until_it_recovers() {
        let mut stragglers = Stragglers::new(4);
        let slow = [100.0, 101.0, 200.0, 99.0];
        assert_eq!(run(&mut stragglers, 4, &slow), [""; 0]);
        assert_eq!(run(&mut stragglers, 1, &[100.0; 4]), [""; 0], "four in a row are not enough");
        assert_eq!(run(&mut stragglers, 4, &slow), [""; 0]);
        let line = "rank 2 slows the others down: its steps take 2.0 x the median of all ranks (200 ms, \
                    without waiting)";
        assert_eq!(run(&mut stragglers, 3, &slow), [line]);
        assert_eq!(stragglers.hints(), [(2, "steps take 2.0 x the median of all ranks".to_owned())].into());
        assert_eq!(run(&mut stragglers, 1, &[100.0; 4]), ["rank 2 is as fast as the others again"]);
        assert!(stragglers.hints().is_empty());
    }

    #[test]
    fn limit_is_exclusive_and_differences_below_two_milliseconds_are_noise() {
        assert_eq!(run(&mut Stragglers::new(3), 9, &[100.0, 130.0, 100.0]), [""; 0]);
        assert_eq!(run(&mut Stragglers::new(3), 9, &[100.0, 130.1, 100.0]).len(), 1);
        assert_eq!(run(&mut Stragglers::new(3), 9, &[1.0, 3.0, 1.0]), [""; 0]);
    }

    #[test]
    fn with_two_ranks_the_faster_one_is_the_measure() {
        let lines = run(&mut Stragglers::new(2), 5, &[100.0, 140.0]);
        assert!(matches!(&lines[..], [line] if line.starts_with("rank 1 slows")), "{lines:?}");
    }

    #[test]
    fn slow_steps_now_and_then_do_not_make_a_straggler() {
        let mut stragglers = Stragglers::new(2);
        for step in 0..10 * WINDOW_STEPS {
            let pause = if step % 3 == 0 { 5.0 } else { 0.1 };
            assert_eq!(stragglers.record(0, 0.1), [""; 0]);
            assert_eq!(stragglers.record(1, pause), [""; 0]);
        }
    }
}
