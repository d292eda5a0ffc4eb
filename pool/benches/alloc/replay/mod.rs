//! Recorded requests, replayed through this crate's allocator and through models of others.
//!
//! A trace is a log in the replay format of the RAPIDS Memory Manager (`Snapshot::rmm_csv`). Everything up to the last
//! allocation that is never freed is the persistent state of the program; the rest is one step, which is repeated.

mod compare;
mod size_classes;
mod torch;

pub(crate) use compare::Outcome;

use std::collections::HashMap;

/// Name and log of one training step of the two models used in this project's measurements, in bf16 on a GPU.
pub(crate) const RECORDED: [(&str, &str); 2] = [
    ("llama-28m, batch 32, 256 tokens", include_str!("../../traces/llama-28m.csv")),
    ("gpt2-124m, batch 32, 1024 tokens", include_str!("../../traces/gpt2-124m.csv")),
];

/// An allocation or a free. Buffers are numbered in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Alloc { buffer: usize, bytes: u64 },
    Free { buffer: usize },
}

/// The requests of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    /// Operations that happen once, at the start.
    pub(crate) start: Vec<Op>,
    /// Operations that every step repeats.
    pub(crate) step: Vec<Op>,
}

/// An allocator without memory: only the amount that it maps matters.
trait Model {
    /// Serves a request. The token identifies the buffer in [`free`](Self::free).
    fn alloc(&mut self, bytes: u64, persistent: bool) -> u64;
    fn free(&mut self, token: u64);
    /// Returns the largest number of bytes mapped so far.
    fn mapped(&self) -> u64;
}

/// A line that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub(crate) struct TraceError {
    /// Line number, starting at 1.
    pub(crate) line: usize,
    pub(crate) reason: String,
}

impl Trace {
    /// Parses a log: a header, then lines of `Thread,Time,Action,Pointer,Size,Stream`.
    pub(crate) fn parse(csv: &str) -> Result<Self, TraceError> {
        let mut ops = Vec::new();
        let mut live: HashMap<&str, usize> = HashMap::new();
        let mut buffers = 0;
        for (number, line) in (1..).zip(csv.lines()).skip(1).filter(|(_, line)| !line.is_empty()) {
            let invalid = |reason: &str| TraceError { line: number, reason: reason.into() };
            let fields: Vec<&str> = line.split(',').collect();
            let [_, _, action, pointer, bytes, _] = fields[..] else { return Err(invalid("not six fields")) };
            match action {
                "allocate" => {
                    let bytes = bytes.parse().map_err(|_| invalid("the size is not a number"))?;
                    if live.insert(pointer, buffers).is_some() {
                        return Err(invalid("the address is in use"));
                    }
                    ops.push(Op::Alloc { buffer: buffers, bytes });
                    buffers += 1;
                }
                "free" => {
                    let buffer = live.remove(pointer).ok_or_else(|| invalid("the address is not in use"))?;
                    ops.push(Op::Free { buffer });
                }
                "allocate failure" => {}
                _ => return Err(invalid("the action is neither `allocate` nor `free`")),
            }
        }
        let last = live.values().copied().max();
        let split = ops.iter().position(|op| matches!(op, Op::Alloc { buffer, .. } if Some(*buffer) == last));
        let step = ops.split_off(split.map_or(0, |at| at + 1));
        Ok(Self { start: ops, step })
    }

    /// Returns the largest number of requested bytes that are live at any time.
    pub(crate) fn peak_live(&self) -> u64 {
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
}
