//! Finds stragglers: ranks that are slower than the others. Pure.
//!
//! All ranks make each step together, so the slowest one sets the pace. Each rank reports the duration of a step minus
//! the time that it waited for others. It is compared with the median over all ranks in two ways:
//! - its median step in a window of [`WINDOW_STEPS`] steps, [`WINDOWS`] times in a row, finds a rank that is always
//!   slow;
//! - its total time in a span of windows that took [`SPAN_SECONDS`], [`SPANS`] times in a row, finds a rank that pauses
//!   now and then but whose median step is as fast as that of the others.
//!
//! A rank above [`SLOW_FACTOR`] x the median is a straggler until the first window and span in which it is below that.
//! Stragglers are reported, never terminated.
//!
//! A window is evaluated once every rank has completed it. With two ranks, the median is the lower of the two times.

use std::collections::{BTreeMap, VecDeque};

const WINDOW_STEPS: usize = 20;
/// Number of consecutive windows with a slow median step that make a straggler.
const WINDOWS: u32 = 5;
/// Minimum duration of a span: sum over its windows of the slowest rank's time. A span also has at least [`WINDOWS`]
/// windows.
const SPAN_SECONDS: f64 = 5.0;
/// Number of consecutive spans with a slow total that make a straggler. A single pause, however long, is in one span
/// only.
const SPANS: u32 = 2;
const SLOW_FACTOR: f64 = 1.3;
/// Smaller differences are noise of the clock and the scheduler.
const LEAST_EXCESS_SECONDS: f64 = 0.002;

/// Step times of all ranks of an attempt, without waiting.
#[derive(Debug)]
pub(super) struct Stragglers {
    ranks: Vec<RankTimes>,
    /// Number of windows in the current span.
    windows: u32,
    /// Sum of the slowest rank's total over these windows.
    span_seconds: f64,
}

#[derive(Debug, Default)]
struct RankTimes {
    /// Step times of the incomplete window.
    seconds: Vec<f64>,
    /// Complete windows that other ranks have not completed yet.
    windows: VecDeque<Window>,
    /// Time of this rank in the current span.
    span_seconds: f64,
    by_median: Pace,
    by_total: Pace,
}

#[derive(Clone, Copy, Debug)]
struct Window {
    median: f64,
    total: f64,
}

/// A rank's speed compared with that of all ranks.
#[derive(Debug, Default)]
struct Pace {
    /// Number of consecutive comparisons in which the rank was slow.
    slow: u32,
    /// While the rank is a straggler: its step time as a multiple of the median, and in seconds.
    straggler: Option<(f64, f64)>,
}

impl Stragglers {
    /// Creates the detector of an attempt with `world` ranks.
    pub(super) fn new(world: u32) -> Self {
        let ranks = (0..world).map(|_| RankTimes::default()).collect();
        Self { ranks, windows: 0, span_seconds: 0.0 }
    }

    /// Records a step of a rank. Returns a line for each rank that has become a straggler or ceased to be one.
    pub(super) fn record(&mut self, rank: u32, own_seconds: f64) -> Vec<String> {
        let Some(times) = self.ranks.get_mut(rank as usize) else { return Vec::new() };
        times.seconds.push(own_seconds);
        if times.seconds.len() < WINDOW_STEPS {
            return Vec::new();
        }
        let seconds = std::mem::take(&mut times.seconds);
        let total = seconds.iter().sum();
        times.windows.push_back(Window { median: lower_median(seconds), total });
        if self.ranks.iter().any(|times| times.windows.is_empty()) {
            return Vec::new();
        }
        let before: Vec<bool> = self.ranks.iter().map(|times| times.straggler().is_some()).collect();
        self.compare();
        let numbered = (0..).zip(before).zip(&self.ranks);
        numbered.filter_map(|((rank, before), times)| changed(rank, before, times.straggler())).collect()
    }

    /// Returns the hint that the status shows for each straggler.
    pub(super) fn hints(&self) -> BTreeMap<u32, String> {
        let stragglers =
            (0..).zip(&self.ranks).filter_map(|(rank, times)| Some((rank, times.straggler()?.0)));
        stragglers
            .map(|(rank, factor)| (rank, format!("steps take {factor:.1} x the median of all ranks")))
            .collect()
    }

    /// Compares the ranks in the oldest window, which all of them have completed.
    fn compare(&mut self) {
        let windows: Vec<Window> =
            self.ranks.iter_mut().filter_map(|times| times.windows.pop_front()).collect();
        let median = lower_median(windows.iter().map(|window| window.median).collect());
        for (times, window) in self.ranks.iter_mut().zip(&windows) {
            times.by_median.compare(window.median, median, WINDOWS);
            times.span_seconds += window.total;
        }
        self.windows += 1;
        self.span_seconds += windows.iter().map(|window| window.total).fold(0.0, f64::max);
        if self.windows < WINDOWS || self.span_seconds < SPAN_SECONDS {
            return;
        }
        let steps = f64::from(self.windows) * WINDOW_STEPS as f64;
        let means: Vec<f64> = self.ranks.iter().map(|times| times.span_seconds / steps).collect();
        let median = lower_median(means.clone());
        for (times, mean) in self.ranks.iter_mut().zip(means) {
            times.by_total.compare(mean, median, SPANS);
            times.span_seconds = 0.0;
        }
        (self.windows, self.span_seconds) = (0, 0.0);
    }
}

impl RankTimes {
    fn straggler(&self) -> Option<(f64, f64)> {
        let found = [self.by_median.straggler, self.by_total.straggler];
        found.into_iter().flatten().max_by(|a, b| a.0.total_cmp(&b.0))
    }
}

impl Pace {
    /// Compares the rank's own time with the median of all ranks. After `enough` slow results in a row, it is a
    /// straggler.
    fn compare(&mut self, own: f64, median: f64, enough: u32) {
        let is_slow = own > SLOW_FACTOR * median && own - median > LEAST_EXCESS_SECONDS;
        self.slow = if is_slow { self.slow.saturating_add(1) } else { 0 };
        self.straggler = (self.slow >= enough).then(|| (own / median.max(f64::MIN_POSITIVE), own));
    }
}

fn changed(rank: u32, was_straggler: bool, straggler: Option<(f64, f64)>) -> Option<String> {
    match straggler {
        Some((factor, seconds)) if !was_straggler => Some(format!(
            "rank {rank} slows the others down: its steps take {factor:.1} x the median of all ranks ({:.0} ms, \
             without waiting)",
            seconds * 1e3
        )),
        None if was_straggler => Some(format!("rank {rank} is as fast as the others again")),
        _ => None,
    }
}

/// Returns the median, which is the lower of the two middle values if the count is even; 0 if there are no values.
fn lower_median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs windows in which each rank has this own time in milliseconds. Returns the reports.
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
        assert_eq!(run(&mut stragglers, 7, &[100.0; 4]), [""; 0], "its total is of the last two spans");
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
    fn with_two_ranks_the_faster_one_is_the_reference() {
        let lines = run(&mut Stragglers::new(2), 5, &[100.0, 140.0]);
        assert!(matches!(&lines[..], [line] if line.starts_with("rank 1 slows")), "{lines:?}");
    }

    /// Runs steps in which rank 0 takes `seconds` and rank 1 the time that `own` gives. Returns the reports.
    fn run_beside(seconds: f64, steps: usize, own: impl Fn(usize) -> f64) -> Vec<String> {
        let mut stragglers = Stragglers::new(2);
        let both = |step| [stragglers.record(0, seconds), stragglers.record(1, own(step))].concat();
        (0..steps).flat_map(both).collect()
    }

    #[test]
    fn rank_with_repeated_pauses_is_a_straggler_despite_fast_steps() {
        // The rank pauses for 200 ms of every 250, with steps of a millisecond.
        let lines = run_beside(0.001, 3000, |step| if step % 50 == 49 { 0.201 } else { 0.001 });
        assert!(matches!(&lines[..], [line] if line.starts_with("rank 1 slows")), "{lines:?}");
        let lines = run_beside(0.1, 200, |step| if step % 3 == 0 { 1.0 } else { 0.1 });
        assert!(matches!(&lines[..], [line] if line.starts_with("rank 1 slows")), "{lines:?}");
    }

    #[test]
    fn single_long_pause_does_not_make_a_straggler() {
        assert_eq!(run_beside(0.1, 400, |step| if step == 210 { 100.0 } else { 0.1 }), [""; 0]);
        assert_eq!(run_beside(0.001, 40_000, |step| if step == 21_000 { 4.0 } else { 0.001 }), [""; 0]);
    }

    #[test]
    fn rank_recovers_once_its_pauses_stop() {
        let lines = run_beside(0.1, 600, |step| if step < 200 && step % 10 == 0 { 1.1 } else { 0.1 });
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert_eq!(lines[1], "rank 1 is as fast as the others again");
    }
}
