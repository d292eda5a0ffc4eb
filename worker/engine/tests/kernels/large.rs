//! Operands of more than 2^31 elements: their last rows must be computed like those of small operands. Only blocks at
//! the ends of a grid run, and only the memory that they access exists. Each operation runs in its own child process,
//! because the device differs. Sizes that are not supported are refused.

use std::process::{Command, ExitCode};

use xlaunch_engine::Precision::{Bf16, Fp32, Tf32};
use xlaunch_engine::testing::{AttentionVariant, force_attention};
use xlaunch_engine::*;

use crate::common::{ADAMW, adamw_scalars, ids, random};
use crate::{cpp_compiler, in_two_threads, open, to_bf16};

xlaunch_harness::tests! {
    needs cpp_compiler:
        offsets_beyond_2_31_are_computed_in_64_bits,
        more_sequences_than_a_grid_has_are_refused;
}

const CHILD: &str = "KERNELS_LARGE_CHILD";
const EDGE_BLOCKS: usize = 2;

/// Number of rows at either end of the inputs that are written: more than these blocks read.
const WRITTEN: usize = 32;
/// Number of rows at the end of the outputs that are compared; the last block computes them.
const ROWS: usize = 2;

/// An operand that exists only at its ends.
struct Ends<'a> {
    backend: &'a Backend,
    cols: usize,
    tensor: Tensor,
}

impl<'a> Ends<'a> {
    /// Allocates `rows` rows of `cols` elements with random first and last rows.
    fn random(backend: &'a Backend, seed: u64, rows: usize, cols: usize) -> Self {
        Self::random_of(backend, seed, rows, cols, |x| x)
    }

    fn random_of(backend: &'a Backend, seed: u64, rows: usize, cols: usize, f: fn(f32) -> f32) -> Self {
        let ends = Self::empty(backend, rows, cols);
        // The values are exact in BF16, too.
        let values: Vec<f32> = random(seed, WRITTEN * cols).into_iter().map(|x| f(to_bf16(x))).collect();
        let wide = backend.alloc(DType::F32, values.len()).unwrap();
        backend.write_f32(wide.all(), &values).unwrap();
        for start in [0, (rows - WRITTEN) * cols] {
            let slice = ends.tensor.slice(start..start + values.len());
            if slice.dtype() == DType::F32 {
                backend.write_f32(slice, &values).unwrap();
            } else {
                cast(backend, wide.all(), slice);
            }
        }
        ends
    }

    fn empty(backend: &'a Backend, rows: usize, cols: usize) -> Self {
        let tensor = backend.alloc(backend.activation_dtype(), rows * cols).unwrap();
        Self { backend, cols, tensor }
    }

    fn all(&self) -> Slice<'_> {
        self.tensor.all()
    }

    fn read(&self) -> Vec<f32> {
        self.read_last(ROWS)
    }

    fn read_last(&self, rows: usize) -> Vec<f32> {
        let mut values = vec![0.0; rows * self.cols];
        let last = self.tensor.slice(self.tensor.len() - values.len()..self.tensor.len());
        if last.dtype() == DType::F32 {
            self.backend.read_f32(last, &mut values).unwrap();
        } else {
            let wide = self.backend.alloc(DType::F32, values.len()).unwrap();
            cast(self.backend, last, wide.all());
            self.backend.read_f32(wide.all(), &mut values).unwrap();
        }
        values
    }
}

/// Casts in pieces for which all blocks run.
fn cast(backend: &Backend, x: Slice<'_>, y: Slice<'_>) {
    let piece = 2 * EDGE_BLOCKS * 256;
    for start in (0..x.len()).step_by(piece) {
        let range = start..(start + piece).min(x.len());
        backend.run(Cast { x: x.slice(range.clone()), y: y.slice(range) }).unwrap();
    }
}

/// An operation on this number of rows. Returns the values to compare.
type Operation = fn(&Backend, usize) -> Vec<f32>;

/// An operation, and the launches of it that run.
struct Large {
    name: &'static str,
    precision: Precision,
    /// Number of elements per row of the smallest operand with more than 2^31 elements.
    row: usize,
    run: Operation,
    /// Number of blocks at either end of a grid that run.
    edge_blocks: usize,
    /// Multiprocessors of the device: enough for one block per row in grid-stride loops.
    multiprocessors: usize,
}

impl Large {
    const fn new(name: &'static str, row: usize, run: Operation) -> Self {
        Self { name, precision: Fp32, row, run, edge_blocks: EDGE_BLOCKS, multiprocessors: 1 << 22 }
    }

    /// Returns a number of rows of which the last ones begin after 2^31 elements.
    fn rows(&self) -> usize {
        (1_usize << 31).div_ceil(self.row) + WRITTEN
    }

    /// Returns the tolerance of the suites `kernels` and `cuda_ops`, for single elements.
    fn tolerance(&self) -> f32 {
        match self.precision {
            Fp32 => 1e-5,
            Tf32 => 1e-2,
            Bf16 => 3e-2,
        }
    }
}

const OPERATIONS: [Large; 15] = [
    Large::new("SwiGLU", 4096, swiglu),
    Large::new("norm", 512, |b, rows| norm(b, NormKind::Layer, rows, 512)),
    Large::new("norm of wide rows", 2048, |b, rows| norm(b, NormKind::Rms, rows, 2048)),
    Large::new("norm of any rows", 500, |b, rows| norm(b, NormKind::Rms, rows, 500)),
    Large {
        edge_blocks: 4,
        ..Large::new("norm of heads", HEADS.0, |b, rows| qk_norm(b, QkNorm::Head, rows))
    },
    Large::new("norm of all heads", HEADS.0, |b, rows| qk_norm(b, QkNorm::Full, rows)),
    Large::new("scaled addition", 4096, add_scaled),
    Large::new("soft cap", 4096, softcap),
    Large::new("embedding", 512, embedding),
    Large::new("classifier", 1024, |b, rows| classifier(b, rows, 1000, 1024)),
    // Exactly the blocks that have elements.
    Large { multiprocessors: ADAMW_BLOCKS / 8, ..Large::new("AdamW", ADAMW_ROW, adamw) },
    Large { edge_blocks: 17, ..Large::new("attention", TILES.0, |b, rows| attention(b, rows, TILES.1)) },
    Large {
        precision: Tf32,
        edge_blocks: 17,
        ..Large::new("attention on tensor cores", TILES.0, |b, rows| attention(b, rows, TILES.1))
    },
    Large {
        precision: Bf16,
        edge_blocks: 17,
        ..Large::new("attention in BF16", TILES.0, |b, rows| attention(b, rows, TILES.1))
    },
    Large {
        precision: Bf16,
        edge_blocks: 16,
        ..Large::new("attention by whole heads", WHOLE.0, |b, rows| attention(b, rows, WHOLE.1))
    },
];

/// Number of elements of a block, and number of blocks, which is eight per multiprocessor.
const ADAMW_ROW: usize = 8 * 256;
const ADAMW_BLOCKS: usize = (1 << 31 >> 11) + WRITTEN;
/// Number of elements of a sequence of `out`, and its shape. A grid has at most 65535 sequences. Each kernel has as
/// many blocks per sequence as there are heads, so that those at the ends of grids work on the same sequences.
const TILES: (usize, [usize; 3]) = (8 * 17 * 256, [8, 17, 256]);
const WHOLE: (usize, [usize; 3]) = (80 * 16 * 32, [80, 16, 32]);
/// Number of elements of a row of queries, keys and values, and its heads and head width.
const HEADS: (usize, [usize; 2]) = (3 * 8 * 256, [8, 256]);

/// Runs the operation of a child; `None` in the process of the suite.
pub(crate) fn child() -> Option<ExitCode> {
    let name = std::env::var(CHILD).ok()?;
    let large = OPERATIONS.iter().find(|large| large.name == name)?;
    let (gpu, cpu) = (open(large.precision), Backend::cpu(1, PoolMode::On));
    // Backward for compute capability 9.0 reads statistics of blocks that do not run.
    force_attention(&gpu, Some(AttentionVariant::Portable));
    let (ours, theirs) = ((large.run)(&gpu, large.rows()), (large.run)(&cpu, WRITTEN));
    assert_eq!(ours.len(), theirs.len());
    for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
        let tolerance = large.tolerance() * b.abs().max(1.0);
        assert!((a - b).abs() <= tolerance, "{name}, element {i}: {a}, expected {b}");
    }
    Some(ExitCode::SUCCESS)
}

fn swiglu(b: &Backend, rows: usize) -> Vec<f32> {
    let ffn = 4096;
    let h = Ends::random(b, 1, rows, 2 * ffn);
    let da = Ends::random(b, 2, rows, ffn);
    let a = Ends::empty(b, rows, ffn);
    let dh = Ends::empty(b, rows, 2 * ffn);
    let (activation, inputs) = (Activation::Silu, GluInputs::PLAIN);
    b.run(GluForward { activation, inputs, rows, ffn, h: h.all(), a: a.all(), end: None, amax: None })
        .unwrap();
    b.run(GluBackward {
        activation,
        inputs,
        rows,
        ffn,
        h: h.all(),
        da: da.all(),
        dh: dh.all(),
        end: None,
        amax: None,
    })
    .unwrap();
    [a.read(), dh.read()].concat()
}

/// Runs forward and backward. The gradients of the parameters are sums over all rows, which do not run.
fn norm(b: &Backend, kind: NormKind, rows: usize, cols: usize) -> Vec<f32> {
    let shape = NormShape { rows, cols, kind, eps: 1e-5, offset: 0.0 };
    let x = Ends::random(b, 3, rows, cols);
    let [gamma, dgamma, dbeta] = [4, 0, 0].map(|seed| {
        let tensor = b.alloc(DType::F32, cols).unwrap();
        b.write_f32(tensor.all(), &random(seed, cols)).unwrap();
        tensor
    });
    let has_beta = kind == NormKind::Layer;
    let stats = b.alloc(DType::F32, shape.stats()).unwrap();
    let (x, gamma, stats_slice, beta) = (x.all(), gamma.all(), stats.all(), has_beta.then(|| gamma.all()));
    let y = Ends::empty(b, rows, cols);
    let residual = Residual::None;
    let args = NormForward { shape, x, residual, gamma, beta, y: y.all(), stats: stats_slice };
    b.run(args).unwrap();
    let mut results = y.read();
    drop(y);
    let mut last_stats = vec![0.0; ROWS];
    b.read_f32(stats.slice(stats.len() - ROWS..stats.len()), &mut last_stats).unwrap();
    results.extend(last_stats);

    let (dy, dx) = (Ends::random(b, 9, rows, cols), Ends::empty(b, rows, cols));
    let backward = NormBackward {
        shape,
        x,
        gamma,
        stats: stats_slice,
        dy: dy.all(),
        dx: dx.all(),
        add_to_dx: false,
        dgamma: dgamma.all(),
        dbeta: has_beta.then(|| dbeta.all()),
        dsum: None,
        acc: Accumulate::Overwrite,
    };
    b.run(backward).unwrap();
    results.extend(dx.read());
    results
}

/// Runs forward and backward. The gradients of the gammas are sums over all rows, which do not run.
fn qk_norm(b: &Backend, kind: QkNorm, rows: usize) -> Vec<f32> {
    let (row, [heads, width]) = HEADS;
    let options = AttentionOptions::new(width);
    let shape = AttentionShape { batch: rows, seq: 1, heads, kv_heads: heads, width, options };
    let [gamma, table] = [(16, kind.gammas(shape)[0]), (17, width)].map(|(seed, len)| {
        let tensor = b.alloc(DType::F32, len).unwrap();
        b.write_f32(tensor.all(), &random(seed, len)).unwrap();
        tensor
    });
    let (qkv, out) = (Ends::random(b, 18, rows, row), Ends::empty(b, rows, row));
    let (qkv, rope, eps, offset) = (qkv.all(), Some(table.all()), 1e-5, 0.0);
    let (q_gamma, k_gamma) = (gamma.all(), gamma.all());
    let norms = QkNorms { shape, kind, eps, offset, q_gamma, k_gamma, rope, documents: None };
    b.run(QkNormForward { norms, qkv, out: out.all() }).unwrap();
    let mut results = out.read();
    drop(out);
    let (dqkv, dgamma) = (Ends::random(b, 19, rows, row), b.alloc(DType::F32, 2 * gamma.len()).unwrap());
    let (dq_gamma, dk_gamma) = (dgamma.slice(0..gamma.len()), dgamma.slice(gamma.len()..dgamma.len()));
    let (dqkv_slice, acc) = (dqkv.all(), Accumulate::Overwrite);
    b.run(QkNormBackward { norms, qkv, dqkv: dqkv_slice, dq_gamma, dk_gamma, acc }).unwrap();
    results.extend(dqkv.read());
    results
}

fn add_scaled(b: &Backend, rows: usize) -> Vec<f32> {
    let [x, y] = [20, 21].map(|seed| Ends::random(b, seed, rows, 4096));
    b.run(AddScaled { x: Some(x.all()), y: y.all(), factor: 0.5, out: x.all() }).unwrap();
    x.read()
}

fn softcap(b: &Backend, rows: usize) -> Vec<f32> {
    let x = Ends::random(b, 22, rows, 4096);
    b.run(SoftCap { x: x.all(), cap: 0.5 }).unwrap();
    x.read()
}

fn embedding(b: &Backend, rows: usize) -> Vec<f32> {
    let (cols, vocab) = (512, 64);
    let shape = EmbedShape { batch: rows, seq: 1, cols, vocab };
    let (tokens, wte) = (b.alloc(DType::I32, rows).unwrap(), b.alloc(DType::F32, vocab * cols).unwrap());
    let last = ids(5, ROWS, vocab);
    b.write_i32(tokens.all(), &[vec![0; rows - ROWS], last].concat()).unwrap();
    b.write_f32(wte.all(), &random(6, vocab * cols)).unwrap();
    let out = Ends::empty(b, rows, cols);
    let (tokens, wte, out_slice) = (tokens.all(), wte.all(), out.all());
    let args =
        EmbedForward { shape, tokens, wte, wpe: None, positions: None, documents: None, out: out_slice };
    b.run(args).unwrap();
    out.read()
}

fn classifier(b: &Backend, rows: usize, vocab: usize, padded: usize) -> Vec<f32> {
    let shape = ClassifierShape { rows, vocab, padded };
    let logits = Ends::random(b, 7, rows, padded);
    let targets = b.alloc(DType::I32, rows).unwrap();
    b.write_i32(targets.all(), &[vec![0; rows - ROWS], ids(8, ROWS, vocab)].concat()).unwrap();
    let losses = Ends::empty(b, rows, 1);
    let scale = b.alloc(DType::F32, 1).unwrap();
    b.write_f32(scale.all(), &[0.5]).unwrap();
    let args = FusedClassifier {
        shape,
        logits: logits.all(),
        targets: targets.all(),
        losses: losses.all(),
        grad_scale: Some(scale.all()),
        weights: None,
        softcap: None,
    };
    b.run(args).unwrap();
    [losses.read(), logits.read()].concat()
}

fn adamw(b: &Backend, rows: usize) -> Vec<f32> {
    let [params, grads, m] = [10, 11, 12].map(|seed| Ends::random(b, seed, rows, ADAMW_ROW));
    // Its square root is computed, so it must not be negative.
    let v = Ends::random_of(b, 13, rows, ADAMW_ROW, f32::abs);
    let groups = b.alloc(DType::U8, (rows * ADAMW_ROW).div_ceil(GROUP_CHUNK)).unwrap();
    let written: Vec<u8> = (0..WRITTEN * ADAMW_ROW / GROUP_CHUNK).map(|i| (i % GROUPS) as u8).collect();
    for start in [0, groups.len() - written.len()] {
        b.write_u8(groups.slice(start..start + written.len()), &written).unwrap();
    }
    let [scalars, grad_norm_sq, loss, skipped] =
        [&adamw_scalars(1e-2, 10.0, 20.0)[..], &[0.04], &[3.0], &[0.0]].map(|values| {
            let tensor = b.alloc(DType::F32, values.len()).unwrap();
            b.write_f32(tensor.all(), values).unwrap();
            tensor
        });
    let step = AdamWStep {
        config: ADAMW,
        params: params.all(),
        grads: grads.all(),
        m: m.all(),
        v: v.all(),
        work: None,
        groups: groups.all(),
        scalars: scalars.all(),
        grad_norm_sq: grad_norm_sq.all(),
        loss: loss.all(),
        skipped: skipped.all(),
    };
    b.run(step).unwrap();
    [params.read(), m.read(), v.read()].concat()
}

/// Runs forward and backward of sequences with this length, number of heads and head width.
fn attention(b: &Backend, batch: usize, [seq, heads, width]: [usize; 3]) -> Vec<f32> {
    let options = AttentionOptions::new(width);
    let shape = AttentionShape { batch, seq, heads, kv_heads: heads, width, options };
    let (row, qkv_row) = (seq * heads * width, seq * shape.qkv_width());
    let (qkv, dout) = (Ends::random(b, 14, batch, qkv_row), Ends::random(b, 15, batch, row));
    let (out, dqkv) = (Ends::empty(b, batch, row), Ends::empty(b, batch, qkv_row));
    let lse = b.alloc(DType::F32, batch * heads * seq).unwrap();
    let (qkv, out_slice, lse, rope) = (qkv.all(), out.all(), lse.all(), None);
    b.run(AttentionForward { shape, qkv, rope, documents: None, out: out_slice, lse }).unwrap();
    let (dout, dqkv_slice) = (dout.all(), dqkv.all());
    let backward =
        AttentionBackward { shape, qkv, rope, documents: None, out: out_slice, dout, lse, dqkv: dqkv_slice };
    b.run(backward).unwrap();
    // Values of the last sequence, which all kernels have computed.
    [out, dqkv].map(|ends| ends.read_last(1)).concat()
}

/// Returns the report of an operation's child; empty if there is none.
fn report(large: &Large) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(CHILD, large.name).env("EMULATOR_EDGE_BLOCKS", large.edge_blocks.to_string());
    command.env("EMULATOR_MULTIPROCESSORS", large.multiprocessors.to_string());
    // This kernel would read partial sums of blocks that do not run.
    let output = command.env("EMULATOR_SKIP", "column_sum_final").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { String::new() } else { format!("{}: {stderr}", large.name) }
}

fn offsets_beyond_2_31_are_computed_in_64_bits() {
    let reports = in_two_threads(OPERATIONS.len(), |i| report(&OPERATIONS[i]));
    let failed: Vec<_> = reports.into_iter().filter(|report| !report.is_empty()).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn more_sequences_than_a_grid_has_are_refused() {
    // Attention in tiles, and by whole heads.
    for (precision, width) in [(Fp32, 8), (Bf16, 16)] {
        let gpu = open(precision);
        let options = AttentionOptions::new(width);
        let shape = AttentionShape { batch: 65_536, seq: 1, heads: 1, kv_heads: 1, width, options };
        let dtype = gpu.activation_dtype();
        let qkv = gpu.alloc(dtype, shape.batch * shape.qkv_width()).unwrap();
        let out = gpu.alloc(dtype, shape.batch * width).unwrap();
        let lse = gpu.alloc(DType::F32, shape.batch).unwrap();
        let (qkv, out, lse) = (qkv.all(), out.all(), lse.all());
        let refused = gpu.run(AttentionForward { shape, qkv, rope: None, documents: None, out, lse });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("65536") && error.contains("too large: CUDA allows"), "{error}");
    }
}
