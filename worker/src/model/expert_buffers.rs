//! Experts in decoding. Their buffers are allocated once, because a step is captured and must not allocate any.

use std::ops::Range;

use xlaunch_engine::{
    CombineRows, DType, GEMV_ROWS, GatherRows, Gemv, GluForward, GroupedForward, LinearShape, Result,
    RouteForward, RouteShape, RouterLogits, RowsShape, Slice, SortByExpert, Tensor,
};

use super::Model;
use super::experts::ExpertShapes;
use super::shared_experts::gate_route;

/// Choices and activations of experts.
#[derive(Debug)]
pub(super) struct ExpertBuffers {
    logits: Tensor,
    weights: Tensor,
    chosen: Tensor,
    offsets: Tensor,
    choice_of: Tensor,
    row_of: Tensor,
    loads: Tensor,
    counters: Tensor,
    /// Inputs of the first layer, then outputs of the second one.
    rows: Tensor,
    h: Tensor,
    a: Tensor,
}

impl ExpertBuffers {
    /// Allocates memory for up to `rows` tokens.
    pub(super) fn new(model: &Model, rows: usize) -> Result<Self> {
        let backend = &model.backend;
        let shapes = ExpertShapes::new(&model.shape, 1, rows);
        let (choices, experts) = (shapes.choices(), shapes.route.experts);
        let act = |cols: usize| backend.alloc(backend.activation_dtype(), choices * cols);
        Ok(Self {
            logits: backend.alloc(DType::F32, rows * experts)?,
            weights: backend.alloc(DType::F32, choices)?,
            chosen: backend.alloc(DType::I32, choices)?,
            offsets: backend.alloc(DType::I32, experts + 1)?,
            choice_of: backend.alloc(DType::I32, choices)?,
            row_of: backend.alloc(DType::I32, choices)?,
            loads: backend.alloc(DType::F32, experts)?,
            counters: backend.alloc(DType::I32, SortByExpert::counters(choices, experts))?,
            rows: act(shapes.rows.cols)?,
            h: act(shapes.fc.outputs)?,
            a: act(shapes.out.inputs)?,
        })
    }

    /// Multiplies the outputs `y` of shared experts by the gate of their inputs `x`.
    pub(super) fn gate(
        &self,
        model: &Model,
        rows: usize,
        gate: &Range<usize>,
        [x, y, out]: [Slice<'_>; 3],
    ) -> Result<()> {
        self.route(model, gate_route(rows), x, (gate, None), None)?;
        let (row_of, weights) = (self.row_of.slice(0..rows), self.weights.slice(0..rows));
        let shape = RowsShape { tokens: rows, chosen: 1, cols: model.shape.dim };
        model.backend.run(CombineRows { shape, row_of, weights, rows: y, out, add: false, end: None })
    }

    /// Computes the weighted sums of the experts' outputs for `x`. With `add`, they are added to `out`.
    pub(super) fn run(
        &self,
        model: &Model,
        rows: usize,
        x: Slice<'_>,
        (index, router): (usize, &Range<usize>),
        out: Slice<'_>,
        add: bool,
    ) -> Result<()> {
        let (backend, shapes) = (&model.backend, ExpertShapes::new(&model.shape, 1, rows));
        let (choices, params) = (shapes.choices(), &model.layout.blocks[index]);
        let router = (router, params.router_logit_bias.as_ref());
        self.route(model, shapes.route, x, router, model.router_bias(index))?;
        let (offsets, expert_rows) = (self.offsets.all(), self.rows.slice(0..choices * shapes.rows.cols));
        let (choice_of, row_of) = (self.choice_of.slice(0..choices), self.row_of.slice(0..choices));
        backend.run(GatherRows { shape: shapes.rows, choice_of, x, rows: expert_rows, end: None })?;
        let (h, a) =
            (self.h.slice(0..choices * shapes.fc.outputs), self.a.slice(0..choices * shapes.out.inputs));
        let w = model.param(&params.fc.weight);
        backend.run(GroupedForward { shape: shapes.fc, offsets, x: expert_rows, w, y: h })?;
        if let Some([bias, _]) = &params.expert_biases {
            model.add_expert_bias(shapes.fc, offsets, bias, h)?;
        }
        let (activation, inputs) = (model.activation_function(), model.glu_inputs());
        let ffn = shapes.out.inputs;
        backend.run(GluForward { activation, inputs, rows: choices, ffn, h, a, end: None, amax: None })?;
        let w = model.param(&params.out.weight);
        backend.run(GroupedForward { shape: shapes.out, offsets, x: a, w, y: expert_rows })?;
        if let Some([_, bias]) = &params.expert_biases {
            model.add_expert_bias(shapes.out, offsets, bias, expert_rows)?;
        }
        let weights = self.weights.slice(0..choices);
        backend.run(CombineRows {
            shape: shapes.rows,
            row_of,
            weights,
            rows: expert_rows,
            out,
            add,
            end: None,
        })
    }

    /// Computes the choices of a router, their weights and their order.
    fn route(
        &self,
        model: &Model,
        route: RouteShape,
        x: Slice<'_>,
        (router, logit_bias): (&Range<usize>, Option<&Range<usize>>),
        bias: Option<Slice<'_>>,
    ) -> Result<()> {
        let logit_bias = logit_bias.map(|bias| model.param(bias));
        let (backend, choices, w) = (&model.backend, route.rows * route.chosen, model.param(router));
        let shape = LinearShape { rows: route.rows, inputs: model.shape.dim, outputs: route.experts };
        let logits = self.logits.slice(0..route.rows * route.experts);
        if route.rows <= GEMV_ROWS {
            backend.run(Gemv { shape, x, w, bias: logit_bias, activation: None, y: logits })?;
        } else {
            backend.run(RouterLogits { shape, x, w, bias: logit_bias, logits })?;
        }
        let (weights, chosen) = (self.weights.slice(0..choices), self.chosen.slice(0..choices));
        backend.run(RouteForward { shape: route, logits, bias, experts: chosen, weights })?;
        let (choice_of, row_of) = (self.choice_of.slice(0..choices), self.row_of.slice(0..choices));
        let experts = route.experts;
        let (offsets, loads) = (self.offsets.slice(0..experts + 1), self.loads.slice(0..experts));
        let scratch = self.counters.slice(0..SortByExpert::counters(choices, experts));
        let sort =
            SortByExpert { choices, experts, first: 0, chosen, offsets, choice_of, row_of, loads, scratch };
        backend.run(sort)
    }
}
