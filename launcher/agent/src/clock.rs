//! Wall-clock time, and how long loops sleep that wait for nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An event loop's sleep if no deadline is set.
pub(crate) const IDLE_SLEEP: Duration = Duration::from_secs(3600);

/// Time since the Unix epoch; zero if the clock is set to before it.
pub fn unix() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    u64::try_from(unix().as_millis()).unwrap_or(u64::MAX)
}
