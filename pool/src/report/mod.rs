//! What a pool holds and did, for people and their tools.
//!
//! - `memory_viz`: PyTorch's snapshot viewer; `perfetto`: counters over time in a trace; `rmm`: RAPIDS' replay log.

mod memory_viz;
mod perfetto;
mod rmm;

use std::path::Path;

use crate::core::{BlockInfo, Site};
use crate::stats::Stats;
use crate::trace::Event;

/// All blocks and the last events of a pool, as of one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Number of the device, for the reader.
    pub device: u32,
    /// Blocks by segment: a range of addresses with memory.
    pub segments: Vec<Vec<BlockInfo>>,
    /// The last events, oldest first; empty unless [`Options::trace`](crate::Options::trace) is set.
    pub events: Vec<Event>,
    /// The counts.
    pub stats: Stats,
}

impl Snapshot {
    /// Live bytes and buffers by who asked for them, most bytes first: what leaks, when nothing should be live.
    pub fn by_site(&self) -> Vec<(Option<Site>, u64, u64)> {
        by_site(&self.segments)
    }

    /// Writes a file for PyTorch's memory_viz.
    pub fn write_memory_viz(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.memory_viz().map_err(std::io::Error::other)?)
    }
}

/// Live bytes and buffers of a survey by who asked for them, most bytes first.
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

/// What a buffer is for; empty if nobody said.
fn tag(site: Option<Site>) -> &'static str {
    site.map_or("", |site| site.tag)
}
