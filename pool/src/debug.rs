//! Debug mode: buffers begin with a byte of choice, freed memory is poisoned, and both are looked after.
//!
//! A new buffer is filled with the chosen byte, so that a program that reads before it writes shows by its results. Bytes
//! behind a buffer's end and freed memory hold patterns that are checked when the memory is handed out again. All of it
//! happens at requests, never in a drop, and waits for the device: this is for finding faults.

use std::backtrace::Backtrace;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::backing::Result as DriverResult;
use crate::core::{BlockInfo, Core, Site};
use crate::error::{Corruption, CorruptionKind, PoolError};

/// What freed memory holds.
const POISON: u8 = 0xdb;
/// What the bytes behind a buffer's end hold.
const CANARY: u8 = 0xca;
/// Freed buffers remembered, to name who had the memory before.
const HISTORY: usize = 4096;

/// The bytes of a pool's memory, when no work touches them.
pub(crate) trait Bytes: Send {
    /// Sets them.
    fn fill(&mut self, address: u64, bytes: u64, value: u8) -> DriverResult<()>;
    /// Reads them.
    fn read(&mut self, address: u64, to: &mut [u8]) -> DriverResult<()>;
}

/// The patterns and what is known of them.
pub(crate) struct Debug {
    fill: u8,
    memory: Box<dyn Bytes>,
    /// Not poisoned yet.
    dropped: Vec<Dropped>,
    history: VecDeque<Dropped>,
    /// Poisoned ranges, disjoint: start and end.
    poisoned: Vec<(u64, u64)>,
    /// Bytes that the allocator had given back when the ranges above were known to be true.
    given_back: u64,
}

/// A buffer that was dropped.
#[derive(Clone, Debug)]
struct Dropped {
    address: u64,
    bytes: u64,
    requested: u64,
    site: Option<Site>,
    freed: Arc<Backtrace>,
}

impl std::fmt::Debug for Debug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Debug").field("fill", &self.fill).finish_non_exhaustive()
    }
}

impl Debug {
    pub(crate) fn new(fill: u8, memory: Box<dyn Bytes>) -> Self {
        Self {
            fill,
            memory,
            dropped: Vec::new(),
            history: VecDeque::new(),
            poisoned: Vec::new(),
            given_back: 0,
        }
    }

    /// A buffer was dropped just now, by this thread.
    pub(crate) fn dropped(&mut self, block: BlockInfo) {
        self.dropped.push(Dropped {
            address: block.address,
            bytes: block.bytes,
            requested: block.requested.unwrap_or(block.bytes),
            site: block.site,
            // Taken now, put into words when they are asked for: that is the slow part.
            freed: Arc::new(Backtrace::force_capture()),
        });
    }

    /// Checks and poisons what was dropped since the last request. Before the allocator hands anything out.
    pub(crate) fn settle(&mut self, core: &Core) -> Result<(), PoolError> {
        self.forget_unmapped(core);
        while let Some(dropped) = self.dropped.pop() {
            let end = dropped.address + dropped.bytes;
            let overrun = self.differs(dropped.address + dropped.requested, end, CANARY)?;
            self.memory.fill(dropped.address, dropped.bytes, POISON)?;
            self.poisoned.push((dropped.address, end));
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back(dropped.clone());
            if let Some(at) = overrun {
                return Err(corrupted(CorruptionKind::Overrun, &dropped, at));
            }
        }
        Ok(())
    }

    /// Checks a block that is about to be handed out, and prepares it.
    pub(crate) fn hand_out(&mut self, core: &Core, block: BlockInfo) -> Result<(), PoolError> {
        self.forget_unmapped(core);
        let (start, end) = (block.address, block.address + block.bytes);
        let mut wrong = None;
        let mut rest = Vec::with_capacity(self.poisoned.len());
        for (from, to) in std::mem::take(&mut self.poisoned) {
            if to <= start || end <= from {
                rest.push((from, to));
                continue;
            }
            wrong = wrong.or(self.differs(from.max(start), to.min(end), POISON)?);
            rest.extend([(from, start), (end, to)].into_iter().filter(|(from, to)| from < to));
        }
        self.poisoned = rest;
        let requested = block.requested.unwrap_or(block.bytes);
        self.memory.fill(start, requested, self.fill)?;
        self.memory.fill(start + requested, block.bytes - requested, CANARY)?;
        let Some(at) = wrong else { return Ok(()) };
        let covers = |dropped: &&Dropped| (dropped.address..dropped.address + dropped.bytes).contains(&at);
        match self.history.iter().rev().find(covers) {
            Some(dropped) => Err(corrupted(CorruptionKind::UseAfterFree, dropped, at)),
            None => Ok(()),
        }
    }

    /// The first address whose byte is not `value`.
    fn differs(&mut self, start: u64, end: u64, value: u8) -> DriverResult<Option<u64>> {
        let mut bytes = vec![0; (end - start) as usize];
        self.memory.read(start, &mut bytes)?;
        Ok(bytes.iter().position(|byte| *byte != value).map(|at| start + at as u64))
    }

    /// Memory that went back to the driver since lost its pattern.
    fn forget_unmapped(&mut self, core: &Core) {
        let given_back = core.books().mapped.removed;
        if std::mem::replace(&mut self.given_back, given_back) != given_back {
            self.poisoned.clear();
        }
    }
}

fn corrupted(kind: CorruptionKind, dropped: &Dropped, at: u64) -> PoolError {
    PoolError::Corrupted(Box::new(Corruption {
        kind,
        offset: at - dropped.address,
        requested: dropped.requested,
        allocated: dropped.site,
        freed: caller(&dropped.freed.to_string()),
    }))
}

/// The first place of a backtrace behind the buffer's drop that is not the standard library's.
fn caller(backtrace: &str) -> String {
    let places = backtrace.lines().filter_map(|line| line.trim_start().strip_prefix("at "));
    let mut behind_drop = places.skip_while(|place| !place.contains("src/buf.rs"));
    let own = |place: &str| place.contains("src/buf.rs") || place.contains("/library/");
    let unknown = "an unknown place: the program has no debug information";
    behind_drop.find(|place| !own(place)).unwrap_or(unknown).to_owned()
}

/// Memory of this process.
#[derive(Debug)]
pub(crate) struct HostBytes;

impl Bytes for HostBytes {
    fn fill(&mut self, address: u64, bytes: u64, value: u8) -> DriverResult<()> {
        // SAFETY: the range lies in a block that the allocator is about to hand out, or got back: nobody else uses it.
        unsafe { std::ptr::write_bytes(address as *mut u8, value, bytes as usize) };
        Ok(())
    }

    fn read(&mut self, address: u64, to: &mut [u8]) -> DriverResult<()> {
        // SAFETY: as above; host memory of the pool is always initialised.
        to.copy_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, to.len()) });
        Ok(())
    }
}
