//! The sizes that operations take beside their slices.

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `y = (x - mean) / sqrt(var + eps) * gamma + beta`; statistics: N means, then N reciprocal deviations.
    Layer,
    /// `y = x / sqrt(mean(x^2) + eps) * gamma`; statistics: N reciprocal root mean squares.
    Rms,
}

/// Normalisation of `rows` rows of `cols` elements.
#[derive(Clone, Copy, Debug)]
pub struct NormShape {
    /// N.
    pub rows: usize,
    /// C.
    pub cols: usize,
    /// Which normalisation.
    pub kind: NormKind,
    /// Added to the variance or mean square.
    pub eps: f32,
}

impl NormShape {
    /// Number of f32 statistics kept for backward.
    pub fn stats(&self) -> usize {
        match self.kind {
            NormKind::Layer => 2 * self.rows,
            NormKind::Rms => self.rows,
        }
    }
}

/// `y[rows, outputs] = x[rows, inputs] w[outputs, inputs]^T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// N.
    pub rows: usize,
    /// Width of x.
    pub inputs: usize,
    /// Width of y.
    pub outputs: usize,
}

/// Embedding of B sequences of T tokens.
#[derive(Clone, Copy, Debug)]
pub struct EmbedShape {
    /// B.
    pub batch: usize,
    /// T.
    pub seq: usize,
    /// C.
    pub cols: usize,
    /// Rows of the table that token ids may name: V.
    pub vocab: usize,
}

/// Attention over the packed projections `qkv[B, T, (H + 2 Hkv) D]`: H query heads, then Hkv key heads, then Hkv value
/// heads. Query head h attends to key head `h / (H / Hkv)`, causally, with scores scaled by `1 / sqrt(D)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
}

impl AttentionShape {
    /// Elements of `qkv` in one token's row.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.width
    }

    /// What scores are multiplied by.
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    pub fn scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }
}

/// Cross entropy over rows of `padded` logits, of which the first `vocab` take part.
#[derive(Clone, Copy, Debug)]
pub struct ClassifierShape {
    /// N.
    pub rows: usize,
    /// V.
    pub vocab: usize,
    /// Vp, the distance between rows.
    pub padded: usize,
}

/// Constants of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamWShape {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay, where the decay flags say so.
    pub weight_decay: f32,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip: f32,
}

/// Whether a gradient replaces what its slice held or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulate {
    /// The slice held nothing of worth.
    Overwrite,
    /// The slice holds the sum of earlier micro-steps.
    Add,
}

/// Elements covered by one decay flag of AdamW. Every parameter starts on a multiple of it.
pub const DECAY_CHUNK: usize = 64;

/// Indices into the scalars that AdamW reads from device memory, so that a captured step can be replayed with others.
pub mod scalar {
    /// Learning rate.
    pub const LEARNING_RATE: usize = 0;
    /// `1 / (1 - beta1^t)` with t the number of this step from 1.
    pub const CORRECTION1: usize = 1;
    /// `1 / (1 - beta2^t)`.
    pub const CORRECTION2: usize = 2;
    /// How many there are.
    pub const COUNT: usize = 4;
}
