//! The pickle file of PyTorch's memory viewer (<https://pytorch.org/memory_viz>): the structure returned by
//! `torch.cuda.memory._snapshot()`, in pickle protocol 2.
//!
//! The viewer derives the addresses of blocks from their sizes, so the blocks of a segment must tile it. It replays the
//! trace backwards from the final state, so blocks and events must be from the same moment.

use serde::Serialize;

use super::Snapshot;
use crate::core::{BlockInfo, Site};
use crate::trace::{Action, Event};

#[derive(Serialize)]
struct Root {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Entry>>,
}

#[derive(Serialize)]
struct Segment {
    device: u32,
    address: u64,
    total_size: u64,
    allocated_size: u64,
    active_size: u64,
    requested_size: u64,
    stream: u8,
    segment_type: &'static str,
    segment_pool_id: (u8, u8),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<Block>,
}

#[derive(Serialize)]
struct Block {
    address: u64,
    size: u64,
    requested_size: u64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct Frame {
    filename: &'static str,
    line: u32,
    name: &'static str,
}

#[derive(Serialize)]
struct Entry {
    action: &'static str,
    /// Address of the buffer; absent for a failed request, which has `device_free` instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<u64>,
    size: u64,
    stream: u8,
    time_us: u64,
    frames: Vec<Frame>,
}

impl Snapshot {
    /// Returns the contents of a file for PyTorch's memory viewer.
    ///
    /// # Errors
    /// If the pickle cannot be serialised.
    pub fn memory_viz(&self) -> Result<Vec<u8>, serde_pickle::Error> {
        let mut device_traces: Vec<Vec<Entry>> = (0..self.device).map(|_| Vec::new()).collect();
        device_traces.push(self.events.iter().flat_map(entries).collect());
        let segments = self.segments.iter().map(|blocks| segment(self.device, blocks)).collect();
        serde_pickle::to_vec(&Root { segments, device_traces }, serde_pickle::SerOptions::new().proto_v2())
    }
}

fn segment(device: u32, blocks: &[BlockInfo]) -> Segment {
    let total = |bytes: &dyn Fn(&BlockInfo) -> u64| blocks.iter().map(bytes).sum();
    let live: u64 = total(&|block| if block.requested.is_some() { block.bytes } else { 0 });
    Segment {
        device,
        address: blocks.first().map_or(0, |block| block.address),
        total_size: total(&|block| block.bytes),
        allocated_size: live,
        active_size: live,
        requested_size: total(&|block| block.requested.unwrap_or(0)),
        stream: 0,
        segment_type: "large",
        segment_pool_id: (0, 0),
        is_expandable: true,
        frames: Vec::new(),
        blocks: blocks.iter().map(block).collect(),
    }
}

fn block(block: &BlockInfo) -> Block {
    let live = block.requested.is_some();
    Block {
        address: block.address,
        size: block.bytes,
        requested_size: block.requested.unwrap_or(0),
        state: if live { "active_allocated" } else { "inactive" },
        frames: if live { frames(block.site) } else { Vec::new() },
    }
}

/// Returns the entries of an event. A free has two entries, requested and completed, which the viewer combines.
fn entries(event: &Event) -> Vec<Entry> {
    let actions: &[&'static str] = match event.action {
        Action::Alloc => &["alloc"],
        Action::Free => &["free_requested", "free_completed"],
        Action::OutOfMemory => &["oom"],
    };
    let failed = event.action == Action::OutOfMemory;
    let entry = |action: &&'static str| Entry {
        action,
        addr: (!failed).then_some(event.address),
        device_free: failed.then_some(0),
        size: event.bytes,
        stream: event.stream.0,
        time_us: event.micros,
        frames: frames(event.site),
    };
    actions.iter().map(entry).collect()
}

fn frames(site: Option<Site>) -> Vec<Frame> {
    site.map(|site| Frame {
        filename: site.location.file(),
        line: site.location.line(),
        name: if site.tag.is_empty() { "alloc" } else { site.tag },
    })
    .into_iter()
    .collect()
}
