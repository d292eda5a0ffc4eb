//! Finds the fastest of several ways to do the same work.
//!
//! A GPU that multiplies large matrices reaches its power limit within about ten milliseconds and lowers its clocks.
//! Another candidate may then be the fastest: one that moves less data. Candidates for long work are therefore timed at
//! the power limit: each one briefly, then those close to the best one again, in turns. (H200: among the algorithms for
//! the layers of a model with a billion parameters, the fastest one before the limit takes up to 1.07 times as long as
//! the best one at the limit, and 1.19 times for GPT-2's head.)
//!
//! On a new host, all choices for a model are made in its first step, so long work is launched only a few times, and a
//! GPU that the previous choice has left at its power limit is not warmed up again.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::cuda::device::Device;
use crate::cuda::profile::{mark, seconds};
use crate::error::Result;

/// Part of the key of stored choices. Increase it when the way of choosing changes.
pub(super) const VERSION: u32 = 5;
/// Minimum duration of long work. Shorter work leaves the GPU below its power limit, since it runs between other work
/// of a model of such sizes.
pub(super) const LONG_SECONDS: f64 = 40e-6;

/// The first measurement of a candidate is its shortest round: SELECT_ROUNDS rounds of SELECT_LAUNCHES launches. There
/// are fewer launches if they take SELECT_ROUND_SECONDS, and fewer rounds if they take SELECT_SECONDS in total. For
/// long work one round is enough, because candidates close to the best one are timed again.
const SELECT_ROUNDS: usize = 3;
const SELECT_LAUNCHES: usize = 4;
const SELECT_ROUND_SECONDS: f64 = 1e-3;
const SELECT_SECONDS: f64 = 3e-3;
/// A candidate that takes more than this multiple of the best time in a round is not timed further.
const MUCH_SLOWER: f64 = 1.2;
/// Candidates are in the order of the library's estimates. Once timing has taken this many seconds, only the first
/// FEWEST are timed.
const SITE_SECONDS: f64 = 0.4;
const FEWEST: usize = 8;
/// Seconds of work after which the GPU has reached its power limit, and the time for which it stays there without work.
const WARM_UP_SECONDS: f64 = 0.06;
const WARM: Duration = Duration::from_millis(20);
/// Candidates for long work within this multiple of the best time are timed again: the fastest MOST_CLOSE, or fewer if
/// they take ALL_TURNS_SECONDS, but at least FEWEST_CLOSE. This second measurement is the median of TURNS turns of
/// TURN_SECONDS; one turn if more would take longer than ALL_TURNS_SECONDS, as a single launch of such work tells
/// enough.
const CLOSE: f64 = 1.1;
const MOST_CLOSE: usize = 8;
const FEWEST_CLOSE: usize = 3;
const TURNS: usize = 3;
const TURN_SECONDS: f64 = 3e-3;
const ALL_TURNS_SECONDS: f64 = 0.1;
/// A candidate replaces an earlier one if it takes less than this share of its time, so that noise does not decide.
/// Medians of turns vary less from run to run.
const CLEARLY_FASTER: f64 = 0.98;
const CLEARLY_FASTER_IN_TURNS: f64 = 0.99;

/// When the GPU was last at its power limit.
pub(super) type LastAtLimit = Cell<Option<Instant>>;

/// Returns the index of the fastest of `count` candidates: the first one, or one that is clearly faster than the
/// earlier ones. Times them at the power limit if the first one takes at least `long` seconds. `None` if all fail.
#[expect(clippy::cast_precision_loss, reason = "a small count")]
pub(super) fn fastest(
    device: &Device,
    count: usize,
    long: f64,
    last_at_limit: &LastAtLimit,
    launch: impl Fn(usize) -> Result<()>,
) -> Result<Option<usize>> {
    let is_warm = last_at_limit.get().is_some_and(|last| last.elapsed() < WARM);
    let (found, is_long) = choose(count, long, is_warm, |candidate, launches| {
        let begin = mark(&device.stream)?;
        for _ in 0..launches {
            launch(candidate)?;
        }
        Ok(seconds(&begin, &mark(&device.stream)?)? / launches as f64)
    })?;
    // Shorter work may need less power.
    if is_long && long >= LONG_SECONDS {
        last_at_limit.set(Some(Instant::now()));
    }
    Ok(found)
}

/// Chooses among candidates, and returns whether the work is long. `is_warm` says that the GPU is at its power limit.
/// `time` runs a candidate a given number of times and returns the seconds per run.
fn choose(
    count: usize,
    long: f64,
    is_warm: bool,
    time: impl FnMut(usize, usize) -> Result<f64>,
) -> Result<(Option<usize>, bool)> {
    let mut stopwatch = Stopwatch { time, total: 0.0 };
    let (mut times, mut best, mut is_long) = (Vec::with_capacity(count), f64::INFINITY, false);
    for candidate in 0..count {
        if candidate >= FEWEST && stopwatch.total >= SITE_SECONDS {
            break;
        }
        // The first launch loads the kernel, which may take longer than the work. The heuristic may also return
        // algorithms that fail to run.
        if (stopwatch.time)(candidate, 1).is_err() {
            continue;
        }
        let mut time = at_once(&mut stopwatch, candidate, best)?;
        if times.is_empty() && time >= long {
            is_long = true;
            if !is_warm {
                stopwatch.time(candidate, launches(WARM_UP_SECONDS, time))?;
                time = at_once(&mut stopwatch, candidate, best)?;
            }
        }
        best = best.min(time);
        times.push((candidate, time));
    }
    let close: Vec<(usize, f64)> = times.iter().copied().filter(|(_, time)| *time <= best * CLOSE).collect();
    if !is_long || close.len() < 2 {
        return Ok((clearly_fastest(&times, CLEARLY_FASTER), is_long));
    }
    let (close, turns) = fastest_few(close, best);
    let times = in_turns(&mut stopwatch, &close, turns)?;
    Ok((clearly_fastest(&times, CLEARLY_FASTER_IN_TURNS), is_long))
}

/// Returns the candidates to time in turns, in their order, and the number of turns.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive count")]
fn fastest_few(mut close: Vec<(usize, f64)>, best: f64) -> (Vec<(usize, f64)>, usize) {
    let affordable = (ALL_TURNS_SECONDS / best.max(TURN_SECONDS)) as usize;
    close.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    close.truncate(affordable.clamp(FEWEST_CLOSE, MOST_CLOSE));
    close.sort_by_key(|(candidate, _)| *candidate);
    let turns = if TURNS * close.len() <= affordable { TURNS } else { 1 };
    (close, turns)
}

struct Stopwatch<F> {
    time: F,
    /// Total seconds of all timed launches, without the first one of each candidate.
    total: f64,
}

impl<F: FnMut(usize, usize) -> Result<f64>> Stopwatch<F> {
    /// Returns the seconds per launch over this number of launches.
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    fn time(&mut self, candidate: usize, launches: usize) -> Result<f64> {
        let seconds = (self.time)(candidate, launches)?;
        self.total += seconds * launches as f64;
        Ok(seconds)
    }
}

/// Returns the seconds of a candidate that has run once already. `best` is the best time of earlier candidates.
#[expect(clippy::cast_precision_loss, reason = "a small count")]
fn at_once<F: FnMut(usize, usize) -> Result<f64>>(
    stopwatch: &mut Stopwatch<F>,
    candidate: usize,
    best: f64,
) -> Result<f64> {
    let mut shortest = stopwatch.time(candidate, 1)?;
    let count = launches(SELECT_ROUND_SECONDS, shortest).min(SELECT_LAUNCHES);
    let rounds = launches(SELECT_SECONDS, shortest * count as f64).min(SELECT_ROUNDS);
    // A large part of the time of a single short launch is overhead.
    let mut is_reliable = count == 1;
    for _ in 0..rounds {
        if is_reliable && (shortest >= LONG_SECONDS || shortest > best * MUCH_SLOWER) {
            break;
        }
        shortest = shortest.min(stopwatch.time(candidate, count)?);
        is_reliable = true;
    }
    Ok(shortest)
}

/// Returns the candidates with the medians of their turns.
fn in_turns<F: FnMut(usize, usize) -> Result<f64>>(
    stopwatch: &mut Stopwatch<F>,
    candidates: &[(usize, f64)],
    turns: usize,
) -> Result<Vec<(usize, f64)>> {
    let mut times = vec![Vec::with_capacity(turns); candidates.len()];
    for _ in 0..turns {
        for (times, (candidate, time)) in times.iter_mut().zip(candidates) {
            times.push(stopwatch.time(*candidate, launches(TURN_SECONDS, *time))?);
        }
    }
    Ok(times.iter_mut().zip(candidates).map(|(times, (candidate, _))| (*candidate, median(times))).collect())
}

/// Returns the number of launches of `time` seconds each that take `seconds` in total. Events have a resolution of half
/// a microsecond.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive count")]
fn launches(seconds: f64, time: f64) -> usize {
    (seconds / time.max(5e-7)).ceil().max(1.0) as usize
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the first of these candidates, or a later one that takes less than this share of the time of the earlier
/// ones.
fn clearly_fastest(times: &[(usize, f64)], share: f64) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (candidate, time) in times {
        let best_time = best.map_or(f64::INFINITY, |(_, time)| time);
        if *time < best_time * share {
            best = Some((*candidate, *time));
        }
    }
    best.map(|(candidate, _)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::EngineError;

    /// A simulated GPU whose clocks fall after 10 ms of work: the seconds of each candidate before and after that;
    /// `None` if it does not run.
    struct Simulated {
        candidates: Vec<Option<[f64; 2]>>,
        busy: f64,
        launches: Vec<usize>,
        is_warm: bool,
        /// Seconds that the first launch of a candidate takes in addition.
        loading: f64,
    }

    impl Simulated {
        fn new(candidates: impl IntoIterator<Item = Option<[f64; 2]>>) -> Self {
            let candidates: Vec<_> = candidates.into_iter().collect();
            Self { launches: vec![0; candidates.len()], candidates, busy: 0.0, is_warm: false, loading: 0.0 }
        }

        fn time(&mut self, candidate: usize, launches: usize) -> Result<f64> {
            let loading = if self.launches[candidate] == 0 { self.loading } else { 0.0 };
            self.launches[candidate] += launches;
            let Some([burst, limit]) = self.candidates[candidate] else {
                return Err(EngineError::Device { ordinal: 0, reason: "it does not run".into() });
            };
            let mut total = 0.0;
            for _ in 0..launches {
                total += if !self.is_warm && self.busy + total < 0.01 { burst } else { limit };
            }
            self.busy += total;
            Ok((loading + total) / launches as f64)
        }

        fn choose(&mut self) -> Option<usize> {
            let (count, is_warm) = (self.candidates.len(), self.is_warm);
            choose(count, LONG_SECONDS, is_warm, |candidate, launches| self.time(candidate, launches))
                .unwrap()
                .0
        }
    }

    #[test]
    fn long_work_is_chosen_at_the_power_limit_and_short_work_before_it() {
        // The last one is the fastest only at the limit, where all of them take longer than the first one before the
        // limit.
        let of = |seconds: f64| {
            let first = Some([seconds, 1.3 * seconds]);
            let others = (0..20).map(move |_| Some([1.1 * seconds, 1.35 * seconds]));
            Simulated::new([first].into_iter().chain(others).chain([Some([1.05 * seconds, 1.2 * seconds])]))
        };
        for seconds in [5e-5, 5e-4, 5e-3] {
            assert_eq!(of(seconds).choose(), Some(21), "{seconds}");
            assert_eq!(
                Simulated { is_warm: true, ..of(seconds) }.choose(),
                Some(21),
                "{seconds}, after others"
            );
        }
        assert_eq!(of(5e-6).choose(), Some(0));
    }

    #[test]
    fn candidate_that_fails_is_not_chosen() {
        assert_eq!(Simulated::new([None, Some([2e-5; 2]), None, Some([1e-5; 2])]).choose(), Some(3));
        assert_eq!(Simulated::new([None, None]).choose(), None);
    }

    #[test]
    fn choice_takes_little_time_however_long_the_work_takes() {
        let limits = [(1e-5, 0.01), (1e-4, 0.1), (3e-3, 0.32), (0.025, 0.95), (0.05, 1.1), (0.1, 2.1)];
        for (seconds, most) in limits {
            for (is_warm, most) in [(true, most), (false, most + 0.07 + 3.0 * seconds)] {
                let candidates = (0..32).map(|index| Some([seconds * (1.0 + 0.01 * f64::from(index)); 2]));
                let mut gpu = Simulated { is_warm, ..Simulated::new(candidates) };
                assert_eq!(gpu.choose(), Some(0));
                assert!(gpu.busy < most, "{seconds}: {}", gpu.busy);
            }
        }
        // A much slower candidate is launched only twice, one of them to load it.
        let mut gpu = Simulated::new([Some([2e-3; 2]), Some([4e-3; 2]), Some([2.01e-3; 2])]);
        gpu.choose();
        assert_eq!(gpu.launches[1], 2);
    }

    #[test]
    fn last_of_many_close_candidates_may_be_chosen_however_long_kernels_take_to_load() {
        for (seconds, loading) in [(5e-5, 0.0), (1e-3, 0.0), (5e-5, 0.1), (1e-3, 0.1)] {
            let candidates = [1.0; 11].into_iter().chain([0.95]).map(|share| Some([share * seconds; 2]));
            let mut gpu = Simulated { loading, ..Simulated::new(candidates) };
            assert_eq!(gpu.choose(), Some(11), "{seconds}, {loading}");
        }
    }

    #[test]
    fn noise_does_not_replace_an_earlier_candidate() {
        let (infinity, fastest) = (f64::INFINITY, |times: &[(usize, f64)]| clearly_fastest(times, 0.98));
        assert_eq!(fastest(&[(0, 1.0), (1, 0.985), (2, 0.99)]), Some(0));
        assert_eq!(fastest(&[(0, 1.0), (3, 0.985), (5, 0.97)]), Some(5));
        assert_eq!(fastest(&[(0, infinity), (1, 2.0), (2, 1.99)]), Some(1));
        assert_eq!(fastest(&[(0, infinity)]), None);
        assert_eq!(fastest(&[]), None);
    }

    #[test]
    fn median_is_not_moved_by_one_slow_turn() {
        assert_eq!(median(&mut [1.0, 9.0, 1.1, 0.9, 1.2]), 1.1);
    }
}
