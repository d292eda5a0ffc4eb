//! GPU usage by process, from NVML. Empty without NVML.

use std::collections::HashMap;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// The usage of one process, summed over all GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GpuUse {
    /// Utilization; 100 is one full GPU. `None` if no GPU reports it (MIG).
    pub(super) percent: Option<f64>,
    /// Device memory of its CUDA contexts.
    pub(super) memory_bytes: u64,
}

/// The node's GPUs.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    /// Opened on first use, which takes a while if the driver is not loaded yet.
    nvml: Option<Result<Nvml, NvmlError>>,
    /// Timestamp of the newest sample read, by GPU, in NVML's microseconds.
    seen: HashMap<u32, u64>,
}

impl Gpus {
    /// Returns the usage by process id. In a container, NVML may report the host's process ids, which match nothing.
    pub(super) fn by_process(&mut self) -> HashMap<u32, GpuUse> {
        let mut uses = HashMap::new();
        let Ok(nvml) = self.nvml.get_or_insert_with(Nvml::init) else { return uses };
        for index in 0..nvml.device_count().unwrap_or(0) {
            // A GPU that does not respond is left out.
            if let Ok(device) = nvml.device_by_index(index) {
                add(&device, self.seen.entry(index).or_default(), &mut uses);
            }
        }
        uses
    }
}

fn add(device: &Device<'_>, seen: &mut u64, uses: &mut HashMap<u32, GpuUse>) {
    let busy = busy(device, seen);
    for process in device.running_compute_processes().unwrap_or_default() {
        let entry = uses.entry(process.pid).or_default();
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            entry.memory_bytes += bytes;
        }
        if let Some(busy) = &busy {
            *entry.percent.get_or_insert(0.0) += busy.get(&process.pid).copied().unwrap_or(0.0);
        }
    }
}

/// Returns the utilization in percent since the last call, by process; idle processes are missing.
fn busy(device: &Device<'_>, seen: &mut u64) -> Option<HashMap<u32, f64>> {
    let samples = match device.process_utilization_stats(*seen) {
        Ok(samples) => samples,
        // This error means that all processes were idle.
        Err(NvmlError::NotFound) => Vec::new(),
        Err(_) => return None,
    };
    let mut totals: HashMap<u32, (f64, f64)> = HashMap::new();
    for sample in samples.iter().filter(|sample| sample.timestamp > *seen) {
        let (sum, count) = totals.entry(sample.pid).or_default();
        // The driver sometimes reports more than 100.
        *sum += f64::from(sample.sm_util.min(100));
        *count += 1.0;
    }
    *seen = samples.iter().map(|sample| sample.timestamp).fold(*seen, u64::max);
    Some(totals.into_iter().map(|(pid, (sum, count))| (pid, sum / count)).collect())
}
