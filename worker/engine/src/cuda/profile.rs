//! Where the device's time goes: an event before and after every launch, while profiling is on.
//!
//! The events keep kernels from overlapping by little; what they measure is each kernel's own time on the stream. The
//! device's clock is tied to the host's at the first launch: on a stream that was idle it begins at once.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::device::cuda;
use crate::backend::{EngineError, KernelSpan, Result};

/// Launches seen since profiling began; `None` while it is off.
#[derive(Debug, Default)]
pub(super) struct Profiler {
    session: RefCell<Option<Session>>,
}

#[derive(Debug)]
struct Session {
    begun: Instant,
    /// From there to the first launch.
    until_first: Duration,
    records: Vec<Record>,
}

#[derive(Debug)]
struct Record {
    name: String,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Profiler {
    /// Runs a launch, and takes its time if profiling is on.
    pub(super) fn time<T>(
        &self,
        stream: &Arc<CudaStream>,
        name: impl FnOnce() -> String,
        launch: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.session.borrow().is_none() {
            return launch();
        }
        let begin = mark(stream)?;
        let begun = Instant::now();
        let result = launch()?;
        let end = mark(stream)?;
        if let Some(session) = &mut *self.session.borrow_mut() {
            if session.records.is_empty() {
                session.until_first = begun.duration_since(session.begun);
            }
            session.records.push(Record { name: name(), begin, end });
        }
        Ok(result)
    }

    /// Begins anew.
    pub(super) fn begin(&self) {
        let session = Session { begun: Instant::now(), until_first: Duration::ZERO, records: Vec::new() };
        *self.session.borrow_mut() = Some(session);
    }

    /// Waits for the last launch, and says when each ran and how long.
    pub(super) fn end(&self) -> Result<Vec<KernelSpan>> {
        let Some(Session { until_first, records, .. }) = self.session.take() else { return Ok(Vec::new()) };
        let mut spans = Vec::with_capacity(records.len());
        for Record { name, begin, end } in &records {
            let since_first = seconds(&records[0].begin, begin)?;
            let start = until_first.as_secs_f64() + since_first;
            spans.push(KernelSpan { name: name.clone(), start, seconds: seconds(begin, end)? });
        }
        Ok(spans)
    }
}

/// What the device took from one event to the other, which is waited for.
pub(super) fn seconds(from: &CudaEvent, to: &CudaEvent) -> Result<f64> {
    from.elapsed_ms(to).map(|milliseconds| f64::from(milliseconds) / 1e3).map_err(failed)
}

/// An event that times can be taken from, recorded now.
pub(super) fn mark(stream: &Arc<CudaStream>) -> Result<CudaEvent> {
    stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed)
}

fn failed(error: DriverError) -> EngineError {
    cuda("failed to take a kernel's time", error)
}
