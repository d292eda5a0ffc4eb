//! The CPU back end: f32 on threads. Each operation is the readable reference of its CUDA implementation.
//!
//! Results are the same in every run and for every number of threads: work is split into blocks by size alone, and the
//! sums of the blocks are added in order.

use xlaunch_pool::{DType, Options, Pool};

use super::Backend;
use crate::cpu::{Access, Threads};
use crate::error::Result;
use crate::ops::{
    self, AdamWStep, AttentionBackward, AttentionForward, CachedAttention, Checksum, ColumnSum,
    EmbedBackward, EmbedForward, FusedClassifier, GeluBackward, GeluForward, GeluLinearBackward, GemmFp8,
    Gemv, Greedy, LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearGeluForward, NormBackward,
    NormForward, QuantizeFp8, SquaredNorm, Sum, SwigluBackward, SwigluForward,
};
use crate::options::DeviceInfo;
use crate::tensor::Slice;

/// Back end that computes on threads of this process.
#[derive(Debug)]
pub struct CpuBackend {
    threads: Threads,
    pool: Pool,
    info: DeviceInfo,
}

impl CpuBackend {
    /// Opens a back end with `threads` threads, including the calling one if possible.
    pub fn new(threads: usize, pool: impl Into<Options>) -> Self {
        let threads = Threads::new(threads);
        let count = threads.count();
        let name = format!("CPU ({count} thread{})", if count == 1 { "" } else { "s" });
        Self { threads, pool: Pool::host(pool), info: DeviceInfo { name, uuid: "cpu".into() } }
    }
}

impl Backend for CpuBackend {
    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn activation_dtype(&self) -> DType {
        DType::F32
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn zero(&self, x: Slice<'_>) -> Result<()> {
        Access::new("zero").write_bytes(x).fill(0);
        Ok(())
    }

    fn write_f32(&self, x: Slice<'_>, values: &[f32]) -> Result<()> {
        Access::new("write_f32").write(x, values.len()).copy_from_slice(values);
        Ok(())
    }

    fn write_i32(&self, x: Slice<'_>, values: &[i32]) -> Result<()> {
        assert!(x.dtype() == DType::I32 && x.len() == values.len(), "write_i32: {x:?}");
        Access::new("write_i32").write_bytes(x).copy_from_slice(bytemuck::cast_slice(values));
        Ok(())
    }

    fn write_u8(&self, x: Slice<'_>, values: &[u8]) -> Result<()> {
        assert!(x.dtype() == DType::U8 && x.len() == values.len(), "write_u8: {x:?}");
        Access::new("write_u8").write_bytes(x).copy_from_slice(values);
        Ok(())
    }

    fn read_f32(&self, x: Slice<'_>, values: &mut [f32]) -> Result<()> {
        values.copy_from_slice(Access::new("read_f32").read(x, values.len()));
        Ok(())
    }

    fn cast(&self, x: Slice<'_>, y: Slice<'_>) -> Result<()> {
        ops::cast::cpu::cast(x, y);
        Ok(())
    }

    fn embed_forward(&self, args: EmbedForward<'_>) -> Result<()> {
        ops::embed::cpu::forward(args);
        Ok(())
    }

    fn embed_backward(&self, args: EmbedBackward<'_>) -> Result<()> {
        ops::embed::cpu::backward(args);
        Ok(())
    }

    fn norm_forward(&self, args: NormForward<'_>) -> Result<()> {
        ops::norm::cpu::forward(&self.threads, args);
        Ok(())
    }

    fn norm_backward(&self, args: NormBackward<'_>) -> Result<()> {
        ops::norm::cpu::backward(&self.threads, args);
        Ok(())
    }

    fn linear_forward(&self, args: LinearForward<'_>) -> Result<()> {
        ops::linear::cpu::forward(&self.threads, args);
        Ok(())
    }

    fn linear_backward_input(&self, args: LinearBackwardInput<'_>) -> Result<()> {
        ops::linear::cpu::backward_input(&self.threads, args);
        Ok(())
    }

    fn linear_backward_weight(&self, args: LinearBackwardWeight<'_>) -> Result<()> {
        ops::linear::cpu::backward_weight(&self.threads, args);
        Ok(())
    }

    fn attention_forward(&self, args: AttentionForward<'_>) -> Result<()> {
        ops::attention::cpu::forward(&self.threads, args);
        Ok(())
    }

    fn attention_backward(&self, args: AttentionBackward<'_>) -> Result<()> {
        ops::attention::cpu::backward(&self.threads, args);
        Ok(())
    }

    fn linear_gelu_forward(&self, args: LinearGeluForward<'_>) -> Result<()> {
        ops::gelu::cpu::forward(&self.threads, args);
        Ok(())
    }

    fn gelu_forward(&self, args: GeluForward<'_>) -> Result<()> {
        ops::gelu::cpu::activation(&self.threads, args);
        Ok(())
    }

    fn gelu_linear_backward(&self, args: GeluLinearBackward<'_>) -> Result<()> {
        ops::gelu::cpu::backward(&self.threads, args);
        Ok(())
    }

    fn gelu_backward(&self, args: GeluBackward<'_>) -> Result<()> {
        ops::gelu::cpu::activation_backward(&self.threads, args);
        Ok(())
    }

    fn swiglu_forward(&self, args: SwigluForward<'_>) -> Result<()> {
        ops::swiglu::cpu::forward(&self.threads, args);
        Ok(())
    }

    fn swiglu_backward(&self, args: SwigluBackward<'_>) -> Result<()> {
        ops::swiglu::cpu::backward(&self.threads, args);
        Ok(())
    }

    fn quantize_fp8(&self, args: QuantizeFp8<'_>) -> Result<()> {
        ops::fp8::cpu::quantize(&self.threads, args);
        Ok(())
    }

    fn gemm_fp8(&self, args: GemmFp8<'_>) -> Result<()> {
        ops::fp8::cpu::gemm(&self.threads, args);
        Ok(())
    }

    fn classifier(&self, args: FusedClassifier<'_>) -> Result<()> {
        ops::classifier::cpu::run(&self.threads, args);
        Ok(())
    }

    fn sum(&self, args: Sum<'_>) -> Result<()> {
        ops::reduce::cpu::sum(&self.threads, args);
        Ok(())
    }

    fn column_sum(&self, args: ColumnSum<'_>) -> Result<()> {
        ops::reduce::cpu::column_sum(&self.threads, args);
        Ok(())
    }

    fn squared_norm(&self, args: SquaredNorm<'_>) -> Result<()> {
        ops::reduce::cpu::squared_norm(&self.threads, args);
        Ok(())
    }

    fn adamw(&self, args: AdamWStep<'_>) -> Result<()> {
        ops::adamw::cpu::step(&self.threads, args);
        Ok(())
    }

    fn gemv(&self, args: Gemv<'_>) -> Result<()> {
        ops::gemv::cpu::run(&self.threads, args);
        Ok(())
    }

    fn cached_attention(&self, args: CachedAttention<'_>) -> Result<()> {
        ops::cached_attention::cpu::run(&self.threads, args);
        Ok(())
    }

    fn greedy(&self, args: Greedy<'_>) -> Result<()> {
        ops::greedy::cpu::run(args);
        Ok(())
    }

    fn checksum(&self, args: Checksum<'_>) -> Result<()> {
        ops::checksum::cpu::run(&self.threads, args);
        Ok(())
    }
}
