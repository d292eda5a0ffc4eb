//! One optimizer step on one rank.
//!
//! ```text
//! compute stream: forward, backward ------------------------------> wait . grad norm . AdamW . read back
//! comm stream:            bucket 0 . bucket 1 . ... . loss and flags ^
//! ```
//! The all-reduce of a bucket starts as soon as backward has written its last gradient. Loss and flags share one small
//! all-reduce, so that all ranks learn in the same step that any of them was told to stop. The loads of experts, if the
//! model has any, are all-reduced between forward and backward.
//!
//! With a sharded optimizer (`comm.shard`) the step begins with the all-gather of the parameters that the previous step
//! updated. Buckets are reduce-scattered. Each rank has the part of the squared gradient norm that belongs to its
//! shard; it is all-reduced together with loss and flags:
//! ```text
//! compute stream: forward . . . . , backward ------> wait . grad norm .                      . AdamW . read back
//! comm stream:    gather n . ... . 0     reduce-scatter ^              loss, flags and norm ^
//! ```
//! If ranks divide experts among themselves, they have parts of the norm as well, and both passes exchange tokens
//! within groups of ranks.
//!
//! With sharded gradients, every micro-step is reduced, and backward waits for the reduce-scatters whose memory it
//! reuses. With sharded parameters, both passes gather parameters block by block, one block ahead (see
//! [`xlaunch_comm::Slots`]).
//!
//! All data that changes from step to step (tokens, targets, flags, the optimizer's scalars) is written to device
//! memory before the work that reads it is enqueued, so the work itself can be captured and replayed: see [`Replay`].

use std::ops::Range;
use std::rc::Rc;

use xlaunch_comm::{Among, Collective, Operation, Sharding, Wait, bucket};
use xlaunch_engine::{Accumulate, DType, Mark, PendingRead, Scale, Slice, SquaredNorm, Sum, Tensor};
use xlaunch_proto::v1::Phase;
use xlaunch_spec::job::JobSpec;

use super::batch_memory::BatchMemory;
use super::division::{self, Division, wire_dtype};
use super::gathers::Gathers;
use super::gradients::Gradients;
use super::preferences::{PairSum, Preferences};
use super::replay::{Replay, Work};
use super::trace;
use crate::data::{Loader, MicroBatch};
use crate::error::Result;
use crate::fail::{self, Place};
use crate::model::{BackendHandle, ExpertLoad, LossGradients, Model, Output, Progress, Routing};
use crate::optim::AdamW;

/// Slots of the tensor that is read back after a step. Those before `OWN_SECONDS` are all-reduced. Without sharding,
/// every rank computes the norm of all gradients itself, and writes it after that all-reduce.
mod slot {
    pub(super) const LOSS: usize = 0;
    pub(super) const STOP: usize = 1;
    pub(super) const CHECKPOINT: usize = 2;
    pub(super) const GRAD_NORM_SQ: usize = 3;
    pub(super) const BALANCE: usize = 4;
    pub(super) const PREFERRED: usize = 5;
    pub(super) const MARGIN: usize = 6;
    pub(super) const OWN_SECONDS: usize = 7;
    pub(super) const COUNT: usize = 8;
}

/// Size of the all-reduce of loss and flags in bytes. Buckets are larger: their ends are multiples of the layout's
/// alignment.
pub(crate) const SMALL_ALL_REDUCE_BYTES: usize = slot::OWN_SECONDS * size_of::<f32>();

/// Requests of the agent, in the step in which all ranks act on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the commands")]
pub struct Requests {
    pub stop: bool,
    pub checkpoint: bool,
}

/// The results of a step, the same on every rank.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Mean loss over the targets, or pairs of answers, of the global batch that count.
    pub loss: f32,
    /// Global norm of the gradients before clipping. It is finite if and only if its square, which the optimizer reads,
    /// is finite.
    pub grad_norm: f32,
    /// Requests that any rank received.
    pub requests: Requests,
    /// Time that this rank's device took for forward and backward, without waiting for other ranks; with a sharded
    /// optimizer, counted from the end of the last gather. 0 on devices without marks.
    pub own_seconds: f32,
    /// Use of the experts; `None` if the model has none.
    pub experts: Option<ExpertLoad>,
    /// Pairs of answers, if the job trains on preferences.
    pub pairs: Option<PairResult>,
}

/// How the model orders the pairs of answers of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairResult {
    /// Share of pairs whose better answer has gained more than the worse one.
    pub accuracy: f32,
    /// Mean difference of the gains, times `dpo.beta`.
    pub margin: f32,
}

/// A step that was enqueued and has not been waited for.
#[derive(Debug)]
pub struct PendingStep {
    results: PendingRead,
    /// Loads of experts, if the model has any.
    loads: Option<PendingRead>,
}

/// Buffers reused by all steps, and their captured graphs.
#[derive(Debug)]
pub struct Stepper {
    backend: BackendHandle,
    batch: BatchMemory,
    accumulate: usize,
    world: usize,
    overlap: bool,
    gradients: Gradients,
    /// Gathers of the first micro-step, and of the others.
    gathers: [Gathers; 2],
    losses: Tensor,
    /// `None` unless the job trains on preferences.
    preferences: Option<Rc<Preferences>>,
    /// Factor of the losses: the reciprocal of the number of targets, or pairs of answers, of the step. It is in memory
    /// because the number differs from step to step if not every target counts.
    scale: Tensor,
    results: Tensor,
    sharding: Sharding,
    replay: Replay,
}

impl Stepper {
    /// Allocates the buffers.
    pub fn new(
        backend: &BackendHandle,
        model: &Model,
        spec: &JobSpec,
        division: &Division,
        world: usize,
        preferences: Option<Rc<Preferences>>,
    ) -> Result<Self> {
        let batch = BatchMemory::new(backend, spec, model.shape.seq)?;
        let rows = batch.rows().count();
        let (wire, accumulate) = (wire_dtype(spec, backend.activation_dtype()), spec.train.accumulate);
        let parts = division::parts(&model.layout);
        let gathers = |complete| Gathers::new(division, &parts, spec.comm.overlap, complete);
        let stepper = Self {
            batch,
            accumulate,
            world,
            overlap: spec.comm.overlap,
            gradients: Gradients::new(backend, &model.layout, division, wire, accumulate, world)?,
            gathers: [gathers(false), gathers(true)],
            losses: backend.alloc_persistent(DType::F32, rows)?,
            preferences,
            scale: backend.alloc_persistent(DType::F32, 1)?,
            results: backend.alloc_collective(DType::F32, slot::COUNT)?,
            sharding: division.sharding.clone(),
            replay: Replay::new(backend, spec.engine.exec),
            backend: backend.clone(),
        };
        backend.zero(stepper.results.all())?;
        Ok(stepper)
    }

    /// Returns the buffers that are reduced, and those that receive results.
    pub fn reduce_buffers(&self) -> impl Iterator<Item = &Tensor> {
        self.gradients.buffers().chain([&self.results])
    }

    /// Returns the number of tokens in the global batch.
    pub fn tokens_per_step(&self) -> u64 {
        self.sequences_per_step() * self.batch.rows().seq as u64
    }

    /// Returns the bytes of gradients that one rank contributes to the all-reduce of a step.
    pub fn all_reduce_bytes(&self) -> u64 {
        if self.world > 1 { self.gradients.bytes() } else { 0 }
    }

    /// Returns the number of sequences in the global batch.
    pub fn sequences_per_step(&self) -> u64 {
        (self.batch.rows().batch * self.accumulate * self.world) as u64
    }

    /// Runs one step. [`AdamW::prepare`] must have been called for it.
    pub fn step(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        loader: &Loader,
        requests: Requests,
    ) -> Result<StepResult> {
        let pending = self.start(model, optimizer, collective, loader, requests)?;
        self.finish(model, pending, collective)
    }

    /// Enqueues one step. [`AdamW::prepare`] must have been called for it.
    pub fn start(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        loader: &Loader,
        requests: Requests,
    ) -> Result<PendingStep> {
        let flag = |requested| f32::from(u8::from(requested));
        let flags = [flag(requests.stop), flag(requests.checkpoint)];
        self.backend.write_f32(self.results.slice(slot::STOP..slot::CHECKPOINT + 1), &flags)?;
        for micro in 0..self.accumulate {
            let waiting = trace::span(Phase::WaitForData);
            fail::at(Place::Data);
            let MicroBatch { batch, step_targets } = loader.next_batch()?;
            drop(waiting);
            self.batch.write(&self.backend, &batch)?;
            if micro == 0 {
                self.backend.write_f32(self.scale.all(), &[self.loss_scale(step_targets)])?;
            }
            self.run(model, optimizer, collective, micro)?;
        }
        let results = self.backend.begin_read(self.results.all())?;
        let loads = model.routing.as_ref().map(|routing| routing.begin_read(&self.backend)).transpose()?;
        Ok(PendingStep { results, loads })
    }

    /// Returns the factor that makes the sum of all losses of a step their mean. A step without targets has the loss 0.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "numbers of ranks, micro-steps and rows are small, and rounding is intended"
    )]
    fn loss_scale(&self, targets: u64) -> f32 {
        if targets == self.tokens_per_step() {
            // In two roundings, which results of earlier versions have.
            let weight = 1.0 / (self.accumulate * self.world) as f32;
            return weight / self.batch.rows().count() as f32;
        }
        if targets == 0 { 0.0 } else { (1.0 / targets as f64) as f32 }
    }

    /// Runs one step without data, to make its allocations.
    pub fn rehearse(&self, model: &Model, optimizer: &AdamW, collective: &mut dyn Collective) -> Result<()> {
        (0..self.accumulate).try_for_each(|micro| self.run(model, optimizer, collective, micro))
    }

    fn run(
        &self,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
        micro: usize,
    ) -> Result<()> {
        let (first, last) = (micro == 0, micro + 1 == self.accumulate);
        self.replay.run(Work::Train { first, last }, || {
            self.micro_step(model, optimizer, collective, first, last)?;
            if last { self.update(model, optimizer, collective) } else { Ok(()) }
        })
    }

    /// Waits for a step. The next step may have been enqueued already.
    pub fn finish(
        &self,
        model: &Model,
        pending: PendingStep,
        collective: &dyn Collective,
    ) -> Result<StepResult> {
        let _reading = trace::span(Phase::ReadBack);
        fail::at(Place::ReadBack);
        let mut results = [0.0; slot::COUNT];
        pending.results.wait(&mut results)?;
        collective.check()?;
        let experts = model.routing.as_ref().zip(pending.loads);
        let experts = experts.map(|(routing, loads)| routing.load(loads, results[slot::BALANCE]));
        Ok(StepResult {
            loss: results[slot::LOSS],
            grad_norm: results[slot::GRAD_NORM_SQ].sqrt(),
            requests: Requests {
                stop: results[slot::STOP] > 0.0,
                checkpoint: results[slot::CHECKPOINT] > 0.0,
            },
            own_seconds: results[slot::OWN_SECONDS],
            experts: experts.transpose()?,
            pairs: self
                .preferences
                .as_ref()
                .map(|_| PairResult { accuracy: results[slot::PREFERRED], margin: results[slot::MARGIN] }),
        })
    }

    /// Makes the next steps run operation by operation, so that each kernel can be timed, or lets them replay graphs
    /// again.
    pub fn set_eager(&self, eager: bool) {
        self.replay.set_eager(eager);
    }

    /// Destroys captured graphs. Call it before closing the collective, which waits for graphs that contain its
    /// operations.
    pub fn drop_graphs(&self) {
        self.replay.drop_graphs();
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
        let (rows, scale) = (self.batch.rows(), self.scale.all());
        let forward = trace::span(Phase::Forward);
        fail::at(Place::Forward);
        if first {
            self.backend.run(Mark::Begin)?;
        }
        if let Some(preferences) = &self.preferences {
            preferences.run_reference(rows, self.batch.tokens(), self.batch.targets())?;
        }
        let gathers = &self.gathers[usize::from(!first)];
        let mut part = 0..;
        let mut next_part = |collective: &mut dyn Collective| -> Result<()> {
            let waited = gathers.begin_part(part.next().unwrap_or(0), model, optimizer, collective)?;
            // This applies to a sharded optimizer only: with sharded parameters, ranks wait for each other until the
            // end.
            if waited && first && model.slots.is_none() {
                self.backend.run(Mark::Begin)?;
            }
            Ok(())
        };
        let acts = model.forward_with_progress(rows, self.batch.tokens(), |progress| match progress {
            Progress::NextPart => next_part(collective),
            Progress::Exchange(exchange) => Ok(collective.exchange(exchange)?),
            Progress::Finished(_) => Ok(()),
        })?;
        if let Some(routing) = &model.routing {
            self.start_loads(routing, collective, first)?;
        }
        let written = self.gradients.accumulation(acc);
        let weights = match &self.preferences {
            None => None,
            Some(preferences) => Some(self.weigh(model, preferences, &acts.output, acc)?),
        };
        let head = LossGradients { scale, grads: self.gradients.arena(), acc: written, weights };
        let dy = model.loss_and_gradients(&acts, self.batch.targets(), self.losses.all(), head)?;
        if weights.is_none() {
            model.scaled_loss(&self.losses, scale, self.result(slot::LOSS), acc)?;
        }
        if let Some(routing) = &model.routing {
            collective.wait(Wait::All)?;
            routing.add_loads(&self.backend, acc)?;
        }
        drop(forward);
        let _backward = trace::span(Phase::Backward);
        let mut buckets = bucket::ReduceProgress::new(self.sharding.plan());
        let (at_once, end) = (self.overlap || self.gradients.reduces_at_once(), model.layout.trained().len);
        let mut begun = 0..;
        let reduces = self.gradients.reduces(last);
        model.backward(
            acts,
            dy,
            self.batch.tokens(),
            self.gradients.arena(),
            written,
            |progress| -> Result<()> {
                match progress {
                    Progress::NextPart => {
                        next_part(collective)?;
                        self.gradients.begin_part(begun.next().unwrap_or(0), collective)?;
                    }
                    Progress::Finished(finished) if reduces && (at_once || finished == end) => {
                        let mut written: Vec<_> = buckets.written_up_to(finished).collect();
                        if written.is_empty() {
                            return Ok(());
                        }
                        written.retain(|_| !fail::skips(Place::Reduce));
                        self.gradients.reduce(&written, collective)?;
                        fail::at(Place::Backward);
                    }
                    Progress::Finished(_) => {}
                    Progress::Exchange(exchange) => collective.exchange(exchange)?,
                }
                Ok(())
            },
        )?;
        self.gradients.end_micro_step(acc, collective)
    }

    /// Computes the losses of the batch's pairs of answers, and returns the weights of its tokens in the gradient.
    fn weigh<'a>(
        &self,
        model: &Model,
        preferences: &'a Preferences,
        output: &Output<'_>,
        acc: Accumulate,
    ) -> Result<Slice<'a>> {
        model.loss(output, self.batch.targets(), self.losses.all())?;
        let weights = preferences.compare(self.batch.rows(), self.losses.all())?;
        for (sum, slot) in [
            (PairSum::Losses, slot::LOSS),
            (PairSum::Preferred, slot::PREFERRED),
            (PairSum::Margins, slot::MARGIN),
        ] {
            preferences.add_up(sum, self.scale.all(), self.result(slot), acc)?;
        }
        Ok(weights)
    }

    /// Returns the memory of a result.
    fn result(&self, slot: usize) -> Slice<'_> {
        self.results.slice(slot..slot + 1)
    }

    /// Starts the all-reduce of the loads of experts, which the balance loss in backward reads.
    fn start_loads(&self, routing: &Routing, collective: &mut dyn Collective, first: bool) -> Result<()> {
        if first {
            routing.begin_step(&self.backend)?;
        }
        let buckets = vec![routing.loads.lend(0..routing.loads.len())];
        // The ranks of a group have already added up theirs.
        Ok(collective.start_among(Among::Peers, Operation::AllReduce { buckets, dtype: DType::F32 })?)
    }

    /// Returns the gradients whose squares this rank adds up, so that all ranks together count each one once if the sum
    /// is all-reduced.
    fn counted(&self, grads: &Tensor) -> Vec<Range<usize>> {
        let groups = self.sharding.groups();
        if self.sharding.is_sharded() || groups.size == 1 {
            return std::iter::once(0..grads.len()).collect();
        }
        let first = [Among::All, Among::Peers].into_iter().filter(|among| groups.member(*among).0 == 0);
        first.flat_map(|among| self.sharding.ranges(among)).collect()
    }

    /// Writes the sum of the squares of these gradients to `out`.
    fn squared_norm(&self, grads: &Tensor, counted: &[Range<usize>], out: Slice<'_>) -> Result<()> {
        if let [range] = counted {
            return Ok(self.backend.run(SquaredNorm { x: grads.slice(range.clone()), out })?);
        }
        if counted.is_empty() {
            return Ok(self.backend.zero(out)?);
        }
        let parts = self.backend.alloc(DType::F32, counted.len())?;
        for (index, range) in counted.iter().enumerate() {
            let out = parts.slice(index..index + 1);
            self.backend.run(SquaredNorm { x: grads.slice(range.clone()), out })?;
        }
        let (x, scale, acc) = (parts.all(), Scale::Constant(1.0), Accumulate::Overwrite);
        Ok(self.backend.run(Sum { x, scale, out, acc })?)
    }

    /// Waits for the reduced gradients after the last micro-step, and runs the optimizer.
    fn update(&self, model: &Model, optimizer: &AdamW, collective: &mut dyn Collective) -> Result<()> {
        let _tag = xlaunch_pool::tag("optimizer");
        let [loss, grad_norm_sq] = [slot::LOSS, slot::GRAD_NORM_SQ].map(|slot| self.result(slot));
        self.backend.run(Mark::End(self.results.slice(slot::OWN_SECONDS..slot::COUNT)))?;
        let all_reduce = trace::span(Phase::AllReduce);
        fail::at(Place::AllReduce);
        let grads = self.gradients.reduced();
        let counted = self.counted(grads);
        let divided = self.sharding.is_divided();
        if divided {
            collective.wait(Wait::All)?;
            self.squared_norm(grads, &counted, grad_norm_sq)?;
        }
        if let Some(routing) = &model.routing {
            routing.write_balance(&self.backend, self.result(slot::BALANCE))?;
        }
        let buckets = vec![self.results.lend(0..slot::OWN_SECONDS)];
        collective.run(Operation::AllReduce { buckets, dtype: DType::F32 })?;
        if !divided {
            self.squared_norm(grads, &counted, grad_norm_sq)?;
        }
        drop(all_reduce);
        let _span = trace::span(Phase::Optimizer);
        fail::at(Place::Optimizer);
        // Loss and norm are the same on every rank, so either all ranks apply the step or none does.
        optimizer.step(model, grads.all(), grad_norm_sq, loss, collective)
    }
}
