//! State shared by all parts of a backward pass.

use std::ops::Range;

use xlaunch_comm::Exchange;
use xlaunch_engine::{Accumulate, Slice, Tensor};

use super::gradient_arena::GradientArena;
use super::layout::Linear;
use super::linear::{LayerBackward, Operand};
use super::{Model, Rows};

/// Progress of a pass, for the caller to act on before the pass continues.
#[derive(Debug)]
pub enum Progress {
    /// The next part of the layout is about to be computed.
    NextPart,
    /// All gradients below this offset of the arena have been enqueued.
    Finished(usize),
    /// An operation among the ranks of a group, whose results the pass reads once it is finished: see
    /// [`Collective::exchange`](xlaunch_comm::Collective::exchange).
    Exchange(Exchange),
}

/// Receives the progress of a pass.
pub(super) type OnProgress<'a, E> = &'a mut dyn FnMut(Progress) -> std::result::Result<(), E>;

/// Arguments shared by all parts of one backward pass.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) grads: GradientArena<'a>,
    pub(super) acc: Accumulate,
    /// Memory for the gradients of frozen scales and shifts, which kernels compute with other results. Nothing reads
    /// them. `None` if all parameters are trained.
    pub(super) discarded: Option<&'a Tensor>,
}

impl<'a> Pass<'a> {
    /// Describes a layer with these numbers of inputs and outputs.
    pub(super) fn layer(
        self,
        layer: &'a Linear,
        [inputs, outputs]: [usize; 2],
        x: &'a Operand,
        dy: &'a Operand,
    ) -> LayerBackward<'a> {
        let shape = Model::linear_shape(self.rows, inputs, outputs);
        let Self { grads, acc, .. } = self;
        let dw = self.gradient(&layer.weight);
        LayerBackward { shape, layer, x, dy, dw, grads, acc }
    }

    /// Returns the gradient of a parameter; `None` if it is frozen.
    pub(super) fn gradient(self, param: &Range<usize>) -> Option<Slice<'a>> {
        self.discarded.is_none().then(|| self.grads.slice(param.clone()))
    }

    /// Returns the gradient of a layer's bias, if it has one that is trained.
    pub(super) fn bias(self, layer: &Linear) -> Option<Slice<'a>> {
        self.gradient(layer.bias.as_ref()?)
    }

    /// Returns the gradients of one or two vectors of parameters.
    pub(super) fn vectors(
        self,
        first: &Range<usize>,
        second: Option<&Range<usize>>,
    ) -> (Slice<'a>, Option<Slice<'a>>) {
        let Some(memory) = self.discarded else {
            let slice = |param: &Range<usize>| self.grads.slice(param.clone());
            return (slice(first), second.map(slice));
        };
        let half = memory.len() / 2;
        (memory.slice(0..first.len()), second.map(|second| memory.slice(half..half + second.len())))
    }
}
