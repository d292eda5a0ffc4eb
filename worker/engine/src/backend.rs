//! The operations a GPT trainer is made of, each with its hand-written backward.
//!
//! Contract of all operations:
//!
//! - they run in order, on one stream; on a GPU they only enqueue: [`Backend::read_f32`] and [`Reading::wait`] are what waits;
//! - activations have [`Backend::activation_dtype`]; parameters handed to forward and backward have it too; statistics,
//!   losses, master weights and optimizer state are F32; token ids are I32;
//! - gradients of parameters are F32 or Bf16, whatever the slice says; sums are formed in F32;
//! - outputs are written completely, inputs are not changed, and an output overlaps no other argument unless the
//!   operation says "in place";
//! - a slice of the wrong length or element type is a programming error and panics, before any memory is touched.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use xlaunch_pool::{DType, Pool, PoolError};

use crate::cuda::Graph;
use crate::shapes::{
    Accumulate, AdamWShape, AttentionShape, ClassifierShape, EmbedShape, LinearShape, NormShape,
};
use crate::tensor::{Slice, Tensor};

/// Result of an engine call.
pub type Result<T> = std::result::Result<T, EngineError>;

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A shared library is missing.
    #[error("failed to load {library}: looked for {looked_for}")]
    Library {
        /// Which one, such as "the CUDA driver".
        library: &'static str,
        /// Names and places tried.
        looked_for: String,
    },
    /// No such device.
    #[error("failed to open GPU {ordinal}: {reason}")]
    Device {
        /// Number of the device within this process.
        ordinal: usize,
        /// In the driver's words.
        reason: String,
    },
    /// A kernel did not compile.
    #[error("failed to compile {file} for {arch}: {log}")]
    Compile {
        /// Source file.
        file: &'static str,
        /// Architecture, such as sm_90.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// The device or one of its libraries reported an error. The context may be unusable.
    #[error("{what}: {reason}")]
    Cuda {
        /// What was tried, such as "failed to launch norm_fwd".
        what: String,
        /// In the library's words.
        reason: String,
    },
    /// No memory.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Arithmetic of matrix products and element type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// F32 storage, no tf32 anywhere.
    Fp32,
    /// F32 storage, tf32 matrix units.
    Tf32,
    /// Bf16 storage, F32 sums.
    Bf16,
}

impl Precision {
    /// Element type of activations.
    pub(crate) fn activations(self) -> DType {
        match self {
            Self::Fp32 | Self::Tf32 => DType::F32,
            Self::Bf16 => DType::Bf16,
        }
    }
}

/// What a back end computes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Such as "NVIDIA H200" or "CPU (2 threads)".
    pub name: String,
    /// "GPU-..." or "cpu".
    pub uuid: String,
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpan {
    /// The kernel's name, or the sizes of a matrix product.
    pub name: String,
    /// Seconds since [`Backend::begin_profile`].
    pub start: f64,
    /// Seconds of the device.
    pub seconds: f64,
}

/// What one kernel took, over all its launches.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// As in [`KernelSpan`].
    pub name: String,
    /// How often it was launched.
    pub launches: u64,
    /// Seconds of the device, in all.
    pub seconds: f64,
}

impl KernelTime {
    /// By kernel, the longest first.
    pub fn by_name(spans: &[KernelSpan]) -> Vec<Self> {
        let mut times: HashMap<&str, (u64, f64)> = HashMap::new();
        for span in spans {
            let (launches, seconds) = times.entry(&span.name).or_default();
            *launches += 1;
            *seconds += span.seconds;
        }
        let time = |(name, (launches, seconds)): (&str, _)| Self { name: name.into(), launches, seconds };
        let mut times: Vec<Self> = times.into_iter().map(time).collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        times
    }
}

/// Values on their way to the host.
pub struct Reading(ReadingEnd);

type ReadingEnd = Box<dyn FnOnce(&mut [f32]) -> Result<()>>;

impl std::fmt::Debug for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reading")
    }
}

impl Reading {
    pub(crate) fn new(end: impl FnOnce(&mut [f32]) -> Result<()> + 'static) -> Self {
        Self(Box::new(end))
    }

    /// Waits for the values. Later work may still run.
    ///
    /// # Errors
    /// The device's, if work before the read has failed.
    pub fn wait(self, values: &mut [f32]) -> Result<()> {
        self.0(values)
    }
}

/// One device's implementation of the operations.
pub trait Backend {
    /// Begins to take the time of every kernel; nothing on the CPU.
    fn begin_profile(&self) {}

    /// Ends it; every launch, in order.
    fn end_profile(&self) -> Result<Vec<KernelSpan>> {
        Ok(Vec::new())
    }

    /// From now on, records what is enqueued to the compute stream, and to streams that are ordered behind it, instead of
    /// running it. False, and nothing begun, where work runs as it is given: on the CPU.
    fn begin_capture(&self) -> Result<bool> {
        Ok(false)
    }

    /// What was recorded. It may be launched as long as the memory that it works on is left to it: see [`Graph`].
    fn end_capture(&self) -> Result<Graph> {
        Err(EngineError::Cuda { what: "failed to end a capture".into(), reason: "none was begun".into() })
    }

    /// What this computes on.
    fn device(&self) -> &DeviceInfo;

    /// Element type of activations and of the parameters that forward and backward read.
    fn activation_dtype(&self) -> DType;

    /// Where tensors come from.
    fn pool(&self) -> &Pool;

    /// The compute stream, for collectives to order themselves by; `None` on the CPU.
    fn cuda_stream(&self) -> Option<Arc<CudaStream>> {
        None
    }

    /// A tensor with unspecified contents.
    #[track_caller]
    fn alloc(&self, dtype: DType, len: usize) -> Result<Tensor> {
        Tensor::new(self.pool(), dtype, len)
    }

    /// Sets every element to zero.
    fn zero(&self, x: Slice<'_>) -> Result<()>;

    /// Copies host values into F32 memory. `values` may change as soon as this returns.
    fn write_f32(&self, x: Slice<'_>, values: &[f32]) -> Result<()>;

    /// Copies host values into I32 memory. `values` may change as soon as this returns.
    fn write_i32(&self, x: Slice<'_>, values: &[i32]) -> Result<()>;

    /// Copies host bytes into U8 memory. `values` may change as soon as this returns.
    fn write_u8(&self, x: Slice<'_>, values: &[u8]) -> Result<()>;

    /// Copies F32 or Bf16 memory to the host, as f32, when all work given so far is done.
    fn read_f32(&self, x: Slice<'_>, values: &mut [f32]) -> Result<()>;

    /// Begins to copy F32 memory to the host, after all work given so far, and does not wait.
    fn begin_read(&self, x: Slice<'_>) -> Result<Reading> {
        let mut read = vec![0.0; x.len()];
        self.read_f32(x, &mut read)?;
        Ok(Reading::new(move |values| {
            values.copy_from_slice(&read);
            Ok(())
        }))
    }

    /// `y = x`, converting between F32 and Bf16 (round to nearest even) as their element types say.
    fn cast(&self, x: Slice<'_>, y: Slice<'_>) -> Result<()>;

    /// `out[b,t,:] = wte[tokens[b,t],:] (+ wpe[t,:])`. tokens I32 `[B,T]`, wte `[>=V,C]`, wpe `[>=T,C]`, out `[B,T,C]`.
    /// Token ids were checked by whoever read them.
    fn embed_fwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        wte: Slice<'_>,
        wpe: Option<Slice<'_>>,
        out: Slice<'_>,
    ) -> Result<()>;

    /// Adds to `dwte[tokens[b,t],:]` and to `dwpe[t,:]` the rows of `dout` `[B,T,C]`. Same result every run.
    fn embed_bwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
        dwpe: Option<Slice<'_>>,
    ) -> Result<()>;

    /// `y = norm(x)` with x, y `[N,C]`, gamma, beta `[C]` (beta for [`NormKind::Layer`](crate::NormKind::Layer) alone),
    /// stats F32 [[`NormShape::stats`]].
    fn norm_fwd(
        &self,
        s: NormShape,
        x: Slice<'_>,
        gamma: Slice<'_>,
        beta: Option<Slice<'_>>,
        y: Slice<'_>,
        stats: Slice<'_>,
    ) -> Result<()>;

    /// `sum = x + branch`, `y = norm(sum)`: the residual addition fused with the norm that follows it.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    fn add_norm_fwd(
        &self,
        s: NormShape,
        x: Slice<'_>,
        branch: Slice<'_>,
        sum: Slice<'_>,
        gamma: Slice<'_>,
        beta: Option<Slice<'_>>,
        y: Slice<'_>,
        stats: Slice<'_>,
    ) -> Result<()>;

    /// Backward of both: x is what was normalised. `dx = d norm/dx (dy)`, added to dx's contents if `add` (the residual
    /// path), replacing them otherwise; dgamma, dbeta `[C]`. `dsum` `[C]` is the sum of the rows of the new dx: the
    /// gradient of a bias that was added where dx is the gradient. dgamma, dbeta and dsum have one element type.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    fn norm_bwd(
        &self,
        s: NormShape,
        x: Slice<'_>,
        gamma: Slice<'_>,
        stats: Slice<'_>,
        dy: Slice<'_>,
        dx: Slice<'_>,
        add: bool,
        dgamma: Slice<'_>,
        dbeta: Option<Slice<'_>>,
        dsum: Option<Slice<'_>>,
        acc: Accumulate,
    ) -> Result<()>;

    /// `y = x w^T (+ bias)` with x `[N,I]`, w `[O,I]`, bias `[O]`, y `[N,O]`.
    fn linear_fwd(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Option<Slice<'_>>,
        y: Slice<'_>,
    ) -> Result<()>;

    /// `dx = dy w` with dy `[N,O]`, dx `[N,I]`.
    fn linear_bwd_input(&self, s: LinearShape, dy: Slice<'_>, w: Slice<'_>, dx: Slice<'_>) -> Result<()>;

    /// `dw = dy^T x`, `dbias = sum of dy's rows`; dw `[O,I]`, dbias `[O]`.
    fn linear_bwd_weight(
        &self,
        s: LinearShape,
        dy: Slice<'_>,
        x: Slice<'_>,
        dw: Slice<'_>,
        dbias: Option<Slice<'_>>,
        acc: Accumulate,
    ) -> Result<()>;

    /// Causal attention of `qkv` `[B,T,(H+2Hkv)D]`: out `[B,T,H D]`; lse F32 `[B,H,T]` keeps the logarithm of each row's sum of
    /// exponentials.
    ///
    /// With `rope`, query and key heads are first turned by their positions. Pairs are (i, i + D/2); rope F32 `[T, D]` holds,
    /// per position, D/2 cosines of the pairs' angles, then D/2 sines. Whether that happens in place is the back end's
    /// affair: backward takes `qkv` as forward leaves it.
    fn attention_fwd(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        lse: Slice<'_>,
    ) -> Result<()>;

    /// Its backward: dqkv `[B,T,(H+2Hkv)D]`, the gradient of what forward was given, from dout `[B,T,H D]`.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    fn attention_bwd(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        dout: Slice<'_>,
        lse: Slice<'_>,
        dqkv: Slice<'_>,
    ) -> Result<()>;

    /// `h = x w^T + bias`, `a = gelu(h)`, the tanh form: operands as in [`linear_fwd`](Self::linear_fwd), h, a `[N,O]`.
    fn linear_gelu_fwd(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Slice<'_>,
        h: Slice<'_>,
        a: Slice<'_>,
    ) -> Result<()>;

    /// Backward of `y = gelu(h) w^T` to h: `dh = gelu'(h) (dy w)` with dy `[N,O]`, w `[O,I]`, h, dh `[N,I]`;
    /// `dbias = sum of dh's rows` `[I]`: the gradient of the bias that h ends with.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    fn gelu_linear_bwd(
        &self,
        s: LinearShape,
        dy: Slice<'_>,
        w: Slice<'_>,
        h: Slice<'_>,
        dh: Slice<'_>,
        dbias: Slice<'_>,
        acc: Accumulate,
    ) -> Result<()>;

    /// `a = silu(g) u` with h `[N,2F]` holding g `[N,F]` and u `[N,F]` side by side in each row, a `[N,F]`.
    fn swiglu_fwd(&self, rows: usize, ffn: usize, h: Slice<'_>, a: Slice<'_>) -> Result<()>;

    /// Its backward: dh `[N,2F]` from da `[N,F]`.
    fn swiglu_bwd(&self, rows: usize, ffn: usize, h: Slice<'_>, da: Slice<'_>, dh: Slice<'_>) -> Result<()>;

    /// `losses[n] = -log softmax(logits[n, ..V])[targets[n]]`, F32 `[N]`; targets I32 `[N]`. With `grad_scale`, in place,
    /// logits `[N,Vp]` become `(softmax - onehot) grad_scale`, zero in the padding; without, they stay.
    fn classifier(
        &self,
        s: ClassifierShape,
        logits: Slice<'_>,
        targets: Slice<'_>,
        losses: Slice<'_>,
        grad_scale: Option<f32>,
    ) -> Result<()>;

    /// `out[0] = scale sum(x)`, added to what it holds under [`Accumulate::Add`]; x and out F32. Same result every run.
    fn sum(&self, x: Slice<'_>, scale: f32, out: Slice<'_>, acc: Accumulate) -> Result<()>;

    /// `out[0] = sum(x^2)`; x F32 or Bf16, out F32. Same result every run.
    fn square_sum(&self, x: Slice<'_>, out: Slice<'_>) -> Result<()>;

    /// One AdamW step over a flat arena. All F32 but grads (F32 or Bf16), `decay` and `work`.
    ///
    /// `g = grads min(1, clip / sqrt(square_sum))`; `m = beta1 m + (1-beta1) g`; `v = beta2 v + (1-beta2) g^2`;
    /// `p = p - lr (m c1 / (sqrt(v c2) + eps) + weight_decay p)`, decay where `decay[i / DECAY_CHUNK]` (U8) is 1.
    /// lr, c1, c2 come from `scalars` F32 [[`scalar::COUNT`](crate::scalar::COUNT)]. With `work` (Bf16), p is also
    /// written there, rounded to nearest even.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    fn adamw(
        &self,
        s: AdamWShape,
        params: Slice<'_>,
        grads: Slice<'_>,
        m: Slice<'_>,
        v: Slice<'_>,
        work: Option<Slice<'_>>,
        decay: Slice<'_>,
        scalars: Slice<'_>,
        square_sum: Slice<'_>,
    ) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_of_one_kernel_are_added_and_the_longest_comes_first() {
        let span = |name: &str, seconds| KernelSpan { name: name.into(), start: 0.0, seconds };
        let times = KernelTime::by_name(&[span("a", 1.0), span("b", 1.5), span("a", 2.0)]);
        let expected = [("a", 2, 3.0), ("b", 1, 1.5)];
        let found: Vec<_> = times.iter().map(|time| (&*time.name, time.launches, time.seconds)).collect();
        assert_eq!(found, expected);
    }
}
