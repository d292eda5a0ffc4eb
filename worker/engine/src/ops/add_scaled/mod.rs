//! Scaled addition: `out = x + factor y`, for scales of embeddings and of residual branches, and for blocks whose
//! branches are added together.

use rayon::prelude::*;

use super::{Cuda, Op};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, Macro, VEC, args, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Elements per task on the CPU.
const ELEMENTS: usize = 1 << 13;
/// Vectors of each operand that a thread of the kernel fetches at once.
const ADD_SCALED_VECS: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("add_scaled/kernel.cu"),
    kernels: &["add_scaled"],
    macros: &[Macro::int("ADD_SCALED_VECS", ADD_SCALED_VECS)],
    dynamic_shared: &[],
};

/// `out = x + factor y`, or without x, `out = factor y`.
#[derive(Clone, Copy, Debug)]
pub struct AddScaled<'a> {
    /// (len,).
    pub x: Option<Slice<'a>>,
    /// (len,).
    pub y: Slice<'a>,
    /// Factor of y.
    pub factor: f32,
    /// (len,); may be x or y.
    pub out: Slice<'a>,
}

impl Op for AddScaled<'_> {
    fn cpu(self, threads: &Threads) {
        let Self { x, y, factor, out } = self;
        let (access, len) = (Access::new("add_scaled"), out.len());
        let len_of = |slice: Slice<'_>| slice.len() == len;
        assert!(x.is_none_or(len_of) && len_of(y), "{x:?} and {y:?} should have {len} elements");
        // An operand that is also the output is read from there.
        let other = |slice: Slice<'_>| slice.address() != out.address();
        let to = access.write(out, len);
        let has_x = x.is_some();
        let x_values = x.filter(|x| other(*x)).map(|x| access.read(x, len));
        let y_values = other(y).then(|| access.read(y, len));
        let task = |(index, to): (usize, &mut [f32])| {
            let part = |values: &[f32], i: usize| values[index * ELEMENTS + i];
            simd!({
                for (i, to) in to.iter_mut().enumerate() {
                    let old = *to;
                    let y = y_values.map_or(old, |y| part(y, i));
                    let x = if has_x { x_values.map_or(old, |x| part(x, i)) } else { 0.0 };
                    *to = factor.mul_add(y, x);
                }
            });
        };
        threads.run(|| to.par_chunks_mut(ELEMENTS).enumerate().for_each(task));
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { x, y, factor, out } = self;
        let len = out.len();
        [Some(y), x, Some(out)].into_iter().flatten().for_each(|operand| gpu.expect_act(operand, len));
        let launch = Launch::threads(len.div_ceil(VEC * ADD_SCALED_VECS), BLOCK_THREADS);
        // SAFETY: checked above; a thread reads its elements before it writes them.
        unsafe { gpu.launch("add_scaled", launch, args![x, y, out, len, factor]) }
    }
}
