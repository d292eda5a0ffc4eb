//! The fastest of several ways to do the same work.
//!
//! A GPU that multiplies large matrices reaches its power limit within some ten milliseconds, and lowers its clocks.
//! Then another candidate can be the fastest: one that moves less data. So candidates are first timed for an instant,
//! and those that are close to the best one once more, in turns, at the power limit. (H200: of the algorithms for the
//! layers of a model of a billion parameters, the fastest one at first takes up to 1.07 times as long as the best one
//! later, and 1.19 times for GPT-2's head.)

use crate::cuda::device::Device;
use crate::cuda::profile::{mark, seconds};
use crate::error::Result;

/// Part of the key of stored choices; increased when choices are made in another way.
pub(super) const VERSION: u32 = 2;
/// Work that takes less time leaves the GPU below its power limit, between the other work of a model of such sizes.
pub(super) const LONG_SECONDS: f64 = 40e-6;

/// The first measurement is the shortest of SELECT_ROUNDS rounds of SELECT_LAUNCHES launches, or of fewer that take
/// SELECT_ROUND_SECONDS.
const SELECT_ROUNDS: usize = 3;
const SELECT_LAUNCHES: usize = 4;
const SELECT_ROUND_SECONDS: f64 = 1e-3;
/// A candidate that takes more than this multiple of the best time in a round is not timed further.
const MUCH_SLOWER: f64 = 1.2;
/// Candidates within this multiple of the best time are timed at the power limit, the first MOST_CLOSE of them.
const CLOSE: f64 = 1.1;
const MOST_CLOSE: usize = 8;
/// Seconds of work after which the GPU is at its limit, and of a turn of one candidate there.
const WARM_UP_SECONDS: f64 = 0.1;
const TURN_SECONDS: f64 = 3e-3;
/// The second measurement is the median of TURNS turns.
const TURNS: usize = 3;
/// A candidate replaces an earlier one if it takes less than this share of its time: noise must not decide. Medians of
/// turns differ less from run to run.
const CLEARLY_FASTER: f64 = 0.98;
const CLEARLY_FASTER_AT_LIMIT: f64 = 0.99;

/// Index of the fastest of `count` candidates: the first, or one that is clearly faster than those before it. At the
/// power limit if the best one takes `long` seconds. `None` if all fail.
pub(super) fn fastest(
    device: &Device,
    count: usize,
    long: f64,
    launch: impl Fn(usize) -> Result<()>,
) -> Result<Option<usize>> {
    let (mut times, mut best) = (Vec::with_capacity(count), f64::INFINITY);
    for candidate in 0..count {
        // The heuristic also returns algorithms that fail to run.
        let time = if launch(candidate).is_ok() {
            at_once(device, &launch, candidate, best)?
        } else {
            f64::INFINITY
        };
        best = best.min(time);
        times.push((candidate, time));
    }
    let close: Vec<(usize, f64)> = times.iter().copied().filter(|(_, time)| *time <= best * CLOSE).collect();
    if best < long || close.len() < 2 {
        return Ok(clearly_fastest(&times, CLEARLY_FASTER));
    }
    let times = at_limit(device, &launch, &close[..close.len().min(MOST_CLOSE)])?;
    Ok(clearly_fastest(&times, CLEARLY_FASTER_AT_LIMIT))
}

/// Seconds of a candidate that has run once. `best` is the best time of earlier ones.
fn at_once(
    device: &Device,
    launch: &impl Fn(usize) -> Result<()>,
    candidate: usize,
    best: f64,
) -> Result<f64> {
    let mut shortest = timed(device, launch, candidate, 1)?;
    let launches = launches(SELECT_ROUND_SECONDS, shortest).min(SELECT_LAUNCHES);
    for _ in 0..SELECT_ROUNDS {
        shortest = shortest.min(timed(device, launch, candidate, launches)?);
        if shortest > best * MUCH_SLOWER {
            break;
        }
    }
    Ok(shortest)
}

/// Candidates with their seconds at the power limit.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive count")]
fn at_limit(
    device: &Device,
    launch: &impl Fn(usize) -> Result<()>,
    candidates: &[(usize, f64)],
) -> Result<Vec<(usize, f64)>> {
    let turn = |(candidate, time)| timed(device, launch, candidate, launches(TURN_SECONDS, time));
    for _ in 0..(WARM_UP_SECONDS / TURN_SECONDS) as usize {
        turn(candidates[0])?;
    }
    let mut times = vec![Vec::with_capacity(TURNS); candidates.len()];
    for _ in 0..TURNS {
        for (times, candidate) in times.iter_mut().zip(candidates) {
            times.push(turn(*candidate)?);
        }
    }
    Ok(times.iter_mut().zip(candidates).map(|(times, (candidate, _))| (*candidate, median(times))).collect())
}

/// As many launches, which take `time` each, as take this long together.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive count")]
fn launches(seconds: f64, time: f64) -> usize {
    (seconds / time).ceil().max(1.0) as usize
}

/// Seconds of one of so many launches.
#[expect(clippy::cast_precision_loss, reason = "a small count")]
fn timed(
    device: &Device,
    launch: &impl Fn(usize) -> Result<()>,
    candidate: usize,
    launches: usize,
) -> Result<f64> {
    let begin = mark(&device.stream)?;
    for _ in 0..launches {
        launch(candidate)?;
    }
    Ok(seconds(&begin, &mark(&device.stream)?)? / launches as f64)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Of candidates with their times, the first, or one that takes less than this share of the time of those before it.
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
