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

/// The model: a preset, and sizes that override it. Without a preset, sizes come from `checkpoint.init`, if set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// Named shape from which all other keys take their defaults: `byte-tiny` (0.8M parameters, byte vocabulary),
    /// `llama-28m`, `gpt2-124m`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`, `smollm2-135m` or `llama-1b` (Llama 3.2 1B).
    /// Default: byte-tiny.
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
    /// Width of one attention head (D), a multiple of 8 and at most 256. Widths other than `dim / heads` are supported
    /// for llama only. Default: `dim / heads`.
    pub head_dim: Option<usize>,
    /// Width of the residual stream (C). Must be a multiple of `heads` unless `head_dim` is set. Default: the preset's.
    pub dim: Option<usize>,
    /// Hidden width of the feed-forward layers (F). Default: the preset's.
    pub ffn: Option<usize>,
    /// Sequence length in tokens (T). Default: the preset's.
    pub seq: Option<usize>,
    /// Vocabulary size (V). Must be at least 256 with `data.tokenizer = "bytes"`, and with prepared data at least that
    /// of its tokenizer. Default: that of the prepared data's tokenizer, otherwise the preset's.
    pub vocab: Option<usize>,
    /// Share the weights of the token embedding with the output head. Default: the preset's.
    pub tied: Option<bool>,
    /// Epsilon that is added to the variance in every LayerNorm or RMSNorm. Default: the preset's, 1e-5 in all presets.
    pub norm_eps: Option<f64>,
    /// Base of the rotary position embedding's wavelengths (llama only). Default: the preset's.
    pub rope_theta: Option<f64>,
    /// Scaling of the rotary position embedding for longer sequences (llama only), as in the `config.json` of Llama 3.1
    /// and 3.2: a table with rope_type = "llama3", factor, low_freq_factor, high_freq_factor and
    /// original_max_position_embeddings. Default: the preset's.
    pub rope_scaling: Option<RopeScaling>,
}

/// Scaling of the rotary position embedding, with the names of Hugging Face's `config.json`.
///
/// With `s = original_max_position_embeddings`, wavelengths above `s / low_freq_factor` are multiplied by `factor`,
/// those below `s / high_freq_factor` stay, and those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are documented above")]
pub struct RopeScaling {
    pub rope_type: RopeType,
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_max_position_embeddings: usize,
}

/// Method of scaling wavelengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum RopeType {
    /// The scaling of Llama 3.1 and 3.2.
    Llama3,
}

/// A model's shape, with every size resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "StoredShape")]
#[expect(missing_docs, reason = "the fields are documented in ModelSection")]
pub struct ModelShape {
    pub arch: Arch,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dim: usize,
    pub ffn: usize,
    pub seq: usize,
    pub vocab: usize,
    pub tied: bool,
    pub norm_eps: f64,
    pub rope_theta: f64,
    pub rope_scaling: Option<RopeScaling>,
}

/// The serialised form of a [`ModelShape`]. Older checkpoints lack the optional fields.
#[derive(Deserialize)]
struct StoredShape {
    arch: Arch,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: Option<usize>,
    dim: usize,
    ffn: usize,
    seq: usize,
    vocab: usize,
    tied: bool,
    norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeScaling>,
}

impl From<StoredShape> for ModelShape {
    fn from(stored: StoredShape) -> Self {
        Self {
            arch: stored.arch,
            layers: stored.layers,
            heads: stored.heads,
            kv_heads: stored.kv_heads,
            head_dim: stored.head_dim.unwrap_or_else(|| default_head_dim(stored.dim, stored.heads)),
            dim: stored.dim,
            ffn: stored.ffn,
            seq: stored.seq,
            vocab: stored.vocab,
            tied: stored.tied,
            norm_eps: stored.norm_eps.unwrap_or(NORM_EPS),
            rope_theta: stored.rope_theta.unwrap_or(ROPE_THETA),
            rope_scaling: stored.rope_scaling,
        }
    }
}

/// Default of [`ModelShape::norm_eps`].
pub const NORM_EPS: f64 = 1e-5;
/// Default of [`ModelShape::rope_theta`].
pub const ROPE_THETA: f64 = 10_000.0;

/// Returns a shape of the GPT-2 family: heads of width 64, a feed-forward width of 4 C, tied embeddings.
const fn gpt2(layers: usize, heads: usize) -> ModelShape {
    let dim = 64 * heads;
    ModelShape {
        arch: Arch::Gpt2,
        layers,
        heads,
        kv_heads: heads,
        head_dim: 64,
        dim,
        ffn: 4 * dim,
        seq: 1024,
        vocab: 50257,
        tied: true,
        norm_eps: NORM_EPS,
        rope_theta: ROPE_THETA,
        rope_scaling: None,
    }
}

const BYTE_TINY: ModelShape = ModelShape {
    arch: Arch::Llama,
    layers: 4,
    heads: 4,
    kv_heads: 4,
    head_dim: 32,
    dim: 128,
    ffn: 352,
    seq: 128,
    vocab: 256,
    tied: true,
    norm_eps: NORM_EPS,
    rope_theta: ROPE_THETA,
    rope_scaling: None,
};

const LLAMA_28M: ModelShape = ModelShape {
    layers: 12,
    heads: 12,
    kv_heads: 12,
    head_dim: 32,
    dim: 384,
    ffn: 1536,
    seq: 256,
    vocab: 50257,
    tied: false,
    ..BYTE_TINY
};

/// SmolLM2 135M. Its authors trained it with sequences of 2048 tokens; its published configuration allows 8192.
const SMOLLM2_135M: ModelShape = ModelShape {
    layers: 30,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    dim: 576,
    ffn: 1536,
    seq: 2048,
    vocab: 49152,
    rope_theta: 100_000.0,
    ..BYTE_TINY
};

/// Llama 3.2 1B. Its published configuration allows sequences of 131,072 tokens, too many for a default.
const LLAMA_1B: ModelShape = ModelShape {
    layers: 16,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    dim: 2048,
    ffn: 8192,
    seq: 2048,
    vocab: 128_256,
    rope_theta: 500_000.0,
    rope_scaling: Some(RopeScaling {
        rope_type: RopeType::Llama3,
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    }),
    ..BYTE_TINY
};

/// The presets and their names. In all of them, D = C / H.
pub const PRESETS: [(&str, ModelShape); 8] = [
    ("byte-tiny", BYTE_TINY),
    ("llama-28m", LLAMA_28M),
    ("gpt2-124m", gpt2(12, 12)),
    ("gpt2-medium", gpt2(24, 16)),
    ("gpt2-large", gpt2(36, 20)),
    ("gpt2-xl", gpt2(48, 25)),
    ("smollm2-135m", SMOLLM2_135M),
    ("llama-1b", LLAMA_1B),
];

/// Maximum value of any single size.
const MAX_SIZE: usize = 1 << 20;
/// Maximum number of parameters. Together with [`MAX_SIZE`], it keeps products of sizes far from overflow.
const MAX_PARAMETERS: u128 = 1 << 40;
/// Maximum base of rotary wavelengths, and maximum factor of their scaling.
const MAX_ROPE: f64 = 1e15;

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
        let (heads, dim) = (self.heads.unwrap_or(preset.heads), self.dim.unwrap_or(preset.dim));
        let arch = self.arch.unwrap_or(preset.arch);
        let rotary = arch == Arch::Llama;
        let shape = ModelShape {
            arch,
            layers: self.layers.unwrap_or(preset.layers),
            heads,
            kv_heads: self.kv_heads.unwrap_or(if self.heads.is_some() { heads } else { preset.kv_heads }),
            head_dim: self.head_dim.unwrap_or_else(|| default_head_dim(dim, heads)),
            dim,
            ffn: self.ffn.unwrap_or(preset.ffn),
            seq: self.seq.unwrap_or(preset.seq),
            vocab: self.vocab.unwrap_or(preset.vocab),
            tied: self.tied.unwrap_or(preset.tied),
            norm_eps: self.norm_eps.unwrap_or(preset.norm_eps),
            rope_theta: self.rope_theta.unwrap_or(if rotary { preset.rope_theta } else { ROPE_THETA }),
            rope_scaling: self.rope_scaling.or(preset.rope_scaling.filter(|_| rotary)),
        };
        shape.check_sizes()?;
        if self.head_dim.is_none() && !dim.is_multiple_of(heads) {
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

impl ModelShape {
    /// Returns D, the width of one head.
    pub fn head_width(&self) -> usize {
        self.head_dim
    }

    /// Returns H D, the width of attention's output.
    pub fn attention_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the first key in which two shapes differ, with both values.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let pairs = self.values().into_iter().zip(other.values());
        pairs.into_iter().find(|(own, other)| own != other).map(|((key, own), (_, other))| (key, own, other))
    }

    fn values(&self) -> [(&'static str, String); 13] {
        [
            ("model.arch", format!("{:?}", self.arch).to_lowercase()),
            ("model.layers", self.layers.to_string()),
            ("model.heads", self.heads.to_string()),
            ("model.kv_heads", self.kv_heads.to_string()),
            // The head width depends on `dim` unless it is set, so it is compared after `dim`.
            ("model.dim", self.dim.to_string()),
            ("model.head_dim", self.head_dim.to_string()),
            ("model.ffn", self.ffn.to_string()),
            ("model.seq", self.seq.to_string()),
            ("model.vocab", self.vocab.to_string()),
            ("model.tied", self.tied.to_string()),
            ("model.norm_eps", self.norm_eps.to_string()),
            ("model.rope_theta", self.rope_theta.to_string()),
            ("model.rope_scaling", self.rope_scaling.map_or("none".into(), |scaling| format!("{scaling:?}"))),
        ]
    }

    /// Returns Vp: V rounded up to a multiple that suits tensor cores. Small vocabularies are not padded.
    pub fn padded_vocab(&self) -> usize {
        if self.vocab <= 1024 { self.vocab } else { self.vocab.next_multiple_of(128) }
    }

    /// Returns the output width of the fused query, key and value projection: (H + 2 Hkv) D.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width()
    }

    /// Returns the number of parameters of all matrices, counting shared key heads once. Sizes must be within
    /// [`MAX_SIZE`].
    fn matrix_parameters(&self) -> u128 {
        let [layers, dim, ffn, vocab, seq, heads, head_dim] =
            [self.layers, self.dim, self.ffn, self.vocab, self.seq, self.heads, self.head_dim]
                .map(|size| size as u128);
        let (ffn_matrices, positions) = match self.arch {
            Arch::Gpt2 => (2, seq),
            Arch::Llama => (3, 0),
        };
        let embeddings = if self.tied { vocab } else { 2 * vocab };
        dim * (layers * (4 * heads * head_dim + ffn_matrices * ffn) + embeddings + positions)
    }

    /// Checks the rules between sizes. The launcher and every worker apply them.
    pub fn check(&self) -> Result<(), Invalid> {
        self.check_sizes()?;
        self.check_heads()?;
        self.check_numbers()
    }

    fn check_sizes(&self) -> Result<(), Invalid> {
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
        if self.head_dim > MAX_SIZE {
            return Err(head_dim_invalid(self.head_dim));
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
        Ok(())
    }

    fn check_heads(&self) -> Result<(), Invalid> {
        let (width, derived) = (self.head_width(), self.dim == self.attention_width());
        if width == 0 || !width.is_multiple_of(8) || width > 256 {
            if !derived {
                return Err(head_dim_invalid(width));
            }
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
        if self.arch == Arch::Gpt2 && !derived {
            return Err(Invalid::new(
                "model.head_dim",
                format!("{width} is not model.dim / model.heads = {} / {}", self.dim, self.heads),
                "model.dim / model.heads, as other widths need model.arch = \"llama\"".into(),
            ));
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), Invalid> {
        within("model.norm_eps", self.norm_eps, f64::from(f32::MIN_POSITIVE), 1.0, "1.2e-38 to 1")?;
        if self.arch == Arch::Gpt2 && (self.rope_theta != ROPE_THETA || self.rope_scaling.is_some()) {
            let key = if self.rope_scaling.is_some() { "model.rope_scaling" } else { "model.rope_theta" };
            return Err(Invalid::new(
                key,
                "gpt2 has learned position embeddings".into(),
                "no such key, or model.arch = \"llama\"".into(),
            ));
        }
        within("model.rope_theta", self.rope_theta, 1.0, MAX_ROPE, "1 to 1e15")?;
        let Some(scaling) = self.rope_scaling else { return Ok(()) };
        let RopeScaling { factor, low_freq_factor: low, high_freq_factor: high, .. } = scaling;
        let original = scaling.original_max_position_embeddings;
        let ordered = low > 0.0 && low < high && high <= MAX_ROPE;
        if !(1.0..=MAX_ROPE).contains(&factor) || !ordered || original == 0 || original > MAX_SIZE {
            return Err(Invalid::new(
                "model.rope_scaling",
                format!(
                    "factor = {factor}, low_freq_factor = {low}, high_freq_factor = {high}, \
                     original_max_position_embeddings = {original}"
                ),
                format!(
                    "factor of at least 1, 0 < low_freq_factor < high_freq_factor, \
                     original_max_position_embeddings from 1 to {MAX_SIZE}"
                ),
            ));
        }
        Ok(())
    }
}

fn head_dim_invalid(width: usize) -> Invalid {
    Invalid::new("model.head_dim", format!("{width} is out of range"), "a multiple of 8, at most 256".into())
}

fn within(key: &'static str, value: f64, low: f64, high: f64, expected: &str) -> Result<(), Invalid> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value:e} is out of range"), expected.into()))
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
    #[test]
    fn head_width_that_is_set_need_not_divide_the_model_width() {
        let section = ModelSection { heads: Some(3), head_dim: Some(64), ..Default::default() };
        let shape = section.resolve().unwrap();
        assert_eq!((shape.dim, shape.attention_width(), shape.qkv_width()), (128, 192, 9 * 64));
        let key = |section: ModelSection| section.resolve().unwrap_err().key;
        for invalid in [0, 12, 264, usize::MAX] {
            assert_eq!(key(ModelSection { head_dim: Some(invalid), ..section.clone() }), "model.head_dim");
        }
        assert_eq!(key(ModelSection { arch: Some(Arch::Gpt2), ..section.clone() }), "model.head_dim");
        assert_eq!(key(ModelSection { head_dim: None, ..section }), "model.dim");
    }

    #[test]
    fn norm_and_rotary_numbers_are_checked_and_rotary_ones_are_for_llama_only() {
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
        let scaling = LLAMA_1B.rope_scaling.unwrap();
        let invalid = [
            RopeScaling { factor: 0.5, ..scaling },
            RopeScaling { low_freq_factor: 4.0, ..scaling },
            RopeScaling { low_freq_factor: f64::NAN, ..scaling },
            RopeScaling { original_max_position_embeddings: 0, ..scaling },
        ];
        for scaling in invalid {
            let section = ModelSection { rope_scaling: Some(scaling), ..Default::default() };
            assert_eq!(key(section), "model.rope_scaling");
        }
        let gpt2 = ModelSection { preset: Some("gpt2-124m".into()), ..Default::default() };
        assert_eq!(key(ModelSection { rope_theta: Some(500.0), ..gpt2.clone() }), "model.rope_theta");
        assert_eq!(key(ModelSection { rope_scaling: Some(scaling), ..gpt2 }), "model.rope_scaling");
        // With an architecture other than the preset's, the preset's inapplicable values are dropped.
        let preset = ModelSection { preset: Some("llama-1b".into()), ..Default::default() };
        let section = ModelSection { arch: Some(Arch::Gpt2), kv_heads: Some(32), ..preset };
        assert_eq!(section.resolve().unwrap().rope_scaling, None);
    }

    #[test]
    fn shape_of_an_older_checkpoint_is_read() {
        let json = r#"{"arch":"llama","layers":4,"heads":4,"kv_heads":4,"dim":128,"ffn":352,"seq":128,"vocab":256,
                       "tied":true}"#;
        assert_eq!(serde_json::from_str::<ModelShape>(json).unwrap(), BYTE_TINY);
        for (name, shape) in &PRESETS {
            let json = serde_json::to_vec(shape).unwrap();
            assert_eq!(serde_json::from_slice::<ModelShape>(&json).unwrap(), *shape, "{name}");
        }
    }
}
