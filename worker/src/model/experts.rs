//! Blocks with experts: a router, and feed-forward layers, of which each token uses the ones chosen by the router.
//!
//! ```text
//! x [N, C] -> logits -> experts, weights [N, k] -> offsets, order of the rows
//! x -> rows [N k, C] -> h [N k, 2 F] -> a [N k, F] -> y [N k, C] -> weighted sums [N, C]
//! ```
//! All shapes are fixed, and the number of rows of each expert is known to the device only, so that a step can be
//! captured.
//!
//! If a group of R ranks divides the experts among itself, each of its ranks gathers the tokens and the choices of all,
//! G = R N tokens, computes the rows of its own experts, and adds up their outputs. The sums over ranks of these are
//! scattered. Backward is the mirror image. Gathers and scatters are equally long on all ranks, whatever the load; the
//! rows of experts of other ranks come after those of a rank's own, and no kernel touches them.
//! ```text
//! x [N, C], experts, weights [N, k] --all-gather--> [G, C], [G, k] -> rows [G k, C] -> .. -> y [G k, C]
//! weighted sums [G, C] --reduce-scatter--> [N, C]
//! ```

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::{Among, Exchange, Operation};
use xlaunch_engine::{
    AddScaled, CombineRows, DType, EngineError, ExpertBiasForward, GatherRows, GroupedShape, LinearShape,
    Result, RouteForward, RouteShape, Router, RouterLogits, RowsShape, Slice, SortByExpert, Tensor,
};
use xlaunch_spec::model::{self, ModelShape};

use super::expert_layers::ExpertLayer;
use super::fp8::Measured;
use super::layout::{Block, Linear};
use super::pass::{OnProgress, Progress};
use super::{Model, narrow};

/// Whether a block is computed in forward, which keeps the loads, or again in backward, which needs their sum over
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    First,
    Again,
}

/// Choices of a pass, and their order by expert. Those of the whole group count, unless noted otherwise.
#[derive(Debug)]
pub(super) struct Choices {
    /// Logits of this rank's tokens, `[N, E]` F32.
    pub(super) logits: Tensor,
    /// Choices of this rank's tokens, `[N, k]` I32.
    pub(super) experts: Tensor,
    /// `[G, k]` F32.
    pub(super) weights: Tensor,
    /// `[E + 1]` I32: this rank's experts come first.
    offsets: Tensor,
    /// `[G k]` I32.
    choice_of: Tensor,
    /// `[G k]` I32.
    pub(super) row_of: Tensor,
}

/// Activations of the experts of a block.
#[derive(Debug)]
pub(super) struct Experts {
    pub(super) choices: Choices,
    /// Inputs of the first layer.
    pub(super) rows: Measured,
    pub(super) h: Tensor,
    pub(super) a: Measured,
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

impl Choices {
    /// Returns both layers of this rank's experts.
    pub(super) fn layers<'a>(&'a self, shapes: ExpertShapes, params: &'a Block) -> [ExpertLayer<'a>; 2] {
        let (offsets, end) = (self.offsets.slice(0..shapes.fc.experts + 1), self.end(shapes));
        let layer = |shape, linear: &'a Linear| ExpertLayer { shape, weight: &linear.weight, offsets, end };
        [layer(shapes.fc, &params.fc), layer(shapes.out, &params.out)]
    }

    /// Returns the number of rows of this rank's experts, unless it has all.
    pub(super) fn end(&self, shapes: ExpertShapes) -> Option<Slice<'_>> {
        let experts = shapes.fc.experts;
        (experts < shapes.route.experts).then(|| self.offsets.slice(experts..experts + 1))
    }
}

/// Sizes of a block's experts in a pass over N tokens of each rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertShapes {
    pub(super) route: RouteShape,
    pub(super) rows: RowsShape,
    /// The first layer, and the second.
    pub(super) fc: GroupedShape,
    pub(super) out: GroupedShape,
}

impl ExpertShapes {
    /// Computes the sizes on each rank of a group of `ranks`, whose ranks have `tokens` each.
    pub(super) fn new(shape: &ModelShape, ranks: usize, tokens: usize) -> Self {
        let (experts, chosen, cols) = (shape.experts, shape.experts_per_token, shape.dim);
        let router = match shape.router {
            model::Router::Softmax => Router::Softmax,
            model::Router::Sigmoid => Router::Sigmoid,
        };
        let (normalise, scale) = (shape.normalise, narrow(shape.routed_scale));
        let (own, of_group) = (experts / ranks, ranks * tokens);
        let layer = |inputs, outputs| GroupedShape { rows: of_group * chosen, experts: own, inputs, outputs };
        Self {
            route: RouteShape { rows: tokens, experts, chosen, router, normalise, scale },
            rows: RowsShape { tokens: of_group, chosen, cols },
            fc: layer(cols, shape.expert_inputs()),
            out: layer(shape.expert_width(), cols),
        }
    }

    /// Number of choices of the group.
    pub(super) fn choices(self) -> usize {
        self.fc.rows
    }

    /// Number of choices of this rank's tokens.
    pub(super) fn own_choices(self) -> usize {
        self.route.rows * self.route.chosen
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
    /// Returns the sizes of experts in a pass over `x`, `[N, C]`.
    pub(super) fn expert_shapes(&self, x: &Tensor) -> ExpertShapes {
        ExpertShapes::new(&self.shape, self.layout.expert_groups.size, x.len() / self.shape.dim)
    }

    /// Computes the experts of a block for `x`, `[N, C]`, up to the outputs of their second layers.
    pub(super) fn experts<E: From<EngineError>>(
        &self,
        index: usize,
        router: &Range<usize>,
        x: &Tensor,
        run: Run,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Experts, E> {
        let (params, shapes) = (&self.layout.blocks[index], self.expert_shapes(x));
        let bias = self.router_bias(index);
        let router = (router, params.router_logit_bias.as_ref());
        let [logits, experts, weights] = self.route(shapes.route, router, bias, x)?;
        let (of_group, weights, order) = match self.of_group([x, &experts, &weights], progress)? {
            None => (None, weights, self.sort(index, shapes, &experts, run)?),
            Some([x, chosen, weights]) => (Some(x), weights, self.sort(index, shapes, &chosen, run)?),
        };
        let [offsets, choice_of, row_of] = order;
        let choices = Choices { logits, experts, weights, offsets, choice_of, row_of };
        let rows = self.gathered(shapes, &choices, of_group.as_ref().unwrap_or(x))?;
        drop(of_group);
        let [fc, out] = choices.layers(shapes, params);
        let h = self.expert_layer(fc, &rows)?;
        if let Some([bias, _]) = &params.expert_biases {
            self.add_expert_bias(fc.shape, fc.offsets, bias, h.all())?;
        }
        let a = self.gated(shapes.choices(), &h, choices.end(shapes))?;
        let y = self.expert_layer(out, &a)?;
        if let Some([_, bias]) = &params.expert_biases {
            self.add_expert_bias(out.shape, out.offsets, bias, y.all())?;
        }
        Ok(Experts { choices, rows, h, a, y })
    }

    /// Restores the activations that were freed, from the block's input of the experts.
    pub(super) fn restored_experts<E: From<EngineError>>(
        &self,
        kept: CostlyExperts,
        x: &Tensor,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Experts, E> {
        let CostlyExperts { choices, h, y } = kept;
        let (shapes, of_group) = (self.expert_shapes(x), self.of_group([x], progress)?);
        let x = of_group.as_ref().map_or(x, |[of_group]| of_group);
        let (rows, a) =
            (self.gathered(shapes, &choices, x)?, self.gated(shapes.choices(), &h, choices.end(shapes))?);
        Ok(Experts { choices, rows, h, a, y })
    }

    /// Returns the weighted sums of the outputs, with the output of `shared` experts, if there are any, added. Within a
    /// group, that output is computed while the sums are exchanged.
    pub(super) fn combined<E: From<EngineError>>(
        &self,
        experts: &Experts,
        shared: impl FnOnce() -> Result<Option<Tensor>>,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Tensor, E> {
        let Experts { choices, y, .. } = experts;
        let tokens = choices.experts.len() / self.shape.experts_per_token;
        let shapes = ExpertShapes::new(&self.shape, self.layout.expert_groups.size, tokens);
        let combine = |out: &Tensor, add| {
            self.backend.run(CombineRows {
                shape: shapes.rows,
                row_of: choices.row_of.all(),
                weights: choices.weights.all(),
                rows: y.all(),
                out: out.all(),
                add,
                end: choices.end(shapes),
            })
        };
        let sums = || self.activation(shapes.rows.tokens * shapes.rows.cols);
        if self.layout.expert_groups.size == 1 {
            let shared = shared()?;
            let add = shared.is_some();
            let out = shared.map_or_else(sums, Ok)?;
            combine(&out, add)?;
            return Ok(out);
        }
        let of_group = sums()?;
        combine(&of_group, false)?;
        let out = self.own_sums(of_group, Exchange::Start, progress)?;
        let shared = shared()?;
        progress(Progress::Exchange(Exchange::Finish))?;
        if let Some(shared) = shared {
            let (x, y) = (Some(shared.all()), out.all());
            self.backend.run(AddScaled { x, y, factor: 1.0, out: y })?;
        }
        Ok(out)
    }

    /// Gathers these tensors from all ranks of the group; `None` without groups.
    pub(super) fn of_group<const COUNT: usize, E: From<EngineError>>(
        &self,
        tensors: [&Tensor; COUNT],
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Option<[Tensor; COUNT]>, E> {
        let ranks = self.layout.expert_groups.size;
        if ranks == 1 {
            return Ok(None);
        }
        let gathered = tensors.map(|own| self.backend.alloc(own.dtype(), ranks * own.len()));
        let gathered = gathered.into_iter().collect::<Result<Vec<_>>>()?;
        let pairs = tensors.into_iter().zip(&gathered);
        let buckets = pairs.map(|(own, all)| [own.lend(0..own.len()), all.lend(0..all.len())]).collect();
        progress(Progress::Exchange(Exchange::Run(Operation::AllGather { buckets })))?;
        Ok(gathered.try_into().ok())
    }

    /// Returns the sums over ranks of the part of `sums` that belongs to this rank's tokens; `sums` itself without
    /// groups.
    pub(super) fn own_sums<E: From<EngineError>>(
        &self,
        sums: Tensor,
        exchange: fn(Operation) -> Exchange,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Tensor, E> {
        let ranks = self.layout.expert_groups.size;
        if ranks == 1 {
            return Ok(sums);
        }
        let own = self.backend.alloc(sums.dtype(), sums.len() / ranks)?;
        let (buckets, dtype) = (vec![[sums.lend(0..sums.len()), own.lend(0..own.len())]], sums.dtype());
        progress(Progress::Exchange(exchange(Operation::ReduceScatter { buckets, dtype })))?;
        Ok(own)
    }

    /// Returns logits, choices and weights of this rank's tokens, for a router with a bias of its logits and one of its
    /// choices, if there are any.
    pub(super) fn route(
        &self,
        route: RouteShape,
        (router, logit_bias): (&Range<usize>, Option<&Range<usize>>),
        bias: Option<Slice<'_>>,
        x: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (backend, len) = (&self.backend, route.rows * route.chosen);
        let logits = backend.alloc(DType::F32, route.rows * route.experts)?;
        let (experts, weights) = (backend.alloc(DType::I32, len)?, backend.alloc(DType::F32, len)?);
        let shape = LinearShape { rows: route.rows, inputs: self.shape.dim, outputs: route.experts };
        let w = self.param(router);
        let logit_bias = logit_bias.map(|bias| self.param(bias));
        backend.run(RouterLogits { shape, x: x.all(), w, bias: logit_bias, logits: logits.all() })?;
        let [logits_slice, experts_slice, weights_slice] = [&logits, &experts, &weights].map(Tensor::all);
        backend.run(RouteForward {
            shape: route,
            logits: logits_slice,
            bias,
            experts: experts_slice,
            weights: weights_slice,
        })?;
        Ok([logits, experts, weights])
    }

    /// Returns offsets, `choice_of` and `row_of` of the choices `chosen` of the group.
    fn sort(&self, index: usize, shapes: ExpertShapes, chosen: &Tensor, run: Run) -> Result<[Tensor; 3]> {
        let (backend, experts, choices) = (&self.backend, shapes.route.experts, shapes.choices());
        let ints = |len| backend.alloc(DType::I32, len);
        let [offsets, choice_of, row_of] = [ints(experts + 1)?, ints(choices)?, ints(choices)?];
        let unused = backend.alloc(DType::F32, experts)?;
        let kept = self.routing.as_ref().filter(|_| run == Run::First);
        let loads = kept.map_or(unused.all(), |routing| routing.loads(&self.shape, index));
        let counters = ints(SortByExpert::counters(choices, experts))?;
        backend.run(SortByExpert {
            choices,
            experts,
            first: self.layout.expert_groups.member(Among::Group).0 * shapes.fc.experts,
            chosen: chosen.all(),
            offsets: offsets.all(),
            choice_of: choice_of.all(),
            row_of: row_of.all(),
            loads,
            scratch: counters.all(),
        })?;
        Ok([offsets, choice_of, row_of])
    }

    fn gathered(&self, shapes: ExpertShapes, choices: &Choices, x: &Tensor) -> Result<Measured> {
        let (shape, choice_of, end) = (shapes.rows, choices.choice_of.all(), choices.end(shapes));
        let rows = self.activation(shapes.choices() * shape.cols)?;
        self.backend.run(GatherRows { shape, choice_of, x: x.all(), rows: rows.all(), end })?;
        // There are fewer tokens than rows, which are copies of them.
        let in_fp8 = self.in_fp8(shapes.choices());
        let amax = in_fp8.then(|| self.measure([shape.tokens, shape.cols], x.all(), None)).transpose()?;
        Ok(Measured { tensor: Rc::new(rows), amax })
    }

    /// Adds the biases of all experts to the outputs of one of their layers.
    pub(super) fn add_expert_bias(
        &self,
        layer: GroupedShape,
        offsets: Slice<'_>,
        bias: &Range<usize>,
        y: Slice<'_>,
    ) -> Result<()> {
        self.backend.run(ExpertBiasForward { cols: layer.outputs, offsets, bias: self.param(bias), y })
    }
}
