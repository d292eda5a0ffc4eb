//! Backward of blocks with experts.

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::Exchange;
use xlaunch_engine::{
    AddScaled, BalanceLoss, ColumnSum, CombineRowsBackward, DType, EngineError, ExpertBiasBackward,
    GatherRowsBackward, LinearBackwardInput, LinearBackwardWeight, Result, RouteBackward, Tensor,
};

use super::Model;
use super::expert_layers::ExpertLayer;
use super::experts::{Choices, Experts};
use super::fp8::Measured;
use super::layout::Shared;
use super::pass::{OnProgress, Pass, Progress};
use super::routing::Factors;
use super::shared_experts::SharedExperts;

impl Model {
    /// Computes the gradients of a block's experts, including `shared` ones, and its router. Returns the gradient of
    /// their input `x`. While a group of ranks adds up that of divided experts, each computes what does not need it.
    pub(super) fn experts_backward<E: From<EngineError>>(
        &self,
        pass: Pass<'_>,
        index: usize,
        (experts, shared): (&Experts, Option<(&SharedExperts, &Shared)>),
        x: &Tensor,
        dbranch: &Rc<Tensor>,
        progress: OnProgress<'_, E>,
    ) -> std::result::Result<Tensor, E> {
        let (params, backend, shapes) = (&self.layout.blocks[index], &self.backend, self.expert_shapes(x));
        let Experts { choices, rows, h, a, y } = experts;
        let ([fc, out], end, row_of) =
            (choices.layers(shapes, params), choices.end(shapes), choices.row_of.all());
        let of_group = self.of_group([dbranch], progress)?;
        let drows: Measured = self.activation(y.len())?.into();
        let dweights = backend.alloc(DType::F32, shapes.choices())?;
        backend.run(CombineRowsBackward {
            shape: shapes.rows,
            row_of,
            weights: choices.weights.all(),
            rows: y.all(),
            dout: of_group.as_ref().map_or(&**dbranch, |[of_group]| of_group).all(),
            drows: drows.tensor.all(),
            dweights: dweights.all(),
            end,
        })?;
        drop(of_group);
        let dweights = self.own_sums(dweights, Exchange::Run, progress)?;
        let dx = self.router_backward(pass, index, choices, x, &dweights)?;
        let biases = params.expert_biases.as_ref();
        let bias_gradient = |layer: ExpertLayer<'_>, dy: &Measured, bias: &Range<usize>| {
            let Some(dbias) = pass.gradient(bias) else { return Ok(()) };
            let (cols, offsets) = (layer.shape.outputs, layer.offsets);
            backend.run(ExpertBiasBackward { cols, offsets, dy: dy.tensor.all(), dbias, acc: pass.acc })
        };
        if let Some([_, bias]) = biases {
            bias_gradient(out, &drows, bias)?;
        }
        let dh = {
            let da = self.activation(a.tensor.len())?;
            self.expert_layer_backward(pass, out, [&drows, a], da.all(), || Ok::<_, E>(()))?;
            self.gated_gradient(shapes.choices(), [h, &da], end)?
        };
        if let Some([bias, _]) = biases {
            bias_gradient(fc, &dh, bias)?;
        }
        // The gradient of the outputs is not needed any more, and has the size of that of the rows.
        let (shape, drows, mut own) = (shapes.rows, drows.tensor.all(), None);
        self.expert_layer_backward(pass, fc, [&dh, rows], drows, || -> std::result::Result<(), E> {
            let gather = |dx: &Tensor, add| {
                backend.run(GatherRowsBackward { shape, row_of, drows, dx: dx.all(), add, end })
            };
            if self.layout.expert_groups.size == 1 {
                return Ok(gather(&dx, true)?);
            }
            let of_group = self.activation(shape.tokens * shape.cols)?;
            gather(&of_group, false)?;
            own = Some(self.own_sums(of_group, Exchange::Start, progress)?);
            Ok(())
        })?;
        if let Some(shared) = shared {
            self.shared_backward(pass, shared, x, dbranch, &dx)?;
        }
        if let Some(own) = own {
            progress(Progress::Exchange(Exchange::Finish))?;
            backend.run(AddScaled { x: Some(dx.all()), y: own.all(), factor: 1.0, out: dx.all() })?;
        }
        Ok(dx)
    }

    /// Computes the gradient of a router, and adds its balance loss. Returns the gradient of its input.
    fn router_backward(
        &self,
        pass: Pass<'_>,
        index: usize,
        choices: &Choices,
        x: &Tensor,
        dweights: &Tensor,
    ) -> Result<Tensor> {
        let (backend, shapes) = (&self.backend, self.expert_shapes(x));
        let (shape, tokens) = (shapes.router(), shapes.route.rows);
        let dx = self.activation(x.len())?;
        let (Some(routing), Some(router)) = (&self.routing, &self.layout.blocks[index].router) else {
            backend.zero(dx.all())?;
            return Ok(dx);
        };
        // It is not trained by gradients, but its place in the arena may hold those of other parameters.
        let bias = self.layout.blocks[index].router_bias.as_ref();
        if let Some(gradient) = bias.and_then(|bias| pass.gradient(bias)) {
            backend.zero(gradient)?;
        }
        let Factors { balance, z, ranks, micro_steps } = routing.factors;
        let dlogits = self.activation(tokens * shape.outputs)?;
        let losses = backend.alloc(DType::F32, tokens)?;
        // Each token's part of the mean over those of a step, and each choice's of those of a micro-step.
        let part = reciprocal(tokens * ranks * micro_steps);
        backend.run(RouteBackward {
            shape: shapes.route,
            logits: choices.logits.all(),
            experts: choices.experts.all(),
            dweights: dweights.all(),
            loss: BalanceLoss {
                loads: routing.loads(&self.shape, index),
                share: reciprocal(shapes.own_choices() * ranks),
                balance: balance * part,
                z: z * part,
                losses: losses.all(),
            },
            dlogits: dlogits.all(),
        })?;
        routing.add_balance(backend, losses.all(), part)?;
        let bias = self.layout.blocks[index].router_logit_bias.as_ref();
        if let Some(out) = bias.and_then(|bias| pass.gradient(bias)) {
            let (rows, cols, x) = (shape.rows, shape.outputs, dlogits.all());
            backend.run(ColumnSum { rows, cols, x, out, acc: pass.acc })?;
        }
        if let Some(dw) = pass.gradient(router) {
            backend.run(LinearBackwardWeight { shape, dy: dlogits.all(), x: x.all(), dw, acc: pass.acc })?;
        }
        backend.run(LinearBackwardInput { shape, dy: dlogits.all(), w: self.param(router), dx: dx.all() })?;
        Ok(dx)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "a factor in f32")]
fn reciprocal(count: usize) -> f32 {
    (1.0 / count as f64) as f32
}
