//! `xlaunch bench device`: what the first device of a job can do at best.

use std::fmt::Write;

use serde_json::{Value, json};
use xlaunch_proto::spec::{Exec, JobSpec, PoolMode};
use xlaunch_proto::v1::bench::Kind;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Calibration, DeviceBench};

use super::{launch, silent};
use xlaunch_agent::Refusal;
use xlaunch_agent::devices::{self, Placement};

/// Measured by a worker on the first device of the placement, or found in its cache unless `refresh`.
///
/// # Errors
/// Those of [`launch`].
pub(crate) async fn run(
    spec: &JobSpec,
    placement: &Placement,
    refresh: bool,
) -> Result<Calibration, Refusal> {
    let mut spec = spec.clone();
    (spec.engine.pool, spec.engine.exec, spec.engine.memory_limit_mb) = (PoolMode::On, Exec::Stream, None);
    let alone = Placement { workers: 1, ..placement.clone() };
    let question = DeviceBench { refresh, platform: devices::platform(placement.cuda) };
    let heard = launch(&spec, &alone, Kind::Device(question)).await?;
    let answer = heard.into_iter().find_map(|heard| match heard.report {
        Report::Calibration(calibration) => Some(calibration),
        _ => None,
    });
    answer.ok_or_else(|| silent("what the device can do"))
}

/// The table.
pub(crate) fn table(found: &Calibration, platform: &str) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<16}{value}");
    };
    line("device", format!("{}, {platform}", found.device_name));
    for (name, rate) in products(found) {
        line(&format!("{name} product"), format!("{:.3} TFLOP/s", rate / 1e12));
    }
    line("copy", format!("{:.1} GB/s, read and written", found.copy_bytes_per_second / 1e9));
    line("launch", format!("{:.2} us a kernel, one of many", found.launch_seconds * 1e6));
    line("round trip", format!("{:.2} us from a launch to its result", found.round_trip_seconds * 1e6));
    out
}

/// The same as JSON, in the units of [`Calibration`].
pub(crate) fn json(found: &Calibration, platform: &str) -> Value {
    let products: serde_json::Map<String, Value> =
        products(found).into_iter().map(|(name, rate)| (name.into(), rate.into())).collect();
    json!({
        "device": found.device_name, "platform": platform, "product_flops": products,
        "copy_bytes_per_second": found.copy_bytes_per_second, "launch_seconds": found.launch_seconds,
        "round_trip_seconds": found.round_trip_seconds,
    })
}

/// Rates by the names that precisions have in reports; none that the device does not have.
fn products(found: &Calibration) -> Vec<(&'static str, f64)> {
    let all =
        [("fp32", found.fp32_gemm_flops), ("tf32", found.tf32_gemm_flops), ("bf16", found.bf16_gemm_flops)];
    all.into_iter().filter(|(_, rate)| *rate > 0.0).collect()
}

/// The rate of products in this precision.
pub(crate) fn product(found: &Calibration, precision: &str) -> Option<f64> {
    products(found).into_iter().find(|(name, _)| *name == precision).map(|(_, rate)| rate)
}
