//! Memory that a trace takes in this crate's allocator, and in models of others.

use std::collections::HashMap;
use std::time::Duration;

use serde::Serialize;
use xlaunch_pool::Place;
use xlaunch_pool::backing::{GRANULE, VirtualMemory};
use xlaunch_pool::core::{Core, Handle, Request};
use xlaunch_pool::plan::pack::{Life, lower_bound, pack};

use super::super::sim::Sim;
use super::size_classes::SizeClasses;
use super::torch::Torch;
use super::{Model, Op, Trace};

/// Time limit of the search for a plan.
const PACK_TIMEOUT: Duration = Duration::from_secs(1);

/// Memory that an allocator needs for a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) allocator: &'static str,
    /// Largest number of bytes mapped at any time.
    pub(crate) mapped_bytes: u64,
}

impl Trace {
    /// Returns the memory that each allocator maps for this number of steps: size classes, PyTorch's algorithm, this
    /// crate's allocator without and with a plan, and the lower bound of any placement.
    pub(crate) fn compare(&self, steps: usize) -> Vec<Outcome> {
        let (planned, bound) = self.planned();
        vec![
            Outcome {
                allocator: "power-of-two classes",
                mapped_bytes: self.run(SizeClasses::default(), steps),
            },
            Outcome { allocator: "PyTorch's algorithm", mapped_bytes: self.run(Torch::default(), steps) },
            Outcome { allocator: "xlaunch-pool", mapped_bytes: self.run(Ours::new(), steps) },
            Outcome { allocator: "xlaunch-pool, planned", mapped_bytes: planned },
            Outcome { allocator: "lower bound", mapped_bytes: bound },
        ]
    }

    /// Returns the number of driver calls for allocation by this crate's allocator in each step.
    pub(crate) fn driver_allocations(&self, steps: usize) -> Vec<u64> {
        let mut ours = Ours::new();
        let mut tokens = HashMap::new();
        replay(&mut ours, &mut tokens, &self.start, true);
        let mut step = || {
            let before = ours.core.counters().chunks.added;
            replay(&mut ours, &mut tokens, &self.step, false);
            ours.core.counters().chunks.added - before
        };
        (0..steps).map(|_| step()).collect()
    }

    fn run(&self, mut model: impl Model, steps: usize) -> u64 {
        let mut tokens = HashMap::new();
        replay(&mut model, &mut tokens, &self.start, true);
        for _ in 0..steps {
            replay(&mut model, &mut tokens, &self.step, false);
        }
        model.mapped()
    }

    /// Returns the bytes of the persistent buffers plus the region of a plan, and plus the lower bound of any plan.
    fn planned(&self) -> (u64, u64) {
        let granules = |bytes: u64| bytes.max(1).div_ceil(GRANULE) as u32;
        let mut start = HashMap::new();
        for op in &self.start {
            match *op {
                Op::Alloc { buffer, bytes } => drop(start.insert(buffer, granules(bytes))),
                Op::Free { buffer } => drop(start.remove(&buffer)),
            }
        }
        let mut lives: Vec<Life> = Vec::new();
        let mut open = HashMap::new();
        for (op, at) in self.step.iter().zip(0..) {
            match *op {
                Op::Alloc { buffer, bytes } => {
                    open.insert(buffer, lives.len());
                    lives.push(Life { granules: granules(bytes), birth: at, death: u32::MAX });
                }
                Op::Free { buffer } => {
                    if let Some(index) = open.remove(&buffer) {
                        lives[index].death = at;
                    }
                }
            }
        }
        let persistent: u64 = start.values().map(|granules| u64::from(*granules)).sum();
        let region = pack(&lives, PACK_TIMEOUT).granules;
        let bytes = |region: u32| (persistent + u64::from(region)) * GRANULE;
        (bytes(region), bytes(lower_bound(&lives)))
    }
}

fn replay(model: &mut impl Model, tokens: &mut HashMap<usize, u64>, ops: &[Op], persistent: bool) {
    for op in ops {
        match *op {
            Op::Alloc { buffer, bytes } => drop(tokens.insert(buffer, model.alloc(bytes, persistent))),
            Op::Free { buffer } => {
                if let Some(token) = tokens.remove(&buffer) {
                    model.free(token);
                }
            }
        }
    }
}

/// This crate's allocator over a simulated device.
struct Ours {
    core: Core,
    handles: HashMap<u64, Handle>,
    next: u64,
}

impl Ours {
    fn new() -> Self {
        const DEVICE: u64 = 1 << 40;
        let Ok(backing) = VirtualMemory::new(Sim::new(DEVICE), DEVICE / 2) else {
            unreachable!("calls of this device do not fail")
        };
        Self { core: Core::new(Box::new(backing)), handles: HashMap::new(), next: 0 }
    }
}

impl Model for Ours {
    fn alloc(&mut self, bytes: u64, persistent: bool) -> u64 {
        let place = if persistent { Place::Low } else { Place::High };
        if let Ok(handle) = self.core.alloc(&Request { place, ..Request::new(bytes) }) {
            self.handles.insert(self.next, handle);
        }
        self.next += 1;
        self.next - 1
    }

    fn free(&mut self, token: u64) {
        if let Some(handle) = self.handles.remove(&token) {
            // The handle was in the map, so it is live.
            let _ = self.core.free(handle);
        }
    }

    fn mapped(&self) -> u64 {
        self.core.counters().mapped.peak
    }
}
