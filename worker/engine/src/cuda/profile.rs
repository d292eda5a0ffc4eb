//! Where the device's time goes: an event before and after every launch, while profiling is on.
//!
//! The events keep kernels from overlapping by little; what they measure is each kernel's own time on the stream.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaStream, DriverError};

use super::device::words;
use crate::backend::{EngineError, KernelTime, Result};

/// Launches seen since profiling began; `None` while it is off.
#[derive(Debug, Default)]
pub(super) struct Profiler {
    records: RefCell<Option<Vec<Record>>>,
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
        if self.records.borrow().is_none() {
            return launch();
        }
        let begin = mark(stream).map_err(failed)?;
        let result = launch()?;
        let end = mark(stream).map_err(failed)?;
        if let Some(records) = &mut *self.records.borrow_mut() {
            records.push(Record { name: name(), begin, end });
        }
        Ok(result)
    }

    /// Begins anew.
    pub(super) fn begin(&self) {
        *self.records.borrow_mut() = Some(Vec::new());
    }

    /// Waits for the last launch, and says what all took, the longest first.
    pub(super) fn end(&self) -> Result<Vec<KernelTime>> {
        let mut times: HashMap<String, KernelTime> = HashMap::new();
        for Record { name, begin, end } in self.records.take().unwrap_or_default() {
            end.synchronize().map_err(failed)?;
            let milliseconds = begin.elapsed_ms(&end).map_err(failed)?;
            let time = times.entry(name.clone()).or_insert(KernelTime { name, launches: 0, seconds: 0.0 });
            time.launches += 1;
            time.seconds += f64::from(milliseconds) / 1e3;
        }
        let mut times: Vec<KernelTime> = times.into_values().collect();
        times.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        Ok(times)
    }
}

fn mark(stream: &Arc<CudaStream>) -> std::result::Result<CudaEvent, DriverError> {
    stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
}

fn failed(error: DriverError) -> EngineError {
    EngineError::Cuda { what: "failed to take a kernel's time".into(), reason: words(error) }
}
