//! The memory that backward writes gradients to.

use std::ops::Range;

use xlaunch_comm::Slots;
use xlaunch_engine::{Slice, Tensor};

/// Memory for the gradients of all trained parameters: an arena of the layout (F32 or Bf16), or slots for its buckets.
#[derive(Clone, Copy, Debug)]
pub struct GradientArena<'a> {
    /// The arena, or the memory of the slots.
    pub tensor: &'a Tensor,
    /// Positions of buckets in the memory; `None` if all buckets are at their position in the arena.
    pub slots: Option<&'a Slots>,
}

impl<'a> GradientArena<'a> {
    /// Returns the gradient of a parameter.
    pub(crate) fn slice(self, param: Range<usize>) -> Slice<'a> {
        self.tensor.slice(self.place(&param))
    }

    /// Returns the range of the tensor that holds these elements, which belong to one parameter or bucket.
    pub(crate) fn place(self, elements: &Range<usize>) -> Range<usize> {
        self.slots.map_or(elements.clone(), |slots| slots.place(elements))
    }
}
