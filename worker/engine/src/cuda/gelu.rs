//! Linear layers before and behind GELU: which way, and its launches.
//!
//! The epilogue of a cuBLASLt product spares the pass in which a kernel reads and writes `[N,F]` once more. But a product
//! with such an epilogue can be slower than a plain one by as much. So where an operation is first met, all ways that it
//! can go are timed, each as a whole and on the operation's own operands, and the choice is kept on disk. Without a choice
//! to make (F32, rows that are no multiples of 8 elements, deterministic runs, captures) it is the kernel.
//!
//! Every way writes the same outputs and partial sums, and reads none of them, so any may follow any other.

use std::cell::RefCell;
use std::collections::HashMap;

use super::gemm::{Epilogue, plain, transposed};
use super::kernels::{COMMON, Launch, args};
use super::{CudaBackend, THREADS, expect_grad, is_bf16};
use crate::DType;
use crate::backend::{Backend, Result};
use crate::shapes::{Accumulate, LinearShape};
use crate::tensor::Slice;

/// Eights of a thread of `gelu_fwd`: EIGHTS there.
const EIGHTS: usize = 4;

/// Who computes GELU or its slope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// A kernel, in a pass of its own over what a product wrote.
    Kernel,
    /// The product's epilogue; the bias' gradient, in backward, takes a pass of its own.
    Epilogue,
    /// The product's epilogue, which forms the bias' gradient too.
    EpilogueWithSums,
}

/// What a choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Site {
    operation: &'static str,
    shape: LinearShape,
    /// How many ways there are.
    ways: usize,
}

/// The ways that were found the fastest so far.
#[derive(Debug, Default)]
pub(super) struct Choices(RefCell<HashMap<Site, Way>>);

impl CudaBackend {
    /// [`Backend::linear_gelu_fwd`].
    pub(super) fn linear_gelu_forward(
        &self,
        s: LinearShape,
        x: Slice<'_>,
        w: Slice<'_>,
        bias: Slice<'_>,
        h: Slice<'_>,
        a: Slice<'_>,
    ) -> Result<()> {
        self.act(x, s.rows * s.inputs);
        self.act(w, s.outputs * s.inputs);
        self.act(bias, s.outputs);
        [h, a].into_iter().for_each(|y| self.act(y, s.rows * s.outputs));
        let product = |epilogue, y| {
            let (m, n, k) = (s.outputs, s.rows, s.inputs);
            // SAFETY: checked above; outputs are no inputs by the operation's contract.
            unsafe { self.gemm.product(m, n, k, transposed(w), plain(x), epilogue, y, false) }
        };
        let go = |way| match way {
            Way::Kernel => {
                product(Epilogue::Bias(bias), h)?;
                let launch = Launch::blocks(h.len().div_ceil(8 * EIGHTS * THREADS as usize), THREADS);
                // SAFETY: checked above.
                unsafe { self.launch("gelu_fwd", launch, args![h, a, h.len()]) }
            }
            Way::Epilogue | Way::EpilogueWithSums => product(Epilogue::Gelu { bias, h }, a),
        };
        let ways = [Way::Kernel, Way::Epilogue];
        let site = Site { operation: "linear_gelu_fwd", shape: s, ways: ways.len() };
        go(self.fastest(site, s.outputs, &[x, w, bias, h, a], &ways, go)?)
    }

    /// [`Backend::gelu_linear_bwd`].
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(super) fn gelu_linear_backward(
        &self,
        s: LinearShape,
        dy: Slice<'_>,
        w: Slice<'_>,
        h: Slice<'_>,
        dh: Slice<'_>,
        dbias: Slice<'_>,
        acc: Accumulate,
    ) -> Result<()> {
        let (rows, cols) = (s.rows, s.inputs);
        self.act(dy, rows * s.outputs);
        self.act(w, s.outputs * cols);
        [h, dh].into_iter().for_each(|x| self.act(x, rows * cols));
        expect_grad(dbias, cols);
        // Whichever way it goes, a step asks the pool for the same.
        let launch = self.sums_of_columns(rows, cols);
        let partials = self.alloc(DType::F32, launch.grid.1 * cols)?;
        let product = |epilogue| {
            // SAFETY: checked above; outputs are no inputs by the operation's contract.
            unsafe { self.gemm.product(cols, rows, s.outputs, plain(w), plain(dy), epilogue, dh, false) }
        };
        // dh, and either the partial sums of its rows or dbias.
        let go = |way| match way {
            Way::Kernel => {
                product(Epilogue::None)?;
                let args = args![h, dh, partials.all(), rows, cols];
                // SAFETY: checked above; there are as many rows of partial sums as of blocks.
                unsafe { self.launch("gelu_bwd", launch, args) }
            }
            Way::Epilogue => {
                product(Epilogue::GeluSlope { h, dbias: None })?;
                let args = args![dh, partials.all(), rows, cols];
                // SAFETY: as above.
                unsafe { self.launch("column_sum_partials", launch, args) }
            }
            Way::EpilogueWithSums => product(Epilogue::GeluSlope { h, dbias: Some(dbias) }),
        };
        // An epilogue writes sums in the type of its output, and adds to none.
        let sums = is_bf16(dbias) && acc == Accumulate::Overwrite;
        let ways = [Way::Kernel, Way::Epilogue, Way::EpilogueWithSums];
        let ways = if sums { &ways[..] } else { &ways[..2] };
        let site = Site { operation: "gelu_linear_bwd", shape: s, ways: ways.len() };
        let way = self.fastest(site, cols, &[dy, w, h, dh, dbias], ways, go)?;
        go(way)?;
        if way == Way::EpilogueWithSums {
            return Ok(());
        }
        self.column_sum_final(&partials, launch.grid.1, cols, &[dbias], acc)
    }

    /// The fastest of these ways, the first of which every shape and type can go.
    fn fastest(
        &self,
        site: Site,
        cols: usize,
        operands: &[Slice<'_>],
        ways: &[Way],
        go: impl Fn(Way) -> Result<()>,
    ) -> Result<Way> {
        let eights = cols.is_multiple_of(8) && operands.iter().all(|x| x.address().is_multiple_of(16));
        let no_choice = match () {
            () if self.activations != DType::Bf16 => Some("activations are not bf16"),
            () if !eights => Some("rows are no multiples of 8 elements"),
            () if self.deterministic => Some("the run is to be deterministic"),
            () => None,
        };
        let (way, reason) = match no_choice {
            Some(reason) => (Way::Kernel, reason),
            None => match self.fastest_by_time(site, ways, go)? {
                Some(way) => (way, "it takes longer, or the library has none"),
                None => (Way::Kernel, "it was first met in a capture, which runs nothing"),
            },
        };
        let fastest = (way == Way::Kernel).then_some(("the epilogue", reason));
        self.fallback.took(site.operation, site.shape, way.name(), fastest);
        Ok(way)
    }

    /// The same by time; `None` where none was chosen and time cannot be taken.
    fn fastest_by_time(
        &self,
        site: Site,
        ways: &[Way],
        go: impl Fn(Way) -> Result<()>,
    ) -> Result<Option<Way>> {
        if let Some(way) = self.gelu.0.borrow().get(&site) {
            return Ok(Some(*way));
        }
        // What our kernels take is part of the comparison.
        let kernels = COMMON.map(|(source, _)| source.text).concat();
        let name = format!("{site:?} {kernels}");
        let found =
            self.gemm.fastest_way(&name, ways.len(), |index| go(ways[index]))?.map(|index| ways[index]);
        if let Some(way) = found {
            self.gelu.0.borrow_mut().insert(site, way);
        }
        Ok(found)
    }
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "a kernel",
            Self::Epilogue => "the epilogue",
            Self::EpilogueWithSums => "the epilogue, which sums too",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaOptions;
    use crate::tensor::Tensor;
    use crate::{EngineError, PoolMode, Precision};

    /// Which way is the fastest decides which one others test.
    #[test]
    fn every_way_gives_the_same() {
        let backend = match CudaBackend::open(0, CudaOptions::new(Precision::Bf16, PoolMode::On)) {
            Ok(backend) => backend,
            Err(EngineError::Library { .. } | EngineError::Device { .. }) => {
                println!("skipped: no GPU here");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        for (rows, inputs, ffn, outputs) in [(67, 40, 48, 24), (130, 72, 1536, 40), (1999, 24, 264, 768)] {
            let s = LinearShape { rows, inputs, outputs: ffn };
            let kernel = run(&backend, s, outputs, Way::Kernel);
            for way in [Way::Epilogue, Way::EpilogueWithSums] {
                for ((name, ours), (_, theirs)) in run(&backend, s, outputs, way).iter().zip(&kernel) {
                    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
                    let difference = norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b));
                    let distance = difference / norm(&mut theirs.iter().copied());
                    // Results are rounded once or twice, to 8 bits: 2^-9 = 2e-3 at most. Infinities and NaN fail, too.
                    assert!(distance < 8e-3, "{name} of {s:?} by {way:?}: {distance:.2e}");
                }
            }
        }
    }

    /// h, a, dh and dbias, by this way.
    fn run(backend: &CudaBackend, s: LinearShape, outputs: usize, way: Way) -> [(&'static str, Vec<f32>); 4] {
        let behind = LinearShape { rows: s.rows, inputs: s.outputs, outputs };
        let forward_way = if way == Way::Kernel { way } else { Way::Epilogue };
        let forward = Site { operation: "linear_gelu_fwd", shape: s, ways: 2 };
        let backward = Site { operation: "gelu_linear_bwd", shape: behind, ways: 3 };
        backend.gelu.0.borrow_mut().extend([(forward, forward_way), (backward, way)]);
        let tensor = |values: &[f32]| {
            let wide = backend.alloc(DType::F32, values.len()).unwrap();
            let tensor = backend.alloc(DType::Bf16, values.len()).unwrap();
            backend.write_f32(wide.all(), values).unwrap();
            backend.cast(wide.all(), tensor.all()).unwrap();
            tensor
        };
        // Numbers in [-1, 1).
        let input = |seed: u64, len: usize| {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
            };
            tensor(&(0..len).map(|_| next()).collect::<Vec<_>>())
        };
        let output = |len: usize| tensor(&vec![f32::NAN; len]);
        let (x, w, bias) = (input(1, s.rows * s.inputs), input(2, s.outputs * s.inputs), input(3, s.outputs));
        let (next, dy) = (input(4, outputs * s.outputs), input(5, s.rows * outputs));
        let (h, a) = (output(s.rows * s.outputs), output(s.rows * s.outputs));
        let (dh, dbias) = (output(s.rows * s.outputs), output(s.outputs));
        backend.linear_gelu_fwd(s, x.all(), w.all(), bias.all(), h.all(), a.all()).unwrap();
        let acc = Accumulate::Overwrite;
        backend.gelu_linear_bwd(behind, dy.all(), next.all(), h.all(), dh.all(), dbias.all(), acc).unwrap();
        let read = |tensor: &Tensor| {
            let mut values = vec![0.0; tensor.len()];
            backend.read_f32(tensor.all(), &mut values).unwrap();
            values
        };
        [("h", &h), ("a", &a), ("dh", &dh), ("dbias", &dbias)].map(|(name, tensor)| (name, read(tensor)))
    }
}
