//! The log format of the RAPIDS Memory Manager's replay benchmark: one line per allocation and free.

use std::fmt::Write;

use super::Snapshot;
use crate::trace::Action;

impl Snapshot {
    /// Returns the events as CSV with the columns `Thread,Time,Action,Pointer,Size,Stream`; times are in seconds.
    pub fn rmm_csv(&self) -> String {
        let mut csv = String::from("Thread,Time,Action,Pointer,Size,Stream\n");
        for event in &self.events {
            let action = match event.action {
                Action::Alloc => "allocate",
                Action::Free => "free",
                Action::OutOfMemory => "allocate failure",
            };
            let (seconds, micros) = (event.micros / 1_000_000, event.micros % 1_000_000);
            // Writing to a String cannot fail.
            let _ = writeln!(
                csv,
                "0,{seconds}.{micros:06},{action},{:#x},{},{}",
                event.address,
                event.bytes,
                event.stream.index()
            );
        }
        csv
    }
}
