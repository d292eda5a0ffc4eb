//! The shape of a GPT model: presets, `[model]`, and the rules of a valid shape.
//!
//! Shape letters, as everywhere in xlaunch: B batch, T sequence, C width, H heads, D head width, F ffn, V vocabulary,
//! Vp padded vocabulary, L layers.

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;

/// Architecture of the transformer blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// GPT-2: learned position embeddings, LayerNorm, GELU, biases.
    Gpt2,
    /// Llama: rotary position embeddings, RMSNorm, SwiGLU, no biases.
    Llama,
}

/// The model: a preset, and sizes that differ from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// Named shape from which all other keys take their defaults: `byte-tiny` (0.8M parameters, byte vocabulary),
    /// `llama-28m` or `gpt2-124m`. Default: byte-tiny.
    pub preset: Option<String>,
    /// Architecture of the transformer blocks. Default: the preset's.
    pub arch: Option<Arch>,
    /// Number of transformer blocks (L). Default: the preset's.
    pub layers: Option<usize>,
    /// Number of attention heads (H). Default: the preset's.
    pub heads: Option<usize>,
    /// Number of key and value heads, for grouped-query attention (llama only). Must divide `heads`. Default: `heads`
    /// if that is set, otherwise the preset's.
    pub kv_heads: Option<usize>,
    /// Width of the residual stream (C). A multiple of `heads`, so that `dim / heads` is a multiple of 8 and at most
    /// 256. Default: the preset's.
    pub dim: Option<usize>,
    /// Hidden width of the feed-forward layers (F). Default: the preset's.
    pub ffn: Option<usize>,
    /// Sequence length in tokens (T). Default: the preset's.
    pub seq: Option<usize>,
    /// Vocabulary size (V). At least 256 with `data.tokenizer = "bytes"`, and at least the tokenizer's with prepared
    /// data. Default: the tokenizer's of prepared data, otherwise the preset's.
    pub vocab: Option<usize>,
    /// Share the weights of the token embedding with the output head. Default: the preset's.
    pub tied: Option<bool>,
}

/// A model's shape, with every size resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are documented in ModelSection")]
pub struct ModelShape {
    pub arch: Arch,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub ffn: usize,
    pub seq: usize,
    pub vocab: usize,
    pub tied: bool,
}

/// The presets, by name.
pub const PRESETS: [(&str, ModelShape); 3] = [
    (
        "byte-tiny",
        ModelShape {
            arch: Arch::Llama,
            layers: 4,
            heads: 4,
            kv_heads: 4,
            dim: 128,
            ffn: 352,
            seq: 128,
            vocab: 256,
            tied: true,
        },
    ),
    (
        "llama-28m",
        ModelShape {
            arch: Arch::Llama,
            layers: 12,
            heads: 12,
            kv_heads: 12,
            dim: 384,
            ffn: 1536,
            seq: 256,
            vocab: 50257,
            tied: false,
        },
    ),
    (
        "gpt2-124m",
        ModelShape {
            arch: Arch::Gpt2,
            layers: 12,
            heads: 12,
            kv_heads: 12,
            dim: 768,
            ffn: 3072,
            seq: 1024,
            vocab: 50257,
            tied: true,
        },
    ),
];

/// Largest value accepted for any one size.
const MAX_SIZE: usize = 1 << 20;
/// Largest number of parameters. With [`MAX_SIZE`], it keeps products of sizes far from overflow.
const MAX_PARAMETERS: u128 = 1 << 40;

impl ModelSection {
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
        let heads = self.heads.unwrap_or(preset.heads);
        let shape = ModelShape {
            arch: self.arch.unwrap_or(preset.arch),
            layers: self.layers.unwrap_or(preset.layers),
            heads,
            kv_heads: self.kv_heads.unwrap_or(if self.heads.is_some() { heads } else { preset.kv_heads }),
            dim: self.dim.unwrap_or(preset.dim),
            ffn: self.ffn.unwrap_or(preset.ffn),
            seq: self.seq.unwrap_or(preset.seq),
            vocab: self.vocab.unwrap_or(preset.vocab),
            tied: self.tied.unwrap_or(preset.tied),
        };
        shape.check()?;
        Ok(shape)
    }
}

impl ModelShape {
    /// D, the width of one head.
    pub fn head_width(&self) -> usize {
        self.dim / self.heads
    }

    /// Vp: V rounded up to a multiple that tensor cores handle well. Small vocabularies are not padded.
    pub fn padded_vocab(&self) -> usize {
        if self.vocab <= 1024 { self.vocab } else { self.vocab.next_multiple_of(128) }
    }

    /// Output width of the fused query, key and value projection: (H + 2 Hkv) D.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width()
    }

    /// Parameters of all matrices, without key heads that are shared. Sizes have to be within [`MAX_SIZE`].
    fn matrix_parameters(&self) -> u128 {
        let [layers, dim, ffn, vocab, seq] =
            [self.layers, self.dim, self.ffn, self.vocab, self.seq].map(|size| size as u128);
        let (ffn_matrices, positions) = match self.arch {
            Arch::Gpt2 => (2, seq),
            Arch::Llama => (3, 0),
        };
        let embeddings = if self.tied { vocab } else { 2 * vocab };
        dim * (layers * (4 * dim + ffn_matrices * ffn) + embeddings + positions)
    }

    /// Checks the rules between sizes. The launcher and every worker apply them.
    pub fn check(&self) -> Result<(), Invalid> {
        let sizes = [
            ("model.layers", self.layers),
            ("model.heads", self.heads),
            ("model.kv_heads", self.kv_heads),
            ("model.dim", self.dim),
            ("model.ffn", self.ffn),
            ("model.seq", self.seq),
            ("model.vocab", self.vocab),
        ];
        for (key, size) in sizes {
            if size == 0 || size > MAX_SIZE {
                return Err(Invalid::new(key, format!("{size} is out of range"), format!("1 to {MAX_SIZE}")));
            }
        }
        let matrices = self.matrix_parameters();
        if matrices > MAX_PARAMETERS {
            return Err(Invalid::new(
                "model.dim",
                format!(
                    "{matrices} parameters with model.layers = {}, model.ffn = {} and model.vocab = {}",
                    self.layers, self.ffn, self.vocab
                ),
                "at most 2^40 parameters".into(),
            ));
        }
        if !self.dim.is_multiple_of(self.heads) {
            return Err(Invalid::new(
                "model.dim",
                format!("{} is not a multiple of model.heads = {}", self.dim, self.heads),
                "a multiple of model.heads, as all heads have the same width".into(),
            ));
        }
        let width = self.head_width();
        if !width.is_multiple_of(8) || width > 256 {
            return Err(Invalid::new(
                "model.heads",
                format!("the head width model.dim / model.heads is {width}"),
                "a multiple of 8, at most 256".into(),
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Invalid::new(
                "model.kv_heads",
                format!("{} does not divide model.heads = {}", self.kv_heads, self.heads),
                "a divisor of model.heads, as all key heads serve the same number of query heads".into(),
            ));
        }
        if self.arch == Arch::Gpt2 && self.kv_heads != self.heads {
            return Err(Invalid::new(
                "model.kv_heads",
                format!("{} differs from model.heads = {}", self.kv_heads, self.heads),
                "model.heads, as grouped-query attention needs model.arch = \"llama\"".into(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid() {
        for (name, shape) in &PRESETS {
            shape.check().unwrap_or_else(|error| panic!("{name}: {error}"));
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
        let gpt2 = ModelSection { preset: Some("gpt2-124m".into()), kv_heads: Some(4), ..Default::default() };
        assert_eq!(key(gpt2), "model.kv_heads");
    }
}
