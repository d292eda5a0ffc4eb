//! Operations of mixtures of experts, with loads that are even, random, hostile and tied.

use xlaunch_engine::*;

use super::cases::Case;
use super::{Ops, Outputs, Values};

/// How the tokens of a case choose.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Load {
    /// Random logits decide.
    Random,
    /// Every token chooses the same experts; the others have no rows.
    Same,
    /// All logits are equal.
    Tied,
    /// Random logits and biases decide.
    Biased,
}

impl Load {
    fn logits(self, random: Values, experts: usize) -> Values {
        let at = move |(i, x): (usize, f32)| match self {
            Self::Random | Self::Biased => 2.0 * x,
            Self::Same => 0.1 * x + (i % experts) as f32 * 0.5,
            Self::Tied => 0.25,
        };
        Values::new(move || random.iter().copied().enumerate().map(at).collect())
    }
}

/// Sizes of a case: tokens have C elements, and experts are layers from I to O.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) route: RouteShape,
    pub(crate) cols: usize,
    pub(crate) outputs: usize,
}

/// Inputs of a case.
pub(crate) struct Inputs {
    pub(crate) x: Values,
    pub(crate) logits: Values,
    pub(crate) bias: Option<Values>,
    pub(crate) w: Values,
    /// Biases of the layers.
    pub(crate) layer_bias: Values,
    pub(crate) dy: Values,
    pub(crate) dweights: Values,
}

impl Sizes {
    pub(crate) fn new(
        [rows, experts, chosen, cols, outputs]: [usize; 5],
        router: Router,
        normalise: bool,
    ) -> Self {
        let scale = if normalise { 2.5 } else { 1.0 };
        Self { route: RouteShape { rows, experts, chosen, router, normalise, scale }, cols, outputs }
    }

    pub(crate) fn choices(self) -> usize {
        self.route.rows * self.route.chosen
    }

    pub(crate) fn inputs(self, load: Load, values: impl Fn(u64, usize) -> Values) -> Inputs {
        let RouteShape { rows, experts, .. } = self.route;
        Inputs {
            x: values(71, rows * self.cols),
            logits: load.logits(values(72, rows * experts), experts),
            bias: matches!(load, Load::Biased).then(|| values(70, experts)),
            w: values(73, experts * self.outputs * self.cols),
            layer_bias: values(69, experts * self.outputs),
            dy: values(74, self.choices() * self.outputs.max(self.cols)),
            dweights: values(75, self.choices()),
        }
    }
}

/// A layer of experts in FP8.
#[derive(Debug)]
pub(crate) struct Fp8Layer {
    /// Number of rows of each expert.
    rows: Vec<usize>,
    /// Number of rows of other ranks' experts. Their elements are NaN.
    absent: usize,
    inputs: usize,
    outputs: usize,
}

impl Fp8Layer {
    fn len(&self) -> usize {
        self.rows.iter().sum::<usize>() + self.absent
    }
}

/// Returns the cases.
pub(super) fn cases(values: impl Fn(u64, usize) -> Values + Copy) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    use Router::{Sigmoid, Softmax};
    for (sizes, router, normalise, load, acc) in [
        // One token, in one tile that is nearly empty.
        ([1, 4, 2, 16, 24], Softmax, true, Load::Random, Accumulate::Overwrite),
        ([67, 8, 2, 40, 72], Softmax, false, Load::Random, Accumulate::Add),
        // Not vectorizable.
        ([33, 5, 3, 12, 21], Sigmoid, true, Load::Random, Accumulate::Overwrite),
        // More than one chunk of choices, several tiles of an expert and of columns, deeper than the ring of tiles.
        ([300, 4, 2, 200, 136], Softmax, true, Load::Random, Accumulate::Overwrite),
        // Several tiles of columns of the kernels for compute capability 9.0.
        ([260, 2, 1, 72, 528], Softmax, false, Load::Random, Accumulate::Add),
        ([150, 6, 2, 24, 136], Softmax, true, Load::Same, Accumulate::Overwrite),
        ([140, 3, 1, 8, 16], Sigmoid, false, Load::Same, Accumulate::Add),
        ([40, 4, 4, 16, 8], Softmax, false, Load::Random, Accumulate::Overwrite),
        // More experts than choices of a token in a warp's lanes, and than threads of a block.
        ([20, 300, 8, 8, 16], Sigmoid, false, Load::Random, Accumulate::Overwrite),
        ([70, 40, 6, 16, 16], Softmax, true, Load::Tied, Accumulate::Overwrite),
        ([75, 40, 3, 16, 16], Sigmoid, true, Load::Biased, Accumulate::Overwrite),
        ([30, 6, 2, 16, 16], Softmax, false, Load::Biased, Accumulate::Overwrite),
        // The gate of shared experts.
        ([90, 1, 1, 24, 16], Sigmoid, false, Load::Random, Accumulate::Overwrite),
    ] {
        let sizes = Sizes::new(sizes, router, normalise);
        let inputs = sizes.inputs(load, values);
        let [rows, experts, chosen] = [sizes.route.rows, sizes.route.experts, sizes.route.chosen];
        let name = format!("experts {rows} x {chosen} of {experts} {router:?} {load:?} {acc:?}");
        cases.push((name, Box::new(move |ops| ops.experts(sizes, &inputs, acc))));
    }
    for (layers, experts, loss) in [(3, 5, 1.0), (2, 150, 1.0), (1, 8, f32::INFINITY)] {
        let (loads, bias) = (loads(values(78, layers * experts)), values(79, layers * experts));
        let case = move |ops: &Ops<'_>| vec![("bias", ops.router_bias(experts, &loads, &bias, loss))];
        cases.push((format!("router bias {layers} x {experts}, loss {loss}"), Box::new(case)));
    }
    for (rows, absent, inputs, outputs, acc) in [
        (vec![16], 0, 16, 16, Accumulate::Overwrite),
        // An expert without rows, sums deeper than the ring of tiles, and rows that begin anywhere.
        (vec![1, 950, 0, 9], 0, 48, 912, Accumulate::Add),
        // Several tiles of columns; a sum that ends with the rows of this rank's experts.
        (vec![40, 3, 70], 79, 528, 272, Accumulate::Overwrite),
    ] {
        let layer = Fp8Layer { rows, absent, inputs, outputs };
        let [x, w, dy] = [
            (81, layer.len() * inputs),
            (82, layer.rows.len() * inputs * outputs),
            (83, layer.len() * outputs),
        ]
        .map(|(seed, len)| values(seed, len));
        let name = format!("fp8 {layer:?} {acc:?}");
        cases.push((name, Box::new(move |ops| ops.fp8_experts(&layer, [&x, &w, &dy], acc))));
    }
    for (rows, inputs, outputs) in [(5, 40, 8), (130, 136, 24), (33, 24, 1)] {
        let s = LinearShape { rows, inputs, outputs };
        let (x, w, bias) = (values(76, rows * inputs), values(77, outputs * inputs), values(80, outputs));
        let case = move |ops: &Ops<'_>| {
            let (x, w, bias) = (ops.act(&x), ops.act(&w), ops.act(&bias));
            let logits = [("logits", None), ("logits with biases", Some(bias.all()))].map(|(name, bias)| {
                let (x, w, logits) = (x.all(), w.all(), ops.out_f32(rows * outputs));
                ops.backend.run(RouterLogits { shape: s, x, w, bias, logits: logits.all() }).unwrap();
                (name, ops.read(&logits))
            });
            logits.into()
        };
        cases.push((format!("router logits {s:?}"), Box::new(case)));
    }
    cases
}

/// Returns whole numbers, of which several are the mean.
pub(crate) fn loads(random: Values) -> Values {
    random.map(|x| (4.0 * x).round() + 5.0)
}

impl Ops<'_> {
    /// Updates biases after a step with this loss.
    pub(crate) fn router_bias(&self, experts: usize, loads: &[f32], bias: &[f32], loss: f32) -> Vec<f32> {
        let (loads, bias) = (self.tensor(DType::F32, loads), self.tensor(DType::F32, bias));
        let [norm, loss, skipped] = [2.0, loss, 1.0].map(|x| self.tensor(DType::F32, &[x]));
        let (grad_norm_sq, loss, skipped) = (norm.all(), loss.all(), skipped.all());
        let conditions = StepConditions { grad_norm_sq, loss, skipped, skip_limit: 3.0 };
        let (loads, bias_slice) = (loads.all(), bias.all());
        let update = UpdateRouterBias { experts, rate: 0.01, loads, bias: bias_slice, conditions };
        self.backend.run(update).unwrap();
        self.read(&bias)
    }

    /// Runs all operations of experts. Gradients do not depend on results of forward, except for the choices.
    pub(crate) fn experts(&self, sizes: Sizes, inputs: &Inputs, acc: Accumulate) -> Outputs {
        let (b, s, choices) = (self.backend, sizes.route, sizes.choices());
        let ints = |len: usize| self.ints(&vec![i32::MAX; len]);
        let (logits, x) = (self.tensor(DType::F32, &inputs.logits), self.act(&inputs.x));
        let (chosen, weights) = (ints(choices), self.out_f32(choices));
        let bias = inputs.bias.as_ref().map(|bias| self.tensor(DType::F32, bias));
        b.run(RouteForward {
            shape: s,
            logits: logits.all(),
            bias: bias.as_ref().map(Tensor::all),
            experts: chosen.all(),
            weights: weights.all(),
        })
        .unwrap();
        let (offsets, choice_of, row_of) = (ints(s.experts + 1), ints(choices), ints(choices));
        let loads = self.out_f32(s.experts);
        let scratch = ints(SortByExpert::counters(choices, s.experts));
        let sort = SortByExpert {
            choices,
            experts: s.experts,
            first: 0,
            chosen: chosen.all(),
            offsets: offsets.all(),
            choice_of: choice_of.all(),
            row_of: row_of.all(),
            loads: loads.all(),
            scratch: scratch.all(),
        };
        b.run(sort).unwrap();
        let (losses, dlogits) = (self.out_f32(s.rows), self.out(s.rows * s.experts));
        let dweights = self.tensor(DType::F32, &inputs.dweights);
        let loss = BalanceLoss {
            loads: loads.all(),
            share: 1.0 / choices as f32,
            balance: 0.3,
            z: 0.05,
            losses: losses.all(),
        };
        let (experts, dlogits_slice) = (chosen.all(), dlogits.all());
        let (logits, dweights) = (logits.all(), dweights.all());
        b.run(RouteBackward { shape: s, logits, experts, dweights, loss, dlogits: dlogits_slice }).unwrap();
        let mut outputs: Outputs =
            [("weights", &weights), ("loads", &loads), ("losses", &losses), ("dlogits", &dlogits)]
                .map(|(name, tensor)| (name, self.read(tensor)))
                .into();
        outputs.extend(self.some_experts(sizes, inputs, (s.experts / 3, sort), [&x, &weights]));
        outputs.extend(self.expert_rows(sizes, inputs, [&choice_of, &row_of], &x, &weights));
        outputs.extend(self.expert_layers(sizes, inputs, &offsets, acc));
        outputs
    }

    /// Computes outputs and gradients of the experts from `first` on, as a rank that has only these. The rows of the
    /// others are NaN.
    fn some_experts(
        &self,
        sizes: Sizes,
        inputs: &Inputs,
        (first, sort): (usize, SortByExpert<'_>),
        [x, weights]: [&Tensor; 2],
    ) -> Outputs {
        let (b, s, choices) = (self.backend, sizes.route, sizes.choices());
        let (experts, cols, outputs) = (s.experts - first, sizes.cols, sizes.outputs);
        let ints = |len: usize| self.ints(&vec![i32::MAX; len]);
        let (offsets, choice_of, row_of) = (ints(s.experts + 1), ints(choices), ints(choices));
        let loads = self.out_f32(s.experts);
        let [offsets_slice, loads_slice] = [&offsets, &loads].map(Tensor::all);
        let sort = SortByExpert { first, offsets: offsets_slice, loads: loads_slice, ..sort };
        b.run(SortByExpert { choice_of: choice_of.all(), row_of: row_of.all(), ..sort }).unwrap();
        let (offsets, end) = (offsets.slice(0..experts + 1), Some(offsets.slice(experts..experts + 1)));
        let (choice_of, row_of, weights) = (choice_of.all(), row_of.all(), weights.all());
        let rows = self.out(choices * cols);
        let shape = RowsShape { tokens: s.rows, chosen: s.chosen, cols };
        b.run(GatherRows { shape, choice_of, x: x.all(), rows: rows.all(), end }).unwrap();
        let (w, y) = (self.act(&inputs.w), self.out(choices * outputs));
        let layer = |inputs| GroupedShape { rows: choices, experts, inputs, outputs };
        let own = w.slice(first * cols * outputs..w.len());
        b.run(GroupedForward { shape: layer(cols), offsets, x: rows.all(), w: own, y: y.all() }).unwrap();
        let weight_gradient = |inputs: usize, dy: &Tensor, x: &Tensor| {
            let (shape, dw) = (layer(inputs), self.grad(Accumulate::Overwrite, experts * outputs * inputs));
            let (dy, x, acc) = (dy.all(), x.all(), Accumulate::Overwrite);
            b.run(GroupedBackwardWeight { shape, offsets, dy, x, dw: dw.all(), acc }).unwrap();
            self.read(&dw)
        };
        let shape = RowsShape { cols: outputs, ..shape };
        let [sums, dx] = [(); 2].map(|()| self.out(s.rows * outputs));
        let out = sums.all();
        b.run(CombineRows { shape, row_of, weights, rows: y.all(), out, add: false, end }).unwrap();
        b.run(GatherRowsBackward { shape, row_of, drows: y.all(), dx: dx.all(), add: false, end }).unwrap();
        let dout = self.act(&inputs.dy[..s.rows * outputs]);
        let (drows, dweights) = (self.out(choices * outputs), self.out_f32(choices));
        b.run(CombineRowsBackward {
            shape,
            row_of,
            weights,
            rows: y.all(),
            dout: dout.all(),
            drows: drows.all(),
            dweights: dweights.all(),
            end,
        })
        .unwrap();
        let mut found = vec![
            ("loads in another order", self.read(&loads)),
            ("weighted sums of some experts", self.read(&sums)),
            ("sums of some experts", self.read(&dx)),
            ("dweights of some experts", self.read(&dweights)),
            ("dw of some experts", weight_gradient(cols, &drows, &rows)),
            ("dbias of some experts", self.some_biases(outputs, offsets, &drows)),
        ];
        if outputs % 2 == 0 {
            let ffn = outputs / 2;
            let [a, dh, amax] = self.some_gated([choices, ffn], y.all(), end);
            found.push(("largest magnitude of some experts", self.read(&amax)));
            found.push(("dw of the second layer of some experts", weight_gradient(ffn, &drows, &a)));
            found.push(("dw of the first layer of some experts", weight_gradient(cols, &dh, &rows)));
        }
        found
    }

    /// Returns the outputs of a gated activation for the rows that exist, the gradients of its input if those of its
    /// output are the same, and the outputs' largest magnitude.
    fn some_gated(&self, [rows, ffn]: [usize; 2], h: Slice<'_>, end: Option<Slice<'_>>) -> [Tensor; 3] {
        let (activation, inputs) = (Activation::Silu, GluInputs::PLAIN);
        let outputs = [self.out(rows * ffn), self.out(2 * rows * ffn), self.out_f32(1)];
        let [a, dh, amax] = outputs.each_ref().map(Tensor::all);
        let forward = GluForward { activation, inputs, rows, ffn, h, a, end, amax: Some(amax) };
        self.backend.run(forward).unwrap();
        let backward = GluBackward { activation, inputs, rows, ffn, h, da: a, dh, end, amax: None };
        self.backend.run(backward).unwrap();
        outputs
    }

    /// Returns the gradients of the biases of experts that have some of the rows; the others are NaN.
    fn some_biases(&self, cols: usize, offsets: Slice<'_>, dy: &Tensor) -> Vec<f32> {
        let (dbias, acc) =
            (self.grad(Accumulate::Overwrite, (offsets.len() - 1) * cols), Accumulate::Overwrite);
        let backward = ExpertBiasBackward { cols, offsets, dy: dy.all(), dbias: dbias.all(), acc };
        self.backend.run(backward).unwrap();
        self.read(&dbias)
    }

    fn expert_rows(
        &self,
        sizes: Sizes,
        inputs: &Inputs,
        [choice_of, row_of]: [&Tensor; 2],
        x: &Tensor,
        weights: &Tensor,
    ) -> Outputs {
        let (b, s, choices) = (self.backend, sizes.route, sizes.choices());
        let shape = RowsShape { tokens: s.rows, chosen: s.chosen, cols: sizes.cols };
        let (row_of, choice_of, weights) = (row_of.all(), choice_of.all(), weights.all());
        let rows = self.out(choices * sizes.cols);
        b.run(GatherRows { shape, choice_of, x: x.all(), rows: rows.all(), end: None }).unwrap();
        let y = self.act(&inputs.dy[..choices * sizes.cols]);
        let [sums, added] = [false, true].map(|add| {
            let out = if add { self.act(&inputs.x) } else { self.out(x.len()) };
            b.run(CombineRows { shape, row_of, weights, rows: y.all(), out: out.all(), add, end: None })
                .unwrap();
            out
        });
        let [dx, dx_added] = [false, true].map(|add| {
            let dx = if add { self.act(&inputs.x) } else { self.out(x.len()) };
            b.run(GatherRowsBackward { shape, row_of, drows: y.all(), dx: dx.all(), add, end: None })
                .unwrap();
            dx
        });
        let (drows, dweights) = (self.out(y.len()), self.out_f32(choices));
        let backward = CombineRowsBackward {
            shape,
            row_of,
            weights,
            rows: y.all(),
            dout: x.all(),
            drows: drows.all(),
            dweights: dweights.all(),
            end: None,
        };
        b.run(backward).unwrap();
        let outputs = [
            ("rows", &rows),
            ("sums", &sums),
            ("added", &added),
            ("dx", &dx),
            ("dx added", &dx_added),
            ("drows", &drows),
            ("dweights", &dweights),
        ];
        outputs.map(|(name, tensor)| (name, self.read(tensor))).into()
    }

    /// Runs the layers over rows that are already in the order of the experts.
    fn expert_layers(&self, sizes: Sizes, inputs: &Inputs, offsets: &Tensor, acc: Accumulate) -> Outputs {
        let (b, choices) = (self.backend, sizes.choices());
        let shape = GroupedShape {
            rows: choices,
            experts: sizes.route.experts,
            inputs: sizes.cols,
            outputs: sizes.outputs,
        };
        let offsets = offsets.all();
        let (x, w) = (self.act(&inputs.dy[..choices * sizes.cols]), self.act(&inputs.w));
        let dy = self.act(&inputs.dy[inputs.dy.len() - choices * sizes.outputs..]);
        let (y, dx) = (self.out(choices * sizes.outputs), self.out(choices * sizes.cols));
        b.run(GroupedForward { shape, offsets, x: x.all(), w: w.all(), y: y.all() }).unwrap();
        b.run(GroupedBackwardInput { shape, offsets, dy: dy.all(), w: w.all(), dx: dx.all() }).unwrap();
        let dw = self.grad(acc, w.len());
        b.run(GroupedBackwardWeight { shape, offsets, dy: dy.all(), x: x.all(), dw: dw.all(), acc }).unwrap();
        let biased = self.act(&self.read(&y));
        let (cols, bias) = (sizes.outputs, self.act(&inputs.layer_bias));
        let dbias = self.grad(acc, bias.len());
        b.run(ExpertBiasForward { cols, offsets, bias: bias.all(), y: biased.all() }).unwrap();
        b.run(ExpertBiasBackward { cols, offsets, dy: dy.all(), dbias: dbias.all(), acc }).unwrap();
        [("y", &y), ("layer's dx", &dx), ("dw", &dw), ("y with biases", &biased), ("dbias", &dbias)]
            .map(|(name, tensor)| (name, self.read(tensor)))
            .into()
    }

    /// Computes the output of a layer and its gradients.
    pub(crate) fn fp8_experts(&self, layer: &Fp8Layer, [x, w, dy]: [&[f32]; 3], acc: Accumulate) -> Outputs {
        let (Fp8Layer { rows, inputs, outputs, .. }, count) = (layer, layer.len());
        let (inputs, outputs, experts, exist) = (*inputs, *outputs, rows.len(), count - layer.absent);
        let ends = rows.iter().scan(0, |end, rows| {
            *end += i32::try_from(*rows).unwrap();
            Some(*end)
        });
        let offsets = self.ints(&[0].into_iter().chain(ends).collect::<Vec<_>>());
        let end = (layer.absent > 0).then(|| offsets.slice(experts..experts + 1));
        let with_absent = |values: &[f32], cols| -> Vec<f32> {
            let exist = values[..exist * cols].iter().copied();
            exist.chain(std::iter::repeat_n(f32::NAN, layer.absent * cols)).collect()
        };
        let x = self.quantized([count, inputs], DType::Fp8E4m3, &with_absent(x, inputs), end);
        let dy = self.quantized([count, outputs], DType::Fp8E5m2, &with_absent(dy, outputs), end);
        let w = self.quantized([experts * outputs, inputs], DType::Fp8E4m3, w, None);
        let shape = GroupedShape { rows: count, experts, inputs, outputs };
        let run = |product, [a, b]: [Fp8Operand<'_>; 2], out: Tensor, acc| {
            let offsets = offsets.all();
            self.backend.run(GroupedFp8 { shape, product, offsets, a, b, out: out.all(), acc }).unwrap();
            self.read(&out)
        };
        let new = Accumulate::Overwrite;
        let y = run(GroupedProduct::Forward, [x.rows(), w.rows()], self.out(count * outputs), new);
        let dx = run(GroupedProduct::Input, [dy.rows(), w.columns()], self.out(count * inputs), new);
        let dw = self.grad(acc, experts * inputs * outputs);
        let dw = run(GroupedProduct::Weight, [dy.columns(), x.columns()], dw, acc);
        vec![("y", y[..exist * outputs].into()), ("dx", dx[..exist * inputs].into()), ("dw", dw)]
    }
}
