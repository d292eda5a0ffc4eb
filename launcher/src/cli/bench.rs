//! `xlaunch bench`: options, and dispatch to [`crate::bench`].

use std::path::PathBuf;
use std::time::Instant;

use clap::Subcommand;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;

use super::choice::whole;
use super::launch::{self, Launch};
use super::output::answer;
use crate::bench::all_reduce::{self, Dtype};
use crate::bench::reports::Extent;
use crate::bench::train;
use crate::bench::{Mode, device, launches};
use xlaunch_host::devices::{self, Node, Placement};
use xlaunch_spec::refusal::Refusal;

/// Default size of the largest all-reduce, in bytes.
const DEFAULT_MAX_BYTES_GPU: u64 = 256 << 20;
const DEFAULT_MAX_BYTES_CPU: u64 = 16 << 20;

#[derive(Debug, Subcommand)]
pub(super) enum Bench {
    /// Training steps: time, throughput, share of peak FLOP/s, waiting, communication, clocks
    Train {
        /// Training configuration; evaluation, sampling and checkpoints are turned off
        #[arg(value_name = "CONFIG.toml")]
        config: PathBuf,
        /// Number of workers [default: one per GPU, or 1 without GPUs]
        #[arg(long, value_name = "N")]
        nproc: Option<u32>,
        /// Run all ranks as threads of one process, for comparison with one process per rank
        #[arg(long)]
        threads: bool,
        /// Override a key of the configuration; may be repeated
        #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
        set: Vec<String>,
        /// Number of measured steps
        #[arg(long, value_name = "K", default_value_t = 50, value_parser = whole(1..=u64::MAX))]
        steps: u64,
        /// Number of steps before the measured ones
        #[arg(long, value_name = "K", default_value_t = 10)]
        warmup: u64,
        /// Time the kernels of one more step, grouped by family
        #[arg(long)]
        profile: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// All-reduce by message size, with the columns of nccl-tests
    #[command(name = "allreduce")]
    AllReduce {
        /// Number of workers [default: one per GPU, or 1 without GPUs]
        #[arg(long, value_name = "N")]
        nproc: Option<u32>,
        /// Smallest message, such as 8, 64K or 1M
        #[arg(long, value_name = "BYTES", default_value = "8", value_parser = bytes)]
        min: u64,
        /// Largest message [default: 256M on GPUs, 16M on the CPU]
        #[arg(long, value_name = "BYTES", value_parser = bytes)]
        max: Option<u64>,
        /// Element type [default: bf16 on GPUs, fp32 on the CPU]
        #[arg(long)]
        dtype: Option<Dtype>,
        /// Use NCCL symmetric memory windows, as with `comm.windows = true`
        #[arg(long)]
        windows: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Launching: overhead, reaction to failures, processes left behind; also torchrun's if it is in PATH
    Launch {
        /// Number of workers of each launch
        #[arg(long, value_name = "N", default_value_t = 8, value_parser = whole(1..=u32::MAX))]
        nproc: u32,
        /// Number of launches of each kind
        #[arg(long, value_name = "K", default_value_t = 50, value_parser = whole(1..=u16::MAX))]
        runs: u16,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Peak rates of the first device: GEMM, copies, kernel launches; updates the cached calibration
    Device {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

pub(super) async fn run(bench: Bench) -> ExitCode {
    match measure(bench).await {
        Ok(text) => answer(&text, ExitCode::Done),
        Err(refusal) => launch::refuse(&refusal),
    }
}

async fn measure(bench: Bench) -> Result<String, Refusal> {
    let command_start = Instant::now();
    match bench {
        Bench::Train { config, nproc, threads, set, steps, warmup, profile, json } => {
            let (spec, placement) = launch::prepare(
                &Launch { config, nproc, set, resume: None, dry_run: false },
                xlaunch_worker::fill_in,
            )?;
            let extent = Extent { warmup, steps, profile };
            let mode = if threads { Mode::Threads } else { Mode::Processes };
            let found = train::run(spec, &placement, mode, extent, command_start).await?;
            Ok(if json { as_json(&serde_json::json!(found)) } else { train::table(&found) })
        }
        Bench::AllReduce { nproc, min, max, dtype, windows, json } => {
            let (mut spec, placement) = default_job("allreduce", nproc)?;
            spec.comm.windows = windows;
            let default = if placement.cuda { DEFAULT_MAX_BYTES_GPU } else { DEFAULT_MAX_BYTES_CPU };
            let max = max.unwrap_or(default).max(min);
            let dtype = dtype.unwrap_or(if placement.cuda { Dtype::Bf16 } else { Dtype::Fp32 });
            let rows = all_reduce::run(&spec, &placement, min, max, dtype).await?;
            let (ranks, platform) = (placement.workers, devices::platform(placement.cuda));
            let value = serde_json::json!({ "ranks": ranks, "platform": platform, "sizes": rows });
            Ok(if json { as_json(&value) } else { all_reduce::table(&rows, ranks, &platform) })
        }
        Bench::Launch { nproc, runs, json } => {
            let torchrun = launches::torchrun();
            let found = launches::run(nproc, runs.into(), torchrun.as_deref()).await?;
            Ok(if json { as_json(&serde_json::json!(found)) } else { launches::table(&found) })
        }
        Bench::Device { json } => {
            let (spec, placement) = default_job("device", None)?;
            let found = device::run(&spec, &placement, true).await?;
            let platform = devices::platform(placement.cuda);
            let value = device::json(&found, &platform);
            Ok(if json { as_json(&value) } else { device::table(&found, &platform) })
        }
    }
}

/// Returns a default job for measurements that need only its workers.
pub(super) fn default_job(name: &str, nproc: Option<u32>) -> Result<(JobSpec, Placement), Refusal> {
    let mut spec = JobSpec::default();
    spec.job.name = name.into();
    spec.launch.nproc = nproc;
    spec.check().map_err(|invalid| Refusal::new(ExitCode::Usage, invalid.to_string()))?;
    let placement = devices::place(&spec, &Node::inspect())?;
    Ok((spec, placement))
}

fn as_json(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Parses a number of bytes; K, M and G are powers of 1024.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let units = [("K", 10), ("M", 20), ("G", 30)];
    let unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    number.filter(|bytes| *bytes > 0).ok_or_else(|| "expected a number of bytes such as 8, 64K or 1G".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_units_are_powers_of_1024() {
        assert_eq!(
            ["8", "64K", "256M", "1G"].map(|text| bytes(text).ok()),
            [8, 64 << 10, 256 << 20, 1 << 30].map(Some)
        );
        assert!(["", "0", "-1", "1T", "K", "99999999999G"].iter().all(|text| bytes(text).is_err()));
    }
}
