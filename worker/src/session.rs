//! The life of one rank: device, pool, communicator, model, loop, and teardown in reverse.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::CudaStream;
use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_comm::{Collective, Local, Nccl, Ring, RingListener, Sharding};
use xlaunch_engine::cpu::CpuBackend;
use xlaunch_engine::cuda::{CudaBackend, CudaOptions};
use xlaunch_engine::{self as engine, Backend, DType};
use xlaunch_proto::VERSION;
use xlaunch_proto::convert::{Join, Joined};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::ids::{Digest, NcclId};
use xlaunch_proto::model::ModelShape;
use xlaunch_proto::spec::{Exec, JobSpec, PoolMode, Precision, Tokenizer};
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Finished, GetJobReply, GetJobRequest, Hello, TrainBench, TrainStarted};

use crate::bench::{self, SkipAllReduce};
use crate::checkpoint::{self, Arenas};
use crate::control::Control;
use crate::data::{Dataset, Loader, Order, Schedule};
use crate::environment::{Device, Environment};
use crate::error::{Result, WorkerError};
use crate::model::layout::Layout;
use crate::model::{BackendHandle, Model, init};
use crate::optim::AdamW;
use crate::train::{self, Evaluator, Outcome, Run, Stepper, Tracer};
use crate::windows;

/// Time for ring neighbours to connect once all ranks have joined.
const CONNECT: Duration = Duration::from_secs(30);

/// Most events of the first step that a trace of the pool keeps.
const POOL_EVENTS: usize = 1 << 20;

/// Does what the agent says: trains, or measures.
pub fn run(environment: &Environment) -> Result<ExitCode> {
    let control = Control::connect(&environment.agent_socket)?;
    let job = control.get_job(GetJobRequest {
        rank: environment.rank.0,
        attempt: environment.attempt.0,
        version: VERSION.into(),
    })?;
    let spec = JobSpec::from_json(&job.spec_json)?;
    match job.bench.clone().and_then(|bench| bench.kind) {
        None => train(environment, &control, &spec, &job, None),
        Some(Kind::Train(bench)) => train(environment, &control, &spec, &job, Some(bench)),
        Some(kind) => measure(environment, &control, &spec, &job, &kind),
    }
}

fn train(
    environment: &Environment,
    control: &Control,
    spec: &JobSpec,
    job: &GetJobReply,
    bench: Option<TrainBench>,
) -> Result<ExitCode> {
    let shape = spec.model.resolve().map_err(xlaunch_proto::spec::SpecError::from)?;
    let dataset = Dataset::open(spec, &shape)?;

    // A second or more for large models, as devices and communicators take: both at the same time.
    let start = Start::read_beside(spec, &shape, Path::new(&job.resume_from), environment.threads)?;
    let device = Opened::new(environment, spec)?;
    let run_dir = PathBuf::from(&job.run_dir);
    device.backend.pool().snapshot_on_failure(&run_dir);
    let (rank, world) = (environment.rank.index(), environment.world_size.index());
    let layout = Layout::new(&shape);
    let activations = device.backend.activation_dtype();
    let sharding = train::sharding(spec, &layout, activations, rank, world)?;
    let agreed = agreed(spec, &layout, activations, &sharding);
    let collective = meet(environment, control, spec, &agreed, &device, &run_dir)?;
    let hello = Hello { rank: environment.rank.0, attempt: environment.attempt.0 };
    control.open_session(hello, collective.abort_handle());

    let start = start.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let model = Model::new(&device.backend, &shape, &start.params)?;
    let optimizer = AdamW::new(&device.backend, &model, &start.params, &sharding, &spec.train)?;
    if let Some((m, v)) = &start.moments {
        optimizer.set_moments(m, v)?;
    }
    let stepper = Stepper::new(&device.backend, &model, spec, &sharding, world)?;
    let evaluator = Evaluator::new(&device.backend, &model, spec)?;
    // From here on it is the first to be dropped: before what it works on.
    let mut collective: Box<dyn Collective> = match bench {
        Some(bench) if bench.skip_all_reduce => Box::new(SkipAllReduce(collective)),
        _ => collective,
    };
    let shared = stepper.summed().chain(optimizer.gathered(&model).into_iter().flatten());
    windows::register(&device.backend, shared, &mut *collective, environment.log_fallback)?;

    let loader = start_loader(spec, &shape, &dataset, environment, start.sequences)?;
    if environment.rank.0 == 0 {
        control.report(Report::TrainStarted(started(spec, &model, &device, &dataset, &stepper, &start)));
    }
    let checkpoint_dir =
        spec.checkpoint.dir.as_ref().map_or_else(|| run_dir.join("checkpoints"), PathBuf::from);
    let outcome = Run {
        spec,
        backend: &device.backend,
        model: &model,
        optimizer: &optimizer,
        stepper: &stepper,
        evaluator: &evaluator,
        collective: &mut *collective,
        dataset: &dataset,
        loader: &loader,
        control,
        checkpoint_dir,
        first_step: start.step,
        first_sequence: start.sequences,
        pool_trace: environment.pool_trace.as_deref(),
        profile: bench.map_or(environment.profile, |bench| bench.profile_step),
        bench: bench.is_some(),
        tracer: Tracer::new(spec.observe.trace, start.step..spec.train.steps, &run_dir, rank),
    }
    .run();
    // Whatever the outcome: the communicator's end waits for graphs that hold its sums.
    stepper.forget_captures();
    evaluator.forget_captures();
    let outcome = outcome?;
    let finished = finish(spec, &device.backend, &model, &optimizer, &mut *collective, outcome, &dataset)?;
    collective.finalize()?;
    control.report(Report::Finished(finished));
    Ok(if outcome.stopped_early { ExitCode::Stopped } else { ExitCode::Done })
}

/// What workers of a bench other than training do: they meet and report as ranks of a job do.
fn measure(
    environment: &Environment,
    control: &Control,
    spec: &JobSpec,
    job: &GetJobReply,
    kind: &Kind,
) -> Result<ExitCode> {
    let device = Opened::new(environment, spec)?;
    let layout = format!("{kind:?}").into_bytes();
    let mut collective = meet(environment, control, spec, &layout, &device, Path::new(&job.run_dir))?;
    let hello = Hello { rank: environment.rank.0, attempt: environment.attempt.0 };
    control.open_session(hello, collective.abort_handle());
    match kind {
        Kind::AllReduce(sums) => {
            bench::all_reduce(sums, &device.backend, &mut *collective, environment.log_fallback, |sum| {
                control.report(Report::AllReduce(sum));
            })?;
        }
        Kind::Device(question) => {
            drop(device);
            let open = |precision| {
                let mut spec = spec.clone();
                spec.engine.precision = Some(precision);
                Opened::new(environment, &spec).map(|device| device.backend)
            };
            control.report(Report::Calibration(bench::device(question, open)?));
        }
        Kind::Train(_) => {}
    }
    collective.finalize()?;
    control.report(Report::Finished(Finished::default()));
    Ok(ExitCode::Done)
}

/// The back end, and its compute stream where it is a GPU's.
struct Opened {
    backend: BackendHandle,
    stream: Option<Arc<CudaStream>>,
    precision: Precision,
}

impl Opened {
    fn new(environment: &Environment, spec: &JobSpec) -> Result<Self> {
        let graphs = spec.engine.exec == Exec::Graph && environment.device != Device::Cpu;
        let mode = match spec.engine.pool {
            // Graphs hold addresses, which only a plan repeats.
            PoolMode::On if graphs => engine::PoolMode::Plan,
            PoolMode::On => engine::PoolMode::On,
            PoolMode::Plan => engine::PoolMode::Plan,
            PoolMode::Off => engine::PoolMode::Off,
        };
        let limit = spec.engine.memory_limit_mb.map_or(u64::MAX, |mib| mib.saturating_mul(1 << 20));
        let trace = if environment.pool_trace.is_some() { POOL_EVENTS } else { 0 };
        let pool = engine::PoolOptions { mode, limit, debug: environment.pool_debug, trace };
        Ok(match environment.device {
            Device::Cpu => Self {
                backend: BackendHandle::new(CpuBackend::new(environment.threads, pool)),
                stream: None,
                precision: Precision::Fp32,
            },
            Device::Cuda(ordinal) => {
                let precision = spec.engine.precision.unwrap_or(Precision::Bf16);
                let options = CudaOptions {
                    precision: match precision {
                        Precision::Fp32 => engine::Precision::Fp32,
                        Precision::Tf32 => engine::Precision::Tf32,
                        Precision::Bf16 => engine::Precision::Bf16,
                    },
                    deterministic: spec.engine.deterministic,
                    pool,
                    log_fallback: environment.log_fallback,
                };
                let backend = CudaBackend::open(ordinal, options)?;
                let stream = backend.cuda_stream();
                let windows = windows::wanted(spec, environment.world_size.index());
                Self { backend: BackendHandle::new(backend).with_windows(windows), stream, precision }
            }
        })
    }
}

/// Where training starts from.
struct Start {
    params: Vec<f32>,
    moments: Option<(Vec<f32>, Vec<f32>)>,
    step: u64,
    sequences: u64,
}

impl Start {
    /// Reads on threads of its own.
    fn read_beside(
        spec: &JobSpec,
        shape: &ModelShape,
        resume_from: &Path,
        threads: usize,
    ) -> Result<JoinHandle<Result<Self>>> {
        let failed = |source| WorkerError::Io { what: "failed to start a thread".into(), source };
        let (spec, shape, resume_from) = (spec.clone(), shape.clone(), resume_from.to_path_buf());
        let threads = ThreadPoolBuilder::new().num_threads(threads).build();
        let threads = threads.map_err(|error| failed(io::Error::other(error)))?;
        std::thread::Builder::new()
            .name("weights".into())
            .spawn(move || Self::read(&spec, &shape, &resume_from, &threads))
            .map_err(failed)
    }

    /// A checkpoint, given weights, or random ones.
    fn read(spec: &JobSpec, shape: &ModelShape, resume_from: &Path, threads: &ThreadPool) -> Result<Self> {
        let layout = Layout::new(shape);
        if !resume_from.as_os_str().is_empty() {
            let Arenas { params, m, v, state } = checkpoint::load(resume_from, shape, &layout, threads)?;
            return Ok(Self { params, moments: Some((m, v)), step: state.step, sequences: state.sequences });
        }
        let params = match &spec.checkpoint.init {
            Some(path) => checkpoint::load_weights(Path::new(path), &layout, threads)?,
            None => init::weights(&layout, spec.job.seed, threads),
        };
        Ok(Self { params, moments: None, step: 0, sequences: 0 })
    }
}

/// What all ranks must agree on to sum gradients.
fn agreed(spec: &JobSpec, layout: &Layout, activations: DType, sharding: &Sharding) -> Vec<u8> {
    let dtype = train::wire_dtype(spec, activations);
    [layout.fingerprint(), dtype.name().into(), sharding.layout()].concat()
}

/// The rendezvous: joins with what this rank brings, and opens the collective among all.
fn meet(
    environment: &Environment,
    control: &Control,
    spec: &JobSpec,
    layout: &[u8],
    device: &Opened,
    run_dir: &Path,
) -> Result<Box<dyn Collective>> {
    let world = environment.world_size.index();
    let alone = world == 1;
    let listener = match device.stream {
        None if !alone => Some(RingListener::bind(run_dir, environment.rank.index())?),
        _ => None,
    };
    let nccl_id = match device.stream {
        Some(_) if !alone && environment.rank.0 == 0 => Some(NcclId(xlaunch_comm::unique_id()?)),
        _ => None,
    };
    let Joined { world_size, nccl_id, ring_addresses, .. } = control.join(Join {
        rank: environment.rank,
        attempt: environment.attempt,
        version: VERSION.into(),
        config_hash: spec.digest(),
        layout_hash: Digest::of(layout),
        device_uuid: device.backend.device().uuid.clone(),
        nccl_id,
        ring_address: listener.as_ref().map(|listener| listener.address().to_string()).unwrap_or_default(),
        pid: std::process::id(),
    })?;
    if world_size != environment.world_size {
        let message = format!("the agent speaks of {world_size} ranks, the environment of {world}");
        return Err(WorkerError::Rendezvous(message));
    }
    let rank = environment.rank.index();
    Ok(match (&device.stream, listener) {
        (_, None) if alone => Box::new(Local),
        (Some(stream), _) => {
            let id = nccl_id.ok_or_else(|| WorkerError::Rendezvous("rank 0 brought no NCCL id".into()))?;
            Box::new(Nccl::new(stream.clone(), rank, world, id.0)?)
        }
        (None, Some(listener)) => Box::new(Ring::connect(listener, rank, &ring_addresses, CONNECT)?),
        (None, None) => Box::new(Local),
    })
}

fn start_loader(
    spec: &JobSpec,
    shape: &ModelShape,
    dataset: &Dataset,
    environment: &Environment,
    first: u64,
) -> Result<Loader> {
    let order = Order::new(dataset.train.len(), shape.seq, spec.data.shuffle.then_some(spec.job.seed));
    let schedule = Schedule {
        first,
        rank: environment.rank.index(),
        world: environment.world_size.index(),
        batch: spec.train.batch,
        seq: shape.seq,
    };
    Loader::start(dataset.train.clone(), order, schedule)
        .map_err(|source| WorkerError::Io { what: "failed to start the loader".into(), source })
}

fn started(
    spec: &JobSpec,
    model: &Model,
    device: &Opened,
    dataset: &Dataset,
    stepper: &Stepper,
    start: &Start,
) -> TrainStarted {
    let precision = match device.precision {
        Precision::Fp32 => "fp32",
        Precision::Tf32 => "tf32",
        Precision::Bf16 => "bf16",
    };
    TrainStarted {
        parameters: model.layout.parameters() as u64,
        first_step: start.step,
        total_steps: spec.train.steps,
        tokens_per_step: stepper.tokens_per_step(),
        train_tokens: dataset.train.len(),
        val_tokens: dataset.val.as_ref().map_or(0, |val| val.len()),
        device_name: device.backend.device().name.clone(),
        precision: precision.into(),
    }
}

/// What follows the last step: the replica check, and text from rank 0.
fn finish(
    spec: &JobSpec,
    backend: &BackendHandle,
    model: &Model,
    optimizer: &AdamW,
    collective: &mut dyn Collective,
    outcome: Outcome,
    dataset: &Dataset,
) -> Result<Finished> {
    optimizer.gather(model, collective)?;
    let difference = match spec.observe.check_replicas {
        true => Some(train::largest_difference(backend, optimizer.replica(model), collective)?),
        false => None,
    };
    let bytes = spec.data.tokenizer == Tokenizer::Bytes && spec.train.sample > 0;
    let sample = if collective.rank() == 0 && bytes && !outcome.stopped_early {
        let prompt = prompt(dataset, model.shape.seq / 4)?;
        train::sample(backend, model, &prompt, spec.train.sample, spec.job.seed)?
    } else {
        String::new()
    };
    Ok(Finished {
        steps: outcome.steps,
        stopped_early: outcome.stopped_early,
        sample,
        max_parameter_difference: difference,
    })
}

/// The first line of the held-out text that has some length, at most `longest` bytes.
fn prompt(dataset: &Dataset, longest: usize) -> Result<Vec<u8>> {
    let tokens = dataset.val.as_ref().unwrap_or(&dataset.train);
    let mut ids = Vec::new();
    tokens.read(0, usize::try_from(tokens.len().min(4096)).unwrap_or(4096), &mut ids)?;
    let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
    // The first line of the part is cut somewhere in its middle.
    let line = bytes.split(|byte| *byte == b'\n').skip(1).find(|line| line.trim_ascii().len() >= 12);
    let mut prompt = line.unwrap_or(b"\n").to_vec();
    prompt.truncate(longest.max(1));
    Ok(prompt)
}
