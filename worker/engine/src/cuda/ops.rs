//! Every operation: its checks, then its launches.

use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use half::bf16;
use xlaunch_pool::{DType, Pool};

use super::attention::Kernel;
use super::cudnn::{Direction, Operands};
use super::gemm::{plain, transposed};
use super::kernels::{Arg, Launch};
use super::staging::cuda;
use super::{CudaBackend, Graph, THREADS, expect, expect_grad, graph, is_bf16};
use crate::backend::{Backend, DeviceInfo, KernelSpan, Reading, Result};
use crate::shapes::{
    Accumulate, AdamWShape, AttentionShape, ClassifierShape, DECAY_CHUNK, EmbedShape, LinearShape, NormKind,
    NormShape, scalar,
};
use crate::tensor::{Slice, Tensor};

/// Rows that one block of the norm kernels works on: WARPS there.
const NORM_ROWS: usize = 4;
/// Rows of one block's column sums: ROWS in the kernels.
const SUM_ROWS: usize = 128;
/// Threads of a row's embedding: each copies eight columns.
const EMBED_THREADS: u32 = 128;
/// Threads of a row's rotation: each turns eight pairs.
const ROPE_THREADS: u32 = 64;
/// Blocks of a sum's first stage.
const SUM_BLOCKS: usize = 1024;

/// The arguments of a kernel, each turned into what it is passed as.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$(Arg::from($arg)),*] };
}

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
        let rows = s.batch * s.seq;
        expect(tokens, DType::I32, rows);
        self.act(wte, wte.len().max(s.vocab * s.cols));
        if let Some(wpe) = wpe {
            self.act(wpe, wpe.len().max(s.seq * s.cols));
        }
        self.act(out, rows * s.cols);
        let args = args![tokens, wte, wpe, out, s.seq, s.cols];
        // SAFETY: checked above; token ids are below V by the operation's contract.
        unsafe { self.launch("embed_fwd", Launch::blocks(rows, EMBED_THREADS), args) }
    }

    fn embed_bwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
        dwpe: Option<Slice<'_>>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        expect(tokens, DType::I32, rows);
        self.act(dout, rows * s.cols);
        expect_grad(dwte, dwte.len().max(s.vocab * s.cols));
        self.embed_bwd_tokens(s, tokens, dout, dwte)?;
        let Some(dwpe) = dwpe else { return Ok(()) };
        expect_grad(dwpe, dwpe.len().max(s.seq * s.cols));
        let blocks = (s.seq * s.cols).div_ceil(THREADS as usize);
        let args = args![dout, dwpe, is_bf16(dwpe), s.batch, s.seq, s.cols];
        // SAFETY: checked above.
        unsafe { self.launch("embed_bwd_positions", Launch::blocks(blocks, THREADS), args) }
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
        self.norm(s, x, None, gamma, beta, y, stats)
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
        self.norm(s, x, Some((branch, sum)), gamma, beta, y, stats)
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
        acc: Accumulate,
    ) -> Result<()> {
        [x, dy, dx].into_iter().for_each(|x| self.act(x, s.rows * s.cols));
        self.act(gamma, s.cols);
        expect(stats, DType::F32, s.stats());
        [Some(dgamma), dbeta].into_iter().flatten().for_each(|grad| expect_grad(grad, s.cols));
        let (means, scales) = split_stats(s, stats);
        // SAFETY: checked above.
        unsafe {
            self.launch(
                "norm_bwd_input",
                norm_launch(s),
                args![x, gamma, means, scales, dy, dx, add, s.rows, s.cols],
            )
        }?;
        let blocks = s.rows.div_ceil(SUM_ROWS);
        let gammas = self.alloc(DType::F32, blocks * s.cols)?;
        let betas = dbeta.map(|_| self.alloc(DType::F32, blocks * s.cols)).transpose()?;
        let args = args![x, means, scales, dy, gammas.all(), betas.as_ref().map(Tensor::all), s.rows, s.cols];
        // SAFETY: checked above; partial sums are as large as the grid.
        unsafe { self.launch("norm_bwd_params", Launch::wide_columns(s.cols, blocks), args) }?;
        self.column_sum_final(&gammas, blocks, s.cols, dgamma, acc == Accumulate::Add)?;
        match (betas, dbeta) {
            (Some(betas), Some(dbeta)) => {
                self.column_sum_final(&betas, blocks, s.cols, dbeta, acc == Accumulate::Add)
            }
            _ => Ok(()),
        }
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
        let (w, x) = (transposed(w), plain(x));
        // SAFETY: checked above; y is no input by the operation's contract.
        unsafe { self.gemm.product(s.outputs, s.rows, s.inputs, w, x, bias, y, false) }
    }

    fn linear_bwd_input(&self, s: LinearShape, dy: Slice<'_>, w: Slice<'_>, dx: Slice<'_>) -> Result<()> {
        self.act(dy, s.rows * s.outputs);
        self.act(w, s.outputs * s.inputs);
        self.act(dx, s.rows * s.inputs);
        let (w, dy) = (plain(w), plain(dy));
        // SAFETY: checked above; dx is no input by the operation's contract.
        unsafe { self.gemm.product(s.inputs, s.rows, s.outputs, w, dy, None, dx, false) }
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
        let add = acc == Accumulate::Add;
        // SAFETY: checked above; dw is no input by the operation's contract.
        unsafe { self.gemm.product(s.inputs, s.outputs, s.rows, plain(x), transposed(dy), None, dw, add) }?;
        let Some(dbias) = dbias else { return Ok(()) };
        expect_grad(dbias, s.outputs);
        let blocks = s.rows.div_ceil(SUM_ROWS);
        let partials = self.alloc(DType::F32, blocks * s.outputs)?;
        let args = args![dy, partials.all(), s.rows, s.outputs];
        // SAFETY: checked above; partial sums are as large as the grid.
        unsafe { self.launch("column_sum_partials", Launch::wide_columns(s.outputs, blocks), args) }?;
        self.column_sum_final(&partials, blocks, s.outputs, dbias, add)
    }

    fn rope_fwd(&self, s: AttentionShape, qkv: Slice<'_>, table: Slice<'_>) -> Result<()> {
        self.rope(s, qkv, table, 1.0)
    }

    fn rope_bwd(&self, s: AttentionShape, dqkv: Slice<'_>, table: Slice<'_>) -> Result<()> {
        self.rope(s, dqkv, table, -1.0)
    }

    fn attention_fwd(&self, s: AttentionShape, qkv: Slice<'_>, out: Slice<'_>, lse: Slice<'_>) -> Result<()> {
        let rows = s.batch * s.seq;
        self.act(qkv, rows * s.qkv_width());
        self.act(out, rows * s.heads * s.width);
        expect(lse, DType::F32, rows * s.heads);
        if let Some(plan) = self.cudnn_plan(s, Direction::Forward) {
            let [qkv, out, lse] = [qkv, out, lse].map(Slice::address);
            let operands = Operands { qkv, out, lse, dout: 0, dqkv: 0 };
            // SAFETY: checked above.
            return unsafe { self.cudnn_execute(&plan, Direction::Forward, &operands) };
        }
        let args = args![qkv, out, lse, s.seq, s.heads, s.kv_heads, s.scale()];
        let launch = self.kernels.attention(s.width).launch(Kernel::Fwd, s, s.heads);
        // SAFETY: checked above.
        unsafe { self.kernels.launch_attention("attention_fwd", s.width, launch, args) }
    }

    fn attention_bwd(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        out: Slice<'_>,
        dout: Slice<'_>,
        lse: Slice<'_>,
        dqkv: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        [qkv, dqkv].into_iter().for_each(|x| self.act(x, rows * s.qkv_width()));
        [out, dout].into_iter().for_each(|x| self.act(x, rows * s.heads * s.width));
        expect(lse, DType::F32, rows * s.heads);
        if let Some(plan) = self.cudnn_plan(s, Direction::Backward) {
            let [qkv, out, lse, dout, dqkv] = [qkv, out, lse, dout, dqkv].map(Slice::address);
            let operands = Operands { qkv, out, lse, dout, dqkv };
            // SAFETY: checked above.
            return unsafe { self.cudnn_execute(&plan, Direction::Backward, &operands) };
        }
        let delta = self.alloc(DType::F32, rows * s.heads)?;
        let path = self.kernels.attention(s.width);
        let delta_launch = path.delta_launch(rows * s.heads);
        let delta_args = args![out, dout, delta.all(), s.batch, s.seq, s.heads];
        let args = args![qkv, dout, lse, delta.all(), dqkv, s.seq, s.heads, s.kv_heads, s.scale()];
        // SAFETY: checked above; delta has one float per row and head; the last two write disjoint parts of dqkv.
        unsafe {
            self.kernels.launch_attention("attention_bwd_delta", s.width, delta_launch, delta_args)?;
            let launch = path.launch(Kernel::BwdQueries, s, s.heads);
            self.kernels.launch_attention("attention_bwd_queries", s.width, launch, args)?;
            let launch = path.launch(Kernel::BwdKeys, s, s.kv_heads);
            self.kernels.launch_attention("attention_bwd_keys", s.width, launch, args)
        }
    }

    fn gelu_fwd(&self, h: Slice<'_>, a: Slice<'_>) -> Result<()> {
        let len = h.len();
        [h, a].into_iter().for_each(|x| self.act(x, len));
        // SAFETY: checked above.
        unsafe {
            self.launch(
                "gelu_fwd",
                Launch::blocks(len.div_ceil(8 * THREADS as usize), THREADS),
                args![h, a, len],
            )
        }
    }

    fn gelu_bwd(&self, h: Slice<'_>, da: Slice<'_>, dh: Slice<'_>) -> Result<()> {
        let len = h.len();
        [h, da, dh].into_iter().for_each(|x| self.act(x, len));
        // SAFETY: checked above.
        unsafe {
            self.launch(
                "gelu_bwd",
                Launch::blocks(len.div_ceil(8 * THREADS as usize), THREADS),
                args![h, da, dh, len],
            )
        }
    }

    fn swiglu_fwd(&self, rows: usize, ffn: usize, h: Slice<'_>, a: Slice<'_>) -> Result<()> {
        self.act(h, 2 * rows * ffn);
        self.act(a, rows * ffn);
        // SAFETY: checked above.
        unsafe { self.launch("swiglu_fwd", Launch::blocks(rows, THREADS), args![h, a, ffn]) }
    }

    fn swiglu_bwd(&self, rows: usize, ffn: usize, h: Slice<'_>, da: Slice<'_>, dh: Slice<'_>) -> Result<()> {
        [h, dh].into_iter().for_each(|x| self.act(x, 2 * rows * ffn));
        self.act(da, rows * ffn);
        // SAFETY: checked above.
        unsafe { self.launch("swiglu_bwd", Launch::blocks(rows, THREADS), args![h, da, dh, ffn]) }
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
        let args = args![logits, targets, losses, s.vocab, s.padded, grad_scale.is_some(), scale];
        // SAFETY: checked above; targets are below V by the operation's contract.
        unsafe { self.launch("classifier", Launch::blocks(s.rows, 512), args) }
    }

    fn sum(&self, x: Slice<'_>, scale: f32, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        expect(x, DType::F32, x.len());
        expect(out, DType::F32, 1);
        let partials = self.alloc(DType::F32, SUM_BLOCKS)?;
        let launch = Launch::blocks(SUM_BLOCKS, THREADS);
        // SAFETY: checked above; there is one partial sum per block.
        unsafe { self.launch("sum_partials", launch, args![x, partials.all(), x.len()]) }?;
        self.sum_final(&partials, scale, out, acc == Accumulate::Add)
    }

    fn square_sum(&self, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        expect_grad(x, x.len());
        expect(out, DType::F32, 1);
        let partials = self.alloc(DType::F32, SUM_BLOCKS)?;
        let args = args![x, is_bf16(x), partials.all(), x.len()];
        // SAFETY: checked above; there is one partial sum per block.
        unsafe { self.launch("square_sum_partials", Launch::blocks(SUM_BLOCKS, THREADS), args) }?;
        self.sum_final(&partials, 1.0, out, false)
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

/// What several operations share.
impl CudaBackend {
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    fn norm(
        &self,
        s: NormShape,
        x: Slice<'_>,
        branch_and_sum: Option<(Slice<'_>, Slice<'_>)>,
        gamma: Slice<'_>,
        beta: Option<Slice<'_>>,
        y: Slice<'_>,
        stats: Slice<'_>,
    ) -> Result<()> {
        let (branch, sum) = branch_and_sum.unzip();
        [Some(x), branch, sum, Some(y)].into_iter().flatten().for_each(|x| self.act(x, s.rows * s.cols));
        self.act(gamma, s.cols);
        self.maybe_act(beta, s.cols);
        expect(stats, DType::F32, s.stats());
        let (means, scales) = split_stats(s, stats);
        let args = args![x, branch, sum, gamma, beta, y, means, scales, s.rows, s.cols, s.eps];
        // SAFETY: checked above.
        unsafe { self.launch("norm_fwd", norm_launch(s), args) }
    }

    /// Adds the rows of each token of the vocabulary to its gradient.
    fn embed_bwd_tokens(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
    ) -> Result<()> {
        let rows = s.batch * s.seq;
        let counters = self.alloc(DType::I32, 2 * s.vocab)?;
        self.zero(counters.all())?;
        let (counts, placed) = (counters.slice(0..s.vocab), counters.slice(s.vocab..2 * s.vocab));
        let starts = self.alloc(DType::I32, s.vocab)?;
        let places = self.alloc(DType::I32, 2 * rows)?;
        let (order, sorted) = (places.slice(0..rows), places.slice(rows..2 * rows));
        let each_row = Launch::blocks(rows.div_ceil(THREADS as usize), THREADS);
        let args =
            args![tokens, counts, starts.all(), order, sorted, dout, dwte, is_bf16(dwte), rows, s.cols];
        // SAFETY: the caller checked the operands; token ids are below V by the operation's contract, so every counter
        // exists and the places of all tokens are as many as there are rows.
        unsafe {
            self.launch("embed_count", each_row, args![tokens, counts, rows])?;
            self.launch("embed_starts", Launch::blocks(1, 1024), args![counts, starts.all(), s.vocab])?;
            self.launch("embed_places", each_row, args![tokens, starts.all(), placed, order, rows])?;
            self.launch("embed_bwd_tokens", Launch::blocks(rows, 512), args)
        }
    }

    fn rope(&self, s: AttentionShape, qkv: Slice<'_>, table: Slice<'_>, direction: f32) -> Result<()> {
        let rows = s.batch * s.seq;
        self.act(qkv, rows * s.qkv_width());
        expect(table, DType::F32, s.seq * s.width);
        let args = args![qkv, table, s.seq, s.heads + s.kv_heads, s.width, s.qkv_width(), direction];
        // SAFETY: checked above.
        unsafe { self.launch("rope", Launch::blocks(rows, ROPE_THREADS), args) }
    }

    /// `out (+)= sum of count rows of partials`.
    fn column_sum_final(
        &self,
        partials: &Tensor,
        count: usize,
        cols: usize,
        out: Slice<'_>,
        add: bool,
    ) -> Result<()> {
        let args = args![partials.all(), count, cols, out, is_bf16(out), add];
        // SAFETY: partials holds [count, cols] floats by construction; out was checked by the caller.
        unsafe { self.launch("column_sum_final", Launch::columns(cols, 1), args) }
    }

    /// `out (+)= scale * sum of SUM_BLOCKS partials`.
    fn sum_final(&self, partials: &Tensor, scale: f32, out: Slice<'_>, add: bool) -> Result<()> {
        let args = args![partials.all(), SUM_BLOCKS, scale, out, add];
        // SAFETY: partials holds SUM_BLOCKS floats; out was checked by the caller.
        unsafe { self.launch("sum_final", Launch::blocks(1, THREADS), args) }
    }
}

/// Means and reciprocal deviations in a norm's statistics.
fn split_stats(s: NormShape, stats: Slice<'_>) -> (Option<Slice<'_>>, Slice<'_>) {
    match s.kind {
        NormKind::Layer => (Some(stats.slice(0..s.rows)), stats.slice(s.rows..2 * s.rows)),
        NormKind::Rms => (None, stats),
    }
}

fn norm_launch(s: NormShape) -> Launch {
    Launch::blocks(s.rows.div_ceil(NORM_ROWS), 32 * NORM_ROWS as u32)
}
