//! What processes use of the GPUs, as NVML tells it; nothing where there is no NVML.

use std::collections::HashMap;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// What one process uses, over all GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GpuUse {
    /// 100 is one GPU in full; `None` where no GPU keeps such a count (MIG).
    pub(super) percent: Option<f64>,
    /// Of its contexts.
    pub(super) memory_bytes: u64,
}

/// The node's GPUs.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    /// Opened at the first question, which takes a while where no driver is loaded yet.
    nvml: Option<Result<Nvml, NvmlError>>,
    /// By GPU: time of the newest sample that was seen, in NVML's microseconds.
    seen: HashMap<u32, u64>,
}

impl Gpus {
    /// By process id, as far as the driver and this process count them alike: in a container they may not.
    pub(super) fn by_process(&mut self) -> HashMap<u32, GpuUse> {
        let mut uses = HashMap::new();
        let Ok(nvml) = self.nvml.get_or_insert_with(Nvml::init) else { return uses };
        for index in 0..nvml.device_count().unwrap_or(0) {
            // A GPU that does not answer is left out.
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

/// Use of the GPU in percent since the last question, by process; those that did nothing are not in it.
fn busy(device: &Device<'_>, seen: &mut u64) -> Option<HashMap<u32, f64>> {
    let samples = match device.process_utilization_stats(*seen) {
        Ok(samples) => samples,
        // No process has done anything.
        Err(NvmlError::NotFound) => Vec::new(),
        Err(_) => return None,
    };
    let mut sums: HashMap<u32, (f64, f64)> = HashMap::new();
    for sample in samples.iter().filter(|sample| sample.timestamp > *seen) {
        let (sum, count) = sums.entry(sample.pid).or_default();
        // Values above 100 are noise of the driver.
        *sum += f64::from(sample.sm_util.min(100));
        *count += 1.0;
    }
    *seen = samples.iter().map(|sample| sample.timestamp).fold(*seen, u64::max);
    Some(sums.into_iter().map(|(pid, (sum, count))| (pid, sum / count)).collect())
}
