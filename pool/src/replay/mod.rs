//! Recorded requests, replayed through this allocator and through models of others.
//!
//! A trace is the log of RAPIDS' replay format ([`Snapshot::rmm_csv`](crate::Snapshot::rmm_csv)). What comes up to the
//! last buffer that is never freed makes a program's persistent state; the rest is its step, which is repeated.

mod classes;
mod torch;

use std::collections::HashMap;
use std::time::Duration;

use crate::backing::Virtual;
use crate::backing::sim::Sim;
use crate::core::{Core, GRANULE, Handle, Place, Request};
use crate::plan::pack::{Life, lower_bound, pack};

/// One training step of each of the two models that the project measures itself by, bf16 on a GPU: name and log.
pub const RECORDED: [(&str, &str); 2] = [
    ("llama-28m, batch 32, 256 tokens", include_str!("../../traces/llama-28m.csv")),
    ("gpt2-124m, batch 32, 1024 tokens", include_str!("../../traces/gpt2-124m.csv")),
];

/// A request or a return; buffers are numbered in the order of their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A buffer of so many bytes.
    Alloc {
        /// Its number.
        buffer: usize,
        /// Its size.
        bytes: u64,
    },
    /// The buffer is dropped.
    Free {
        /// Its number.
        buffer: usize,
    },
}

/// A program's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// What happens once.
    pub start: Vec<Op>,
    /// What every step repeats.
    pub step: Vec<Op>,
}

/// A line of a trace that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct TraceError {
    /// Counted from one.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

/// What an allocator made of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Which allocator.
    pub name: &'static str,
    /// Most bytes held of the device.
    pub mapped: u64,
    /// Most bytes asked for at one time.
    pub live: u64,
}

/// An allocator in imagination: what matters is how much it maps.
trait Model {
    /// Serves a request; the token is for the return.
    fn alloc(&mut self, bytes: u64, persistent: bool) -> u64;
    fn free(&mut self, token: u64);
    /// Most bytes held so far.
    fn mapped(&self) -> u64;
}

impl Trace {
    /// Reads RAPIDS' replay log: a header, then `Thread,Time,Action,Pointer,Size,Stream`.
    pub fn parse(csv: &str) -> Result<Self, TraceError> {
        let mut ops = Vec::new();
        let mut live: HashMap<&str, usize> = HashMap::new();
        let mut buffers = 0;
        for (number, line) in (1..).zip(csv.lines()).skip(1).filter(|(_, line)| !line.is_empty()) {
            let wrong = |reason: &str| TraceError { line: number, reason: reason.into() };
            let fields: Vec<&str> = line.split(',').collect();
            let [_, _, action, pointer, bytes, _] = fields[..] else { return Err(wrong("not six fields")) };
            match action {
                "allocate" => {
                    let bytes = bytes.parse().map_err(|_| wrong("the size is no number"))?;
                    if live.insert(pointer, buffers).is_some() {
                        return Err(wrong("the address is in use"));
                    }
                    ops.push(Op::Alloc { buffer: buffers, bytes });
                    buffers += 1;
                }
                "free" => {
                    let buffer = live.remove(pointer).ok_or_else(|| wrong("the address is not in use"))?;
                    ops.push(Op::Free { buffer });
                }
                "allocate failure" => {}
                _ => return Err(wrong("neither allocate nor free")),
            }
        }
        let last = live.values().copied().max();
        let split = ops.iter().position(|op| matches!(op, Op::Alloc { buffer, .. } if Some(*buffer) == last));
        let step = ops.split_off(split.map_or(0, |at| at + 1));
        Ok(Self { start: ops, step })
    }

    /// Most bytes asked for at one time.
    pub fn peak_live(&self) -> u64 {
        let mut sizes = HashMap::new();
        let (mut live, mut peak) = (0, 0);
        for op in self.start.iter().chain(&self.step) {
            match *op {
                Op::Alloc { buffer, bytes } => {
                    sizes.insert(buffer, bytes);
                    live += bytes;
                    peak = peak.max(live);
                }
                Op::Free { buffer } => live -= sizes.remove(&buffer).unwrap_or(0),
            }
        }
        peak
    }

    /// What each allocator maps for this many steps: the two models, ours without and with a plan, and the least possible.
    pub fn compare(&self, steps: usize) -> Vec<Outcome> {
        let live = self.peak_live();
        let planned = self.planned();
        let mut models: [(&'static str, Box<dyn Model>); 3] = [
            ("power-of-two classes", Box::new(classes::Classes::default())),
            ("PyTorch's algorithm", Box::new(torch::Torch::default())),
            ("xlaunch", Box::new(Ours::new())),
        ];
        let mut outcomes: Vec<Outcome> = models
            .iter_mut()
            .map(|(name, model)| Outcome { name, mapped: self.run(model.as_mut(), steps), live })
            .collect();
        outcomes.push(Outcome { name: "xlaunch, planned", mapped: planned.0, live });
        outcomes.push(Outcome { name: "lower bound", mapped: planned.1, live });
        outcomes
    }

    /// Driver allocations that this crate's allocator makes in each step.
    pub fn driver_allocations(&self, steps: usize) -> Vec<u64> {
        let mut ours = Ours::new();
        let mut tokens = HashMap::new();
        replay(&mut ours, &mut tokens, &self.start, true);
        let mut step = || {
            let before = ours.core.books().chunks.added;
            replay(&mut ours, &mut tokens, &self.step, false);
            ours.core.books().chunks.added - before
        };
        (0..steps).map(|_| step()).collect()
    }

    fn run(&self, model: &mut dyn Model, steps: usize) -> u64 {
        let mut tokens = HashMap::new();
        replay(model, &mut tokens, &self.start, true);
        for _ in 0..steps {
            replay(model, &mut tokens, &self.step, false);
        }
        model.mapped()
    }

    /// Bytes of the persistent buffers and the planned region, and the least that any plan could do with.
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
        let region = pack(&lives, Duration::from_secs(1)).granules;
        let bytes = |region: u32| (persistent + u64::from(region)) * GRANULE;
        (bytes(region), bytes(lower_bound(&lives)))
    }
}

/// Gives a model these requests; `tokens` holds its live buffers.
fn replay(model: &mut dyn Model, tokens: &mut HashMap<usize, u64>, ops: &[Op], persistent: bool) {
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

/// This crate's allocator, over a device of the imagination.
struct Ours {
    core: Core,
    handles: HashMap<u64, Handle>,
    next: u64,
}

impl Ours {
    fn new() -> Self {
        const DEVICE: u64 = 1 << 40;
        let Ok(backing) = Virtual::new(Sim::new(DEVICE), DEVICE / 2) else {
            unreachable!("this device was not told to fail")
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
            // The handle is live: it was in the map.
            let _ = self.core.free(handle);
        }
    }

    fn mapped(&self) -> u64 {
        self.core.books().mapped.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "Thread,Time,Action,Pointer,Size,Stream\n\
        0,0.1,allocate,0x10,1000,0\n0,0.2,allocate,0x20,3000000,0\n0,0.3,free,0x20,3000000,0\n";

    #[test]
    fn a_log_is_split_into_what_stays_and_the_step() {
        let trace = Trace::parse(LOG).unwrap();
        assert_eq!((trace.start.len(), trace.step.len()), (1, 2));
        assert_eq!(trace.peak_live(), 3_001_000);
    }

    #[test]
    fn a_damaged_log_is_refused_with_its_line() {
        for (line, reason) in
            [("0,0,free,0x30,1,0", "not in use"), ("x", "six fields"), ("0,0,grow,0x1,1,0", "neither")]
        {
            let error = Trace::parse(&format!("{LOG}{line}\n")).unwrap_err();
            assert_eq!(error.line, 5);
            assert!(error.reason.contains(reason), "{error}");
        }
    }

    #[test]
    fn recorded_steps_need_no_driver_after_the_first_and_little_more_than_is_live() {
        for (name, log) in RECORDED {
            let trace = Trace::parse(log).unwrap();
            let calls = trace.driver_allocations(4);
            assert!(calls[0] > 0 && calls[1..] == [0, 0, 0], "{name}: {calls:?}");
            let outcomes = trace.compare(4);
            let share = |index: usize| outcomes[index].mapped as f64 / outcomes[index].live as f64;
            let (classes, torch, ours, planned, bound) = (share(0), share(1), share(2), share(3), share(4));
            assert!(ours <= 1.03 && ours <= torch && torch < classes, "{name}: {ours}, {torch}, {classes}");
            assert!(planned <= 1.015 * bound, "{name}: {planned} of {bound}");
        }
    }

    #[test]
    fn every_model_maps_at_least_what_is_live_and_classes_the_most() {
        let outcomes = Trace::parse(LOG).unwrap().compare(3);
        assert!(outcomes.iter().all(|outcome| outcome.mapped >= outcome.live));
        assert_eq!(outcomes[0].mapped, 1024 + (4 << 20));
        // One 2 MiB segment for the small one, one of 20 MiB for the large one.
        assert_eq!(outcomes[1].mapped, 22 << 20);
    }
}
