//! Waits for the GPU driver to release the memory of exited processes. This takes a while, and a worker that starts too
//! early may run out of memory.

use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Waits until no GPU lists any of these exited processes. Returns false after `timeout`. Returns immediately without
/// NVML, and in a container, where NVML reports the process ids of the host.
pub async fn released(pids: &[u32], timeout: Duration) -> bool {
    let pids = pids.to_vec();
    // NVML blocks for milliseconds. If it fails, the memory counts as released.
    tokio::task::spawn_blocking(move || wait(&pids, timeout)).await.unwrap_or(true)
}

fn wait(pids: &[u32], timeout: Duration) -> bool {
    let Ok(nvml) = Nvml::init() else { return true };
    let deadline = Instant::now() + timeout;
    while holders(&nvml).is_ok_and(|holders| holders.iter().any(|holder| pids.contains(holder))) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(RELEASE_POLL_INTERVAL);
    }
    true
}

/// Returns the ids of processes that hold memory on any GPU.
fn holders(nvml: &Nvml) -> Result<Vec<u32>, NvmlError> {
    let mut holders = Vec::new();
    for index in 0..nvml.device_count()? {
        let processes = nvml.device_by_index(index)?.running_compute_processes()?;
        holders.extend(processes.into_iter().map(|process| process.pid));
    }
    Ok(holders)
}
