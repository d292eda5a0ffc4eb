//! Every operation as a function of host values, on any back end: takes inputs, and returns named outputs and
//! gradients.
//!
//! Outputs are NaN before they are written, so that elements missed by an operation are noticed.

#![allow(dead_code, clippy::unwrap_used, clippy::cast_precision_loss, reason = "helpers of several tests")]

pub(crate) mod cases;
pub(crate) mod decoding;
pub(crate) mod documents;
pub(crate) mod experts;

use std::cell::LazyCell;
use std::ops::Deref;
use std::rc::Rc;

use xlaunch_engine::*;

pub(crate) use cases::Case;

/// All activation functions.
pub(crate) const ACTIVATIONS: [Activation; 5] =
    [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu2, Activation::QuickGelu];

/// Named results of one operation.
pub(crate) type Outputs = Vec<(&'static str, Vec<f32>)>;

/// Returns `len` numbers in [-1, 1) that depend only on the seed.
pub(crate) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    for _ in 0..8 {
        next();
    }
    (0..len).map(|_| next()).collect()
}

/// Inputs of a case, which are computed when they are first used: a suite runs few of all cases at a time.
#[derive(Clone)]
pub(crate) struct Values(Rc<LazyCell<Vec<f32>, MakeValues>>);

type MakeValues = Box<dyn FnOnce() -> Vec<f32>>;

impl Values {
    pub(crate) fn new(make: impl FnOnce() -> Vec<f32> + 'static) -> Self {
        Self(Rc::new(LazyCell::new(Box::new(make))))
    }

    pub(crate) fn random(seed: u64, len: usize) -> Self {
        Self::new(move || random(seed, len))
    }

    pub(crate) fn map(self, f: impl Fn(f32) -> f32 + 'static) -> Self {
        Self::new(move || self.iter().copied().map(f).collect())
    }
}

impl Deref for Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

/// Returns `len` ids below `vocab`; many are repeated.
pub(crate) fn ids(seed: u64, len: usize, vocab: usize) -> Vec<i32> {
    random(seed, len).iter().map(|x| ((x.abs() * vocab as f32) as i32).min(vocab as i32 - 1)).collect()
}

/// Operand that a norm adds.
#[derive(Clone, Copy)]
pub(crate) enum Added<'a> {
    Nothing,
    /// The branch that is added to the input.
    Before(&'a [f32]),
    /// The stream to which the norm is added.
    After(&'a [f32]),
}

/// The operations of one back end over host values.
pub(crate) struct Ops<'a> {
    pub(crate) backend: &'a Backend,
    /// Element type of parameters' gradients.
    pub(crate) grads: DType,
}

/// Returns the operands for these bounds.
fn operands(bounds: &Option<[Tensor; 2]>) -> Option<Documents<'_>> {
    bounds.as_ref().map(|[first, last]| Documents { first: first.all(), last: last.all() })
}

impl Ops<'_> {
    fn tensor(&self, dtype: DType, values: &[f32]) -> Tensor {
        let tensor = self.backend.alloc(dtype, values.len()).unwrap();
        if dtype == DType::F32 {
            self.backend.write_f32(tensor.all(), values).unwrap();
        } else {
            let wide = self.tensor(DType::F32, values);
            self.backend.run(Cast { x: wide.all(), y: tensor.all() }).unwrap();
        }
        tensor
    }

    fn act(&self, values: &[f32]) -> Tensor {
        self.tensor(self.backend.activation_dtype(), values)
    }

    fn maybe_act(&self, values: Option<&[f32]>) -> Option<Tensor> {
        values.map(|values| self.act(values))
    }

    fn ints(&self, values: &[i32]) -> Tensor {
        let tensor = self.backend.alloc(DType::I32, values.len()).unwrap();
        self.backend.write_i32(tensor.all(), values).unwrap();
        tensor
    }

    /// Allocates an output, which is NaN until written.
    fn out(&self, len: usize) -> Tensor {
        self.act(&vec![f32::NAN; len])
    }

    fn out_f32(&self, len: usize) -> Tensor {
        self.tensor(DType::F32, &vec![f32::NAN; len])
    }

    /// Allocates a parameter's gradient: NaN, or initial values that are added to.
    fn grad(&self, acc: Accumulate, len: usize) -> Tensor {
        let values = if acc == Accumulate::Add { random(77, len) } else { vec![f32::NAN; len] };
        self.tensor(self.grads, &values)
    }

    /// Returns the bounds of documents of these lengths, which fill rows of `seq` tokens.
    fn bounds(&self, lengths: Option<&[usize]>, seq: usize) -> Option<[Tensor; 2]> {
        let [mut first, mut last] = [Vec::new(), Vec::new()];
        for length in lengths? {
            let start = first.len() % seq;
            first.extend(vec![i32::try_from(start).unwrap(); *length]);
            last.extend(vec![i32::try_from(start + length - 1).unwrap(); *length]);
        }
        Some([self.ints(&first), self.ints(&last)])
    }

    /// Returns activations in [-1, 1).
    pub(crate) fn random(&self, seed: u64, len: usize) -> Tensor {
        self.act(&random(seed, len))
    }

    pub(crate) fn read(&self, tensor: &Tensor) -> Vec<f32> {
        self.read_slice(tensor.all())
    }

    fn read_slice(&self, slice: Slice<'_>) -> Vec<f32> {
        let mut values = vec![0.0; slice.len()];
        self.backend.read_f32(slice, &mut values).unwrap();
        values
    }

    pub(crate) fn embed(
        &self,
        s: EmbedShape,
        tokens: &[i32],
        wte: &[f32],
        wpe: Option<&[f32]>,
        lengths: Option<&[usize]>,
        dout: &[f32],
    ) -> Outputs {
        let bounds = self.bounds(lengths, s.seq);
        let documents = operands(&bounds);
        let (tokens, wte_t, wpe_t) = (self.ints(tokens), self.act(wte), self.maybe_act(wpe));
        let out = self.out(dout.len());
        let wpe_slice = wpe_t.as_ref().map(Tensor::all);
        let (shape, tokens) = (s, tokens.all());
        let (wte_slice, wpe, positions) = (wte_t.all(), wpe_slice, None);
        let forward =
            EmbedForward { shape, tokens, wte: wte_slice, wpe, positions, documents, out: out.all() };
        self.backend.run(forward).unwrap();
        // These gradients always accumulate.
        let dwte = self.grad(Accumulate::Add, wte.len());
        let dwpe = wpe.map(|wpe| self.grad(Accumulate::Add, wpe.len()));
        let dout = self.act(dout);
        let (dout, dwpe_slice) = (dout.all(), dwpe.as_ref().map(Tensor::all));
        let backward = EmbedBackward { shape, tokens, documents, dout, dwte: dwte.all(), dwpe: dwpe_slice };
        self.backend.run(backward).unwrap();
        let mut outputs = vec![("out", self.read(&out)), ("dwte", self.read(&dwte))];
        outputs.extend(dwpe.map(|dwpe| ("dwpe", self.read(&dwpe))));
        outputs
    }

    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(crate) fn norm(
        &self,
        s: NormShape,
        x: &[f32],
        added: Added<'_>,
        gamma: &[f32],
        beta: Option<&[f32]>,
        dy: &[f32],
        residual: Option<&[f32]>,
        with_sum: bool,
        acc: Accumulate,
    ) -> Outputs {
        let (x, gamma) = (self.act(x), self.act(gamma));
        let beta = self.maybe_act(beta);
        let (y, stats) = (self.out(dy.len()), self.out_f32(s.stats()));
        let (b, mut outputs) = (self.backend, Outputs::new());
        let added = match added {
            Added::Nothing => None,
            Added::Before(branch) => Some((self.act(branch), Some(self.out(dy.len())))),
            Added::After(stream) => Some((self.act(stream), None)),
        };
        let forward = NormForward {
            shape: s,
            x: x.all(),
            residual: match &added {
                None => Residual::None,
                Some((branch, Some(sum))) => {
                    Residual::Before(ResidualAdd { branch: branch.all(), sum: sum.all() })
                }
                Some((stream, None)) => Residual::After(stream.all()),
            },
            gamma: gamma.all(),
            beta: beta.as_ref().map(Tensor::all),
            y: y.all(),
            stats: stats.all(),
        };
        b.run(forward).unwrap();
        let x = match added {
            Some((_, Some(sum))) => {
                outputs.push(("sum", self.read(&sum)));
                sum
            }
            _ => x,
        };
        let dx = match residual {
            Some(residual) => self.act(residual),
            None => self.out(dy.len()),
        };
        let (dy, dgamma) = (self.act(dy), self.grad(acc, s.cols));
        let dbeta = beta.as_ref().map(|_| self.grad(acc, s.cols));
        let dsum = with_sum.then(|| self.grad(acc, s.cols));
        let backward = NormBackward {
            shape: s,
            x: x.all(),
            gamma: gamma.all(),
            stats: stats.all(),
            dy: dy.all(),
            dx: dx.all(),
            add_to_dx: residual.is_some(),
            dgamma: dgamma.all(),
            dbeta: dbeta.as_ref().map(Tensor::all),
            dsum: dsum.as_ref().map(Tensor::all),
            acc,
        };
        b.run(backward).unwrap();
        outputs.extend(
            [("y", &y), ("stats", &stats), ("dx", &dx), ("dgamma", &dgamma)].map(|(n, t)| (n, self.read(t))),
        );
        outputs.extend(dbeta.map(|dbeta| ("dbeta", self.read(&dbeta))));
        outputs.extend(dsum.map(|dsum| ("dsum", self.read(&dsum))));
        outputs
    }

    pub(crate) fn linear(
        &self,
        s: LinearShape,
        x: &[f32],
        w: &[f32],
        bias: Option<&[f32]>,
        dy: &[f32],
        acc: Accumulate,
    ) -> Outputs {
        let (b, x, w) = (self.backend, self.act(x), self.act(w));
        let bias = self.maybe_act(bias);
        let (y, dx) = (self.out(dy.len()), self.out(x.len()));
        let bias_slice = bias.as_ref().map(Tensor::all);
        let shape = s;
        let forward = LinearForward { shape, x: x.all(), w: w.all(), bias: bias_slice, y: y.all() };
        b.run(forward).unwrap();
        let (dy, dw) = (self.act(dy), self.grad(acc, w.len()));
        let (dy, dbias) = (dy.all(), self.grad(acc, s.outputs));
        b.run(LinearBackwardInput { shape, dy, w: w.all(), dx: dx.all() }).unwrap();
        b.run(LinearBackwardWeight { shape, dy, x: x.all(), dw: dw.all(), acc }).unwrap();
        let (rows, cols) = (s.rows, s.outputs);
        b.run(ColumnSum { rows, cols, x: dy, out: dbias.all(), acc }).unwrap();
        [("y", &y), ("dx", &dx), ("dw", &dw), ("dbias", &dbias)].map(|(n, t)| (n, self.read(t))).into()
    }

    /// Products of parts of matrices that are 3 columns wider, as they are and transposed, written to a part of one.
    pub(crate) fn parts(&self, [rows, cols, depth]: [usize; 3], x: &[f32], acc: Accumulate) -> Outputs {
        let act = self.act(x);
        let part = |rows: usize, cols: usize| Matrix {
            slice: act.slice(2..2 + (rows - 1) * (cols + 3) + cols),
            stride: cols + 3,
            transposed: false,
        };
        let stride = cols + 3;
        let run = |a: Matrix<'_>, b: Matrix<'_>| {
            let c = self.act(&x[..rows * stride]);
            let slice = c.slice(1..1 + (rows - 1) * stride + cols);
            let c_part = Matrix { slice, stride, transposed: false };
            self.backend.run(Gemm { rows, cols, depth, a, b, factor: 1.5, c: c_part, acc }).unwrap();
            self.read(&c)
        };
        let plain = run(part(rows, depth), part(depth, cols));
        let transposed = run(part(depth, rows).t(), part(cols, depth).t());
        vec![("c", plain), ("of transposed", transposed)]
    }

    /// A linear layer and its gradients in FP8, and the rounded x.
    pub(crate) fn fp8(
        &self,
        s: LinearShape,
        x: &[f32],
        w: &[f32],
        bias: Option<&[f32]>,
        dy: &[f32],
        acc: Accumulate,
    ) -> Outputs {
        let LinearShape { rows, inputs, outputs } = s;
        let (e4m3, e5m2) = (DType::Fp8E4m3, DType::Fp8E5m2);
        let is_diagonal = |at: usize| at.is_multiple_of(inputs + 1);
        let identity: Vec<f32> =
            (0..inputs * inputs).map(|at| f32::from(u8::from(is_diagonal(at)))).collect();
        let x = self.quantized([rows, inputs], e4m3, x, None);
        let [w, dy, identity] =
            [(outputs, inputs, e4m3, w), (rows, outputs, e5m2, dy), (inputs, inputs, e4m3, &identity)]
                .map(|(rows, cols, dtype, values)| self.quantized([rows, cols], dtype, values, None));
        let bias = self.maybe_act(bias);
        let bias = bias.as_ref().map(Tensor::all);
        let gemm = |[rows, cols, depth]: [usize; 3], a, b, bias: Option<Slice<'_>>, acc, y: Tensor| {
            let args = GemmFp8 { rows, cols, depth, a, b, bias, y: y.all(), acc };
            self.backend.run(args).unwrap();
            self.read(&y)
        };
        let new = Accumulate::Overwrite;
        let sizes = [rows, outputs, inputs];
        let y = gemm(sizes, x.rows(), w.rows(), bias, new, self.out(rows * outputs));
        let sizes = [rows, inputs, outputs];
        let dx = gemm(sizes, dy.rows(), w.columns(), None, new, self.out(rows * inputs));
        let sizes = [outputs, inputs, rows];
        let dw = gemm(sizes, dy.columns(), x.columns(), None, acc, self.grad(acc, outputs * inputs));
        let sizes = [rows, inputs, inputs];
        let rounded = gemm(sizes, x.rows(), identity.rows(), None, new, self.out(rows * inputs));
        let scales = [&x, &w, &dy].map(|operand| self.read(&operand.scale)[0]);
        vec![("y", y), ("dx", dx), ("dw", dw), ("rounded", rounded), ("scales", scales.into())]
    }

    /// Rounds a tensor, of whose rows only `end` exist if there is one.
    fn quantized(
        &self,
        [rows, cols]: [usize; 2],
        dtype: DType,
        values: &[f32],
        end: Option<Slice<'_>>,
    ) -> Quantized {
        let (x, scale, amax) = (self.act(values), self.out_f32(1), self.out_f32(1));
        let [q, transposed] = [0, 1].map(|_| self.backend.alloc(dtype, x.len()).unwrap());
        let [one, other] = [Some(q.all()), Some(transposed.all())];
        self.backend.run(Amax { rows, cols, x: x.all(), end, amax: amax.all() }).unwrap();
        let args = QuantizeFp8 {
            rows,
            cols,
            dtype,
            x: x.all(),
            amax: amax.all(),
            q: one,
            transposed: other,
            scale: scale.all(),
            end,
        };
        // Each output separately.
        for (q, transposed) in [(one, None), (None, other)] {
            [&q, &transposed].into_iter().flatten().for_each(|out| self.backend.zero(*out).unwrap());
            self.backend.run(QuantizeFp8 { q, transposed, ..args }).unwrap();
        }
        Quantized { q, transposed, scale }
    }

    pub(crate) fn attention(
        &self,
        s: AttentionShape,
        qkv: &[f32],
        table: Option<&[f32]>,
        lengths: Option<&[usize]>,
        dout: &[f32],
    ) -> Outputs {
        let bounds = self.bounds(lengths, s.seq);
        let (b, qkv) = (self.backend, self.act(qkv));
        let table = table.map(|table| self.tensor(DType::F32, table));
        let rope = table.as_ref().map(Tensor::all);
        let (out, lse) = (self.out(dout.len()), self.out_f32(s.batch * s.heads * s.seq));
        let (dout, dqkv) = (self.act(dout), self.out(qkv.len()));
        let backward = AttentionBackward {
            shape: s,
            qkv: qkv.all(),
            rope,
            documents: operands(&bounds),
            out: out.all(),
            dout: dout.all(),
            lse: lse.all(),
            dqkv: dqkv.all(),
        };
        let AttentionBackward { shape, qkv, documents, out: out_slice, lse: lse_slice, .. } = backward;
        b.run(AttentionForward { shape, qkv, rope, documents, out: out_slice, lse: lse_slice }).unwrap();
        b.run(backward).unwrap();
        vec![("out", self.read(&out)), ("lse", self.read(&lse)), ("dqkv", self.read(&dqkv))]
    }

    /// Attention with sinks, and the gradients of all inputs.
    pub(crate) fn attention_with_sinks(
        &self,
        s: AttentionShape,
        qkv: &[f32],
        sinks: &[f32],
        lengths: Option<&[usize]>,
        dout: &[f32],
        acc: Accumulate,
    ) -> Outputs {
        let bounds = self.bounds(lengths, s.seq);
        let documents = operands(&bounds);
        let (b, shape, qkv, dsinks) = (self.backend, s, self.act(qkv), self.grad(acc, s.heads));
        let (out_t, lse_t) = (self.out(dout.len()), self.out_f32(s.batch * s.heads * s.seq));
        let (sinks, dout, dqkv) = (self.act(sinks), self.act(dout), self.out(qkv.len()));
        let (sinks, dout, out, lse, qkv) = (sinks.all(), dout.all(), out_t.all(), lse_t.all(), qkv.all());
        b.run(AttentionForward { shape, qkv, rope: None, documents, out, lse }).unwrap();
        b.run(AttentionSinksForward { shape, sinks, out, lse }).unwrap();
        let backward = AttentionSinksBackward { shape, sinks, out, dout, lse, dsinks: dsinks.all(), acc };
        b.run(backward).unwrap();
        let dqkv_slice = dqkv.all();
        b.run(AttentionBackward { shape, qkv, rope: None, documents, out, dout, lse, dqkv: dqkv_slice })
            .unwrap();
        [("out", &out_t), ("lse", &lse_t), ("dqkv", &dqkv), ("dsinks", &dsinks)]
            .map(|(name, tensor)| (name, self.read(tensor)))
            .into()
    }

    /// Norm of queries and keys, then their rotation.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(crate) fn qk_norm(
        &self,
        s: AttentionShape,
        kind: QkNorm,
        offset: f32,
        qkv: &[f32],
        gammas: [&[f32]; 2],
        table: Option<&[f32]>,
        lengths: Option<&[usize]>,
        dout: &[f32],
        acc: Accumulate,
    ) -> Outputs {
        let bounds = self.bounds(lengths, s.seq);
        let documents = operands(&bounds);
        let (b, eps, qkv, out) = (self.backend, 1e-5, self.act(qkv), self.out(dout.len()));
        let gammas_t = gammas.map(|gamma| self.act(gamma));
        let table = table.map(|table| self.tensor(DType::F32, table));
        let rope = table.as_ref().map(Tensor::all);
        let ([q_gamma, k_gamma], qkv) = (gammas_t.each_ref().map(Tensor::all), qkv.all());
        let norms = QkNorms { shape: s, kind, eps, offset, q_gamma, k_gamma, rope, documents };
        b.run(QkNormForward { norms, qkv, out: out.all() }).unwrap();
        let (dqkv, dgammas) = (self.act(dout), gammas.map(|gamma| self.grad(acc, gamma.len())));
        let [dq_gamma, dk_gamma] = dgammas.each_ref().map(Tensor::all);
        b.run(QkNormBackward { norms, qkv, dqkv: dqkv.all(), dq_gamma, dk_gamma, acc }).unwrap();
        [("out", &out), ("dqkv", &dqkv), ("dq_gamma", &dgammas[0]), ("dk_gamma", &dgammas[1])]
            .map(|(n, t)| (n, self.read(t)))
            .into()
    }

    /// Scaled addition to separate memory, and in place of either operand.
    pub(crate) fn add_scaled(&self, x: &[f32], y: &[f32], factor: f32) -> Outputs {
        let b = self.backend;
        let (x_t, y_t, scaled, sum) = (self.act(x), self.act(y), self.out(x.len()), self.out(x.len()));
        let (x, y) = (Some(x_t.all()), y_t.all());
        b.run(AddScaled { x: None, y, factor, out: scaled.all() }).unwrap();
        b.run(AddScaled { x, y, factor, out: sum.all() }).unwrap();
        let in_place = self.act(&self.read(&sum));
        b.run(AddScaled { x: None, y: in_place.all(), factor, out: in_place.all() }).unwrap();
        b.run(AddScaled { x, y: in_place.all(), factor, out: in_place.all() }).unwrap();
        b.run(AddScaled { x, y, factor, out: x_t.all() }).unwrap();
        [("scaled", &scaled), ("sum", &sum), ("in place of y", &in_place), ("in place of x", &x_t)]
            .map(|(n, t)| (n, self.read(t)))
            .into()
    }

    /// A linear layer followed by an activation function, and the gradient of the function's input from that of the
    /// output of the next linear layer, whose weights are `next`.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(crate) fn activation(
        &self,
        activation: Activation,
        s: LinearShape,
        x: &[f32],
        w: &[f32],
        bias: Option<&[f32]>,
        next: &[f32],
        dy: &[f32],
        acc: Accumulate,
    ) -> Outputs {
        let (b, x, w, bias) = (self.backend, self.act(x), self.act(w), self.maybe_act(bias));
        let [h, a, again, dh] = [(); 4].map(|()| self.out(s.rows * s.outputs));
        let (shape, bias) = (s, bias.as_ref().map(Tensor::all));
        let (x, w, h_slice) = (x.all(), w.all(), h.all());
        let forward = LinearActivationForward { shape, activation, x, w, bias, h: h_slice, a: a.all() };
        b.run(forward).unwrap();
        b.run(ActivationForward { activation, h: h.all(), a: again.all() }).unwrap();
        let shape = LinearShape { rows: s.rows, inputs: s.outputs, outputs: dy.len() / s.rows };
        let (next, dy) = (self.act(next), self.act(dy));
        let [dbias, dbias_alone] = [(); 2].map(|()| bias.map(|_| self.grad(acc, s.outputs)));
        let (dy, w, h, dh_slice, dbias_slice) =
            (dy.all(), next.all(), h.all(), dh.all(), dbias.as_ref().map(Tensor::all));
        let backward =
            ActivationLinearBackward { shape, activation, dy, w, h, dh: dh_slice, dbias: dbias_slice, acc };
        b.run(backward).unwrap();
        // The derivative alone, with dy w replaced by `h`.
        let alone = self.act(&self.read_slice(h));
        let (rows, cols, dh_slice) = (s.rows, s.outputs, alone.all());
        let dbias_slice = dbias_alone.as_ref().map(Tensor::all);
        let args = ActivationBackward { activation, rows, cols, h, dh: dh_slice, dbias: dbias_slice, acc };
        b.run(args).unwrap();
        let mut outputs = vec![("h", self.read_slice(h))];
        let tensors = [("a", &a), ("a again", &again), ("dh", &dh), ("dh alone", &alone)];
        outputs.extend(tensors.map(|(name, tensor)| (name, self.read(tensor))));
        outputs.extend(dbias.map(|dbias| ("dbias", self.read(&dbias))));
        outputs.extend(dbias_alone.map(|dbias| ("dbias alone", self.read(&dbias))));
        outputs
    }

    pub(crate) fn glu(
        &self,
        activation: Activation,
        inputs: GluInputs,
        [rows, ffn]: [usize; 2],
        h: &[f32],
        da: &[f32],
    ) -> Outputs {
        let (h, da, a, dh) = (self.act(h), self.act(da), self.out(da.len()), self.out(h.len()));
        let (h, da, end) = (h.all(), da.all(), None);
        let amax = [(); 2].map(|()| self.out_f32(1));
        let [of_a, of_dh] = amax.each_ref().map(|amax| Some(amax.all()));
        let forward = GluForward { activation, inputs, rows, ffn, h, a: a.all(), end, amax: of_a };
        self.backend.run(forward).unwrap();
        let backward = GluBackward { activation, inputs, rows, ffn, h, da, dh: dh.all(), end, amax: of_dh };
        self.backend.run(backward).unwrap();
        let outputs = [("a", self.read(&a)), ("dh", self.read(&dh))];
        // Differences of the largest magnitudes from those of the outputs: 0.
        let beyond = |((_, x), amax): (&(&str, Vec<f32>), &Tensor)| {
            let largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            ("amax", vec![self.read(amax)[0] - largest])
        };
        let beyond: Vec<_> = outputs.iter().zip(&amax).map(beyond).collect();
        outputs.into_iter().chain(beyond).collect()
    }

    /// A linear layer followed by a gated activation, and the gradient of the activation's input from that of the
    /// output of the next linear layer, whose weights are `next`.
    #[expect(clippy::too_many_arguments, reason = "a fused operation has many operands")]
    pub(crate) fn linear_glu(
        &self,
        activation: Activation,
        s: LinearShape,
        x: &[f32],
        w: &[f32],
        bias: Option<&[f32]>,
        next: &[f32],
        dy: &[f32],
    ) -> Outputs {
        let (rows, ffn) = (s.rows, s.outputs / 2);
        let (x, w, next, dy) = (self.act(x), self.act(w), self.act(next), self.act(dy));
        let bias = self.maybe_act(bias);
        let [h, dh] = [0, 1].map(|_| self.out(2 * rows * ffn));
        let [a, da] = [0, 1].map(|_| self.out(rows * ffn));
        let (shape, bias) = (s, bias.as_ref().map(Tensor::all));
        let (x, w, h_slice) = (x.all(), w.all(), h.all());
        let inputs = GluInputs::PLAIN;
        let forward = LinearGluForward { shape, activation, inputs, x, w, bias, h: h_slice, a: a.all() };
        self.backend.run(forward).unwrap();
        let backward = GluLinearBackward {
            shape: LinearShape { rows, inputs: ffn, outputs: dy.len() / rows },
            activation,
            inputs,
            dy: dy.all(),
            w: next.all(),
            h: h.all(),
            da: da.all(),
            dh: dh.all(),
        };
        self.backend.run(backward).unwrap();
        vec![("h", self.read(&h)), ("a", self.read(&a)), ("dh", self.read(&dh))]
    }

    /// Gradients of two layers' weights, each from its inputs x and the gradient of its outputs dy.
    pub(crate) fn two_layers(
        &self,
        shapes: [LinearShape; 2],
        x: &[f32],
        dy: &[f32],
        acc: Accumulate,
    ) -> Outputs {
        let operands = shapes.map(|s| {
            let (x, dy) = (self.act(&x[..s.rows * s.inputs]), self.act(&dy[..s.rows * s.outputs]));
            (x, dy, self.grad(acc, s.outputs * s.inputs))
        });
        let layers = [0, 1].map(|i| {
            let (x, dy, dw) = &operands[i];
            LinearBackwardWeight { shape: shapes[i], dy: dy.all(), x: x.all(), dw: dw.all(), acc }
        });
        self.backend.run(layers).unwrap();
        let [(.., first), (.., second)] = &operands;
        [("first dw", first), ("second dw", second)].map(|(n, t)| (n, self.read(t))).into()
    }

    /// Returns losses with and without gradient, and the gradient.
    pub(crate) fn classifier(
        &self,
        s: ClassifierShape,
        logits: &[f32],
        targets: &[i32],
        scale: f32,
        softcap: Option<f32>,
    ) -> Outputs {
        let (b, logits, targets) = (self.backend, self.act(logits), self.ints(targets));
        let scale = self.tensor(DType::F32, &[scale]);
        let (only, losses) = (self.out_f32(s.rows), self.out_f32(s.rows));
        let (logits_slice, targets) = (logits.all(), targets.all());
        for (losses, grad_scale) in [(&only, None), (&losses, Some(scale.all()))] {
            let (shape, logits, losses, weights) = (s, logits_slice, losses.all(), None);
            let args = FusedClassifier { shape, logits, targets, losses, grad_scale, weights, softcap };
            b.run(args).unwrap();
        }
        vec![
            ("losses", self.read(&only)),
            ("losses with gradient", self.read(&losses)),
            ("dlogits", self.read(&logits)),
        ]
    }

    /// Returns the losses of pairs of documents of these lengths, in rows of `seq` tokens, and the gradient of the
    /// logits.
    pub(crate) fn preference(
        &self,
        s: ClassifierShape,
        [batch, seq]: [usize; 2],
        lengths: &[usize],
        logits: &[f32],
        targets: &[i32],
        [reference, losses]: [&[f32]; 2],
    ) -> Outputs {
        let (b, logits, targets) = (self.backend, self.act(logits), self.ints(targets));
        let [reference, losses] = [reference, losses].map(|values| self.tensor(DType::F32, values));
        let [_, last] = self.bounds(Some(lengths), seq).unwrap();
        let (weights, sums, scale) =
            (self.out_f32(s.rows), self.out_f32(3 * batch), self.tensor(DType::F32, &[0.5]));
        b.run(PreferenceLoss {
            batch,
            seq,
            beta: 0.3,
            last: last.all(),
            losses: losses.all(),
            reference: reference.all(),
            weights: weights.all(),
            sums: sums.all(),
        })
        .unwrap();
        b.run(FusedClassifier {
            shape: s,
            logits: logits.all(),
            targets: targets.all(),
            losses: losses.all(),
            grad_scale: Some(scale.all()),
            weights: Some(weights.all()),
            softcap: None,
        })
        .unwrap();
        vec![("weights", self.read(&weights)), ("sums", self.read(&sums)), ("dlogits", self.read(&logits))]
    }

    /// Logits bounded softly, as activations and in F32.
    pub(crate) fn softcap(&self, x: &[f32], cap: f32) -> Outputs {
        let (x_act, x_f32) = (self.act(x), self.tensor(DType::F32, x));
        for x in [&x_act, &x_f32] {
            self.backend.run(SoftCap { x: x.all(), cap }).unwrap();
        }
        vec![("activations", self.read(&x_act)), ("f32", self.read(&x_f32))]
    }

    pub(crate) fn reductions(&self, x: &[f32]) -> Outputs {
        let (b, x_t) = (self.backend, self.tensor(DType::F32, x));
        let (sum, squared_norm) = (self.out_f32(1), self.out_f32(1));
        let factor = self.tensor(DType::F32, &[0.25]);
        let scales = [Scale::Constant(0.5), Scale::Memory(factor.all())];
        for (scale, acc) in scales.into_iter().zip([Accumulate::Overwrite, Accumulate::Add]) {
            b.run(Sum { x: x_t.all(), scale, out: sum.all(), acc }).unwrap();
        }
        let grads = self.tensor(self.grads, x);
        b.run(SquaredNorm { x: grads.all(), out: squared_norm.all() }).unwrap();
        vec![("sum", self.read(&sum)), ("squared_norm", self.read(&squared_norm))]
    }

    /// Returns the digits of the checksum of `x` in F32, which are the same on every device.
    pub(crate) fn checksum(&self, x: &[f32]) -> Outputs {
        let (x, out) = (self.tensor(DType::F32, x), self.out_f32(CHECKSUM_DIGITS));
        self.backend.run(Checksum { x: x.all(), out: out.all() }).unwrap();
        vec![("checksum", self.read(&out))]
    }

    /// Runs steps of AdamW with these squared norms and losses.
    pub(crate) fn adamw(
        &self,
        config: AdamWConfig,
        params: &[f32],
        grads: &[f32],
        groups: &[u8],
        steps: &[(f32, f32)],
    ) -> Outputs {
        let b = self.backend;
        // Elements that are not AdamW's keep their weights.
        let work = (b.activation_dtype() == DType::Bf16).then(|| self.act(params));
        let (params, grads) = (self.tensor(DType::F32, params), self.tensor(self.grads, grads));
        let zeros = vec![0.0; params.len()];
        let (m, v) = (self.tensor(DType::F32, &zeros), self.tensor(DType::F32, &zeros));
        let group_bytes = b.alloc(DType::U8, groups.len()).unwrap();
        b.write_u8(group_bytes.all(), groups).unwrap();
        let skipped = self.tensor(DType::F32, &[0.0]);
        for (index, (grad_norm_sq, loss)) in steps.iter().enumerate() {
            let scalars =
                if index == 0 { adamw_scalars(1e-2, 10.0, 20.0) } else { adamw_scalars(2e-2, 5.3, 10.3) };
            let [scalars, grad_norm_sq, loss] =
                [&scalars[..], &[*grad_norm_sq], &[*loss]].map(|values| self.tensor(DType::F32, values));
            let step = AdamWStep {
                config,
                params: params.all(),
                grads: grads.all(),
                m: m.all(),
                v: v.all(),
                work: work.as_ref().map(Tensor::all),
                groups: group_bytes.all(),
                scalars: scalars.all(),
                grad_norm_sq: grad_norm_sq.all(),
                loss: loss.all(),
                skipped: skipped.all(),
            };
            b.run(step).unwrap();
        }
        let mut outputs: Outputs = [("params", &params), ("m", &m), ("v", &v), ("skipped", &skipped)]
            .map(|(name, tensor)| (name, self.read(tensor)))
            .into();
        // The CPU has no rounded copy, so the weights themselves are compared.
        outputs.push(("work", self.read(work.as_ref().unwrap_or(&params))));
        outputs
    }

    /// Makes as many matrices orthogonal as there are.
    pub(crate) fn orthogonalize(&self, (rows, cols): (usize, usize), x: &[f32]) -> Outputs {
        let x = self.act(x);
        self.backend.run(Orthogonalize { rows, cols, x: x.all() }).unwrap();
        vec![("orthogonal", self.read(&x))]
    }

    /// Runs steps of Muon with these squared norms and losses, without making the updates orthogonal, on two matrices
    /// in scattered pieces; see [`muon_pieces`]. Updates begin as random numbers.
    pub(crate) fn muon(
        &self,
        case: MuonCase,
        params: &[f32],
        grads: &[f32],
        steps: &[(f32, f32)],
    ) -> Outputs {
        let b = self.backend;
        let [pieces, matrices] = muon_pieces(params.len());
        let end = |pieces: &[MuonPiece]| pieces.iter().map(|piece| piece.packed + piece.len).max().unwrap();
        let (first, packed) = (matrices[0], end(&matrices));
        let rows = matrices.iter().map(|matrix| matrix.len / matrix.cols).sum::<usize>();
        let [pieces, matrices] = [pieces, matrices].map(|pieces| b.muon_pieces(&pieces).unwrap());
        // Elements that are not Muon's keep their weights.
        let work = (b.activation_dtype() == DType::Bf16).then(|| self.act(params));
        let (params, own_update) = (self.tensor(DType::F32, params), self.act(grads));
        let (update, grads) = (self.random(78, packed), self.tensor(self.grads, grads));
        let [m, v] = [(); 2].map(|()| self.tensor(DType::F32, &vec![0.0; params.len()]));
        let moments = self.out_f32(2 * rows);
        let [scalars, skipped] =
            [&muon_scalars(2e-2)[..], &[0.0]].map(|values| self.tensor(DType::F32, values));
        let (held, packed_from) = match case.updates {
            MuonUpdates::Packed => (update.all(), Some(0)),
            MuonUpdates::Part => (update.slice(first.packed..first.packed + first.len), Some(first.packed)),
            MuonUpdates::Scattered => (own_update.all(), None),
        };
        for (grad_norm_sq, loss) in steps {
            let [grad_norm_sq, loss] = [grad_norm_sq, loss].map(|value| self.tensor(DType::F32, &[*value]));
            let (grad_norm_sq, loss, skipped) = (grad_norm_sq.all(), loss.all(), skipped.all());
            let conditions = StepConditions { grad_norm_sq, loss, skipped, skip_limit: 1.0 };
            let momentum = MuonMomentum {
                grads: grads.all(),
                m: m.all(),
                update: held,
                packed_from,
                pieces: &pieces,
                momentum: 0.95,
                clip: 1.0,
                conditions,
            };
            b.run(momentum).unwrap();
            if packed_from.is_none() {
                b.run(MuonPack { from: held, to: update.all(), pieces: &pieces }).unwrap();
            }
            if case.normuon {
                let (update, v, moments) = (update.all(), v.all(), moments.all());
                let beta2 = 0.9;
                b.run(MuonRowMoments { update, v, moments, pieces: &pieces, beta2, conditions }).unwrap();
                b.run(MuonRowFactors { moments, matrices: &matrices }).unwrap();
            }
            let weights = MuonUpdate {
                update: update.all(),
                params: params.all(),
                work: work.as_ref().map(Tensor::all),
                pieces: &pieces,
                row_factors: case.normuon.then(|| moments.slice(rows..2 * rows)),
                weight_decay: 0.5,
                cautious: case.cautious,
                scalars: scalars.all(),
                conditions,
            };
            b.run(weights).unwrap();
        }
        let mut outputs: Outputs = [("params", &params), ("m", &m), ("v", &v), ("update", &update)]
            .map(|(name, tensor)| (name, self.read(tensor)))
            .into();
        // The CPU has no rounded copy, so the weights themselves are compared.
        outputs.push(("work", self.read(work.as_ref().unwrap_or(&params))));
        if case.normuon {
            outputs.push(("moments", self.read(&moments)));
        }
        outputs
    }
}

/// Returns the scalars of a step of AdamW. Group g has the learning rate `rate / (1 + g)`, and the weight decay 0.1 `g`
/// relative to `rate`.
pub(crate) fn adamw_scalars(rate: f32, correction1: f32, correction2: f32) -> [f32; scalar::COUNT] {
    let mut scalars = [0.0; scalar::COUNT];
    for group in 0..GROUPS {
        scalars[scalar::LEARNING_RATES + group] = rate / (1 + group) as f32;
        scalars[scalar::DECAYS + group] = rate * 0.1 * group as f32;
    }
    (scalars[scalar::CORRECTION1], scalars[scalar::CORRECTION2]) = (correction1, correction2);
    scalars
}

fn muon_scalars(rate: f32) -> [f32; scalar::COUNT] {
    let mut scalars = [0.0; scalar::COUNT];
    scalars[scalar::MUON_LEARNING_RATE] = rate;
    scalars
}

/// Place of the updates after [`MuonMomentum`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum MuonUpdates {
    /// All are packed.
    Packed,
    /// Only those of the first matrix are, and the others are given.
    Part,
    /// They are where the gradients are, and packed afterwards.
    Scattered,
}

/// Variant of a step of Muon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MuonCase {
    pub(crate) cautious: bool,
    pub(crate) normuon: bool,
    pub(crate) updates: MuonUpdates,
}

/// Returns the pieces of two matrices, and the matrices, in arrays of `len` elements. Two of three chunks are pieces,
/// and as many of them as are whole rows, which go from one piece to the next.
pub(crate) fn muon_pieces(len: usize) -> [Vec<MuonPiece>; 2] {
    let runs = (0..len.div_ceil(3 * GROUP_CHUNK)).map(|run| {
        let start = 3 * GROUP_CHUNK * run;
        (start, (2 * GROUP_CHUNK).min(len - start))
    });
    let runs: Vec<(usize, usize)> = runs.collect();
    let (mut pieces, mut matrices) = (Vec::new(), Vec::new());
    let (mut packed, mut row) = (3, 0);
    let half = runs.len().div_ceil(2);
    for (runs, cols, factor) in [(&runs[..half], 40, 3.0), (&runs[half..], 3, 2.0)] {
        let rows = runs.iter().map(|(_, len)| len).sum::<usize>() / cols;
        let mut first = 0;
        for (at, len) in runs {
            let len = (*len).min(rows * cols - first);
            if len > 0 {
                let packed = packed + first;
                pieces.push(MuonPiece { at: *at, packed, len, first, cols, row, factor });
            }
            first += len;
        }
        if rows > 0 {
            matrices.push(MuonPiece { at: 0, packed, len: rows * cols, first: 0, cols, row, factor });
        }
        (packed, row) = (packed + rows * cols + 5, row + rows);
    }
    [pieces, matrices]
}

/// A tensor in FP8.
struct Quantized {
    q: Tensor,
    transposed: Tensor,
    scale: Tensor,
}

impl Quantized {
    fn rows(&self) -> Fp8Operand<'_> {
        Fp8Operand { q: self.q.all(), scale: self.scale.all() }
    }

    fn columns(&self) -> Fp8Operand<'_> {
        Fp8Operand { q: self.transposed.all(), scale: self.scale.all() }
    }
}

/// There are no more updates after two consecutive skipped steps.
pub(crate) const ADAMW: AdamWConfig =
    AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, clip: 1.0, skip_limit: 2.0 };

/// Returns how much larger than usual the differences of a case may be: each step towards an orthogonal matrix
/// amplifies the rounding of those before it.
pub(crate) fn amplification(case: &str) -> f64 {
    if case.starts_with("orthogonalize") { 10.0 } else { 1.0 }
}

/// Returns `|a - b| / |b|`; infinite if either is not finite.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let size = norm(&mut b.iter().map(|b| f64::from(*b)));
    if difference.is_finite() { difference / size.max(1e-30) } else { f64::INFINITY }
}
