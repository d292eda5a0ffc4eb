//! Health checks of the node's GPUs: turns readings into findings. Pure.
//!
//! ```text
//! NVML --readings, with a deadline--> NodeReadings --gpus--> findings --> `xlaunch doctor`
//! /dev/kmsg --kernel_log--> Xid errors --xids--^
//! ```
//! A failure means that work on the GPU would fail or give wrong results. A condition that only slows the GPU down, or
//! a value that cannot be read, is a warning, so a missing or hanging NVML does not stop a job.

mod kernel_log;
mod readings;

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::devices;
pub use kernel_log::{Xid, xids};
pub use readings::{GpuReadings, NodeReadings, NvLinks, PcieLink, read};

/// Timeout of the readings for the check before a job starts.
pub const QUICK_TIMEOUT: Duration = Duration::from_millis(200);
/// Xid errors that are faults of the GPU or its links rather than of the program that used it, with their meaning
/// (source: NVIDIA's catalog of Xid errors).
const FAULTS: [(u32, &str); 9] = [
    (48, "double-bit memory error"),
    (64, "failed to retire a memory page"),
    (74, "NVLink error"),
    (79, "the GPU has fallen off the bus"),
    (94, "contained memory error"),
    (95, "uncontained memory error"),
    (119, "the GPU's system processor does not respond"),
    (120, "error of the GPU's system processor"),
    (140, "unrecovered memory error"),
];
/// Age up to which a fault counts as a failure. A reset may have repaired an older one, so that is a warning.
const RECENT_FAULT: Duration = Duration::from_secs(3600);

/// The output of `xlaunch doctor --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// True if no finding is a failure.
    pub healthy: bool,
    pub findings: Vec<Finding>,
}

/// The result of one check. The daemon may read results of a newer version with checks that it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub level: Level,
    /// Name of the check.
    #[serde(default)]
    pub check: Cow<'static, str>,
    /// The GPU concerned; `None` for the node.
    pub gpu: Option<GpuName>,
    /// Description in one line.
    pub message: String,
    /// Advice for the operator.
    pub help: Option<Cow<'static, str>>,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    Warning,
    Failure,
}

/// Identifies a GPU in messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuName {
    /// GPU index, as nvidia-smi numbers them.
    pub index: u32,
    /// Empty if the driver cannot read it.
    pub uuid: String,
}

impl Level {
    /// The name, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failure => "failure",
        }
    }
}

impl Finding {
    /// A finding about the node.
    pub fn of_node(level: Level, check: &'static str, message: impl Into<String>) -> Self {
        Self { level, check: check.into(), gpu: None, message: message.into(), help: None }
    }

    /// A finding about a GPU.
    pub fn of_gpu(level: Level, gpu: &GpuName, check: &'static str, message: impl Into<String>) -> Self {
        Self { gpu: Some(gpu.clone()), ..Self::of_node(level, check, message) }
    }

    /// Returns the finding with advice added.
    #[must_use]
    pub fn with_help(self, help: &'static str) -> Self {
        Self { help: Some(help.into()), ..self }
    }
}

/// Returns the findings about the driver and all GPUs, except those from the kernel log. Every GPU has at least one.
pub fn gpus(node: &NodeReadings) -> Vec<Finding> {
    if let Some(problem) = &node.problem {
        return vec![Finding::of_node(Level::Warning, "driver", format!("GPUs are not checked: {problem}"))];
    }
    if node.gpus.is_empty() {
        return vec![Finding::of_node(Level::Ok, "driver", "there is no GPU")];
    }
    let mut all = Vec::new();
    if let Some(driver) = &node.driver {
        let cuda = node.cuda.as_ref().map_or(String::new(), |cuda| format!(", CUDA {cuda}"));
        all.push(Finding::of_node(Level::Ok, "driver", format!("driver {driver}{cuda}")));
    }
    let most_links = node.gpus.iter().filter_map(|gpu| gpu.nvlinks.as_ref()).map(|links| links.up).max();
    for gpu in &node.gpus {
        let found = gpu_findings(gpu, most_links.unwrap_or(0));
        if found.is_empty() {
            all.push(Finding::of_gpu(Level::Ok, &gpu.name, "counters", gpu.summary()));
        }
        all.extend(found);
    }
    all
}

impl NodeReadings {
    /// Removes the GPUs that `CUDA_VISIBLE_DEVICES` hides.
    #[must_use]
    pub fn visible(mut self, visible: Option<&str>) -> Self {
        let indices = self.visible_indices(visible);
        self.gpus.retain(|gpu| indices.contains(&gpu.name.index.to_string()));
        self
    }

    /// Indices of the visible GPUs, in CUDA's order.
    fn visible_indices(&self, visible: Option<&str>) -> Vec<String> {
        let known: Vec<(String, String)> =
            self.gpus.iter().map(|gpu| (gpu.name.uuid.clone(), gpu.name.index.to_string())).collect();
        devices::visible_addresses(&known, visible)
    }
}

/// Returns the failures of the GPUs that the first `world` ranks would use, each with its rank. `visible` is
/// `CUDA_VISIBLE_DEVICES`.
pub fn faults(node: &NodeReadings, visible: Option<&str>, world: u32) -> Vec<(u32, String)> {
    let of_ranks = node.visible_indices(visible);
    let failures = gpus(node).into_iter().filter(|finding| finding.level == Level::Failure);
    let with_rank = failures.filter_map(|finding| {
        let gpu = finding.gpu?;
        let rank = of_ranks.iter().position(|index| *index == gpu.index.to_string())?;
        let rank = u32::try_from(rank).ok().filter(|rank| *rank < world)?;
        Some((rank, format!("GPU {} ({}): {}", gpu.index, gpu.uuid, finding.message)))
    });
    with_rank.collect()
}

/// Returns the problems of a GPU. `most_links` is the largest number of NVLinks that are up on any GPU of the node.
fn gpu_findings(gpu: &GpuReadings, most_links: u32) -> Vec<Finding> {
    if let Some(reason) = &gpu.lost {
        let message = format!("the driver cannot read it: {reason}");
        return vec![
            Finding::of_gpu(Level::Failure, &gpu.name, "driver", message)
                .with_help("look for Xid errors in the kernel's log; reset the GPU or reboot the node"),
        ];
    }
    let mut all = Vec::new();
    let mut add = |level, check, message: String, help| {
        all.push(Finding::of_gpu(level, &gpu.name, check, message).with_help(help));
    };
    if let Some(errors @ 1..) = gpu.uncorrected_errors {
        let message = format!("{errors} uncorrected ECC errors since the driver was loaded");
        add(Level::Failure, "ecc", message, "reset the GPU while it is idle; replace it if errors recur");
    }
    if gpu.has_pending_pages == Some(true) {
        let message = "memory pages wait to be retired".to_owned();
        add(Level::Warning, "ecc", message, "reset the GPU while it is idle");
    }
    if !gpu.slowdowns.is_empty() {
        let message = format!("clocks are lowered: {}", gpu.slowdowns.join(", "));
        add(
            Level::Warning,
            "clocks",
            message,
            "check cooling and power; a job runs at the speed of its slowest GPU",
        );
    }
    if let Some(PcieLink { width, most }) = gpu.pcie.filter(|link| link.width < link.most) {
        let message = format!("PCIe link has {width} of {most} lanes");
        add(Level::Warning, "pcie", message, "reseat the card or its riser");
    }
    if let Some(links) = gpu.nvlinks.filter(|links| links.up < most_links) {
        let message = format!("{} NVLinks up, {most_links} on another GPU of this node", links.up);
        add(
            Level::Failure,
            "nvlink",
            message,
            "reset the GPUs and restart nvidia-fabricmanager; check the cables",
        );
    }
    if !gpu.processes.is_empty() {
        let pids = gpu.processes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let noun = if gpu.processes.len() == 1 { "process" } else { "processes" };
        let message = format!("in use by {noun} {pids}");
        add(
            Level::Warning,
            "processes",
            message,
            "they take memory and compute time from a job; kill them if they are left over",
        );
    }
    all
}

/// Returns the findings about Xid errors: the newest error of each number and GPU. `xids` is `None` if the kernel log
/// cannot be read.
pub fn xid_findings(node: &NodeReadings, xids: Option<&[Xid]>) -> Vec<Finding> {
    let Some(xids) = xids else {
        let message = "Xid errors are unknown: the kernel's log cannot be read";
        return vec![
            Finding::of_node(Level::Warning, "xid", message)
                .with_help("run as root, or look at `journalctl -k`"),
        ];
    };
    let mut all = Vec::new();
    for gpu in &node.gpus {
        let mut own: Vec<&Xid> = xids.iter().filter(|xid| Some(&xid.bus) == gpu.bus.as_ref()).collect();
        own.sort_by_key(|xid| (xid.number, xid.age));
        own.dedup_by_key(|xid| xid.number);
        for Xid { number, age, .. } in own {
            let fault = FAULTS.iter().find(|(known, _)| known == number).map(|(_, meaning)| *meaning);
            let meaning = fault.unwrap_or("usually an error of the program");
            let message = format!("Xid {number} {} min ago: {meaning}", age.as_secs() / 60);
            let is_failure = fault.is_some() && *age < RECENT_FAULT;
            let level = if is_failure { Level::Failure } else { Level::Warning };
            let help = "see NVIDIA's catalog of Xid errors; drain the GPU if the error recurs";
            all.push(Finding::of_gpu(level, &gpu.name, "xid", message).with_help(help));
        }
    }
    all
}

#[cfg(test)]
mod tests;
