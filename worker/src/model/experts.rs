//! Blocks with experts: a router, and feed-forward layers of which each token uses those that it chooses.
//!
//! ```text
//! x [N, C] -> logits -> experts, weights [N, k] -> offsets, order of the rows
//! x -> rows [N k, C] -> h [N k, 2 F] -> a [N k, F] -> y [N k, C] -> weighted sums [N, C]
//! ```
//! All shapes are fixed, and the number of rows of each expert is known to the device only, so that a step can be
//! captured.

use xlaunch_engine::{
    CombineRows, DType, GatherRows, GluForward, GroupedForward, GroupedShape, LinearShape, Result,
    RouteForward, RouteShape, Router, RouterLogits, RowsShape, SortByExpert, Tensor,
};
use xlaunch_spec::model::{self, ModelShape};

use super::Model;

/// Whether a block is computed in forward, which keeps the loads, or again in backward, which needs their sum over
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    First,
    Again,
}

/// Choices of a pass, and their order by expert.
#[derive(Debug)]
pub(super) struct Choices {
    /// `[N, E]` F32.
    pub(super) logits: Tensor,
    /// `[N, k]` I32.
    pub(super) experts: Tensor,
    /// `[N, k]` F32.
    pub(super) weights: Tensor,
    /// `[E + 1]` I32.
    pub(super) offsets: Tensor,
    /// `[N k]` I32.
    pub(super) choice_of: Tensor,
    /// `[N k]` I32.
    pub(super) row_of: Tensor,
}

/// Activations of the experts of a block.
#[derive(Debug)]
pub(super) struct Experts {
    pub(super) choices: Choices,
    /// Inputs of the first layer.
    pub(super) rows: Tensor,
    pub(super) h: Tensor,
    pub(super) a: Tensor,
    /// Outputs of the second layer.
    pub(super) y: Tensor,
}

/// Activations of experts without those that are cheap to compute.
#[derive(Debug)]
pub(super) struct CostlyExperts {
    choices: Choices,
    h: Tensor,
    y: Tensor,
}

/// Sizes of a block's experts in a pass over N tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertShapes {
    pub(super) route: RouteShape,
    pub(super) rows: RowsShape,
    /// The first layer, and the second.
    pub(super) fc: GroupedShape,
    pub(super) out: GroupedShape,
}

impl ExpertShapes {
    pub(super) fn new(shape: &ModelShape, tokens: usize) -> Self {
        let (experts, chosen, cols) = (shape.experts, shape.experts_per_token, shape.dim);
        let router = match shape.router {
            model::Router::Softmax => Router::Softmax,
            model::Router::Sigmoid => Router::Sigmoid,
        };
        let layer = |inputs, outputs| GroupedShape { rows: tokens * chosen, experts, inputs, outputs };
        Self {
            route: RouteShape { rows: tokens, experts, chosen, router, normalise: shape.normalise },
            rows: RowsShape { tokens, chosen, cols },
            fc: layer(cols, shape.expert_inputs()),
            out: layer(shape.expert_width(), cols),
        }
    }

    /// Number of choices.
    pub(super) fn choices(self) -> usize {
        self.fc.rows
    }

    pub(super) fn router(self) -> LinearShape {
        LinearShape { rows: self.route.rows, inputs: self.rows.cols, outputs: self.route.experts }
    }
}

impl Experts {
    /// Frees the activations that are cheap to compute.
    pub(super) fn costly(self) -> CostlyExperts {
        let Self { choices, h, y, .. } = self;
        CostlyExperts { choices, h, y }
    }
}

impl Model {
    /// Computes the experts of a block for `x`, `[N, C]`, up to the outputs of their second layers.
    pub(super) fn experts(&self, index: usize, x: &Tensor, run: Run) -> Result<Experts> {
        let (params, backend) = (&self.layout.blocks[index], &self.backend);
        let shapes = ExpertShapes::new(&self.shape, x.len() / self.shape.dim);
        let choices = self.choose(index, shapes, x, run)?;
        let offsets = choices.offsets.all();
        let rows = self.gathered(shapes, &choices, x)?;
        let h = self.activation(shapes.choices() * shapes.fc.outputs)?;
        let w = self.param(&params.fc.weight);
        backend.run(GroupedForward { shape: shapes.fc, offsets, x: rows.all(), w, y: h.all() })?;
        let a = self.gated(shapes, &h)?;
        let y = self.activation(shapes.choices() * shapes.out.outputs)?;
        let w = self.param(&params.out.weight);
        backend.run(GroupedForward { shape: shapes.out, offsets, x: a.all(), w, y: y.all() })?;
        Ok(Experts { choices, rows, h, a, y })
    }

    /// Restores the activations that were freed, from the block's input of the experts.
    pub(super) fn restored_experts(&self, kept: CostlyExperts, x: &Tensor) -> Result<Experts> {
        let CostlyExperts { choices, h, y } = kept;
        let shapes = ExpertShapes::new(&self.shape, x.len() / self.shape.dim);
        let (rows, a) = (self.gathered(shapes, &choices, x)?, self.gated(shapes, &h)?);
        Ok(Experts { choices, rows, h, a, y })
    }

    /// Returns the weighted sums of the outputs.
    pub(super) fn combined(&self, experts: &Experts) -> Result<Tensor> {
        let Experts { choices, y, .. } = experts;
        let shapes = ExpertShapes::new(&self.shape, choices.experts.len() / self.shape.experts_per_token);
        let out = self.activation(shapes.rows.tokens * shapes.rows.cols)?;
        self.backend.run(CombineRows {
            shape: shapes.rows,
            row_of: choices.row_of.all(),
            weights: choices.weights.all(),
            rows: y.all(),
            out: out.all(),
            add: false,
        })?;
        Ok(out)
    }

    fn choose(&self, index: usize, shapes: ExpertShapes, x: &Tensor, run: Run) -> Result<Choices> {
        let (backend, route, len) = (&self.backend, shapes.route, shapes.choices());
        let ints = |len| backend.alloc(DType::I32, len);
        let choices = Choices {
            logits: backend.alloc(DType::F32, route.rows * route.experts)?,
            experts: ints(len)?,
            weights: backend.alloc(DType::F32, len)?,
            offsets: ints(route.experts + 1)?,
            choice_of: ints(len)?,
            row_of: ints(len)?,
        };
        let Choices { logits, experts, weights, offsets, choice_of, row_of } = &choices;
        let scratch = backend.alloc(DType::F32, route.experts)?;
        let kept = self.routing.as_ref().filter(|_| run == Run::First);
        let loads = kept.map_or(scratch.all(), |routing| routing.loads(&self.shape, index));
        if let Some(router) = &self.layout.blocks[index].router {
            let (shape, w) = (shapes.router(), self.param(router));
            backend.run(RouterLogits { shape, x: x.all(), w, logits: logits.all() })?;
        }
        let (logits, experts, weights) = (logits.all(), experts.all(), weights.all());
        backend.run(RouteForward { shape: route, logits, experts, weights })?;
        let counters = ints(SortByExpert::counters(len, route.experts))?;
        backend.run(SortByExpert {
            choices: len,
            experts: route.experts,
            chosen: experts,
            offsets: offsets.all(),
            choice_of: choice_of.all(),
            row_of: row_of.all(),
            loads,
            scratch: counters.all(),
        })?;
        Ok(choices)
    }

    fn gathered(&self, shapes: ExpertShapes, choices: &Choices, x: &Tensor) -> Result<Tensor> {
        let rows = self.activation(shapes.choices() * shapes.rows.cols)?;
        let (shape, choice_of) = (shapes.rows, choices.choice_of.all());
        self.backend.run(GatherRows { shape, choice_of, x: x.all(), rows: rows.all() })?;
        Ok(rows)
    }

    fn gated(&self, shapes: ExpertShapes, h: &Tensor) -> Result<Tensor> {
        let (activation, rows, ffn) = (self.activation_function(), shapes.choices(), shapes.out.inputs);
        let a = self.activation(rows * ffn)?;
        self.backend.run(GluForward { activation, rows, ffn, h: h.all(), a: a.all() })?;
        Ok(a)
    }
}
