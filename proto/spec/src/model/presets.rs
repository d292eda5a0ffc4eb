//! Named shapes: published sizes of models, and two small ones of our own. Sequence lengths are those of training, as
//! published configurations often allow longer ones than a default should.

use super::arch::{self, LLAMA};
use super::{ModelShape, RopeScaling};

/// The presets and their names.
pub static PRESETS: [(&str, ModelShape); 26] = [
    ("byte-tiny", LLAMA),
    ("llama-28m", LLAMA_28M),
    ("gpt2-124m", gpt2(12, 12)),
    ("gpt2-medium", gpt2(24, 16)),
    ("gpt2-large", gpt2(36, 20)),
    ("gpt2-xl", gpt2(48, 25)),
    ("speedrun-124m", SPEEDRUN_124M),
    ("smollm2-135m", SMOLLM2_135M),
    ("llama-1b", LLAMA_1B),
    ("llama-3b", LLAMA_3B),
    ("llama-8b", LLAMA_8B),
    ("qwen3-0.6b", QWEN3_06B),
    ("qwen3-1.7b", QWEN3_17B),
    ("qwen3-4b", QWEN3_4B),
    ("qwen3-8b", QWEN3_8B),
    ("qwen2.5-0.5b", QWEN25_05B),
    ("qwen2.5-7b", QWEN25_7B),
    ("mistral-7b", MISTRAL_7B),
    ("smollm3-3b", SMOLLM3_3B),
    ("olmo2-1b", OLMO2_1B),
    ("gemma3-1b", GEMMA3_1B),
    ("pythia-160m", PYTHIA_160M),
    ("mixtral-8x7b", MIXTRAL_8X7B),
    ("olmoe-1b-7b", OLMOE_1B_7B),
    ("qwen3-30b-a3b", QWEN3_30B_A3B),
    ("gpt-oss-20b", GPT_OSS_20B),
];

/// A shape with these sizes, in the order of [`ModelShape`]'s fields, and with keys that differ from those of its base.
macro_rules! shape {
    (
        [$layers:expr, $heads:expr, $kv_heads:expr, $head_dim:expr, $dim:expr, $ffn:expr, $seq:expr, $vocab:expr],
        $($key:ident: $value:expr,)* ..$base:expr
    ) => {
        ModelShape {
            layers: $layers, heads: $heads, kv_heads: $kv_heads, head_dim: $head_dim, dim: $dim, ffn: $ffn, seq: $seq,
            vocab: $vocab, $($key: $value,)* ..$base
        }
    };
}

/// Returns a shape of the GPT-2 family: heads of width 64, a feed-forward width of 4 C, tied embeddings.
const fn gpt2(layers: usize, heads: usize) -> ModelShape {
    let dim = 64 * heads;
    shape!([layers, heads, heads, 64, dim, 4 * dim, 1024, 50257], ..arch::GPT2)
}

const LLAMA_28M: ModelShape = shape!([12, 12, 12, 32, 384, 1536, 256, 50257], tied: false, ..LLAMA);

/// As many parameters as GPT-2 124M, in blocks that reach its loss with fewer tokens: see docs/optimizers.md. A public
/// family can represent it, so the model can be exported.
const SPEEDRUN_124M: ModelShape =
    shape!([12, 6, 6, 128, 768, 2048, 1024, 50257], rope_theta: 1e4, ..arch::QWEN3);

/// SmolLM2 135M. Its published configuration allows 8192 tokens.
const SMOLLM2_135M: ModelShape = shape!([30, 9, 3, 64, 576, 1536, 2048, 49152], rope_theta: 1e5, ..LLAMA);

/// Llama 3.2 1B. Its published configuration allows 131,072 tokens.
const LLAMA_1B: ModelShape = shape!(
    [16, 32, 8, 64, 2048, 8192, 2048, 128_256],
    rope_theta: 5e5,
    rope_scaling: RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    },
    ..LLAMA
);

/// Llama 3.2 3B.
const LLAMA_3B: ModelShape = ModelShape { layers: 28, heads: 24, head_dim: 128, dim: 3072, ..LLAMA_1B };

/// Llama 3.1 8B.
const LLAMA_8B: ModelShape = shape!(
    [32, 32, 8, 128, 4096, 14336, 2048, 128_256],
    tied: false,
    rope_scaling: RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    },
    ..LLAMA_1B
);

const QWEN3_06B: ModelShape = shape!([28, 16, 8, 128, 1024, 3072, 2048, 151_936], ..arch::QWEN3);

const QWEN3_17B: ModelShape = ModelShape { dim: 2048, ffn: 6144, ..QWEN3_06B };

const QWEN3_4B: ModelShape = ModelShape { layers: 36, heads: 32, dim: 2560, ffn: 9728, ..QWEN3_06B };

const QWEN3_8B: ModelShape = ModelShape { dim: 4096, ffn: 12288, tied: false, ..QWEN3_4B };

const QWEN25_05B: ModelShape = shape!([24, 14, 2, 64, 896, 4864, 2048, 151_936], ..arch::QWEN2);

const QWEN25_7B: ModelShape = shape!([28, 28, 4, 128, 3584, 18944, 2048, 152_064], tied: false, ..QWEN25_05B);

/// Mistral 7B 0.3.
const MISTRAL_7B: ModelShape = shape!(
    [32, 32, 8, 128, 4096, 14336, 2048, 32768],
    tied: false,
    rope_theta: 1e6,
    ..arch::MISTRAL
);

const SMOLLM3_3B: ModelShape = shape!(
    [36, 16, 4, 128, 2048, 11008, 2048, 128_256],
    norm_eps: 1e-6,
    rope_theta: 5e6,
    ..arch::SMOLLM3
);

const OLMO2_1B: ModelShape = shape!([16, 16, 16, 128, 2048, 8192, 4096, 100_352], ..arch::OLMO2);

const GEMMA3_1B: ModelShape = shape!([26, 4, 1, 256, 1152, 6912, 2048, 262_144], ..arch::GEMMA3);

const PYTHIA_160M: ModelShape = shape!([12, 12, 12, 64, 768, 3072, 2048, 50304], ..arch::GPT_NEOX);

const MIXTRAL_8X7B: ModelShape = shape!([32, 32, 8, 128, 4096, 14336, 2048, 32000], ..arch::MIXTRAL);

/// OLMoE 1B-7B 0924.
const OLMOE_1B_7B: ModelShape = shape!(
    [16, 16, 16, 128, 2048, 1024, 4096, 50304],
    experts: 64,
    experts_per_token: 8,
    ..arch::OLMOE
);

const QWEN3_30B_A3B: ModelShape = shape!(
    [48, 32, 4, 128, 2048, 6144, 2048, 151_936],
    experts: 128,
    experts_per_token: 8,
    expert_ffn: 768,
    ..arch::QWEN3_MOE
);

const GPT_OSS_20B: ModelShape = shape!(
    [24, 64, 8, 64, 2880, 2880, 2048, 201_088],
    experts: 32,
    experts_per_token: 4,
    rope_scaling: RopeScaling::Yarn {
        factor: 32.0,
        original_max_position_embeddings: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.0,
        truncate: false,
    },
    ..arch::GPT_OSS
);
