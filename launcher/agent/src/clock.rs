//! The time of day.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Since 1970 (UTC); nothing where the clock is set to before.
pub fn unix() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The same in milliseconds, as messages and records have it.
pub fn unix_ms() -> u64 {
    u64::try_from(unix().as_millis()).unwrap_or(u64::MAX)
}
