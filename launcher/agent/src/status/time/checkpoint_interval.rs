//! The interval between checkpoints that loses the least time, by Young's formula: `sqrt(2 * stall * time between
//! failures)`. Shorter intervals save too often, longer ones repeat too many steps.

use std::time::Duration;

/// Number of failures after which their rate is known well enough.
const MIN_FAILURES: u64 = 2;
/// An interval that is off by less than this factor costs little.
const TOLERANCE: f64 = 2.0;

/// The configured interval; zero means none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointInterval {
    pub(crate) steps: u64,
    pub(crate) time: Duration,
}

/// Measurements of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) failures: u64,
    pub(crate) wall_seconds: f64,
    /// Time by which a checkpoint delays steps.
    pub(crate) stall_seconds: f64,
    /// Time that writing a checkpoint takes. Another one cannot begin before that.
    pub(crate) write_seconds: f64,
    pub(crate) step_seconds: f64,
}

/// Returns a line for the user if the configured interval is off by more than a factor of [`TOLERANCE`].
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rounded for people; the steps of a job fit"
)]
pub(crate) fn suggestion(configured: CheckpointInterval, measured: &Measured) -> Option<String> {
    if measured.failures < MIN_FAILURES || measured.step_seconds <= 0.0 {
        return None;
    }
    let between_failures = measured.wall_seconds / measured.failures as f64;
    let best = (2.0 * measured.stall_seconds * between_failures).sqrt();
    let best = best.max(measured.write_seconds).max(measured.step_seconds);
    let by_steps = (configured.steps > 0).then_some(configured.steps as f64 * measured.step_seconds);
    let by_time = (!configured.time.is_zero()).then_some(configured.time.as_secs_f64());
    let now = by_steps.into_iter().chain(by_time).fold(f64::INFINITY, f64::min);
    if (best / TOLERANCE..=best * TOLERANCE).contains(&now) {
        return None;
    }
    let steps = (best / measured.step_seconds).round().max(1.0) as u64;
    let now = if now.is_finite() { format!("every {now:.1} s") } else { "only at the end".into() };
    Some(format!(
        "with a failure every {between_failures:.0} s and {:.3} s per checkpoint, checkpoints every {best:.1} s \
         lose the least time (now: {now}): set `checkpoint.every = {steps}`",
        measured.stall_seconds
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOURLY: Measured = Measured {
        failures: 2,
        wall_seconds: 7200.0,
        stall_seconds: 0.5,
        write_seconds: 10.0,
        step_seconds: 0.25,
    };

    fn every(steps: u64, seconds: u64) -> CheckpointInterval {
        CheckpointInterval { steps, time: Duration::from_secs(seconds) }
    }

    #[test]
    fn interval_by_young_is_suggested_if_the_configured_one_is_off_by_a_factor_of_two() {
        // sqrt(2 * 0.5 s * 3600 s) = 60 s = 240 steps.
        let expected = "with a failure every 3600 s and 0.500 s per checkpoint, checkpoints every 60.0 s lose the \
                        least time (now: every 1000.0 s): set `checkpoint.every = 240`";
        assert_eq!(suggestion(every(4000, 0), &HOURLY).as_deref(), Some(expected));
        for (steps, seconds, suggested) in
            [(121, 0, false), (119, 0, true), (479, 0, false), (481, 0, true), (0, 100, false), (0, 20, true)]
        {
            let found = suggestion(every(steps, seconds), &HOURLY);
            assert_eq!(found.is_some(), suggested, "{steps} {seconds}: {found:?}");
        }
        assert!(suggestion(every(0, 0), &HOURLY).unwrap().contains("now: only at the end"));
        let soonest = every(4000, 60);
        assert_eq!(suggestion(soonest, &HOURLY), None, "whichever comes first counts");
    }

    #[test]
    fn nothing_is_suggested_after_one_failure_and_no_interval_shorter_than_a_save() {
        assert_eq!(suggestion(every(4000, 0), &Measured { failures: 1, ..HOURLY }), None);
        let slow = Measured { write_seconds: 300.0, ..HOURLY };
        assert!(suggestion(every(1, 0), &slow).unwrap().ends_with("`checkpoint.every = 1200`"));
    }
}
