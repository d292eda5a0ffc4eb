//! Polls the node's GPUs through NVML, on a thread of its own because a driver call can block for seconds.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use tokio::sync::watch;
use xlaunch_host::devices::nvml_problem;
use xlaunch_proto::v1::Gpu;

const GPU_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// State of all GPUs at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Inventory {
    /// The GPUs in order of their index.
    pub(crate) gpus: Vec<GpuFacts>,
    /// The reason why NVML failed; empty if it did not.
    pub(crate) problem: String,
}

/// State of one GPU at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GpuFacts {
    /// The message about the GPU, without its jobs. Measurements that the GPU does not support are `None`.
    pub(crate) status: Gpu,
    /// Minor number of the device node, `/dev/nvidia<minor>`.
    pub(crate) minor: Option<u32>,
    /// A fault that needs an operator's attention.
    pub(crate) sick: Option<String>,
    /// Number of compute processes on the GPU.
    pub(crate) processes: usize,
}

impl GpuFacts {
    /// Returns whether the GPU is in this list of UUIDs and indices.
    pub(super) fn is_among(&self, named: &[String]) -> bool {
        let Gpu { index, uuid, .. } = &self.status;
        named.iter().any(|named| named == uuid || *named == index.to_string())
    }
}

/// Handle of the polling thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct GpuMonitor {
    poll_now: SyncSender<()>,
}

impl GpuMonitor {
    /// Polls once, then starts the thread. The receiver is notified of every change.
    pub(crate) fn start() -> std::io::Result<(Self, watch::Receiver<Inventory>)> {
        let (poll_now, requests) = sync_channel::<()>(1);
        let (sender, receiver) = watch::channel(poll());
        let run = move || {
            while requests.recv_timeout(GPU_POLL_INTERVAL) != Err(RecvTimeoutError::Disconnected) {
                let now = poll();
                sender.send_if_modified(|last| std::mem::replace(last, now.clone()) != now);
            }
        };
        std::thread::Builder::new().name("gpus".into()).spawn(run)?;
        Ok((Self { poll_now }, receiver))
    }

    /// Polls the GPUs without starting a thread.
    pub(crate) fn poll_once() -> Inventory {
        poll()
    }

    /// Makes the thread poll immediately instead of at the end of the interval.
    pub(crate) fn poll_now(&self) {
        // A full channel means that a poll has already been requested.
        let _ = self.poll_now.try_send(());
    }
}

/// Polls the GPUs. Opens NVML each time, because the driver may be loaded or unloaded while the daemon runs.
fn poll() -> Inventory {
    let polled = || {
        let nvml = Nvml::init()?;
        let gpus = (0..nvml.device_count()?).map(|index| facts(&nvml, index)).collect();
        Ok::<_, NvmlError>(gpus)
    };
    match polled() {
        Ok(gpus) => Inventory { gpus, problem: String::new() },
        // A node without a driver has no GPUs, which is not an error.
        Err(NvmlError::LibloadingError(_)) if !Path::new("/dev/nvidiactl").exists() => Inventory::default(),
        Err(error) => Inventory { gpus: Vec::new(), problem: nvml_problem(&error) },
    }
}

fn facts(nvml: &Nvml, index: u32) -> GpuFacts {
    let lost = |error: NvmlError| GpuFacts {
        // The UUID is unknown. No job holds a GPU without UUID, and as a sick GPU it gets no new one.
        status: Gpu { index, ..Gpu::default() },
        sick: Some(format!("the driver cannot read it: {error}")),
        ..GpuFacts::default()
    };
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(error) => return lost(error),
    };
    let uuid = match device.uuid() {
        Ok(uuid) => uuid,
        Err(error) => return lost(error),
    };
    let errors = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).unwrap_or(0);
    let memory = device.memory_info().ok();
    let status = Gpu {
        index,
        uuid,
        name: device.name().unwrap_or_default(),
        busy_percent: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu)),
        memory_used_bytes: memory.as_ref().map(|memory| memory.used),
        memory_bytes: memory.as_ref().map(|memory| memory.total),
        power_watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
        ..Gpu::default()
    };
    GpuFacts {
        status,
        minor: device.minor_number().ok(),
        sick: (errors > 0).then(|| format!("{errors} uncorrected ECC errors since the driver was loaded")),
        processes: device.running_compute_processes().map_or(0, |processes| processes.len()),
    }
}
