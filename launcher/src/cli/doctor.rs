//! `xlaunch doctor`: checks whether this node's GPUs work correctly and at the usual speed.
//!
//! ```text
//! NVML, with a deadline --> agent's doctor (pure) --> findings --> table or JSON, exit code 0 or 76
//! long form: kernel's log, libraries, directories, a worker per idle GPU, an all-reduce of them --^
//! ```
//! With `--daemon`, the node's daemon runs it: see [`examine`].

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use xlaunch_host::devices::Placement;
use xlaunch_host::doctor::{self, Finding, GpuName, GpuReadings, Level, NodeReadings, Report};
use xlaunch_host::libraries::{Libraries, Selected};
use xlaunch_proto::v1::Calibration;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::bench::default_job;
use super::examine;
use super::output::{QueryError, print};
use crate::bench::all_reduce::{self, Dtype};
use crate::bench::device;
use crate::render::text::escape;

/// Timeout of NVML in the long form: loading the driver takes seconds on some nodes.
const NVML_TIMEOUT: Duration = Duration::from_secs(20);
/// A rate below this fraction of the cached one is a failure.
const LOWEST_RATE: f64 = 0.8;
/// Largest message of the all-reduce.
const ALL_REDUCE_BYTES: u64 = 16 << 20;
/// Number of bytes written to measure the speed of a directory.
const DIRECTORY_BYTES: usize = 64 << 20;
/// Write rate, in bytes per second, below which a directory delays checkpoints.
const SLOW_DIRECTORY: f64 = 100e6;
/// Options of `xlaunch doctor`.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// Only read the driver's counters, for at most 200 ms
    #[arg(long)]
    quick: bool,
    /// Make the node's daemon examine idle GPUs and drain those that fail (administrators)
    #[arg(long, conflicts_with = "quick")]
    daemon: bool,
    #[command(flatten)]
    examine: examine::Examine,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Exit when stdin is closed. The daemon holds its other end
    #[arg(long, hide = true)]
    while_stdin_is_open: bool,
}

pub(super) async fn run(options: Doctor) -> Result<ExitCode, QueryError> {
    if options.daemon {
        return examine::run(options.examine, options.json).await;
    }
    if !options.while_stdin_is_open {
        return check(&options).await;
    }
    tokio::select! {
        result = check(&options) => result,
        // When this process has exited, the reaper ends the workers.
        () = end_of_stdin() => Err("the daemon has ended the examination".to_owned().into()),
    }
}

async fn check(options: &Doctor) -> Result<ExitCode, QueryError> {
    let node = doctor::read(if options.quick { doctor::QUICK_TIMEOUT } else { NVML_TIMEOUT });
    // Compared before the selection by CUDA_VISIBLE_DEVICES: a GPU's links are compared with those of all others.
    let mut findings = doctor::gpus(&node);
    let node = node.visible(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
    findings.retain(|it| it.gpu.as_ref().is_none_or(|name| node.gpus.iter().any(|gpu| gpu.name == *name)));
    if !options.quick {
        findings.extend(libraries(!node.gpus.is_empty()));
        let mut dirs = vec![canonical(Path::new(".")), canonical(&std::env::temp_dir())];
        dirs.dedup();
        findings.extend(dirs.iter().map(|dir| directory(dir)));
        if !node.gpus.is_empty() {
            let xids = doctor::xids();
            findings.extend(doctor::xid_findings(&node, xids.as_deref()));
            findings.extend(measure(&node, &findings).await?);
        }
    }
    let healthy = findings.iter().all(|finding| finding.level != Level::Failure);
    let exit = if healthy { ExitCode::Done } else { ExitCode::Gpu };
    let text =
        if options.json { format!("{:#}\n", json!(Report { healthy, findings })) } else { table(&findings) };
    print(text.as_bytes())?;
    Ok(exit)
}

/// Returns when the other end of stdin is closed.
async fn end_of_stdin() {
    // A read error also counts as the end.
    let _ = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink())).await;
}

/// Runs workers on the GPUs that are idle and not known to be broken.
async fn measure(node: &NodeReadings, findings: &[Finding]) -> Result<Vec<Finding>, Refusal> {
    let is_broken = |gpu: &GpuReadings| {
        findings.iter().any(|it| it.level == Level::Failure && it.gpu.as_ref() == Some(&gpu.name))
    };
    let mut idle: Vec<&GpuReadings> =
        node.gpus.iter().filter(|gpu| gpu.processes.is_empty() && !is_broken(gpu)).collect();
    let mut found = Vec::new();
    if idle.is_empty() {
        return Ok(found);
    }
    let (spec, placement) = default_job("doctor", Some(1))?;
    for gpu in &idle {
        let placement = on(&placement, std::slice::from_ref(gpu));
        match device::check(&spec, &placement).await {
            Ok(rates) => found.extend(rate_findings(gpu, &rates)),
            Err(refusal) => found.push(worker_failure(gpu, &refusal)),
        }
    }
    let has_failed = |gpu: &GpuReadings| {
        let of_gpu = |it: &&Finding| it.gpu.as_ref() == Some(&gpu.name);
        found.iter().filter(of_gpu).any(|it| it.level == Level::Failure)
    };
    idle.retain(|gpu| !has_failed(gpu));
    if idle.len() > 1 {
        let placement = on(&placement, &idle);
        let count = placement.workers;
        let failure = |message| Finding::of_node(Level::Failure, "all-reduce", message);
        found.push(match all_reduce::run(&spec, &placement, 8, ALL_REDUCE_BYTES, Dtype::Fp32).await {
            Ok(rows) => {
                let wrong: u64 = rows.iter().map(|row| row.wrong).sum();
                let speed = rows.last().map_or(0.0, |row| row.busbw);
                match wrong {
                    0 => {
                        let message = format!("all-reduce of {count} GPUs: {speed:.1} GB/s");
                        Finding::of_node(Level::Ok, "all-reduce", message)
                    }
                    _ => failure(format!("all-reduce of {count} GPUs: {wrong} wrong elements")),
                }
            }
            Err(refusal) => {
                failure(format!("all-reduce of {count} GPUs failed: {}", one_line(&refusal.message)))
            }
        });
    }
    Ok(found)
}

/// Returns the finding for a failed worker. It blames the GPU unless a library is missing or the worker could not be
/// started.
fn worker_failure(gpu: &GpuReadings, refusal: &Refusal) -> Finding {
    let why = one_line(&refusal.message);
    if matches!(refusal.exit, ExitCode::Internal | ExitCode::Usage) {
        let GpuName { index, uuid } = &gpu.name;
        let message = format!("GPU {index} ({uuid}) could not be measured: {why}");
        return Finding::of_node(Level::Failure, "worker", message);
    }
    Finding::of_gpu(Level::Failure, &gpu.name, "worker", format!("a worker failed on it: {why}"))
}

/// Places one worker on each of these GPUs.
fn on(placement: &Placement, gpus: &[&GpuReadings]) -> Placement {
    let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.name.uuid.as_str()).collect();
    let workers = u32::try_from(gpus.len()).unwrap_or(1);
    Placement { workers, visible: Some(uuids.join(",")), ..placement.clone() }
}

/// Compares the results and rates of a GPU with those measured on it before.
fn rate_findings(gpu: &GpuReadings, found: &Calibration) -> Vec<Finding> {
    let mut all = Vec::new();
    if let Some(wrong @ 1..) = found.wrong {
        let message = format!("matrix multiplication: {wrong} wrong elements");
        let failure = Finding::of_gpu(Level::Failure, &gpu.name, "results", message);
        all.push(failure.with_help("take the GPU out of service: it gives wrong results"));
    }
    let Some(reference) = &found.reference else {
        let message = "rates are measured for the first time; later runs compare with them";
        all.push(Finding::of_gpu(Level::Ok, &gpu.name, "rates", message));
        return all;
    };
    let mut lowest = f64::INFINITY;
    for (name, rate, before) in pairs(found, reference) {
        lowest = lowest.min(rate / before);
        if rate < LOWEST_RATE * before {
            let percent = 100.0 * rate / before;
            let message = format!("{name} runs at {percent:.0} % of the rate measured before");
            let failure = Finding::of_gpu(Level::Failure, &gpu.name, "rates", message);
            all.push(failure.with_help("check clocks and cooling; `xlaunch bench device` measures it again"));
        }
    }
    if all.is_empty() && lowest.is_finite() {
        let message =
            format!("results are correct; rates are at least {:.0} % of the earlier ones", 100.0 * lowest);
        all.push(Finding::of_gpu(Level::Ok, &gpu.name, "rates", message));
    }
    all
}

/// Returns name, rate and earlier rate of everything that both calibrations contain.
fn pairs(found: &Calibration, reference: &Calibration) -> Vec<(String, f64, f64)> {
    let before = device::gemm_rates(reference);
    let gemm = device::gemm_rates(found).into_iter().filter_map(|(name, rate)| {
        let (_, before) = before.iter().find(|(known, _)| *known == name)?;
        Some((format!("{name} GEMM"), rate, *before))
    });
    let copy = ("copy".to_owned(), found.copy_bytes_per_second, reference.copy_bytes_per_second);
    gemm.chain((copy.2 > 0.0).then_some(copy)).collect()
}

/// Reports the libraries that workers load. Without a GPU, a missing one is not a problem.
fn libraries(has_gpus: bool) -> Vec<Finding> {
    let missing = if has_gpus { Level::Warning } else { Level::Ok };
    let finding = |selected: &Selected| {
        let name = selected.kind.name();
        let Some(file) = &selected.file else {
            let message = format!("{name} was not found");
            return Finding::of_node(missing, "library", message)
                .with_help("`xlaunch env` lists the files that were found");
        };
        let version = file.version.as_ref().map_or_else(|| "of unknown version".into(), ToString::to_string);
        Finding::of_node(Level::Ok, "library", format!("{name} {version}: {}", file.path.display()))
    };
    Libraries::find(&|name| std::env::var_os(name)).selected.iter().map(finding).collect()
}

/// Checks whether a directory can be written, and how fast.
fn directory(dir: &Path) -> Finding {
    let of_node = |level, message| Finding::of_node(level, "directory", message);
    let shown = dir.display();
    match write_speed(dir) {
        Ok(speed) if speed < SLOW_DIRECTORY => {
            of_node(Level::Warning, format!("{shown} is slow: {:.0} MB/s", speed / 1e6))
                .with_help("checkpoints and logs take long there; choose a faster file system")
        }
        Ok(speed) => of_node(Level::Ok, format!("{shown} is written at {:.0} MB/s", speed / 1e6)),
        Err(error) => of_node(Level::Warning, format!("{shown} cannot be written: {error}")),
    }
}

fn canonical(dir: &Path) -> PathBuf {
    dir.canonicalize().unwrap_or_else(|_| dir.into())
}

/// Measures the write rate to the disk, in bytes per second.
#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn write_speed(dir: &Path) -> io::Result<f64> {
    let mut file = tempfile::tempfile_in(dir)?;
    let block = vec![0x5a; 1 << 20];
    let start = Instant::now();
    for _ in 0..DIRECTORY_BYTES / block.len() {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(DIRECTORY_BYTES as f64 / start.elapsed().as_secs_f64())
}

fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).take(2).collect::<Vec<_>>().join(": ")
}

fn table(findings: &[Finding]) -> String {
    let mut out = String::new();
    for Finding { level, gpu, message, help, .. } in findings {
        let who = gpu.as_ref().map_or(String::new(), |gpu| format!("GPU {} ({}): ", gpu.index, gpu.uuid));
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{:<9}{}", level.name(), escape(&format!("{who}{message}")));
        if let Some(help) = help {
            let _ = writeln!(out, "{:<9}help: {help}", "");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use xlaunch_host::doctor::{NvLinks, PcieLink, Xid};

    use super::*;

    fn gpu() -> GpuReadings {
        GpuReadings { name: GpuName { index: 3, uuid: "GPU-3".into() }, ..GpuReadings::default() }
    }

    fn rates(bf16: f64, copy: f64) -> Calibration {
        Calibration {
            bf16_gemm_flops: bf16,
            copy_bytes_per_second: copy,
            wrong: Some(0),
            ..Calibration::default()
        }
    }

    fn compared(found: Calibration, before: Option<Calibration>) -> Vec<(Level, String)> {
        let found = Calibration { reference: before.map(Box::new), ..found };
        rate_findings(&gpu(), &found).into_iter().map(|it| (it.level, it.message)).collect()
    }

    #[test]
    fn rates_below_80_percent_of_the_cached_ones_fail() {
        let before = || Some(rates(100.0, 10.0));
        let found = compared(rates(81.0, 9.0), before());
        assert_eq!(
            found,
            [(Level::Ok, "results are correct; rates are at least 81 % of the earlier ones".into())]
        );
        let found = compared(rates(79.0, 9.0), before());
        let slow = "bf16 GEMM runs at 79 % of the rate measured before";
        assert_eq!(found, [(Level::Failure, slow.into())]);
        let found = compared(rates(100.0, 7.0), before());
        assert_eq!(found, [(Level::Failure, "copy runs at 70 % of the rate measured before".into())]);
        assert_eq!(compared(rates(1.0, 1.0), None)[0].0, Level::Ok, "nothing to compare with");
    }

    #[test]
    fn wrong_results_fail_at_any_speed() {
        let found = compared(Calibration { wrong: Some(2), ..rates(100.0, 10.0) }, Some(rates(100.0, 10.0)));
        assert_eq!(found, [(Level::Failure, "matrix multiplication: 2 wrong elements".into())]);
    }

    #[test]
    fn missing_library_is_not_the_fault_of_the_gpu() {
        let failed = |exit| worker_failure(&gpu(), &Refusal::new(exit, "failed to load NVRTC")).gpu.is_some();
        assert_eq!(
            [ExitCode::Internal, ExitCode::Gpu, ExitCode::WorkerFailed].map(failed),
            [false, true, true]
        );
    }

    #[test]
    fn table_names_the_gpu_and_what_to_do() {
        let reading = |index: u32| GpuReadings {
            name: GpuName { index, uuid: format!("GPU-{index}") },
            model: "H200\u{1b}".into(),
            bus: Some(format!("0000:{index}b:00")),
            ..GpuReadings::default()
        };
        let gpus = vec![
            reading(0),
            GpuReadings { lost: Some("GPU is lost".into()), ..reading(1) },
            GpuReadings { uncorrected_errors: Some(2), ..reading(2) },
            GpuReadings {
                has_pending_pages: Some(true),
                slowdowns: vec!["heat"],
                pcie: Some(PcieLink { width: 8, most: 16 }),
                processes: vec![7, 9],
                ..reading(3)
            },
            GpuReadings { nvlinks: Some(NvLinks { up: 17 }), ..reading(4) },
            GpuReadings { nvlinks: Some(NvLinks { up: 18 }), ..reading(5) },
        ];
        let node = NodeReadings { driver: Some("570.1".into()), gpus, ..NodeReadings::default() };
        let mut findings = doctor::gpus(&node);
        let age = Duration::from_secs(60);
        let xids = [79, 31].map(|number| Xid { bus: "0000:0b:00".into(), number, age });
        findings.extend(doctor::xid_findings(&node, Some(&xids)));
        let wrong = Calibration { wrong: Some(2), ..rates(79.0, 7.0) };
        let reference = Some(Box::new(rates(100.0, 10.0)));
        for found in [Calibration { reference, ..wrong }, rates(1.0, 1.0)] {
            findings.extend(rate_findings(&gpu(), &found));
        }
        for exit in [ExitCode::Internal, ExitCode::Gpu] {
            findings.push(worker_failure(&gpu(), &Refusal::new(exit, "failed to load NVRTC\n  not found")));
        }
        insta::assert_snapshot!("findings", table(&findings));
        insta::assert_snapshot!("no-gpu", table(&doctor::gpus(&NodeReadings::default())));
    }
}
