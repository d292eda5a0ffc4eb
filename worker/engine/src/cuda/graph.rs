//! Launches recorded once as a CUDA graph, and given to the device in one call since.
//!
//! A graph holds addresses. Whoever captures sees to it that the memory behind them is the graph's for as long as it is
//! launched: persistent tensors, and buffers of a pool's pinned plan.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};

use super::device::{Device, cuda};
use crate::backend::{EngineError, Result};

/// Work that [`Backend::begin_capture`](crate::Backend::begin_capture) and
/// [`end_capture`](crate::Backend::end_capture) recorded.
pub struct Graph(CudaGraph);

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Graph")
    }
}

impl Graph {
    /// Enqueues all of the work, in order with what the compute stream was given before and is given after.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self) -> Result<()> {
        self.0.launch().map_err(|error| cuda("failed to launch a graph", error))
    }
}

/// From now on the stream records.
pub(super) fn begin(device: &Device) -> Result<()> {
    // Other threads go on using the device meanwhile: NCCL's own, the watchdog's.
    device
        .stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(|error| cuda("failed to begin a capture", error))
}

/// What was recorded since [`begin`], ready to be launched.
pub(super) fn end(device: &Device) -> Result<Graph> {
    // Streams keep their priorities: sums between GPUs go before the products they run beside.
    let graph = device
        .stream
        .end_capture(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY)
        .map_err(|error| cuda("failed to end a capture", error))?;
    graph.map(Graph).ok_or_else(|| EngineError::Cuda {
        what: "failed to end a capture".into(),
        reason: "nothing was captured".into(),
    })
}

/// Whether the stream records.
pub(super) fn is_capturing(device: &Device) -> Result<bool> {
    use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as NONE;
    let status = device.stream.capture_status();
    Ok(status.map_err(|error| cuda("failed to ask about a capture", error))? != NONE)
}
