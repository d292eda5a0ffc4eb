//! Rounding of the operands of linear layers to FP8.
//!
//! The scale of a tensor comes from its largest magnitude. The kernels of gated activations find that of what they
//! write. Other tensors are read once more.

use std::ops::Range;
use std::rc::Rc;

use xlaunch_engine::{Amax, DType, FP8_MULTIPLE, Fp8Operand, QuantizeFp8, Result, Slice, Tensor};

use super::Model;

/// A tensor in the activations' type, with its largest magnitude if that is known and will be needed.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tensor: Rc<Tensor>,
    /// F32 `[1]`.
    pub(super) amax: Option<Tensor>,
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

impl Measured {
    /// Returns the tensor and its largest magnitude.
    pub(super) fn slices(&self) -> (Slice<'_>, Option<Slice<'_>>) {
        (self.tensor.all(), self.amax.as_ref().map(Tensor::all))
    }
}

impl From<Rc<Tensor>> for Measured {
    fn from(tensor: Rc<Tensor>) -> Self {
        Self { tensor, amax: None }
    }
}

impl From<Tensor> for Measured {
    fn from(tensor: Tensor) -> Self {
        Rc::new(tensor).into()
    }
}

impl Fp8Tensor {
    /// Drops the form that only forward multiplies.
    pub(super) fn kept(self) -> Self {
        Self { rows: None, ..self }
    }

    /// Returns the operand for a use. Panics if the tensor was not rounded for this use, which is a programming error.
    #[expect(clippy::expect_used, reason = "the code that rounds a tensor knows how it will be used")]
    pub(super) fn part(&self, used: Use) -> Fp8Operand<'_> {
        let part = if used == Use::Columns { &self.columns } else { &self.rows };
        Fp8Operand { q: part.as_ref().expect("this part was rounded").all(), scale: self.scale.all() }
    }
}

impl Model {
    /// Returns whether layers multiply this number of rows in FP8. Micro-steps and evaluations of a job have a number
    /// that allows it; samples may not.
    pub(super) fn in_fp8(&self, rows: usize) -> bool {
        self.fp8 && rows.is_multiple_of(FP8_MULTIPLE)
    }

    /// Allocates a tensor with a number of rows, and its largest magnitude if it will be rounded. A kernel writes both.
    pub(super) fn unmeasured(&self, rows: usize, len: usize) -> Result<Measured> {
        let amax = self.in_fp8(rows).then(|| self.backend.alloc(DType::F32, 1)).transpose()?;
        Ok(Measured { tensor: Rc::new(self.activation(len)?), amax })
    }

    /// Finds the largest magnitude of `x`, of whose rows only `end` exist if there is one.
    pub(super) fn measure(
        &self,
        [rows, cols]: [usize; 2],
        x: Slice<'_>,
        end: Option<Slice<'_>>,
    ) -> Result<Tensor> {
        let amax = self.backend.alloc(DType::F32, 1)?;
        self.backend.run(Amax { rows, cols, x, end, amax: amax.all() })?;
        Ok(amax)
    }

    /// Rounds a tensor of these sizes, of whose rows only `end` exist if there is one. It comes with its largest
    /// magnitude if that is known.
    pub(super) fn rounded(
        &self,
        [rows, cols]: [usize; 2],
        (x, known): (Slice<'_>, Option<Slice<'_>>),
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
        let found;
        let amax = if let Some(known) = known {
            known
        } else {
            found = self.measure([rows, cols], x, end)?;
            found.all()
        };
        let scale = rounded.scale.all();
        self.backend.run(QuantizeFp8 { rows, cols, dtype, x, amax, q, transposed, scale, end })?;
        Ok(rounded)
    }

    /// Rounds weights of these sizes.
    pub(super) fn rounded_weights(
        &self,
        weight: &Range<usize>,
        sizes: [usize; 2],
        used: Use,
    ) -> Result<Fp8Tensor> {
        self.rounded(sizes, (self.param(weight), None), used, DType::Fp8E4m3, None)
    }
}
