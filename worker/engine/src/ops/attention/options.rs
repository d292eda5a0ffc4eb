//! Options of attention: the factor of the scores, a sliding window, a soft cap, and documents in rows.

use std::fmt;

/// An `f32` that is compared and hashed by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scalar(u32);

impl From<f32> for Scalar {
    fn from(number: f32) -> Self {
        Self(number.to_bits())
    }
}

impl Scalar {
    /// Returns the number.
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl fmt::Debug for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// How scores become probabilities: `s = scale q k^T`, then `s = softcap tanh(s / softcap)` if there is a cap, then the
/// softmax over the keys that the query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionOptions {
    /// Factor of the scores.
    pub scale: Scalar,
    /// Number of positions that a query sees, its own and those before it, as transformers counts `sliding_window`: at
    /// least 1. `None`: all of them.
    pub window: Option<usize>,
    /// Bound of the scores, greater than 0.
    pub softcap: Option<Scalar>,
    /// True if rows hold several documents, see [`Documents`](crate::Documents): a query sees keys of its own only.
    pub documents: bool,
}

impl AttentionOptions {
    /// Options of plain causal attention with heads of this width: scores scaled by `1 / sqrt(D)`.
    #[expect(clippy::cast_precision_loss, reason = "head widths are small")]
    pub fn new(width: usize) -> Self {
        Self { scale: (1.0 / (width as f32).sqrt()).into(), window: None, softcap: None, documents: false }
    }

    /// Returns the same options without a window that hides nothing from sequences of this length.
    #[must_use]
    pub fn for_length(self, seq: usize) -> Self {
        Self { window: self.window.filter(|window| *window < seq), ..self }
    }

    /// Returns the number of positions that a query of a sequence of this length sees at most.
    pub(crate) fn visible(self, seq: usize) -> usize {
        self.window.map_or(seq, |window| window.clamp(1, seq.max(1)))
    }

    /// Writes the options that differ from the default for this head width as fields of a shape.
    pub(crate) fn debug(self, width: usize, shape: &mut fmt::DebugStruct<'_, '_>) {
        if self.scale != Self::new(width).scale {
            shape.field("scale", &self.scale);
        }
        if let Some(window) = self.window {
            shape.field("window", &window);
        }
        if let Some(softcap) = self.softcap {
            shape.field("softcap", &softcap);
        }
        if self.documents {
            shape.field("documents", &true);
        }
    }
}
