//! The CPU back end: f32 on threads. Each operation is the readable reference of its CUDA twin.
//!
//! Results are the same every run: work is cut into blocks by size alone, and what blocks sum up is added in order.

mod activation;
mod adamw;
mod attention;
mod classifier;
mod embed;
mod linear;
mod math;
mod memory;
mod norm;
mod reduce;
mod rope;
mod threads;

use xlaunch_pool::{DType, Options, Pool};

use crate::backend::{Backend, DeviceInfo, Result};
use crate::shapes::{
    Accumulate, AdamWShape, AttentionShape, ClassifierShape, DECAY_CHUNK, EmbedShape, LinearShape, NormShape,
    scalar,
};
use crate::tensor::Slice;
use memory::Access;
use threads::Threads;

/// Computes on this process's threads.
#[derive(Debug)]
pub struct CpuBackend {
    threads: Threads,
    pool: Pool,
    info: DeviceInfo,
}

impl CpuBackend {
    /// A back end of `threads` threads, the calling one among them where possible.
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
        let access = Access::new("cast");
        access.write(y, x.len()).copy_from_slice(access.read(x, x.len()));
        Ok(())
    }

    fn embed_fwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        wte: Slice<'_>,
        wpe: Option<Slice<'_>>,
        out: Slice<'_>,
    ) -> Result<()> {
        let (a, rows) = (Access::new("embed_fwd"), s.batch * s.seq);
        let wpe = wpe.map(|wpe| a.read(wpe, wpe.len()));
        let wte = a.read(wte, wte.len());
        embed::fwd(s, a.read_i32(tokens, rows), wte, wpe, a.write(out, rows * s.cols));
        Ok(())
    }

    fn embed_bwd(
        &self,
        s: EmbedShape,
        tokens: Slice<'_>,
        dout: Slice<'_>,
        dwte: Slice<'_>,
        dwpe: Option<Slice<'_>>,
    ) -> Result<()> {
        let (a, rows) = (Access::new("embed_bwd"), s.batch * s.seq);
        let dwpe = dwpe.map(|dwpe| a.write(dwpe, dwpe.len()));
        let dwte = a.write(dwte, dwte.len());
        embed::bwd(s, a.read_i32(tokens, rows), a.read(dout, rows * s.cols), dwte, dwpe);
        Ok(())
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
        let (a, len) = (Access::new("norm_fwd"), s.rows * s.cols);
        let (gamma, beta) = (a.read(gamma, s.cols), beta.map(|beta| a.read(beta, s.cols)));
        let (y, stats) = (a.write(y, len), a.write(stats, s.stats()));
        norm::fwd(&self.threads, s, a.read(x, len), None, gamma, beta, y, stats);
        Ok(())
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
        let (a, len) = (Access::new("add_norm_fwd"), s.rows * s.cols);
        let (gamma, beta) = (a.read(gamma, s.cols), beta.map(|beta| a.read(beta, s.cols)));
        let (y, stats) = (a.write(y, len), a.write(stats, s.stats()));
        let branch = Some((a.read(branch, len), a.write(sum, len)));
        norm::fwd(&self.threads, s, a.read(x, len), branch, gamma, beta, y, stats);
        Ok(())
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
        let (a, len) = (Access::new("norm_bwd"), s.rows * s.cols);
        let (gamma, stats) = (a.read(gamma, s.cols), a.read(stats, s.stats()));
        let (dgamma, dbeta) = (a.write(dgamma, s.cols), dbeta.map(|dbeta| a.write(dbeta, s.cols)));
        let dsum = dsum.map(|dsum| a.write(dsum, s.cols));
        let (x, dy, dx) = (a.read(x, len), a.read(dy, len), a.write(dx, len));
        norm::bwd(&self.threads, s, x, gamma, stats, dy, dx, add, dgamma, dbeta, acc);
        if let Some(dsum) = dsum {
            linear::column_sums(&self.threads, dx, s.cols, dsum, acc == Accumulate::Add);
        }
        Ok(())
    }

    fn linear_fwd(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Option<Slice<'_>>,
        y: Slice<'_>,
    ) -> Result<()> {
        let a = Access::new("linear_fwd");
        let (x, w) = (a.read(x, s.rows * s.inputs), a.read(w, s.outputs * s.inputs));
        let bias = bias.map(|bias| a.read(bias, s.outputs));
        linear::fwd(&self.threads, s, x, w, bias, a.write(y, s.rows * s.outputs));
        Ok(())
    }

    fn linear_bwd_input(&self, s: LinearShape, dy: Slice<'_>, w: Slice<'_>, dx: Slice<'_>) -> Result<()> {
        let a = Access::new("linear_bwd_input");
        let (dy, w) = (a.read(dy, s.rows * s.outputs), a.read(w, s.outputs * s.inputs));
        linear::bwd_input(&self.threads, s, dy, w, a.write(dx, s.rows * s.inputs));
        Ok(())
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
        let a = Access::new("linear_bwd_weight");
        let (dy, x) = (a.read(dy, s.rows * s.outputs), a.read(x, s.rows * s.inputs));
        let dbias = dbias.map(|dbias| a.write(dbias, s.outputs));
        linear::bwd_weight(&self.threads, s, dy, x, a.write(dw, s.outputs * s.inputs), dbias, acc);
        Ok(())
    }

    fn attention_fwd(
        &self,
        s: AttentionShape,
        qkv: Slice<'_>,
        rope: Option<Slice<'_>>,
        out: Slice<'_>,
        lse: Slice<'_>,
    ) -> Result<()> {
        let (a, rows) = (Access::new("attention_fwd"), s.batch * s.seq);
        let (out, lse) = (a.write(out, rows * s.heads * s.width), a.write(lse, rows * s.heads));
        let qkv = match rope {
            Some(table) => {
                let qkv = a.write(qkv, rows * s.qkv_width());
                rope::rotate(&self.threads, s, qkv, a.read(table, s.seq * s.width), 1.0);
                qkv
            }
            None => a.read(qkv, rows * s.qkv_width()),
        };
        attention::fwd(&self.threads, s, qkv, out, lse);
        Ok(())
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
        let (a, rows) = (Access::new("attention_bwd"), s.batch * s.seq);
        let len = rows * s.heads * s.width;
        let (out, dout, lse) = (a.read(out, len), a.read(dout, len), a.read(lse, rows * s.heads));
        let (qkv, dqkv) = (a.read(qkv, rows * s.qkv_width()), a.write(dqkv, rows * s.qkv_width()));
        attention::bwd(&self.threads, s, qkv, out, dout, lse, dqkv);
        if let Some(table) = rope {
            rope::rotate(&self.threads, s, dqkv, a.read(table, s.seq * s.width), -1.0);
        }
        Ok(())
    }

    fn linear_gelu_fwd(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Slice<'_>,
        h: Slice<'_>,
        y: Slice<'_>,
    ) -> Result<()> {
        let (a, len) = (Access::new("linear_gelu_fwd"), s.rows * s.outputs);
        let (x, w) = (a.read(x, s.rows * s.inputs), a.read(w, s.outputs * s.inputs));
        let (h, y) = (a.write(h, len), a.write(y, len));
        linear::fwd(&self.threads, s, x, w, Some(a.read(bias, s.outputs)), h);
        activation::gelu_fwd(&self.threads, h, y);
        Ok(())
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
        let (a, len) = (Access::new("gelu_linear_bwd"), s.rows * s.inputs);
        let (dy, w) = (a.read(dy, s.rows * s.outputs), a.read(w, s.outputs * s.inputs));
        let (h, dh, dbias) = (a.read(h, len), a.write(dh, len), a.write(dbias, s.inputs));
        linear::bwd_input(&self.threads, s, dy, w, dh);
        activation::gelu_bwd(&self.threads, h, dh);
        linear::column_sums(&self.threads, dh, s.inputs, dbias, acc == Accumulate::Add);
        Ok(())
    }

    fn swiglu_fwd(&self, rows: usize, ffn: usize, h: Slice<'_>, y: Slice<'_>) -> Result<()> {
        let a = Access::new("swiglu_fwd");
        activation::swiglu_fwd(&self.threads, ffn, a.read(h, 2 * rows * ffn), a.write(y, rows * ffn));
        Ok(())
    }

    fn swiglu_bwd(&self, rows: usize, ffn: usize, h: Slice<'_>, da: Slice<'_>, dh: Slice<'_>) -> Result<()> {
        let (a, len) = (Access::new("swiglu_bwd"), rows * ffn);
        let (h, da) = (a.read(h, 2 * len), a.read(da, len));
        activation::swiglu_bwd(&self.threads, ffn, h, da, a.write(dh, 2 * len));
        Ok(())
    }

    fn classifier(
        &self,
        s: ClassifierShape,
        logits: Slice<'_>,
        targets: Slice<'_>,
        losses: Slice<'_>,
        grad_scale: Option<f32>,
    ) -> Result<()> {
        let (a, len) = (Access::new("classifier"), s.rows * s.padded);
        let (targets, losses) = (a.read_i32(targets, s.rows), a.write(losses, s.rows));
        match grad_scale {
            None => classifier::losses(&self.threads, s, a.read(logits, len), targets, losses),
            Some(scale) => {
                let logits = a.write(logits, len);
                classifier::losses_and_gradients(&self.threads, s, logits, targets, losses, scale);
            }
        }
        Ok(())
    }

    #[expect(clippy::cast_possible_truncation, reason = "the result is meant in f32")]
    fn sum(&self, x: Slice<'_>, scale: f32, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        let a = Access::new("sum");
        let total = (f64::from(scale) * reduce::total(&self.threads, a.read(x, x.len()))) as f32;
        let out = &mut a.write(out, 1)[0];
        *out = if acc == Accumulate::Add { *out + total } else { total };
        Ok(())
    }

    #[expect(clippy::cast_possible_truncation, reason = "the result is meant in f32")]
    fn square_sum(&self, x: Slice<'_>, out: Slice<'_>) -> Result<()> {
        let a = Access::new("square_sum");
        a.write(out, 1)[0] = reduce::squares(&self.threads, a.read(x, x.len())) as f32;
        Ok(())
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
        let (a, len) = (Access::new("adamw"), params.len());
        assert!(work.is_none(), "adamw: the CPU computes with the master weights");
        assert!(decay.dtype() == DType::U8 && decay.len() == len.div_ceil(DECAY_CHUNK), "adamw: {decay:?}");
        let arenas = adamw::Arenas {
            params: a.write(params, len),
            grads: a.read(grads, len),
            m: a.write(m, len),
            v: a.write(v, len),
            decay: a.read_bytes(decay),
        };
        let square_sum = a.read(square_sum, 1)[0];
        adamw::step(&self.threads, s, arenas, a.read(scalars, scalar::COUNT), square_sum);
        Ok(())
    }
}
