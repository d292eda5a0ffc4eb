//! `xlaunch bench device`: peak rates of a job's first device.

use std::fmt::Write;

use serde_json::{Value, json};
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Calibration, DeviceBench};
use xlaunch_spec::job::{Exec, JobSpec, PoolMode};

use super::{Mode, missing_report, run_workers};
use xlaunch_host::devices::{self, Placement};
use xlaunch_spec::refusal::Refusal;

/// Returns the calibration of the first device of the placement. It comes from the cache unless `refresh` is set;
/// otherwise a worker measures it.
///
/// # Errors
/// Those of [`run_workers`].
pub(crate) async fn run(
    spec: &JobSpec,
    placement: &Placement,
    refresh: bool,
) -> Result<Calibration, Refusal> {
    measure(spec, placement, DeviceBench { refresh, ..DeviceBench::default() }).await
}

/// Measures the first device of the placement and checks its results. A cached calibration is not changed.
///
/// # Errors
/// Those of [`run_workers`].
pub(crate) async fn check(spec: &JobSpec, placement: &Placement) -> Result<Calibration, Refusal> {
    measure(spec, placement, DeviceBench { check: true, ..DeviceBench::default() }).await
}

async fn measure(spec: &JobSpec, placement: &Placement, bench: DeviceBench) -> Result<Calibration, Refusal> {
    let mut spec = spec.clone();
    (spec.engine.pool, spec.engine.exec, spec.engine.memory_limit_mb) = (PoolMode::On, Exec::Stream, None);
    // One worker has no group to divide experts with.
    spec.comm.experts = 1;
    let single = Placement { workers: 1, ..placement.clone() };
    let request = DeviceBench { platform: devices::platform(placement.cuda), ..bench };
    let reports = run_workers(&spec, &single, Mode::Processes, Kind::Device(request)).await?;
    let calibration = reports.into_iter().find_map(|received| match received.report {
        Report::Calibration(calibration) => Some(calibration),
        _ => None,
    });
    calibration.ok_or_else(|| missing_report("the calibration of the device"))
}

pub(crate) fn table(found: &Calibration, platform: &str) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<16}{value}");
    };
    line("device", format!("{}, {platform}", found.device_name));
    for (name, rate) in gemm_rates(found) {
        line(&format!("{name} GEMM"), format!("{:.3} TFLOP/s", rate / 1e12));
    }
    line("copy", format!("{:.1} GB/s, reads plus writes", found.copy_bytes_per_second / 1e9));
    line("launch", format!("{:.2} us per kernel, back to back", found.launch_seconds * 1e6));
    line(
        "round trip",
        format!("{:.2} us from a launch to its result on the host", found.round_trip_seconds * 1e6),
    );
    out
}

/// Returns the calibration as JSON, in the units of [`Calibration`].
pub(crate) fn json(found: &Calibration, platform: &str) -> Value {
    let rates: serde_json::Map<String, Value> =
        gemm_rates(found).into_iter().map(|(name, rate)| (name.into(), rate.into())).collect();
    json!({
        "device": found.device_name, "platform": platform, "gemm_flops": rates,
        "copy_bytes_per_second": found.copy_bytes_per_second, "launch_seconds": found.launch_seconds,
        "round_trip_seconds": found.round_trip_seconds,
    })
}

/// Returns the GEMM rates by precision, in FLOP/s, for the precisions that the device supports.
pub(crate) fn gemm_rates(found: &Calibration) -> Vec<(&'static str, f64)> {
    let all =
        [("fp32", found.fp32_gemm_flops), ("tf32", found.tf32_gemm_flops), ("bf16", found.bf16_gemm_flops)];
    all.into_iter().filter(|(_, rate)| *rate > 0.0).collect()
}

/// Returns the GEMM rate in this precision, in FLOP/s; for fp8 that of bf16, in which head and attention are computed.
pub(crate) fn gemm_rate(found: &Calibration, precision: &str) -> Option<f64> {
    let precision = if precision == "fp8" { "bf16" } else { precision };
    gemm_rates(found).into_iter().find(|(name, _)| *name == precision).map(|(_, rate)| rate)
}
