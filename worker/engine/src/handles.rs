//! Opaque handles to work on a device: a copy to the host in flight, and captured work. They hide the types of the back
//! end.

use std::fmt;

use crate::error::Result;

/// A copy of F32 values to the host that was started by [`Backend::begin_read`](crate::Backend::begin_read).
pub struct PendingRead(Box<Finish>);

type Finish = dyn FnOnce(&mut [f32]) -> Result<()>;

impl fmt::Debug for PendingRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingRead")
    }
}

impl PendingRead {
    pub(crate) fn new(finish: impl FnOnce(&mut [f32]) -> Result<()> + 'static) -> Self {
        Self(Box::new(finish))
    }

    /// Waits for the values. Work enqueued after the read may still be running.
    ///
    /// # Errors
    /// If work before the read has failed on the device.
    pub fn wait(self, values: &mut [f32]) -> Result<()> {
        self.0(values)
    }
}

/// Work recorded between [`Backend::begin_capture`](crate::Backend::begin_capture) and
/// [`end_capture`](crate::Backend::end_capture): on a GPU, an instantiated CUDA graph.
///
/// A capture contains addresses. While it is launched, the caller must own the memory at these addresses: persistent
/// tensors, and buffers of a pinned plan of the pool. Dropping a capture releases the graph; the device may still be
/// running an earlier launch.
pub struct Capture(Box<dyn Fn() -> Result<()>>);

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Capture")
    }
}

impl Capture {
    pub(crate) fn new(launch: impl Fn() -> Result<()> + 'static) -> Self {
        Self(Box::new(launch))
    }

    /// Enqueues all of the work, in order with earlier and later work on the compute stream.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    pub fn launch(&self) -> Result<()> {
        self.0()
    }
}
