//! Opens the device that the environment names, with the pool and precision of the job.

use std::sync::mpsc::{Sender, channel};

use xlaunch_engine::{self as engine, Backend, CudaOptions, DType, Work};
use xlaunch_spec::job::{Exec, JobSpec, PoolMode, Precision};

use crate::environment::{Device, Environment};
use crate::error::{Result, WorkerError};
use crate::model::{BackendHandle, engine_precision};
use crate::nccl_windows;

/// Maximum number of events of the first step that a pool trace keeps.
const MAX_POOL_TRACE_EVENTS: usize = 1 << 20;

/// Loads a GPU's libraries and initialises its driver on a separate thread. That takes about as long as getting the job
/// and opening the data. A missing library is reported when it is used.
pub(super) struct Libraries(Option<Sender<()>>);

impl Libraries {
    /// Loads the libraries without calling them: the previous attempt may still be using the GPUs.
    pub(super) fn load(environment: &Environment) -> Self {
        if environment.device == Device::Cpu {
            return Self(None);
        }
        let (sender, begun) = channel();
        // If the thread cannot be started, libraries are loaded at first use.
        let thread = std::thread::Builder::new().name("libraries".into()).spawn(move || {
            engine::cuda::load_libraries();
            xlaunch_comm::load_library();
            if begun.recv().is_ok() {
                engine::cuda::initialise_driver();
            }
        });
        Self(thread.is_ok().then_some(sender))
    }

    /// Initialises the driver; the attempt has begun.
    pub(super) fn use_gpu(self) {
        // The thread waits for this message.
        let _ = self.0.map(|sender| sender.send(()));
    }
}

/// Returns the element type of activations on the device that will be opened.
pub(crate) fn activation_dtype(spec: &JobSpec, cuda: bool) -> DType {
    match (cuda, spec.engine.precision.unwrap_or(Precision::Bf16)) {
        (true, precision) if precision.has_bf16_activations() => DType::Bf16,
        _ => DType::F32,
    }
}

/// Returns the mode of the pool of the device that will be opened.
pub(crate) fn pool_mode(spec: &JobSpec, cuda: bool) -> engine::PoolMode {
    match spec.engine.pool {
        // A captured graph contains addresses, and only a plan gives every step the same addresses.
        PoolMode::On if cuda && spec.engine.exec == Exec::Graph => engine::PoolMode::Plan,
        PoolMode::On => engine::PoolMode::On,
        PoolMode::Plan => engine::PoolMode::Plan,
        PoolMode::Off => engine::PoolMode::Off,
    }
}

/// An open device.
pub(super) struct OpenDevice {
    pub(super) backend: BackendHandle,
    pub(super) precision: Precision,
}

impl OpenDevice {
    pub(super) fn new(environment: &Environment, spec: &JobSpec, work: Option<Work>) -> Result<Self> {
        let mode = pool_mode(spec, environment.device != Device::Cpu);
        let limit = spec.engine.memory_limit_mb.map_or(u64::MAX, |mib| mib.saturating_mul(1 << 20));
        let trace = if environment.pool_trace.is_some() { MAX_POOL_TRACE_EVENTS } else { 0 };
        let pool = engine::PoolOptions { mode, limit, debug: environment.pool_debug, trace };
        Ok(match environment.device {
            Device::Cpu => Self {
                backend: BackendHandle::new(Backend::cpu(environment.threads, pool)),
                precision: Precision::Fp32,
            },
            Device::Cuda(ordinal) => {
                let precision = spec.engine.precision.unwrap_or(Precision::Bf16);
                let options = CudaOptions {
                    precision: engine_precision(precision),
                    deterministic: spec.engine.deterministic,
                    pool,
                    log_fallback: environment.log_fallback,
                    warnings: environment.rank.index() == 0,
                };
                let backend = Backend::cuda(ordinal, options)?;
                work.into_iter().for_each(|work| backend.prepare(work));
                let experts = matches!(work, Some(Work::Training(operations)) if operations.experts);
                let missing = if !backend.supports_fp8() {
                    Some("8.9 or newer")
                } else if experts && !backend.supports_fp8_experts() {
                    Some("9.0 for experts")
                } else {
                    None
                };
                if let Some(needed) = missing.filter(|_| precision == Precision::Fp8) {
                    return Err(WorkerError::NoFp8 { needed, device: backend.device().name.clone() });
                }
                // Windows need memory that all ranks can access, which is impossible across nodes.
                let one_node = environment.advertised_address.is_none();
                let windows = one_node && nccl_windows::wanted(spec, environment.world_size.index());
                Self { backend: BackendHandle::new(backend).with_windows(windows), precision }
            }
        })
    }
}
