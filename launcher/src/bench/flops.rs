//! Floating-point operations of training a model, counted as in the literature: useful work only ("model FLOPs").
//!
//! Per token: `6 N + 6 L T H D`. N is the number of parameters in matrix multiplications (with the head's V columns,
//! without the embedding lookup, norms and biases): 2 operations each in forward, 4 in backward (Kaplan et al. 2020,
//! section 2.1, arXiv:2001.08361). The two matrix multiplications of attention take `4 T C` per layer in forward and
//! twice that in backward (Chowdhery et al. 2022, appendix B, arXiv:2204.02311: `12 L H Q T` with H Q = C); a causal
//! mask halves them.
//!
//! Not counted: padding of the vocabulary, attention scores that backward recomputes, elementwise operations.

use xlaunch_proto::model::{Arch, ModelShape};

/// Operations per token, forward and backward.
#[expect(clippy::cast_precision_loss, reason = "a size")]
pub(crate) fn per_token(shape: &ModelShape) -> f64 {
    let attention = shape.layers as f64 * shape.seq as f64 * shape.attention_width() as f64;
    6.0 * matrix_parameters(shape) as f64 + 6.0 * attention
}

/// N: parameters in matrix multiplications.
fn matrix_parameters(shape: &ModelShape) -> usize {
    let gates = if shape.arch == Arch::Llama { 2 } else { 1 };
    let attention = shape.qkv_width() + shape.attention_width();
    let feed_forward = (gates + 1) * shape.ffn;
    shape.dim * (shape.layers * (attention + feed_forward) + shape.vocab)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xlaunch_proto::model::PRESETS;

    #[test]
    fn flops_of_presets_match_their_sizes() {
        // GPT-2 124M: 12 layers of 12 C^2, the head, and attention over 1024 tokens.
        let (c, v) = (768.0, 50257.0);
        let gpt2 = 6.0 * (12.0 * 12.0 * c * c + v * c) + 6.0 * 12.0 * 1024.0 * c;
        assert_eq!(per_token(&PRESETS[2].1), gpt2);
        // 12 layers of 4 C^2 and three matrices of C x 4 C.
        let c = 384.0;
        let llama = 6.0 * (12.0 * 16.0 * c * c + v * c) + 6.0 * 12.0 * 256.0 * c;
        assert_eq!(per_token(&PRESETS[1].1), llama);
    }

    #[test]
    fn shared_key_value_heads_are_counted_once() {
        let full = ModelShape { kv_heads: 4, ..PRESETS[0].1.clone() };
        let shared = ModelShape { kv_heads: 1, ..full.clone() };
        let saved = 6 * shared.layers * shared.dim * 2 * 3 * shared.head_width();
        assert_eq!(per_token(&full) - per_token(&shared), saved as f64);
    }
}
