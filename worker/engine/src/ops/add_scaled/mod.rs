//! Scaled addition: `out = x + factor y`, for scales of embeddings and of residual branches, and for blocks whose
//! branches are added together; and addition in F32, for sums of gradients.

use rayon::prelude::*;
use xlaunch_pool::DType;

use super::{Cuda, Op};
use crate::cpu::math::simd;
use crate::cpu::{Access, Threads};
use crate::cuda::{BLOCK_THREADS, KernelFile, Launch, Macro, VEC, args, expect, source};
use crate::error::Result;
use crate::tensor::Slice;

/// Elements per task on the CPU.
const ELEMENTS: usize = 1 << 13;
/// Vectors of each operand that a thread of the kernel fetches at once.
const ADD_SCALED_VECS: usize = 2;

pub(crate) const KERNELS: KernelFile = KernelFile {
    source: source!("add_scaled/kernel.cu"),
    kernels: &["add_scaled", "add_f32", "add_bf16"],
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

/// `y += x`, in F32.
#[derive(Clone, Copy, Debug)]
pub struct AddTo<'a> {
    /// (len,) F32 or Bf16.
    pub x: Slice<'a>,
    /// (len,) F32.
    pub y: Slice<'a>,
}

impl Op for AddTo<'_> {
    fn cpu(self, threads: &Threads) {
        let (access, len) = (Access::new("add_to"), self.x.len());
        let (x, y) = (access.read(self.x, len), access.write(self.y, len));
        let parts = y.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS));
        threads.run(|| parts.for_each(|(y, x)| simd!(y.iter_mut().zip(x).for_each(|(y, x)| *y += x))));
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        let Self { x, y } = self;
        let len = x.len();
        let name = if x.dtype() == DType::Bf16 { "add_bf16" } else { "add_f32" };
        expect(x, x.dtype(), len);
        expect(y, DType::F32, len);
        // SAFETY: `x` holds `len` elements of the type in the kernel's name, `y` as many in F32.
        unsafe { gpu.launch(name, gpu.grid_for(len.div_ceil(VEC)), args![x, y, len]) }
    }
}
