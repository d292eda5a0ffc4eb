//! Experts that every token uses, as one feed-forward layer.
//!
//! Their output may be multiplied by a gate, `sigmoid(g . x)`. That is the weight of the only expert of a router with
//! sigmoid scores, so the operations of experts compute it: its rows are those of the output.

use std::ops::Range;
use std::rc::Rc;

use xlaunch_engine::{
    AddScaled, BalanceLoss, CombineRows, CombineRowsBackward, DType, LinearBackwardInput,
    LinearBackwardWeight, LinearShape, Result, RouteBackward, RouteShape, Router, RowsShape, SortByExpert,
    Tensor,
};

use super::Model;
use super::feed_forward::Dense;
use super::layout::Shared;
use super::pass::Pass;

/// Activations of the shared experts of a block.
#[derive(Debug)]
pub(super) struct SharedExperts {
    dense: Dense,
    gate: Option<Gate>,
}

/// The same activations, without those that are cheap to compute.
#[derive(Debug)]
pub(super) struct CostlyShared {
    h: Tensor,
    gate: Option<Gate>,
}

/// A gate, as a router of one expert.
#[derive(Debug)]
struct Gate {
    /// `[N, 1]` F32.
    logits: Tensor,
    /// `[N, 1]` I32: the expert 0.
    experts: Tensor,
    /// `[N, 1]` F32.
    weights: Tensor,
    /// `[N]` I32: the numbers from 0.
    row_of: Tensor,
    /// The output of the layers, `[N, C]`.
    y: Tensor,
}

impl SharedExperts {
    /// Drops what only forward multiplies.
    pub(super) fn kept(self) -> Self {
        Self { dense: self.dense.kept(), ..self }
    }

    /// Frees the activations that are cheap to compute.
    pub(super) fn costly(self) -> CostlyShared {
        CostlyShared { h: self.dense.h, gate: self.gate }
    }
}

/// Returns how a gate routes N tokens.
pub(super) fn gate_route(rows: usize) -> RouteShape {
    RouteShape { rows, experts: 1, chosen: 1, router: Router::Sigmoid, normalise: false, scale: 1.0 }
}

impl Model {
    /// Computes the shared experts for `x`, `[N, C]`; with a gate, up to the output of their second layer.
    pub(super) fn shared_experts(&self, x: &Rc<Tensor>, params: &Shared) -> Result<SharedExperts> {
        let (rows, layers) = (x.len() / self.shape.dim, self.shared_layers(params));
        let dense = self.dense(rows, x.clone(), layers)?;
        let gate = params.gate.as_ref().map(|gate| -> Result<Gate> {
            let [logits, experts, weights] = self.route(gate_route(rows), (gate, None), None, x)?;
            let row_of = self.rows_in_order(&experts)?;
            Ok(Gate { logits, experts, weights, row_of, y: self.dense_output(rows, &dense, layers)? })
        });
        Ok(SharedExperts { dense, gate: gate.transpose()? })
    }

    /// Restores the activations that were freed, from the input of the experts.
    pub(super) fn restored_shared(&self, kept: CostlyShared, x: &Rc<Tensor>) -> Result<SharedExperts> {
        let CostlyShared { h, gate } = kept;
        let rows = x.len() / self.shape.dim;
        let dense = self.restored_dense(rows, x.clone(), h, self.shape.shared_width())?;
        Ok(SharedExperts { dense, gate })
    }

    /// Returns the output of the shared experts.
    pub(super) fn shared_output(
        &self,
        rows: usize,
        shared: &SharedExperts,
        params: &Shared,
    ) -> Result<Tensor> {
        let Some(Gate { weights, row_of, y, .. }) = &shared.gate else {
            return self.dense_output(rows, &shared.dense, self.shared_layers(params));
        };
        let out = self.activation(y.len())?;
        self.backend.run(CombineRows {
            shape: self.gated_rows(rows),
            row_of: row_of.all(),
            weights: weights.all(),
            rows: y.all(),
            out: out.all(),
            add: false,
            end: None,
        })?;
        Ok(out)
    }

    /// Computes the gradients of the shared experts, and adds that of their input `x` to `dx`.
    pub(super) fn shared_backward(
        &self,
        pass: Pass<'_>,
        (shared, params): (&SharedExperts, &Shared),
        x: &Tensor,
        dbranch: &Rc<Tensor>,
        dx: &Tensor,
    ) -> Result<()> {
        let (layers, add) = (self.shared_layers(params), |y: Tensor| {
            self.backend.run(AddScaled { x: Some(dx.all()), y: y.all(), factor: 1.0, out: dx.all() })
        });
        let Some((gate, range)) = shared.gate.as_ref().zip(params.gate.as_ref()) else {
            return add(self.dense_backward(pass, &shared.dense, layers, dbranch.clone())?);
        };
        let drows = self.activation(gate.y.len())?;
        add(self.gate_backward(pass, (gate, range), x, dbranch, &drows)?)?;
        add(self.dense_backward(pass, &shared.dense, layers, Rc::new(drows))?)
    }

    /// Computes the gradients of a gate, and writes that of the layers' output to `drows`. Returns that of its input.
    fn gate_backward(
        &self,
        pass: Pass<'_>,
        (gate, range): (&Gate, &Range<usize>),
        x: &Tensor,
        dbranch: &Tensor,
        drows: &Tensor,
    ) -> Result<Tensor> {
        let (backend, rows) = (&self.backend, pass.rows.count());
        let Gate { logits, experts, weights, row_of, y } = gate;
        let f32s = |len| backend.alloc(DType::F32, len);
        let (dweights, losses, loads) = (f32s(rows)?, f32s(rows)?, f32s(1)?);
        backend.run(CombineRowsBackward {
            shape: self.gated_rows(rows),
            row_of: row_of.all(),
            weights: weights.all(),
            rows: y.all(),
            dout: dbranch.all(),
            drows: drows.all(),
            dweights: dweights.all(),
            end: None,
        })?;
        backend.zero(loads.all())?;
        let dlogits = self.activation(rows)?;
        // The load of one expert needs no balance.
        let loss = BalanceLoss { loads: loads.all(), share: 0.0, balance: 0.0, z: 0.0, losses: losses.all() };
        backend.run(RouteBackward {
            shape: gate_route(rows),
            logits: logits.all(),
            experts: experts.all(),
            dweights: dweights.all(),
            loss,
            dlogits: dlogits.all(),
        })?;
        let shape = LinearShape { rows, inputs: self.shape.dim, outputs: 1 };
        let (dy, dx) = (dlogits.all(), self.activation(x.len())?);
        if let Some(dw) = pass.gradient(range) {
            backend.run(LinearBackwardWeight { shape, dy, x: x.all(), dw, acc: pass.acc })?;
        }
        backend.run(LinearBackwardInput { shape, dy, w: self.param(range), dx: dx.all() })?;
        Ok(dx)
    }

    fn gated_rows(&self, tokens: usize) -> RowsShape {
        RowsShape { tokens, chosen: 1, cols: self.shape.dim }
    }

    /// Returns the rows of choices that are all the same expert.
    fn rows_in_order(&self, chosen: &Tensor) -> Result<Tensor> {
        let (backend, choices) = (&self.backend, chosen.len());
        let ints = |len| backend.alloc(DType::I32, len);
        let [offsets, choice_of, row_of] = [ints(2)?, ints(choices)?, ints(choices)?];
        let (loads, counters) = (backend.alloc(DType::F32, 1)?, ints(SortByExpert::counters(choices, 1))?);
        backend.run(SortByExpert {
            choices,
            experts: 1,
            first: 0,
            chosen: chosen.all(),
            offsets: offsets.all(),
            choice_of: choice_of.all(),
            row_of: row_of.all(),
            loads: loads.all(),
            scratch: counters.all(),
        })?;
        Ok(row_of)
    }
}
