//! The memory of GPUs after their processes have ended: the driver gives it back some time later, and a worker started
//! before would find less than it needs.

use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Pause between looks.
const PAUSE: Duration = Duration::from_millis(50);

/// Waits until no GPU lists any of these processes, which have ended. At once where there is no NVML, and where its numbers
/// are not ours, as in containers. False after `patience`.
pub async fn released(pids: &[u32], patience: Duration) -> bool {
    let pids = pids.to_vec();
    // NVML blocks for milliseconds. A look that fails finds nobody.
    tokio::task::spawn_blocking(move || wait(&pids, patience)).await.unwrap_or(true)
}

fn wait(pids: &[u32], patience: Duration) -> bool {
    let Ok(nvml) = Nvml::init() else { return true };
    let deadline = Instant::now() + patience;
    while holders(&nvml).is_ok_and(|holders| holders.iter().any(|holder| pids.contains(holder))) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// Processes that have memory on any GPU.
fn holders(nvml: &Nvml) -> Result<Vec<u32>, NvmlError> {
    let mut holders = Vec::new();
    for index in 0..nvml.device_count()? {
        let processes = nvml.device_by_index(index)?.running_compute_processes()?;
        holders.extend(processes.into_iter().map(|process| process.pid));
    }
    Ok(holders)
}
