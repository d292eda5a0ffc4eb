//! The node's GPUs as NVML tells of them every few seconds, by a thread that may wait for the driver.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use tokio::sync::watch;

/// Between looks.
const EVERY: Duration = Duration::from_secs(5);

/// All GPUs at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inventory {
    /// By index.
    pub gpus: Vec<GpuFacts>,
    /// Why there are none, where NVML does not tell.
    pub problem: String,
}

/// One GPU at one time.
#[derive(Clone, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "as in the message")]
pub struct GpuFacts {
    pub index: u32,
    pub uuid: String,
    pub name: String,
    /// What needs an operator.
    pub sick: Option<String>,
    /// Processes that compute on it.
    pub processes: usize,
    pub busy_percent: Option<f64>,
    pub memory_used_bytes: Option<u64>,
    pub memory_bytes: Option<u64>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
}

impl GpuFacts {
    /// Whether it is one of these, by UUID or index.
    pub(super) fn is_among(&self, named: &[String]) -> bool {
        named.iter().any(|named| *named == self.uuid || *named == self.index.to_string())
    }
}

/// The thread that looks. It ends when this is dropped.
#[derive(Debug)]
pub struct Look {
    asks: SyncSender<()>,
}

impl Look {
    /// Looks once, then goes on. Whoever receives sees the newest.
    pub fn start() -> std::io::Result<(Self, watch::Receiver<Inventory>)> {
        let (asks, asked) = sync_channel::<()>(1);
        let (sender, receiver) = watch::channel(inventory());
        let run = move || {
            while asked.recv_timeout(EVERY) != Err(RecvTimeoutError::Disconnected) {
                let now = inventory();
                sender.send_if_modified(|last| std::mem::replace(last, now.clone()) != now);
            }
        };
        std::thread::Builder::new().name("gpus".into()).spawn(run)?;
        Ok((Self { asks }, receiver))
    }

    /// Has it look now: somebody has left a GPU.
    pub fn again(&self) {
        // Where that is asked for already, or no thread is left to look, there is nothing more to do.
        let _ = self.asks.try_send(());
    }
}

/// A driver may be loaded, or go, while the daemon runs: NVML is opened for each look.
fn inventory() -> Inventory {
    let looked = || {
        let nvml = Nvml::init()?;
        let gpus = (0..nvml.device_count()?).map(|index| facts(&nvml, index)).collect();
        Ok::<_, NvmlError>(gpus)
    };
    match looked() {
        Ok(gpus) => Inventory { gpus, problem: String::new() },
        // A node without a driver has no GPUs, and nothing is wrong with that.
        Err(NvmlError::LibloadingError(_)) if !Path::new("/dev/nvidiactl").exists() => Inventory::default(),
        Err(error) => Inventory { gpus: Vec::new(), problem: format!("NVML: {error}") },
    }
}

fn facts(nvml: &Nvml, index: u32) -> GpuFacts {
    let lost = |error: NvmlError| GpuFacts {
        index,
        // It has held jobs by its UUID: no job is placed on a GPU without.
        sick: Some(format!("the driver does not answer for it: {error}")),
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
    GpuFacts {
        index,
        uuid,
        name: device.name().unwrap_or_default(),
        sick: (errors > 0).then(|| format!("{errors} uncorrected memory errors since the driver was loaded")),
        processes: device.running_compute_processes().map_or(0, |processes| processes.len()),
        busy_percent: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu)),
        memory_used_bytes: memory.as_ref().map(|memory| memory.used),
        memory_bytes: memory.as_ref().map(|memory| memory.total),
        power_watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
    }
}
