//! `xlaunch bench alloc`: tables of the time per pool request, and of the memory that recorded steps need.

use std::fmt::Write;
use std::path::PathBuf;

use xlaunch_pool::bench::{driver_pairs, pool_pairs};
use xlaunch_pool::replay::{Outcome, RECORDED, Trace};

use crate::error::{Result, WorkerError};

/// How many times the step of a trace is replayed.
const STEPS: usize = 4;

/// The report: the time of an allocation plus free, by the pool and, if there is a GPU, by the driver; and the memory
/// that recorded traces need with this pool and with models of other allocators. `traces` adds the user's own logs.
pub fn alloc(traces: &[PathBuf]) -> Result<String> {
    let recorded = recorded(traces)?;
    let mut out = String::new();
    let mut pairs = pool_pairs().map_err(xlaunch_engine::EngineError::from)?;
    let device = match xlaunch_engine::cuda::compute_stream(0) {
        Ok(stream) => {
            pairs.extend(driver_pairs(&stream).map_err(xlaunch_engine::EngineError::from)?);
            None
        }
        Err(error) => Some(error.to_string()),
    };
    line(&mut out, format_args!("{:<48}{:>12}", "one allocation and its free", "nanoseconds"));
    for pair in &pairs {
        line(&mut out, format_args!("  {:<46}{:>12.1}", pair.name, pair.nanoseconds));
    }
    if let Some(reason) = device {
        line(&mut out, format_args!("  no device measured: {reason}"));
    }

    for (name, trace) in recorded {
        table(&mut out, &name, &trace);
    }
    Ok(out)
}

/// The built-in traces and the user's, by name.
fn recorded(traces: &[PathBuf]) -> Result<Vec<(String, Trace)>> {
    let mut recorded = Vec::new();
    for (name, log) in RECORDED {
        recorded.push((name.to_owned(), parse(log, name)?));
    }
    for path in traces {
        let name = path.display().to_string();
        let log = fs_err::read_to_string(path)
            .map_err(|source| WorkerError::Io { what: "failed to read a trace".into(), source })?;
        recorded.push((name.clone(), parse(&log, &name)?));
    }
    Ok(recorded)
}

fn parse(log: &str, name: &str) -> Result<Trace> {
    Trace::parse(log).map_err(|error| WorkerError::Trace(format!("{name}, {error}")))
}

#[expect(clippy::cast_precision_loss, reason = "shown with a few digits")]
fn table(out: &mut String, name: &str, trace: &Trace) {
    let outcomes = trace.compare(STEPS);
    let live = trace.peak_live();
    let mib = live as f64 / f64::from(1 << 20);
    line(out, format_args!("\n{name}: {STEPS} steps, at most {mib:.1} MiB live"));
    line(out, format_args!("  {:<46}{:>12}{:>12}", "allocator", "mapped MiB", "/ live"));
    for Outcome { name, mapped, .. } in outcomes {
        let (mapped, share) = (mapped as f64 / f64::from(1 << 20), mapped as f64 / live as f64);
        line(out, format_args!("  {name:<46}{mapped:>12.1}{share:>12.4}"));
    }
    let calls: Vec<String> = trace.driver_allocations(STEPS).iter().map(u64::to_string).collect();
    line(out, format_args!("  xlaunch's driver allocations, step by step: {}", calls.join(", ")));
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{text}");
}
