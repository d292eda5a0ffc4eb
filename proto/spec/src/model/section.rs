//! The section `[model]`: its keys, and how they become a shape. As in `job`, doc comments of fields are user
//! documentation.

use serde::{Deserialize, Serialize};

use super::{
    Activation, Arch, ModelShape, NormKind, NormPlace, PRESETS, Parallel, Positions, QkNorm, RopeScaling,
    Router,
};
use crate::invalid::Invalid;

/// The model: a preset, and keys that override it. Without a preset, they come from `checkpoint.init`, if set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// Named shape from which all other keys take their defaults: `byte-tiny` (0.8M parameters, byte vocabulary),
    /// `llama-28m`, `gpt2-124m`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`, `speedrun-124m` (learns faster than
    /// gpt2-124m), `smollm2-135m`, `llama-1b` (Llama 3.2 1B), `llama-3b`, `llama-8b`, `qwen3-0.6b`, `qwen3-1.7b`,
    /// `qwen3-4b`, `qwen3-8b`, `qwen2.5-0.5b`, `qwen2.5-7b`, `mistral-7b`, `smollm3-3b`, `olmo2-1b`, `gemma3-1b` or
    /// `pythia-160m`; with experts: `mixtral-8x7b`, `olmoe-1b-7b`, `qwen3-30b-a3b` or `gpt-oss-20b`. Default:
    /// byte-tiny.
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
    /// Biases of the feed-forward layers, and of all experts.
    pub mlp_bias: Option<bool>,
    /// Bias of the output head.
    pub head_bias: Option<bool>,
    /// Activation function of the feed-forward layers.
    pub activation: Option<Activation>,
    /// The activation function is applied to a gate, which is multiplied by a second projection.
    pub gated: Option<bool>,
    /// Clamp the gate to at most this value, and the second projection to plus or minus it, before the activation
    /// function. 0 turns it off.
    pub glu_limit: Option<f64>,
    /// Number that is added to the second projection before it is multiplied by the gate.
    pub glu_offset: Option<f64>,
    /// Attention and feed-forward layers side by side, both reading the same residual stream.
    pub parallel: Option<Parallel>,
    /// Representation of positions.
    pub positions: Option<Positions>,
    /// Base of the rotary position embedding's wavelengths.
    pub rope_theta: Option<f64>,
    /// Scaling of the rotary position embedding for longer sequences, as in `config.json`: a table with `rope_type`
    /// (`default`, `linear`, `dynamic`, `yarn`, `llama3` or `longrope`) and the keys of that type.
    pub rope_scaling: Option<RopeScaling>,
    /// Part of each head that is rotated, above 0 and at most 1. It is rounded down to an even number of elements.
    pub rope_fraction: Option<f64>,
    /// Skip the rotation in every Nth block, counted from 1. 0 never skips it.
    pub no_rope_every: Option<usize>,
    /// Number of positions that a token attends to, including its own; 0: all.
    pub window: Option<usize>,
    /// Every Nth block, counted from 1, attends to all positions despite `window`. 0: none.
    pub window_pattern: Option<usize>,
    /// Base of the rotary wavelengths in blocks with a window. If set, `rope_scaling` does not apply to them. 0: the
    /// same as in the other blocks.
    pub windowed_rope_theta: Option<f64>,
    /// Each head has a learned score that takes part in the softmax over keys. It has no value vector, so its share of
    /// the softmax is dropped.
    pub attention_sinks: Option<bool>,
    /// Soft cap c of attention scores: a score s becomes c tanh(s / c). 0 turns it off.
    pub attention_softcap: Option<f64>,
    /// Soft cap c of the logits: a logit l becomes c tanh(l / c). 0 turns it off.
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
    /// The projection to the router's logits has a bias, which is trained like the router's weights.
    pub router_logit_bias: Option<bool>,
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

/// Implements what concerns every key of a shape alike, in the order in which differences are reported. The head width
/// depends on `dim` unless it is set, so it is compared after `dim`.
macro_rules! keys {
    ($($key:ident)*) => {
        impl ModelSection {
            /// Takes keys that are not set from a shape.
            pub fn complete(&mut self, shape: &ModelShape) {
                $(self.$key.get_or_insert_with(|| Clone::clone(&shape.$key));)*
            }

            /// Returns the shape in which keys that are not set are those of `base`.
            pub fn over(&self, base: &ModelShape) -> ModelShape {
                ModelShape { $($key: Clone::clone(self.$key.as_ref().unwrap_or(&base.$key))),* }
            }
        }

        impl ModelShape {
            /// Returns each key with its value.
            pub(super) fn values(&self) -> Vec<(&'static str, serde_json::Value)> {
                vec![$((concat!("model.", stringify!($key)), serde_json::json!(self.$key))),*]
            }
        }
    };
}

keys! {
    arch layers heads kv_heads dim head_dim ffn seq vocab tied norm_eps norm norm_place norm_offset qk_norm qkv_bias
    attention_bias mlp_bias head_bias activation gated glu_limit glu_offset parallel positions rope_theta rope_scaling
    rope_fraction no_rope_every window window_pattern windowed_rope_theta attention_sinks attention_softcap
    logit_softcap query_scale embedding_scale residual_scale logit_scale experts experts_per_token expert_ffn router
    normalise router_logit_bias router_bias routed_scale dense_layers shared_experts shared_gate
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
