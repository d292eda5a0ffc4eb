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

/// Returns a shape of the GPT-2 family: heads of width 64, a feed-forward width of 4 C, tied embeddings.
const fn gpt2(layers: usize, heads: usize) -> ModelShape {
    let dim = 64 * heads;
    ModelShape {
        layers,
        heads,
        kv_heads: heads,
        head_dim: 64,
        dim,
        ffn: 4 * dim,
        seq: 1024,
        vocab: 50257,
        ..arch::GPT2
    }
}

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
    ..LLAMA
};

/// As many parameters as GPT-2 124M, in blocks that reach its loss with fewer tokens: see docs/optimizers.md. A public
/// family can represent it, so the model can be exported.
const SPEEDRUN_124M: ModelShape = ModelShape {
    layers: 12,
    heads: 6,
    kv_heads: 6,
    head_dim: 128,
    dim: 768,
    ffn: 2048,
    seq: 1024,
    vocab: 50257,
    rope_theta: 1e4,
    ..arch::QWEN3
};

/// SmolLM2 135M. Its published configuration allows 8192 tokens.
const SMOLLM2_135M: ModelShape = ModelShape {
    layers: 30,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    dim: 576,
    ffn: 1536,
    seq: 2048,
    vocab: 49152,
    rope_theta: 1e5,
    ..LLAMA
};

/// Llama 3.2 1B. Its published configuration allows 131,072 tokens.
const LLAMA_1B: ModelShape = ModelShape {
    layers: 16,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    dim: 2048,
    ffn: 8192,
    seq: 2048,
    vocab: 128_256,
    rope_theta: 5e5,
    rope_scaling: RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    },
    ..LLAMA
};

/// Llama 3.2 3B.
const LLAMA_3B: ModelShape = ModelShape { layers: 28, heads: 24, head_dim: 128, dim: 3072, ..LLAMA_1B };

/// Llama 3.1 8B.
const LLAMA_8B: ModelShape = ModelShape {
    layers: 32,
    head_dim: 128,
    dim: 4096,
    ffn: 14336,
    tied: false,
    rope_scaling: RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    },
    ..LLAMA_1B
};

const QWEN3_06B: ModelShape = ModelShape {
    layers: 28,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    dim: 1024,
    ffn: 3072,
    seq: 2048,
    vocab: 151_936,
    ..arch::QWEN3
};

const QWEN3_17B: ModelShape = ModelShape { dim: 2048, ffn: 6144, ..QWEN3_06B };

const QWEN3_4B: ModelShape = ModelShape { layers: 36, heads: 32, dim: 2560, ffn: 9728, ..QWEN3_06B };

const QWEN3_8B: ModelShape = ModelShape { dim: 4096, ffn: 12288, tied: false, ..QWEN3_4B };

const QWEN25_05B: ModelShape = ModelShape {
    layers: 24,
    heads: 14,
    kv_heads: 2,
    head_dim: 64,
    dim: 896,
    ffn: 4864,
    seq: 2048,
    vocab: 151_936,
    ..arch::QWEN2
};

const QWEN25_7B: ModelShape = ModelShape {
    layers: 28,
    heads: 28,
    kv_heads: 4,
    head_dim: 128,
    dim: 3584,
    ffn: 18944,
    vocab: 152_064,
    tied: false,
    ..QWEN25_05B
};

/// Mistral 7B 0.3.
const MISTRAL_7B: ModelShape = ModelShape {
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    dim: 4096,
    ffn: 14336,
    seq: 2048,
    vocab: 32768,
    tied: false,
    rope_theta: 1e6,
    ..arch::MISTRAL
};

const SMOLLM3_3B: ModelShape = ModelShape {
    layers: 36,
    heads: 16,
    kv_heads: 4,
    head_dim: 128,
    dim: 2048,
    ffn: 11008,
    seq: 2048,
    vocab: 128_256,
    norm_eps: 1e-6,
    rope_theta: 5e6,
    ..arch::SMOLLM3
};

const OLMO2_1B: ModelShape = ModelShape {
    layers: 16,
    heads: 16,
    kv_heads: 16,
    head_dim: 128,
    dim: 2048,
    ffn: 8192,
    seq: 4096,
    vocab: 100_352,
    ..arch::OLMO2
};

const GEMMA3_1B: ModelShape = ModelShape {
    layers: 26,
    heads: 4,
    kv_heads: 1,
    head_dim: 256,
    dim: 1152,
    ffn: 6912,
    seq: 2048,
    vocab: 262_144,
    ..arch::GEMMA3
};

const PYTHIA_160M: ModelShape = ModelShape {
    layers: 12,
    heads: 12,
    kv_heads: 12,
    head_dim: 64,
    dim: 768,
    ffn: 3072,
    seq: 2048,
    vocab: 50304,
    ..arch::GPT_NEOX
};

const MIXTRAL_8X7B: ModelShape = ModelShape {
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    dim: 4096,
    ffn: 14336,
    seq: 2048,
    vocab: 32000,
    ..arch::MIXTRAL
};

/// OLMoE 1B-7B 0924.
const OLMOE_1B_7B: ModelShape = ModelShape {
    layers: 16,
    heads: 16,
    kv_heads: 16,
    head_dim: 128,
    dim: 2048,
    ffn: 1024,
    seq: 4096,
    vocab: 50304,
    experts: 64,
    experts_per_token: 8,
    ..arch::OLMOE
};

const QWEN3_30B_A3B: ModelShape = ModelShape {
    layers: 48,
    heads: 32,
    kv_heads: 4,
    head_dim: 128,
    dim: 2048,
    ffn: 6144,
    seq: 2048,
    vocab: 151_936,
    experts: 128,
    experts_per_token: 8,
    expert_ffn: 768,
    ..arch::QWEN3_MOE
};

const GPT_OSS_20B: ModelShape = ModelShape {
    layers: 24,
    heads: 64,
    kv_heads: 8,
    head_dim: 64,
    dim: 2880,
    ffn: 2880,
    seq: 2048,
    vocab: 201_088,
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
};
