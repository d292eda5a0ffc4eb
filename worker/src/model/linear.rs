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
use std::rc::Rc;

use xlaunch_engine::{
    Accumulate, Activation, ActivationBackward, ActivationForward, ActivationLinearBackward, ColumnSum,
    DType, Gemm, GemmFp8, GluBackward, GluForward, GluLinearBackward, LinearActivationForward,
    LinearBackwardInput, LinearBackwardWeight, LinearForward, LinearGluForward, LinearShape, Matrix, Result,
    Slice, Tensor,
};
use xlaunch_spec::model;

use super::Model;
use super::fp8::{Fp8Tensor, Measured, Use};
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
            Self::Fp8(tensor) => Self::Fp8(tensor.kept()),
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

impl Model {
    /// Prepares a layer's input `[N, I]`.
    pub(super) fn input(&self, rows: usize, x: impl Into<Measured>, used: Use) -> Result<Operand> {
        self.operand(rows, x.into(), used, DType::Fp8E4m3)
    }

    /// Prepares the gradient of a layer's output `[N, O]`.
    pub(super) fn output_gradient(&self, rows: usize, dy: impl Into<Measured>) -> Result<Operand> {
        self.operand(rows, dy.into(), Use::Both, DType::Fp8E5m2)
    }

    fn operand(&self, rows: usize, x: Measured, used: Use, format: DType) -> Result<Operand> {
        let in_fp8 = self.in_fp8(rows);
        let rounded = |used| self.rounded([rows, x.tensor.len() / rows], x.slices(), used, format, None);
        if in_fp8 && self.adapters.is_none() {
            return rounded(used).map(Operand::Fp8);
        }
        // Columns alone would be for the gradient of frozen weights.
        let rounded = (in_fp8 && used != Use::Columns).then(|| rounded(Use::Rows)).transpose()?;
        let x = Unrounded { tensor: x.tensor, z: OnceCell::new() };
        Ok(match rounded {
            Some(rounded) => Operand::Both(x, rounded),
            None => Operand::Plain(x),
        })
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
    ) -> Result<(Tensor, Measured)> {
        let fused = if layer.adapter.is_none() { x.plain() } else { None };
        let Some(x) = fused else {
            let h = self.linear(shape, x, layer)?;
            let a = self.activated(shape.rows, &h, width)?;
            return Ok((h, a));
        };
        let input = self.activation(shape.rows * shape.outputs)?;
        let output = self.activation(shape.rows * width)?;
        let (x, w, bias) =
            (x.all(), self.param(&layer.weight), layer.bias.as_ref().map(|bias| self.param(bias)));
        let (activation, h, a) = (self.activation_function(), input.all(), output.all());
        if self.shape.gated {
            let inputs = self.glu_inputs();
            self.backend.run(LinearGluForward { shape, activation, inputs, x, w, bias, h, a })?;
        } else {
            self.backend.run(LinearActivationForward { shape, activation, x, w, bias, h, a })?;
        }
        Ok((input, output.into()))
    }

    /// Computes the output of the activation function, which has this width, from its input.
    pub(super) fn activated(&self, rows: usize, h: &Tensor, ffn: usize) -> Result<Measured> {
        if self.shape.gated {
            return self.gated(rows, h, None);
        }
        let a = self.activation(rows * ffn)?;
        let activation = self.activation_function();
        self.backend.run(ActivationForward { activation, h: h.all(), a: a.all() })?;
        Ok(a.into())
    }

    /// Computes the output of the gated activation function, `[N, F]`, of the first `end` rows if there is one.
    pub(super) fn gated(&self, rows: usize, h: &Tensor, end: Option<Slice<'_>>) -> Result<Measured> {
        let (activation, inputs, ffn) = (self.activation_function(), self.glu_inputs(), h.len() / (2 * rows));
        let out = self.unmeasured(rows, rows * ffn)?;
        let (h, (a, amax)) = (h.all(), out.slices());
        self.backend.run(GluForward { activation, inputs, rows, ffn, h, a, end, amax })?;
        Ok(out)
    }

    /// Computes the gradient of the gated activation function's input, `[N, 2 F]`, from that of its output.
    pub(super) fn gated_gradient(
        &self,
        rows: usize,
        [h, da]: [&Tensor; 2],
        end: Option<Slice<'_>>,
    ) -> Result<Measured> {
        let (activation, inputs, ffn) = (self.activation_function(), self.glu_inputs(), da.len() / rows);
        let out = self.unmeasured(rows, h.len())?;
        let (h, da, (dh, amax)) = (h.all(), da.all(), out.slices());
        self.backend.run(GluBackward { activation, inputs, rows, ffn, h, da, dh, end, amax })?;
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
    ) -> Result<Measured> {
        let LayerBackward { shape, layer, dy, acc, .. } = args;
        let (activation, rows, ffn) = (self.activation_function(), shape.rows, shape.inputs);
        let w = self.param(&layer.weight);
        let fused = if layer.adapter.is_none() { dy.plain() } else { None };
        if self.shape.gated {
            let gradient = if let Some(dy) = fused {
                let (gradient, inputs) = (self.activation(h.len())?, self.glu_inputs());
                let da = self.activation(rows * ffn)?;
                let (dy, h, da, dh) = (dy.all(), h.all(), da.all(), gradient.all());
                self.backend.run(GluLinearBackward { shape, activation, inputs, dy, w, h, da, dh })?;
                gradient.into()
            } else {
                let da = self.input_gradient(args)?;
                self.gated_gradient(rows, [h, &da], None)?
            };
            if let Some(out) = dbias {
                self.backend.run(ColumnSum { rows, cols: 2 * ffn, x: gradient.tensor.all(), out, acc })?;
            }
            return Ok(gradient);
        }
        if let Some(dy) = fused {
            let gradient = self.activation(h.len())?;
            let (dy, h, dh) = (dy.all(), h.all(), gradient.all());
            self.backend.run(ActivationLinearBackward { shape, activation, dy, w, h, dh, dbias, acc })?;
            return Ok(gradient.into());
        }
        let gradient = self.input_gradient(args)?;
        let (h, dh) = (h.all(), gradient.all());
        self.backend.run(ActivationBackward { activation, rows, cols: ffn, h, dh, dbias, acc })?;
        Ok(gradient.into())
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
