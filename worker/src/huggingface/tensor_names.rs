//! Tensors of Hugging Face's models, and the values of the arena that each of them holds. Pure.
//!
//! Fused matrices are split by rows: queries, keys and values; gate and up projections. GPT-2's matrices are stored as
//! `[inputs, outputs]`, the transpose of the arena's. The rotary embedding pairs the same elements as this trainer's,
//! so nothing else has to be permuted.

use std::ops::Range;

use xlaunch_spec::model::{Arch, ModelShape};

use crate::model::layout::{Block, Layout, Norm};

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    /// Name of the tensor in a model with a head, such as `model.embed_tokens.weight`.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Range in the arena.
    pub(super) elements: Range<usize>,
    /// True if the file stores the transpose of the arena's matrix.
    pub(super) transposed: bool,
    /// True if a file may have additional rows, for positions that the model does not use.
    pub(super) prefix: bool,
}

/// Returns all tensors of a model, from the embedding to the head.
pub(super) fn tensors(shape: &ModelShape, layout: &Layout) -> Vec<Mapped> {
    let mut list = List { tensors: Vec::new(), gpt2: shape.arch == Arch::Gpt2 };
    let prefix = prefix(shape.arch);
    let embedding = if list.gpt2 { "wte" } else { "embed_tokens" };
    list.rows(&format!("{prefix}{embedding}"), layout.wte.start, shape.vocab, shape.dim);
    if let Some(wpe) = &layout.wpe {
        list.rows(&format!("{prefix}wpe"), wpe.start, shape.seq, shape.dim);
        if let Some(positions) = list.tensors.last_mut() {
            positions.prefix = true;
        }
    }
    for (index, block) in layout.blocks.iter().enumerate() {
        match shape.arch {
            Arch::Gpt2 => list.gpt2_block(&format!("{prefix}h.{index}."), shape, block),
            _ => list.llama_block(&format!("{prefix}layers.{index}."), shape, block),
        }
    }
    list.norm(&format!("{prefix}{}", if list.gpt2 { "ln_f" } else { "norm" }), shape.dim, Some(&layout.lnf));
    if !shape.tied {
        list.rows("lm_head", layout.head.start, shape.vocab, shape.dim);
    }
    list.tensors
}

/// Returns the prefix of all tensor names except the head's. Models that were saved without a head lack it.
pub(super) fn prefix(arch: Arch) -> &'static str {
    match arch {
        Arch::Gpt2 => "transformer.",
        _ => "model.",
    }
}

/// Returns whether a tensor holds no parameters: masks and frequencies, which older versions saved, or a tied head.
pub(super) fn is_derived(name: &str, shape: &ModelShape) -> bool {
    (shape.tied && name == "lm_head.weight")
        || [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|end| name.ends_with(end))
}

struct List {
    tensors: Vec<Mapped>,
    gpt2: bool,
}

impl List {
    fn gpt2_block(&mut self, name: &str, shape: &ModelShape, block: &Block) {
        let (dim, ffn) = (shape.dim, shape.ffn);
        self.norm(&format!("{name}ln_1"), dim, block.ln1.as_ref());
        for (part, linear, inputs, outputs) in [
            ("attn.c_attn", &block.qkv, dim, shape.qkv_width()),
            ("attn.c_proj", &block.proj, shape.attention_width(), dim),
        ] {
            self.conv1d(&format!("{name}{part}"), linear.weight.start, inputs, outputs);
            self.bias(&format!("{name}{part}"), linear.bias.as_ref(), outputs);
        }
        self.norm(&format!("{name}ln_2"), dim, block.ln2.as_ref());
        for (part, linear, inputs, outputs) in
            [("mlp.c_fc", &block.fc, dim, ffn), ("mlp.c_proj", &block.out, ffn, dim)]
        {
            self.conv1d(&format!("{name}{part}"), linear.weight.start, inputs, outputs);
            self.bias(&format!("{name}{part}"), linear.bias.as_ref(), outputs);
        }
    }

    fn llama_block(&mut self, name: &str, shape: &ModelShape, block: &Block) {
        let (dim, ffn) = (shape.dim, shape.ffn);
        let (queries, keys) = (shape.attention_width(), shape.kv_heads * shape.head_width());
        self.norm(&format!("{name}input_layernorm"), dim, block.ln1.as_ref());
        let mut at = block.qkv.weight.start;
        for (part, rows) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
            self.rows(&format!("{name}self_attn.{part}"), at, rows, dim);
            at += rows * dim;
        }
        self.rows(&format!("{name}self_attn.o_proj"), block.proj.weight.start, dim, queries);
        self.norm(&format!("{name}post_attention_layernorm"), dim, block.ln2.as_ref());
        let gate = block.fc.weight.start;
        self.rows(&format!("{name}mlp.gate_proj"), gate, ffn, dim);
        self.rows(&format!("{name}mlp.up_proj"), gate + ffn * dim, ffn, dim);
        self.rows(&format!("{name}mlp.down_proj"), block.out.weight.start, dim, ffn);
    }

    fn norm(&mut self, name: &str, dim: usize, norm: Option<&Norm>) {
        let Some(norm) = norm else { return };
        self.push(format!("{name}.weight"), vec![dim], norm.weight.start, false);
        self.bias(name, norm.bias.as_ref(), dim);
    }

    fn bias(&mut self, name: &str, bias: Option<&Range<usize>>, len: usize) {
        if let Some(bias) = bias {
            self.push(format!("{name}.bias"), vec![len], bias.start, false);
        }
    }

    fn rows(&mut self, name: &str, at: usize, rows: usize, cols: usize) {
        self.push(format!("{name}.weight"), vec![rows, cols], at, false);
    }

    fn conv1d(&mut self, name: &str, at: usize, inputs: usize, outputs: usize) {
        self.push(format!("{name}.weight"), vec![inputs, outputs], at, true);
    }

    fn push(&mut self, name: String, shape: Vec<usize>, at: usize, transposed: bool) {
        let elements = at..at + shape.iter().product::<usize>();
        self.tensors.push(Mapped { name, shape, elements, transposed, prefix: false });
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_spec::model::PRESETS;

    use super::*;

    #[test]
    fn tensors_hold_every_parameter_once() {
        let wide = ("wide", ModelShape { kv_heads: 2, head_dim: 64, ..PRESETS[0].1.clone() });
        for (name, preset) in PRESETS.iter().chain([&wide]) {
            for tied in [true, false] {
                let shape = ModelShape { tied, ..preset.clone() };
                let layout = Layout::new(&shape);
                let mut ranges: Vec<_> =
                    tensors(&shape, &layout).into_iter().map(|tensor| tensor.elements).collect();
                ranges.sort_by_key(|range| range.start);
                let mut stored = layout.params.iter().map(crate::model::layout::Param::stored);
                let mut left = stored.next().unwrap();
                for range in ranges {
                    if left.is_empty() {
                        left = stored.next().unwrap();
                    }
                    assert_eq!(range.start, left.start, "{name}");
                    left.start = range.end;
                    assert!(left.start <= left.end, "{name}");
                }
                assert!(left.is_empty() && stored.next().is_none(), "{name}");
            }
        }
    }

    #[test]
    fn names_are_those_of_the_library() {
        let names = |index: usize| -> Vec<(String, Vec<usize>)> {
            let shape = ModelShape { layers: 1, tied: false, ..PRESETS[index].1.clone() };
            let tensors = tensors(&shape, &Layout::new(&shape)).into_iter();
            tensors.map(|tensor| (tensor.name, tensor.shape)).collect()
        };
        let gpt2 = names(2);
        assert_eq!(gpt2.len(), 2 + 12 + 2 + 1);
        for (name, shape) in [
            ("transformer.wpe.weight", vec![1024, 768]),
            ("transformer.h.0.attn.c_attn.weight", vec![768, 3 * 768]),
            ("transformer.h.0.mlp.c_proj.weight", vec![3072, 768]),
            ("transformer.h.0.ln_2.bias", vec![768]),
            ("transformer.ln_f.weight", vec![768]),
            ("lm_head.weight", vec![50257, 768]),
        ] {
            assert!(gpt2.contains(&(name.into(), shape)), "{name} in {gpt2:?}");
        }
        let llama = names(7);
        assert_eq!(llama.len(), 1 + 9 + 1 + 1);
        for (name, shape) in [
            ("model.embed_tokens.weight", vec![128_256, 2048]),
            ("model.layers.0.self_attn.k_proj.weight", vec![512, 2048]),
            ("model.layers.0.mlp.down_proj.weight", vec![2048, 8192]),
            ("model.norm.weight", vec![2048]),
        ] {
            assert!(llama.contains(&(name.into(), shape)), "{name} in {llama:?}");
        }
    }

    #[test]
    fn matrices_of_gpt2_blocks_are_transposed_and_gates_come_before_up_projections() {
        let list = |index: usize| {
            let shape = ModelShape { layers: 1, ..PRESETS[index].1.clone() };
            tensors(&shape, &Layout::new(&shape))
        };
        // The library stores Conv1D weights transposed, which matters even for square matrices.
        for tensor in list(2) {
            let conv1d = tensor.name.contains(".c_") && tensor.name.ends_with(".weight");
            assert_eq!(tensor.transposed, conv1d, "{}", tensor.name);
        }
        let llama = list(7);
        assert!(llama.iter().all(|tensor| !tensor.transposed));
        let parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
        let starts: Vec<usize> = parts
            .iter()
            .map(|part| llama.iter().find(|tensor| tensor.name.contains(part)).unwrap().elements.start)
            .collect();
        assert!(starts[..3].is_sorted() && starts[3] < starts[4], "{starts:?}");
    }
}
