//! The worker's part of `xlaunch bench device`: the peak rates of its device, measured once and cached.
//!
//! The cache key is the device (with the number of threads of a CPU) and the platform that the agent sends: the GPU's
//! driver version, or the CPU's model.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use xlaunch_engine::{Backend, cache, calibrate};
use xlaunch_proto::v1::{Calibration, DeviceBench};
use xlaunch_spec::job::Precision;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::Result;
use crate::model::BackendHandle;

/// Version of the cached form. Increase it when the measurement changes.
const CACHE_VERSION: u32 = 1;

/// The cached values; units as in [`Calibration`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Rates {
    fp32_gemm_flops: f64,
    tf32_gemm_flops: f64,
    bf16_gemm_flops: f64,
    copy_bytes_per_second: f64,
    launch_seconds: f64,
    round_trip_seconds: f64,
}

/// Returns the rates of the device that `open` opens in a given precision. They come from the cache if it has them,
/// unless the request asks for a refresh.
pub(crate) fn device(
    bench: &DeviceBench,
    open: impl Fn(Precision) -> Result<BackendHandle>,
) -> Result<Calibration> {
    let fp32 = open(Precision::Fp32)?;
    let info = fp32.device().clone();
    let path = path(&info.name, &info.uuid, &bench.platform);
    let cached = path.as_ref().filter(|_| !bench.refresh).and_then(|path| fs_err::read(path).ok());
    let cached: Option<Rates> = cached.and_then(|json| serde_json::from_slice(&json).ok());
    match cached {
        Some(rates) if !bench.check => return Ok(calibration(&info.name, &rates, true)),
        _ => {}
    }
    let wrong = if bench.check { Some(wrong_elements(&fp32, &open)?) } else { None };
    let rates = measure(fp32, open)?;
    if cached.is_none()
        && let (Some(path), Ok(json)) = (path, serde_json::to_vec_pretty(&rates))
    {
        // On a full or read-only disk, the next run measures again.
        let _ = cache::write(&path, &json);
    }
    let reference = cached.map(|rates| Box::new(calibration(&info.name, &rates, true)));
    Ok(Calibration { wrong, reference, ..calibration(&info.name, &rates, false) })
}

fn calibration(device: &str, rates: &Rates, cached: bool) -> Calibration {
    Calibration {
        device_name: device.into(),
        fp32_gemm_flops: rates.fp32_gemm_flops,
        tf32_gemm_flops: rates.tf32_gemm_flops,
        bf16_gemm_flops: rates.bf16_gemm_flops,
        copy_bytes_per_second: rates.copy_bytes_per_second,
        launch_seconds: rates.launch_seconds,
        round_trip_seconds: rates.round_trip_seconds,
        cached,
        wrong: None,
        reference: None,
    }
}

/// Counts wrong elements over all precisions of the device.
fn wrong_elements(fp32: &Backend, open: &impl Fn(Precision) -> Result<BackendHandle>) -> Result<u64> {
    let mut wrong = calibrate::wrong_gemm_elements(fp32)?;
    if fp32.is_asynchronous() {
        for precision in [Precision::Tf32, Precision::Bf16] {
            wrong += calibrate::wrong_gemm_elements(&*open(precision)?)?;
        }
    }
    Ok(wrong)
}

/// Measures one back end at a time, as each allocates device memory.
fn measure(fp32: BackendHandle, open: impl Fn(Precision) -> Result<BackendHandle>) -> Result<Rates> {
    let (launch_seconds, round_trip_seconds) = calibrate::latencies(&fp32)?;
    let gpu = fp32.is_asynchronous();
    let (fp32_gemm_flops, copy_bytes_per_second) = (calibrate::gemm(&fp32)?, calibrate::copy(&fp32)?);
    drop(fp32);
    let gemm =
        |precision| -> Result<f64> { if gpu { Ok(calibrate::gemm(&*open(precision)?)?) } else { Ok(0.0) } };
    let (tf32_gemm_flops, bf16_gemm_flops) = (gemm(Precision::Tf32)?, gemm(Precision::Bf16)?);
    Ok(Rates {
        fp32_gemm_flops,
        tf32_gemm_flops,
        bf16_gemm_flops,
        copy_bytes_per_second,
        launch_seconds,
        round_trip_seconds,
    })
}

/// Returns the cache file of this device; `None` without a cache directory.
fn path(name: &str, uuid: &str, platform: &str) -> Option<PathBuf> {
    let key = format!("{CACHE_VERSION}\n{name}\n{uuid}\n{platform}");
    Some(cache::dir()?.join(format!("device-{:016x}.json", xxh3_64(key.as_bytes()))))
}
