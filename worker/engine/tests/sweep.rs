//! Times of operations over widths, vocabularies, head widths and sequence lengths, one line of JSON each, for
//! `tests/gpu/sweep.py`, which compares them with the device's peak rates.
//!
//! A line has the operation, its axis and size, microseconds of device time (median), and the minimum number of bytes
//! and floating-point operations that it needs. Activations and gradients are bf16. `XLAUNCH_TIMES` names the
//! operations to measure, such as `norm` or `tf32 attention`; 1 means all.

#![expect(clippy::print_stdout, reason = "measurements are printed")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::cast_precision_loss, reason = "sizes are below 2^52")]

mod common;

use std::collections::BTreeSet;

use common::Ops;
use xlaunch_engine::testing::require_gpu;
use xlaunch_engine::*;
use xlaunch_harness::Requirement;

xlaunch_harness::suite! {
    needs gpu_and_xlaunch_times: times;
}

/// Number of elements of the activations of most operations: far more than fit into the L2 cache.
const ELEMENTS: usize = 1 << 25;
const SEQ: usize = 1024;
/// Number of elements of the classifier's input.
const LOGITS: usize = 1 << 28;
const WIDTHS: [usize; 9] = [384, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192];
const VOCABULARIES: [usize; 6] = [32_000, 50_304, 65_536, 128_256, 200_064, 262_144];
const HEAD_WIDTHS: [usize; 7] = [32, 64, 96, 128, 160, 192, 256];
const SEQUENCES: [usize; 7] = [256, 512, 1024, 2048, 4096, 8192, 16_384];
/// Bytes per element of bf16.
const ACT: usize = 2;

fn gpu_and_xlaunch_times() -> Requirement {
    require_gpu()?;
    std::env::var_os("XLAUNCH_TIMES").map(drop).ok_or_else(|| "runs with XLAUNCH_TIMES=1 only".into())
}

fn open(precision: Precision, deterministic: bool) -> Backend {
    let log_fallback = std::env::var_os("XLAUNCH_LOG_FALLBACK").is_some();
    let options = CudaOptions { deterministic, log_fallback, ..CudaOptions::new(precision, PoolMode::On) };
    Backend::cuda(0, options).unwrap()
}

fn times() {
    let backend = open(Precision::Bf16, false);
    let sweep = Sweep { ops: Ops { backend: &backend, grads: DType::Bf16 }, prefix: "" };
    WIDTHS.into_iter().for_each(|cols| sweep.width(cols));
    VOCABULARIES.into_iter().for_each(|vocab| sweep.vocabulary(vocab));
    HEAD_WIDTHS.into_iter().for_each(|width| sweep.qk_norm(width));
    sweep.head_widths();
    sweep.sequences();
    sweep.options();
    for (prefix, precision) in [("deterministic ", Precision::Bf16), ("tf32 ", Precision::Tf32)] {
        let backend = open(precision, true);
        Sweep { ops: Ops { backend: &backend, grads: DType::F32 }, prefix }.head_widths();
    }
}

fn rows(cols: usize) -> usize {
    (ELEMENTS / cols).next_multiple_of(SEQ)
}

/// Returns the shape of 16K tokens with 2,048 columns.
fn attention_shape(seq: usize, width: usize) -> AttentionShape {
    let heads = 2048 / width;
    let options = AttentionOptions::new(width);
    AttentionShape { batch: 16_384 / seq, seq, heads, kv_heads: heads, width, options }
}

/// Minimum number of bytes and floating-point operations of an operation.
struct Work {
    bytes: usize,
    flops: usize,
}

impl Work {
    fn bytes(bytes: usize) -> Self {
        Self { bytes, flops: 0 }
    }

    fn flops(flops: usize) -> Self {
        Self { bytes: 0, flops }
    }
}

struct Sweep<'a> {
    ops: Ops<'a>,
    /// Prefix of the operations' names.
    prefix: &'static str,
}

impl Sweep<'_> {
    fn width(&self, cols: usize) {
        if self.wants("norm") {
            self.norm(cols);
        }
        if self.wants("scaled addition") {
            self.add_scaled(cols);
        }
        if self.wants("SwiGLU") || self.wants("GEGLU") {
            self.glu(cols);
        }
        if self.wants("embedding") {
            self.embedding(cols);
        }
        if self.wants("linear") {
            self.linear(cols);
        }
        if self.wants("FP8") && self.ops.backend.supports_fp8() {
            self.fp8(cols);
        }
    }

    /// Returns whether operations with this word in their names are measured.
    fn wants(&self, word: &str) -> bool {
        let part = std::env::var("XLAUNCH_TIMES").unwrap_or_default();
        part == "1" || (part.contains(word) && part.starts_with(self.prefix))
    }

    fn norm(&self, cols: usize) {
        let (ops, b, rows) = (&self.ops, self.ops.backend, rows(cols));
        let len = rows * cols;
        let [x, branch, y, dy] = [1, 2, 3, 4].map(|seed| ops.random(seed, len));
        let gamma = ops.random(5, cols);
        let shape = NormShape { rows, cols, kind: NormKind::Rms, eps: 1e-5, offset: 0.0 };
        let stats = b.alloc(DType::F32, shape.stats()).unwrap();
        let dgamma = b.alloc(DType::Bf16, cols).unwrap();
        self.report("norm forward", "width", cols, Work::bytes(4 * len * ACT), &|| {
            let residual = Residual::Before(ResidualAdd { branch: branch.all(), sum: branch.all() });
            let (x, gamma, y, stats) = (x.all(), gamma.all(), y.all(), stats.all());
            b.run(NormForward { shape, x, residual, gamma, beta: None, y, stats }).unwrap();
        });
        self.report("norm forward of a branch", "width", cols, Work::bytes(3 * len * ACT), &|| {
            let residual = Residual::After(branch.all());
            let (x, gamma, y, stats) = (x.all(), gamma.all(), y.all(), stats.all());
            b.run(NormForward { shape, x, residual, gamma, beta: None, y, stats }).unwrap();
        });
        self.report("norm backward", "width", cols, Work::bytes(4 * len * ACT), &|| {
            let (x, gamma, stats, dy, dx) = (x.all(), gamma.all(), stats.all(), dy.all(), y.all());
            let (dgamma, acc) = (dgamma.all(), Accumulate::Overwrite);
            let (dbeta, dsum, add_to_dx) = (None, None, true);
            let args = NormBackward { shape, x, gamma, stats, dy, dx, add_to_dx, dgamma, dbeta, dsum, acc };
            b.run(args).unwrap();
        });
    }

    fn add_scaled(&self, cols: usize) {
        let (ops, b, len) = (&self.ops, self.ops.backend, rows(cols) * cols);
        let [x, y] = [54, 55].map(|seed| ops.random(seed, len));
        self.report("scaled addition", "width", cols, Work::bytes(3 * len * ACT), &|| {
            b.run(AddScaled { x: Some(x.all()), y: y.all(), factor: 0.5, out: x.all() }).unwrap();
        });
    }

    fn glu(&self, ffn: usize) {
        let (ops, b, rows) = (&self.ops, self.ops.backend, rows(ffn));
        let len = rows * ffn;
        let [a, da] = [6, 7].map(|seed| ops.random(seed, len));
        let [h, dh] = [8, 9].map(|seed| ops.random(seed, 2 * len));
        let inputs = GluInputs::PLAIN;
        for (name, activation) in [("SwiGLU", Activation::Silu), ("GEGLU", Activation::Gelu)] {
            let report = |direction: &str, bytes: usize, call: &dyn Fn()| {
                self.report(&format!("{name} {direction}"), "width", ffn, Work::bytes(bytes), call);
            };
            report("forward", 3 * len * ACT, &|| {
                b.run(GluForward {
                    activation,
                    inputs,
                    rows,
                    ffn,
                    h: h.all(),
                    a: a.all(),
                    end: None,
                    amax: None,
                })
                .unwrap();
            });
            report("backward", 5 * len * ACT, &|| {
                let (h, da, dh) = (h.all(), da.all(), dh.all());
                b.run(GluBackward { activation, inputs, rows, ffn, h, da, dh, end: None, amax: None })
                    .unwrap();
            });
        }
    }

    fn embedding(&self, cols: usize) {
        let (ops, b, rows, vocab) = (&self.ops, self.ops.backend, rows(cols), 50_304);
        let len = rows * cols;
        let shape = EmbedShape { batch: rows / SEQ, seq: SEQ, cols, vocab };
        let ids = common::ids(10, rows, vocab);
        let tokens = b.alloc(DType::I32, rows).unwrap();
        b.write_i32(tokens.all(), &ids).unwrap();
        // The gradient of each distinct token is read and written.
        let touched = ids.into_iter().collect::<BTreeSet<i32>>().len() * cols;
        let [wte, dwte] = [11, 12].map(|seed| ops.random(seed, vocab * cols));
        let [out, dout] = [13, 14].map(|seed| ops.random(seed, len));
        self.report("embedding forward", "width", cols, Work::bytes(2 * len * ACT), &|| {
            let (tokens, wte, out) = (tokens.all(), wte.all(), out.all());
            b.run(EmbedForward { shape, tokens, wte, wpe: None, positions: None, documents: None, out })
                .unwrap();
        });
        self.report("embedding backward", "width", cols, Work::bytes((len + 2 * touched) * ACT), &|| {
            let (tokens, dout, dwte) = (tokens.all(), dout.all(), dwte.all());
            b.run(EmbedBackward { shape, tokens, documents: None, dout, dwte, dwpe: None }).unwrap();
        });
    }

    fn linear(&self, cols: usize) {
        let (ops, b, rows) = (&self.ops, self.ops.backend, rows(cols));
        let shape = LinearShape { rows, inputs: cols, outputs: cols };
        let [x, y] = [15, 16].map(|seed| ops.random(seed, rows * cols));
        let [w, dw] = [17, 18].map(|seed| ops.random(seed, cols * cols));
        let report = |name: &str, call: &dyn Fn()| {
            self.report(name, "width", cols, Work::flops(2 * rows * cols * cols), call);
        };
        let (x, y, w, dw) = (x.all(), y.all(), w.all(), dw.all());
        report("linear forward", &|| {
            b.run(LinearForward { shape, x, w, bias: None, y }).unwrap();
        });
        report("linear input gradient", &|| {
            b.run(LinearBackwardInput { shape, dy: x, w, dx: y }).unwrap();
        });
        report("linear weight gradient", &|| {
            let acc = Accumulate::Overwrite;
            b.run(LinearBackwardWeight { shape, dy: y, x, dw, acc }).unwrap();
        });
    }

    /// Measures rounding with the transpose, and a square layer.
    fn fp8(&self, cols: usize) {
        let (ops, b, rows) = (&self.ops, self.ops.backend, rows(cols));
        let (x, w) = (ops.random(22, rows * cols), ops.random(23, cols * cols));
        let [q, transposed] = [0, 1].map(|_| b.alloc(DType::Fp8E4m3, rows * cols).unwrap());
        let w8 = b.alloc(DType::Fp8E4m3, cols * cols).unwrap();
        let [x_scale, w_scale] = [0, 1].map(|_| b.alloc(DType::F32, 1).unwrap());
        let y = b.alloc(DType::Bf16, rows * cols).unwrap();
        let [x_amax, w_amax] = [0, 1].map(|_| b.alloc(DType::F32, 1).unwrap());
        let found = Amax { rows, cols, x: x.all(), end: None, amax: x_amax.all() };
        let args = QuantizeFp8 {
            rows,
            cols,
            dtype: DType::Fp8E4m3,
            x: x.all(),
            amax: x_amax.all(),
            q: Some(q.all()),
            transposed: Some(transposed.all()),
            scale: x_scale.all(),
            end: None,
        };
        // The input is read for the maximum and again for rounding; two outputs are written.
        self.report("FP8 rounding", "width", cols, Work::bytes(rows * cols * (2 * ACT + 2)), &|| {
            b.run(found).unwrap();
            b.run(args).unwrap();
        });
        b.run(Amax { rows: cols, x: w.all(), amax: w_amax.all(), ..found }).unwrap();
        let weights = QuantizeFp8 {
            rows: cols,
            x: w.all(),
            amax: w_amax.all(),
            q: Some(w8.all()),
            transposed: None,
            scale: w_scale.all(),
            ..args
        };
        b.run(weights).unwrap();
        let [a, b8] =
            [(&q, &x_scale), (&w8, &w_scale)].map(|(q, scale)| Fp8Operand { q: q.all(), scale: scale.all() });
        let (y, acc) = (y.all(), Accumulate::Overwrite);
        let gemm = GemmFp8 { rows, cols, depth: cols, a, b: b8, bias: None, y, acc };
        self.report("FP8 linear forward", "width", cols, Work::flops(2 * rows * cols * cols), &|| {
            b.run(gemm).unwrap();
        });
    }

    fn vocabulary(&self, vocab: usize) {
        if !self.wants("classifier") {
            return;
        }
        let (ops, b, rows) = (&self.ops, self.ops.backend, LOGITS / vocab);
        let shape = ClassifierShape { rows, vocab: vocab - 3, padded: vocab };
        let (logits, losses) = (ops.random(20, rows * vocab), b.alloc(DType::F32, rows).unwrap());
        let targets = b.alloc(DType::I32, rows).unwrap();
        b.write_i32(targets.all(), &common::ids(21, rows, vocab - 3)).unwrap();
        let scale = b.alloc(DType::F32, 1).unwrap();
        b.write_f32(scale.all(), &[1.0]).unwrap();
        for (name, softcap) in [("classifier", None), ("classifier with a cap", Some(30.0))] {
            self.report(name, "vocabulary", vocab, Work::bytes(2 * rows * vocab * ACT), &|| {
                let (logits, targets, losses) = (logits.all(), targets.all(), losses.all());
                let (grad_scale, weights) = (Some(scale.all()), None);
                b.run(FusedClassifier { shape, logits, targets, losses, grad_scale, weights, softcap })
                    .unwrap();
            });
        }
    }

    fn head_widths(&self) {
        for width in HEAD_WIDTHS {
            self.attention("head width", width, attention_shape(2048, width));
        }
    }

    fn sequences(&self) {
        for width in [64, 128] {
            let axis = format!("sequence, heads of {width}");
            SEQUENCES.into_iter().for_each(|seq| self.attention(&axis, seq, attention_shape(seq, width)));
        }
    }

    fn qk_norm(&self, width: usize) {
        if !self.wants("qk norm") {
            return;
        }
        let shape = attention_shape(2048, width);
        let (ops, b, len) = (&self.ops, self.ops.backend, shape.batch * shape.seq * shape.qkv_width());
        let [qkv, out] = [50, 51].map(|seed| ops.random(seed, len));
        let rope = b.alloc(DType::F32, shape.seq * shape.width).unwrap();
        b.write_f32(rope.all(), &common::random(52, rope.len())).unwrap();
        for (kind, name) in [(QkNorm::Head, "of heads"), (QkNorm::Full, "of all heads")] {
            let gammas = kind.gammas(shape).map(|cols| ops.random(53, cols));
            let dgammas = gammas.each_ref().map(|gamma| b.alloc(DType::F32, gamma.len()).unwrap());
            let (eps, offset, rope) = (1e-5, 0.0, Some(rope.all()));
            let [q_gamma, k_gamma] = gammas.each_ref().map(Tensor::all);
            let [dq_gamma, dk_gamma] = dgammas.each_ref().map(Tensor::all);
            let (qkv, out, acc) = (qkv.all(), out.all(), Accumulate::Overwrite);
            let work = || Work::bytes(2 * len * ACT);
            let norms = QkNorms { shape, kind, eps, offset, q_gamma, k_gamma, rope, documents: None };
            self.report(&format!("qk norm forward {name}"), "head width", width, work(), &|| {
                b.run(QkNormForward { norms, qkv, out }).unwrap();
            });
            let args = QkNormBackward { norms, qkv, dqkv: out, dq_gamma, dk_gamma, acc };
            // Of three arrays, the two thirds that are queries and keys.
            self.report(&format!("qk norm backward {name}"), "head width", width, work(), &|| {
                b.run(args).unwrap()
            });
        }
    }

    /// Measures long sequences with a window, and scores with a cap.
    fn options(&self) {
        for width in [64, 128, 256] {
            let plain = attention_shape(8192, width);
            let windowed = |window| AttentionOptions { window: Some(window), ..plain.options };
            for window in [1024, 4096] {
                let shape = AttentionShape { options: windowed(window), ..plain };
                self.attention(&format!("window, heads of {width}"), window, shape);
            }
            let options = AttentionOptions { softcap: Some(50.0.into()), ..plain.options };
            let shape = AttentionShape { options, ..attention_shape(2048, width) };
            self.attention("head width with cap", width, shape);
        }
    }

    fn attention(&self, axis: &str, size: usize, shape: AttentionShape) {
        if !self.wants("attention") {
            return;
        }
        let (s, rows, ops, b) = (shape, shape.batch * shape.seq, &self.ops, self.ops.backend);
        let [qkv, dqkv] = [40, 41].map(|seed| ops.random(seed, rows * s.qkv_width()));
        let [out, dout] = [42, 43].map(|seed| ops.random(seed, rows * s.heads * s.width));
        let lse = b.alloc(DType::F32, rows * s.heads).unwrap();
        // Two GEMMs in forward and five in backward, of which only the visible pairs count: half of them without a
        // window.
        let window = s.options.window.map_or(s.seq, |window| window.min(s.seq));
        let gemm = s.batch * s.heads * (2 * s.seq + 1 - window) * window * s.width;
        let (qkv, out, dout, lse, dqkv) = (qkv.all(), out.all(), dout.all(), lse.all(), dqkv.all());
        self.report("attention forward", axis, size, Work::flops(2 * gemm), &|| {
            b.run(AttentionForward { shape, qkv, rope: None, documents: None, out, lse }).unwrap();
        });
        self.report("attention backward", axis, size, Work::flops(5 * gemm), &|| {
            let args = AttentionBackward { shape, qkv, rope: None, documents: None, out, dout, lse, dqkv };
            b.run(args).unwrap();
        });
    }

    /// Prints the median time of calls. Each round has several calls, so that the device never waits for the host. The
    /// first round, which builds plans and compiles kernels, does not count.
    fn report(&self, name: &str, axis: &str, size: usize, work: Work, call: &dyn Fn()) {
        const ROUNDS: usize = 7;
        const CALLS: usize = 6;
        let b = self.ops.backend;
        let mut names = Vec::new();
        let mut rounds: Vec<f64> = (0..=ROUNDS)
            .map(|_| {
                b.begin_profile();
                (0..CALLS).for_each(|_| call());
                let times = KernelTime::by_name(&b.end_profile().unwrap());
                names = times.iter().map(|time| time.name.clone()).collect();
                times.iter().map(|time| time.seconds).sum::<f64>() * 1e6 / CALLS as f64
            })
            .skip(1)
            .collect();
        rounds.sort_by(f64::total_cmp);
        let (prefix, us, by) = (self.prefix, rounds[ROUNDS / 2], names.join(", "));
        let Work { bytes, flops } = work;
        print!(r#"{{"operation":"{prefix}{name}","axis":"{axis}","size":{size},"us":{us:.1},"#);
        println!(r#""bytes":{bytes},"flops":{flops},"by":"{by}"}}"#);
    }
}
