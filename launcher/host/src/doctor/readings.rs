//! Reads the state of the node's GPUs through NVML, on a thread of its own because a driver call can hang.

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use super::GpuName;
use crate::devices::nvml_problem;

/// Upper bound on the NVLinks of a GPU.
const MAX_NVLINKS: u32 = 32;
/// Reasons for lowered clocks that need an operator's attention. The others are normal, such as an idle GPU or the
/// power limit under load.
const SLOWDOWNS: [(ThrottleReasons, &str); 4] = [
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat (hardware)"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake of the system"),
    (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
];

/// State of the driver and of all GPUs at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeReadings {
    /// The reason why NVML cannot be used. A node without a driver has no GPUs, which is not a problem.
    pub problem: Option<String>,
    pub driver: Option<String>,
    /// The newest CUDA version that the driver supports.
    pub cuda: Option<String>,
    /// All GPUs, in order of their index.
    pub gpus: Vec<GpuReadings>,
}

/// State of one GPU. Values that the GPU or the driver does not support are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuReadings {
    pub name: GpuName,
    pub model: String,
    /// The reason why the driver cannot read the GPU; all other values are unknown then.
    pub lost: Option<String>,
    /// PCI domain, bus and device, as written in the kernel log.
    pub bus: Option<String>,
    /// Uncorrected ECC errors since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    pub has_pending_pages: Option<bool>,
    /// Abnormal reasons for lowered clocks.
    pub slowdowns: Vec<&'static str>,
    pub pcie: Option<PcieLink>,
    pub nvlinks: Option<NvLinks>,
    /// Process ids of compute processes.
    pub processes: Vec<u32>,
}

/// Current and maximum number of lanes of the PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieLink {
    pub width: u32,
    pub most: u32,
}

/// State of the NVLinks, for a GPU that has any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvLinks {
    /// Number of links that are up.
    pub up: u32,
}

impl GpuReadings {
    /// Describes a GPU without problems in one line.
    pub(super) fn summary(&self) -> String {
        if self.model.is_empty() { "healthy".into() } else { self.model.clone() }
    }
}

/// Reads all GPUs. If that takes longer than `timeout`, the thread is abandoned and NVML is reported as hanging.
pub fn read(timeout: Duration) -> NodeReadings {
    let broken = |problem: String| NodeReadings { problem: Some(problem), ..NodeReadings::default() };
    let (sender, receiver) = sync_channel(1);
    let run = move || {
        // The receiver is gone after a timeout.
        let _ = sender.send(read_all());
    };
    if let Err(error) = std::thread::Builder::new().name("doctor".into()).spawn(run) {
        return broken(format!("failed to start a thread: {error}"));
    }
    let late = || broken(format!("NVML did not answer within {} ms", timeout.as_millis()));
    receiver.recv_timeout(timeout).unwrap_or_else(|_| late())
}

fn read_all() -> NodeReadings {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        // A node without a driver has no GPUs, which is not an error.
        Err(NvmlError::LibloadingError(_)) if !Path::new("/dev/nvidiactl").exists() => {
            return NodeReadings::default();
        }
        Err(error) => return NodeReadings { problem: Some(nvml_problem(&error)), ..NodeReadings::default() },
    };
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => return NodeReadings { problem: Some(nvml_problem(&error)), ..NodeReadings::default() },
    };
    let version = |cuda| format!("{}.{}", cuda_driver_version_major(cuda), cuda_driver_version_minor(cuda));
    NodeReadings {
        problem: None,
        driver: nvml.sys_driver_version().ok(),
        cuda: nvml.sys_cuda_driver_version().ok().map(version),
        gpus: (0..count).map(|index| read_gpu(&nvml, index)).collect(),
    }
}

fn read_gpu(nvml: &Nvml, index: u32) -> GpuReadings {
    let known = nvml.device_by_index(index).and_then(|device| Ok((device.uuid()?, device)));
    let (uuid, device) = match known {
        Ok(known) => known,
        Err(error) => {
            let name = GpuName { index, uuid: String::new() };
            return GpuReadings { name, lost: Some(error.to_string()), ..GpuReadings::default() };
        }
    };
    let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::NONE);
    GpuReadings {
        name: GpuName { index, uuid },
        model: device.name().unwrap_or_default(),
        lost: None,
        bus: device.pci_info().ok().and_then(|pci| bus(&pci.bus_id)),
        uncorrected_errors: device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        has_pending_pages: device.are_pages_pending_retired().ok(),
        slowdowns: slowdowns(reasons),
        pcie: pcie(&device),
        nvlinks: nvlinks(&device),
        processes: device.running_compute_processes().unwrap_or_default().iter().map(|it| it.pid).collect(),
    }
}

/// Converts NVML's `00000000:3B:00.0` to the kernel's form `0000:3b:00`.
fn bus(id: &str) -> Option<String> {
    let (domain, rest) = id.split_once(':')?;
    let device = rest.split('.').next()?;
    let domain = domain.get(domain.len().checked_sub(4)?..)?;
    Some(format!("{domain}:{device}").to_lowercase())
}

fn slowdowns(reasons: ThrottleReasons) -> Vec<&'static str> {
    let all = SLOWDOWNS.iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, name)| *name);
    let mut all: Vec<_> = all.collect();
    if all.len() > 1 {
        // The driver sets the general reason in addition to the specific ones.
        all.retain(|name| *name != "hardware slowdown");
    }
    all
}

fn pcie(device: &Device<'_>) -> Option<PcieLink> {
    let (width, most) = (device.current_pcie_link_width().ok()?, device.max_pcie_link_width().ok()?);
    Some(PcieLink { width, most })
}

fn nvlinks(device: &Device<'_>) -> Option<NvLinks> {
    let states = (0..MAX_NVLINKS).map_while(|link| device.link_wrapper_for(link).is_active().ok());
    let states: Vec<bool> = states.collect();
    let up = u32::try_from(states.iter().filter(|up| **up).count()).ok()?;
    (!states.is_empty()).then_some(NvLinks { up })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_is_spelled_as_in_the_kernel_log() {
        assert_eq!(bus("00000000:3B:00.0").as_deref(), Some("0000:3b:00"));
        assert_eq!(bus("0001:AF:1F.0").as_deref(), Some("0001:af:1f"));
        assert_eq!((bus(""), bus("0:3b:00.0"), bus("é0:3b")), (None, None, None));
    }

    #[test]
    fn specific_slowdowns_replace_the_general_one_and_normal_reasons_do_not_count() {
        let thermal = ThrottleReasons::HW_THERMAL_SLOWDOWN | ThrottleReasons::HW_SLOWDOWN;
        assert_eq!(slowdowns(thermal), ["heat (hardware)"]);
        assert_eq!(slowdowns(ThrottleReasons::HW_SLOWDOWN), ["hardware slowdown"]);
        assert!(slowdowns(ThrottleReasons::GPU_IDLE | ThrottleReasons::SW_POWER_CAP).is_empty());
    }

    #[test]
    fn reading_ends_at_the_timeout() {
        let start = std::time::Instant::now();
        read(Duration::from_millis(200));
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}
