//! Computes layouts: which parameters a model, a rank or an adapter has, in which order and with which initial values.

use std::ops::Range;

use xlaunch_comm::{Among, Groups};
use xlaunch_spec::job::{Invalid, JobSpec, Layer, LoraSection, Module};
use xlaunch_spec::model::{ModelShape, NormKind, NormPlace, Parallel, Positions, QkNorm};

use super::arena::{Group, Init, Param, Parameters};
use super::{AdaptedModule, Adapter, Adapters, Block, Layout, Linear, Norm, Segment, Shared};

/// GPT-2's initial values.
const NORMAL: Init = Init::Normal(0.02);

impl Layout {
    /// Computes the layout of a job's model: with adapters, if it trains them.
    pub fn of_job(spec: &JobSpec, shape: &ModelShape) -> Result<Self, Invalid> {
        if spec.lora.is_on() {
            Self::new(shape).with_adapters(shape, &spec.lora)
        } else {
            Ok(Self::new(shape))
        }
    }

    /// Computes the layout of a rank of a job: with its share of the experts.
    pub fn of_rank(spec: &JobSpec, shape: &ModelShape, rank: usize, world: usize) -> Result<Self, Invalid> {
        let groups = Groups { rank, world, size: spec.comm.experts };
        if groups.size == 1 { Self::of_job(spec, shape) } else { Ok(Self::in_groups(shape, groups)) }
    }

    /// Freezes all parameters, and adds adapters.
    pub fn with_adapters(mut self, shape: &ModelShape, lora: &LoraSection) -> Result<Self, Invalid> {
        let modules = lora.modules(shape)?;
        let mut arena = Parameters::default();
        let mut ends = vec![0; self.blocks.len()];
        for (index, block) in self.blocks.iter_mut().enumerate().rev() {
            // The order in which backward computes the gradients of the layers.
            for layer in [Layer::Out, Layer::Fc, Layer::Proj, Layer::Qkv] {
                let modules: Vec<&Module> = modules.iter().filter(|module| module.layer == layer).collect();
                if !modules.is_empty() {
                    let (linear, inputs) = block.layer(layer, shape);
                    linear.adapter = Some(arena.adapter(index, &modules, inputs, lora.rank));
                }
            }
            ends[index] = arena.len;
        }
        #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
        let scale = lora.scale() as f32;
        self.adapters = Some(Adapters { arena, ends, rank: lora.rank, scale });
        Ok(self)
    }

    /// Computes the layout of a model.
    pub fn new(shape: &ModelShape) -> Self {
        Self::with_experts(shape, shape.experts)
    }

    /// Computes the layout of a rank, with its share of the experts of a model.
    pub fn in_groups(shape: &ModelShape, groups: Groups) -> Self {
        let (whole, (position, ranks)) = (Self::new(shape), groups.member(Among::Group));
        let mut own = Self::with_experts(shape, shape.experts / ranks);
        let segment = |(whole, own): (&Param, &Param)| {
            let first = if own.is_of_experts() { position * own.range.len() } else { 0 };
            let start = whole.range.start + first;
            Segment { whole: start..start + own.range.len(), own: own.range.clone() }
        };
        if ranks > 1 {
            let segments = whole.arena.params.iter().zip(&own.arena.params).map(segment).collect();
            own.whole = Some((whole.arena, segments));
        }
        Self { expert_groups: groups, ..own }
    }

    /// Computes the layout of a model with this number of experts.
    fn with_experts(shape: &ModelShape, experts: usize) -> Self {
        let (dim, padded) = (shape.dim, shape.padded_vocab());
        let learned = shape.positions == Positions::Learned;
        // As in GPT-2, projections into the residual stream are scaled down by its depth.
        #[expect(clippy::cast_precision_loss, reason = "a count of layers is small")]
        let residual = Init::Normal(0.02 / ((2 * shape.layers) as f32).sqrt());
        let scale = if shape.norm_offset { Init::Zeros } else { Init::Ones };
        let mut arena = Builder { arena: Parameters::default(), norm: shape.norm, scale };

        let vocab = [shape.vocab, padded, dim];
        let untied_head = (!shape.tied).then(|| arena.table("head.weight", vocab, Group::Head));
        let head_bias = shape.head_bias.then(|| arena.padded("head.bias", shape.vocab, padded));
        let lnf = arena.norm("lnf", dim);
        let top_end = arena.arena.len;
        let pre = shape.norm_place != NormPlace::Post;
        let post = shape.norm_place != NormPlace::Pre;
        let mut blocks: Vec<Block> = (0..shape.layers)
            .rev()
            .map(|index| {
                let name = |part: &str| format!("blocks.{index}.{part}");
                let post2 = post.then(|| arena.norm(&name("post2"), dim));
                let (mut router, mut router_logit_bias, mut router_bias) = (None, None, None);
                let (mut expert_biases, mut shared) = (None, None);
                let (out, fc) = if shape.has_experts(index) {
                    let (width, inputs) = (shape.expert_width(), shape.expert_inputs());
                    let out = arena.experts(&name("out"), [experts, dim, width], residual);
                    let fc = arena.experts(&name("fc"), [experts, inputs, dim], NORMAL);
                    expert_biases = shape.mlp_bias.then(|| {
                        let out = arena.expert_biases(name("out.bias"), [experts, dim]);
                        [arena.expert_biases(name("fc.bias"), [experts, inputs]), out]
                    });
                    router = Some(arena.matrix(&name("router.weight"), shape.experts, dim, NORMAL));
                    let mut of_router = |is_set: bool, part: &str| {
                        is_set.then(|| arena.vector(name(part), shape.experts, Init::Zeros))
                    };
                    router_logit_bias = of_router(shape.router_logit_bias, "router.bias");
                    router_bias = of_router(shape.router_bias, "router_bias");
                    shared = (shape.shared_experts > 0).then(|| arena.shared(&name, shape, residual));
                    (out, fc)
                } else {
                    let out = arena.linear(&name("out"), [dim, shape.ffn], residual, shape.mlp_bias);
                    let fc = arena.linear(&name("fc"), [shape.ffn_inputs(), dim], NORMAL, shape.mlp_bias);
                    (out, fc)
                };
                let own_norm = pre && shape.parallel != Parallel::SharedNorm;
                let ln2 = own_norm.then(|| arena.norm(&name("ln2"), dim));
                let post1 = post.then(|| arena.norm(&name("post1"), dim));
                let sizes = [dim, shape.attention_width()];
                let proj = arena.linear(&name("proj"), sizes, residual, shape.attention_bias);
                let sinks =
                    shape.attention_sinks.then(|| arena.vector(name("sinks"), shape.heads, Init::Zeros));
                let qk_norm = qk_norm_sizes(shape)
                    .map(|[q, k]| [arena.scale(&name("q_norm"), q), arena.scale(&name("k_norm"), k)]);
                let qkv = arena.linear(&name("qkv"), [shape.qkv_width(), dim], NORMAL, shape.qkv_bias);
                let ln1 = pre.then(|| arena.norm(&name("ln1"), dim));
                let end = arena.arena.len;
                Block {
                    ln1,
                    qkv,
                    qk_norm,
                    sinks,
                    proj,
                    post1,
                    ln2,
                    router,
                    router_logit_bias,
                    router_bias,
                    fc,
                    out,
                    expert_biases,
                    shared,
                    post2,
                    end,
                }
            })
            .collect();
        blocks.reverse();
        let wpe = learned.then(|| arena.table("wpe.weight", [shape.seq, shape.seq, dim], Group::Embeddings));
        let wte = arena.table("wte.weight", vocab, Group::Embeddings);
        let head = untied_head.unwrap_or_else(|| wte.clone());
        let (expert_groups, arena) = (Groups::single(0, 1), arena.arena);
        let (whole, adapters) = (None, None);
        Self { wte, wpe, blocks, lnf, head, head_bias, top_end, expert_groups, arena, whole, adapters }
    }
}

impl Parameters {
    /// Adds the adapter of a layer of a block. A is drawn from PyTorch's default distribution of linear layers, as in
    /// PEFT: uniform up to the inverse root of the number of inputs. B is zero, so the adapter has no effect at first.
    fn adapter(&mut self, block: usize, modules: &[&Module], inputs: usize, rank: usize) -> Adapter {
        let names: Vec<&str> = modules.iter().map(|module| module.name).collect();
        let rows = modules.len() * rank;
        #[expect(clippy::cast_precision_loss, reason = "a width is small")]
        let init = Init::Uniform(1.0 / (inputs as f32).sqrt());
        let name = format!("blocks.{block}.{}.lora_a", names.join("_"));
        let a = self.place(name, vec![rows, inputs], rows * inputs, Group::Matrices, init);
        let b = modules.iter().map(|module| {
            let (name, outputs) = (format!("blocks.{block}.{}.lora_b", module.name), module.outputs.len());
            let b = self.place(name, vec![outputs, rank], outputs * rank, Group::LoraB, Init::Zeros);
            AdaptedModule { outputs: module.outputs.clone(), b }
        });
        let modules = b.collect();
        Adapter { a, modules }
    }
}

/// Returns the numbers of scales of the norms of queries and keys.
fn qk_norm_sizes(shape: &ModelShape) -> Option<[usize; 2]> {
    match shape.qk_norm {
        QkNorm::None => None,
        QkNorm::Head => Some([shape.head_dim; 2]),
        QkNorm::Full => Some([shape.attention_width(), shape.kv_heads * shape.head_dim]),
    }
}

struct Builder {
    arena: Parameters,
    norm: NormKind,
    /// Initial scale of norms: 0 if they add 1 to it.
    scale: Init,
}

impl Builder {
    fn norm(&mut self, name: &str, dim: usize) -> Norm {
        let weight = self.scale(name, dim);
        let has_bias = self.norm == NormKind::Layer;
        Norm { weight, bias: has_bias.then(|| self.vector(format!("{name}.bias"), dim, Init::Zeros)) }
    }

    fn scale(&mut self, name: &str, len: usize) -> Range<usize> {
        self.vector(format!("{name}.weight"), len, self.scale)
    }

    fn padded(&mut self, name: &str, len: usize, padded: usize) -> Range<usize> {
        self.arena.place(name.into(), vec![len], padded, Group::Vectors, Init::Zeros)
    }

    fn linear(&mut self, name: &str, [outputs, inputs]: [usize; 2], init: Init, bias: bool) -> Linear {
        Linear {
            weight: self.matrix(&format!("{name}.weight"), outputs, inputs, init),
            bias: bias.then(|| self.vector(format!("{name}.bias"), outputs, Init::Zeros)),
            adapter: None,
        }
    }

    /// Adds the biases of a layer of each expert.
    fn expert_biases(&mut self, name: String, [experts, outputs]: [usize; 2]) -> Range<usize> {
        let (shape, len) = (vec![experts, outputs], experts * outputs);
        self.arena.place(name, shape, len, Group::Vectors, Init::Zeros)
    }

    /// Adds a layer of each expert, without biases.
    fn experts(&mut self, name: &str, [experts, outputs, inputs]: [usize; 3], init: Init) -> Linear {
        let (name, shape) = (format!("{name}.weight"), vec![experts, outputs, inputs]);
        let weight = self.arena.place(name, shape, experts * outputs * inputs, Group::Matrices, init);
        Linear { weight, bias: None, adapter: None }
    }

    /// Adds the shared experts of a block, in the order in which backward computes their gradients.
    fn shared(&mut self, name: &dyn Fn(&str) -> String, shape: &ModelShape, residual: Init) -> Shared {
        let (dim, width) = (shape.dim, shape.shared_width());
        let inputs = shape.shared_inputs();
        let gate = shape.shared_gate.then(|| self.matrix(&name("shared_gate.weight"), 1, dim, NORMAL));
        let out = self.linear(&name("shared_out"), [dim, width], residual, false);
        let fc = self.linear(&name("shared_fc"), [inputs, dim], NORMAL, false);
        Shared { fc, out, gate }
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, init: Init) -> Range<usize> {
        self.arena.place(name.into(), vec![rows, cols], rows * cols, Group::Matrices, init)
    }

    /// Adds a table of embeddings or of the head, whose rows are padded to this number.
    fn table(&mut self, name: &str, [rows, padded, cols]: [usize; 3], group: Group) -> Range<usize> {
        self.arena.place(name.into(), vec![rows, cols], padded * cols, group, NORMAL)
    }

    fn vector(&mut self, name: String, len: usize, init: Init) -> Range<usize> {
        self.arena.place(name, vec![len], len, Group::Vectors, init)
    }
}
