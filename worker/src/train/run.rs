//! The training loop of one rank: learning rate, reports, evaluation, checkpoints, stopping.
//!
//! Inside the loop steps are numbered from 0: `step` is the number of steps completed before it. Users see numbers from
//! 1: `done` is the number of a step, and also the number of steps completed after it.

use std::path::Path;
use std::time::{Duration, Instant};

use xlaunch_comm::Collective;
use xlaunch_engine::KernelTime;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    BestEvaluation, CheckpointSkipped, EvalReport, ExpertLoads, ExpertReport, KernelReport, Phase,
    ProfileReport, SourceLoss, SourceReport, StepReport,
};
use xlaunch_spec::job::{JobSpec, TrainSection};

use super::checkpoints::{Checkpoints, Position};
use super::compare::compare_replicas;
use super::evaluate::Evaluator;
use super::replicas::{Survey, any, survey};
use super::sample::Sampler;
use super::step::{PendingStep, Requests, Stepper};
use super::trace::{self, Tracer};
use crate::best::Best;
use crate::control::Control;
use crate::data::{Dataset, Loader, SourceUse, TokenizerSource};
use crate::divergence::{Divergence, SkipCount};
use crate::error::{Result, WorkerError};
use crate::fail::{self, Place};
use crate::model::{BackendHandle, ExpertLoad, Model};
use crate::optim::AdamW;
use crate::phase;
use crate::schedule;

/// State of the training loop.
#[derive(Debug)]
#[expect(missing_docs, reason = "the types are documented where they are defined")]
pub struct Run<'a> {
    pub spec: &'a JobSpec,
    pub backend: &'a BackendHandle,
    pub model: &'a Model,
    pub optimizer: &'a AdamW,
    pub stepper: &'a Stepper,
    pub evaluator: &'a Evaluator,
    pub collective: &'a mut dyn Collective,
    pub dataset: &'a Dataset,
    pub loader: &'a Loader,
    pub control: &'a Control,
    /// Present only on rank 0.
    pub sampler: Option<&'a Sampler>,
    /// `None` for a benchmark.
    pub checkpoints: Option<Checkpoints>,
    pub skips: SkipCount,
    /// The best evaluation, also of earlier runs.
    pub best: Option<Best>,
    /// Number of steps completed before this run.
    pub first_step: u64,
    /// Number of sequences used before this run.
    pub first_sequence: u64,
    /// Set if the run starts from a state without a checkpoint, which is then saved first; contains its validation
    /// loss.
    pub unsaved: Option<Option<f64>>,
    /// Directory for a trace of the pool's requests during the first step.
    pub pool_trace: Option<&'a Path>,
    /// Time of a step at the peak rate of the devices, if known.
    pub seconds_at_peak: Option<f64>,
    /// Number of the step, from 1, whose kernels are timed.
    pub profile: Option<u64>,
    /// True if this is a benchmark, whose profile is reported to the agent.
    pub bench: bool,
    /// Writes the timeline of `[observe] trace`.
    pub tracer: Tracer,
    /// Time by which a checkpoint delays the next step.
    pub checkpoint_delay: Duration,
}

/// Result of the loop.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Number of completed steps, including earlier runs.
    pub steps: u64,
    /// True if a stop command ended training before the last step.
    pub stopped_early: bool,
    /// Use of the sources of a mixture.
    pub sources: Vec<SourceReport>,
}

/// A step that was enqueued and has not been waited for.
#[derive(Debug)]
struct InFlight {
    pending: PendingStep,
    learning_rate: f64,
}

impl Run<'_> {
    /// Trains until the last step or a stop command. Unless this is a benchmark, the last checkpoint is complete when
    /// this returns.
    ///
    /// The next step is enqueued before the results of the current one are read back, so that the GPU does not idle in
    /// between, unless something has to happen between the two. A request therefore takes effect at most one step after
    /// the step whose results contain it. All ranks see the same requests, so they act on them after the same step.
    ///
    /// # Errors
    /// If training has diverged, among other reasons. The optimizer then skips the step that may be in flight, so the
    /// state is that of the last good step.
    pub fn run(&mut self) -> Result<Outcome> {
        let mut step = self.first_step;
        if let Some(val_loss) = self.unsaved.take() {
            self.save(step, val_loss, step >= self.spec.train.steps || self.stops_early())?;
        }
        let mut requested = Requests::default();
        if step > 0 && self.samples_after(step) && !self.stops_early() {
            // A stop may have kept the earlier run from sampling this step. If not, the text is the same.
            requested.stop = self.sample(step)?;
        }
        let mut next = None;
        let mut since = Instant::now();
        while step < self.spec.train.steps && !((requested.stop || self.stops_early()) && next.is_none()) {
            let current = match next.take() {
                Some(current) => current,
                None => {
                    since = Instant::now();
                    // Discards the waiting time of work between steps.
                    phase::take_waited();
                    self.start(step)?
                }
            };
            if requested == Requests::default() && !self.stops_early() && self.can_enqueue_next(step) {
                next = Some(self.start(step + 1)?);
            }
            let requests = match self.finish(step, current, &mut since) {
                Err(error @ WorkerError::Diverged { .. }) => {
                    if let Some(InFlight { pending, .. }) = next {
                        // The device must be idle when graphs and buffers are released. Whether the step fails no
                        // longer matters.
                        let _ = self.stepper.finish(self.model, pending, self.collective);
                    }
                    return Err(error);
                }
                requests => requests?,
            };
            requested.stop |= requests.stop;
            requested.checkpoint |= requests.checkpoint;
            step += 1;
            if next.is_none() {
                requested = self.between_steps(step, requested)?;
            }
        }
        self.tracer.finish()?;
        let stopped_early = step < self.spec.train.steps && !self.stops_early();
        Ok(Outcome { steps: step, stopped_early, sources: self.source_reports(step) })
    }

    /// Returns whether the step after `step` can be enqueued before this one is read back. The same on every rank.
    fn can_enqueue_next(&self, step: u64) -> bool {
        let done = step + 1;
        let asynchronous = self.backend.is_asynchronous();
        asynchronous
            && !self.compares_after(done)
            && !self.evaluates_after(done)
            && !self.samples_after(done)
            && !self.saves_after(done)
            && !self.is_profiled(step)
            && !self.is_profiled(done)
            && !self.writes_pool_trace_after(step)
    }

    /// Returns whether each kernel of a step is timed.
    fn is_profiled(&self, step: u64) -> bool {
        self.profile == Some(step + 1) || self.tracer.traces(step)
    }

    /// Returns whether the validation loss has not improved for as long as `train.patience` allows.
    fn stops_early(&self) -> bool {
        self.best.is_some_and(|best| best.is_final(self.spec.train.patience))
    }

    /// Returns whether a checkpoint of this step must be saved because its validation loss is the lowest so far.
    fn is_best(&self, step: u64) -> bool {
        self.spec.train.patience != 0 && self.best.is_some_and(|best| best.step == step)
    }

    /// Returns whether an evaluation is due after `done` steps.
    fn evaluates_after(&self, done: u64) -> bool {
        let every = self.spec.train.eval_every;
        every != 0 && (done.is_multiple_of(every) || done == self.spec.train.steps)
    }

    /// Returns whether a text is sampled after `done` steps. The sample after the last step is taken at the end of the
    /// run. The same on every rank.
    fn samples_after(&self, done: u64) -> bool {
        let train = &self.spec.train;
        train.sample > 0
            && train.sample_every != 0
            && done.is_multiple_of(train.sample_every)
            && done < train.steps
            && self.dataset.tokenizer != TokenizerSource::Unknown
    }

    /// Returns whether a checkpoint is due after `done` steps.
    fn saves_after(&self, done: u64) -> bool {
        let every = self.spec.checkpoint.every;
        (every != 0 && done.is_multiple_of(every)) || done == self.spec.train.steps
    }

    /// Returns whether a checkpoint is due by the clock. Only on rank 0, as the clocks of ranks differ.
    fn is_due_by_clock(&self) -> bool {
        self.collective.rank() == 0 && self.checkpoints.as_ref().is_some_and(Checkpoints::is_due_by_clock)
    }

    /// Returns whether the parameters of all ranks are compared after `done` steps. A requested checkpoint is also
    /// preceded by a comparison.
    fn compares_after(&self, done: u64) -> bool {
        let every = self.spec.observe.check_every;
        every != 0 && (done.is_multiple_of(every) || self.saves_after(done))
    }

    /// Returns whether the pool trace is written after this step.
    fn writes_pool_trace_after(&self, step: u64) -> bool {
        step == self.first_step && self.pool_trace.is_some()
    }

    /// Does the work that is due after `step` completed steps. No step may be in flight. Returns whether training stops
    /// now, and whether a checkpoint remains to be saved: after a skipped step, only the last one is saved, as the
    /// weights that led to it may be useless even if they are finite.
    fn between_steps(&mut self, step: u64, mut requested: Requests) -> Result<Requests> {
        if let Some(dir) = self.pool_trace.take() {
            self.write_pool_trace(dir)?;
        }
        let is_due = self.saves_after(step);
        let evaluates = self.evaluates_after(step);
        let samples = self.samples_after(step);
        let mut last = step == self.spec.train.steps || requested.stop;
        // An evaluation may show that this step is the best, or the last, and a stop may end a sample.
        let may_save =
            is_due || requested.checkpoint || last || samples || evaluates && self.spec.train.patience != 0;
        let compares = self.checkpoints.is_some() && may_save && self.spec.observe.check_every != 0;
        if self.compares_after(step) || compares {
            let _span = trace::span(Phase::AllReduce);
            compare_replicas(self.backend, self.model, self.optimizer, self.collective, step)?;
        }
        let mut val_loss = None;
        if evaluates {
            let _span = trace::span(Phase::Evaluation);
            val_loss = self.evaluate(step)?;
        }
        if samples && !self.stops_early() {
            requested.stop |= self.sample(step)?;
        }
        last |= requested.stop || self.stops_early();
        let saves = is_due || requested.checkpoint || last || self.is_best(step);
        if self.checkpoints.is_none() || !saves {
            return Ok(Requests { checkpoint: false, ..requested });
        }
        if self.skips.is_skipping() && !last {
            return Ok(Requests { checkpoint: true, ..requested });
        }
        let start = Instant::now();
        let begun = self.save(step, val_loss, last)?;
        self.checkpoint_delay = if begun { start.elapsed() } else { Duration::ZERO };
        if !begun && is_due && self.collective.rank() == 0 {
            let skipped = self.checkpoints.as_mut().map_or(0, Checkpoints::skip);
            self.control.report(Report::CheckpointSkipped(CheckpointSkipped { step, skipped }));
        }
        // A requested checkpoint is saved as soon as the previous one is written.
        Ok(Requests { checkpoint: !begun && requested.checkpoint, ..requested })
    }

    /// Saves a checkpoint. Returns false, on every rank, if any rank is still writing the previous one.
    fn save(&mut self, step: u64, val_loss: Option<f64>, last: bool) -> Result<bool> {
        let waits = last || self.is_best(step);
        let position = Position { step, sequences: self.sequences(step), val_loss, best: self.best };
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(true) };
        let _span = trace::span(Phase::Checkpoint);
        if waits || !checkpoints.is_busy() {
            // If the previous save has failed, this one is tried regardless.
            checkpoints.wait()?;
        }
        let state = self.optimizer.state(self.model);
        let Survey { finite, busy } = survey(self.backend, state, checkpoints.is_busy(), self.collective)?;
        if !finite {
            return Err(WorkerError::Diverged { step, what: Divergence::State });
        }
        if busy {
            return Ok(false);
        }
        checkpoints.save(self.backend, self.model, self.optimizer, position, last)?;
        Ok(true)
    }

    /// Enqueues a step.
    fn start(&mut self, step: u64) -> Result<InFlight> {
        if let Some(reason) = self.control.lost() {
            return Err(WorkerError::AgentLost(reason));
        }
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.check()?;
        }
        phase::begin_step(step + 1);
        fail::set_step(step + 1);
        let learning_rate = schedule::learning_rate(&self.spec.train, step);
        self.optimizer.prepare(step, learning_rate)?;
        let requests = Requests {
            stop: self.control.stop_requested(),
            checkpoint: self.control.take_checkpoint_request() || self.is_due_by_clock(),
        };
        if self.is_profiled(step) {
            self.tracer.begin(step);
            self.backend.begin_profile();
            // Kernels in a graph cannot be timed individually.
            self.stepper.set_eager(true);
        }
        let pending =
            self.stepper.start(self.model, self.optimizer, self.collective, self.loader, requests)?;
        Ok(InFlight { pending, learning_rate })
    }

    /// Waits for a step and reports it. `since` is the time when the previous step was completed or, if the device was
    /// idle, when this one was started.
    fn finish(&mut self, step: u64, current: InFlight, since: &mut Instant) -> Result<Requests> {
        // The next step may have been started already.
        fail::set_step(step + 1);
        let result = self.stepper.finish(self.model, current.pending, self.collective)?;
        if let Some(bit) = fail::flipped_bit(Place::Parameters) {
            self.optimizer.flip_bit(self.model, bit)?;
        }
        let completed = Instant::now();
        if self.is_profiled(step) {
            self.stepper.set_eager(false);
            let kernels = self.backend.end_profile()?;
            self.tracer.end(step, &kernels)?;
            if self.profile == Some(step + 1) && self.collective.rank() == 0 {
                self.report_profile(step + 1, &KernelTime::by_name(&kernels));
            }
        }
        let (done, elapsed) = (step + 1, completed - *since);
        // On a GPU the host does not wait for collectives, so the device measures its own time.
        let own_seconds = if self.backend.is_asynchronous() {
            f64::from(result.own_seconds)
        } else {
            elapsed.saturating_sub(phase::take_waited()).as_secs_f64()
        };
        self.skips
            .record(done, result.loss, result.grad_norm)
            .map_err(|what| WorkerError::Diverged { step: done, what })?;
        let pool = self.backend.pool().stats();
        #[expect(clippy::cast_possible_truncation, reason = "for display only")]
        self.control.report(Report::Step(StepReport {
            step: done,
            loss: result.loss,
            learning_rate: current.learning_rate as f32,
            grad_norm: result.grad_norm,
            step_seconds: elapsed.as_secs_f64(),
            tokens: self.stepper.tokens_per_step(),
            pool_live_bytes: pool.live.current(),
            pool_mapped_bytes: pool.mapped.current(),
            pool_peak_bytes: pool.mapped.peak,
            pool_fragmentation: pool.fragmentation() as f32,
            pool_driver_allocations: pool.chunks.added,
            all_reduce_bytes: self.stepper.all_reduce_bytes(),
            skipped: self.skips.is_skipping(),
            skipped_steps: self.skips.total(),
            checkpoint_seconds: std::mem::take(&mut self.checkpoint_delay).as_secs_f64(),
            own_seconds: Some(own_seconds),
            mfu: self.seconds_at_peak.map(|seconds| seconds / elapsed.as_secs_f64().max(1e-9)),
            router_aux_loss: result.experts.as_ref().map(|load| load.balance),
            expert_busiest_share: result.experts.as_ref().map(|load| load.busiest),
            expert_load_entropy: result.experts.as_ref().map(|load| load.entropy),
            preference_accuracy: result.pairs.map(|pairs| pairs.accuracy),
            preference_margin: result.pairs.map(|pairs| pairs.margin),
        }));
        if let Some(load) = result.experts {
            self.report_experts(done, &load);
        }
        *since = completed;
        Ok(result.requests)
    }

    /// Reports the load of each expert, if that is due after `done` steps.
    fn report_experts(&self, done: u64, load: &ExpertLoad) {
        let is_due = done == self.spec.train.steps || self.evaluates_after(done);
        if is_due && self.collective.rank() == 0 {
            let blocks = u32::try_from(self.model.shape.dense_layers).unwrap_or(u32::MAX)..;
            let loads =
                blocks.zip(load.shares()).map(|(block, shares)| ExpertLoads { block, shares }).collect();
            self.control.report(Report::Experts(ExpertReport { step: done, loads }));
        }
    }

    fn report_profile(&self, step: u64, times: &[KernelTime]) {
        if !self.bench {
            return print_profile(step, times);
        }
        let kernel = |time: &KernelTime| KernelReport {
            name: time.name.clone(),
            launches: time.launches,
            seconds: time.seconds,
        };
        self.control.report(Report::Profile(ProfileReport { kernels: times.iter().map(kernel).collect() }));
    }

    /// Writes the pool's requests so far, for PyTorch's memory_viz, for Perfetto, and as a log for `cargo bench -p
    /// xlaunch-pool`.
    fn write_pool_trace(&self, dir: &Path) -> Result<()> {
        let (rank, snapshot) = (self.collective.rank(), self.backend.pool().snapshot());
        let io = |source| WorkerError::Io {
            what: format!("failed to write a pool trace to {}", dir.display()),
            source,
        };
        fs_err::create_dir_all(dir).map_err(io)?;
        let path = |extension: &str| dir.join(format!("pool-rank{rank}.{extension}"));
        snapshot.write_memory_viz(&path("pickle")).map_err(io)?;
        fs_err::write(path("json"), snapshot.perfetto(u32::try_from(rank).unwrap_or(u32::MAX)))
            .map_err(io)?;
        fs_err::write(path("csv"), snapshot.rmm_csv()).map_err(io)
    }

    /// Computes the loss on the held-out data, if there is any.
    fn evaluate(&mut self, step: u64) -> Result<Option<f64>> {
        if self.dataset.val.is_empty() {
            return Ok(None);
        }
        self.optimizer.gather(self.model, self.collective)?;
        let (mut loss, mut tokens, mut losses, mut accuracy) = (0.0, 0, Vec::new(), None);
        for held_out in &self.dataset.val {
            let (model, optimizer) = (self.model, self.optimizer);
            let own = self.evaluator.evaluate(model, optimizer, self.collective, held_out)?;
            loss += held_out.share * own.loss;
            tokens += own.targets;
            if let Some(own) = own.accuracy {
                *accuracy.get_or_insert(0.0) += held_out.share * own;
            }
            let name = held_out.rows.sources()[0].name.clone();
            #[expect(clippy::cast_possible_truncation, reason = "the report contains an f32")]
            losses.push(SourceLoss { name, loss: own.loss as f32 });
        }
        if !loss.is_finite() {
            return Err(WorkerError::Diverged { step, what: Divergence::Validation { loss } });
        }
        let best = Best::after(self.best, step, loss);
        self.best = Some(best);
        if self.collective.rank() == 0 {
            let TrainSection { patience, steps, .. } = self.spec.train;
            let stops = best.is_final(patience) && step < steps;
            #[expect(clippy::cast_possible_truncation, reason = "the report contains an f32")]
            self.control.report(Report::Eval(EvalReport {
                step,
                loss: loss as f32,
                tokens,
                bits_per_byte: self.dataset.bits_per_byte(loss),
                best: (patience != 0).then_some(BestEvaluation { step: best.step, loss: best.loss as f32 }),
                stopped_after: if stops { best.evaluations_since } else { 0 },
                sources: self.source_reports(step),
                losses: if losses.len() > 1 { losses } else { Vec::new() },
                preference_accuracy: accuracy,
            }));
        }
        Ok(Some(loss))
    }

    /// Returns the use of the sources of a mixture after `step` steps.
    fn source_reports(&self, step: u64) -> Vec<SourceReport> {
        let report = |source: SourceUse| SourceReport {
            epochs: source.epochs(),
            share: source.share,
            tokens: source.used * self.model.shape.seq as u64,
            name: source.name,
        };
        self.dataset.train.usage(self.sequences(step)).into_iter().map(report).collect()
    }

    /// Returns the number of sequences that all ranks have used after `step` steps, with those of earlier runs.
    fn sequences(&self, step: u64) -> u64 {
        self.first_sequence + (step - self.first_step) * self.stepper.sequences_per_step()
    }

    /// Samples and reports a text on rank 0, unless the job is to stop. The other ranks wait for rank 0. Returns, on
    /// every rank, whether the job is to stop: then it ends at this step, and the run that continues it samples the
    /// text.
    fn sample(&mut self, step: u64) -> Result<bool> {
        self.optimizer.gather(self.model, self.collective)?;
        let report = |sampler: &Sampler| sampler.report(self.model, self.control, step);
        let stops = self.sampler.map(report).transpose()?.is_some_and(|text| text.is_none());
        let _span = trace::span(Phase::AllReduce);
        any(self.backend, stops, self.collective)
    }
}

/// Prints the device time per kernel of one step.
#[expect(clippy::print_stderr, reason = "requested with XLAUNCH_PROFILE; stdout is for results")]
fn print_profile(step: u64, times: &[KernelTime]) {
    let total: f64 = times.iter().map(|time| time.seconds).sum();
    eprintln!("step {step}: {:.3} ms in kernels", total * 1e3);
    for KernelTime { name, launches, seconds } in times {
        eprintln!("{:>10.1} us {:>5.1} % {launches:>5} x {name}", seconds * 1e6, 100.0 * seconds / total);
    }
}
