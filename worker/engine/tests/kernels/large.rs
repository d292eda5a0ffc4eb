//! Operands of more than 2^31 elements: their last rows are computed as those of small ones. Only blocks at the ends of
//! a grid run, and only the memory that they access exists.

use std::process::{Command, ExitCode};

use xlaunch_engine::Precision::Fp32;
use xlaunch_engine::*;

use crate::common::{ids, random};
use crate::{cpp_compiler, open};

xlaunch_harness::tests! {
    needs cpp_compiler: offsets_beyond_2_31_are_computed_in_64_bits;
}

const CHILD: &str = "KERNELS_LARGE_CHILD";
const EDGE_BLOCKS: usize = 2;

/// Rows at either end of the inputs that are written: more than these blocks read.
const WRITTEN: usize = 32;
/// Rows at the end of the outputs that are compared, which the last block computes.
const ROWS: usize = 2;

/// An operand that exists at its ends only.
struct Ends<'a> {
    backend: &'a dyn Backend,
    /// Of the rows that are compared.
    offset: usize,
    tensor: Tensor,
}

impl<'a> Ends<'a> {
    /// `rows` rows of `cols` elements, the first and last ones random.
    fn random(backend: &'a dyn Backend, seed: u64, rows: usize, cols: usize) -> Self {
        let ends = Self::empty(backend, rows, cols);
        let values = random(seed, WRITTEN * cols);
        let last = (rows - WRITTEN) * cols;
        for start in [0, last] {
            backend.write_f32(ends.tensor.slice(start..start + values.len()), &values).unwrap();
        }
        ends
    }

    fn empty(backend: &'a dyn Backend, rows: usize, cols: usize) -> Self {
        let tensor = backend.alloc(DType::F32, rows * cols).unwrap();
        Self { backend, offset: (rows - ROWS) * cols, tensor }
    }

    fn all(&self) -> Slice<'_> {
        self.tensor.all()
    }

    fn read(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.tensor.len() - self.offset];
        self.backend.read_f32(self.tensor.slice(self.offset..self.tensor.len()), &mut values).unwrap();
        values
    }
}

/// One on that many rows; returns what is compared.
type Operation = fn(&dyn Backend, usize) -> Vec<f32>;

/// Runs the operations in the process of a child; `None` in that of the suite.
pub(crate) fn child() -> Option<ExitCode> {
    std::env::var_os(CHILD)?;
    let (gpu, cpu) = (open(Fp32), CpuBackend::new(1, PoolMode::On));
    let operations: [(&str, usize, Operation); 4] = [
        ("SwiGLU", 1 << 31 >> 13, swiglu),
        ("norm", (1 << 31) / 512, norm),
        ("embedding", (1 << 31) / 512, embedding),
        ("classifier", (1 << 31) / 1024, classifier),
    ];
    for (name, rows, run) in operations {
        let (large, small) = (run(&gpu, rows + WRITTEN), run(&cpu, WRITTEN));
        assert_eq!(large.len(), small.len());
        for (i, (a, b)) in large.iter().zip(&small).enumerate() {
            assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{name}, element {i}: {a}, expected {b}");
        }
    }
    Some(ExitCode::SUCCESS)
}

fn swiglu(b: &dyn Backend, rows: usize) -> Vec<f32> {
    let ffn = 4096;
    let h = Ends::random(b, 1, rows, 2 * ffn);
    let da = Ends::random(b, 2, rows, ffn);
    let a = Ends::empty(b, rows, ffn);
    let dh = Ends::empty(b, rows, 2 * ffn);
    b.swiglu_forward(SwigluForward { rows, ffn, h: h.all(), a: a.all() }).unwrap();
    b.swiglu_backward(SwigluBackward { rows, ffn, h: h.all(), da: da.all(), dh: dh.all() }).unwrap();
    [a.read(), dh.read()].concat()
}

fn norm(b: &dyn Backend, rows: usize) -> Vec<f32> {
    let cols = 512;
    let shape = NormShape { rows, cols, kind: NormKind::Rms, eps: 1e-5 };
    let x = Ends::random(b, 3, rows, cols);
    let gamma = b.alloc(DType::F32, cols).unwrap();
    b.write_f32(gamma.all(), &random(4, cols)).unwrap();
    let (y, stats) = (Ends::empty(b, rows, cols), Ends::empty(b, rows, 1));
    let (x, gamma, beta) = (x.all(), gamma.all(), None);
    let args = NormForward { shape, x, residual: None, gamma, beta, y: y.all(), stats: stats.all() };
    b.norm_forward(args).unwrap();
    [y.read(), stats.read()].concat()
}

fn embedding(b: &dyn Backend, rows: usize) -> Vec<f32> {
    let (cols, vocab) = (512, 64);
    let shape = EmbedShape { batch: rows, seq: 1, cols, vocab };
    let (tokens, wte) = (b.alloc(DType::I32, rows).unwrap(), b.alloc(DType::F32, vocab * cols).unwrap());
    let last = ids(5, ROWS, vocab);
    b.write_i32(tokens.all(), &[vec![0; rows - ROWS], last].concat()).unwrap();
    b.write_f32(wte.all(), &random(6, vocab * cols)).unwrap();
    let out = Ends::empty(b, rows, cols);
    let (tokens, wte, out_slice) = (tokens.all(), wte.all(), out.all());
    let args = EmbedForward { shape, tokens, wte, wpe: None, positions: None, out: out_slice };
    b.embed_forward(args).unwrap();
    out.read()
}

fn classifier(b: &dyn Backend, rows: usize) -> Vec<f32> {
    let (vocab, padded) = (1000, 1024);
    let shape = ClassifierShape { rows, vocab, padded };
    let logits = Ends::random(b, 7, rows, padded);
    let targets = b.alloc(DType::I32, rows).unwrap();
    b.write_i32(targets.all(), &[vec![0; rows - ROWS], ids(8, ROWS, vocab)].concat()).unwrap();
    let losses = Ends::empty(b, rows, 1);
    let (logits_slice, targets, losses_slice, grad_scale) =
        (logits.all(), targets.all(), losses.all(), Some(0.5));
    let args = FusedClassifier { shape, logits: logits_slice, targets, losses: losses_slice, grad_scale };
    b.classifier(args).unwrap();
    [losses.read(), logits.read()].concat()
}

fn offsets_beyond_2_31_are_computed_in_64_bits() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(CHILD, "1").env("EMULATOR_EDGE_BLOCKS", EDGE_BLOCKS.to_string());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
