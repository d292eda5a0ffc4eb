//! The CUDA back end: one NVIDIA GPU.

use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;
use xlaunch_pool::{DType, Pool, StreamId};

use super::Backend;
use crate::cuda::staging::Staging;
use crate::cuda::{Gpu, driver_error, expect, graph, is_bf16};
use crate::error::Result;
use crate::handles::{Capture, PendingRead};
use crate::host_buffer::HostAllocator;
use crate::ops::attention::cuda::Attention;
use crate::ops::cached_attention::cuda::CachedKernels;
use crate::ops::gelu::cuda::Gelu;
use crate::ops::linear::weight_grads::WeightGrads;
use crate::ops::mark::cuda::Counter;
use crate::ops::swiglu::cuda::Swiglu;
use crate::ops::{
    self, AdamWStep, AttentionBackward, AttentionForward, AttentionShape, CachedAttention, Checksum,
    ColumnSum, EmbedBackward, EmbedForward, FusedClassifier, GeluBackward, GeluForward, GeluLinearBackward,
    GemmFp8, Gemv, Greedy, LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearGeluForward,
    LinearSwigluForward, Mark, Marks, NormBackward, NormForward, QuantizeFp8, SquaredNorm, Sum,
    SwigluBackward, SwigluForward, SwigluLinearBackward,
};
use crate::options::{CudaOptions, DeviceInfo};
use crate::profile::KernelSpan;
use crate::tensor::Slice;

/// Back end that computes on one GPU.
#[derive(Debug)]
pub struct CudaBackend {
    attention: Attention,
    cached_attention: CachedKernels,
    pub(crate) gelu: Gelu,
    pub(crate) swiglu: Swiglu,
    pub(crate) weight_grads: WeightGrads,
    marks: Counter,
    staging: Rc<Staging>,
    gpu: Gpu,
}

impl CudaBackend {
    /// Opens GPU `ordinal` of this process and compiles or loads its kernels.
    ///
    /// # Errors
    /// If a library or the device is missing, a kernel does not compile, or there is not enough memory.
    pub fn open(ordinal: usize, options: CudaOptions) -> Result<Self> {
        let gpu = Gpu::open(ordinal, options, &ops::KERNEL_FILES)?;
        let staging = Rc::new(Staging::new(&gpu.device)?);
        let (attention, cached_attention) = (Attention::default(), CachedKernels::default());
        let (gelu, swiglu, weight_grads) = (Gelu::default(), Swiglu::default(), WeightGrads::default());
        let marks = Counter::default();
        Ok(Self { attention, cached_attention, gelu, swiglu, weight_grads, marks, staging, gpu })
    }

    /// Returns the compute stream. Collectives synchronise with it by events.
    pub fn stream(&self) -> Arc<CudaStream> {
        self.gpu.device.stream.clone()
    }

    /// Marks all enqueued work as done: memory returned to the pools is free for any stream and for the host.
    fn host_waited(&self) {
        self.gpu.pool.record_synchronize(StreamId::default());
        self.staging.host_waited();
    }

    fn write(&self, x: Slice<'_>, dtype: DType, len: usize, bytes: &[u8]) -> Result<()> {
        expect(x, dtype, len);
        // SAFETY: the slice holds `len` elements of that type, and `bytes` has the same size.
        unsafe { self.staging.write(x.address(), bytes) }
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> &DeviceInfo {
        &self.gpu.device.info
    }

    fn activation_dtype(&self) -> DType {
        self.gpu.activations
    }

    fn pool(&self) -> &Pool {
        &self.gpu.pool
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn begin_profile(&self) {
        self.gpu.device.profiler.begin();
    }

    fn end_profile(&self) -> Result<Vec<KernelSpan>> {
        self.gpu.device.profiler.end()
    }

    fn begin_capture(&self) -> Result<bool> {
        graph::begin(&self.gpu.device).map(|()| true)
    }

    fn end_capture(&self) -> Result<Capture> {
        let captured = graph::end(&self.gpu.device)?;
        Ok(Capture::new(move || graph::launch(&captured)))
    }

    fn host_allocator(&self) -> HostAllocator {
        HostAllocator::pinned(self.gpu.device.context.clone())
    }

    fn prepare(&self, attention: AttentionShape) {
        self.attention.prepare(&self.gpu, attention);
    }

    fn open_marks(&self) -> Result<Option<Marks>> {
        self.marks.open(&self.gpu).map(Some)
    }

    fn mark(&self, mark: Mark<'_>) -> Result<()> {
        self.marks.mark(&self.gpu, mark)
    }

    fn zero(&self, x: Slice<'_>) -> Result<()> {
        self.gpu.zero(x)
    }

    fn write_f32(&self, x: Slice<'_>, values: &[f32]) -> Result<()> {
        self.write(x, DType::F32, values.len(), bytemuck::cast_slice(values))
    }

    fn write_i32(&self, x: Slice<'_>, values: &[i32]) -> Result<()> {
        self.write(x, DType::I32, values.len(), bytemuck::cast_slice(values))
    }

    fn write_u8(&self, x: Slice<'_>, values: &[u8]) -> Result<()> {
        self.write(x, DType::U8, values.len(), values)
    }

    fn read_f32(&self, x: Slice<'_>, values: &mut [f32]) -> Result<()> {
        let failed = |error| driver_error("failed to read from the device", error);
        let stream = &self.gpu.device.stream;
        if is_bf16(x) {
            expect(x, DType::Bf16, values.len());
            let mut halves = vec![bf16::ZERO; values.len()];
            // SAFETY: the slice holds as many elements; the buffer outlives the copy, which is waited for below.
            unsafe { result::memcpy_dtoh_async(&mut halves, x.address(), stream.cu_stream()) }
                .map_err(failed)?;
            stream.synchronize().map_err(failed)?;
            self.host_waited();
            values.iter_mut().zip(halves).for_each(|(value, half)| *value = half.to_f32());
        } else {
            expect(x, DType::F32, values.len());
            // SAFETY: as above.
            unsafe { result::memcpy_dtoh_async(values, x.address(), stream.cu_stream()) }.map_err(failed)?;
            stream.synchronize().map_err(failed)?;
            self.host_waited();
        }
        Ok(())
    }

    fn begin_read(&self, x: Slice<'_>) -> Result<PendingRead> {
        expect(x, DType::F32, x.len());
        // SAFETY: the slice holds as many bytes of this device; memory that its tensor returns to the pool is written
        // again by later work of the same stream only.
        let read = unsafe { self.staging.begin_read(x.address(), x.len() * DType::F32.size()) }?;
        let staging = self.staging.clone();
        Ok(PendingRead::new(move |values| {
            staging.end_read(read, |bytes| bytemuck::cast_slice_mut(values).copy_from_slice(bytes))
        }))
    }

    fn cast(&self, x: Slice<'_>, y: Slice<'_>) -> Result<()> {
        ops::cast::cuda::cast(&self.gpu, x, y)
    }

    fn embed_forward(&self, args: EmbedForward<'_>) -> Result<()> {
        ops::embed::cuda::forward(&self.gpu, args)
    }

    fn embed_backward(&self, args: EmbedBackward<'_>) -> Result<()> {
        ops::embed::cuda::backward(&self.gpu, args)
    }

    fn norm_forward(&self, args: NormForward<'_>) -> Result<()> {
        ops::norm::cuda::forward(&self.gpu, args)
    }

    fn norm_backward(&self, args: NormBackward<'_>) -> Result<()> {
        ops::norm::cuda::backward(&self.gpu, args)
    }

    fn linear_forward(&self, args: LinearForward<'_>) -> Result<()> {
        ops::linear::cuda::forward(&self.gpu, args)
    }

    fn linear_backward_input(&self, args: LinearBackwardInput<'_>) -> Result<()> {
        ops::linear::cuda::backward_input(&self.gpu, args)
    }

    fn linear_backward_weight(&self, args: LinearBackwardWeight<'_>) -> Result<()> {
        self.weight_grads.one(&self.gpu, args)
    }

    fn linear_backward_weights(&self, layers: [LinearBackwardWeight<'_>; 2]) -> Result<()> {
        self.weight_grads.two(&self.gpu, layers)
    }

    fn attention_forward(&self, args: AttentionForward<'_>) -> Result<()> {
        self.attention.forward(&self.gpu, args)
    }

    fn attention_backward(&self, args: AttentionBackward<'_>) -> Result<()> {
        self.attention.backward(&self.gpu, args)
    }

    fn linear_gelu_forward(&self, args: LinearGeluForward<'_>) -> Result<()> {
        self.gelu.forward(&self.gpu, args)
    }

    fn gelu_forward(&self, args: GeluForward<'_>) -> Result<()> {
        ops::gelu::cuda::activation(&self.gpu, args)
    }

    fn gelu_linear_backward(&self, args: GeluLinearBackward<'_>) -> Result<()> {
        self.gelu.backward(&self.gpu, args)
    }

    fn gelu_backward(&self, args: GeluBackward<'_>) -> Result<()> {
        ops::gelu::cuda::activation_backward(&self.gpu, args)
    }

    fn swiglu_forward(&self, args: SwigluForward<'_>) -> Result<()> {
        ops::swiglu::cuda::forward(&self.gpu, args)
    }

    fn swiglu_backward(&self, args: SwigluBackward<'_>) -> Result<()> {
        ops::swiglu::cuda::backward(&self.gpu, args)
    }

    fn linear_swiglu_forward(&self, args: LinearSwigluForward<'_>) -> Result<()> {
        self.swiglu.linear_forward(&self.gpu, args)
    }

    fn swiglu_linear_backward(&self, args: SwigluLinearBackward<'_>) -> Result<()> {
        self.swiglu.linear_backward(&self.gpu, args)
    }

    fn supports_fp8(&self) -> bool {
        self.gpu.device.capability >= (8, 9)
    }

    fn quantize_fp8(&self, args: QuantizeFp8<'_>) -> Result<()> {
        ops::fp8::cuda::quantize(&self.gpu, args)
    }

    fn gemm_fp8(&self, args: GemmFp8<'_>) -> Result<()> {
        ops::fp8::cuda::gemm(&self.gpu, args)
    }

    fn classifier(&self, args: FusedClassifier<'_>) -> Result<()> {
        ops::classifier::cuda::run(&self.gpu, args)
    }

    fn sum(&self, args: Sum<'_>) -> Result<()> {
        ops::reduce::cuda::sum(&self.gpu, args)
    }

    fn column_sum(&self, args: ColumnSum<'_>) -> Result<()> {
        ops::reduce::cuda::column_sum(&self.gpu, args)
    }

    fn squared_norm(&self, args: SquaredNorm<'_>) -> Result<()> {
        ops::reduce::cuda::squared_norm(&self.gpu, args)
    }

    fn adamw(&self, args: AdamWStep<'_>) -> Result<()> {
        ops::adamw::cuda::step(&self.gpu, args)
    }

    fn gemv(&self, args: Gemv<'_>) -> Result<()> {
        ops::gemv::cuda::run(&self.gpu, args)
    }

    fn cached_attention(&self, args: CachedAttention<'_>) -> Result<()> {
        self.cached_attention.run(&self.gpu, args)
    }

    fn greedy(&self, args: Greedy<'_>) -> Result<()> {
        ops::greedy::cuda::run(&self.gpu, args)
    }

    fn checksum(&self, args: Checksum<'_>) -> Result<()> {
        ops::checksum::cuda::run(&self.gpu, args)
    }
}
