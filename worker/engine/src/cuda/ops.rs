//! Every operation: its checks, then its launches.

use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;
use xlaunch_pool::{DType, Pool};

use super::device::cuda;
use super::gemm::{Epilogue, plain, transposed};
use super::kernels::{Launch, args};
use super::{CudaBackend, Graph, eights, expect, expect_grad, graph, is_bf16};
use crate::backend::{Backend, DeviceInfo, KernelSpan, Reading, Result};
use crate::shapes::{
    Accumulate, AdamWShape, AttentionShape, ClassifierShape, DECAY_CHUNK, EmbedShape, LinearShape, NormShape,
    scalar,
};
use crate::tensor::Slice;

/// Rows that an activation's threads take at once: ROWS there.
const ACTIVATION_ROWS: usize = 2;
/// Threads of the classifier: with rows of GPT-2's vocabulary in shared memory, a multiprocessor runs two blocks.
const CLASSIFIER_THREADS: u32 = 512;

impl Backend for CudaBackend {
    fn begin_profile(&self) {
        self.device.profiler.begin();
    }

    fn end_profile(&self) -> Result<Vec<KernelSpan>> {
        self.device.profiler.end()
    }

    fn begin_capture(&self) -> Result<bool> {
        graph::begin(&self.device).map(|()| true)
    }

    fn end_capture(&self) -> Result<Graph> {
        graph::end(&self.device)
    }

    fn device(&self) -> &DeviceInfo {
        &self.device.info
    }

    fn activation_dtype(&self) -> DType {
        self.activations
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn cuda_stream(&self) -> Option<Arc<CudaStream>> {
        Some(self.device.stream.clone())
    }

    fn zero(&self, x: Slice<'_>) -> Result<()> {
        let (bytes, stream) = (x.len() * x.dtype().size(), self.device.stream.cu_stream());
        // SAFETY: the slice holds so many bytes; every type is valid with any bytes.
        unsafe { result::memset_d8_async(x.address(), 0, bytes, stream) }
            .map_err(|error| cuda("failed to clear memory", error))
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
        let failed = |error| cuda("failed to read from the device", error);
        let stream = &self.device.stream;
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

    fn begin_read(&self, x: Slice<'_>) -> Result<Reading> {
        expect(x, DType::F32, x.len());
        // SAFETY: the slice holds so many bytes of this device; what its tensor returns to the pool is written again by
        // later work of the same stream only.
        let read = unsafe { self.staging.begin_read(x.address(), x.len() * DType::F32.size()) }?;
        let staging = self.staging.clone();
        Ok(Reading::new(move |values| {
            staging.end_read(read, |bytes| bytemuck::cast_slice_mut(values).copy_from_slice(bytes))
        }))
    }

    fn cast(&self, x: Slice<'_>, y: Slice<'_>) -> Result<()> {
        let len = x.len();
        let name = match (x.dtype(), y.dtype()) {
            (DType::F32, DType::Bf16) => "cast_f32_bf16",
            (DType::Bf16, DType::F32) => "cast_bf16_f32",
            _ => {
                expect(y, x.dtype(), len);
                let (bytes, stream) = (len * x.dtype().size(), self.device.stream.cu_stream());
                // SAFETY: both hold so many bytes of this device.
                return unsafe { result::memcpy_dtod_async(y.address(), x.address(), bytes, stream) }
                    .map_err(|error| cuda("failed to copy on the device", error));
            }
        };
        expect(y, y.dtype(), len);
        // SAFETY: both hold `len` elements of the types the kernel is named after.
        unsafe { self.launch(name, self.spread(len), args![x, y, len]) }
    }

    fn embed_fwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        wte: Slice<'_>,
        wpe: Option<Slice<'_>>,
        out: Slice<'_>,
    ) -> Result<()> {
        self.embed_forward(s, tokens, wte, wpe, out)
    }

    fn embed_bwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
        dwpe: Option<Slice<'_>>,
    ) -> Result<()> {
        self.embed_backward(s, tokens, dout, dwte, dwpe)
    }

    fn norm_fwd(
        &self,
        s: NormShape,
        x: Slice<'_>,
        gamma: Slice<'_>,
        beta: Option<Slice<'_>>,
        y: Slice<'_>,
        stats: Slice<'_>,
    ) -> Result<()> {
        self.norm_forward(s, x, None, gamma, beta, y, stats)
    }

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
    ) -> Result<()> {
        self.norm_forward(s, x, Some((branch, sum)), gamma, beta, y, stats)
    }

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
    ) -> Result<()> {
        self.norm_backward(s, x, gamma, stats, dy, dx, add, dgamma, dbeta, dsum, acc)
    }

    fn linear_fwd(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Option<Slice<'_>>,
        y: Slice<'_>,
    ) -> Result<()> {
        self.act(x, s.rows * s.inputs);
        self.act(w, s.outputs * s.inputs);
        self.maybe_act(bias, s.outputs);
        self.act(y, s.rows * s.outputs);
        let (w, x, epilogue) = (transposed(w), plain(x), bias.map_or(Epilogue::None, Epilogue::Bias));
        // SAFETY: checked above; y is no input by the operation's contract.
        unsafe { self.gemm.product(s.outputs, s.rows, s.inputs, w, x, epilogue, y, false) }
    }

    fn linear_bwd_input(&self, s: LinearShape, dy: Slice<'_>, w: Slice<'_>, dx: Slice<'_>) -> Result<()> {
        self.act(dy, s.rows * s.outputs);
        self.act(w, s.outputs * s.inputs);
        self.act(dx, s.rows * s.inputs);
        let (w, dy) = (plain(w), plain(dy));
        // SAFETY: checked above; dx is no input by the operation's contract.
        unsafe { self.gemm.product(s.inputs, s.rows, s.outputs, w, dy, Epilogue::None, dx, false) }
    }

    fn linear_bwd_weight(
        &self,
        s: LinearShape,
        dy: Slice<'_>,
        x: Slice<'_>,
        dw: Slice<'_>,
        dbias: Option<Slice<'_>>,
        acc: Accumulate,
    ) -> Result<()> {
        self.act(dy, s.rows * s.outputs);
        self.act(x, s.rows * s.inputs);
        expect_grad(dw, s.outputs * s.inputs);
        let (add, none) = (acc == Accumulate::Add, Epilogue::None);
        // SAFETY: checked above; dw is no input by the operation's contract.
        unsafe { self.gemm.product(s.inputs, s.outputs, s.rows, plain(x), transposed(dy), none, dw, add) }?;
        let Some(dbias) = dbias else { return Ok(()) };
        expect_grad(dbias, s.outputs);
        let launch = self.sums_of_columns(s.rows, s.outputs);
        let partials = self.alloc(DType::F32, launch.grid.1 * s.outputs)?;
        let args = args![dy, partials.all(), s.rows, s.outputs];
        // SAFETY: checked above; there are as many rows of partial sums as of blocks.
        unsafe { self.launch("column_sum_partials", launch, args) }?;
        self.column_sum_final(&partials, launch.grid.1, s.outputs, &[dbias], acc)
    }

    fn attention_fwd(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        lse: Slice<'_>,
    ) -> Result<()> {
        self.attention_forward(s, qkv, rope, out, lse)
    }

    fn attention_bwd(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        dout: Slice<'_>,
        lse: Slice<'_>,
        dqkv: Slice<'_>,
    ) -> Result<()> {
        self.attention_backward(s, qkv, rope, out, dout, lse, dqkv)
    }

    fn linear_gelu_fwd(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Slice<'_>,
        h: Slice<'_>,
        a: Slice<'_>,
    ) -> Result<()> {
        self.linear_gelu_forward(s, x, w, bias, h, a)
    }

    fn gelu_linear_bwd(
        &self,
        s: LinearShape,
        dy: Slice<'_>,
        w: Slice<'_>,
        h: Slice<'_>,
        dh: Slice<'_>,
        dbias: Slice<'_>,
        acc: Accumulate,
    ) -> Result<()> {
        self.gelu_linear_backward(s, dy, w, h, dh, dbias, acc)
    }

    fn swiglu_fwd(&self, rows: usize, ffn: usize, h: Slice<'_>, a: Slice<'_>) -> Result<()> {
        self.act(h, 2 * rows * ffn);
        self.act(a, rows * ffn);
        let launch = Launch::blocks(rows.div_ceil(ACTIVATION_ROWS), eights(ffn));
        // SAFETY: checked above.
        unsafe { self.launch("swiglu_fwd", launch, args![h, a, rows, ffn]) }
    }

    fn swiglu_bwd(&self, rows: usize, ffn: usize, h: Slice<'_>, da: Slice<'_>, dh: Slice<'_>) -> Result<()> {
        [h, dh].into_iter().for_each(|x| self.act(x, 2 * rows * ffn));
        self.act(da, rows * ffn);
        let launch = Launch::blocks(rows.div_ceil(ACTIVATION_ROWS), eights(ffn));
        // SAFETY: checked above.
        unsafe { self.launch("swiglu_bwd", launch, args![h, da, dh, rows, ffn]) }
    }

    fn classifier(
        &self,
        s: ClassifierShape,
        logits: Slice<'_>,
        targets: Slice<'_>,
        losses: Slice<'_>,
        grad_scale: Option<f32>,
    ) -> Result<()> {
        self.act(logits, s.rows * s.padded);
        expect(targets, DType::I32, s.rows);
        expect(losses, DType::F32, s.rows);
        let scale = grad_scale.unwrap_or(0.0);
        let bytes = s.padded.next_multiple_of(8) * self.activations.size();
        let kept = bytes <= self.kernels.classifier_shared;
        let (path, reason) = (["rows read three times", "rows kept"][usize::from(kept)], "they are too long");
        self.fallback.took("classifier", s, path, (!kept).then_some(("rows kept", reason)));
        let shared = if kept { bytes } else { 0 };
        let launch = Launch { shared, ..Launch::blocks(s.rows, CLASSIFIER_THREADS) };
        let args = args![logits, targets, losses, s.vocab, s.padded, grad_scale.is_some(), scale, kept];
        // SAFETY: checked above; targets are below V by the operation's contract; a row that is kept has its memory.
        unsafe { self.launch("classifier", launch, args) }
    }

    fn sum(&self, x: Slice<'_>, scale: f32, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        self.sum_of(x, scale, out, acc)
    }

    fn square_sum(&self, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        self.square_sum_of(x, out)
    }

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
    ) -> Result<()> {
        let len = params.len();
        [params, m, v].into_iter().for_each(|x| expect(x, DType::F32, len));
        expect_grad(grads, len);
        if let Some(work) = work {
            expect(work, DType::Bf16, len);
        }
        expect(decay, DType::U8, len.div_ceil(DECAY_CHUNK));
        expect(scalars, DType::F32, scalar::COUNT);
        expect(square_sum, DType::F32, 1);
        let args = args![
            params,
            grads,
            is_bf16(grads),
            m,
            v,
            work,
            decay,
            scalars,
            square_sum,
            len,
            s.beta1,
            s.beta2,
            s.eps,
            s.weight_decay,
            s.clip,
        ];
        // SAFETY: checked above.
        unsafe { self.launch("adamw", self.spread(len), args) }
    }
}
