//! An oracle for the allocator: runs byte-coded programs on it and checks everything that is observable from outside.

use std::collections::BTreeMap;

use xlaunch_pool::backing::{Backing, GRANULE, Purpose, Segments, VirtualMemory};
use xlaunch_pool::core::{AllocError, Core, Handle, Request};
use xlaunch_pool::{Place, StreamId};

use super::sim::Sim;

/// One operation of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Alloc {
        bytes: u64,
        stream: usize,
        high: bool,
        registered: bool,
    },
    Free {
        which: usize,
    },
    RecordUse {
        which: usize,
        stream: usize,
    },
    Wait {
        from: usize,
        to: usize,
    },
    Synchronize {
        stream: usize,
    },
    Trim,
    SetLimit {
        bytes: u64,
    },
    AddExternal {
        bytes: u64,
    },
    RemoveExternal,
    /// Makes driver calls fail.
    Fail {
        after: u64,
        count: u64,
    },
}

const STREAMS: usize = 3;
const MIB: u64 = 1 << 20;

impl Op {
    /// Decodes an operation: the first byte selects it, the others are its arguments.
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
            26 => Self::Wait { from: stream, to: usize::from(a) % STREAMS },
            27 => Self::Synchronize { stream },
            28 => Self::Trim,
            29 => Self::SetLimit { bytes: if c & 1 == 0 { u64::MAX } else { x % 64 * MIB } },
            30 if c & 1 == 0 => Self::AddExternal { bytes: x * 64 },
            30 => Self::RemoveExternal,
            _ => Self::Fail { after: u64::from(a % 8), count: u64::from(b % 4) },
        }
    }
}

struct Live {
    handle: Handle,
    address: u64,
    bytes: u64,
    /// Value that its first work wrote to it.
    value: u64,
    /// Streams whose work reads it; the first one is the stream for which it was allocated.
    users: Vec<StreamId>,
}

/// An allocator over a simulated device, with its oracle.
pub(crate) struct CheckedCore {
    pub(crate) core: Core,
    pub(crate) sim: Sim,
    streams: Vec<StreamId>,
    live: Vec<Live>,
    /// Live buffers, from address to end.
    ranges: BTreeMap<u64, u64>,
    external: Vec<u64>,
    values: u64,
}

impl CheckedCore {
    pub(crate) fn new(contiguous: bool, lagging: usize) -> Self {
        let sim = Sim::new(256 * MIB);
        let backing: Box<dyn Backing> = if contiguous {
            Box::new(VirtualMemory::new(sim.clone(), 4096 * MIB).unwrap())
        } else {
            Box::new(Segments::new(sim.clone()))
        };
        let mut core = Core::new(backing);
        let mut streams = vec![StreamId::default()];
        streams.extend((1..STREAMS).map(|_| core.add_stream().unwrap()));
        sim.set_lagging(streams[lagging % STREAMS]);
        Self {
            core,
            sim,
            streams,
            live: Vec::new(),
            ranges: BTreeMap::new(),
            external: Vec::new(),
            values: 0,
        }
    }

    /// Executes an operation and checks everything that is observable from outside.
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
            Op::Wait { from, to } if from != to => {
                self.sim.submit_wait(self.streams[from], self.streams[to]);
                self.core.record_wait(self.streams[from], self.streams[to]);
            }
            Op::Wait { .. } => {}
            Op::Synchronize { stream } => {
                self.sim.synchronize_stream(self.streams[stream]);
                self.core.record_synchronize(self.streams[stream]);
            }
            Op::Trim => drop(self.core.trim()),
            Op::SetLimit { bytes } => drop(self.core.set_limit(bytes)),
            Op::AddExternal { bytes } => {
                if self.core.add_external(bytes).is_ok() {
                    self.external.push(bytes);
                }
            }
            Op::RemoveExternal => {
                if let Some(bytes) = self.external.pop() {
                    self.core.remove_external(bytes);
                }
            }
            Op::Fail { after, count } => self.sim.fail(self.sim.calls() + after, count),
        }
        // If the limit is below the held bytes, nothing may be added.
        let limit = limit.min(self.core.limit());
        assert!(self.held() <= limit || self.held() <= held, "{op:?}: {} held of {limit}", self.held());
    }

    /// Returns physical and external bytes.
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
            Err(AllocError::TooLarge { .. }) => panic!("{bytes} bytes fit into the range"),
            Err(AllocError::Limit { .. } | AllocError::Driver(_)) => return,
        };
        let address = self.core.address(handle).unwrap();
        let rounded = bytes.max(1).next_multiple_of(GRANULE);
        assert_eq!(address % GRANULE, 0);
        let below = self.ranges.range(..address + rounded).next_back();
        assert!(below.is_none_or(|(_, end)| *end <= address), "{address:#x} overlaps a live buffer");
        self.ranges.insert(address, address + rounded);
        if registered {
            let (start, len) = self.core.segment_of(handle).unwrap();
            assert!(start <= address && address + rounded <= start + len, "the block is in one segment");
        }
        self.values += 1;
        self.sim.write(stream, address, bytes, self.values);
        self.live.push(Live { handle, address, bytes, value: self.values, users: vec![stream] });
    }

    fn record_use(&mut self, index: usize, stream: StreamId) {
        let live = &mut self.live[index];
        // A program that shares a buffer makes the second stream wait for the first.
        let owner = live.users[0];
        if owner != stream {
            self.sim.submit_wait(owner, stream);
            self.core.record_wait(owner, stream);
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
        assert!(self.core.free(live.handle).is_err(), "a second free fails");
        assert!(self.core.address(live.handle).is_err());
    }

    /// Frees everything, and checks that no memory remains and that no stream has read data of another one.
    pub(crate) fn finish(mut self) {
        self.sim.heal();
        while !self.live.is_empty() {
            self.free(0);
        }
        self.core.check().unwrap();
        assert_eq!(self.core.counters().live.current(), 0);
        assert_eq!(self.core.counters().requested.current(), 0);
        self.core.trim().unwrap();
        self.core.trim().unwrap();
        assert_eq!(self.core.counters().mapped.current(), 0);
        // Memory stranded by a failed call is freed before the next mapping.
        let handle = self.core.set_limit(u64::MAX).and_then(|()| self.core.alloc(&Request::new(1)));
        self.core.free(handle.unwrap()).unwrap();
        self.core.trim().unwrap();
        assert_eq!(self.sim.held(), 0, "all memory was freed");
        let errors = self.sim.finish();
        assert!(errors.is_empty(), "{errors:?}");
    }
}
