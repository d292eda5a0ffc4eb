//! One matrix multiplication: operands, sizes and epilogue.

use cudarc::cublaslt::sys::cublasLtEpilogue_t as LtEpilogue;

use crate::tensor::Slice;

/// `c = epilogue(op(a) op(b))`, column-major: a (m, k), b (k, n) after `op`, c (m, n).
#[derive(Clone, Copy)]
pub(crate) struct GemmCall<'a> {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Operand<'a>,
    pub(crate) b: Operand<'a>,
    pub(crate) epilogue: Epilogue<'a>,
    pub(crate) c: Slice<'a>,
    /// True if the result is added to c; only with `Epilogue::None` and `Epilogue::Part`.
    pub(crate) accumulate: bool,
}

/// Function applied to the result before it is written. Biases and their gradients have length m; `h` has the layout of
/// the output.
#[derive(Clone, Copy)]
pub(crate) enum Epilogue<'a> {
    None,
    /// `c = factor a b`, where c is a part of a larger matrix: its columns are `stride` elements apart.
    Part {
        factor: f32,
        stride: usize,
    },
    /// `c = a b + bias`.
    Bias(Slice<'a>),
    /// `h = a b + bias`, `c = gelu(h)`.
    Gelu {
        bias: Slice<'a>,
        h: Slice<'a>,
    },
    /// `c = gelu'(h) (a b)`, and `dbias` = sum of c along n, in the output's element type.
    GeluGrad {
        h: Slice<'a>,
        dbias: Option<Slice<'a>>,
    },
}

impl<'a> Epilogue<'a> {
    /// Returns the name in the library.
    pub(super) fn kind(self) -> LtEpilogue {
        match self {
            Self::None | Self::Part { .. } => LtEpilogue::CUBLASLT_EPILOGUE_DEFAULT,
            Self::Bias(_) => LtEpilogue::CUBLASLT_EPILOGUE_BIAS,
            Self::Gelu { .. } => LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Self::GeluGrad { dbias: None, .. } => LtEpilogue::CUBLASLT_EPILOGUE_DGELU,
            Self::GeluGrad { dbias: Some(_), .. } => LtEpilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD,
        }
    }

    /// Returns the bias that is read, or the gradient of a bias that is written.
    pub(super) fn bias(self) -> Option<Slice<'a>> {
        match self {
            Self::None | Self::Part { .. } => None,
            Self::Bias(bias) | Self::Gelu { bias, .. } => Some(bias),
            Self::GeluGrad { dbias, .. } => dbias,
        }
    }

    /// Returns the factor of the result.
    pub(super) fn factor(self) -> f32 {
        if let Self::Part { factor, .. } = self { factor } else { 1.0 }
    }

    /// Returns the distance between columns of c, if it is not m.
    pub(super) fn stride(self) -> Option<usize> {
        if let Self::Part { stride, .. } = self { Some(stride) } else { None }
    }

    /// Returns the GELU input, which is written in forward and read in backward.
    pub(super) fn h(self) -> Option<Slice<'a>> {
        match self {
            Self::None | Self::Part { .. } | Self::Bias(_) => None,
            Self::Gelu { h, .. } | Self::GeluGrad { h, .. } => Some(h),
        }
    }
}

/// One operand: its memory, whether it is transposed, and the F32 factor of FP8 elements. `stride` is the distance
/// between columns in memory, if there are gaps.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    pub(super) slice: Slice<'a>,
    pub(super) transpose: bool,
    pub(super) stride: Option<usize>,
    pub(super) scale: Option<Slice<'a>>,
}

impl<'a> Operand<'a> {
    pub(crate) fn scaled(self, scale: Slice<'a>) -> Self {
        Self { scale: Some(scale), ..self }
    }

    pub(crate) fn strided(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }
}

/// Operand in its column-major layout in memory.
pub(crate) fn plain(slice: Slice<'_>) -> Operand<'_> {
    Operand { slice, transpose: false, stride: None, scale: None }
}

/// Operand that is transposed.
pub(crate) fn transposed(slice: Slice<'_>) -> Operand<'_> {
    Operand { slice, transpose: true, stride: None, scale: None }
}
