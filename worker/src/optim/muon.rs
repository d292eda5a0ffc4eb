//! Muon for the weights of linear layers in blocks; see `ops/muon` in the engine for the formulas.
//!
//! ```text
//! gradients -> momentum, update -> [all-gather, pack] -> orthogonal, shape by shape -> [all-gather] -> weights
//!                                  sharded optimizer                                   owners
//! ```
//! Momentum and master weights are elementwise, so they are sharded like AdamW's moments, and the momentum takes the
//! place of the first moment: checkpoints do not depend on the owners of matrices. Only updates are needed whole. With
//! a sharded optimizer they are all-gathered before they are made orthogonal. With [owners](Packing), each rank makes
//! its matrices orthogonal, and they are all-gathered afterwards; otherwise every rank makes all of them orthogonal.
//! Either way a matrix goes through the same operations, so results do not depend on sharding and owners.
//!
//! NorMuon's second moment of a row is stored in place of AdamW's second moment of the row's first element. With a
//! sharded optimizer, a rank updates those in its shard; an all-reduce, to which the other ranks contribute zeros,
//! completes them.

use std::ops::Range;

use std::rc::Rc;

use xlaunch_comm::{Among, Collective, Operation, Sharding, Wait};
use xlaunch_engine::{
    DType, EngineError, GROUP_CHUNK, MUON_GROUP, MuonMomentum, MuonPack, MuonPiece, MuonPieces,
    MuonRowFactors, MuonRowMoments, MuonUpdate, Orthogonalize, Slice, StepConditions, Tensor,
};
use xlaunch_spec::job::{AdjustLr, JobSpec, MuonSection, Optimizer};
use xlaunch_spec::model::ModelShape;

use super::owners::{Batch, Packing, Shape};
use crate::error::Result;
use crate::model::BackendHandle;
use crate::model::layout::Layout;

/// Muon's part of the optimizer. Its state is that of AdamW for the same elements.
#[derive(Debug)]
pub(super) struct Muon {
    /// The ranks that have the matrices.
    among: Among,
    matrices: Vec<Matrix>,
    packing: Packing,
    /// This rank's part of the packed updates, and the matrices in it.
    part: Range<usize>,
    batches: Vec<Batch>,
    /// The elements that this rank updates.
    pieces: MuonPieces,
    /// The matrices of the part, whose updates are packed after an all-gather: with a sharded optimizer only.
    unpacked: Option<MuonPieces>,
    /// Source and destination of all-gathers, if there are any.
    gathered: Option<Rc<[Tensor; 2]>>,
    normuon: Option<NorMuon>,
    momentum: f32,
    weight_decay: f32,
    cautious: bool,
    clip: f32,
    /// Learning rate as a multiple of AdamW's.
    pub(super) rate: f64,
}

/// NorMuon's part.
#[derive(Debug)]
struct NorMuon {
    beta2: f32,
    matrices: MuonPieces,
    /// Two numbers for each row of all matrices, valid during a step.
    moments: Tensor,
}

/// A matrix that is made orthogonal: one layer's weight, or a part of its rows.
#[derive(Clone, Debug, PartialEq)]
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
    pub(super) v: &'a Tensor,
    pub(super) params: &'a Tensor,
    /// Weights in the activations' type, if the master weights are separate.
    pub(super) work: Option<Slice<'a>>,
    pub(super) scalars: &'a Tensor,
    pub(super) conditions: StepConditions<'a>,
}

impl Muon {
    /// Creates one for the matrices of each set of ranks, if the job uses it.
    pub(super) fn new(
        backend: &BackendHandle,
        spec: &JobSpec,
        (shape, layout): (&ModelShape, &Layout),
        sharding: &Sharding,
    ) -> std::result::Result<Vec<Self>, EngineError> {
        if spec.train.optimizer != Optimizer::Muon {
            return Ok(Vec::new());
        }
        let all = matrices(shape, layout, spec.muon.adjust_lr);
        let sets = [Among::All, Among::Peers].map(|among| {
            let buckets = sharding.ranges(among);
            let is_in = |matrix: &Matrix| {
                buckets.iter().any(|range| range.start <= matrix.range.start && matrix.range.end <= range.end)
            };
            let matrices: Vec<Matrix> = all.iter().filter(|matrix| is_in(matrix)).cloned().collect();
            let shapes: Vec<Shape> = matrices.iter().map(|matrix| (matrix.rows, matrix.cols)).collect();
            let ranks = sharding.groups().member(among).1;
            let packing = Packing::new(spec.muon.owners, &shapes, ranks, backend.activation_dtype().size());
            (among, matrices, packing)
        });
        let sets = sets.into_iter().filter(|(_, matrices, _)| !matrices.is_empty());
        let sets: Vec<_> = sets.collect();
        let gathered = gathered(backend, sharding, sets.iter().map(|(_, _, packing)| packing))?.map(Rc::new);
        let muon = |(among, matrices, packing)| {
            Self::of_set(backend, spec, sharding, (among, matrices, packing), gathered.clone())
        };
        sets.into_iter().map(muon).collect()
    }

    /// Creates it for matrices of some ranks.
    #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
    fn of_set(
        backend: &BackendHandle,
        spec: &JobSpec,
        sharding: &Sharding,
        (among, matrices, packing): (Among, Vec<Matrix>, Packing),
        gathered: Option<Rc<[Tensor; 2]>>,
    ) -> std::result::Result<Self, EngineError> {
        let MuonSection { lr, momentum, weight_decay, cautious, .. } = spec.muon;
        let rank = sharding.groups().member(among).0;
        let shapes: Vec<Shape> = matrices.iter().map(|matrix| (matrix.rows, matrix.cols)).collect();
        let (whole, part) = (whole(&matrices, &packing), packing.own(rank));
        let unpacked = || {
            let own = packing.owned_by(rank).map(|matrix| whole[matrix]);
            let own = own.map(|piece| MuonPiece { packed: piece.packed - part.start, ..piece });
            backend.muon_pieces(&own.collect::<Vec<_>>())
        };
        Ok(Self {
            among,
            batches: packing.batches(&shapes, rank),
            pieces: backend.muon_pieces(&updated(sharding, &whole))?,
            unpacked: sharding.is_sharded().then(unpacked).transpose()?,
            gathered: gathered.filter(|_| sharding.is_sharded() || packing.is_owned()),
            normuon: NorMuon::new(backend, &spec.muon, &whole)?,
            matrices,
            packing,
            part,
            momentum: momentum as f32,
            weight_decay: weight_decay.unwrap_or(spec.train.weight_decay) as f32,
            cautious,
            clip: spec.train.clip as f32,
            rate: lr / spec.train.lr,
        })
    }

    /// Marks the elements that Muon updates among the groups of an arena's elements.
    pub(super) fn mark(&self, groups: &mut [u8]) {
        for matrix in &self.matrices {
            groups[matrix.range.start / GROUP_CHUNK..matrix.range.end.div_ceil(GROUP_CHUNK)].fill(MUON_GROUP);
        }
    }

    /// Returns the tensors of collectives.
    pub(super) fn gather_buffers(&self) -> impl Iterator<Item = &Tensor> {
        self.gathered
            .iter()
            .flat_map(|tensors| tensors.iter())
            .chain(self.normuon.iter().map(|normuon| &normuon.moments))
    }

    /// Updates momentum and weights of this rank's shard.
    pub(super) fn step(
        &self,
        backend: &BackendHandle,
        sharding: &Sharding,
        step: &Step<'_>,
        collective: &mut dyn Collective,
    ) -> Result<()> {
        let conditions = step.conditions;
        // Without owners, memory that activations have left by now suffices.
        let transient = || backend.alloc(backend.activation_dtype(), self.part.len());
        let transient = (!self.packing.is_owned()).then(transient).transpose()?;
        let own = match (&transient, self.gathered.as_deref()) {
            (Some(transient), _) => transient,
            (None, Some([own, _])) => own,
            (None, None) => return Ok(()),
        };
        self.start(backend, sharding, step, own, collective)?;
        for Batch { shape: (rows, cols), range } in &self.batches {
            let x = own.slice(range.clone());
            backend.run(Orthogonalize { rows: *rows, cols: *cols, x })?;
        }
        let update = match self.gathered.as_deref() {
            Some([own, all]) if self.packing.is_owned() => {
                let len = self.part.len() * self.packing.parts;
                let pair = [own.lend(0..self.part.len()), all.lend(0..len)];
                collective.start_among(self.among, Operation::AllGather { buckets: vec![pair] })?;
                collective.wait(Wait::All)?;
                all.slice(0..len)
            }
            _ => own.slice(0..self.part.len()),
        };
        let row_factors = match &self.normuon {
            Some(normuon) => {
                let sharded_among = sharding.is_sharded().then_some(self.among);
                Some(normuon.row_factors(sharded_among, backend, step, (update, &self.pieces), collective)?)
            }
            None => None,
        };
        backend.run(MuonUpdate {
            update,
            params: step.params.all(),
            work: step.work,
            pieces: &self.pieces,
            row_factors,
            weight_decay: self.weight_decay,
            cautious: self.cautious,
            scalars: step.scalars.all(),
            conditions,
        })?;
        Ok(())
    }

    /// Updates the momentum of this rank's shard, and packs the updates of the rank's matrices in `own`.
    fn start(
        &self,
        backend: &BackendHandle,
        sharding: &Sharding,
        step: &Step<'_>,
        own: &Tensor,
        collective: &mut dyn Collective,
    ) -> Result<()> {
        let part = own.slice(0..self.part.len());
        let (update, packed_from) = match self.gathered.as_deref() {
            Some([shard, _]) if sharding.is_sharded() => (shard.slice(0..sharding.len()), None),
            _ => (part, Some(self.part.start)),
        };
        backend.run(MuonMomentum {
            grads: step.grads,
            m: step.m.all(),
            update,
            packed_from,
            pieces: &self.pieces,
            momentum: self.momentum,
            clip: self.clip,
            conditions: step.conditions,
        })?;
        let (Some(pieces), Some([shard, all])) = (&self.unpacked, self.gathered.as_deref()) else {
            return Ok(());
        };
        let pairs = sharding.plan().buckets_among(self.among);
        let pairs = pairs.map(|bucket| [shard.lend(sharding.in_shard(bucket)), all.lend(bucket.clone())]);
        collective.start_among(self.among, Operation::AllGather { buckets: pairs.collect() })?;
        collective.wait(Wait::All)?;
        Ok(backend.run(MuonPack { from: all.all(), to: part, pieces })?)
    }
}

impl NorMuon {
    #[expect(clippy::cast_possible_truncation, reason = "the operations compute in f32")]
    fn new(
        backend: &BackendHandle,
        muon: &MuonSection,
        whole: &[MuonPiece],
    ) -> std::result::Result<Option<Self>, EngineError> {
        if !muon.normuon {
            return Ok(None);
        }
        let rows = whole.last().map_or(0, |matrix| matrix.row + matrix.len / matrix.cols);
        let moments = backend.alloc_collective(DType::F32, 2 * rows)?;
        backend.zero(moments.all())?;
        Ok(Some(Self { beta2: muon.beta2 as f32, matrices: backend.muon_pieces(whole)?, moments }))
    }

    /// Updates the second moments of rows, and returns the factors of all rows. With a sharded optimizer,
    /// `sharded_among` are the ranks that have the matrices.
    fn row_factors(
        &self,
        sharded_among: Option<Among>,
        backend: &BackendHandle,
        step: &Step<'_>,
        (update, pieces): (Slice<'_>, &MuonPieces),
        collective: &mut dyn Collective,
    ) -> Result<Slice<'_>> {
        let (moments, len) = (self.moments.all(), self.moments.len());
        if sharded_among.is_some() {
            backend.zero(moments)?;
        }
        let conditions = step.conditions;
        let v = step.v.all();
        backend.run(MuonRowMoments { update, v, moments, pieces, beta2: self.beta2, conditions })?;
        if let Some(among) = sharded_among {
            let buckets = vec![self.moments.lend(0..len)];
            collective.start_among(among, Operation::AllReduce { buckets, dtype: DType::F32 })?;
            collective.wait(Wait::All)?;
        }
        backend.run(MuonRowFactors { moments, matrices: &self.matrices })?;
        Ok(moments.slice(len / 2..len))
    }
}

/// Returns the matrices as pieces: their places in the arena and among the packed updates.
fn whole(matrices: &[Matrix], packing: &Packing) -> Vec<MuonPiece> {
    let pieces = matrices.iter().zip(&packing.places).scan(0, |next, (matrix, packed)| {
        let Matrix { range, rows, cols, factor } = matrix;
        let (at, len, row) = (range.start, range.len(), *next);
        *next += rows;
        Some(MuonPiece { at, packed: *packed, len, first: 0, cols: *cols, row, factor: *factor })
    });
    pieces.collect()
}

/// Returns the pieces of these matrices that this rank updates, at their positions in its shard.
fn updated(sharding: &Sharding, whole: &[MuonPiece]) -> Vec<MuonPiece> {
    if !sharding.is_sharded() {
        return whole.to_vec();
    }
    let parts = whole.iter().flat_map(|matrix| {
        sharding.plan().buckets().iter().filter_map(|bucket| {
            let (own, stored) = (sharding.in_arena(bucket), sharding.in_shard(bucket));
            let (start, end) = (own.start.max(matrix.at), own.end.min(matrix.at + matrix.len));
            (start < end).then(|| {
                let (at, first) = (stored.start + start - own.start, start - matrix.at);
                MuonPiece { at, packed: matrix.packed + first, len: end - start, first, ..*matrix }
            })
        })
    });
    parts.collect()
}

/// Allocates the source and the destination of all-gathers: of updates in the places of their weights, and of those
/// that were made orthogonal. One follows the other, so they use the same memory.
fn gathered<'a>(
    backend: &BackendHandle,
    sharding: &Sharding,
    packings: impl Iterator<Item = &'a Packing>,
) -> std::result::Result<Option<[Tensor; 2]>, EngineError> {
    let mut lens = [0, 0];
    if sharding.is_sharded() {
        lens = [sharding.len(), sharding.arena_len()];
    }
    for packing in packings.filter(|packing| packing.is_owned()) {
        lens = [lens[0].max(packing.part), lens[1].max(packing.part * packing.parts)];
    }
    if lens == [0, 0] {
        return Ok(None);
    }
    let [own, all] = lens.map(|len| backend.alloc_collective(backend.activation_dtype(), len));
    let tensors = [own?, all?];
    // Gaps, and elements of other parameters, are gathered along.
    tensors.iter().try_for_each(|tensor| backend.zero(tensor.all()))?;
    Ok(Some(tensors))
}

/// Returns the matrices of all blocks. Layers that compute several projections at once are divided into these.
fn matrices(shape: &ModelShape, layout: &Layout, adjust_lr: AdjustLr) -> Vec<Matrix> {
    let (queries, keys) = (shape.attention_width(), shape.kv_heads * shape.head_dim);
    let blocks = layout.blocks.iter().flat_map(|block| {
        // The matrices of experts follow each other.
        let (experts, ffn) = match block.router {
            Some(_) => (shape.experts / layout.expert_groups.size, shape.expert_width()),
            None => (1, shape.ffn),
        };
        let gates = if shape.gated { 2 } else { 1 };
        let shared = block.shared.iter().flat_map(move |shared| {
            let width = shape.shared_width();
            [(&shared.fc, shape.dim, vec![width; gates]), (&shared.out, width, vec![shape.dim])]
        });
        let others = [
            (&block.qkv, shape.dim, vec![queries, keys, keys]),
            (&block.proj, queries, vec![shape.dim]),
            (&block.fc, shape.dim, vec![ffn; experts * gates]),
            (&block.out, ffn, vec![shape.dim; experts]),
        ];
        others.into_iter().chain(shared)
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
