//! The shape of a GPT model: presets, `[model]`, and the rules of a valid shape.
//!
//! - `arch`: families of models, which are presets of the keys of the architecture;
//! - `presets`: published sizes;
//! - `rope`: scaling of the rotary position embedding;
//! - `check`: the rules between keys.
//!
//! Shape letters, as everywhere in xlaunch: B batch, T sequence, C width, H heads, D head width, F ffn, V vocabulary,
//! Vp padded vocabulary, L layers.

mod arch;
mod check;
mod presets;
mod rope;

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;

pub use arch::{Activation, Arch, NormKind, NormPlace, Parallel, Positions, QkNorm, Router};
pub use presets::PRESETS;
pub use rope::RopeScaling;

/// The model: a preset, and keys that override it. Without a preset, they come from `checkpoint.init`, if set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// Named shape from which all other keys take their defaults: `byte-tiny` (0.8M parameters, byte vocabulary),
    /// `llama-28m`, `gpt2-124m`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`, `smollm2-135m`, `llama-1b` (Llama 3.2 1B),
    /// `llama-3b`, `llama-8b`, `qwen3-0.6b`, `qwen3-1.7b`, `qwen3-4b`, `qwen3-8b`, `qwen2.5-0.5b`, `qwen2.5-7b`,
    /// `mistral-7b`, `smollm3-3b`, `olmo2-1b`, `gemma3-1b` or `pythia-160m`; with experts: `mixtral-8x7b`,
    /// `olmoe-1b-7b` or `qwen3-30b-a3b`. Default: byte-tiny.
    pub preset: Option<String>,
    /// Family of models: a preset of all keys below `norm_eps`, and the layout of exported models. Default: the
    /// preset's.
    pub arch: Option<Arch>,
    /// Number of transformer blocks (L). Default: the preset's.
    pub layers: Option<usize>,
    /// Number of attention heads (H). Default: the preset's.
    pub heads: Option<usize>,
    /// Number of key and value heads, for grouped-query attention. Must divide `heads`. Default: `heads` if that is
    /// set, otherwise the preset's.
    pub kv_heads: Option<usize>,
    /// Width of the residual stream (C). Must be a multiple of `heads` unless `head_dim` is set. Default: the preset's.
    pub dim: Option<usize>,
    /// Width of one attention head (D), a multiple of 8 and at most 256. Default: `dim / heads` if one of these is
    /// set, otherwise the preset's.
    pub head_dim: Option<usize>,
    /// Hidden width of the feed-forward layers (F). Default: the preset's.
    pub ffn: Option<usize>,
    /// Sequence length in tokens (T). Default: the preset's.
    pub seq: Option<usize>,
    /// Vocabulary size (V). Must be at least 256 with `data.tokenizer = "bytes"`, and with prepared data at least that
    /// of its tokenizer. Default: that of the prepared data's tokenizer, otherwise the preset's.
    pub vocab: Option<usize>,
    /// Share the weights of the token embedding with the output head. Default: the preset's.
    pub tied: Option<bool>,
    /// Epsilon that is added to the variance in every norm. Default: the preset's.
    pub norm_eps: Option<f64>,
    /// Kind of the norms. Default: that of `arch`, as for all keys below.
    pub norm: Option<NormKind>,
    /// Place of the norms in a block.
    pub norm_place: Option<NormPlace>,
    /// Norms multiply by 1 plus their weight.
    pub norm_offset: Option<bool>,
    /// RMSNorm of queries and keys, before their rotation.
    pub qk_norm: Option<QkNorm>,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: Option<bool>,
    /// Bias of attention's output projection.
    pub attention_bias: Option<bool>,
    /// Biases of the feed-forward layers.
    pub mlp_bias: Option<bool>,
    /// Bias of the output head.
    pub head_bias: Option<bool>,
    /// Activation function of the feed-forward layers.
    pub activation: Option<Activation>,
    /// The activation function is applied to a gate, which is multiplied by a second projection.
    pub gated: Option<bool>,
    /// Attention and feed-forward layers side by side, both reading the same residual stream.
    pub parallel: Option<Parallel>,
    /// Representation of positions.
    pub positions: Option<Positions>,
    /// Base of the rotary position embedding's wavelengths.
    pub rope_theta: Option<f64>,
    /// Scaling of the rotary position embedding for longer sequences, as in `config.json`: a table with `rope_type`
    /// (`default`, `linear`, `dynamic`, `yarn` or `llama3`) and the keys of that type.
    pub rope_scaling: Option<RopeScaling>,
    /// Part of each head that is rotated, above 0 and at most 1. It is rounded down to an even number of elements.
    pub rope_fraction: Option<f64>,
    /// Every block whose number, counted from 1, is a multiple of this has no rotation; 0: all blocks have.
    pub no_rope_every: Option<usize>,
    /// Number of positions that a token attends to, including its own; 0: all.
    pub window: Option<usize>,
    /// Every block whose number, counted from 1, is a multiple of this attends to all positions despite `window`; 0:
    /// no block does.
    pub window_pattern: Option<usize>,
    /// Base of the rotary wavelengths in blocks with a window, where `rope_scaling` does not apply then; 0: as in the
    /// other blocks.
    pub windowed_rope_theta: Option<f64>,
    /// Attention scores s become c tanh(s / c) with this c; 0: they stay.
    pub attention_softcap: Option<f64>,
    /// Logits l become c tanh(l / c) with this c; 0: they stay.
    pub logit_softcap: Option<f64>,
    /// Factor of attention scores; 0: 1 / sqrt(D).
    pub query_scale: Option<f64>,
    /// Factor of token embeddings where they enter the first block; 0: sqrt(C).
    pub embedding_scale: Option<f64>,
    /// Factor of the outputs of attention and feed-forward layers where they are added to the residual stream.
    pub residual_scale: Option<f64>,
    /// Factor of the logits, before `logit_softcap`.
    pub logit_scale: Option<f64>,
    /// Number of experts in a mixture of experts: feed-forward layers of which each token uses those that a router
    /// chooses. No token is dropped. 0: a dense model.
    pub experts: Option<usize>,
    /// Number of experts that each token uses, at most 32.
    pub experts_per_token: Option<usize>,
    /// Hidden width of each expert; 0: `ffn`.
    pub expert_ffn: Option<usize>,
    /// Scores of experts, from the router's logits.
    pub router: Option<Router>,
    /// The weights of a token's experts are divided by their sum.
    pub normalise: Option<bool>,
    /// Each expert has a bias that is added to its score when experts are chosen, but not in their weights. It balances
    /// the load without a loss: see `train.router_bias_rate`.
    pub router_bias: Option<bool>,
    /// Factor of the weights of a token's experts.
    pub routed_scale: Option<f64>,
    /// Number of blocks at the beginning that have no experts, but feed-forward layers of width `ffn`.
    pub dense_layers: Option<usize>,
    /// Number of experts that every token uses besides those that it chooses. They are computed as one feed-forward
    /// layer, whose hidden width is this number times that of an expert.
    pub shared_experts: Option<usize>,
    /// The output of the shared experts is multiplied by the sigmoid of a projection of their input.
    pub shared_gate: Option<bool>,
}

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
    pub parallel: Parallel,
    pub positions: Positions,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    pub rope_fraction: f64,
    pub no_rope_every: usize,
    pub window: usize,
    pub window_pattern: usize,
    pub windowed_rope_theta: f64,
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
    pub router_bias: bool,
    pub routed_scale: f64,
    pub dense_layers: usize,
    pub shared_experts: usize,
    pub shared_gate: bool,
}

/// Implements what concerns every key of a shape alike, in the order in which differences are reported. The head width
/// depends on `dim` unless it is set, so it is compared after `dim`.
macro_rules! keys {
    ($($key:ident)*) => {
        impl ModelSection {
            /// Takes keys that are not set from a shape.
            pub fn complete(&mut self, shape: &ModelShape) {
                $(self.$key.get_or_insert(shape.$key);)*
            }

            /// Returns the shape in which keys that are not set are those of `base`.
            fn over(&self, base: &ModelShape) -> ModelShape {
                ModelShape { $($key: self.$key.unwrap_or(base.$key)),* }
            }
        }

        impl ModelShape {
            /// Returns each key with its value.
            fn values(&self) -> Vec<(&'static str, serde_json::Value)> {
                vec![$((concat!("model.", stringify!($key)), serde_json::json!(self.$key))),*]
            }
        }
    };
}

keys! {
    arch layers heads kv_heads dim head_dim ffn seq vocab tied norm_eps norm norm_place norm_offset qk_norm qkv_bias
    attention_bias mlp_bias head_bias activation gated parallel positions rope_theta rope_scaling rope_fraction
    no_rope_every window window_pattern windowed_rope_theta attention_softcap logit_softcap query_scale embedding_scale
    residual_scale logit_scale experts experts_per_token expert_ffn router normalise router_bias
    routed_scale dense_layers shared_experts shared_gate
}

/// Returns C / H. [`ModelShape::check`] refuses 0 heads.
fn default_head_dim(dim: usize, heads: usize) -> usize {
    dim.checked_div(heads).unwrap_or_default()
}

impl ModelSection {
    /// Returns whether some sizes must come from the initial weights: there is no preset, and not every size is set.
    pub fn has_open_sizes(&self) -> bool {
        let sizes =
            [self.layers, self.heads, self.kv_heads, self.head_dim, self.dim, self.ffn, self.seq, self.vocab];
        let open = self.arch.is_none() || self.tied.is_none() || sizes.contains(&None);
        self.preset.is_none() && open
    }

    /// Fills in the preset and checks the result.
    pub fn resolve(&self) -> Result<ModelShape, Invalid> {
        let name = self.preset.as_deref().unwrap_or("byte-tiny");
        let preset =
            PRESETS.iter().find(|(preset, _)| *preset == name).map(|(_, shape)| shape).ok_or_else(|| {
                let known: Vec<_> = PRESETS.iter().map(|(preset, _)| *preset).collect();
                Invalid::new(
                    "model.preset",
                    format!("unknown preset `{name}`"),
                    format!("one of {}", known.join(", ")),
                )
            })?;
        let arch = self.arch.unwrap_or(preset.arch);
        // The keys of another family than the preset's don't apply.
        let base = if arch == preset.arch { preset.clone() } else { arch.base().with_sizes(preset) };
        let (heads, dim) = (self.heads.unwrap_or(preset.heads), self.dim.unwrap_or(preset.dim));
        let has_head_dim = self.head_dim.is_some() || (self.heads.is_none() && self.dim.is_none());
        let base = ModelShape {
            kv_heads: if self.heads.is_some() { heads } else { preset.kv_heads },
            head_dim: if has_head_dim { preset.head_dim } else { default_head_dim(dim, heads) },
            ..base
        };
        let shape = self.over(&base);
        shape.check_sizes()?;
        if !has_head_dim && !dim.is_multiple_of(heads) {
            return Err(Invalid::new(
                "model.dim",
                format!("{dim} is not a multiple of model.heads = {heads}"),
                "a multiple of model.heads, or model.head_dim".into(),
            ));
        }
        shape.check()?;
        Ok(shape)
    }
}

impl TryFrom<ModelSection> for ModelShape {
    type Error = String;

    fn try_from(stored: ModelSection) -> Result<Self, String> {
        let sizes = [
            ("arch", stored.arch.is_some()),
            ("layers", stored.layers.is_some()),
            ("heads", stored.heads.is_some()),
            ("kv_heads", stored.kv_heads.is_some()),
            ("dim", stored.dim.is_some()),
            ("ffn", stored.ffn.is_some()),
            ("seq", stored.seq.is_some()),
            ("vocab", stored.vocab.is_some()),
            ("tied", stored.tied.is_some()),
        ];
        if let Some((missing, _)) = sizes.iter().find(|(_, is_set)| !is_set) {
            return Err(format!("the model's `{missing}` is missing"));
        }
        let mut shape = stored.over(&stored.arch.unwrap_or(Arch::Llama).base());
        if stored.head_dim.is_none() {
            shape.head_dim = default_head_dim(shape.dim, shape.heads);
        }
        Ok(shape)
    }
}

impl ModelShape {
    /// Replaces the sizes with those of another shape.
    fn with_sizes(self, other: &Self) -> Self {
        let Self { layers, heads, kv_heads, dim, head_dim, ffn, seq, vocab, tied, norm_eps, .. } = *other;
        Self { layers, heads, kv_heads, dim, head_dim, ffn, seq, vocab, tied, norm_eps, ..self }
    }

    /// Returns whether builds before 0.4, which ignore the keys that they do not know, compute the same model.
    pub fn is_known_before_0_4(&self) -> bool {
        let Self { arch, rope_theta, rope_scaling, .. } = *self;
        let same_sizes = match arch {
            Arch::Gpt2 => self.kv_heads == self.heads && self.heads * self.head_dim == self.dim,
            Arch::Llama => matches!(rope_scaling, RopeScaling::Default | RopeScaling::Llama3 { .. }),
            _ => false,
        };
        same_sizes && *self == Self { rope_theta, rope_scaling, ..arch.base().with_sizes(self) }
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

    /// Returns the first key in which two shapes differ, with both values.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let text = |value: serde_json::Value| match value {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        let pairs = self.values().into_iter().zip(other.values());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_and_family_is_valid() {
        for (name, shape) in &PRESETS {
            shape.check().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        for arch in Arch::ALL {
            arch.base().check().unwrap_or_else(|error| panic!("{arch:?}: {error}"));
        }
    }

    #[test]
    fn sizes_override_the_preset_and_kv_heads_follow_heads() {
        let section = ModelSection { heads: Some(2), dim: Some(64), ..Default::default() };
        let shape = section.resolve().unwrap();
        assert_eq!((shape.heads, shape.kv_heads, shape.head_width(), shape.layers), (2, 2, 32, 4));
    }

    #[test]
    fn resolve_names_the_key_of_an_invalid_size() {
        let key = |section: ModelSection| section.resolve().unwrap_err().key;
        assert_eq!(key(ModelSection { dim: Some(130), ..Default::default() }), "model.dim");
        assert_eq!(key(ModelSection { layers: Some(0), ..Default::default() }), "model.layers");
        assert_eq!(key(ModelSection { kv_heads: Some(3), ..Default::default() }), "model.kv_heads");
        assert_eq!(key(ModelSection { preset: Some("huge".into()), ..Default::default() }), "model.preset");
        let large = ModelSection { dim: Some(1 << 20), heads: Some(1 << 12), ..Default::default() };
        assert_eq!(key(ModelSection { layers: Some(1 << 20), ..large.clone() }), "model.dim");
        assert_eq!(key(large), "model.dim");
    }

    #[test]
    fn head_width_that_is_set_need_not_divide_the_model_width() {
        let section = ModelSection { heads: Some(3), head_dim: Some(64), ..Default::default() };
        let shape = section.resolve().unwrap();
        assert_eq!((shape.dim, shape.attention_width(), shape.qkv_width()), (128, 192, 9 * 64));
        let key = |section: ModelSection| section.resolve().unwrap_err().key;
        for invalid in [0, 12, 264, usize::MAX] {
            assert_eq!(key(ModelSection { head_dim: Some(invalid), ..section.clone() }), "model.head_dim");
        }
        assert_eq!(key(ModelSection { head_dim: None, ..section }), "model.dim");
    }

    #[test]
    fn numbers_are_checked() {
        let key = |section: ModelSection| section.resolve().unwrap_err().key;
        for eps in [0.0, -1e-5, 2.0, 1e-50, f64::NAN] {
            assert_eq!(key(ModelSection { norm_eps: Some(eps), ..Default::default() }), "model.norm_eps");
        }
        for theta in [0.0, 0.5, f64::INFINITY, f64::NAN] {
            assert_eq!(
                key(ModelSection { rope_theta: Some(theta), ..Default::default() }),
                "model.rope_theta"
            );
        }
        for fraction in [0.0, 0.03, -0.5, 1.01, f64::NAN] {
            let section = ModelSection { rope_fraction: Some(fraction), ..Default::default() };
            assert_eq!(key(section), "model.rope_fraction");
        }
        for cap in [-1.0, f64::INFINITY, f64::NAN] {
            assert_eq!(
                key(ModelSection { logit_softcap: Some(cap), ..Default::default() }),
                "model.logit_softcap"
            );
        }
        for scale in [0.0, -1.0, f64::NAN] {
            assert_eq!(
                key(ModelSection { residual_scale: Some(scale), ..Default::default() }),
                "model.residual_scale"
            );
        }
    }

    #[test]
    fn scaling_of_the_rotation_is_checked() {
        let llama3 = |factor, low, high, original_max_position_embeddings| RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings,
        };
        let yarn = |beta_fast, beta_slow, attention_factor| RopeScaling::Yarn {
            factor: 4.0,
            original_max_position_embeddings: 32,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate: true,
        };
        let resolve = |scaling| ModelSection { rope_scaling: Some(scaling), ..Default::default() }.resolve();
        for scaling in [
            llama3(0.5, 1.0, 4.0, 8192),
            llama3(8.0, 4.0, 4.0, 8192),
            llama3(8.0, f64::NAN, 4.0, 8192),
            llama3(8.0, 1.0, 4.0, 0),
            RopeScaling::Linear { factor: 0.0 },
            RopeScaling::Dynamic { factor: 2.0, original_max_position_embeddings: 0 },
            yarn(1.0, 32.0, 1.0),
            yarn(32.0, 1.0, -1.0),
        ] {
            assert_eq!(resolve(scaling).unwrap_err().key, "model.rope_scaling", "{scaling:?}");
        }
        for scaling in [llama3(8.0, 1.0, 4.0, 8192), yarn(32.0, 1.0, 0.0), RopeScaling::Default] {
            assert_eq!(resolve(scaling).unwrap().rope_scaling, scaling);
        }
    }

    #[test]
    fn keys_without_effect_are_refused() {
        let key = |section: ModelSection| section.resolve().unwrap_err().key;
        let gpt2 = || ModelSection { preset: Some("gpt2-124m".into()), ..Default::default() };
        assert_eq!(key(ModelSection { rope_theta: Some(500.0), ..gpt2() }), "model.rope_theta");
        let rope_scaling = Some(RopeScaling::Linear { factor: 2.0 });
        assert_eq!(key(ModelSection { rope_scaling, ..gpt2() }), "model.rope_scaling");
        assert_eq!(
            key(ModelSection { window_pattern: Some(2), ..Default::default() }),
            "model.window_pattern"
        );
        let windowed_rope_theta = Some(1e4);
        assert_eq!(
            key(ModelSection { windowed_rope_theta, ..Default::default() }),
            "model.windowed_rope_theta"
        );
        let parallel = ModelSection { parallel: Some(Parallel::TwoNorms), ..Default::default() };
        assert_eq!(key(ModelSection { norm_place: Some(NormPlace::Post), ..parallel }), "model.norm_place");
    }

    #[test]
    fn architecture_other_than_the_presets_keeps_its_sizes_only() {
        let preset = ModelSection { preset: Some("llama-1b".into()), ..Default::default() };
        let section = ModelSection { arch: Some(Arch::Gpt2), kv_heads: Some(32), ..preset };
        let shape = section.resolve().unwrap();
        assert_eq!((shape.rope_scaling, shape.positions), (RopeScaling::Default, Positions::Learned));
        assert_eq!((shape.layers, shape.ffn, shape.vocab), (16, 8192, 128_256));
    }

    #[test]
    fn blocks_have_their_own_windows_and_rotation() {
        let gemma = Arch::Gemma3.base();
        let windows: Vec<_> = (0..7).map(|block| gemma.window(block)).collect();
        let local = Some(512);
        assert_eq!(windows, [local, local, local, local, local, None, local]);
        let smollm = Arch::SmolLm3.base();
        assert_eq!([2, 3, 4, 7].map(|block| smollm.is_rotated(block)), [true, false, true, false]);
        assert_eq!(ModelShape { head_dim: 80, rope_fraction: 0.4, ..smollm }.rotated_width(), 32);
    }

    #[test]
    fn models_with_newer_keys_are_told_apart() {
        let known = PRESETS.iter().filter(|(_, shape)| shape.is_known_before_0_4()).map(|(name, _)| *name);
        let known: Vec<_> = known.collect();
        assert!(["byte-tiny", "gpt2-124m", "llama-1b"].iter().all(|name| known.contains(name)), "{known:?}");
        assert!(
            !["qwen3-0.6b", "gemma3-1b", "mistral-7b"].iter().any(|name| known.contains(name)),
            "{known:?}"
        );
        let llama = &PRESETS[0].1;
        for changed in [
            ModelShape { qk_norm: QkNorm::Head, ..llama.clone() },
            ModelShape { logit_softcap: 30.0, ..llama.clone() },
            ModelShape { rope_scaling: RopeScaling::Linear { factor: 2.0 }, ..llama.clone() },
            ModelShape { kv_heads: 2, ..Arch::Gpt2.base() },
        ] {
            assert!(!changed.is_known_before_0_4(), "{changed:?}");
        }
    }

    #[test]
    fn shape_of_an_older_checkpoint_is_read() {
        let json = r#"{"arch":"llama","layers":4,"heads":4,"kv_heads":4,"dim":128,"ffn":352,"seq":128,"vocab":256,
                       "tied":true}"#;
        assert_eq!(serde_json::from_str::<ModelShape>(json).unwrap(), PRESETS[0].1);
        for (name, shape) in &PRESETS {
            let json = serde_json::to_vec(shape).unwrap();
            assert_eq!(serde_json::from_slice::<ModelShape>(&json).unwrap(), *shape, "{name}");
        }
        let error = serde_json::from_str::<ModelShape>(&json.replace("\"ffn\":352,", "")).unwrap_err();
        assert!(error.to_string().contains("`ffn` is missing"), "{error}");
    }
}
