//! Wall-clock time, time since boot, and how long idle event loops sleep.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long an event loop sleeps if it has no deadline.
pub const IDLE_SLEEP: Duration = Duration::from_secs(3600);

/// Time since the Unix epoch; zero if the clock is set to an earlier time.
pub fn unix() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
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
