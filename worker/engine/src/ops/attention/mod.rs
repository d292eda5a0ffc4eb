//! Causal attention over packed projections, with rotary positions, grouped query heads and the hand-written backward.
//!
//! Per query head: `s = scale q k^T`, `p = softmax(s)` over the keys up to the query's own position, `out = p v`, and
//! `lse_i = log sum_j exp(s_ij)`, from which backward recomputes `p_ij = exp(s_ij - lse_i)`. With `delta_i = dout_i .
//! out_i`: `dv = p^T dout`, `ds = p (dout v^T - delta)`, `dq = scale ds k`, `dk = scale ds^T q`.
//!
//! With a soft cap c, scores become `c tanh(s / c)` before the softmax, and backward multiplies ds by `1 - tanh(s /
//! c)^2`. With a window, a query sees only its own and the `window - 1` positions before it; with documents, only those
//! of its document, from whose first token positions are counted.
//!
//! Sinks, learned scores without a key and a value, are added to the results afterwards: see `sinks`.
//!
//! Variants on a GPU, in order of preference (see `cuda`):
//!
//! | variant | conditions | file |
//! |---|---|---|
//! | whole heads in shared memory | plain, no documents, bf16, D 16 or 32, few tokens, Hkv = H | `mma_whole_head.cu` |
//! | cuDNN | no cap or documents, bf16, not deterministic, from 9.15.1, 9.6 if 128 divides T, D to 256 | `cudnn.rs` |
//! | tiles by TMA and WGMMA | bf16, compute capability 9.0, D as in `hopper.rs`; first if fastest | `hopper_*.cu` |
//! | tiles on tensor cores | bf16 with D a multiple of 16, tf32 with D a multiple of 8, D up to 256 | `mma_tiled.cu` |
//! | tiles on FP32 units | none | `kernel.cu` |

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod cudnn;
pub(crate) mod hopper;
pub(crate) mod options;
pub(crate) mod sinks;
pub(crate) mod variant;

use std::fmt;

pub use options::{AttentionOptions, Scalar};
pub use sinks::{AttentionSinksBackward, AttentionSinksForward};

use super::{Cuda, Documents, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Attention over `qkv` (B, T, (H + 2 Hkv) D): H query heads, then Hkv key heads, then Hkv value heads. Query head h
/// attends to key head `h / (H / Hkv)`, causally.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// B.
    pub batch: usize,
    /// T.
    pub seq: usize,
    /// H.
    pub heads: usize,
    /// Hkv, a divisor of H.
    pub kv_heads: usize,
    /// D, a multiple of 8.
    pub width: usize,
    /// Scale, window, soft cap and documents of the scores.
    pub options: AttentionOptions,
}

/// Names options only where they differ from plain attention.
impl fmt::Debug for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, seq, heads, kv_heads, width, options } = self;
        let mut shape = f.debug_struct("AttentionShape");
        shape.field("batch", batch).field("seq", seq).field("heads", heads).field("kv_heads", kv_heads);
        shape.field("width", width);
        options.debug(*width, &mut shape);
        shape.finish()
    }
}

impl AttentionShape {
    /// Returns the number of elements of `qkv` in one token's row.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.width
    }

    /// Returns the factor of the scores.
    pub fn scale(&self) -> f32 {
        self.options.scale.get()
    }

    /// Returns the bound of the scores; 0 if there is none.
    pub(crate) fn softcap(&self) -> f32 {
        self.options.softcap.map_or(0.0, Scalar::get)
    }

    /// Returns the number of positions that a query sees at most.
    pub(crate) fn window(&self) -> usize {
        self.options.visible(self.seq)
    }
}

/// Attention, after rotating query and key heads if there is a rotary table.
#[derive(Clone, Copy, Debug)]
pub struct AttentionForward<'a> {
    /// Sizes.
    pub shape: AttentionShape,
    /// (B, T, (H + 2 Hkv) D). The back end decides whether to rotate it in place; pass it to backward as forward leaves
    /// it.
    pub qkv: Slice<'a>,
    /// (T, D) F32 rotary table: D/2 cosines, then D/2 sines per position. Pairs are (i, i + D/2).
    pub rope: Option<Slice<'a>>,
    /// Present if and only if the shape's options say so.
    pub documents: Option<Documents<'a>>,
    /// (B, T, H D).
    pub out: Slice<'a>,
    /// (B, H, T) F32.
    pub lse: Slice<'a>,
}

impl Op for AttentionForward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::forward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.attention.forward(gpu, self)
    }
}

/// Backward of attention, including the rotation.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// Sizes.
    pub shape: AttentionShape,
    /// (B, T, (H + 2 Hkv) D), as left by forward.
    pub qkv: Slice<'a>,
    /// (T, D) F32, as in forward.
    pub rope: Option<Slice<'a>>,
    /// Same as in forward.
    pub documents: Option<Documents<'a>>,
    /// (B, T, H D).
    pub out: Slice<'a>,
    /// (B, T, H D).
    pub dout: Slice<'a>,
    /// (B, H, T) F32.
    pub lse: Slice<'a>,
    /// (B, T, (H + 2 Hkv) D), the gradient of qkv before the rotation.
    pub dqkv: Slice<'a>,
}

impl Op for AttentionBackward<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::backward(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.attention.backward(gpu, self)
    }

    fn scratch(&self) -> usize {
        // The gradient of the queries is summed in F32, plus two numbers per row. cuDNN and our own kernels need about
        // this much.
        hopper::backward_bytes(self.shape)
    }
}
