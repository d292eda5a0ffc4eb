//! A device without memory: operations do nothing, and a pool hands out addresses with no memory behind them. A job
//! allocates the same buffers on it as on the real device.

use xlaunch_engine::{
    AdamWStep, AttentionBackward, AttentionForward, Backend, CachedAttention, Checksum, ColumnSum, DType,
    DeviceInfo, EmbedBackward, EmbedForward, FusedClassifier, GeluBackward, GeluForward, GeluLinearBackward,
    GemmFp8, Gemv, Greedy, LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearGeluForward,
    NormBackward, NormForward, PoolOptions, QuantizeFp8, Result, Slice, SquaredNorm, Sum, SwigluBackward,
    SwigluForward, Tensor,
};
use xlaunch_pool::backing::{Backing, Purpose, Result as MapResult};
use xlaunch_pool::{Pool, Space, StreamId};

/// Workspace of cuBLASLt, which lives as long as the device.
const GEMM_WORKSPACE: usize = 32 << 20;
/// Maximum number of blocks of a kernel in which each block writes one row of partial sums; two per multiprocessor of
/// an H200.
const SUM_ROWS: usize = 264;
/// Rows of the embedding's gradient that one thread block adds up.
const EMBED_PART: usize = 64;

#[derive(Debug)]
pub(super) struct DryDevice {
    pool: Pool,
    info: DeviceInfo,
    activations: DType,
    cuda: bool,
    /// Held only to occupy its size in the pool.
    _workspace: Option<Tensor>,
}

impl DryDevice {
    pub(super) fn new(cuda: bool, activations: DType, options: PoolOptions) -> Result<Self> {
        let space = if cuda { Space::Cuda } else { Space::Host };
        let pool = Pool::with_backing(space, Box::new(Nowhere), options);
        let workspace = cuda.then(|| Tensor::new(&pool.persistent(), DType::U8, GEMM_WORKSPACE));
        let info = DeviceInfo { name: "dry run".into(), uuid: String::new() };
        Ok(Self { _workspace: workspace.transpose()?, pool, info, activations, cuda })
    }

    /// Allocates the memory that a GPU's kernels need during one operation.
    fn scratch(&self, dtype: DType, len: usize) -> Result<()> {
        if self.cuda { self.alloc(dtype, len).map(drop) } else { Ok(()) }
    }
}

impl Backend for DryDevice {
    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn activation_dtype(&self) -> DType {
        self.activations
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn zero(&self, _: Slice<'_>) -> Result<()> {
        Ok(())
    }

    fn write_f32(&self, _: Slice<'_>, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn write_i32(&self, _: Slice<'_>, _: &[i32]) -> Result<()> {
        Ok(())
    }

    fn write_u8(&self, _: Slice<'_>, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read_f32(&self, _: Slice<'_>, values: &mut [f32]) -> Result<()> {
        values.fill(0.0);
        Ok(())
    }

    fn cast(&self, _: Slice<'_>, _: Slice<'_>) -> Result<()> {
        Ok(())
    }

    fn embed_forward(&self, _: EmbedForward<'_>) -> Result<()> {
        Ok(())
    }

    fn embed_backward(&self, args: EmbedBackward<'_>) -> Result<()> {
        let (s, rows) = (args.shape, args.shape.batch * args.shape.seq);
        self.scratch(DType::I32, 3 * s.vocab + 2 * rows + 2 * rows.div_ceil(EMBED_PART) * s.cols)
    }

    fn norm_forward(&self, _: NormForward<'_>) -> Result<()> {
        Ok(())
    }

    fn norm_backward(&self, args: NormBackward<'_>) -> Result<()> {
        let outputs = 1 + usize::from(args.dbeta.is_some()) + usize::from(args.dsum.is_some());
        self.scratch(DType::F32, outputs * SUM_ROWS.min(args.shape.rows) * args.shape.cols)
    }

    fn linear_forward(&self, _: LinearForward<'_>) -> Result<()> {
        Ok(())
    }

    fn linear_backward_input(&self, _: LinearBackwardInput<'_>) -> Result<()> {
        Ok(())
    }

    fn linear_backward_weight(&self, _: LinearBackwardWeight<'_>) -> Result<()> {
        Ok(())
    }

    fn attention_forward(&self, _: AttentionForward<'_>) -> Result<()> {
        Ok(())
    }

    /// The gradient of the queries is summed in F32, plus one sum per row. cuDNN and our own kernels need about this
    /// much.
    fn attention_backward(&self, args: AttentionBackward<'_>) -> Result<()> {
        let s = args.shape;
        self.scratch(DType::F32, s.batch * s.seq * s.heads * (s.width + 2))
    }

    fn linear_gelu_forward(&self, _: LinearGeluForward<'_>) -> Result<()> {
        Ok(())
    }

    fn gelu_forward(&self, _: GeluForward<'_>) -> Result<()> {
        Ok(())
    }

    fn gelu_linear_backward(&self, args: GeluLinearBackward<'_>) -> Result<()> {
        self.scratch(DType::F32, SUM_ROWS * args.shape.inputs)
    }

    fn gelu_backward(&self, args: GeluBackward<'_>) -> Result<()> {
        self.scratch(DType::F32, SUM_ROWS * args.cols)
    }

    fn swiglu_forward(&self, _: SwigluForward<'_>) -> Result<()> {
        Ok(())
    }

    fn swiglu_backward(&self, _: SwigluBackward<'_>) -> Result<()> {
        Ok(())
    }

    fn quantize_fp8(&self, _: QuantizeFp8<'_>) -> Result<()> {
        self.scratch(DType::I32, 1)
    }

    fn gemm_fp8(&self, _: GemmFp8<'_>) -> Result<()> {
        Ok(())
    }

    fn classifier(&self, _: FusedClassifier<'_>) -> Result<()> {
        Ok(())
    }

    fn sum(&self, _: Sum<'_>) -> Result<()> {
        Ok(())
    }

    fn column_sum(&self, args: ColumnSum<'_>) -> Result<()> {
        self.scratch(DType::F32, SUM_ROWS * args.cols)
    }

    fn squared_norm(&self, _: SquaredNorm<'_>) -> Result<()> {
        Ok(())
    }

    fn adamw(&self, _: AdamWStep<'_>) -> Result<()> {
        Ok(())
    }

    fn gemv(&self, _: Gemv<'_>) -> Result<()> {
        Ok(())
    }

    fn cached_attention(&self, _: CachedAttention<'_>) -> Result<()> {
        Ok(())
    }

    fn greedy(&self, _: Greedy<'_>) -> Result<()> {
        Ok(())
    }

    fn checksum(&self, _: Checksum<'_>) -> Result<()> {
        Ok(())
    }
}

/// Backing that maps nothing. Sizes are in the units of the CUDA and host pools.
#[derive(Debug)]
struct Nowhere;

impl Backing for Nowhere {
    fn capacity(&self) -> u64 {
        1 << 46
    }

    fn granularity(&self) -> u64 {
        2 << 20
    }

    fn is_contiguous(&self) -> bool {
        true
    }

    fn address(&self, offset: u64) -> u64 {
        (1 << 46) + offset
    }

    fn map(&mut self, _: u64, _: &[u64], _: Purpose) -> MapResult<()> {
        Ok(())
    }

    fn unmap(&mut self, _: u64, _: u64) -> MapResult<()> {
        Ok(())
    }

    fn stranded(&self) -> u64 {
        0
    }

    fn reclaim(&mut self) -> MapResult<()> {
        Ok(())
    }

    fn synchronize(&mut self) -> MapResult<()> {
        Ok(())
    }

    fn insert_wait(&mut self, _: StreamId, _: StreamId) -> MapResult<()> {
        Ok(())
    }

    fn memory_info(&self) -> Option<(u64, u64)> {
        None
    }
}
