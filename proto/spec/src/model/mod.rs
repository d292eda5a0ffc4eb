//! The shape of a GPT model: presets, `[model]`, and the rules of a valid shape.
//!
//! - `arch`: families of models, which are presets of the keys of the architecture;
//! - `presets`: published sizes;
//! - `section`: the keys of `[model]`, and the shape that they describe;
//! - `rope`: scaling of the rotary position embedding;
//! - `check`: the rules between keys.
//!
//! Shape letters, as everywhere in xlaunch: B batch, T sequence, C width, H heads, D head width, F ffn, V vocabulary,
//! Vp padded vocabulary, L layers.

mod arch;
mod check;
mod presets;
mod rope;
mod section;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use arch::{Activation, Arch, NormKind, NormPlace, Parallel, Positions, QkNorm, Router};
pub use presets::PRESETS;
pub use rope::RopeScaling;
pub use section::ModelSection;

/// A model's shape, with every key resolved. Shapes in older checkpoints lack keys, which then have the values of
/// their `arch`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ModelSection")]
#[expect(missing_docs, reason = "the fields are documented in ModelSection")]
pub struct ModelShape {
    pub arch: Arch,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub seq: usize,
    pub vocab: usize,
    pub tied: bool,
    pub norm_eps: f64,
    pub norm: NormKind,
    pub norm_place: NormPlace,
    pub norm_offset: bool,
    pub qk_norm: QkNorm,
    pub qkv_bias: bool,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub head_bias: bool,
    pub activation: Activation,
    pub gated: bool,
    pub glu_limit: f64,
    pub glu_offset: f64,
    pub parallel: Parallel,
    pub positions: Positions,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub rope_fraction: f64,
    pub no_rope_every: usize,
    pub window: usize,
    pub window_pattern: usize,
    pub windowed_rope_theta: f64,
    pub attention_sinks: bool,
    pub attention_softcap: f64,
    pub logit_softcap: f64,
    pub query_scale: f64,
    pub embedding_scale: f64,
    pub residual_scale: f64,
    pub logit_scale: f64,
    pub experts: usize,
    pub experts_per_token: usize,
    pub expert_ffn: usize,
    pub router: Router,
    pub normalise: bool,
    pub router_logit_bias: bool,
    pub router_bias: bool,
    pub routed_scale: f64,
    pub dense_layers: usize,
    pub shared_experts: usize,
    pub shared_gate: bool,
}

impl ModelShape {
    /// Replaces the sizes with those of another shape.
    fn with_sizes(self, other: &Self) -> Self {
        let Self { layers, heads, kv_heads, dim, head_dim, ffn, seq, vocab, tied, norm_eps, .. } = *other;
        Self { layers, heads, kv_heads, dim, head_dim, ffn, seq, vocab, tied, norm_eps, ..self }
    }

    /// Returns whether builds before 0.4, which ignore the keys that they do not know, compute the same model.
    pub fn is_known_before_0_4(&self) -> bool {
        let Self { arch, rope_theta, ref rope_scaling, .. } = *self;
        let same_sizes = match arch {
            Arch::Gpt2 => self.kv_heads == self.heads && self.heads * self.head_dim == self.dim,
            Arch::Llama => matches!(rope_scaling, RopeScaling::Default | RopeScaling::Llama3 { .. }),
            _ => false,
        };
        let known = arch.base().with_sizes(self);
        same_sizes && *self == Self { rope_theta, rope_scaling: rope_scaling.clone(), ..known }
    }

    /// Returns D, the width of one head.
    pub fn head_width(&self) -> usize {
        self.head_dim
    }

    /// Returns H D, the width of attention's output.
    pub fn attention_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the number of elements of each head that are rotated, which is even.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "head widths are small, and the fraction is at most 1"
    )]
    pub fn rotated_width(&self) -> usize {
        // As in transformers: `int(head_dim * partial_rotary_factor)`.
        (self.head_dim as f64 * self.rope_fraction) as usize / 2 * 2
    }

    /// Returns the number of positions that tokens attend to in a block, counted from 0; `None` if they attend to all.
    pub fn window(&self, block: usize) -> Option<usize> {
        // No number above 0 is a multiple of 0.
        let is_full = self.window == 0 || (block + 1).is_multiple_of(self.window_pattern);
        (!is_full).then_some(self.window)
    }

    /// Returns whether queries and keys are rotated in a block, counted from 0.
    pub fn is_rotated(&self, block: usize) -> bool {
        self.positions == Positions::Rotary && !(block + 1).is_multiple_of(self.no_rope_every)
    }

    /// Returns the factor of attention scores.
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    pub fn score_factor(&self) -> f64 {
        if self.query_scale == 0.0 { 1.0 / (self.head_dim as f64).sqrt() } else { self.query_scale }
    }

    /// Returns the factor of token embeddings.
    #[expect(clippy::cast_precision_loss, reason = "model widths are small")]
    pub fn embedding_factor(&self) -> f64 {
        if self.embedding_scale == 0.0 { (self.dim as f64).sqrt() } else { self.embedding_scale }
    }

    /// Returns the outputs of the first feed-forward projection: F, or 2 F with gates.
    pub fn ffn_inputs(&self) -> usize {
        self.gates() * self.ffn
    }

    /// Returns the number of projections in front of the activation function.
    fn gates(&self) -> usize {
        if self.gated { 2 } else { 1 }
    }

    /// Returns whether a block, counted from 0, has experts.
    pub fn has_experts(&self, block: usize) -> bool {
        self.experts > 0 && block >= self.dense_layers
    }

    /// Returns the number of blocks that have experts.
    pub fn expert_layers(&self) -> usize {
        if self.experts > 0 { self.layers.saturating_sub(self.dense_layers) } else { 0 }
    }

    /// Returns the hidden width of each expert.
    pub fn expert_width(&self) -> usize {
        if self.expert_ffn == 0 { self.ffn } else { self.expert_ffn }
    }

    /// Returns the outputs of an expert's first projection.
    pub fn expert_inputs(&self) -> usize {
        self.gates() * self.expert_width()
    }

    /// Returns the hidden width of all shared experts together.
    pub fn shared_width(&self) -> usize {
        self.shared_experts * self.expert_width()
    }

    /// Returns the outputs of the first projection of all shared experts together.
    pub fn shared_inputs(&self) -> usize {
        self.gates() * self.shared_width()
    }

    /// Returns the parameters of all feed-forward matrices and routers: those that exist, and those that a token uses.
    pub fn feed_forward_parameters(&self) -> [u128; 2] {
        let [dim, ffn, gates, width, shared_width] =
            [self.dim, self.ffn, self.gates(), self.expert_width(), self.shared_width()].map(|x| x as u128);
        let [layers, experts, used] =
            [self.expert_layers(), self.experts, self.experts_per_token].map(|x| x as u128);
        let dense = (self.layers as u128 - layers) * (gates + 1) * ffn * dim;
        let shared = (gates + 1) * shared_width + u128::from(self.shared_gate);
        [experts, used].map(|count| dense + layers * dim * (experts + count * (gates + 1) * width + shared))
    }

    /// Returns the first key in which two shapes differ, with both values. Distances beyond the last block equal 0.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let [own, other] = [self, other].map(|shape| {
            let within = |every: usize| if every > shape.layers { 0 } else { every };
            let (no_rope_every, window_pattern) = (within(shape.no_rope_every), within(shape.window_pattern));
            Self { no_rope_every, window_pattern, ..shape.clone() }
        });
        let text = |value: serde_json::Value| match value {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        let pairs = own.values().into_iter().zip(other.values());
        let different = pairs.into_iter().find(|(own, other)| own != other);
        different.map(|((key, own), (_, other))| (key, text(own), text(other)))
    }

    /// Returns Vp: V rounded up to a multiple that suits tensor cores. Small vocabularies are not padded.
    pub fn padded_vocab(&self) -> usize {
        if self.vocab <= 1024 { self.vocab } else { self.vocab.next_multiple_of(128) }
    }

    /// Returns the output width of the fused query, key and value projection: (H + 2 Hkv) D.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width()
    }
}
