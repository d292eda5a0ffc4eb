//! One optimizer step on one rank.
//!
//! ```text
//! compute stream: forward, backward ------------------------------> wait . square sum . AdamW . read back
//! second stream:          bucket 0 . bucket 1 . ... . loss and flags ^
//! ```
//! A bucket's sum over ranks starts as soon as backward has written its last gradient. Loss and flags travel in one small
//! sum, so all ranks learn in the same step that any of them was asked to stop.
//!
//! Where each rank updates its share of the parameters, the step begins with the exchange of what the one before it updated;
//! backward's sums are shared out, and the gradients' norm, to which each rank adds its part, travels with loss and flags:
//! ```text
//! compute stream: forward . . . . , backward ------> wait . square sum .                     . AdamW . read back
//! second stream:  bucket n . ... . 0      shares of buckets ^           loss, flags and norm ^
//! ```
//!
//! What changes from step to step (tokens, targets, flags, the optimizer's scalars) is written to device memory before the
//! work that reads it is enqueued, so that the work itself can be captured and replayed: see [`Replay`].

use std::ops::Range;

use xlaunch_comm::{Collective, Sharding, bucket};
use xlaunch_engine::{Accumulate, DType, PendingRead, SquaredNorm, Tensor};
use xlaunch_proto::spec::{JobSpec, SpecError, WireDtype};
use xlaunch_proto::v1::Phase;

use super::replay::{Part, Replay};
use super::trace;
use crate::data::Loader;
use crate::error::{Result, WorkerError};
use crate::model::layout::Layout;
use crate::model::{BackendHandle, Model, Rows};
use crate::optim::AdamW;

/// Slots of the tensor that a step is read back from. All are summed over ranks; where every rank has all gradients, their
/// squares are written over what that sum left.
mod slot {
    pub(super) const LOSS: usize = 0;
    pub(super) const STOP: usize = 1;
    pub(super) const CHECKPOINT: usize = 2;
    pub(super) const GRAD_NORM_SQ: usize = 3;
    pub(super) const COUNT: usize = 4;
}

/// Smaller first bucket: its sum starts early, while later gradients are still being made.
const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// What this rank was asked by its agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the commands")]
pub struct Requests {
    pub stop: bool,
    pub checkpoint: bool,
}

/// What a step came to, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct StepResult {
    /// Mean loss over the global batch.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// What any rank was asked.
    pub requests: Requests,
}

/// A step that was given to the device.
#[derive(Debug)]
pub struct Started(PendingRead);

/// Everything that steps use again and again.
#[derive(Debug)]
pub struct Stepper {
    backend: BackendHandle,
    rows: Rows,
    accumulate: usize,
    world: usize,
    overlap: bool,
    grads: Tensor,
    /// This rank's share of the summed gradients, where they are not summed in place.
    share: Option<Tensor>,
    tokens: Tensor,
    targets: Tensor,
    losses: Tensor,
    results: Tensor,
    sharding: Sharding,
    replay: Replay,
}

/// Element type of gradients, in memory and on the wire.
pub fn wire_dtype(spec: &JobSpec, activations: DType) -> DType {
    match spec.comm.dtype {
        WireDtype::Fp32 => DType::F32,
        WireDtype::Bf16 => DType::Bf16,
        WireDtype::Auto if activations == DType::Bf16 && spec.train.accumulate == 1 => DType::Bf16,
        WireDtype::Auto => DType::F32,
    }
}

/// The buckets of this layout, and what `rank` has of them.
///
/// # Errors
/// A number of ranks that cannot share the parameters as the job says.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a size in MiB, checked to be positive; a larger one than memory means one bucket"
)]
pub fn sharding(
    spec: &JobSpec,
    layout: &Layout,
    activations: DType,
    rank: usize,
    ranks: usize,
) -> Result<Sharding> {
    spec.comm.check_ranks(ranks).map_err(SpecError::from)?;
    let cap = (spec.comm.bucket_mb * f64::from(1 << 20)) as usize;
    let size = wire_dtype(spec, activations).size();
    let plan = bucket::Plan::new(&layout.ends(), size, cap, cap.min(FIRST_BUCKET_BYTES));
    Ok(if spec.comm.shard_optimizer { Sharding::new(plan, rank, ranks) } else { Sharding::whole(plan) })
}

impl Stepper {
    /// Allocates what every step needs.
    pub fn new(
        backend: &BackendHandle,
        model: &Model,
        spec: &JobSpec,
        sharding: &Sharding,
        world: usize,
    ) -> Result<Self> {
        let rows = Rows { batch: spec.train.batch, seq: model.shape.seq };
        let dtype = wire_dtype(spec, backend.activation_dtype());
        let share = || backend.alloc_collective(dtype, sharding.len());
        let stepper = Self {
            rows,
            accumulate: spec.train.accumulate,
            world,
            overlap: spec.comm.overlap,
            grads: backend.alloc_collective(dtype, model.layout.len)?,
            share: (!sharding.is_whole()).then(share).transpose()?,
            tokens: backend.alloc_persistent(DType::I32, rows.count())?,
            targets: backend.alloc_persistent(DType::I32, rows.count())?,
            losses: backend.alloc_persistent(DType::F32, rows.count())?,
            results: backend.alloc_collective(DType::F32, slot::COUNT)?,
            sharding: sharding.clone(),
            replay: Replay::new(backend, spec.engine.exec),
            backend: backend.clone(),
        };
        // Gaps between parameters are never written again, and take part in sums and norms.
        backend.zero(stepper.grads.all())?;
        backend.zero(stepper.results.all())?;
        if let Some(share) = &stepper.share {
            // Sums alone write it, which a bench may leave out.
            backend.zero(share.all())?;
        }
        Ok(stepper)
    }

    /// What is summed over ranks, and where the sums go.
    pub fn summed(&self) -> impl Iterator<Item = &Tensor> {
        [Some(&self.grads), self.share.as_ref(), Some(&self.results)].into_iter().flatten()
    }

    /// Tokens of the global batch.
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step() * self.rows.seq as u64
    }

    /// Bytes of gradients that a step sums over ranks, of one rank.
    pub fn all_reduce_bytes(&self) -> u64 {
        if self.world > 1 { (self.grads.len() * self.grads.dtype().size()) as u64 } else { 0 }
    }

    /// Sequences of the global batch.
    pub fn sequences_per_step(&self) -> u64 {
        (self.rows.batch * self.accumulate * self.world) as u64
    }

    /// Runs one step; `optimizer` was prepared for it.
    pub fn step(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        loader: &Loader,
        requests: Requests,
    ) -> Result<StepResult> {
        let started = self.start(model, optimizer, collective, loader, requests)?;
        self.finish(started, collective)
    }

    /// Gives one step to the device; `optimizer` was prepared for it.
    pub fn start(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        loader: &Loader,
        requests: Requests,
    ) -> Result<Started> {
        let flag = |asked| f32::from(u8::from(asked));
        let flags = [flag(requests.stop), flag(requests.checkpoint)];
        self.backend.write_f32(self.results.slice(slot::STOP..slot::CHECKPOINT + 1), &flags)?;
        for micro in 0..self.accumulate {
            let waiting = trace::span(Phase::WaitForData);
            let batch = loader.next_batch()?;
            drop(waiting);
            self.backend.write_i32(self.tokens.all(), &batch.tokens)?;
            self.backend.write_i32(self.targets.all(), &batch.targets)?;
            let (first, last) = (micro == 0, micro + 1 == self.accumulate);
            self.replay.run(Part::Train { first, last }, || {
                self.micro_step(model, optimizer, collective, first, last)?;
                if last { self.update(model, optimizer, collective) } else { Ok(()) }
            })?;
        }
        Ok(Started(self.backend.begin_read(self.results.all())?))
    }

    /// Waits for a step. The one after it may have been started.
    pub fn finish(&self, started: Started, collective: &dyn Collective) -> Result<StepResult> {
        let _reading = trace::span(Phase::ReadBack);
        let mut results = [0.0; slot::COUNT];
        started.0.wait(&mut results)?;
        collective.check()?;
        Ok(StepResult {
            loss: results[slot::LOSS],
            grad_norm: results[slot::GRAD_NORM_SQ].sqrt(),
            requests: Requests {
                stop: results[slot::STOP] > 0.0,
                checkpoint: results[slot::CHECKPOINT] > 0.0,
            },
        })
    }

    /// The next steps run operation by operation, so that each can be timed, or may be replayed again.
    pub fn one_by_one(&self, one_by_one: bool) {
        self.replay.one_by_one(one_by_one);
    }

    /// Gives captured work up. It comes before the collective's end, which waits for graphs with its sums.
    pub fn forget_captures(&self) {
        self.replay.forget();
    }

    fn micro_step(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        first: bool,
        last: bool,
    ) -> Result<()> {
        let acc = if first { Accumulate::Overwrite } else { Accumulate::Add };
        #[expect(clippy::cast_precision_loss, reason = "numbers of ranks and micro-steps are small")]
        let share = 1.0 / (self.accumulate * self.world) as f32;
        #[expect(clippy::cast_precision_loss, reason = "rows of one batch are far below 2^24")]
        let scale = share / self.rows.count() as f32;

        let forward = trace::span(Phase::Forward);
        match (first, self.overlap) {
            (true, true) => optimizer.start_gather(model, collective)?,
            (true, false) => optimizer.gather(model, collective)?,
            (false, _) => {}
        }
        let mut arrivals = bucket::Arrivals::new(self.sharding.plan());
        let acts = model.forward_as_weights_arrive::<WorkerError>(self.rows, self.tokens.all(), |start| {
            for _ in 0..arrivals.needed_from(start) {
                collective.finish_gather()?;
            }
            Ok(())
        })?;
        model.loss(&acts, self.targets.all(), self.losses.all(), Some(scale))?;
        model.mean_loss(&self.losses, share, self.results.slice(slot::LOSS..slot::LOSS + 1), acc)?;
        drop(forward);
        let _backward = trace::span(Phase::Backward);
        let mut progress = bucket::Progress::new(self.sharding.plan());
        let (overlap, end) = (self.overlap, model.layout.len);
        model.backward(acts, self.tokens.all(), &self.grads, acc, |finished, grads| {
            if last && (overlap || finished == end) {
                for bucket in progress.finished_up_to(finished) {
                    self.sum(bucket, grads, collective)?;
                }
            }
            Ok(())
        })
    }

    /// Starts the sum of a bucket over ranks.
    fn sum(&self, bucket: Range<usize>, grads: &Tensor, collective: &mut dyn Collective) -> Result<()> {
        match &self.share {
            None => collective.all_reduce(grads.lend(bucket), grads.dtype())?,
            Some(share) => {
                let part = share.lend(self.sharding.in_share(&bucket));
                collective.reduce_scatter(grads.lend(bucket), part, grads.dtype())?;
            }
        }
        Ok(())
    }

    /// What follows the last micro-step: the sums' end, and the optimizer's step.
    fn update(&self, model: &Model, optimizer: &AdamW, collective: &mut dyn Collective) -> Result<()> {
        let _tag = xlaunch_pool::tag("optimizer");
        let grad_norm_sq = self.results.slice(slot::GRAD_NORM_SQ..slot::GRAD_NORM_SQ + 1);
        let summing = trace::span(Phase::AllReduce);
        let grads = match &self.share {
            None => {
                collective.all_reduce(self.results.lend(0..slot::COUNT), DType::F32)?;
                collective.finish()?;
                self.backend.squared_norm(SquaredNorm { x: self.grads.all(), out: grad_norm_sq })?;
                &self.grads
            }
            Some(share) => {
                collective.finish()?;
                self.backend.squared_norm(SquaredNorm { x: share.all(), out: grad_norm_sq })?;
                collective.all_reduce(self.results.lend(0..slot::COUNT), DType::F32)?;
                collective.finish()?;
                share
            }
        };
        drop(summing);
        let _span = trace::span(Phase::Optimizer);
        Ok(optimizer.step(model, grads.all(), grad_norm_sq)?)
    }
}
