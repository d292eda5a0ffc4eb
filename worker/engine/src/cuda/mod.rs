//! Placeholder of the CUDA back end: there is no way to open it yet.

use xlaunch_pool::{DType, Mode, Pool};

use crate::backend::{Backend, DeviceInfo, EngineError, Precision, Result};
use crate::shapes::{
    Accumulate, AdamWShape, AttentionShape, ClassifierShape, EmbedShape, LinearShape, NormShape,
};
use crate::tensor::Slice;

/// One GPU.
#[derive(Debug)]
pub enum CudaBackend {}

impl CudaBackend {
    /// Refuses: this version has no kernels.
    pub fn open(ordinal: usize, _precision: Precision, _mode: Mode) -> Result<Self> {
        Err(EngineError::Device { ordinal, reason: "this version computes on CPUs alone".into() })
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> &DeviceInfo {
        match *self {}
    }
    fn activation_dtype(&self) -> DType {
        match *self {}
    }
    fn pool(&self) -> &Pool {
        match *self {}
    }
    fn zero(&self, _x: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn write_f32(&self, _x: Slice<'_>, _values: &[f32]) -> Result<()> {
        match *self {}
    }
    fn write_i32(&self, _x: Slice<'_>, _values: &[i32]) -> Result<()> {
        match *self {}
    }
    fn write_u8(&self, _x: Slice<'_>, _values: &[u8]) -> Result<()> {
        match *self {}
    }
    fn read_f32(&self, _x: Slice<'_>, _values: &mut [f32]) -> Result<()> {
        match *self {}
    }
    fn cast(&self, _x: Slice<'_>, _y: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn embed_fwd(
        &self,
        _s: EmbedShape,
        _tokens: Slice<'_>,
        _wte: Slice<'_>,
        _wpe: Option<Slice<'_>>,
        _out: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn embed_bwd(
        &self,
        _s: EmbedShape,
        _tokens: Slice<'_>,
        _dout: Slice<'_>,
        _dwte: Slice<'_>,
        _dwpe: Option<Slice<'_>>,
    ) -> Result<()> {
        match *self {}
    }
    fn norm_fwd(
        &self,
        _s: NormShape,
        _x: Slice<'_>,
        _gamma: Slice<'_>,
        _beta: Option<Slice<'_>>,
        _y: Slice<'_>,
        _stats: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn add_norm_fwd(
        &self,
        _s: NormShape,
        _x: Slice<'_>,
        _branch: Slice<'_>,
        _sum: Slice<'_>,
        _gamma: Slice<'_>,
        _beta: Option<Slice<'_>>,
        _y: Slice<'_>,
        _stats: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn norm_bwd(
        &self,
        _s: NormShape,
        _x: Slice<'_>,
        _gamma: Slice<'_>,
        _stats: Slice<'_>,
        _dy: Slice<'_>,
        _dx: Slice<'_>,
        _add: bool,
        _dgamma: Slice<'_>,
        _dbeta: Option<Slice<'_>>,
        _acc: Accumulate,
    ) -> Result<()> {
        match *self {}
    }
    fn linear_fwd(
        &self,
        _s: LinearShape,
        _x: Slice<'_>,
        _w: Slice<'_>,
        _bias: Option<Slice<'_>>,
        _y: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn linear_bwd_input(&self, _s: LinearShape, _dy: Slice<'_>, _w: Slice<'_>, _dx: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn linear_bwd_weight(
        &self,
        _s: LinearShape,
        _dy: Slice<'_>,
        _x: Slice<'_>,
        _dw: Slice<'_>,
        _dbias: Option<Slice<'_>>,
        _acc: Accumulate,
    ) -> Result<()> {
        match *self {}
    }
    fn rope_fwd(&self, _s: AttentionShape, _qkv: Slice<'_>, _table: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn rope_bwd(&self, _s: AttentionShape, _dqkv: Slice<'_>, _table: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn attention_fwd(
        &self,
        _s: AttentionShape,
        _qkv: Slice<'_>,
        _out: Slice<'_>,
        _lse: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn attention_bwd(
        &self,
        _s: AttentionShape,
        _qkv: Slice<'_>,
        _out: Slice<'_>,
        _dout: Slice<'_>,
        _lse: Slice<'_>,
        _dqkv: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn gelu_fwd(&self, _h: Slice<'_>, _a: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn gelu_bwd(&self, _h: Slice<'_>, _da: Slice<'_>, _dh: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn swiglu_fwd(&self, _rows: usize, _ffn: usize, _h: Slice<'_>, _a: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn swiglu_bwd(
        &self,
        _rows: usize,
        _ffn: usize,
        _h: Slice<'_>,
        _da: Slice<'_>,
        _dh: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
    fn classifier(
        &self,
        _s: ClassifierShape,
        _logits: Slice<'_>,
        _targets: Slice<'_>,
        _losses: Slice<'_>,
        _grad_scale: Option<f32>,
    ) -> Result<()> {
        match *self {}
    }
    fn sum(&self, _x: Slice<'_>, _scale: f32, _out: Slice<'_>, _acc: Accumulate) -> Result<()> {
        match *self {}
    }
    fn square_sum(&self, _x: Slice<'_>, _out: Slice<'_>) -> Result<()> {
        match *self {}
    }
    fn adamw(
        &self,
        _s: AdamWShape,
        _params: Slice<'_>,
        _grads: Slice<'_>,
        _m: Slice<'_>,
        _v: Slice<'_>,
        _work: Option<Slice<'_>>,
        _decay: Slice<'_>,
        _scalars: Slice<'_>,
        _square_sum: Slice<'_>,
    ) -> Result<()> {
        match *self {}
    }
}
