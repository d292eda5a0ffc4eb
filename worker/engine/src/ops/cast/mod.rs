//! Conversion between element types, or a copy if both are the same.

pub(crate) mod cpu;
pub(crate) mod cuda;

use super::{Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// `y = x`.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// (len,) F32 or Bf16.
    pub x: Slice<'a>,
    /// (len,) F32 or Bf16, rounded to nearest even.
    pub y: Slice<'a>,
}

impl Op for Cast<'_> {
    fn cpu(self, _: &Threads) {
        cpu::cast(self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::cast(gpu, self)
    }
}
