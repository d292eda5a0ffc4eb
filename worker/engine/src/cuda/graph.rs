//! Captures the compute stream into CUDA graphs, each of which is then launched in one call.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};

use super::device::Device;
use crate::error::driver_error;
use crate::error::{EngineError, Result};

/// Starts to capture the work enqueued to the stream.
pub(crate) fn begin(device: &Device) -> Result<()> {
    // Thread-local mode: other threads, such as NCCL's proxy and the watchdog, make driver calls during the capture,
    // which the global mode would reject.
    device
        .stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(|error| driver_error("failed to begin a capture", error))
}

/// Ends the capture and instantiates the graph.
pub(crate) fn end(device: &Device) -> Result<CudaGraph> {
    // Nodes keep the priorities of their streams: all-reduce kernels precede the GEMMs that they overlap with.
    let graph = device
        .stream
        .end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY)
        .map_err(|error| driver_error("failed to end a capture", error))?;
    graph.ok_or_else(|| EngineError::Cuda {
        what: "failed to end a capture".into(),
        reason: "nothing was captured".into(),
    })
}

/// Enqueues a graph.
pub(crate) fn launch(graph: &CudaGraph) -> Result<()> {
    graph.launch().map_err(|error| driver_error("failed to launch a graph", error))
}

/// Returns whether a capture is in progress.
pub(crate) fn is_capturing(device: &Device) -> Result<bool> {
    use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as NONE;
    let status = device.stream.capture_status();
    Ok(status.map_err(|error| driver_error("failed to query the capture status", error))? != NONE)
}
