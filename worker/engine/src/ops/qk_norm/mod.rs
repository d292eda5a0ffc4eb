//! RMSNorm of queries and keys before attention (Henry et al., 2020; Dehghani et al., 2023), and their rotation.
//!
//! With `z = x r (offset + gamma)`, `r = 1 / sqrt(mean(x^2) + eps)`, where the mean is over a head or over all heads:
//! `out = rotate(z)`. Backward recomputes r. With `dz` = `dout` rotated back and `g = dz (offset + gamma)`: `dx = r (g
//! - x r mean(g x r))`, `dgamma = sum dz x r`. Values are copied, as are their gradients.

pub(crate) mod cpu;
pub(crate) mod cuda;

use xlaunch_pool::DType;

use super::reduce::MAX_SUM_ROWS;
use super::{Accumulate, AttentionShape, Cuda, Documents, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Elements that are normalised together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkNorm {
    /// Each head of D elements, as in Qwen3 and Gemma 3; query heads share one gamma (D,), and key heads another.
    Head,
    /// All query heads of a token together, and all of its key heads, as in OLMo 2; gammas (H D,) and (Hkv D,).
    Full,
}

impl QkNorm {
    /// Returns the number of elements of the query gamma and of the key gamma.
    pub fn gammas(self, s: AttentionShape) -> [usize; 2] {
        match self {
            Self::Head => [s.width; 2],
            Self::Full => [s.heads, s.kv_heads].map(|heads| heads * s.width),
        }
    }
}

/// Norms of queries and keys, and their rotation.
#[derive(Clone, Copy, Debug)]
pub struct QkNorms<'a> {
    /// Sizes.
    pub shape: AttentionShape,
    /// Elements that are normalised together.
    pub kind: QkNorm,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the gammas: 1 for models that store gamma minus 1, otherwise 0.
    pub offset: f32,
    /// (D,) or (H D,).
    pub q_gamma: Slice<'a>,
    /// (D,) or (Hkv D,).
    pub k_gamma: Slice<'a>,
    /// (T, D) F32 rotary table, as in attention, which then gets none.
    pub rope: Option<Slice<'a>>,
    /// Documents from whose first tokens positions count.
    pub documents: Option<Documents<'a>>,
}

/// Norm of queries and keys, then their rotation.
#[derive(Clone, Copy, Debug)]
pub struct QkNormForward<'a> {
    /// Norms and rotation.
    pub norms: QkNorms<'a>,
    /// (B, T, (H + 2 Hkv) D).
    pub qkv: Slice<'a>,
    /// (B, T, (H + 2 Hkv) D).
    pub out: Slice<'a>,
}

impl Op for QkNormForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::forward(gpu, self)
    }
}

/// Backward of [`QkNormForward`], to its input and gammas.
#[derive(Clone, Copy, Debug)]
pub struct QkNormBackward<'a> {
    /// Same as in forward.
    pub norms: QkNorms<'a>,
    /// (B, T, (H + 2 Hkv) D) the input of forward.
    pub qkv: Slice<'a>,
    /// (B, T, (H + 2 Hkv) D): the gradient of `out` before, that of `qkv` afterwards.
    pub dqkv: Slice<'a>,
    /// (D,) or (H D,) gradient.
    pub dq_gamma: Slice<'a>,
    /// (D,) or (Hkv D,) gradient.
    pub dk_gamma: Slice<'a>,
    /// Applies to the gradients of both gammas.
    pub acc: Accumulate,
}

impl Op for QkNormBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        cuda::backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        DType::F32.size() * MAX_SUM_ROWS * self.norms.kind.gammas(self.norms.shape).iter().sum::<usize>()
    }
}
