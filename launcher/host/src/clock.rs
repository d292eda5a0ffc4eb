//! Wall-clock time, time since boot, and how long idle event loops sleep.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chrono::DateTime;

/// Time that an event loop sleeps if it has no deadline.
pub const IDLE_SLEEP: Duration = Duration::from_secs(3600);

/// Time since the Unix epoch; zero if the clock is set to an earlier time.
pub fn unix() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Formats a Unix time in UTC, such as `20261121-045035`.
pub fn timestamp(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.unwrap_or_default().format("%Y%m%d-%H%M%S").to_string()
}

/// Milliseconds since boot, including time suspended. Not affected by setting the clock.
pub fn uptime_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let milliseconds = Duration::try_from(time).unwrap_or_default().as_millis();
    u64::try_from(milliseconds).unwrap_or(u64::MAX)
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    u64::try_from(unix().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_utc_calendar_dates() {
        assert_eq!(timestamp(0), "19700101-000000");
        assert_eq!(timestamp(951_827_696), "20000229-123456");
        assert_eq!(timestamp(1_795_236_635), "20261121-045035");
    }
}
