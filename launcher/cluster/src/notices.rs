//! Decides when a waiting node tells its user that it is waiting. Pure: time is an argument.

use std::time::{Duration, Instant};

/// The first report of a wait comes after this, so that the user sees a line within 5 s.
const FIRST_NOTICE_AFTER: Duration = Duration::from_secs(4);
const REPEATED_NOTICE_INTERVAL: Duration = Duration::from_secs(30);

/// Schedule of the lines about one wait.
#[derive(Debug)]
pub(super) struct Notices {
    next: Instant,
}

impl Notices {
    /// Starts the schedule: the wait begins at `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self { next: now + FIRST_NOTICE_AFTER }
    }

    /// Time at which the next line is due.
    pub(super) fn deadline(&self) -> Instant {
        self.next
    }

    /// Returns whether a line is due. If so, the caller prints it, and the next one is scheduled.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + REPEATED_NOTICE_INTERVAL;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_is_reported_within_5_s_and_then_every_30_s() {
        let start = Instant::now();
        let mut notices = Notices::new(start);
        let said: Vec<u64> =
            (0..100).filter(|second| notices.is_due(start + Duration::from_secs(*second))).collect();
        assert_eq!(said, [4, 34, 64, 94]);
    }
}
