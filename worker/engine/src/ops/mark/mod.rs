//! Marks in the stream of a device, which show its progress to observers. They distinguish a device that computes, or
//! hangs in a kernel, from one that waits for the other ranks, and measure how long its own part of a step took.
//!
//! The marks that the device has passed are counted in host memory, which any thread can read without calling the
//! driver, even while the device hangs. Marks are part of a captured graph. Devices whose operations are complete when
//! they return have no marks.

pub(crate) mod cuda;

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Effect of a mark in addition to being counted.
#[derive(Clone, Copy, Debug)]
pub enum Mark<'a> {
    /// Restarts the timer.
    Begin,
    /// Writes the seconds since the last `Begin` to F32 (1,).
    End(Slice<'a>),
}

impl Op for Mark<'_> {
    fn cpu(self, _: &Threads) {}

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.marks.mark(gpu, self)
    }
}

/// The number of marks that a device has passed.
#[derive(Clone, Copy, Debug)]
pub struct Marks(&'static AtomicU64);

impl Marks {
    /// Returns the number of marks passed since they were [opened](crate::Backend::open_marks).
    pub fn passed(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
