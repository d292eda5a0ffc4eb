//! The linear layers of experts, in the element type of activations or in FP8, like those of `linear`.
//!
//! In FP8, backward rounds the input once more instead of keeping it: it is also needed unrounded, by other gradients,
//! or computed again.

use std::ops::Range;

use xlaunch_engine::{
    Accumulate, DType, EngineError, Fp8Operand, GroupedBackwardInput, GroupedBackwardWeight, GroupedForward,
    GroupedFp8, GroupedProduct, GroupedShape, Result, Slice, Tensor,
};

use super::Model;
use super::fp8::{Measured, Use};
use super::pass::Pass;

/// A layer of this rank's experts, and the rows that it multiplies.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertLayer<'a> {
    pub(super) shape: GroupedShape,
    pub(super) weight: &'a Range<usize>,
    /// (E + 1,) I32.
    pub(super) offsets: Slice<'a>,
    /// Number of rows that exist, unless all do.
    pub(super) end: Option<Slice<'a>>,
}

impl Model {
    /// Computes the output of a layer.
    pub(super) fn expert_layer(&self, layer: ExpertLayer<'_>, x: &Measured) -> Result<Tensor> {
        let ExpertLayer { shape, weight, offsets, end } = layer;
        let GroupedShape { rows, experts, inputs, outputs } = shape;
        let y = self.activation(rows * outputs)?;
        if self.in_fp8(rows) {
            let x = self.rounded([rows, inputs], x.slices(), Use::Rows, DType::Fp8E4m3, end)?;
            let w = self.rounded_weights(weight, [experts * outputs, inputs], Use::Rows)?;
            let (a, b) = (x.part(Use::Rows), w.part(Use::Rows));
            self.fp8_product(layer, GroupedProduct::Forward, [a, b], y.all(), Accumulate::Overwrite)?;
        } else {
            let w = self.param(weight);
            self.backend.run(GroupedForward { shape, offsets, x: x.tensor.all(), w, y: y.all() })?;
        }
        Ok(y)
    }

    /// Computes the gradients of a layer's input, in `dx`, and then of its weights, unless they are frozen. Calls
    /// `then` between the two.
    pub(super) fn expert_layer_backward<E: From<EngineError>>(
        &self,
        pass: Pass<'_>,
        layer: ExpertLayer<'_>,
        [dy, x]: [&Measured; 2],
        dx: Slice<'_>,
        then: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let ExpertLayer { shape, weight, offsets, end } = layer;
        let GroupedShape { rows, experts, inputs, outputs } = shape;
        let (dw, acc) = (pass.gradient(weight), pass.acc);
        if !self.in_fp8(rows) {
            let (dy, x, w) = (dy.tensor.all(), x.tensor.all(), self.param(weight));
            self.backend.run(GroupedBackwardInput { shape, offsets, dy, w, dx })?;
            then()?;
            if let Some(dw) = dw {
                self.backend.run(GroupedBackwardWeight { shape, offsets, dy, x, dw, acc })?;
            }
            return Ok(());
        }
        let used = if dw.is_some() { Use::Both } else { Use::Rows };
        let dy = self.rounded([rows, outputs], dy.slices(), used, DType::Fp8E5m2, end)?;
        let w = self.rounded_weights(weight, [experts * outputs, inputs], Use::Columns)?;
        let (a, b) = (dy.part(Use::Rows), w.part(Use::Columns));
        self.fp8_product(layer, GroupedProduct::Input, [a, b], dx, Accumulate::Overwrite)?;
        drop(w);
        then()?;
        if let Some(dw) = dw {
            let x = self.rounded([rows, inputs], x.slices(), Use::Columns, DType::Fp8E4m3, end)?;
            let (a, b) = (dy.part(Use::Columns), x.part(Use::Columns));
            self.fp8_product(layer, GroupedProduct::Weight, [a, b], dw, acc)?;
        }
        Ok(())
    }

    fn fp8_product(
        &self,
        layer: ExpertLayer<'_>,
        product: GroupedProduct,
        [a, b]: [Fp8Operand<'_>; 2],
        out: Slice<'_>,
        acc: Accumulate,
    ) -> Result<()> {
        let ExpertLayer { shape, offsets, .. } = layer;
        self.backend.run(GroupedFp8 { shape, product, offsets, a, b, out, acc })
    }
}
