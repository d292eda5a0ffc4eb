//! The current activity of a training thread, in a record of fixed size that outlives the thread's process.
//!
//! The agent creates a file in memory for each worker, and the worker overwrites it at each change of phase and around
//! the start of each collective. So the last record can be read after SIGKILL, and while the process is suspended.
//!
//! A reader may see a partial write, whose bytes become visible in any order. The record therefore ends with a hash.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use xxhash_rust::xxh3::xxh3_64;

use crate::v1::{Phase, RecordedActivity};

/// Size of a record in bytes.
pub const BYTES: usize = 48;
/// Position of the hash, which covers all bytes before it.
const HASH_OFFSET: usize = 40;
/// Version of the layout.
const LAYOUT_VERSION: u32 = 2;

/// The current activity of a training thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Start of the phase, as the time since 1970.
    pub since: Duration,
    /// The phase.
    pub phase: Phase,
    /// The current step, from 1; 0 before the first.
    pub step: u64,
    /// Number of collectives that the thread has started.
    pub collectives: u64,
    /// Number of the last collective, from 1, counted since the thread last waited for all collectives.
    pub bucket: u32,
    /// True if the thread is in the call that starts this collective.
    pub starting: bool,
}

impl Activity {
    /// Encodes the record.
    pub fn encode(&self) -> [u8; BYTES] {
        let phase = u32::try_from(i32::from(self.phase)).unwrap_or_default();
        let nanos = u64::try_from(self.since.as_nanos()).unwrap_or(u64::MAX);
        let mut record = [0; BYTES];
        let mut put = |at: usize, bytes: &[u8]| record[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &LAYOUT_VERSION.to_le_bytes());
        put(4, &phase.to_le_bytes());
        put(8, &self.step.to_le_bytes());
        put(16, &self.collectives.to_le_bytes());
        put(24, &self.bucket.to_le_bytes());
        put(28, &u32::from(self.starting).to_le_bytes());
        put(32, &nanos.to_le_bytes());
        let hash = xxh3_64(&record[..HASH_OFFSET]);
        record[HASH_OFFSET..].copy_from_slice(&hash.to_le_bytes());
        record
    }

    /// Decodes a record. Returns `None` if the record is being written, or is of another version.
    pub fn decode(record: &[u8; BYTES]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
        let short = |at: usize| Some(u32::from_le_bytes(record.get(at..at + 4)?.try_into().ok()?));
        if short(0)? != LAYOUT_VERSION || long(HASH_OFFSET)? != xxh3_64(&record[..HASH_OFFSET]) {
            return None;
        }
        Some(Self {
            since: Duration::from_nanos(long(32)?),
            phase: i32::try_from(short(4)?).ok().and_then(|phase| Phase::try_from(phase).ok())?,
            step: long(8)?,
            collectives: long(16)?,
            bucket: short(24)?,
            starting: short(28)? != 0,
        })
    }

    /// Returns the time since 1970.
    pub fn now() -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

impl From<Activity> for RecordedActivity {
    fn from(activity: Activity) -> Self {
        Self {
            phase: activity.phase.into(),
            step: activity.step,
            collectives: activity.collectives,
            bucket: activity.bucket,
            starting: activity.starting,
            unix_ms: u64::try_from(activity.since.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_survives_encoding_and_a_torn_one_is_refused() {
        let activity = Activity {
            since: Duration::from_millis(1_234_567),
            phase: Phase::AllReduce,
            step: 7,
            collectives: 91,
            bucket: 3,
            starting: true,
        };
        let next = Activity { step: 8, bucket: 4, ..activity };
        let (old, new) = (activity.encode(), next.encode());
        assert_eq!((Activity::decode(&old), Activity::decode(&new)), (Some(activity), Some(next)));
        // Each bit stands for one differing group of bytes: some processors make them visible in any order.
        const GROUP: usize = 4;
        let differing: Vec<usize> =
            (0..BYTES).step_by(GROUP).filter(|at| old[*at..at + GROUP] != new[*at..at + GROUP]).collect();
        for written in 1..(1_u32 << differing.len()) - 1 {
            let mut torn = old;
            for (_, at) in differing.iter().enumerate().filter(|(bit, _)| written >> bit & 1 == 1) {
                torn[*at..at + GROUP].copy_from_slice(&new[*at..at + GROUP]);
            }
            assert_eq!(Activity::decode(&torn), None, "groups {written:b} written");
        }
        assert_eq!(Activity::decode(&[0; BYTES]), None);
    }
}
