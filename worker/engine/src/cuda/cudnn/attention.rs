//! Causal attention as the two operation graphs that cuDNN has fused kernels for.
//!
//! Which operations in which order is what NVIDIA's cudnn-frontend builds (node/scaled_dot_product_flash_attention.h,
//! "composite"): the library matches the pattern, so nothing here is free to be written otherwise. Queries, keys and
//! values are parts of the packed rows, by strides; keys, and in backward values, are described transposed.

use cudarc::cudnn::sys::{
    cudnnDataType_t as DataType, cudnnHandle_t, cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduce,
};

use super::descriptor::Refusal;
use super::graph::{Graph, Layout, Plan, Target, Tensor};
use crate::shapes::AttentionShape;

const BF16: DataType = DataType::CUDNN_DATA_BFLOAT16;
const F32: DataType = DataType::CUDNN_DATA_FLOAT;

/// Widest heads that all supported devices have backward kernels for.
const MOST_WIDTH: usize = 128;

/// Tensors in scratch memory begin at multiples of so many bytes.
const SCRATCH_ALIGNMENT: usize = 256;

/// Which way through attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) enum Direction {
    Forward,
    Backward,
}

/// Addresses of operands as the operation has them; `dout` and `dqkv` are backward's.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Operands {
    pub(in crate::cuda) qkv: u64,
    pub(in crate::cuda) out: u64,
    pub(in crate::cuda) lse: u64,
    pub(in crate::cuda) dout: u64,
    pub(in crate::cuda) dqkv: u64,
}

/// A real tensor of a graph, and where its memory is.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// So many bytes behind the start of an operand.
    Operand(fn(&Operands) -> u64, u64),
    /// So many bytes behind the start of the scratch memory.
    Scratch(u64),
}

/// One direction in one shape.
#[derive(Debug)]
pub(in crate::cuda) struct AttentionPlan {
    plan: Plan,
    places: Vec<(Tensor, Place)>,
    /// Bytes of scratch memory: tensors, then the plan's workspace.
    pub(in crate::cuda) scratch: usize,
    workspace: u64,
}

impl AttentionPlan {
    /// Makes the graph and the plan.
    pub(super) fn new(s: AttentionShape, direction: Direction, target: &Target) -> Result<Self, Refusal> {
        if s.width > MOST_WIDTH || s.seq == 1 {
            return Err(Refusal::new("shape", "heads wider than 128, or sequences of one token"));
        }
        let mut builder = Builder::new(s);
        match direction {
            Direction::Forward => builder.forward(),
            Direction::Backward => builder.backward(),
        }?;
        let Builder { graph, places, scratch, .. } = builder;
        let plan = graph.plan(target)?;
        Ok(Self { places, workspace: scratch, scratch: scratch as usize + plan.workspace, plan })
    }

    /// Enqueues the plan to the handle's stream.
    ///
    /// # Safety
    /// As [`Plan::execute`], with operands that are laid out as the operation says.
    pub(super) unsafe fn execute(
        &self,
        handle: cudnnHandle_t,
        operands: &Operands,
        scratch: u64,
    ) -> Result<(), Refusal> {
        let address = |place: &Place| match place {
            Place::Operand(operand, offset) => operand(operands) + offset,
            Place::Scratch(offset) => scratch + offset,
        };
        let tensors: Vec<(Tensor, u64)> =
            self.places.iter().map(|(tensor, place)| (*tensor, address(place))).collect();
        // SAFETY: the caller's promise; the workspace is behind the tensors in scratch memory.
        unsafe { self.plan.execute(handle, &tensors, scratch + self.workspace) }
    }
}

/// A graph of one shape, as it grows.
struct Builder {
    graph: Graph,
    places: Vec<(Tensor, Place)>,
    scratch: u64,
    batch: i64,
    heads: i64,
    kv_heads: i64,
    seq: i64,
    width: i64,
    /// What scores are multiplied by.
    scale: f32,
}

impl Builder {
    fn new(s: AttentionShape) -> Self {
        let size = |size: usize| size as i64;
        Self {
            graph: Graph::default(),
            places: Vec::new(),
            scratch: 0,
            batch: size(s.batch),
            heads: size(s.heads),
            kv_heads: size(s.kv_heads),
            seq: size(s.seq),
            width: size(s.width),
            scale: s.scale(),
        }
    }

    /// `out = softmax(mask(scale q k^T)) v`; lse is the logarithm of each row's sum of exponentials.
    fn forward(&mut self) -> Result<(), Refusal> {
        let (packed, row) = (|operands: &Operands| operands.qkv, self.row());
        let queries = self.part(packed, 0, self.heads, false)?;
        let keys = self.part(packed, self.heads, self.kv_heads, true)?;
        let values = self.part(packed, self.heads + self.kv_heads, self.kv_heads, false)?;
        let scores = self.products(queries, keys)?;
        let scale = self.graph.scalar(self.scale)?;
        let scores = self.graph.float(Mode::CUDNN_POINTWISE_MUL, &[scores, scale])?;
        let scores = self.masked(scores)?;

        let largest = self.graph.hidden(row)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores, largest)?;
        let below = self.graph.float(Mode::CUDNN_POINTWISE_SUB, &[scores, largest])?;
        let powers = self.graph.float(Mode::CUDNN_POINTWISE_EXP, &[below])?;
        let sums = self.graph.hidden(row)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, powers, sums)?;
        let logarithms = self.graph.float(Mode::CUDNN_POINTWISE_LOG, &[sums])?;
        let lse = self.operand(row, |operands| operands.lse, 0)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_ADD, &[largest, logarithms], lse)?;

        let shares = self.graph.hidden(self.scores().of(BF16))?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_DIV, &[powers, sums], shares)?;
        let out = self.operand(self.rows(), |operands| operands.out, 0)?;
        self.graph.matmul(shares, values, out)
    }

    /// With p the softmax, dp = dout v^T and delta each row's sum of dout out: ds = scale p (dp - delta), dv = p^T dout,
    /// dk = ds^T q, dq = ds k. Blocks of keys add to dq in no fixed order.
    fn backward(&mut self) -> Result<(), Refusal> {
        let (packed, row, rows) = (|operands: &Operands| operands.qkv, self.row(), self.rows());
        let queries = self.part(packed, 0, self.heads, false)?;
        let keys = self.part(packed, self.heads, self.kv_heads, true)?;
        let values = self.part(packed, self.heads + self.kv_heads, self.kv_heads, true)?;
        let out = self.operand(rows, |operands| operands.out, 0)?;
        let dout = self.operand(rows, |operands| operands.dout, 0)?;
        let lse = self.operand(row, |operands| operands.lse, 0)?;
        let (one, scale) = (self.graph.scalar(1.0)?, self.graph.scalar(self.scale)?);

        let terms = self.graph.float(Mode::CUDNN_POINTWISE_MUL, &[dout, out])?;
        let sums = self.graph.hidden(row)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, terms, sums)?;
        let delta = self.scratch(row)?;
        // The pattern has a factor here, for dropout.
        self.graph.pointwise(Mode::CUDNN_POINTWISE_MUL, &[sums, one], delta)?;

        let scores = self.products(queries, keys)?;
        let scores = self.graph.float(Mode::CUDNN_POINTWISE_MUL, &[scores, scale])?;
        let scores = self.graph.float(Mode::CUDNN_POINTWISE_SUB, &[scores, lse])?;
        let scores = self.masked(scores)?;
        let shares = self.graph.float(Mode::CUDNN_POINTWISE_EXP, &[scores])?;
        let across = self.graph.transpose(shares, BF16)?;
        let packed = |operands: &Operands| operands.dqkv;
        let dvalues = self.part(packed, self.heads + self.kv_heads, self.kv_heads, false)?;
        self.summed_over_groups(across, dout, dvalues)?;

        let dshares = self.products(dout, values)?;
        let dscores = self.graph.float(Mode::CUDNN_POINTWISE_SUB, &[dshares, delta])?;
        let dscores = self.graph.float(Mode::CUDNN_POINTWISE_MUL, &[dscores, shares])?;
        let dscores = self.graph.float(Mode::CUDNN_POINTWISE_MUL, &[dscores, scale])?;
        let across = self.graph.transpose(dscores, BF16)?;
        let dkeys = self.part(packed, self.heads, self.kv_heads, false)?;
        self.summed_over_groups(across, queries, dkeys)?;

        // Hidden, and as such in f32 for the pattern, whatever it is in memory.
        let keys = self.graph.transpose(keys, F32)?;
        let sum = self.scratch(Layout::dense(F32, rows.dims))?;
        self.graph.matmul(dscores, keys, sum)?;
        let dqueries = self.part(packed, 0, self.heads, false)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_IDENTITY, &[sum], dqueries)
    }

    /// `a b` for every pair of a query and a key.
    fn products(&mut self, a: Tensor, b: Tensor) -> Result<Tensor, Refusal> {
        let scores = self.graph.hidden(self.scores())?;
        self.graph.matmul(a, b, scores)?;
        Ok(scores)
    }

    /// Minus infinity where the key is after the query.
    fn masked(&mut self, scores: Tensor) -> Result<Tensor, Refusal> {
        let never = self.graph.scalar(f32::NEG_INFINITY)?;
        let (rows, cols) = (self.graph.positions(2, scores)?, self.graph.positions(3, scores)?);
        let seen = self.graph.hidden(self.scores().of(DataType::CUDNN_DATA_BOOLEAN))?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_CMP_GE, &[rows, cols], seen)?;
        self.graph.float(Mode::CUDNN_POINTWISE_BINARY_SELECT, &[scores, never, seen])
    }

    /// `out = a b`, added up over the query heads that share a head of keys.
    fn summed_over_groups(&mut self, a: Tensor, b: Tensor, out: Tensor) -> Result<(), Refusal> {
        if self.heads == self.kv_heads {
            return self.graph.matmul(a, b, out);
        }
        let each = self.graph.hidden(Layout::dense(BF16, self.rows().dims))?;
        self.graph.matmul(a, b, each)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, each, out)
    }

    /// Heads `first..first + heads` of packed rows, with the last two dimensions exchanged if asked for.
    fn part(
        &mut self,
        operand: fn(&Operands) -> u64,
        first: i64,
        heads: i64,
        transposed: bool,
    ) -> Result<Tensor, Refusal> {
        let stride = (self.heads + 2 * self.kv_heads) * self.width;
        let layout = self.strided(heads, stride);
        let offset = (first * self.width).unsigned_abs() * size_of::<half::bf16>() as u64;
        self.operand(if transposed { layout.transposed() } else { layout }, operand, offset)
    }

    fn operand(
        &mut self,
        layout: Layout,
        operand: fn(&Operands) -> u64,
        offset: u64,
    ) -> Result<Tensor, Refusal> {
        let tensor = self.graph.real(layout)?;
        self.places.push((tensor, Place::Operand(operand, offset)));
        Ok(tensor)
    }

    fn scratch(&mut self, layout: Layout) -> Result<Tensor, Refusal> {
        let tensor = self.graph.real(layout)?;
        self.places.push((tensor, Place::Scratch(self.scratch)));
        self.scratch += layout.bytes().next_multiple_of(SCRATCH_ALIGNMENT) as u64;
        Ok(tensor)
    }

    /// Of out and dout.
    fn rows(&self) -> Layout {
        self.strided(self.heads, self.heads * self.width)
    }

    /// Of what each pair of a query and a key has.
    fn scores(&self) -> Layout {
        Layout::dense(F32, [self.batch, self.heads, self.seq, self.seq])
    }

    /// Of what each query has.
    fn row(&self) -> Layout {
        Layout::dense(F32, [self.batch, self.heads, self.seq, 1])
    }

    /// Heads beside each other in rows of `stride` elements, a row for each token.
    fn strided(&self, heads: i64, stride: i64) -> Layout {
        let Self { batch, seq, width, .. } = *self;
        Layout { element: BF16, dims: [batch, heads, seq, width], strides: [seq * stride, width, stride, 1] }
    }
}
