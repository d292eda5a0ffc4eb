//! Collects the measurements, and formats them as tables or JSON.

use std::fmt::Write;
use std::path::PathBuf;

use serde::Serialize;
use xlaunch_pool::PoolError;

use super::replay::{Outcome, RECORDED, Trace};
use super::timings::{self, Timing};

/// Number of steps for which a trace is replayed.
const STEPS: usize = 4;

/// All measurements.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Time of an allocation with its free, per allocator.
    pub(crate) timings: Vec<Timing>,
    /// The reason why no device allocators were measured, if so.
    pub(crate) no_device: Option<String>,
    /// Memory that each trace takes.
    pub(crate) traces: Vec<TraceReport>,
}

/// Memory that one trace takes.
#[derive(Debug, Serialize)]
pub(crate) struct TraceReport {
    pub(crate) name: String,
    pub(crate) steps: usize,
    /// Largest number of requested bytes that are live at any time.
    pub(crate) peak_live_bytes: u64,
    /// Memory that each allocator maps.
    pub(crate) outcomes: Vec<Outcome>,
    /// Driver allocations of this crate's allocator, by step.
    pub(crate) driver_allocations: Vec<u64>,
}

/// Returns the recorded traces and those in `paths`, with names.
pub(crate) fn load_traces(paths: &[PathBuf]) -> Result<Vec<(String, Trace)>, String> {
    let parse = |name: String, log: &str| match Trace::parse(log) {
        Ok(trace) => Ok((name, trace)),
        Err(error) => Err(format!("cannot read the trace {name}, {error}")),
    };
    let recorded = RECORDED.iter().map(|(name, log)| parse((*name).to_owned(), log));
    let own = paths.iter().map(|path| {
        let name = path.display().to_string();
        let log = std::fs::read_to_string(path).map_err(|error| format!("cannot read {name}: {error}"))?;
        parse(name, &log)
    });
    recorded.chain(own).collect()
}

/// Measures everything. Each time is the median of `runs` runs.
pub(crate) fn measure(runs: usize, traces: &[(String, Trace)]) -> Result<Report, PoolError> {
    let mut timings = timings::host(runs)?;
    let no_device = match device_timings(runs)? {
        Ok(device) => {
            timings.extend(device);
            None
        }
        Err(reason) => Some(reason),
    };
    let traces = traces.iter().map(|(name, trace)| TraceReport {
        name: name.clone(),
        steps: STEPS,
        peak_live_bytes: trace.peak_live(),
        outcomes: trace.compare(STEPS),
        driver_allocations: trace.driver_allocations(STEPS),
    });
    Ok(Report { timings, no_device, traces: traces.collect() })
}

/// Measures device allocators. The inner error is the reason why there is no device.
#[cfg(feature = "cuda")]
fn device_timings(runs: usize) -> Result<Result<Vec<Timing>, String>, PoolError> {
    match super::device::open() {
        Ok(stream) => super::device::timings(&stream, runs).map(Ok),
        Err(reason) => Ok(Err(reason)),
    }
}

#[cfg(not(feature = "cuda"))]
fn device_timings(_: usize) -> Result<Result<Vec<Timing>, String>, PoolError> {
    Ok(Err("built without the feature `cuda`".into()))
}

impl Report {
    pub(crate) fn json(&self) -> String {
        format!("{:#}\n", serde_json::json!(self))
    }

    pub(crate) fn tables(&self) -> String {
        let mut out = String::new();
        line(&mut out, format_args!("{:<48}{:>12}", "one allocation and its free", "nanoseconds"));
        for timing in &self.timings {
            line(&mut out, format_args!("  {:<46}{:>12.1}", timing.name, timing.nanoseconds));
        }
        if let Some(reason) = &self.no_device {
            line(&mut out, format_args!("  device allocators not measured: {reason}"));
        }
        self.traces.iter().for_each(|trace| trace.table(&mut out));
        out
    }
}

impl TraceReport {
    #[expect(clippy::cast_precision_loss, reason = "shown with a few digits")]
    fn table(&self, out: &mut String) {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (name, steps, live) = (&self.name, self.steps, self.peak_live_bytes);
        line(out, format_args!("\n{name}: {steps} steps, peak {:.1} MiB live", mib(live)));
        line(out, format_args!("  {:<46}{:>12}{:>14}", "allocator", "mapped MiB", "mapped / live"));
        for Outcome { allocator, mapped_bytes } in &self.outcomes {
            let ratio = *mapped_bytes as f64 / live as f64;
            line(out, format_args!("  {allocator:<46}{:>12.1}{ratio:>14.4}", mib(*mapped_bytes)));
        }
        let calls: Vec<String> = self.driver_allocations.iter().map(u64::to_string).collect();
        line(out, format_args!("  driver allocations of xlaunch-pool by step: {}", calls.join(", ")));
    }
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}
