//! A model of what an allocator may do, and a way to drive both from bytes.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test file uses its part; a test that cannot go on fails"
)]

use std::collections::BTreeMap;

use xlaunch_pool::Place;
use xlaunch_pool::backing::sim::Sim;
use xlaunch_pool::backing::{Backing, Purpose, Segments, Virtual};
use xlaunch_pool::core::{Core, GRANULE, Handle, Refusal, Request, StreamId};

/// One thing that a program does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Alloc { bytes: u64, stream: usize, high: bool, registered: bool },
    Free { which: usize },
    RecordUse { which: usize, stream: usize },
    Join { from: usize, to: usize },
    HostWait { stream: usize },
    Trim,
    Limit { bytes: u64 },
    External { bytes: u64 },
    EndExternal,
    Fail { after: u64, count: u64 },
}

const STREAMS: usize = 3;
const MIB: u64 = 1 << 20;

impl Op {
    /// An operation for every four bytes: the first says which, the others how.
    pub(crate) fn decode(bytes: [u8; 4]) -> Self {
        let [kind, a, b, c] = bytes;
        let (x, y) = (u64::from(a) << 8 | u64::from(b), usize::from(c));
        let stream = y % STREAMS;
        match kind % 32 {
            0..14 => {
                let bytes = match c >> 6 {
                    0 => x % 2048,
                    1 => x * 3,
                    2 => x * 40,
                    _ => x % 64 * 128 * 1024,
                };
                Self::Alloc { bytes, stream, high: c & 8 != 0, registered: c & 0x37 == 0x37 }
            }
            14..25 => Self::Free { which: usize::from(a) },
            25 => Self::RecordUse { which: usize::from(a), stream },
            26 => Self::Join { from: stream, to: usize::from(a) % STREAMS },
            27 => Self::HostWait { stream },
            28 => Self::Trim,
            29 => Self::Limit { bytes: if c & 1 == 0 { u64::MAX } else { x % 64 * MIB } },
            30 if c & 1 == 0 => Self::External { bytes: x * 64 },
            30 => Self::EndExternal,
            _ => Self::Fail { after: u64::from(a % 8), count: u64::from(b % 4) },
        }
    }
}

struct Live {
    handle: Handle,
    address: u64,
    bytes: u64,
    value: u64,
    /// Streams whose work reads it.
    users: Vec<StreamId>,
}

/// An allocator over a device of the imagination, with its oracle.
pub(crate) struct Driven {
    pub(crate) core: Core,
    pub(crate) sim: Sim,
    streams: Vec<StreamId>,
    live: Vec<Live>,
    /// Address to end, of live buffers.
    ranges: BTreeMap<u64, u64>,
    external: Vec<u64>,
    values: u64,
    most_held: u64,
}

impl Driven {
    pub(crate) fn new(contiguous: bool, lag: usize) -> Self {
        let sim = Sim::new(256 * MIB);
        let backing: Box<dyn Backing> = if contiguous {
            Box::new(Virtual::new(sim.clone(), 4096 * MIB).unwrap())
        } else {
            Box::new(Segments::new(sim.clone()))
        };
        let mut core = Core::new(backing);
        let mut streams = vec![StreamId::default()];
        streams.extend((1..STREAMS).map(|_| core.add_stream().unwrap()));
        sim.lag(streams[lag % STREAMS]);
        Self {
            core,
            sim,
            streams,
            live: Vec::new(),
            ranges: BTreeMap::new(),
            external: Vec::new(),
            values: 0,
            most_held: 0,
        }
    }

    /// Does it, and checks all that can be seen from outside.
    pub(crate) fn step(&mut self, op: Op) {
        let (held, limit) = (self.held(), self.core.limit());
        match op {
            Op::Alloc { bytes, stream, high, registered } => self.alloc(bytes, stream, high, registered),
            Op::Free { which } => {
                if !self.live.is_empty() {
                    self.free(which % self.live.len());
                }
            }
            Op::RecordUse { which, stream } => {
                if !self.live.is_empty() {
                    let index = which % self.live.len();
                    self.record_use(index, self.streams[stream]);
                }
            }
            Op::Join { from, to } if from != to => {
                self.sim.join(self.streams[from], self.streams[to]);
                self.core.joined(self.streams[from], self.streams[to]);
            }
            Op::Join { .. } => {}
            Op::HostWait { stream } => {
                self.sim.wait(self.streams[stream]);
                self.core.host_waited(self.streams[stream]);
            }
            Op::Trim => drop(self.core.trim()),
            Op::Limit { bytes } => drop(self.core.set_limit(bytes)),
            Op::External { bytes } => {
                if self.core.add_external(bytes).is_ok() {
                    self.external.push(bytes);
                }
            }
            Op::EndExternal => {
                if let Some(bytes) = self.external.pop() {
                    self.core.remove_external(bytes);
                }
            }
            Op::Fail { after, count } => self.sim.fail(self.sim.calls() + after, count),
        }
        // A limit set below what is held cannot be kept at once, but nothing may be added to it.
        let limit = limit.min(self.core.limit());
        assert!(self.held() <= limit || self.held() <= held, "{op:?}: {} held of {limit}", self.held());
        self.most_held = self.most_held.max(self.held());
    }

    /// Physical bytes and registered ones.
    fn held(&self) -> u64 {
        self.sim.held() + self.external.iter().sum::<u64>()
    }

    fn alloc(&mut self, bytes: u64, stream: usize, high: bool, registered: bool) {
        let stream = self.streams[stream];
        let request = Request {
            stream,
            place: if high { Place::High } else { Place::Low },
            purpose: if registered { Purpose::Registered } else { Purpose::General },
            ..Request::new(bytes)
        };
        let handle = match self.core.alloc(&request) {
            Ok(handle) => handle,
            Err(Refusal::TooLarge { .. }) => panic!("{bytes} bytes fit the range"),
            Err(Refusal::Limit { .. } | Refusal::Driver(_)) => return,
        };
        let address = self.core.address(handle).unwrap();
        let rounded = bytes.max(1).next_multiple_of(GRANULE);
        assert_eq!(address % GRANULE, 0);
        let below = self.ranges.range(..address + rounded).next_back();
        assert!(below.is_none_or(|(_, end)| *end <= address), "{address:#x} overlaps a live buffer");
        self.ranges.insert(address, address + rounded);
        if registered {
            let (start, len) = self.core.segment_of(handle).unwrap();
            assert!(start <= address && address + rounded <= start + len, "one segment holds it");
        }
        self.values += 1;
        self.sim.write(stream, address, bytes, self.values);
        self.live.push(Live { handle, address, bytes, value: self.values, users: vec![stream] });
    }

    fn record_use(&mut self, index: usize, stream: StreamId) {
        let live = &mut self.live[index];
        // A program that shares a buffer orders the second stream behind the first.
        let owner = live.users[0];
        if owner != stream {
            self.sim.join(owner, stream);
            self.core.joined(owner, stream);
        }
        self.sim.read(stream, live.address, live.bytes, live.value);
        self.core.record_use(live.handle, stream).unwrap();
        live.users.push(stream);
    }

    fn free(&mut self, index: usize) {
        let live = self.live.swap_remove(index);
        self.sim.read(live.users[0], live.address, live.bytes, live.value);
        self.ranges.remove(&live.address);
        self.core.free(live.handle).unwrap();
        assert!(self.core.free(live.handle).is_err(), "a second free is refused");
        assert!(self.core.address(live.handle).is_err());
    }

    /// Frees all, and checks that nothing is left and no stream read what was not its own.
    pub(crate) fn finish(mut self) {
        self.sim.heal();
        while !self.live.is_empty() {
            self.free(0);
        }
        self.core.check().unwrap();
        assert_eq!(self.core.books().live.current(), 0);
        assert_eq!(self.core.books().requested.current(), 0);
        self.core.trim().unwrap();
        self.core.trim().unwrap();
        assert_eq!(self.core.books().mapped.current(), 0);
        // What a failed call left is given back with the next mapping.
        let handle = self.core.set_limit(u64::MAX).and_then(|()| self.core.alloc(&Request::new(1)));
        self.core.free(handle.unwrap()).unwrap();
        self.core.trim().unwrap();
        assert_eq!(self.sim.held(), 0, "the driver has everything back");
        let races = self.sim.finish();
        assert!(races.is_empty(), "{races:?}");
    }
}
