//! The life of one rank: device, pool, rendezvous, model, training, and teardown in reverse.

mod device;
mod initial;
mod join;
mod saving;
mod share;

use std::ops::Range;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use xlaunch_comm::{Collective, Sharding};
use xlaunch_engine::{DType, Operations, Work};
use xlaunch_proto::VERSION;
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    Finished, GetJobReply, GetJobRequest, Hello, Phase, StepCommunication, TrainBench, TrainStarted,
};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::flops;
use xlaunch_spec::job::{DocumentMode, JobSpec, Optimizer, Precision, SpecError};
use xlaunch_spec::model::{ModelShape, QkNorm};

use crate::bench::{self, SkipAllReduce};
use crate::checkpoint::Memory;
use crate::control::Control;
use crate::data::{Dataset, Loader, Schedule};
use xlaunch_spec::lineage::Fingerprint;

use crate::divergence::SkipCount;
use crate::environment::{Device, Environment};
use crate::error::{Result, WorkerError};
use crate::fail::{self, Place};
use crate::model::layout::Layout;
use crate::model::{BackendHandle, Model, Rows, activation_function, attention_shape};
use crate::nccl_windows;
use crate::optim::AdamW;
use crate::phase;
use crate::tracked_collective::TrackedCollective;
use crate::train::{self, Division, Evaluator, Outcome, Preferences, Run, Sampler, Stepper, Tracer};
use crate::weights;
use device::{Libraries, OpenDevice};
pub(crate) use device::{activation_dtype, pool_mode};
use initial::{Reading, Start};
use join::Connector;

/// This worker's rank and job.
struct Context<'a> {
    environment: &'a Environment,
    control: &'a Control,
    spec: &'a JobSpec,
    job: &'a GetJobReply,
}

impl Context<'_> {
    fn hello(&self) -> Hello {
        Hello { rank: self.environment.rank.0, attempt: self.environment.attempt.0 }
    }
}

/// Asks the agent for the job and runs it: training, or a benchmark.
pub fn run(environment: &Environment) -> Result<ExitCode> {
    let libraries = Libraries::load(environment);
    phase::record_to(environment.activity_fd);
    phase::enter(Phase::StartUp);
    let control = Control::connect(&environment.agent_socket)?;
    let job = control.get_job(GetJobRequest {
        rank: environment.rank.0,
        attempt: environment.attempt.0,
        version: VERSION.into(),
    })?;
    libraries.use_gpu();
    let spec = JobSpec::from_json(&job.spec_json)?;
    let context = Context { environment, control: &control, spec: &spec, job: &job };
    match job.bench.clone().and_then(|bench| bench.kind) {
        None => train(&context, None),
        Some(Kind::Train(bench)) => train(&context, Some(bench)),
        Some(kind) => measure(&context, &kind),
    }
}

fn train(context: &Context<'_>, bench: Option<TrainBench>) -> Result<ExitCode> {
    let Context { environment, control, spec, job } = *context;
    let shape = spec.model.resolve().map_err(SpecError::from)?;
    let dataset = weights::dataset(spec, &shape)?;
    let fingerprint = dataset.train.fingerprint()?;
    let (rank, world) = (environment.rank.index(), environment.world_size.index());
    check_groups(environment, spec)?;
    let layout = Layout::of_rank(spec, &shape, rank, world).map_err(SpecError::from)?;
    let activations = activation_dtype(spec, environment.device != Device::Cpu);
    let division = division(context, &layout, activations)?;
    let moments = moments(&layout, &division.sharding);
    let memory = saving::memory(context, &layout, &division.sharding)?;
    // For large models, reading weights takes a second or more, like opening the device and the communicator: do both
    // at once.
    let reading = start_reading(context, &shape, memory.clone(), moments)?;
    let device = OpenDevice::new(environment, spec, Some(Work::Training(operations(spec, &shape))))?;
    if let Some(marks) = device.backend.open_marks()? {
        phase::show_marks(marks);
    }
    let run_dir = PathBuf::from(&job.run_dir);
    device.backend.pool().snapshot_on_failure(&run_dir);
    let agreement = agreement(spec, &layout, activations, &division, &fingerprint);
    let connector = join::join(context, &agreement, &device)?;
    let (collective, filled) = connect_and_fill(context, connector, || {
        let mut trainer = Trainer::new(&device.backend, spec, &shape, layout, &division, world)?;
        // Only one rank samples, so that rank must have all weights.
        let has_all = division.weights.is_none() && spec.comm.experts == 1;
        let samples = rank == 0 && bench.is_none() && has_all;
        trainer.sampler = if samples { Sampler::new(spec, &dataset, shape.seq)? } else { None };
        fill(&trainer, reading, job).map(|start| (trainer, start))
    })?;
    // After this point, other ranks fail when this one drops its collective.
    let report = |error| control.report_failure(error);
    let (trainer, start) = filled.map_err(report)?;
    // Shadowed here so that it is dropped before the tensors that its collectives use.
    let mut collective = collective;
    let start = complete_start(context, &device.backend, &trainer, start, &fingerprint, &mut *collective)
        .map_err(report)?;
    let communication = bench.as_ref().map_or(StepCommunication::Full, TrainBench::communication);
    collective = SkipAllReduce::down_to(communication, collective);
    let spec = &start.complete(spec, dataset.train.rows(), environment.world_size.0);
    let context = &Context { spec, ..*context };
    let buffers = trainer.stepper.reduce_buffers().chain(trainer.optimizer.gather_buffers(&trainer.model));
    nccl_windows::register(&device.backend, buffers, &mut *collective, environment.log_fallback)
        .map_err(report)?;

    let loader = start_loader(spec, &shape, &dataset, environment, start.sequences).map_err(report)?;
    let started = train_started(spec, &trainer, &division, &device, &dataset, &start);
    if rank == 0 {
        control.report(Report::TrainStarted(started));
    }
    phase::enter(Phase::Unspecified);
    let outcome = Run {
        spec,
        backend: &device.backend,
        model: &trainer.model,
        optimizer: &trainer.optimizer,
        stepper: &trainer.stepper,
        evaluator: &trainer.evaluator,
        seconds_at_peak: seconds_at_peak(spec, &trainer, &device, &*collective),
        collective: &mut *collective,
        dataset: &dataset,
        loader: &loader,
        control,
        sampler: trainer.sampler.as_ref(),
        checkpoints: saving::open(context, &device.backend, &trainer, &start, &dataset, fingerprint, memory)?,
        skips: SkipCount::new(&spec.train),
        best: start.best,
        first_step: start.step,
        first_sequence: start.sequences,
        unsaved: job.memory_snapshot.filter(|snapshot| !snapshot.on_disk).map(|_| start.val_loss),
        pool_trace: environment.pool_trace.as_deref(),
        profile: bench.map_or(environment.profile, |bench| bench.profile_step),
        bench: bench.is_some(),
        tracer: Tracer::new(spec.observe.trace, start.step..spec.train.steps, &run_dir, rank),
        checkpoint_delay: Duration::ZERO,
    }
    .run()
    .map_err(report);
    end(context, &device.backend, &trainer, collective, outcome)
}

/// Computes the parts that this rank holds, updates and saves.
fn division(context: &Context<'_>, layout: &Layout, activations: DType) -> Result<Division> {
    let Context { environment, spec, .. } = *context;
    let (rank, world) = (environment.rank.index(), environment.world_size.index());
    let (cuda, shared) = (environment.device != Device::Cpu, environment.is_shared());
    let shard = spec.shard(world, cuda, shared);
    let division = Division::new(spec, layout, activations, rank, world, shard);
    if (division.sharding.is_sharded() || spec.comm.experts > 1) && !shared {
        Err(WorkerError::NotShared { writers: environment.writers, world: environment.world_size.0 })
    } else {
        Ok(division)
    }
}

/// Requires that the ranks of each group that divides experts are on one node.
fn check_groups(environment: &Environment, spec: &JobSpec) -> Result<()> {
    spec.check_experts(environment.world_size.index()).map_err(SpecError::from)?;
    let first = environment.rank.index() - environment.local_rank.index();
    if first.is_multiple_of(spec.comm.experts) {
        Ok(())
    } else {
        Err(WorkerError::SplitGroup(spec.comm.experts))
    }
}

/// Returns the ranges of the whole arena whose moments this rank has.
fn moments(layout: &Layout, sharding: &Sharding) -> Vec<Range<usize>> {
    let own = sharding.plan().buckets().iter().map(|bucket| sharding.in_arena(bucket));
    own.flat_map(|range| layout.whole_parts(&range)).map(|segment| segment.whole).collect()
}

/// Starts to read the starting state, on the ranks that can read it. The others receive it from rank 0.
fn start_reading(
    context: &Context<'_>,
    shape: &ModelShape,
    memory: Option<Memory>,
    moments: Vec<Range<usize>>,
) -> Result<Option<Reading>> {
    let reads = context.environment.is_shared() || context.environment.rank.0 == 0;
    reads.then(|| Reading::start(context, shape, memory, moments)).transpose()
}

/// Connects the ranks and opens the session, while `fill` fills the model: both take about as long. If one of them
/// fails, the other one still runs to its end, because other ranks are waiting for it.
fn connect_and_fill<T>(
    context: &Context<'_>,
    connector: Connector,
    fill: impl FnOnce() -> Result<T>,
) -> Result<(Box<dyn Collective>, Result<T>)> {
    let (connected, filled) = std::thread::scope(|scope| {
        let connecting = std::thread::Builder::new().name("connect".into()).spawn_scoped(scope, || {
            let collective: Box<dyn Collective> = Box::new(TrackedCollective(connector.connect()?));
            context.control.open_session(context.hello(), collective.abort_handle());
            Ok(collective)
        });
        let connecting = connecting
            .map_err(|source| WorkerError::Io { what: "failed to start a thread".into(), source })?;
        phase::enter(Phase::Initialize);
        let filled = fill().map_err(|error| saving::set_aside(error, context.spec, context.job));
        phase::enter(Phase::OpenCommunicator);
        Ok::<_, WorkerError>((connecting.join().unwrap_or_else(|panic| resume_unwind(panic)), filled))
    })?;
    fail::at(Place::Session);
    match connected {
        Ok(collective) => Ok((collective, filled)),
        // A GPU without memory for the model may have none for NCCL either, but NCCL's error is less informative. A
        // failure of `fill` is never the fault of another rank.
        Err(error) => Err(filled.err().unwrap_or(error)),
    }
}

/// Passes the starting state to the model and its optimizer. Without `reading`, rank 0 has it.
fn fill(trainer: &Trainer, reading: Option<Reading>, job: &GetJobReply) -> Result<Start> {
    let Some(reading) = reading else { return Ok(Start::default()) };
    if job.memory_snapshot.is_some() || !job.resume_from.is_empty() {
        fail::at(Place::Resume);
    }
    reading.finish(trainer)
}

/// Completes this rank's starting state with the state of other ranks, and refuses to continue with other data. Every
/// rank calls it.
fn complete_start(
    context: &Context<'_>,
    backend: &BackendHandle,
    trainer: &Trainer,
    start: Start,
    data: &Fingerprint,
    collective: &mut dyn Collective,
) -> Result<Start> {
    let Trainer { model, optimizer, .. } = trainer;
    if context.job.memory_snapshot.is_some() {
        initial::exchange_portions(model, optimizer, collective)?;
    }
    let start = if context.environment.is_shared() {
        start
    } else {
        share::from_rank_0(backend, trainer, &start, collective)?
    };
    optimizer.gather_router_biases(model, collective)?;
    start.check_data(context.spec, data)?;
    Ok(start)
}

/// Closes the communicator and reports the end, after the last step or an error.
fn end(
    context: &Context<'_>,
    backend: &BackendHandle,
    trainer: &Trainer,
    mut collective: Box<dyn Collective>,
    outcome: Result<Outcome>,
) -> Result<ExitCode> {
    let Context { control, spec, .. } = *context;
    // Do this after an error, too: closing the communicator waits for graphs that contain its collectives.
    trainer.stepper.drop_graphs();
    trainer.evaluator.drop_graphs();
    let outcome = outcome?;
    let stopped_early = outcome.stopped_early;
    let finished = finish(spec, backend, trainer, control, &mut *collective, outcome);
    let finished = finished.map_err(|error| control.report_failure(error))?;
    collective.finalize()?;
    control.report(Report::Finished(finished));
    Ok(if stopped_early { ExitCode::Stopped } else { ExitCode::Done })
}

/// Runs a benchmark other than training. Its workers join and report like the ranks of a training job.
fn measure(context: &Context<'_>, kind: &Kind) -> Result<ExitCode> {
    let Context { environment, control, spec, .. } = *context;
    let device = OpenDevice::new(environment, spec, None)?;
    let mut collective = join::join(context, format!("{kind:?}").as_bytes(), &device)?.connect()?;
    phase::enter(Phase::Unspecified);
    control.open_session(context.hello(), collective.abort_handle());
    match kind {
        Kind::AllReduce(bench) => {
            let report = |report| control.report(Report::AllReduce(report));
            bench::all_reduce(bench, &device.backend, &mut *collective, environment.log_fallback, report)?;
        }
        Kind::Device(bench) => {
            drop(device);
            let open = |precision| {
                let mut spec = spec.clone();
                spec.engine.precision = Some(precision);
                OpenDevice::new(environment, &spec, None).map(|device| device.backend)
            };
            control.report(Report::Calibration(bench::device(bench, open)?));
        }
        Kind::Train(_) => {}
    }
    collective.finalize()?;
    control.report(Report::Finished(Finished::default()));
    Ok(ExitCode::Done)
}

/// The model and everything that trains it.
struct Trainer {
    model: Model,
    optimizer: AdamW,
    stepper: Stepper,
    evaluator: Evaluator,
    preferences: Option<Rc<Preferences>>,
    /// Present only on rank 0, if texts are sampled.
    sampler: Option<Sampler>,
}

impl Trainer {
    fn new(
        backend: &BackendHandle,
        spec: &JobSpec,
        shape: &ModelShape,
        layout: Layout,
        division: &Division,
        world: usize,
    ) -> Result<Self> {
        let model = Model::of_layout(backend, shape, layout, division.weights.clone())?;
        let model = model.with_job(spec, world);
        let optimizer = AdamW::zeroed(backend, &model, &division.sharding, spec)?;
        let preferences = Preferences::new(backend, &model, spec)?.map(Rc::new);
        let stepper = Stepper::new(backend, &model, spec, division, world, preferences.clone())?;
        let evaluator = Evaluator::new(backend, &model, spec, division, preferences.clone())?;
        Ok(Self { model, optimizer, stepper, evaluator, preferences, sampler: None })
    }

    /// Returns the model that is compared with, if the job trains on preferences.
    fn reference(&self) -> Option<&Model> {
        self.preferences.as_ref().map(|preferences| &preferences.reference)
    }
}

/// Describes everything that all ranks must agree on: the training data, and parameter offsets, wire element type,
/// buckets and shards. If one of the latter differed, ranks would reduce different gradients together.
fn agreement(
    spec: &JobSpec,
    layout: &Layout,
    activations: DType,
    division: &Division,
    data: &Fingerprint,
) -> Vec<u8> {
    let dtype = train::wire_dtype(spec, activations);
    [
        layout.fingerprint(),
        if layout.is_frozen() { layout.trained().fingerprint() } else { Vec::new() },
        dtype.name().into(),
        division.sharding.layout(),
        division.sharded().into(),
        data.to_string().into_bytes(),
    ]
    .concat()
}

/// Returns what decides which kernels the job needs. Attention is that of the last block.
fn operations(spec: &JobSpec, shape: &ModelShape) -> Operations {
    let mut attention = attention_shape(shape, Rows::new(spec.train.batch, shape.seq), shape.layers - 1);
    attention.options.documents = spec.data.documents() != DocumentMode::Joined;
    Operations {
        attention,
        activation: activation_function(shape),
        gated: shape.gated,
        qk_norm: shape.qk_norm != QkNorm::None,
        sinks: shape.attention_sinks,
        experts: shape.experts > 0,
        muon: spec.train.optimizer == Optimizer::Muon,
        fp8: spec.engine.precision == Some(Precision::Fp8),
        preferences: spec.dpo.is_on(),
    }
}

fn start_loader(
    spec: &JobSpec,
    shape: &ModelShape,
    dataset: &Dataset,
    environment: &Environment,
    first: u64,
) -> Result<Loader> {
    let schedule = Schedule {
        first,
        rank: environment.rank.index(),
        world: environment.world_size.index(),
        batch: spec.train.batch,
        accumulate: spec.train.accumulate,
        seq: shape.seq,
    };
    Loader::start(dataset.train.clone(), schedule)
        .map_err(|source| WorkerError::Io { what: "failed to start the data loader".into(), source })
}

/// Returns the time of a step at the peak rate of the devices, if that rate is known.
fn seconds_at_peak(
    spec: &JobSpec,
    trainer: &Trainer,
    device: &OpenDevice,
    collective: &dyn Collective,
) -> Option<f64> {
    let (shape, tokens) = (&trainer.model.shape, trainer.stepper.tokens_per_step());
    let name = &device.backend.device().name;
    let per_token = flops::per_token_of_job(&spec.lora, shape);
    flops::seconds_at_peak(per_token, tokens, collective.world_size(), name, device.precision)
}

fn train_started(
    spec: &JobSpec,
    trainer: &Trainer,
    division: &Division,
    device: &OpenDevice,
    dataset: &Dataset,
    start: &Start,
) -> TrainStarted {
    let steps = spec.train.steps.saturating_sub(start.step);
    let sequences = trainer.stepper.sequences_per_step().saturating_mul(steps);
    TrainStarted {
        parameters: trainer.model.layout.parameters_of_all() as u64,
        first_step: start.step,
        total_steps: spec.train.steps,
        tokens_per_step: trainer.stepper.tokens_per_step(),
        train_tokens: dataset.train.rows() * trainer.model.shape.seq as u64,
        val_tokens: dataset.val.iter().flat_map(|val| val.rows.sources()).map(|it| it.tokens.len()).sum(),
        device_name: device.backend.device().name.clone(),
        precision: device.precision.name().into(),
        sharded: division.sharded().into(),
        total_tokens: start
            .sequences
            .saturating_add(sequences)
            .saturating_mul(trainer.model.shape.seq as u64),
    }
}

/// Runs the replica check after the last step, and samples a text on rank 0 unless the job is to stop.
fn finish(
    spec: &JobSpec,
    backend: &BackendHandle,
    Trainer { model, optimizer, sampler, .. }: &Trainer,
    control: &Control,
    collective: &mut dyn Collective,
    outcome: Outcome,
) -> Result<Finished> {
    optimizer.gather(model, collective)?;
    let difference = if spec.observe.check_replicas {
        Some(train::max_difference_to_rank_0(
            backend,
            optimizer.sharding(),
            optimizer.replica(model),
            collective,
        )?)
    } else {
        None
    };
    let sample = match sampler.as_ref().filter(|_| !outcome.stopped_early) {
        Some(sampler) => sampler.report(model, control, outcome.steps)?,
        None => None,
    };
    Ok(Finished {
        steps: outcome.steps,
        stopped_early: outcome.stopped_early,
        sample: sample.unwrap_or_default(),
        max_parameter_difference: difference,
        sources: outcome.sources,
    })
}
