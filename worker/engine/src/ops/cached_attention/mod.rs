//! Attention of new tokens over the cached keys and values of their sequences, for generation.
//!
//! A row is one new token: of the sequence in cache slot `slots[n]`, at position `positions[n]`. Its key and value are
//! stored there, after rotation by the position if there is a rotary table, and its query heads attend to all positions
//! of the slot up to its own: `s = scale q k^T`, `p = softmax(s)`, `out = p v`. This operation treats rows of one
//! prompt, of several prompts of different lengths, and of one step of several sequences alike.
//!
//! With sinks, `p_j = exp(s_j) / (sum_i exp(s_i) + exp(sink))`: a learned logit of each query head takes part in the
//! softmax, but has no value.
//!
//! With a window, they attend only to its own and the `window - 1` positions before it; with a soft cap c, scores
//! become `c tanh(s / c)` before the softmax.
//!
//! Slots and positions are read on the device, so that a captured step can be replayed at other positions. The caches
//! of keys and of values are (S, Hkv, T, D) each, so a block reads the keys of one head from consecutive addresses.
//!
//! A block on a GPU serves all query heads of a key head, so that the cache is read once. If that gives too few blocks
//! to fill the device, the positions are split among several blocks, and the last one combines their results.

pub(crate) mod cpu;
pub(crate) mod cuda;

use std::fmt;

use super::{AttentionOptions, Cuda, Op};
use crate::cpu::Threads;
use crate::error::Result;
use crate::tensor::Slice;

/// Blocks that fill a large GPU.
const BLOCKS: usize = 264;
/// Minimum number of positions in a split.
const MIN_SPLIT: usize = 64;

/// Attention of N rows over a cache of S slots.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CachedAttentionShape {
    /// N.
    pub rows: usize,
    /// H.
    pub heads: usize,
    /// Hkv, a divisor of H.
    pub kv_heads: usize,
    /// D, a multiple of 8, at most 256.
    pub width: usize,
    /// S.
    pub slots: usize,
    /// T: positions of a slot.
    pub capacity: usize,
    /// Scale, window and soft cap of the scores.
    pub options: AttentionOptions,
}

/// Names options only where they differ from plain attention.
impl fmt::Debug for CachedAttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, heads, kv_heads, width, slots, capacity, options } = self;
        let mut shape = f.debug_struct("CachedAttentionShape");
        shape.field("rows", rows).field("heads", heads).field("kv_heads", kv_heads).field("width", width);
        shape.field("slots", slots).field("capacity", capacity);
        options.debug(*width, &mut shape);
        shape.finish()
    }
}

impl CachedAttentionShape {
    /// Returns the number of elements of `qkv` in one row.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.width
    }

    /// Returns the number of elements of the cache of keys, which is that of values as well.
    pub fn cache(&self) -> usize {
        self.slots * self.kv_heads * self.capacity * self.width
    }

    /// Returns the factor of the scores.
    pub fn scale(&self) -> f32 {
        self.options.scale.get()
    }

    /// Returns the number of positions that a row sees at most.
    pub(crate) fn window(&self) -> usize {
        self.options.visible(self.capacity)
    }

    /// Returns the number of positions per split: all that a row sees if the rows alone fill a GPU.
    pub(crate) fn split(&self) -> usize {
        let splits = (BLOCKS / (self.rows * self.kv_heads)).max(1);
        self.window().div_ceil(splits).next_multiple_of(MIN_SPLIT).min(self.capacity)
    }

    /// Returns the number of splits that a row reads at most. A window may begin and end within a split.
    pub(crate) fn splits(&self) -> usize {
        self.capacity.div_ceil(self.split()).min((self.window() - 1).div_ceil(self.split()) + 1)
    }

    /// Returns the number of F32 elements of scratch memory for the results of splits: D sums, a maximum and a
    /// denominator each.
    pub fn partials(&self) -> usize {
        match self.splits() {
            1 => 0,
            splits => self.rows * self.heads * splits * (self.width + 2),
        }
    }
}

/// Stores the keys and values of new tokens, and attends.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention<'a> {
    /// Sizes.
    pub shape: CachedAttentionShape,
    /// (N, (H + 2 Hkv) D), not rotated.
    pub qkv: Slice<'a>,
    /// (>= T, D) F32 rotary table: D/2 cosines, then D/2 sines per position. Pairs are (i, i + D/2).
    pub rope: Option<Slice<'a>>,
    /// (N,) I32 below S: the caller has checked them.
    pub slots: Slice<'a>,
    /// (N,) I32 below T: the caller has checked them. Positions before those of the rows are in the cache.
    pub positions: Slice<'a>,
    /// True if no two rows share a slot, which saves a pass.
    pub distinct: bool,
    /// (S, Hkv, T, D).
    pub keys: Slice<'a>,
    /// (S, Hkv, T, D).
    pub values: Slice<'a>,
    /// (H,).
    pub sinks: Option<Slice<'a>>,
    /// Scratch memory of at least [`CachedAttentionShape::partials`] F32.
    pub partials: Slice<'a>,
    /// (>= N H,) I32, zero before and after.
    pub counters: Slice<'a>,
    /// (N, H D).
    pub out: Slice<'a>,
}

impl Op for CachedAttention<'_> {
    fn cpu(self, threads: &Threads) {
        cpu::run(threads, self);
    }

    fn cuda(self, gpu: &Cuda) -> Result<()> {
        gpu.cached_attention.run(gpu, self)
    }
}
