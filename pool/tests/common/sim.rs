//! A simulated device: addresses without memory, streams that run late, and driver calls that fail on demand.
//!
//! [`Sim`] tracks what is mapped and panics on a call whose behaviour a driver leaves undefined. Work submitted to its
//! streams runs as late as possible, and the stream chosen by [`Sim::set_lagging`] runs only when something waits for
//! it: a missing wait between streams shows as a wrong value.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xlaunch_pool::backing::{DriverFailure, Purpose, Result, SegmentDriver, Streams, VirtualDriver};
use xlaunch_pool::{MAX_STREAMS, StreamId};

const GRANULARITY: u64 = 2 << 20;
/// First address.
const BASE: u64 = 1 << 44;

/// A handle to the device. One clone is the driver of a back end, another one belongs to the test.
#[derive(Clone, Debug)]
pub(crate) struct Sim {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes of physical memory.
    total: u64,
    allocated: u64,
    max_allocated: u64,
    /// Number of driver calls so far.
    calls: u64,
    /// Calls that fail: number of the first one, and their count.
    fail: Option<(u64, u64)>,
    next_address: u64,
    next_memory: u64,
    /// Physical allocations, from handle to size.
    memories: HashMap<u64, u64>,
    /// Mapped ranges, from address to length.
    mapped: BTreeMap<u64, u64>,
    streams: [VecDeque<Work>; MAX_STREAMS],
    lagging: Option<usize>,
    events: u64,
    completed: HashSet<u64>,
    /// The values written last, as disjoint ranges: start to end and value.
    contents: BTreeMap<u64, (u64, u64)>,
    errors: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Write { address: u64, bytes: u64, value: u64 },
    Read { address: u64, bytes: u64, value: u64 },
    Record(u64),
    Wait(u64),
}

impl Sim {
    /// Creates a device with `total` bytes of memory.
    pub(crate) fn new(total: u64) -> Self {
        let state = State { total, next_address: BASE, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Makes `count` driver calls fail, starting with number `first`, counted from zero over the life of the device.
    pub(crate) fn fail(&self, first: u64, count: u64) {
        self.state().fail = Some((first, count));
    }

    /// Ends the effect of [`fail`](Self::fail).
    pub(crate) fn heal(&self) {
        self.state().fail = None;
    }

    /// Returns the number of driver calls so far, including failed ones.
    pub(crate) fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Returns the number of physical bytes that are allocated now.
    pub(crate) fn held(&self) -> u64 {
        self.state().allocated
    }

    /// Returns the largest number of physical bytes allocated so far.
    pub(crate) fn max_held(&self) -> u64 {
        self.state().max_allocated
    }

    /// Makes this stream run only when something waits for it.
    pub(crate) fn set_lagging(&self, stream: StreamId) {
        self.state().lagging = Some(stream.index());
    }

    /// Submits work to `stream` that writes `value` to a buffer.
    pub(crate) fn write(&self, stream: StreamId, address: u64, bytes: u64, value: u64) {
        self.state().streams[stream.index()].push_back(Work::Write { address, bytes, value });
    }

    /// Submits work to `stream` that expects `value` in a buffer.
    pub(crate) fn read(&self, stream: StreamId, address: u64, bytes: u64, value: u64) {
        self.state().streams[stream.index()].push_back(Work::Read { address, bytes, value });
    }

    /// Makes `to` wait for `from`, like a program does; not counted as a driver call of the pool.
    pub(crate) fn submit_wait(&self, from: StreamId, to: StreamId) {
        self.state().insert_wait(from, to);
    }

    /// Waits on the host for all work of `stream`.
    pub(crate) fn synchronize_stream(&self, stream: StreamId) {
        self.state().run_until_empty(stream.index());
    }

    /// Runs all remaining work. Returns a description of every wrong access.
    pub(crate) fn finish(&self) -> Vec<String> {
        let mut state = self.state();
        state.run_all();
        std::mem::take(&mut state.errors)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn call(&mut self, call: &'static str) -> Result<()> {
        let number = self.calls;
        self.calls += 1;
        match self.fail {
            Some((first, count)) if (first..first.saturating_add(count)).contains(&number) => {
                Err(DriverFailure { call, reason: "failure requested by the test".into() })
            }
            _ => Ok(()),
        }
    }

    fn allocate(&mut self, bytes: u64) -> Result<()> {
        if self.allocated + bytes > self.total {
            return Err(DriverFailure { call: "create", reason: "out of memory".into() });
        }
        self.allocated += bytes;
        self.max_allocated = self.max_allocated.max(self.allocated);
        Ok(())
    }

    fn map(&mut self, address: u64, bytes: u64) {
        let below = self.mapped.range(..address + bytes).next_back();
        assert!(below.is_none_or(|(start, len)| start + len <= address), "{address:#x} is mapped already");
        self.mapped.insert(address, bytes);
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        assert_eq!(self.mapped.remove(&address), Some(bytes), "{address:#x} is not mapped with this length");
    }

    fn insert_wait(&mut self, from: StreamId, to: StreamId) {
        self.events += 1;
        let event = self.events;
        self.streams[from.index()].push_back(Work::Record(event));
        self.streams[to.index()].push_back(Work::Wait(event));
    }

    fn run_all(&mut self) {
        while let Some(stream) = self.next_stream(None) {
            self.run_one(stream);
        }
    }

    fn run_until_empty(&mut self, stream: usize) {
        while !self.streams[stream].is_empty() {
            // Other streams run only as far as this one waits for them.
            let next = if self.blocked(stream) { self.next_stream(Some(stream)) } else { Some(stream) };
            let Some(next) = next else { unreachable!("waits are for work submitted before") };
            self.run_one(next);
        }
    }

    /// Returns a stream that can run, except `excluded`; the lagging one only if no other can run.
    fn next_stream(&self, excluded: Option<usize>) -> Option<usize> {
        let can = |stream: &usize| {
            Some(*stream) != excluded && !self.streams[*stream].is_empty() && !self.blocked(*stream)
        };
        let others = (0..MAX_STREAMS).filter(|stream| Some(*stream) != self.lagging);
        others.chain(self.lagging).find(can)
    }

    fn blocked(&self, stream: usize) -> bool {
        matches!(self.streams[stream].front(), Some(Work::Wait(event)) if !self.completed.contains(event))
    }

    fn run_one(&mut self, stream: usize) {
        let Some(work) = self.streams[stream].pop_front() else { return };
        match work {
            Work::Record(event) => drop(self.completed.insert(event)),
            Work::Wait(_) => {}
            Work::Write { address, bytes, value } => {
                self.check_mapped(stream, address, bytes);
                self.overwrite(address, address + bytes, value);
            }
            Work::Read { address, bytes, value } => {
                self.check_mapped(stream, address, bytes);
                let end = address + bytes;
                if !self.holds(address, end, value) {
                    let found: Vec<_> = self.contents.range(..end).rev().take(3).collect();
                    self.errors.push(format!(
                        "stream {stream} expected {value} in {address:#x}..{end:#x}, found {found:x?}"
                    ));
                }
            }
        }
    }

    fn overwrite(&mut self, start: u64, end: u64, value: u64) {
        if start == end {
            return;
        }
        // The range that starts before `start` may extend into the new one, and beyond it.
        if let Some((before, (reach, old))) = self.contents.range_mut(..start).next_back() {
            let (before, old, cut) = (*before, *old, *reach);
            if cut > start {
                self.contents.insert(before, (start, old));
                if cut > end {
                    self.contents.insert(end, (cut, old));
                }
            }
        }
        while let Some((inside, (reach, old))) = self.contents.range(start..end).next() {
            let (inside, reach, old) = (*inside, *reach, *old);
            self.contents.remove(&inside);
            if reach > end {
                self.contents.insert(end, (reach, old));
            }
        }
        self.contents.insert(start, (end, value));
    }

    fn holds(&self, start: u64, end: u64, value: u64) -> bool {
        let whole = self.contents.range(..=start).next_back();
        start == end || whole.is_some_and(|(_, (reach, found))| *reach >= end && *found == value)
    }

    fn check_mapped(&mut self, stream: usize, address: u64, bytes: u64) {
        let mut at = address;
        while at < address + bytes {
            match self.mapped.range(..=at).next_back() {
                Some((start, len)) if at < start + len => at = start + len,
                _ => {
                    self.errors.push(format!("stream {stream} accessed unmapped memory at {at:#x}"));
                    return;
                }
            }
        }
    }
}

impl Streams for Sim {
    fn synchronize(&mut self) -> Result<()> {
        let mut state = self.state();
        state.call("synchronize")?;
        state.run_all();
        Ok(())
    }

    fn insert_wait(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        let mut state = self.state();
        state.call("insert_wait")?;
        state.insert_wait(from, to);
        Ok(())
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        let state = self.state();
        Some((state.total - state.allocated, state.total))
    }
}

impl VirtualDriver for Sim {
    type Memory = u64;

    fn granularity(&self) -> u64 {
        GRANULARITY
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        let mut state = self.state();
        state.call("reserve")?;
        let address = state.next_address;
        state.next_address += bytes;
        Ok(address)
    }

    fn unreserve(&mut self, _: u64, _: u64) {}

    fn create(&mut self, bytes: u64, _: Purpose) -> Result<u64> {
        let mut state = self.state();
        state.call("create")?;
        state.allocate(bytes)?;
        state.next_memory += 1;
        let memory = state.next_memory;
        state.memories.insert(memory, bytes);
        Ok(memory)
    }

    fn map(&mut self, address: u64, bytes: u64, memory: u64) -> Result<()> {
        let mut state = self.state();
        state.call("map")?;
        assert_eq!(state.memories.get(&memory), Some(&bytes), "the memory is not allocated with this size");
        state.map(address, bytes);
        Ok(())
    }

    fn set_access(&mut self, _: u64, _: u64) -> Result<()> {
        self.state().call("set_access")
    }

    fn unmap(&mut self, address: u64, bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.call("unmap")?;
        state.unmap(address, bytes);
        Ok(())
    }

    fn release(&mut self, memory: u64, bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.call("release")?;
        assert_eq!(state.memories.remove(&memory), Some(bytes), "the memory is not allocated with this size");
        state.allocated -= bytes;
        Ok(())
    }
}

impl SegmentDriver for Sim {
    fn granularity(&self) -> u64 {
        GRANULARITY
    }

    fn allocate(&mut self, bytes: u64) -> Result<u64> {
        let mut state = self.state();
        state.call("allocate")?;
        state.allocate(bytes)?;
        let address = state.next_address;
        state.next_address += bytes;
        state.map(address, bytes);
        Ok(address)
    }

    fn free(&mut self, address: u64, bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.call("free")?;
        state.unmap(address, bytes);
        state.allocated -= bytes;
        Ok(())
    }
}
