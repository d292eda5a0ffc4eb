//! Tensors of Hugging Face's models, and the values of the arena that each of them holds. Pure.
//!
//! A family's [`Names`] say how its tensors are called, and which matrices its files fuse. Each tensor holds one range
//! of the arena, possibly in another [`Order`]:
//! - the arena's fused matrices are split by rows: queries, keys and values; gate and up projections;
//! - GPT-2's matrices and those of gpt-oss's experts are stored as `[inputs, outputs]`, the transpose of the arena's;
//! - gpt-oss alternates the outputs of gate and up projections;
//! - GPT-NeoX has the queries, keys and values of one head after another;
//! - rotation pairs elements i and i + D/2 of each head in the arena. In files, these are elements i and i + R of the
//!   first 2 R, which differs if only a part of a head is rotated; in ERNIE 4.5's and GLM's, elements 2 i and 2 i + 1.

use std::ops::Range;

use xlaunch_spec::model::ModelShape;

use crate::model::layout::{Block, Layout, Linear, Norm, Shared};

/// Names of the tensors of a family, without `.weight` and `.bias`.
#[derive(Debug)]
pub(crate) struct Names {
    /// Prefix of all names except the head's. Models that were saved without a head lack it.
    pub(crate) prefix: &'static str,
    pub(crate) embedding: &'static str,
    positions: &'static str,
    blocks: &'static str,
    norm: &'static str,
    pub(crate) head: &'static str,
    /// Norms before attention and before the feed-forward layer.
    ln: [&'static str; 2],
    /// Norms after them.
    post: [&'static str; 2],
    qkv: Qkv,
    qk_norm: [&'static str; 2],
    /// Learned scores of the heads, the whole name.
    sinks: &'static str,
    proj: &'static str,
    /// The first feed-forward matrix; gate and up projections if files do not fuse them.
    fc: &'static [&'static str],
    out: &'static str,
    /// Names of a router and its experts, in families that have them.
    experts: Option<Experts>,
    /// Biases of the choice of experts, the whole name.
    router_bias: &'static str,
    /// Beginning of the names of the shared experts' matrices, which are called as those of a dense block.
    shared: &'static str,
    shared_gate: &'static str,
    /// Names in files with one tensor for all experts, if the family has such files.
    grouped: Option<&'static Names>,
    /// True if files may have more blocks, which predict further tokens. They are not read.
    further_blocks: bool,
    /// True if files store matrices as `[inputs, outputs]`.
    transposed: bool,
    /// True if the elements of a rotated pair are side by side in files.
    adjacent_pairs: bool,
}

impl Names {
    /// Returns the beginning of the names in a block.
    pub(crate) fn block(&self, index: usize) -> String {
        format!("{}{}.{index}.", self.prefix, self.blocks)
    }
}

/// Names of a router and its experts.
#[derive(Debug)]
enum Experts {
    /// A matrix per expert and projection: gate, up and down.
    Each { router: &'static str, experts: &'static str, parts: [&'static str; 3] },
    /// One tensor for all experts: gate and up, then down.
    Grouped { router: &'static str, parts: [&'static str; 2] },
    /// Same, with matrices as `[inputs, outputs]`, and gate and up projections that alternate.
    Alternating { router: &'static str, parts: [&'static str; 2] },
}

/// Names of the matrices of queries, keys and values.
#[derive(Debug)]
enum Qkv {
    Split([&'static str; 3]),
    /// All queries, then all keys, then all values.
    Fused(&'static str),
    /// Queries, keys and values of each head.
    ByHead(&'static str),
}

pub(super) const LLAMA: Names = Names {
    prefix: "model.",
    embedding: "embed_tokens",
    positions: "",
    blocks: "layers",
    norm: "norm",
    head: "lm_head",
    ln: ["input_layernorm", "post_attention_layernorm"],
    post: ["", ""],
    qkv: Qkv::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    qk_norm: ["self_attn.q_norm", "self_attn.k_norm"],
    sinks: "",
    proj: "self_attn.o_proj",
    fc: &["mlp.gate_proj", "mlp.up_proj"],
    out: "mlp.down_proj",
    experts: None,
    router_bias: "",
    shared: "",
    shared_gate: "",
    grouped: None,
    further_blocks: false,
    transposed: false,
    adjacent_pairs: false,
};

pub(super) const GPT2: Names = Names {
    prefix: "transformer.",
    embedding: "wte",
    positions: "wpe",
    blocks: "h",
    norm: "ln_f",
    ln: ["ln_1", "ln_2"],
    qkv: Qkv::Fused("attn.c_attn"),
    proj: "attn.c_proj",
    fc: &["mlp.c_fc"],
    out: "mlp.c_proj",
    transposed: true,
    ..LLAMA
};

pub(super) const OLMO2: Names =
    Names { ln: ["", ""], post: ["post_attention_layernorm", "post_feedforward_layernorm"], ..LLAMA };

/// Gemma 2 and 3.
pub(super) const GEMMA2: Names = Names {
    ln: ["input_layernorm", "pre_feedforward_layernorm"],
    post: ["post_attention_layernorm", "post_feedforward_layernorm"],
    ..LLAMA
};

pub(super) const PHI: Names =
    Names { norm: "final_layernorm", proj: "self_attn.dense", fc: &["mlp.fc1"], out: "mlp.fc2", ..LLAMA };

pub(super) const PHI3: Names =
    Names { qkv: Qkv::Fused("self_attn.qkv_proj"), fc: &["mlp.gate_up_proj"], ..LLAMA };

pub(super) const STARCODER2: Names = Names { fc: &["mlp.c_fc"], out: "mlp.c_proj", ..LLAMA };

pub(super) const GPT_NEOX: Names = Names {
    prefix: "gpt_neox.",
    embedding: "embed_in",
    norm: "final_layer_norm",
    head: "embed_out",
    qkv: Qkv::ByHead("attention.query_key_value"),
    proj: "attention.dense",
    fc: &["mlp.dense_h_to_4h"],
    out: "mlp.dense_4h_to_h",
    ..LLAMA
};

pub(super) const ARCEE: Names = Names { fc: &["mlp.up_proj"], ..LLAMA };

pub(super) const ERNIE45: Names = Names { adjacent_pairs: true, ..LLAMA };

pub(super) const GLM: Names = Names { fc: &["mlp.gate_up_proj"], ..ERNIE45 };

pub(super) const GLM4: Names = Names { post: ["post_self_attn_layernorm", "post_mlp_layernorm"], ..GLM };

pub(super) const MIXTRAL: Names = Names {
    experts: Some(Experts::Each {
        router: "block_sparse_moe.gate",
        experts: "block_sparse_moe.experts",
        parts: ["w1", "w3", "w2"],
    }),
    grouped: Some(&GROUPED_EXPERTS),
    ..LLAMA
};

/// OLMoE and Qwen3-MoE.
pub(super) const EXPERT_MATRICES: Names = Names {
    experts: Some(Experts::Each {
        router: "mlp.gate",
        experts: "mlp.experts",
        parts: ["gate_proj", "up_proj", "down_proj"],
    }),
    grouped: Some(&GROUPED_EXPERTS),
    ..LLAMA
};

pub(super) const QWEN2_MOE: Names = Names {
    shared: SHARED_EXPERT,
    shared_gate: SHARED_EXPERT_GATE,
    grouped: Some(&Names { shared: SHARED_EXPERT, shared_gate: SHARED_EXPERT_GATE, ..GROUPED_EXPERTS }),
    ..EXPERT_MATRICES
};
const SHARED_EXPERT: &str = "mlp.shared_expert";
const SHARED_EXPERT_GATE: &str = "mlp.shared_expert_gate";

pub(super) const GLM4_MOE: Names = Names {
    router_bias: SCORE_CORRECTION,
    shared: SHARED_EXPERTS,
    grouped: Some(&Names { router_bias: SCORE_CORRECTION, shared: SHARED_EXPERTS, ..GROUPED_EXPERTS }),
    further_blocks: true,
    ..EXPERT_MATRICES
};
const SCORE_CORRECTION: &str = "mlp.gate.e_score_correction_bias";
const SHARED_EXPERTS: &str = "mlp.shared_experts";

pub(super) const GPT_OSS: Names = Names {
    sinks: "self_attn.sinks",
    experts: Some(Experts::Alternating {
        router: "mlp.router",
        parts: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }),
    ..LLAMA
};

/// Parameters of the families before it in transformers 5, whose files have the names above.
const GROUPED_EXPERTS: Names = Names {
    experts: Some(Experts::Grouped {
        router: "mlp.gate",
        parts: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }),
    ..LLAMA
};

impl Names {
    /// Returns the names that these tensors have: those of a family, or the grouped ones.
    pub(super) fn found_in<'a>(
        &'static self,
        mut tensors: impl Iterator<Item = &'a String>,
    ) -> &'static Self {
        let is_grouped = |name: &String| name.ends_with(".mlp.experts.gate_up_proj");
        self.grouped.filter(|_| tensors.any(is_grouped)).unwrap_or(self)
    }
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    /// Name of the tensor in a model with a head, such as `model.embed_tokens.weight`.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// Range in the arena.
    pub(crate) elements: Range<usize>,
    /// Order of the values in files.
    pub(crate) order: Order,
    /// Exports have it in fp32 whatever their type: it must keep its precision.
    pub(crate) exact: bool,
    /// True if a file may have additional rows, for positions that the model does not use.
    pub(crate) prefix: bool,
}

/// Order of a tensor's values in files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Same as in the arena.
    Same,
    /// The file has the transpose of the arena's matrix, or of that of each expert.
    Transposed,
    /// Same, and the columns are in turn rows of the first and of the second half of the arena's matrix.
    Alternating,
    /// The arena's row of each row in the file, in the matrix of each expert if there are several.
    Rows(Vec<usize>),
}

impl Mapped {
    /// Returns the number of consecutive values that another order permutes: those of an expert's matrix, or of the
    /// whole tensor.
    pub(crate) fn unit(&self) -> usize {
        match *self.shape {
            [_, rows, cols] => rows * cols,
            _ => self.elements.len(),
        }
    }

    /// Brings the values of whole units from the order of files into that of the arena.
    pub(crate) fn to_arena(&self, values: &[f32]) -> Vec<f32> {
        self.by_unit(values, |values| match (&self.order, &*self.shape) {
            (Order::Transposed, [.., rows, cols]) => transpose(values, *rows, *cols),
            (Order::Alternating, [.., rows, cols]) => {
                from_rows(&alternating_rows(*cols), &transpose(values, *rows, *cols))
            }
            (Order::Rows(rows), _) => from_rows(rows, values),
            _ => values.to_vec(),
        })
    }

    /// Brings the values of whole units from the order of the arena into that of files.
    pub(crate) fn to_file(&self, values: &[f32]) -> Vec<f32> {
        self.by_unit(values, |values| match (&self.order, &*self.shape) {
            (Order::Transposed, [.., rows, cols]) => transpose(values, *cols, *rows),
            (Order::Alternating, [.., rows, cols]) => {
                transpose(&to_rows(&alternating_rows(*cols), values), *cols, *rows)
            }
            (Order::Rows(rows), _) => to_rows(rows, values),
            _ => values.to_vec(),
        })
    }

    fn by_unit(&self, values: &[f32], order: impl Fn(&[f32]) -> Vec<f32>) -> Vec<f32> {
        let unit = self.unit().max(1);
        if values.len() == unit { order(values) } else { values.chunks(unit).flat_map(order).collect() }
    }

    /// Returns the tensor in files that have the transpose of each expert's matrix; `None` if there are no such files.
    pub(crate) fn transposed(&self) -> Option<Self> {
        let [experts, rows, cols] = *self.shape else { return None };
        let order = match self.order {
            Order::Transposed => Order::Same,
            Order::Alternating => Order::Rows(alternating_rows(cols)),
            Order::Same | Order::Rows(_) => return None,
        };
        Some(Self { shape: vec![experts, cols, rows], order, ..self.clone() })
    }
}

/// Moves each row to its place in the arena.
fn from_rows(rows: &[usize], values: &[f32]) -> Vec<f32> {
    let mut arena = vec![0.0; values.len()];
    let width = values.len() / rows.len().max(1);
    for (row, values) in rows.iter().zip(values.chunks_exact(width.max(1))) {
        arena[row * width..(row + 1) * width].copy_from_slice(values);
    }
    arena
}

/// Returns the arena's rows in this order.
fn to_rows(rows: &[usize], values: &[f32]) -> Vec<f32> {
    let width = values.len() / rows.len().max(1);
    rows.iter().flat_map(|row| &values[row * width..(row + 1) * width]).copied().collect()
}

/// Returns the arena's row of each row of a file that has rows of its first and of its second half in turn.
fn alternating_rows(count: usize) -> Vec<usize> {
    (0..count).map(|row| row % 2 * (count / 2) + row / 2).collect()
}

/// Transposes `[rows, cols]` to `[cols, rows]`.
fn transpose(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| (0..rows).map(move |row| values[row * cols + col])).collect()
}

/// Returns all tensors of a model, from the embedding to the head.
pub(crate) fn tensors(names: &'static Names, shape: &ModelShape, layout: &Layout) -> Vec<Mapped> {
    let mut list = List { tensors: Vec::new(), names, shape };
    let prefix = names.prefix;
    list.matrix(&format!("{prefix}{}", names.embedding), layout.wte.start, [shape.vocab, shape.dim]);
    if let Some(wpe) = &layout.wpe {
        list.matrix(&format!("{prefix}{}", names.positions), wpe.start, [shape.seq, shape.dim]);
        if let Some(positions) = list.tensors.last_mut() {
            positions.prefix = true;
        }
    }
    for (index, block) in layout.blocks.iter().enumerate() {
        list.block(&names.block(index), block);
    }
    list.norm(&format!("{prefix}{}", names.norm), Some(&layout.lnf));
    if !shape.tied {
        list.matrix(names.head, layout.head.start, [shape.vocab, shape.dim]);
    }
    list.vector(&format!("{}.bias", names.head), layout.head_bias.as_ref(), shape.vocab);
    list.tensors
}

/// Returns whether a tensor holds no parameters of the model: masks and frequencies, which older versions saved, a tied
/// head, or blocks that predict further tokens.
pub(super) fn is_derived(name: &str, names: &Names, shape: &ModelShape) -> bool {
    const ENDS: [&str; 7] = [
        ".attn.bias",
        ".attn.masked_bias",
        ".attention.bias",
        ".attention.masked_bias",
        ".rotary_emb.inv_freq",
        ".rotary_emb.cos_cached",
        ".rotary_emb.sin_cached",
    ];
    let is_further = || {
        let blocks = format!("{}{}.", names.prefix, names.blocks);
        let index = name.strip_prefix(&blocks).and_then(|rest| rest.split('.').next());
        index.and_then(|index| index.parse::<usize>().ok()).is_some_and(|index| index >= shape.layers)
    };
    let is_head = || name.strip_suffix(".weight") == Some(names.head);
    (shape.tied && is_head())
        || (names.further_blocks && is_further())
        || ENDS.iter().any(|end| name.ends_with(end))
}

struct List<'a> {
    tensors: Vec<Mapped>,
    names: &'static Names,
    shape: &'a ModelShape,
}

impl List<'_> {
    fn block(&mut self, name: &str, block: &Block) {
        let (names, shape) = (self.names, self.shape);
        let (dim, ffn, attention) = (shape.dim, shape.ffn, shape.attention_width());
        let name = |part: &str| format!("{name}{part}");
        self.norm(&name(names.ln[0]), block.ln1.as_ref());
        self.qkv(&name, &block.qkv);
        if let Some(norms) = &block.qk_norm {
            for (part, range) in names.qk_norm.iter().zip(norms) {
                self.vector(&format!("{}.weight", name(part)), Some(range), range.len());
                let width = shape.head_dim;
                // The elements of heads are in the order of the projections' rows.
                let head = head_rows(names, shape);
                let rows: Vec<usize> =
                    (0..range.len()).map(|row| row / width * width + head[row % width]).collect();
                if let Some(scales) = self.tensors.last_mut().filter(|_| !rows.is_sorted()) {
                    scales.order = Order::Rows(rows);
                }
            }
        }
        self.vector(&name(names.sinks), block.sinks.as_ref(), shape.heads);
        self.linear(&name(names.proj), &block.proj, [dim, attention]);
        self.norm(&name(names.post[0]), block.post1.as_ref());
        self.norm(&name(names.ln[1]), block.ln2.as_ref());
        if let Some((router, experts)) = block.router.as_ref().zip(names.experts.as_ref()) {
            self.experts(&name, experts, router, block);
            if let Some(bias) = &block.router_bias {
                self.push(name(names.router_bias), vec![bias.len()], bias.start);
                if let Some(bias) = self.tensors.last_mut() {
                    bias.exact = true;
                }
            }
            if let Some(Shared { fc, out, gate }) = &block.shared {
                let part = |part: &str| format!("{}.{part}", name(names.shared));
                let width = shape.shared_width();
                self.rows(&part("gate_proj"), fc, 0..width, dim);
                self.rows(&part("up_proj"), fc, width..2 * width, dim);
                self.linear(&part("down_proj"), out, [dim, width]);
                if let Some(gate) = gate {
                    self.matrix(&name(names.shared_gate), gate.start, [1, dim]);
                }
            }
        } else {
            let rows = shape.ffn_inputs() / names.fc.len();
            for (index, part) in names.fc.iter().enumerate() {
                self.rows(&name(part), &block.fc, index * rows..(index + 1) * rows, dim);
            }
            self.linear(&name(names.out), &block.out, [dim, ffn]);
        }
        self.norm(&name(names.post[1]), block.post2.as_ref());
    }

    fn experts(
        &mut self,
        name: &dyn Fn(&str) -> String,
        names: &Experts,
        router: &Range<usize>,
        block: &Block,
    ) {
        let (count, dim, width) = (self.shape.experts, self.shape.dim, self.shape.expert_width());
        let (fc, out, len) = (block.fc.weight.start, block.out.weight.start, width * dim);
        match names {
            Experts::Each { router: gate, experts, parts: [gate_proj, up_proj, down_proj] } => {
                self.matrix(&name(gate), router.start, [count, dim]);
                for expert in 0..count {
                    let part = |part: &str| format!("{}.{expert}.{part}", name(experts));
                    self.matrix(&part(gate_proj), fc + 2 * expert * len, [width, dim]);
                    self.matrix(&part(up_proj), fc + (2 * expert + 1) * len, [width, dim]);
                    self.matrix(&part(down_proj), out + expert * len, [dim, width]);
                }
            }
            Experts::Grouped { router: gate, parts: [gate_up_proj, down_proj] } => {
                self.matrix(&name(gate), router.start, [count, dim]);
                self.push(name(gate_up_proj), vec![count, 2 * width, dim], fc);
                self.push(name(down_proj), vec![count, dim, width], out);
            }
            Experts::Alternating { router: gate, parts: [gate_up_proj, down_proj] } => {
                self.matrix(&name(gate), router.start, [count, dim]);
                let bias = block.router_logit_bias.as_ref();
                self.vector(&format!("{}.bias", name(gate)), bias, count);
                let [gate_up, down] = [name(gate_up_proj), name(down_proj)];
                if let Some([fc, out]) = &block.expert_biases {
                    let each = alternating_rows(2 * width);
                    let of_expert = |expert| each.iter().map(move |row| expert * 2 * width + row);
                    let rows = (0..count).flat_map(of_expert).collect();
                    let bias = format!("{gate_up}_bias");
                    self.push_ordered(bias, vec![count, 2 * width], fc.start, Order::Rows(rows));
                    self.push(format!("{down}_bias"), vec![count, dim], out.start);
                }
                self.push_ordered(gate_up, vec![count, dim, 2 * width], fc, Order::Alternating);
                self.push_ordered(down, vec![count, width, dim], out, Order::Transposed);
            }
        }
    }

    fn qkv(&mut self, name: &dyn Fn(&str) -> String, linear: &Linear) {
        let (queries, keys) = (self.shape.attention_width(), self.shape.kv_heads * self.shape.head_dim);
        let order = qkv_rows(self.names, self.shape);
        match &self.names.qkv {
            Qkv::Split(parts) => {
                let bounds = [0, queries, queries + keys, queries + 2 * keys];
                for (part, bounds) in parts.iter().zip(bounds.windows(2)) {
                    let range = bounds[0]..bounds[1];
                    let rows = order[range.clone()].iter().map(|row| row - range.start).collect();
                    self.ordered_rows(&name(part), linear, range, rows);
                }
            }
            Qkv::Fused(part) if self.names.transposed => {
                self.linear(&name(part), linear, [queries + 2 * keys, self.shape.dim]);
            }
            Qkv::Fused(part) | Qkv::ByHead(part) => {
                self.ordered_rows(&name(part), linear, 0..order.len(), order);
            }
        }
    }

    /// Adds rows of a matrix, and of its bias, with the arena's row of each.
    fn ordered_rows(&mut self, name: &str, linear: &Linear, range: Range<usize>, rows: Vec<usize>) {
        let first = self.tensors.len();
        self.rows(name, linear, range, self.shape.dim);
        if !rows.is_sorted() {
            self.tensors[first..].iter_mut().for_each(|tensor| tensor.order = Order::Rows(rows.clone()));
        }
    }

    fn norm(&mut self, name: &str, norm: Option<&Norm>) {
        let Some(norm) = norm else { return };
        self.vector(&format!("{name}.weight"), Some(&norm.weight), self.shape.dim);
        self.vector(&format!("{name}.bias"), norm.bias.as_ref(), self.shape.dim);
    }

    fn linear(&mut self, name: &str, linear: &Linear, [outputs, inputs]: [usize; 2]) {
        self.rows(name, linear, 0..outputs, inputs);
    }

    /// Adds some rows of a matrix, and of its bias.
    fn rows(&mut self, name: &str, linear: &Linear, rows: Range<usize>, cols: usize) {
        self.matrix(name, linear.weight.start + rows.start * cols, [rows.len(), cols]);
        if let Some(matrix) = self.tensors.last_mut().filter(|_| self.names.transposed) {
            matrix.shape.reverse();
            matrix.order = Order::Transposed;
        }
        let bias = linear.bias.as_ref().map(|bias| bias.start + rows.start..bias.start + rows.end);
        self.vector(&format!("{name}.bias"), bias.as_ref(), rows.len());
    }

    fn vector(&mut self, name: &str, range: Option<&Range<usize>>, len: usize) {
        if let Some(range) = range {
            self.push(name.into(), vec![len], range.start);
        }
    }

    fn matrix(&mut self, name: &str, at: usize, [rows, cols]: [usize; 2]) {
        self.push(format!("{name}.weight"), vec![rows, cols], at);
    }

    fn push(&mut self, name: String, shape: Vec<usize>, at: usize) {
        self.push_ordered(name, shape, at, Order::Same);
    }

    fn push_ordered(&mut self, name: String, shape: Vec<usize>, at: usize, order: Order) {
        let elements = at..at + shape.iter().product::<usize>();
        self.tensors.push(Mapped { name, shape, elements, order, exact: false, prefix: false });
    }
}

/// Returns the arena's row of queries, keys and values for each row of a file.
fn qkv_rows(names: &Names, shape: &ModelShape) -> Vec<usize> {
    let (width, heads, kv_heads) = (shape.head_dim, shape.heads, shape.kv_heads);
    let (rotated, plain) = (head_rows(names, shape), (0..width).collect::<Vec<usize>>());
    // The first row of a head, and the order of its rows.
    let head = |index: usize| {
        let rows = if index < heads + kv_heads { &rotated } else { &plain };
        rows.iter().map(move |row| index * width + row)
    };
    if matches!(names.qkv, Qkv::ByHead(_)) {
        (0..heads).flat_map(|index| [index, heads + index, 2 * heads + index]).flat_map(head).collect()
    } else {
        (0..heads + 2 * kv_heads).flat_map(head).collect()
    }
}

/// Returns the arena's row of each row of a head in a file, for queries and keys.
fn head_rows(names: &Names, shape: &ModelShape) -> Vec<usize> {
    let (width, pairs) = (shape.head_dim, shape.rotated_width() / 2);
    (0..width).map(|row| rotated_row(row, width, pairs, names.adjacent_pairs)).collect()
}

/// Returns the row of a head of `width` rows in the arena for a row in a file. Files have the `pairs` pairs that are
/// rotated first, one after the other if they are adjacent, otherwise their first elements and then their second ones;
/// and then the rest. In the arena, the elements of a pair are half of the width apart.
fn rotated_row(row: usize, width: usize, pairs: usize, adjacent: bool) -> usize {
    let half = width / 2;
    match row {
        row if row < 2 * pairs && adjacent => row % 2 * half + row / 2,
        row if row < pairs => row,
        row if row < 2 * pairs => half + row - pairs,
        // The rest fills the first half, then the second.
        row if row < half + pairs => row - pairs,
        row => row,
    }
}

#[cfg(test)]
mod tests;
