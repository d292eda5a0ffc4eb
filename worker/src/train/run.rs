//! The training loop of one rank: learning rate, reports, evaluation, checkpoints, stopping.
//!
//! Inside the loop steps are numbered from 0: `step` is the number of completed steps before it. Everything that users
//! see numbers them from 1: `done` is the number of a step, and of the completed steps after it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use xlaunch_comm::Collective;
use xlaunch_engine::KernelTime;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{CheckpointReport, EvalReport, KernelReport, Phase, ProfileReport, StepReport};

use super::compare::compare_replicas;
use super::evaluate::Evaluator;
use super::replicas::{all_finite, gather_on_rank_0};
use super::step::{PendingStep, Requests, Stepper};
use super::trace::{self, Tracer};
use crate::checkpoint::{self, Snapshot, State};
use crate::control::Control;
use crate::data::{Dataset, Loader};
use crate::divergence::{Divergence, SkipCount};
use crate::error::{Result, WorkerError};
use crate::model::{BackendHandle, Model};
use crate::optim::{AdamW, schedule};

/// Everything that the loop works with.
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
    pub checkpoint_dir: PathBuf,
    pub skips: SkipCount,
    /// Steps completed before this run.
    pub first_step: u64,
    /// Sequences used before this run.
    pub first_sequence: u64,
    /// Directory for a trace of the pool's requests during the first step.
    pub pool_trace: Option<&'a Path>,
    /// The step, from 1, whose kernels are timed.
    pub profile: Option<u64>,
    /// A benchmark: no checkpoints are saved, and the profile is reported to the agent.
    pub bench: bool,
    /// Writes the timeline of `[observe] trace`.
    pub tracer: Tracer,
}

/// How the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Steps completed, earlier runs included.
    pub steps: u64,
    /// A stop command ended training before the last step.
    pub stopped_early: bool,
}

/// A step that was enqueued and has not been waited for.
#[derive(Debug)]
struct InFlight {
    pending: PendingStep,
    learning_rate: f64,
}

impl Run<'_> {
    /// Trains until the last step or a stop command. Unless this is a benchmark, the last checkpoint is complete when
    /// it returns.
    ///
    /// The next step is enqueued before the results of the current one are read back, so that the GPU does not idle
    /// meanwhile, unless something has to happen between the two. A request therefore takes effect at most one step
    /// after the step whose results contain it. All ranks see the same requests, so they act on it after the same step.
    ///
    /// # Errors
    /// Among others, that training diverged. The optimizer skips the step that may be in flight then, so the state is
    /// that of the last good step.
    pub fn run(&mut self) -> Result<Outcome> {
        let mut step = self.first_step;
        let mut requested = Requests::default();
        let mut next = None;
        let mut since = Instant::now();
        while step < self.spec.train.steps && !(requested.stop && next.is_none() && !self.skips.is_skipping())
        {
            let current = match next.take() {
                Some(current) => current,
                None => {
                    since = Instant::now();
                    self.start(step)?
                }
            };
            if requested == Requests::default() && self.can_enqueue_next(step) {
                next = Some(self.start(step + 1)?);
            }
            let requests = match self.finish(step, current, &mut since) {
                Err(error @ WorkerError::Diverged { .. }) => {
                    if let Some(InFlight { pending, .. }) = next {
                        // The device must not be working when graphs and buffers are released. Whether the step fails
                        // does not matter any more.
                        let _ = self.stepper.finish(pending, self.collective);
                    }
                    return Err(error);
                }
                requests => requests?,
            };
            requested.stop |= requests.stop;
            requested.checkpoint |= requests.checkpoint;
            step += 1;
            if next.is_none() {
                requested.checkpoint = self.between_steps(step, requested)?;
            }
        }
        self.tracer.finish()?;
        Ok(Outcome { steps: step, stopped_early: step < self.spec.train.steps })
    }

    /// Whether the step after `step` can be enqueued before this one is read back. The same on every rank.
    fn can_enqueue_next(&self, step: u64) -> bool {
        let done = step + 1;
        let asynchronous = self.backend.is_asynchronous();
        asynchronous
            && !self.compares_after(done)
            && !self.evaluates_after(done)
            && !self.saves_after(done)
            && !self.is_profiled(step)
            && !self.is_profiled(done)
            && !self.writes_pool_trace_after(step)
    }

    /// Whether each kernel of a step is timed.
    fn is_profiled(&self, step: u64) -> bool {
        self.profile == Some(step + 1) || self.tracer.traces(step)
    }

    /// Whether an evaluation is due when `done` steps are completed.
    fn evaluates_after(&self, done: u64) -> bool {
        let every = self.spec.train.eval_every;
        every != 0 && (done.is_multiple_of(every) || done == self.spec.train.steps)
    }

    /// Whether a checkpoint is due when `done` steps are completed.
    fn saves_after(&self, done: u64) -> bool {
        let every = self.spec.checkpoint.every;
        (every != 0 && done.is_multiple_of(every)) || done == self.spec.train.steps
    }

    /// Whether the parameters of all ranks are compared when `done` steps are completed. A checkpoint that was
    /// requested is compared, too, before it is saved.
    fn compares_after(&self, done: u64) -> bool {
        let every = self.spec.observe.check_every;
        every != 0 && (done.is_multiple_of(every) || self.saves_after(done))
    }

    /// Whether the pool trace is written after this step.
    fn writes_pool_trace_after(&self, step: u64) -> bool {
        step == self.first_step && self.pool_trace.is_some()
    }

    /// Does what is due after `step` completed steps. No step is in flight. Returns whether a checkpoint remains to be
    /// saved: none is saved after a skipped step, as the weights that led to it may be useless though they are finite.
    fn between_steps(&mut self, step: u64, requested: Requests) -> Result<bool> {
        if let Some(dir) = self.pool_trace.take() {
            self.write_pool_trace(dir)?;
        }
        let is_due = !self.bench && (self.saves_after(step) || requested.checkpoint || requested.stop);
        if self.compares_after(step) || is_due && self.spec.observe.check_every != 0 {
            let _span = trace::span(Phase::AllReduce);
            compare_replicas(self.backend, self.model, self.optimizer, self.collective, step)?;
        }
        if self.evaluates_after(step) {
            let _span = trace::span(Phase::Evaluation);
            self.evaluate(step)?;
        }
        if is_due && !self.skips.is_skipping() {
            let _span = trace::span(Phase::Checkpoint);
            if !all_finite(self.backend, self.optimizer.state(self.model), self.collective)? {
                return Err(WorkerError::Diverged { step, what: Divergence::State });
            }
            self.save(step)?;
        }
        Ok(is_due && self.skips.is_skipping())
    }

    /// Enqueues a step.
    fn start(&mut self, step: u64) -> Result<InFlight> {
        if let Some(reason) = self.control.lost() {
            return Err(WorkerError::AgentLost(reason));
        }
        let learning_rate = schedule::learning_rate(&self.spec.train, step);
        self.optimizer.prepare(step, learning_rate)?;
        let requests = Requests {
            stop: self.control.stop_requested(),
            checkpoint: self.control.take_checkpoint_request(),
        };
        if self.is_profiled(step) {
            self.tracer.begin(step);
            self.backend.begin_profile();
            // Kernels of a graph cannot be timed one by one.
            self.stepper.set_eager(true);
        }
        let pending =
            self.stepper.start(self.model, self.optimizer, self.collective, self.loader, requests)?;
        Ok(InFlight { pending, learning_rate })
    }

    /// Waits for a step and reports it. `since` is when the previous step was completed or, if the device was idle,
    /// when this one was started.
    fn finish(&mut self, step: u64, current: InFlight, since: &mut Instant) -> Result<Requests> {
        let result = self.stepper.finish(current.pending, self.collective)?;
        let completed = Instant::now();
        if self.is_profiled(step) {
            self.stepper.set_eager(false);
            let kernels = self.backend.end_profile()?;
            self.tracer.end(step, &kernels)?;
            if self.profile == Some(step + 1) && self.collective.rank() == 0 {
                self.report_profile(step + 1, &KernelTime::by_name(&kernels));
            }
        }
        let done = step + 1;
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
            step_seconds: (completed - *since).as_secs_f64(),
            tokens: self.stepper.tokens_per_step(),
            pool_live_bytes: pool.live.current(),
            pool_mapped_bytes: pool.mapped.current(),
            pool_peak_bytes: pool.mapped.peak,
            pool_fragmentation: pool.fragmentation() as f32,
            pool_driver_allocations: pool.chunks.added,
            all_reduce_bytes: self.stepper.all_reduce_bytes(),
            skipped: self.skips.is_skipping(),
            skipped_steps: self.skips.total(),
        }));
        *since = completed;
        Ok(result.requests)
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

    /// Writes the pool's requests so far for PyTorch's memory_viz, for Perfetto, and as a log for `cargo bench
    /// -p xlaunch-pool`.
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

    fn evaluate(&mut self, step: u64) -> Result<()> {
        let Some(val) = &self.dataset.val else { return Ok(()) };
        self.optimizer.gather(self.model, self.collective)?;
        let (loss, tokens) = self.evaluator.evaluate(self.model, self.collective, val)?;
        if !loss.is_finite() {
            return Err(WorkerError::Diverged { step, what: Divergence::Validation { loss } });
        }
        if self.collective.rank() == 0 {
            #[expect(clippy::cast_possible_truncation, reason = "the report has an f32")]
            self.control.report(Report::Eval(EvalReport { step, loss: loss as f32, tokens }));
        }
        Ok(())
    }

    /// Saves a checkpoint on rank 0. Every rank calls it, as shards are gathered first.
    fn save(&mut self, step: u64) -> Result<()> {
        let start = Instant::now();
        let sharding = self.optimizer.sharding();
        let mut gather = |shard| gather_on_rank_0(self.backend, sharding, shard, self.collective);
        let [params, m, v] = self.optimizer.state(self.model);
        let (Some(params), Some(m), Some(v)) = (gather(params)?, gather(m)?, gather(v)?) else {
            return Ok(());
        };
        let state = State {
            version: checkpoint::VERSION,
            step,
            sequences: self.first_sequence + (step - self.first_step) * self.stepper.sequences_per_step(),
            world_size: u32::try_from(self.collective.world_size()).unwrap_or(u32::MAX),
            model: self.model.shape.clone(),
            seed: self.spec.job.seed,
            spec: self.spec.clone(),
        };
        let arenas = Snapshot { params: &params, m: &m, v: &v };
        let path = checkpoint::save(&self.checkpoint_dir, &self.model.layout, &arenas, &state)?;
        checkpoint::prune(&self.checkpoint_dir, self.spec.checkpoint.keep)?;
        self.control.report(Report::Checkpoint(CheckpointReport {
            step,
            path: path.display().to_string(),
            seconds: start.elapsed().as_secs_f64(),
        }));
        Ok(())
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
