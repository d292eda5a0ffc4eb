//! Attention by cuDNN: the two operation graphs for which the library has fused kernels, and their plans.
//!
//! The operations and their order are those built by NVIDIA's cudnn-frontend
//! (node/scaled_dot_product_flash_attention.h, "composite"): the library matches the pattern, so they cannot be written
//! in another way. Queries, keys and values are strided parts of the packed rows. Keys, and in backward also values,
//! are described as transposed.
//!
//! Backward is not deterministic: blocks of keys add to dq in the order in which they finish. The deterministic form of
//! the pattern writes and reads data for every pair of a query and a key (a workspace of 805 MB for GPT-2 124M at 32
//! sequences), which costs about as much as cuDNN gains. Deterministic runs use this crate's own kernels instead.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnDataType_t as DataType, cudnnHandle_t, cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduce,
};
use cudarc::driver::CudaStream;

use super::AttentionShape;
use crate::cuda::cudnn::graph::{Graph, Layout, Plan, Target, Tensor};
use crate::cuda::cudnn::{Cudnn, CudnnError, sequence_problem};

const BF16: DataType = DataType::CUDNN_DATA_BFLOAT16;
const F32: DataType = DataType::CUDNN_DATA_FLOAT;

/// Maximum head width for which the library has backward kernels on any device (compute capability 9.0); on other
/// devices the plan is refused.
const MAX_WIDTH: usize = 256;

/// Alignment of tensors in scratch memory, in bytes.
const SCRATCH_ALIGNMENT: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// Returns the operation's name in logs and profiles.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::Forward => "attention_fwd",
            Self::Backward => "attention_bwd",
        }
    }
}

/// Addresses of operands, with the layouts of the operation; only backward uses `dout` and `dqkv`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) qkv: u64,
    pub(crate) out: u64,
    pub(crate) lse: u64,
    pub(crate) dout: u64,
    pub(crate) dqkv: u64,
}

/// A plan, or the reason why there is none.
type Planned = Result<Rc<AttentionPlan>, String>;

/// The library on one stream, and the plans built so far.
#[derive(Debug)]
pub(crate) struct CudnnAttention {
    /// Plans or failures. Declared before the handle that they were built for, so that they are dropped first.
    plans: RefCell<HashMap<(AttentionShape, Direction), Planned>>,
    cudnn: Cudnn,
}

/// A prepared [`CudnnAttention`], on its way to the thread that uses it.
#[derive(Debug)]
pub(crate) struct Prepared {
    plans: [((AttentionShape, Direction), Result<AttentionPlan, String>); 2],
    cudnn: Cudnn,
}

impl Prepared {
    /// Opens the library and builds the plans for a shape, with the stream's context current. An error is the reason
    /// why the library cannot be used.
    pub(crate) fn new(stream: &Arc<CudaStream>, s: AttentionShape) -> Result<Self, String> {
        let cudnn = Cudnn::open(stream)?;
        let plans = [Direction::Forward, Direction::Backward];
        let plans = plans.map(|direction| ((s, direction), build(&cudnn, s, direction)));
        Ok(Self { plans, cudnn })
    }
}

impl From<Prepared> for CudnnAttention {
    fn from(Prepared { plans, cudnn }: Prepared) -> Self {
        let plans = plans.into_iter().map(|(key, plan)| (key, plan.map(Rc::new))).collect();
        Self { plans: RefCell::new(plans), cudnn }
    }
}

fn build(cudnn: &Cudnn, s: AttentionShape, direction: Direction) -> Result<AttentionPlan, String> {
    if let Some(problem) = sequence_problem(s.seq) {
        return Err(problem);
    }
    AttentionPlan::new(s, direction, &Target::Handle(cudnn.handle())).map_err(|error| error.to_string())
}

impl CudnnAttention {
    /// Opens the library. An error is the reason why it cannot be used.
    pub(crate) fn open(stream: &Arc<CudaStream>) -> Result<Self, String> {
        Ok(Self { plans: RefCell::default(), cudnn: Cudnn::open(stream)? })
    }

    /// Returns the plan for a shape, or the reason why there is none. The first use builds it, which takes up to
    /// several seconds.
    pub(crate) fn plan(&self, s: AttentionShape, direction: Direction) -> Planned {
        let build = || build(&self.cudnn, s, direction).map(Rc::new);
        self.plans.borrow_mut().entry((s, direction)).or_insert_with(build).clone()
    }

    /// Enqueues a plan.
    ///
    /// # Safety
    /// The plan was built by [`plan`](Self::plan). The operands of its direction are addresses of memory of its shape,
    /// and `scratch` is the address of as many bytes as the plan needs; all of it stays allocated until the stream has
    /// passed this point.
    pub(crate) unsafe fn execute(
        &self,
        plan: &AttentionPlan,
        operands: &Operands,
        scratch: u64,
    ) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { plan.execute(self.cudnn.handle(), operands, scratch) }.map_err(|error| error.to_string())
    }
}

/// Location of a real tensor.
#[derive(Clone, Copy, Debug)]
enum Location {
    /// A byte offset from the start of an operand.
    Operand(fn(&Operands) -> u64, u64),
    /// A byte offset from the start of the scratch memory.
    Scratch(u64),
}

/// One direction of attention in one shape.
#[derive(Debug)]
pub(crate) struct AttentionPlan {
    plan: Plan,
    locations: Vec<(Tensor, Location)>,
    /// Scratch memory in bytes: tensors, then the plan's workspace.
    pub(crate) scratch: usize,
    workspace: u64,
}

impl AttentionPlan {
    /// Builds the graph and the plan.
    pub(crate) fn new(s: AttentionShape, direction: Direction, target: &Target) -> Result<Self, CudnnError> {
        if s.width > MAX_WIDTH || s.seq == 1 {
            return Err(CudnnError::new("shape", "heads are wider than 256, or sequences have one token"));
        }
        let mut builder = Builder::new(s);
        match direction {
            Direction::Forward => builder.forward(),
            Direction::Backward => builder.backward(),
        }?;
        let Builder { graph, locations, scratch, .. } = builder;
        let plan = graph.plan(target)?;
        Ok(Self { locations, workspace: scratch, scratch: scratch as usize + plan.workspace, plan })
    }

    /// Enqueues the plan to the handle's stream.
    ///
    /// # Safety
    /// The same as for [`Plan::execute`]; the operands have the layouts of the operation.
    pub(crate) unsafe fn execute(
        &self,
        handle: cudnnHandle_t,
        operands: &Operands,
        scratch: u64,
    ) -> Result<(), CudnnError> {
        let address = |location: &Location| match location {
            Location::Operand(operand, offset) => operand(operands) + offset,
            Location::Scratch(offset) => scratch + offset,
        };
        let tensors: Vec<(Tensor, u64)> =
            self.locations.iter().map(|(tensor, location)| (*tensor, address(location))).collect();
        // SAFETY: the caller's promise; the workspace follows the tensors in scratch memory.
        unsafe { self.plan.execute(handle, &tensors, scratch + self.workspace) }
    }
}

/// A graph under construction.
struct Builder {
    graph: Graph,
    locations: Vec<(Tensor, Location)>,
    scratch: u64,
    batch: i64,
    heads: i64,
    kv_heads: i64,
    seq: i64,
    width: i64,
    scale: f32,
    window: Option<i32>,
}

impl Builder {
    fn new(s: AttentionShape) -> Self {
        let size = |size: usize| size as i64;
        Self {
            graph: Graph::default(),
            locations: Vec::new(),
            scratch: 0,
            batch: size(s.batch),
            heads: size(s.heads),
            kv_heads: size(s.kv_heads),
            seq: size(s.seq),
            width: size(s.width),
            scale: s.scale(),
            window: s.options.window.map(|window| i32::try_from(window).unwrap_or(i32::MAX)),
        }
    }

    /// `out = softmax(mask(scale q k^T)) v`; lse = max + log(sum(exp(s - max))) per row.
    fn forward(&mut self) -> Result<(), CudnnError> {
        let (packed, row) = (|operands: &Operands| operands.qkv, self.row());
        let queries = self.heads_in(packed, 0, self.heads, false)?;
        let keys = self.heads_in(packed, self.heads, self.kv_heads, true)?;
        let values = self.heads_in(packed, self.heads + self.kv_heads, self.kv_heads, false)?;
        let scores = self.scores_of(queries, keys)?;
        let scale = self.graph.scalar(self.scale)?;
        let scores = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_MUL, &[scores, scale])?;
        let scores = self.masks(scores)?;

        let largest = self.graph.virtual_tensor(row)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores, largest)?;
        let shifted = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_SUB, &[scores, largest])?;
        let exponentials = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_EXP, &[shifted])?;
        let sums = self.graph.virtual_tensor(row)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, exponentials, sums)?;
        let logarithms = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_LOG, &[sums])?;
        let lse = self.operand(row, |operands| operands.lse, 0)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_ADD, &[largest, logarithms], lse)?;

        let probabilities = self.graph.virtual_tensor(self.scores().of(BF16))?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_DIV, &[exponentials, sums], probabilities)?;
        let out = self.operand(self.rows(), |operands| operands.out, 0)?;
        self.graph.matmul(probabilities, values, out)
    }

    /// Computes ds = scale p (dp - delta), dv = p^T dout, dk = ds^T q and dq = ds k, with p = exp(s - lse), dp = dout
    /// v^T and delta = rowsum(dout out).
    fn backward(&mut self) -> Result<(), CudnnError> {
        let (packed, row, rows) = (|operands: &Operands| operands.qkv, self.row(), self.rows());
        let queries = self.heads_in(packed, 0, self.heads, false)?;
        let keys = self.heads_in(packed, self.heads, self.kv_heads, true)?;
        let values = self.heads_in(packed, self.heads + self.kv_heads, self.kv_heads, true)?;
        let out = self.operand(rows, |operands| operands.out, 0)?;
        let dout = self.operand(rows, |operands| operands.dout, 0)?;
        let lse = self.operand(row, |operands| operands.lse, 0)?;
        let (one, scale) = (self.graph.scalar(1.0)?, self.graph.scalar(self.scale)?);

        let terms = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_MUL, &[dout, out])?;
        let sums = self.graph.virtual_tensor(row)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, terms, sums)?;
        let delta = self.scratch(row)?;
        // The pattern requires a factor here, which is meant for dropout.
        self.graph.pointwise(Mode::CUDNN_POINTWISE_MUL, &[sums, one], delta)?;

        let scores = self.scores_of(queries, keys)?;
        let scores = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_MUL, &[scores, scale])?;
        let scores = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_SUB, &[scores, lse])?;
        let scores = self.masks(scores)?;
        let probabilities = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_EXP, &[scores])?;
        let transposed = self.graph.transpose(probabilities, BF16)?;
        let packed = |operands: &Operands| operands.dqkv;
        let dvalues = self.heads_in(packed, self.heads + self.kv_heads, self.kv_heads, false)?;
        self.gemm_over_groups(transposed, dout, dvalues)?;

        let dprobabilities = self.scores_of(dout, values)?;
        let dscores = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_SUB, &[dprobabilities, delta])?;
        let dscores = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_MUL, &[dscores, probabilities])?;
        let dscores = self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_MUL, &[dscores, scale])?;
        let transposed = self.graph.transpose(dscores, BF16)?;
        let dkeys = self.heads_in(packed, self.heads, self.kv_heads, false)?;
        self.gemm_over_groups(transposed, queries, dkeys)?;

        // The pattern requires virtual tensors in f32, regardless of the element type of the real one.
        let keys = self.graph.transpose(keys, F32)?;
        let sum = self.scratch(Layout::dense(F32, rows.dims))?;
        self.graph.matmul(dscores, keys, sum)?;
        let dqueries = self.heads_in(packed, 0, self.heads, false)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_IDENTITY, &[sum], dqueries)
    }

    /// Adds a virtual tensor `a b` with a value for every pair of a query and a key.
    fn scores_of(&mut self, a: Tensor, b: Tensor) -> Result<Tensor, CudnnError> {
        let scores = self.graph.virtual_tensor(self.scores())?;
        self.graph.matmul(a, b, scores)?;
        Ok(scores)
    }

    /// Masks scores with -inf where the key is after the query, and then where it is before the query's window.
    fn masks(&mut self, scores: Tensor) -> Result<Tensor, CudnnError> {
        let (rows, cols) = (self.graph.indices(2, scores)?, self.graph.indices(3, scores)?);
        let scores = self.mask(scores, Mode::CUDNN_POINTWISE_CMP_GE, rows, cols)?;
        let Some(window) = self.window else { return Ok(scores) };
        let (rows, cols) = (self.graph.indices(2, scores)?, self.graph.indices(3, scores)?);
        let window = self.graph.integer(window)?;
        let ends = self.graph.virtual_tensor(cols.layout)?;
        self.graph.pointwise(Mode::CUDNN_POINTWISE_ADD, &[cols, window], ends)?;
        self.mask(scores, Mode::CUDNN_POINTWISE_CMP_GT, ends, rows)
    }

    /// Masks scores with -inf where this comparison of `a` and `b` is false.
    fn mask(&mut self, scores: Tensor, mode: Mode, a: Tensor, b: Tensor) -> Result<Tensor, CudnnError> {
        let minus_infinity = self.graph.scalar(f32::NEG_INFINITY)?;
        let visible = self.graph.virtual_tensor(self.scores().of(DataType::CUDNN_DATA_BOOLEAN))?;
        self.graph.pointwise(mode, &[a, b], visible)?;
        self.graph.pointwise_f32(Mode::CUDNN_POINTWISE_BINARY_SELECT, &[scores, minus_infinity, visible])
    }

    /// Adds `out = a b`, summed over the query heads that share a key head.
    fn gemm_over_groups(&mut self, a: Tensor, b: Tensor, out: Tensor) -> Result<(), CudnnError> {
        if self.heads == self.kv_heads {
            return self.graph.matmul(a, b, out);
        }
        let each = self.graph.virtual_tensor(Layout::dense(BF16, self.rows().dims))?;
        self.graph.matmul(a, b, each)?;
        self.graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, each, out)
    }

    /// Adds heads `first..first + heads` of packed rows, with the last two dimensions transposed if requested.
    fn heads_in(
        &mut self,
        operand: fn(&Operands) -> u64,
        first: i64,
        heads: i64,
        transposed: bool,
    ) -> Result<Tensor, CudnnError> {
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
    ) -> Result<Tensor, CudnnError> {
        let tensor = self.graph.real(layout)?;
        self.locations.push((tensor, Location::Operand(operand, offset)));
        Ok(tensor)
    }

    fn scratch(&mut self, layout: Layout) -> Result<Tensor, CudnnError> {
        let tensor = self.graph.real(layout)?;
        self.locations.push((tensor, Location::Scratch(self.scratch)));
        self.scratch += layout.bytes().next_multiple_of(SCRATCH_ALIGNMENT) as u64;
        Ok(tensor)
    }

    /// Layout of out and dout.
    fn rows(&self) -> Layout {
        self.strided(self.heads, self.heads * self.width)
    }

    /// Layout of one number per pair of a query and a key.
    fn scores(&self) -> Layout {
        Layout::dense(F32, [self.batch, self.heads, self.seq, self.seq])
    }

    /// Layout of one number per query.
    fn row(&self) -> Layout {
        Layout::dense(F32, [self.batch, self.heads, self.seq, 1])
    }

    /// Layout of adjacent heads in rows of `stride` elements, one row per token.
    fn strided(&self, heads: i64, stride: i64) -> Layout {
        let Self { batch, seq, width, .. } = *self;
        Layout { element: BF16, dims: [batch, heads, seq, width], strides: [seq * stride, width, stride, 1] }
    }
}
