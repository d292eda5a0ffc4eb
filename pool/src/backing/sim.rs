//! A device of the imagination: addresses without memory, streams that run late, calls that fail on demand.
//!
//! For tests of the allocator and of programs that use it. [`Sim`] keeps exact books of what is mapped and panics on a
//! call that a driver would answer with undefined behaviour. Work given to its streams is run as late as it may be: a
//! stream chosen by [`Sim::lag`] runs only when something waits for it, so that a missing order shows as a wrong value.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{DriverFailure, Purpose, Result, SegmentDriver, Streams, VirtualDriver};
use crate::core::{MAX_STREAMS, StreamId};

const GRANULARITY: u64 = 2 << 20;
/// Where the addresses begin.
const BASE: u64 = 1 << 44;

/// A handle to the device: the driver half goes to a backing, the other stays with the test.
#[derive(Clone, Debug)]
pub struct Sim {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    total: u64,
    created: u64,
    most_created: u64,
    /// Driver calls so far.
    calls: u64,
    /// Calls that fail: from this one on, so many.
    fail: Option<(u64, u64)>,
    next_address: u64,
    next_memory: u64,
    memories: HashMap<u64, u64>,
    /// Address to length.
    mapped: BTreeMap<u64, u64>,
    streams: [VecDeque<Work>; MAX_STREAMS],
    lag: Option<usize>,
    events: u64,
    done: HashSet<u64>,
    /// What was written last: start to end and value, of disjoint ranges.
    contents: BTreeMap<u64, (u64, u64)>,
    races: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Write { address: u64, bytes: u64, value: u64 },
    Read { address: u64, bytes: u64, value: u64 },
    Record(u64),
    Wait(u64),
}

impl Sim {
    /// A device with this much memory.
    pub fn new(total: u64) -> Self {
        let state = State { total, next_address: BASE, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Calls number `first` (from zero, over the life of the device) and the `count - 1` after it fail.
    pub fn fail(&self, first: u64, count: u64) {
        self.state().fail = Some((first, count));
    }

    /// Calls no longer fail.
    pub fn heal(&self) {
        self.state().fail = None;
    }

    /// Driver calls so far, failed ones included.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Physical bytes held now.
    pub fn held(&self) -> u64 {
        self.state().created
    }

    /// Most physical bytes ever held.
    pub fn most_held(&self) -> u64 {
        self.state().most_created
    }

    /// This stream's work is run as late as it may be.
    pub fn lag(&self, stream: StreamId) {
        self.state().lag = Some(stream.index());
    }

    /// Work of `stream` that writes `value` to a buffer.
    pub fn write(&self, stream: StreamId, address: u64, bytes: u64, value: u64) {
        self.state().streams[stream.index()].push_back(Work::Write { address, bytes, value });
    }

    /// Work of `stream` that expects `value` in a buffer.
    pub fn read(&self, stream: StreamId, address: u64, bytes: u64, value: u64) {
        self.state().streams[stream.index()].push_back(Work::Read { address, bytes, value });
    }

    /// Makes `to` wait for `from`, as a user's program does.
    pub fn join(&self, from: StreamId, to: StreamId) {
        self.state().order(from, to);
    }

    /// The host waits for all work of `stream`.
    pub fn wait(&self, stream: StreamId) {
        self.state().run_until_empty(stream.index());
    }

    /// Runs what is left, and says what was read wrongly.
    pub fn finish(&self) -> Vec<String> {
        let mut state = self.state();
        state.run_all();
        std::mem::take(&mut state.races)
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
                Err(DriverFailure { call, reason: "told to fail".into() })
            }
            _ => Ok(()),
        }
    }

    fn take(&mut self, bytes: u64) -> Result<()> {
        if self.created + bytes > self.total {
            return Err(DriverFailure { call: "create", reason: "out of memory".into() });
        }
        self.created += bytes;
        self.most_created = self.most_created.max(self.created);
        Ok(())
    }

    fn map(&mut self, address: u64, bytes: u64) {
        let below = self.mapped.range(..address + bytes).next_back();
        assert!(below.is_none_or(|(start, len)| start + len <= address), "mapped twice: {address:#x}");
        self.mapped.insert(address, bytes);
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        assert_eq!(self.mapped.remove(&address), Some(bytes), "unmapped what was not mapped: {address:#x}");
    }

    fn order(&mut self, from: StreamId, to: StreamId) {
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
            // The others run only as far as this one waits for them.
            let next = if self.blocked(stream) { self.next_stream(Some(stream)) } else { Some(stream) };
            let Some(next) = next else { unreachable!("waits are for work that was given before") };
            self.run_one(next);
        }
    }

    /// A stream that can run, other than `not`; the lagging one last.
    fn next_stream(&self, not: Option<usize>) -> Option<usize> {
        let can = |stream: &usize| {
            Some(*stream) != not && !self.streams[*stream].is_empty() && !self.blocked(*stream)
        };
        let others = (0..MAX_STREAMS).filter(|stream| Some(*stream) != self.lag);
        others.chain(self.lag).find(can)
    }

    fn blocked(&self, stream: usize) -> bool {
        matches!(self.streams[stream].front(), Some(Work::Wait(event)) if !self.done.contains(event))
    }

    fn run_one(&mut self, stream: usize) {
        let Some(work) = self.streams[stream].pop_front() else { return };
        match work {
            Work::Record(event) => drop(self.done.insert(event)),
            Work::Wait(_) => {}
            Work::Write { address, bytes, value } => {
                self.touch(stream, address, bytes);
                self.overwrite(address, address + bytes, value);
            }
            Work::Read { address, bytes, value } => {
                self.touch(stream, address, bytes);
                let end = address + bytes;
                if !self.holds(address, end, value) {
                    let found: Vec<_> = self.contents.range(..end).rev().take(3).collect();
                    self.races.push(format!(
                        "stream {stream} did not find {value} in {address:#x}..{end:#x}, but {found:x?}"
                    ));
                }
            }
        }
    }

    fn overwrite(&mut self, start: u64, end: u64, value: u64) {
        if start == end {
            return;
        }
        // The range that begins before may reach in, and beyond.
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

    fn touch(&mut self, stream: usize, address: u64, bytes: u64) {
        let mut at = address;
        while at < address + bytes {
            match self.mapped.range(..=at).next_back() {
                Some((start, len)) if at < start + len => at = start + len,
                _ => {
                    self.races.push(format!("stream {stream} touched unmapped memory at {at:#x}"));
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

    fn order(&mut self, from: StreamId, to: StreamId) -> Result<()> {
        let mut state = self.state();
        state.call("order")?;
        state.order(from, to);
        Ok(())
    }

    fn memory(&self) -> Option<(u64, u64)> {
        let state = self.state();
        Some((state.total - state.created, state.total))
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
        state.take(bytes)?;
        state.next_memory += 1;
        let memory = state.next_memory;
        state.memories.insert(memory, bytes);
        Ok(memory)
    }

    fn map(&mut self, address: u64, bytes: u64, memory: u64) -> Result<()> {
        let mut state = self.state();
        state.call("map")?;
        assert_eq!(state.memories.get(&memory), Some(&bytes), "mapped memory that is not there");
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
        assert_eq!(state.memories.remove(&memory), Some(bytes), "released twice");
        state.created -= bytes;
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
        state.take(bytes)?;
        let address = state.next_address;
        state.next_address += bytes;
        state.map(address, bytes);
        Ok(address)
    }

    fn free(&mut self, address: u64, bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.call("free")?;
        state.unmap(address, bytes);
        state.created -= bytes;
        Ok(())
    }
}
