//! Muon for the weights of linear layers in blocks; see `ops/muon` in the engine for the formulas.
//!
//! ```text
//! gradients -> momentum, update -> [all-gather of the update] -> orthogonal, matrix by matrix -> weights
//! ```
//! Momentum and master weights are elementwise, so they are sharded like AdamW's moments, and the momentum takes the
//! place of the first moment. Only the update is needed whole: with a sharded optimizer it is all-gathered, every rank
//! makes the same matrices orthogonal, and applies its own elements. So the results do not depend on the sharding.

use std::ops::Range;

use xlaunch_comm::{Collective, Operation, Sharding, Wait};
use xlaunch_engine::{
    DECAY_CHUNK, EngineError, MUON_FLAG, MuonMomentum, MuonUpdate, Orthogonalize, Slice, StepConditions,
    Tensor,
};
use xlaunch_spec::job::{AdjustLr, JobSpec, MuonSection, Optimizer};
use xlaunch_spec::model::ModelShape;

use crate::error::Result;
use crate::model::BackendHandle;
use crate::model::layout::Layout;

/// Muon's part of the optimizer. Its state is that of AdamW for the same elements; the second moment is not used.
#[derive(Debug)]
pub(super) struct Muon {
    matrices: Vec<Matrix>,
    momentum: f32,
    weight_decay: f32,
    cautious: bool,
    clip: f32,
    /// Learning rate as a multiple of AdamW's.
    pub(super) rate: f64,
    /// Updates of this rank's shard, and of all elements; `None` without sharding.
    gathered: Option<[Tensor; 2]>,
}

/// A matrix that is made orthogonal: one layer's weight, or a part of its rows.
#[derive(Debug, PartialEq)]
struct Matrix {
    /// Elements in the arena.
    range: Range<usize>,
    rows: usize,
    cols: usize,
    /// Factor of the update.
    factor: f32,
}

/// Tensors of one step: all but `grads` are the optimizer's.
pub(super) struct Step<'a> {
    /// Reduced gradients of this rank's shard.
    pub(super) grads: Slice<'a>,
    pub(super) m: &'a Tensor,
    pub(super) params: &'a Tensor,
    /// Weights in the activations' type, if the master weights are separate.
    pub(super) work: Option<Slice<'a>>,
    pub(super) flags: &'a Tensor,
    pub(super) scalars: &'a Tensor,
    pub(super) conditions: StepConditions<'a>,
}

impl Muon {
    /// Creates it if the job uses it.
    #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
    pub(super) fn new(
        backend: &BackendHandle,
        spec: &JobSpec,
        (shape, layout): (&ModelShape, &Layout),
        sharding: &Sharding,
    ) -> std::result::Result<Option<Self>, EngineError> {
        if spec.train.optimizer != Optimizer::Muon {
            return Ok(None);
        }
        let MuonSection { lr, momentum, weight_decay, cautious, adjust_lr } = spec.muon;
        let act = backend.activation_dtype();
        let gathered = || {
            let [own, all] =
                [sharding.len(), sharding.arena_len()].map(|len| backend.alloc_collective(act, len));
            let tensors = [own?, all?];
            // Elements of other parameters are gathered along, and never written.
            tensors.iter().try_for_each(|tensor| backend.zero(tensor.all()))?;
            Ok::<_, EngineError>(tensors)
        };
        Ok(Some(Self {
            matrices: matrices(shape, layout, adjust_lr),
            momentum: momentum as f32,
            weight_decay: weight_decay.unwrap_or(spec.train.weight_decay) as f32,
            cautious,
            clip: spec.train.clip as f32,
            rate: lr / spec.train.lr,
            gathered: sharding.is_sharded().then(gathered).transpose()?,
        }))
    }

    /// Marks the elements that Muon updates among an arena's decay flags.
    pub(super) fn mark(&self, flags: &mut [u8]) {
        for matrix in &self.matrices {
            flags[matrix.range.start / DECAY_CHUNK..matrix.range.end.div_ceil(DECAY_CHUNK)].fill(MUON_FLAG);
        }
    }

    /// Returns the tensors of the all-gather: source and destination.
    pub(super) fn gather_buffers(&self) -> impl Iterator<Item = &Tensor> {
        self.gathered.iter().flatten()
    }

    /// Updates momentum and weights of this rank's shard.
    pub(super) fn step(
        &self,
        backend: &BackendHandle,
        sharding: &Sharding,
        step: &Step<'_>,
        collective: &mut dyn Collective,
    ) -> Result<()> {
        let Step { grads, m, flags, conditions, .. } = *step;
        // Without sharding, activations have left enough memory by now.
        let transient = match &self.gathered {
            Some(_) => None,
            None => Some(backend.alloc(backend.activation_dtype(), sharding.len())?),
        };
        let [own, all] = match (&self.gathered, &transient) {
            (Some([own, all]), _) => [own, all],
            (None, Some(all)) => [all, all],
            (None, None) => return Ok(()),
        };
        backend.run(MuonMomentum {
            grads,
            m: m.all(),
            update: own.all(),
            flags: flags.all(),
            momentum: self.momentum,
            clip: self.clip,
            conditions,
        })?;
        if self.gathered.is_some() {
            let pairs = sharding.plan().buckets().iter();
            let pairs = pairs.map(|bucket| [own.lend(sharding.in_shard(bucket)), all.lend(bucket.clone())]);
            collective.start(Operation::AllGather { buckets: pairs.collect() })?;
            collective.wait(Wait::All)?;
        }
        self.matrices.iter().try_for_each(|matrix| self.update(backend, sharding, step, matrix, all))
    }

    fn update(
        &self,
        backend: &BackendHandle,
        sharding: &Sharding,
        step: &Step<'_>,
        matrix: &Matrix,
        updates: &Tensor,
    ) -> Result<()> {
        let Matrix { rows, cols, factor, .. } = *matrix;
        backend.run(Orthogonalize { rows, cols, x: updates.slice(matrix.range.clone()) })?;
        for (own, stored) in owned(sharding, &matrix.range) {
            backend.run(MuonUpdate {
                update: updates.slice(own),
                params: step.params.slice(stored.clone()),
                work: step.work.map(|work| work.slice(stored)),
                factor,
                weight_decay: self.weight_decay,
                cautious: self.cautious,
                scalars: step.scalars.all(),
                conditions: step.conditions,
            })?;
        }
        Ok(())
    }
}

/// Returns this rank's parts of a range: their positions in the arena and in the shard.
fn owned(sharding: &Sharding, range: &Range<usize>) -> Vec<(Range<usize>, Range<usize>)> {
    if !sharding.is_sharded() {
        return vec![(range.clone(), range.clone())];
    }
    let parts = sharding.plan().buckets().iter().filter_map(|bucket| {
        let (own, stored) = (sharding.in_arena(bucket), sharding.in_shard(bucket));
        let (start, end) = (own.start.max(range.start), own.end.min(range.end));
        let at = stored.start + start - own.start;
        (start < end).then(|| (start..end, at..at + end - start))
    });
    parts.collect()
}

/// Returns the matrices of all blocks. Layers that compute several projections at once are divided into these.
fn matrices(shape: &ModelShape, layout: &Layout, adjust_lr: AdjustLr) -> Vec<Matrix> {
    let (queries, keys) = (shape.attention_width(), shape.kv_heads * shape.head_dim);
    let blocks = layout.blocks.iter().flat_map(|block| {
        // The matrices of experts follow each other.
        let (experts, ffn) = match block.router {
            Some(_) => (shape.experts, shape.expert_width()),
            None => (1, shape.ffn),
        };
        let gates = if shape.gated { 2 } else { 1 };
        [
            (&block.qkv, shape.dim, vec![queries, keys, keys]),
            (&block.proj, queries, vec![shape.dim]),
            (&block.fc, shape.dim, vec![ffn; experts * gates]),
            (&block.out, ffn, vec![shape.dim; experts]),
        ]
    });
    let parts = blocks.flat_map(|(linear, cols, parts)| {
        let start = linear.weight.start;
        let ends = parts.into_iter().scan(0, move |end, rows| {
            *end += rows;
            Some((*end, rows))
        });
        ends.map(move |(end, rows)| (start + (end - rows) * cols..start + end * cols, rows, cols))
    });
    let matrix = |(range, rows, cols)| Matrix { range, rows, cols, factor: factor(adjust_lr, rows, cols) };
    parts.map(matrix).collect()
}

#[expect(clippy::cast_precision_loss, reason = "sizes of layers are small")]
fn factor(adjust_lr: AdjustLr, rows: usize, cols: usize) -> f32 {
    match adjust_lr {
        AdjustLr::MatchRmsAdamw => 0.2 * (rows.max(cols) as f32).sqrt(),
        AdjustLr::Original => (rows as f32 / cols as f32).max(1.0).sqrt(),
    }
}
