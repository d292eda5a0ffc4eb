//! Model FLOPs: the floating-point operations that training a model needs, and the peak rates of known GPUs.
//!
//! Model FLOPs utilisation (MFU) is the ratio of both. Chowdhery et al. 2022, appendix B (arXiv:2204.02311), define it:
//!
//! ```text
//! MFU = tokens/s (6 N + 12 L H D T) / (ranks x peak FLOP/s of a device)
//! ```
//! N is the number of parameters in matrix multiplications, including the head's V columns, but without the embedding
//! lookup, norms and biases. Each takes 2 operations per token in forward and 4 in backward. The two matrix
//! multiplications of attention take `4 T H D` per layer and token in forward and twice that in backward; as in the
//! literature, they count in full although a causal mask needs only half of them. In blocks with a window, T is the
//! window. Of experts, only those that a token uses are counted, which include shared ones.
//!
//! Padding of the vocabulary, attention scores that backward recomputes, and elementwise operations are not counted.

use crate::job::{LoraSection, Precision};
use crate::model::ModelShape;

/// Returns the operations per token, forward and backward.
#[expect(clippy::cast_precision_loss, reason = "a size")]
pub fn per_token(shape: &ModelShape) -> f64 {
    let reach = |block| shape.window(block).map_or(shape.seq, |window| window.min(shape.seq));
    let attention: usize = (0..shape.layers).map(|block| shape.attention_width() * reach(block)).sum();
    6.0 * matrix_parameters(shape) as f64 + 12.0 * attention as f64
}

/// Returns the operations per token of a job. If adapters are trained, the gradients of all other weights are not
/// computed, which is a third of the operations with weights. Those of the adapters are not counted.
#[expect(clippy::cast_precision_loss, reason = "a size")]
pub fn per_token_of_job(lora: &LoraSection, shape: &ModelShape) -> f64 {
    let skipped = if lora.is_on() { 2.0 * matrix_parameters(shape) as f64 } else { 0.0 };
    per_token(shape) - skipped
}

/// Returns N, the number of parameters in matrix multiplications.
fn matrix_parameters(shape: &ModelShape) -> usize {
    let attention = shape.qkv_width() + shape.attention_width();
    let [_, feed_forward] = shape.feed_forward_parameters();
    shape.dim * (shape.layers * attention + shape.vocab) + usize::try_from(feed_forward).unwrap_or(usize::MAX)
}

/// Returns the seconds that a step with this number of tokens and of operations per token would take on these devices
/// at their peak rate. MFU is the ratio of this to the actual step time. `None` if the peak is not known.
#[expect(clippy::cast_precision_loss, reason = "a number of tokens")]
pub fn seconds_at_peak(
    per_token: f64,
    tokens: u64,
    ranks: usize,
    device: &str,
    precision: Precision,
) -> Option<f64> {
    Some(per_token * tokens as f64 / (ranks as f64 * peak(device, precision)?))
}

/// Peak rates of one kind of GPU, from NVIDIA's data sheets.
struct Peak {
    /// Words that must all be in the name that CUDA reports.
    words: &'static [&'static str],
    /// Rate of dense bf16 on tensor cores with fp32 accumulation, in TFLOP/s; tf32 has half of it.
    bf16: f64,
    /// Rate of the fp32 units, in TFLOP/s.
    fp32: f64,
}

/// Known GPUs. The first entry whose words are all in the name applies.
const PEAKS: [Peak; 19] = [
    Peak { words: &["GB200"], bf16: 2500.0, fp32: 80.0 },
    Peak { words: &["B200"], bf16: 2250.0, fp32: 75.0 },
    Peak { words: &["GH200"], bf16: 989.4, fp32: 66.9 },
    Peak { words: &["H200", "NVL"], bf16: 835.5, fp32: 60.0 },
    Peak { words: &["H200"], bf16: 989.4, fp32: 66.9 },
    Peak { words: &["H100", "PCIe"], bf16: 756.0, fp32: 51.2 },
    Peak { words: &["H100", "NVL"], bf16: 835.5, fp32: 60.0 },
    Peak { words: &["H100"], bf16: 989.4, fp32: 66.9 },
    Peak { words: &["A100"], bf16: 312.0, fp32: 19.5 },
    Peak { words: &["A10"], bf16: 125.0, fp32: 31.2 },
    Peak { words: &["L40S"], bf16: 362.0, fp32: 91.6 },
    Peak { words: &["L40"], bf16: 181.0, fp32: 90.5 },
    Peak { words: &["L4"], bf16: 121.0, fp32: 30.3 },
    Peak { words: &["RTX", "6000", "Ada"], bf16: 364.2, fp32: 91.1 },
    Peak { words: &["RTX", "A6000"], bf16: 154.8, fp32: 38.7 },
    Peak { words: &["RTX", "5090"], bf16: 209.5, fp32: 104.8 },
    Peak { words: &["RTX", "5080"], bf16: 112.6, fp32: 56.3 },
    Peak { words: &["RTX", "4090"], bf16: 165.2, fp32: 82.6 },
    Peak { words: &["RTX", "3090"], bf16: 71.0, fp32: 35.6 },
];

/// Words in the names of devices that are slower than the known GPU of that name: MIG slices and slower variants.
const SLOWER_VARIANTS: [&str; 6] = ["MIG", "D", "Laptop", "Mobile", "Max", "Ti"];

/// Returns the peak FLOP/s of a device; `None` for unknown devices and CPUs.
fn peak(device: &str, precision: Precision) -> Option<f64> {
    let words: Vec<&str> = device.split([' ', '-']).collect();
    let has = |word: &str| words.iter().any(|other| other.eq_ignore_ascii_case(word));
    if SLOWER_VARIANTS.iter().any(|word| has(word)) {
        return None;
    }
    let peak = PEAKS.iter().find(|peak| peak.words.iter().all(|word| has(word)))?;
    let tera = match precision {
        // FP8 multiplies twice as fast, but head and attention stay in bf16, so its peak would make MFU less
        // meaningful.
        Precision::Bf16 | Precision::Fp8 => peak.bf16,
        Precision::Tf32 => peak.bf16 / 2.0,
        Precision::Fp32 => peak.fp32,
    };
    Some(tera * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PRESETS;

    fn preset(name: &str) -> ModelShape {
        PRESETS.iter().find(|(preset, _)| *preset == name).unwrap().1.clone()
    }

    #[test]
    fn flops_of_presets_match_their_sizes() {
        // GPT-2 124M: 12 layers of 12 C^2, the head, and attention over 1024 tokens.
        let (c, v) = (768.0, 50257.0);
        let gpt2 = 6.0 * (12.0 * 12.0 * c * c + v * c) + 12.0 * 12.0 * 1024.0 * c;
        assert_eq!(per_token(&preset("gpt2-124m")), gpt2);
        // 12 layers of 4 C^2 and three matrices of C x 4 C.
        let c = 384.0;
        let llama = 6.0 * (12.0 * 16.0 * c * c + v * c) + 12.0 * 12.0 * 256.0 * c;
        assert_eq!(per_token(&preset("llama-28m")), llama);
    }

    #[test]
    fn shared_key_value_heads_are_counted_once() {
        let full = ModelShape { kv_heads: 4, ..preset("byte-tiny") };
        let shared = ModelShape { kv_heads: 1, ..full.clone() };
        let saved = 6 * shared.layers * shared.dim * 2 * 3 * shared.head_width();
        assert_eq!(per_token(&full) - per_token(&shared), saved as f64);
    }

    #[test]
    fn only_the_experts_that_a_token_uses_are_counted() {
        let dense = preset("byte-tiny");
        let mixture =
            ModelShape { experts: 16, experts_per_token: 4, expert_ffn: dense.ffn / 4, ..dense.clone() };
        let router = 6 * dense.layers * dense.dim * 16;
        assert_eq!(per_token(&mixture) - per_token(&dense), router as f64);
        let first = ModelShape { dense_layers: 1, ..mixture.clone() };
        assert_eq!(per_token(&first) - per_token(&dense), (router / 4 * 3) as f64);
        // Two shared experts are computed like two more of each token's.
        let shared = ModelShape { shared_experts: 2, shared_gate: true, ..mixture.clone() };
        let chosen = ModelShape { experts_per_token: 6, ..mixture };
        let gate = 6 * dense.layers * dense.dim;
        assert_eq!(per_token(&shared) - per_token(&chosen), gate as f64);
    }

    #[test]
    fn all_devices_work_on_a_step() {
        let shape = preset("gpt2-124m");
        let at_peak = |device| seconds_at_peak(per_token(&shape), 1 << 19, 8, device, Precision::Bf16);
        let seconds = at_peak("NVIDIA H100 80GB HBM3").unwrap();
        let flops = per_token(&shape) * f64::from(1 << 19);
        assert!((seconds - flops / (8.0 * 989.4e12)).abs() < 1e-12, "{seconds}");
        assert_eq!(at_peak("AMD EPYC"), None);
    }

    #[test]
    fn peaks_are_those_of_the_exact_device() {
        for (device, precision, tera) in [
            ("NVIDIA H200", Precision::Bf16, Some(989.4)),
            ("NVIDIA H200", Precision::Tf32, Some(494.7)),
            ("NVIDIA H200", Precision::Fp32, Some(66.9)),
            ("NVIDIA H100 PCIe", Precision::Bf16, Some(756.0)),
            ("NVIDIA A100-SXM4-80GB", Precision::Bf16, Some(312.0)),
            ("NVIDIA A100-PCIE-40GB", Precision::Tf32, Some(156.0)),
            ("NVIDIA L40S", Precision::Bf16, Some(362.0)),
            ("NVIDIA L40", Precision::Bf16, Some(181.0)),
            ("NVIDIA GeForce RTX 5090", Precision::Bf16, Some(209.5)),
            ("NVIDIA GeForce RTX 4090 D", Precision::Bf16, None),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", Precision::Bf16, None),
            ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", Precision::Bf16, None),
            ("NVIDIA H20", Precision::Bf16, None),
            ("cpu", Precision::Fp32, None),
        ] {
            let found = peak(device, precision).map(|peak| peak / 1e12);
            assert_eq!(found, tera, "{device} {precision:?}");
        }
    }
}
