//! Dense feed-forward layers: those of blocks without experts, and the shared experts of the others.

use std::rc::Rc;

use xlaunch_engine::{LinearShape, Result, Tensor};

use super::Model;
use super::fp8::Use;
use super::layout::{Block, Linear, Shared};
use super::linear::Operand;
use super::pass::Pass;

/// Two layers with an activation function between them.
#[derive(Clone, Copy)]
pub(super) struct Layers<'a> {
    pub(super) fc: &'a Linear,
    pub(super) out: &'a Linear,
    /// F.
    pub(super) width: usize,
    /// Outputs of the first layer: F; if gated, 2 F.
    pub(super) outputs: usize,
}

/// Activations of the layers.
#[derive(Debug)]
pub(super) struct Dense {
    /// Input of the first layer.
    pub(super) fc: Operand,
    /// `[N, F]`; if gated, `[N, 2 F]`.
    pub(super) h: Tensor,
    /// The activation function's output `[N, F]`.
    pub(super) out: Operand,
}

impl Dense {
    /// Drops what only forward multiplies.
    pub(super) fn kept(self) -> Self {
        Self { out: self.out.kept(), ..self }
    }
}

impl Model {
    /// Returns the layers of a block without experts.
    pub(super) fn dense_layers<'a>(&self, params: &'a Block) -> Layers<'a> {
        let Block { fc, out, .. } = params;
        Layers { fc, out, width: self.shape.ffn, outputs: self.shape.ffn_inputs() }
    }

    /// Returns the layers of shared experts.
    pub(super) fn shared_layers<'a>(&self, params: &'a Shared) -> Layers<'a> {
        let Shared { fc, out, .. } = params;
        Layers { fc, out, width: self.shape.shared_width(), outputs: self.shape.shared_inputs() }
    }

    /// Computes the layers for `x`, `[N, C]`, up to the output of the activation function.
    pub(super) fn dense(&self, rows: usize, x: Rc<Tensor>, layers: Layers<'_>) -> Result<Dense> {
        let fc = self.input(rows, x, Use::Both)?;
        let shape = LinearShape { rows, inputs: self.shape.dim, outputs: layers.outputs };
        let (h, a) = self.linear_activation(shape, &fc, layers.fc, layers.width)?;
        let out = self.input(rows, a, Use::Both)?;
        Ok(Dense { fc: fc.kept(), h, out })
    }

    /// Restores the activations that were freed from the layers' input and `h`.
    pub(super) fn restored_dense(
        &self,
        rows: usize,
        x: Rc<Tensor>,
        h: Tensor,
        width: usize,
    ) -> Result<Dense> {
        let out = self.activated(rows, &h, width)?;
        let [fc, out] = [x.into(), out].map(|x| self.input(rows, x, Use::Columns));
        Ok(Dense { fc: fc?, h, out: out? })
    }

    /// Computes the output of the second layer.
    pub(super) fn dense_output(&self, rows: usize, dense: &Dense, layers: Layers<'_>) -> Result<Tensor> {
        let shape = LinearShape { rows, inputs: layers.width, outputs: self.shape.dim };
        self.linear(shape, &dense.out, layers.out)
    }

    /// Computes the gradients of the layers from that of their output. Returns that of their input.
    pub(super) fn dense_backward(
        &self,
        pass: Pass<'_>,
        dense: &Dense,
        layers: Layers<'_>,
        dy: Rc<Tensor>,
    ) -> Result<Tensor> {
        let (n, dim, Dense { fc, h, out }) = (pass.rows.count(), self.shape.dim, dense);
        let dout = self.output_gradient(n, dy)?;
        let out = pass.layer(layers.out, [layers.width, dim], out, &dout);
        let dh = self.activation_gradient(out, h, pass.bias(layers.fc))?;
        let dh = self.output_gradient(n, dh)?;
        let fc = pass.layer(layers.fc, [dim, layers.outputs], fc, &dh);
        self.weight_gradients([out, fc])?;
        self.input_gradient(fc)
    }
}
