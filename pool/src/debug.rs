//! Debug mode: fills new buffers with a chosen byte, and detects writes to memory that no buffer owns.
//!
//! The fill byte exposes a program that reads memory before writing it: its results change. Freed memory and the bytes
//! past the end of a buffer hold patterns, which are verified when the memory is allocated again. All of this happens
//! during requests, never in a drop, and synchronises the device: this mode is for finding faults.

use std::backtrace::Backtrace;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::backing::Result as DriverResult;
use crate::core::{BlockInfo, Core, Site};
use crate::error::{Corruption, CorruptionKind, PoolError};

/// Pattern of freed memory.
const POISON: u8 = 0xdb;
/// Pattern of the bytes between the end of a buffer and the end of its block.
const CANARY: u8 = 0xca;
/// Number of freed buffers remembered, to report the owner of overwritten memory.
const FREE_HISTORY: usize = 4096;

/// Access to the bytes of a pool's memory while no work uses them.
pub(crate) trait MemoryAccess: Send {
    fn fill(&mut self, address: u64, bytes: u64, value: u8) -> DriverResult<()>;
    fn read(&mut self, address: u64, to: &mut [u8]) -> DriverResult<()>;
}

/// The state of debug mode.
pub(crate) struct DebugMode {
    fill: u8,
    memory: Box<dyn MemoryAccess>,
    /// Buffers dropped since the last request and not poisoned yet.
    dropped: Vec<FreedBuffer>,
    history: VecDeque<FreedBuffer>,
    /// Poisoned ranges, which are disjoint: start and end.
    poisoned: Vec<(u64, u64)>,
    /// Number of bytes that the allocator had unmapped when `poisoned` was last correct.
    unmapped: u64,
}

#[derive(Clone, Debug)]
struct FreedBuffer {
    address: u64,
    bytes: u64,
    requested: u64,
    site: Option<Site>,
    freed: Arc<Backtrace>,
}

impl std::fmt::Debug for DebugMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DebugMode").field("fill", &self.fill).finish_non_exhaustive()
    }
}

impl DebugMode {
    pub(crate) fn new(fill: u8, memory: Box<dyn MemoryAccess>) -> Self {
        Self {
            fill,
            memory,
            dropped: Vec::new(),
            history: VecDeque::new(),
            poisoned: Vec::new(),
            unmapped: 0,
        }
    }

    /// Records that this thread is dropping a buffer.
    pub(crate) fn note_drop(&mut self, block: BlockInfo) {
        self.dropped.push(FreedBuffer {
            address: block.address,
            bytes: block.bytes,
            requested: block.requested.unwrap_or(block.bytes),
            site: block.site,
            // Captured now and resolved to source lines only for a report, as resolving is the slow part.
            freed: Arc::new(Backtrace::force_capture()),
        });
    }

    /// Verifies and poisons the buffers dropped since the last request, before the allocator reuses any of their
    /// memory.
    pub(crate) fn before_alloc(&mut self, core: &Core) -> Result<(), PoolError> {
        self.forget_unmapped(core);
        while let Some(dropped) = self.dropped.pop() {
            let end = dropped.address + dropped.bytes;
            let overrun = self.first_difference(dropped.address + dropped.requested, end, CANARY)?;
            self.memory.fill(dropped.address, dropped.bytes, POISON)?;
            self.poisoned.push((dropped.address, end));
            if self.history.len() == FREE_HISTORY {
                self.history.pop_front();
            }
            self.history.push_back(dropped.clone());
            if let Some(at) = overrun {
                return Err(corrupted(CorruptionKind::Overrun, &dropped, at));
            }
        }
        Ok(())
    }

    /// Verifies a newly allocated block and fills it.
    pub(crate) fn after_alloc(&mut self, core: &Core, block: BlockInfo) -> Result<(), PoolError> {
        self.forget_unmapped(core);
        let (start, end) = (block.address, block.address + block.bytes);
        let mut overwritten = None;
        let mut rest = Vec::with_capacity(self.poisoned.len());
        for (from, to) in std::mem::take(&mut self.poisoned) {
            if to <= start || end <= from {
                rest.push((from, to));
                continue;
            }
            overwritten = overwritten.or(self.first_difference(from.max(start), to.min(end), POISON)?);
            rest.extend([(from, start), (end, to)].into_iter().filter(|(from, to)| from < to));
        }
        self.poisoned = rest;
        let requested = block.requested.unwrap_or(block.bytes);
        self.memory.fill(start, requested, self.fill)?;
        self.memory.fill(start + requested, block.bytes - requested, CANARY)?;
        let Some(at) = overwritten else { return Ok(()) };
        let contains =
            |dropped: &&FreedBuffer| (dropped.address..dropped.address + dropped.bytes).contains(&at);
        match self.history.iter().rev().find(contains) {
            Some(dropped) => Err(corrupted(CorruptionKind::UseAfterFree, dropped, at)),
            None => Ok(()),
        }
    }

    /// Returns the address of the first byte that is not `value`.
    fn first_difference(&mut self, start: u64, end: u64, value: u8) -> DriverResult<Option<u64>> {
        let mut bytes = vec![0; (end - start) as usize];
        self.memory.read(start, &mut bytes)?;
        Ok(bytes.iter().position(|byte| *byte != value).map(|at| start + at as u64))
    }

    /// Forgets memory that was unmapped since the last request, as it has lost its pattern.
    fn forget_unmapped(&mut self, core: &Core) {
        let unmapped = core.counters().mapped.removed;
        if std::mem::replace(&mut self.unmapped, unmapped) != unmapped {
            self.poisoned.clear();
        }
    }
}

fn corrupted(kind: CorruptionKind, dropped: &FreedBuffer, at: u64) -> PoolError {
    PoolError::Corrupted(Box::new(Corruption {
        kind,
        offset: at - dropped.address,
        requested: dropped.requested,
        allocated: dropped.site,
        freed: caller_of_drop(&dropped.freed.to_string()),
    }))
}

/// Returns the innermost source line of a backtrace that is outside the drop of the buffer and the standard library.
fn caller_of_drop(backtrace: &str) -> String {
    // `Origin::buffer_dropped` is never inlined; `PoolBuf::drop` may be, and then has no line in the backtrace.
    const DROP: [&str; 2] = ["src/inner/origin.rs", "src/buf.rs"];
    let places = backtrace.lines().filter_map(|line| line.trim_start().strip_prefix("at "));
    let mut from_drop = places.skip_while(|place| !place.contains(DROP[0]));
    let internal = |place: &str| DROP.iter().any(|file| place.contains(file)) || place.contains("/library/");
    let unknown = "an unknown line: the program has no debug information";
    from_drop.find(|place| !internal(place)).unwrap_or(unknown).to_owned()
}

/// Memory of this process.
#[derive(Debug)]
pub(crate) struct HostMemory;

impl MemoryAccess for HostMemory {
    fn fill(&mut self, address: u64, bytes: u64, value: u8) -> DriverResult<()> {
        // SAFETY: the range is in a block that is being allocated or was just freed, so that no other code uses it.
        unsafe { std::ptr::write_bytes(address as *mut u8, value, bytes as usize) };
        Ok(())
    }

    fn read(&mut self, address: u64, to: &mut [u8]) -> DriverResult<()> {
        // SAFETY: as above; host memory of a pool is always initialised.
        to.copy_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, to.len()) });
        Ok(())
    }
}
