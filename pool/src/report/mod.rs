//! Snapshots of a pool, and their file formats.
//!
//! - `memory_viz`: PyTorch's memory viewer;
//! - `perfetto`: counters over time, for Perfetto and Chrome;
//! - `rmm`: the replay log of the RAPIDS Memory Manager.

mod memory_viz;
mod perfetto;
mod rmm;

use std::path::Path;

use crate::core::{BlockInfo, Site};
use crate::stats::Stats;
use crate::trace::Event;

/// All blocks and recent events of a pool at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Number of the device in reports. A pool sets it to 0; callers with several devices may change it.
    pub device: u32,
    /// Free and used blocks; each inner list is a range of consecutive addresses.
    pub segments: Vec<Vec<BlockInfo>>,
    /// Recent events, oldest first; empty unless [`Options::trace`](crate::Options::trace) is set.
    pub events: Vec<Event>,
    /// The statistics.
    pub stats: Stats,
}

impl Snapshot {
    /// Returns live bytes and number of buffers by the site that allocated them, most bytes first. When nothing should
    /// be live, these are the leaks.
    pub fn by_site(&self) -> Vec<(Option<Site>, u64, u64)> {
        by_site(&self.segments)
    }

    /// Writes [`memory_viz`](Self::memory_viz) to a file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_memory_viz(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.memory_viz().map_err(std::io::Error::other)?)
    }
}

/// See [`Snapshot::by_site`].
pub(crate) fn by_site(segments: &[Vec<BlockInfo>]) -> Vec<(Option<Site>, u64, u64)> {
    let mut sites: Vec<(Option<Site>, u64, u64)> = Vec::new();
    for block in segments.iter().flatten().filter(|block| block.requested.is_some()) {
        match sites.iter_mut().find(|(site, _, _)| *site == block.site) {
            Some((_, bytes, buffers)) => {
                *bytes += block.bytes;
                *buffers += 1;
            }
            None => sites.push((block.site, block.bytes, 1)),
        }
    }
    sites.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
    sites
}
