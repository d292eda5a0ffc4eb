//! The operations of a GPT trainer behind one trait, and its two implementations.

mod cpu;
mod cuda;

use xlaunch_pool::{DType, Pool};

pub use cpu::CpuBackend;
pub use cuda::CudaBackend;

use crate::error::{EngineError, Result};
use crate::handles::{Capture, PendingRead};
use crate::host_buffer::HostAllocator;
use crate::ops::{
    AdamWStep, AttentionBackward, AttentionForward, AttentionShape, CachedAttention, Checksum, ColumnSum,
    EmbedBackward, EmbedForward, FusedClassifier, GeluBackward, GeluForward, GeluLinearBackward, GemmFp8,
    Gemv, Greedy, LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearGeluForward,
    LinearSwigluForward, Mark, Marks, NormBackward, NormForward, QuantizeFp8, SquaredNorm, Sum,
    SwigluBackward, SwigluForward, SwigluLinearBackward,
};
use crate::options::DeviceInfo;
use crate::profile::KernelSpan;
use crate::tensor::{Slice, Tensor};

/// Implementation of the operations on one device. The modules of the argument structs have the formulas.
///
/// Contract of all operations:
///
/// - they run in order, on one stream; on a GPU they only enqueue work, and only [`read_f32`](Self::read_f32) and
///   [`PendingRead::wait`] wait;
/// - activations have the type [`activation_dtype`](Self::activation_dtype), as do the parameters that forward and
///   backward read; statistics, losses, master weights and optimizer state are F32; token ids are I32;
/// - gradients of parameters are F32 or Bf16, independently of the activations; sums are formed in F32;
/// - outputs are written completely, inputs are not changed, and an output overlaps no other operand unless the
///   operation works in place;
/// - the result is the same in every run, except for variants that
///   [`CudaOptions::deterministic`](crate::CudaOptions::deterministic) rules out;
/// - a slice of the wrong length or element type is a programming error and panics before any memory is touched.
pub trait Backend {
    /// Returns the device.
    fn device(&self) -> &DeviceInfo;

    /// Returns the element type of activations and of the parameters that forward and backward read.
    fn activation_dtype(&self) -> DType;

    /// Returns the pool that tensors are allocated from.
    fn pool(&self) -> &Pool;

    /// Returns whether operations only enqueue work, so that the host may run ahead of the device.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Starts to time every kernel. Does nothing on the CPU.
    fn begin_profile(&self) {}

    /// Ends the timing. Returns all launches in order.
    fn end_profile(&self) -> Result<Vec<KernelSpan>> {
        Ok(Vec::new())
    }

    /// Starts to capture: work enqueued to the compute stream, and to streams that are ordered after it by events, is
    /// recorded instead of run. On the CPU, where work runs at once, returns false and does nothing.
    fn begin_capture(&self) -> Result<bool> {
        Ok(false)
    }

    /// Ends the capture. Call it even after a failure: the stream would otherwise keep recording.
    fn end_capture(&self) -> Result<Capture> {
        Err(EngineError::Cuda { what: "failed to end a capture".into(), reason: "none was started".into() })
    }

    /// Starts preparations that the first step would otherwise wait for, and returns at once. `attention` is the shape
    /// of the model's attention.
    fn prepare(&self, _attention: AttentionShape) {}

    /// Allocates a tensor with unspecified contents.
    #[track_caller]
    fn alloc(&self, dtype: DType, len: usize) -> Result<Tensor> {
        Tensor::new(self.pool(), dtype, len)
    }

    /// Returns an allocator of host memory for large [`read_f32`](Self::read_f32)s.
    fn host_allocator(&self) -> HostAllocator {
        HostAllocator::default()
    }

    /// Starts to count marks. Returns `None` on devices without marks, which ignore them.
    fn open_marks(&self) -> Result<Option<Marks>> {
        Ok(None)
    }

    /// Enqueues a mark.
    fn mark(&self, _mark: Mark<'_>) -> Result<()> {
        Ok(())
    }

    /// Sets every element to zero.
    fn zero(&self, x: Slice<'_>) -> Result<()>;

    /// Copies host values into F32 memory. `values` may change as soon as this returns.
    fn write_f32(&self, x: Slice<'_>, values: &[f32]) -> Result<()>;

    /// Copies host values into I32 memory. `values` may change as soon as this returns.
    fn write_i32(&self, x: Slice<'_>, values: &[i32]) -> Result<()>;

    /// Copies host bytes into U8 memory. `values` may change as soon as this returns.
    fn write_u8(&self, x: Slice<'_>, values: &[u8]) -> Result<()>;

    /// Waits for all work enqueued so far, then copies F32 or Bf16 memory to the host as f32.
    fn read_f32(&self, x: Slice<'_>, values: &mut [f32]) -> Result<()>;

    /// Starts to copy F32 memory to the host, after all work enqueued so far, without waiting.
    fn begin_read(&self, x: Slice<'_>) -> Result<PendingRead> {
        let mut read = vec![0.0; x.len()];
        self.read_f32(x, &mut read)?;
        Ok(PendingRead::new(move |values| {
            values.copy_from_slice(&read);
            Ok(())
        }))
    }

    /// Computes `y = x`, converting between F32 and Bf16 (round to nearest even) as the element types require.
    fn cast(&self, x: Slice<'_>, y: Slice<'_>) -> Result<()>;

    /// Token and position embedding.
    fn embed_forward(&self, args: EmbedForward<'_>) -> Result<()>;

    /// Gradients of the embedding tables.
    fn embed_backward(&self, args: EmbedBackward<'_>) -> Result<()>;

    /// LayerNorm or RMSNorm, fused with the residual addition before it.
    fn norm_forward(&self, args: NormForward<'_>) -> Result<()>;

    /// Gradients of the norm's input and parameters.
    fn norm_backward(&self, args: NormBackward<'_>) -> Result<()>;

    /// A linear layer.
    fn linear_forward(&self, args: LinearForward<'_>) -> Result<()>;

    /// The gradient of a linear layer's input.
    fn linear_backward_input(&self, args: LinearBackwardInput<'_>) -> Result<()>;

    /// The gradient of a linear layer's weights.
    fn linear_backward_weight(&self, args: LinearBackwardWeight<'_>) -> Result<()>;

    /// Gradients of the weights of two linear layers.
    fn linear_backward_weights(&self, layers: [LinearBackwardWeight<'_>; 2]) -> Result<()> {
        layers.into_iter().try_for_each(|layer| self.linear_backward_weight(layer))
    }

    /// Causal attention, fused with the rotary embedding.
    fn attention_forward(&self, args: AttentionForward<'_>) -> Result<()>;

    /// The gradient of attention's input.
    fn attention_backward(&self, args: AttentionBackward<'_>) -> Result<()>;

    /// A linear layer fused with the GELU after it.
    fn linear_gelu_forward(&self, args: LinearGeluForward<'_>) -> Result<()>;

    /// GELU without the linear layer before it.
    fn gelu_forward(&self, args: GeluForward<'_>) -> Result<()>;

    /// The gradient of GELU's input from that of the output of the linear layer after it, fused with the gradient of
    /// the bias before it.
    fn gelu_linear_backward(&self, args: GeluLinearBackward<'_>) -> Result<()>;

    /// The gradient of GELU's input from that of its output.
    fn gelu_backward(&self, args: GeluBackward<'_>) -> Result<()>;

    /// SwiGLU.
    fn swiglu_forward(&self, args: SwigluForward<'_>) -> Result<()>;

    /// The gradient of SwiGLU's input.
    fn swiglu_backward(&self, args: SwigluBackward<'_>) -> Result<()>;

    /// A linear layer and the SwiGLU after it.
    fn linear_swiglu_forward(&self, args: LinearSwigluForward<'_>) -> Result<()> {
        let LinearSwigluForward { shape, x, w, h, a } = args;
        self.linear_forward(LinearForward { shape, x, w, bias: None, y: h })?;
        self.swiglu_forward(SwigluForward { rows: shape.rows, ffn: shape.outputs / 2, h, a })
    }

    /// The gradient of SwiGLU's input from that of the output of the linear layer after it.
    fn swiglu_linear_backward(&self, args: SwigluLinearBackward<'_>) -> Result<()> {
        let SwigluLinearBackward { shape, dy, w, h, da, dh } = args;
        self.linear_backward_input(LinearBackwardInput { shape, dy, w, dx: da })?;
        self.swiglu_backward(SwigluBackward { rows: shape.rows, ffn: shape.inputs, h, da, dh })
    }

    /// Returns whether the device multiplies FP8 operands.
    fn supports_fp8(&self) -> bool {
        true
    }

    /// Rounds a tensor to FP8.
    fn quantize_fp8(&self, args: QuantizeFp8<'_>) -> Result<()>;

    /// A matrix multiplication of FP8 operands.
    fn gemm_fp8(&self, args: GemmFp8<'_>) -> Result<()>;

    /// Softmax cross entropy, fused with its gradient.
    fn classifier(&self, args: FusedClassifier<'_>) -> Result<()>;

    /// A scaled sum.
    fn sum(&self, args: Sum<'_>) -> Result<()>;

    /// Sums of columns.
    fn column_sum(&self, args: ColumnSum<'_>) -> Result<()>;

    /// A squared norm.
    fn squared_norm(&self, args: SquaredNorm<'_>) -> Result<()>;

    /// One AdamW step over a flat arena.
    fn adamw(&self, args: AdamWStep<'_>) -> Result<()>;

    /// A linear layer with a few rows.
    fn gemv(&self, args: Gemv<'_>) -> Result<()>;

    /// Attention of new tokens over the cached keys and values of their sequences.
    fn cached_attention(&self, args: CachedAttention<'_>) -> Result<()>;

    /// The most likely tokens, as inputs of the next step.
    fn greedy(&self, args: Greedy<'_>) -> Result<()>;

    /// A checksum of the bits of a tensor.
    fn checksum(&self, args: Checksum<'_>) -> Result<()>;
}
