//! Shared memory in which a worker records the activity of its training thread. It belongs to this process, so the last
//! record can be read even when the worker is stopped or killed.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use xlaunch_proto::activity::{Activity, BYTES};

/// Maximum number of attempts to read a record that is being written.
const MAX_READS: u32 = 100;

/// The activity record of one worker.
#[derive(Clone, Debug)]
pub(crate) struct ActivityRecord(Arc<OwnedFd>);

impl ActivityRecord {
    /// Creates an empty record.
    pub(crate) fn create() -> std::io::Result<Self> {
        Ok(Self(Arc::new(memfd_create("xlaunch-activity", MemfdFlags::CLOEXEC)?)))
    }

    /// Returns the file for the worker, which inherits it under the same number.
    pub(crate) fn file(&self) -> Arc<OwnedFd> {
        self.0.clone()
    }

    pub(crate) fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Reads the last record; `None` if there is none.
    pub(crate) fn read(&self) -> Option<Activity> {
        let mut record = [0; BYTES];
        (0..MAX_READS).find_map(|_| {
            let read = rustix::io::pread(&*self.0, &mut record, 0).ok()?;
            Activity::decode(&record).filter(|_| read == BYTES)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_readable_after_its_writer_is_gone() {
        let record = ActivityRecord::create().unwrap();
        assert_eq!(record.read(), None);
        let activity = Activity { step: 9, ..Activity::default() };
        let path = format!("/proc/self/fd/{}", record.number());
        fs_err::write(path, activity.encode()).unwrap();
        assert_eq!(record.read(), Some(activity));
    }
}
