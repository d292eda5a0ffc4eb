//! The linear layers of blocks, in the element type of activations or in FP8.
//!
//! ```text
//!                    activations' type      FP8: weights and inputs E4M3, gradients E5M2
//! forward            y  = x w^T             x8 w8^T
//! input's gradient   dx = dy w              dy8 (w8^T)^T
//! weights' gradient  dw = dy^T x            dy8^T (x8^T)^T
//! ```
//! Tensor cores sum FP8 products along the rows of both operands in memory. Inputs and gradients are therefore rounded
//! together with their transposes, and only the transpose of an input is kept for backward, in half the memory. Weights
//! are rounded at each use, as a pass may hold the weights of only a few blocks. Results have the type of activations,
//! like the rest of the model: the head, attention, norms and embeddings.
//!
//! Frozen weights have no gradient, so no transpose is needed: in a model with adapters, inputs and gradients are
//! rounded for the layer, and adapters read them unrounded. Backward keeps unrounded inputs.

use std::cell::OnceCell;
use std::ops::Range;
use std::rc::Rc;

use xlaunch_engine::{
    Accumulate, Activation, ActivationBackward, ActivationForward, ActivationLinearBackward, ColumnSum,
    DType, FP8_MULTIPLE, Fp8Operand, Gemm, GemmFp8, GluBackward, GluForward, GluLinearBackward,
    LinearActivationForward, LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearGluForward,
    LinearShape, Matrix, QuantizeFp8, Result, Slice, Tensor,
};
use xlaunch_spec::model;

use super::Model;
use super::gradient_arena::GradientArena;
use super::layout::Linear;

/// A layer's input, or the gradient of its output.
#[derive(Debug)]
pub(super) enum Operand {
    /// The layer and its adapter read the unrounded tensor.
    Plain(Unrounded),
    /// The layer, whose weights are trained, reads the tensor in FP8.
    Fp8(Fp8Tensor),
    /// The layer, whose weights are frozen, reads the tensor in FP8, and its adapter reads it unrounded.
    Both(Unrounded, Fp8Tensor),
}

/// A tensor in the activations' type.
#[derive(Debug)]
pub(super) struct Unrounded {
    tensor: Rc<Tensor>,
    /// The adapter's projection of a layer's input, set by forward and read by backward.
    z: OnceCell<Tensor>,
}

/// A tensor in FP8, in its original form and transposed. Either may be missing.
#[derive(Debug)]
pub(super) struct Fp8Tensor {
    rows: Option<Tensor>,
    columns: Option<Tensor>,
    /// F32 `[1]`.
    scale: Tensor,
}

/// The forms of a tensor that will be multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Rows,
    Columns,
    Both,
}

/// Inputs of a layer's backward, and the destination of its weights' gradient.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerBackward<'a> {
    pub(super) shape: LinearShape,
    pub(super) layer: &'a Linear,
    pub(super) x: &'a Operand,
    pub(super) dy: &'a Operand,
    /// Gradient of the weights; `None` if they are frozen.
    pub(super) dw: Option<Slice<'a>>,
    /// Gradients of all trained parameters.
    pub(super) grads: GradientArena<'a>,
    /// Selects whether gradients of parameters are overwritten or added to.
    pub(super) acc: Accumulate,
}

impl Operand {
    /// Returns the tensor that the layer multiplies, if that is in the activations' type.
    fn plain(&self) -> Option<&Tensor> {
        if let Self::Plain(x) = self { Some(&x.tensor) } else { None }
    }

    /// Returns what the layer's adapter reads.
    fn unrounded(&self) -> Option<&Unrounded> {
        match self {
            Self::Plain(x) | Self::Both(x, _) => Some(x),
            Self::Fp8(_) => None,
        }
    }

    /// Drops the form that only forward multiplies.
    pub(super) fn kept(self) -> Self {
        match self {
            Self::Plain(x) | Self::Both(x, _) => Self::Plain(x),
            Self::Fp8(tensor) => Self::Fp8(Fp8Tensor { rows: None, ..tensor }),
        }
    }
}

impl<'a> LayerBackward<'a> {
    /// Returns the arguments if the operands are in the activations' type.
    fn plain(self) -> Option<LinearBackwardWeight<'a>> {
        let Self { shape, x, dy, dw, acc, .. } = self;
        let (dy, x) = (dy.plain()?.all(), x.plain()?.all());
        Some(LinearBackwardWeight { shape, dy, x, dw: dw?, acc })
    }
}

impl Fp8Tensor {
    /// Returns the operand for a use. Panics if the tensor was not rounded for this use, which is a programming error.
    #[expect(clippy::expect_used, reason = "the code that rounds a tensor knows how it will be used")]
    pub(super) fn part(&self, used: Use) -> Fp8Operand<'_> {
        let part = if used == Use::Columns { &self.columns } else { &self.rows };
        Fp8Operand { q: part.as_ref().expect("this part was rounded").all(), scale: self.scale.all() }
    }
}

impl Model {
    /// Prepares a layer's input `[N, I]`.
    pub(super) fn input(&self, rows: usize, x: Rc<Tensor>, used: Use) -> Result<Operand> {
        self.operand(rows, x, used, DType::Fp8E4m3)
    }

    /// Prepares the gradient of a layer's output `[N, O]`.
    pub(super) fn output_gradient(&self, rows: usize, dy: Rc<Tensor>) -> Result<Operand> {
        self.operand(rows, dy, Use::Both, DType::Fp8E5m2)
    }

    fn operand(&self, rows: usize, x: Rc<Tensor>, used: Use, format: DType) -> Result<Operand> {
        let in_fp8 = self.in_fp8(rows);
        let rounded = |used| self.rounded([rows, x.len() / rows], x.all(), used, format, None);
        if in_fp8 && self.adapters.is_none() {
            return rounded(used).map(Operand::Fp8);
        }
        // Columns alone would be for the gradient of frozen weights.
        let rounded = (in_fp8 && used != Use::Columns).then(|| rounded(Use::Rows)).transpose()?;
        let x = Unrounded { tensor: x, z: OnceCell::new() };
        Ok(match rounded {
            Some(rounded) => Operand::Both(x, rounded),
            None => Operand::Plain(x),
        })
    }

    /// Returns whether layers multiply this number of rows in FP8. Micro-steps and evaluations of a job have a number
    /// that allows it; samples may not.
    pub(super) fn in_fp8(&self, rows: usize) -> bool {
        self.fp8 && rows.is_multiple_of(FP8_MULTIPLE)
    }

    /// Rounds a tensor of these sizes, of whose rows only `end` exist if there is one.
    pub(super) fn rounded(
        &self,
        [rows, cols]: [usize; 2],
        x: Slice<'_>,
        used: Use,
        dtype: DType,
        end: Option<Slice<'_>>,
    ) -> Result<Fp8Tensor> {
        let part = |other| (used != other).then(|| self.backend.alloc(dtype, x.len())).transpose();
        let rounded = Fp8Tensor {
            rows: part(Use::Columns)?,
            columns: part(Use::Rows)?,
            scale: self.backend.alloc(DType::F32, 1)?,
        };
        let [q, transposed] = [&rounded.rows, &rounded.columns].map(|part| part.as_ref().map(Tensor::all));
        let scale = rounded.scale.all();
        self.backend.run(QuantizeFp8 { rows, cols, dtype, x, q, transposed, scale, end })?;
        Ok(rounded)
    }

    /// Rounds weights of these sizes to FP8.
    pub(super) fn rounded_weights(
        &self,
        weight: &Range<usize>,
        sizes: [usize; 2],
        used: Use,
    ) -> Result<Fp8Tensor> {
        self.rounded(sizes, self.param(weight), used, DType::Fp8E4m3, None)
    }

    /// Computes `y = x w^T (+ bias)`, and adds the output of the adapter.
    pub(super) fn linear(&self, shape: LinearShape, x: &Operand, layer: &Linear) -> Result<Tensor> {
        let y = self.activation(shape.rows * shape.outputs)?;
        let bias = layer.bias.as_ref().map(|bias| self.param(bias));
        let adapter = |acc| match x.unrounded() {
            Some(Unrounded { tensor, z }) => {
                self.adapter_forward(shape, layer, [tensor.all(), y.all()], z, acc)
            }
            None => Ok(()),
        };
        // The GEMM reads the adapter's output while it multiplies. A small GEMM that adds that output afterwards takes
        // as long as it takes to read and write memory.
        let after_adapter = bias.is_none() && layer.is_adapted(shape.outputs);
        let acc = if after_adapter {
            adapter(Accumulate::Overwrite)?;
            Accumulate::Add
        } else {
            Accumulate::Overwrite
        };
        let LinearShape { rows, inputs: depth, outputs: cols } = shape;
        match x {
            Operand::Plain(x) if after_adapter => {
                let (x, w) = (Matrix::new(x.tensor.all(), depth), self.param(&layer.weight));
                self.add_product([rows, cols, depth], x, Matrix::new(w, depth).t(), y.all())?;
            }
            Operand::Plain(x) => {
                let (x, w, y) = (x.tensor.all(), self.param(&layer.weight), y.all());
                self.backend.run(LinearForward { shape, x, w, bias, y })?;
            }
            Operand::Fp8(x) | Operand::Both(_, x) => {
                let w = self.rounded_weights(&layer.weight, [cols, depth], Use::Rows)?;
                let (a, b, y) = (x.part(Use::Rows), w.part(Use::Rows), y.all());
                self.backend.run(GemmFp8 { rows, cols, depth, a, b, bias, y, acc })?;
            }
        }
        if !after_adapter {
            adapter(Accumulate::Add)?;
        }
        Ok(y)
    }

    /// Adds a product to `c`.
    fn add_product(
        &self,
        [rows, cols, depth]: [usize; 3],
        a: Matrix<'_>,
        b: Matrix<'_>,
        c: Slice<'_>,
    ) -> Result<()> {
        let (c, factor, acc) = (Matrix::new(c, cols), 1.0, Accumulate::Add);
        self.backend.run(Gemm { rows, cols, depth, a, b, factor, c, acc })
    }

    /// Computes a layer and the activation function, whose output has this width. Returns the function's input and its
    /// output.
    pub(super) fn linear_activation(
        &self,
        shape: LinearShape,
        x: &Operand,
        layer: &Linear,
        width: usize,
    ) -> Result<[Tensor; 2]> {
        let fused = if layer.adapter.is_none() { x.plain() } else { None };
        let Some(x) = fused else {
            let h = self.linear(shape, x, layer)?;
            let a = self.activated(shape.rows, &h, width)?;
            return Ok([h, a]);
        };
        let (h, a) = (self.activation(shape.rows * shape.outputs)?, self.activation(shape.rows * width)?);
        let (x, w, bias) =
            (x.all(), self.param(&layer.weight), layer.bias.as_ref().map(|bias| self.param(bias)));
        let activation = self.activation_function();
        let outputs = [h, a];
        let [h, a] = outputs.each_ref().map(Tensor::all);
        if self.shape.gated {
            let inputs = self.glu_inputs();
            self.backend.run(LinearGluForward { shape, activation, inputs, x, w, bias, h, a })?;
        } else {
            self.backend.run(LinearActivationForward { shape, activation, x, w, bias, h, a })?;
        }
        Ok(outputs)
    }

    /// Computes the output of the activation function, which has this width, from its input.
    pub(super) fn activated(&self, rows: usize, h: &Tensor, ffn: usize) -> Result<Tensor> {
        let activation = self.activation_function();
        let out = self.activation(rows * ffn)?;
        let (h, a) = (h.all(), out.all());
        if self.shape.gated {
            let inputs = self.glu_inputs();
            self.backend.run(GluForward { activation, inputs, rows, ffn, h, a, end: None })?;
        } else {
            self.backend.run(ActivationForward { activation, h, a })?;
        }
        Ok(out)
    }

    /// Computes the gradient of a layer's input, and those of its adapter.
    pub(super) fn input_gradient(&self, args: LayerBackward<'_>) -> Result<Tensor> {
        let LayerBackward { shape, layer, x, dy, .. } = args;
        let LinearShape { rows, inputs: cols, outputs: depth } = shape;
        let dx = self.activation(rows * cols)?;
        let adapted = layer.adapter.as_ref().zip(x.unrounded()).zip(dy.unrounded());
        let acc = if let Some(((adapter, x), dy)) = adapted {
            self.adapter_backward(args, adapter, [&x.tensor, &dy.tensor, &dx], x.z.get())?;
            Accumulate::Add
        } else {
            Accumulate::Overwrite
        };
        match dy {
            Operand::Plain(dy) if acc == Accumulate::Add => {
                let (dy, w) = (Matrix::new(dy.tensor.all(), depth), self.param(&layer.weight));
                self.add_product([rows, cols, depth], dy, Matrix::new(w, cols), dx.all())?;
            }
            Operand::Plain(dy) => {
                let (dy, w, dx) = (dy.tensor.all(), self.param(&layer.weight), dx.all());
                self.backend.run(LinearBackwardInput { shape, dy, w, dx })?;
            }
            Operand::Fp8(dy) | Operand::Both(_, dy) => {
                let w = self.rounded_weights(&layer.weight, [depth, cols], Use::Columns)?;
                let (a, b, y) = (dy.part(Use::Rows), w.part(Use::Columns), dx.all());
                self.backend.run(GemmFp8 { rows, cols, depth, a, b, bias: None, y, acc })?;
            }
        }
        Ok(dx)
    }

    /// Computes the gradients of two layers' weights, unless they are frozen.
    pub(super) fn weight_gradients(&self, layers: [LayerBackward<'_>; 2]) -> Result<()> {
        if let [Some(first), Some(second)] = layers.map(LayerBackward::plain) {
            return self.backend.run([first, second]);
        }
        for LayerBackward { shape, x, dy, dw, acc, .. } in layers {
            if let (Operand::Fp8(x), Operand::Fp8(dy), Some(dw)) = (x, dy, dw) {
                let LinearShape { rows: depth, inputs: cols, outputs: rows } = shape;
                let (a, b) = (dy.part(Use::Columns), x.part(Use::Columns));
                self.backend.run(GemmFp8 { rows, cols, depth, a, b, bias: None, y: dw, acc })?;
            }
        }
        Ok(())
    }

    /// Computes the gradient of the activation function's input `h`, from that of the output of the layer after it, and
    /// the gradient of the bias added in `h`, if there is one.
    pub(super) fn activation_gradient(
        &self,
        args: LayerBackward<'_>,
        h: &Tensor,
        dbias: Option<Slice<'_>>,
    ) -> Result<Tensor> {
        let LayerBackward { shape, layer, dy, acc, .. } = args;
        let (activation, rows, ffn) = (self.activation_function(), shape.rows, shape.inputs);
        let w = self.param(&layer.weight);
        let fused = if layer.adapter.is_none() { dy.plain() } else { None };
        if self.shape.gated {
            let (dh, inputs) = (self.activation(h.len())?, self.glu_inputs());
            if let Some(dy) = fused {
                let da = self.activation(rows * ffn)?;
                let (dy, h, da, dh) = (dy.all(), h.all(), da.all(), dh.all());
                self.backend.run(GluLinearBackward { shape, activation, inputs, dy, w, h, da, dh })?;
            } else {
                let da = self.input_gradient(args)?;
                let (h, da, dh) = (h.all(), da.all(), dh.all());
                self.backend.run(GluBackward { activation, inputs, rows, ffn, h, da, dh, end: None })?;
            }
            if let Some(out) = dbias {
                self.backend.run(ColumnSum { rows, cols: 2 * ffn, x: dh.all(), out, acc })?;
            }
            return Ok(dh);
        }
        if let Some(dy) = fused {
            let gradient = self.activation(h.len())?;
            let (dy, h, dh) = (dy.all(), h.all(), gradient.all());
            self.backend.run(ActivationLinearBackward { shape, activation, dy, w, h, dh, dbias, acc })?;
            return Ok(gradient);
        }
        let gradient = self.input_gradient(args)?;
        let (h, dh) = (h.all(), gradient.all());
        self.backend.run(ActivationBackward { activation, rows, cols: ffn, h, dh, dbias, acc })?;
        Ok(gradient)
    }

    pub(super) fn activation_function(&self) -> Activation {
        activation_function(&self.shape)
    }
}

/// Returns the activation function of the feed-forward layers.
pub(crate) fn activation_function(shape: &model::ModelShape) -> Activation {
    match shape.activation {
        model::Activation::Silu => Activation::Silu,
        model::Activation::Gelu => Activation::Gelu,
        model::Activation::GeluTanh => Activation::GeluTanh,
        model::Activation::Relu2 => Activation::Relu2,
        model::Activation::QuickGelu => Activation::QuickGelu,
    }
}
