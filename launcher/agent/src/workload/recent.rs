//! Recent durations of a repeated operation, to which hang timeouts adapt. Pure.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of durations kept.
pub(super) const RECENT_HISTORY: usize = 200;

/// The last [`RECENT_HISTORY`] durations.
#[derive(Clone, Debug, Default)]
pub(super) struct RecentDurations(VecDeque<Duration>);

impl RecentDurations {
    pub(super) fn record(&mut self, duration: Duration) {
        if self.0.len() == RECENT_HISTORY {
            self.0.pop_front();
        }
        self.0.push_back(duration);
    }

    /// Returns the 99th percentile; zero if there are no durations.
    pub(super) fn slow(&self) -> Duration {
        let mut sorted: Vec<Duration> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() * 99 / 100).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_is_the_99th_percentile_of_the_last_durations() {
        let second = Duration::from_secs;
        let mut recent = RecentDurations::default();
        assert_eq!(recent.slow(), Duration::ZERO);
        (1..=RECENT_HISTORY as u64).for_each(|number| recent.record(second(number)));
        assert_eq!(recent.slow(), second(199));
        (0..RECENT_HISTORY).for_each(|_| recent.record(second(7)));
        assert_eq!(recent.slow(), second(7), "older ones are forgotten");
    }
}
