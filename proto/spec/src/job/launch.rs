//! The section `[launch]`.

use serde::{Deserialize, Serialize};

/// Start and supervision of workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LaunchSection {
    /// Number of workers (ranks) to start; `--nproc` overrides it. Default: one per GPU, or 1 without GPUs.
    pub nproc: Option<u32>,
    /// GPUs to use, by index (as nvidia-smi numbers them) or UUID. Default: all GPUs that CUDA_VISIBLE_DEVICES allows,
    /// in its order.
    pub devices: Vec<String>,
    /// Maximum number of restarts of all workers after failures. Restarts resume from the newest checkpoint, so set
    /// `checkpoint.every` too. The job also fails after three consecutive attempts without progress.
    pub max_restarts: u32,
    /// Seconds within which restarts count towards `max_restarts`; older restarts are forgotten. 0 counts all restarts
    /// of the job.
    pub restart_window: f64,
    /// Seconds that workers get to stop with a checkpoint before they are killed. The timeout starts again whenever an
    /// evaluation or the checkpoint makes progress.
    pub shutdown_timeout: f64,
    /// Maximum total seconds that workers get to stop, whatever progress they make. Keep it below the time that your
    /// scheduler allows between SIGTERM and SIGKILL. The daemon limits it to `jobs.max_grace`.
    pub shutdown_timeout_max: f64,
    /// Seconds within which all ranks must join the rendezvous, and again to open the communicator (NCCL) after it.
    /// Increase it if opening data or reading a checkpoint takes longer.
    pub join_timeout: f64,
    /// Action when a rank hangs and blocks the others.
    pub hang: OnHang,
    /// Seconds without a completed step after which a job counts as hung. 0 means 60. Jobs with slow steps get five
    /// times the duration of those steps; checkpoints, and work that compiles kernels on a GPU, get several minutes.
    pub hang_timeout: f64,
    /// Check of the job's GPUs before every attempt, which takes at most 200 ms. A faulty GPU ends the job with exit
    /// code 76.
    pub doctor: DoctorMode,
}

/// Action when a rank hangs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnHang {
    /// Report the rank, with evidence in `hang.txt` beside its logs, and end the attempt. The job is restarted if
    /// `launch.max_restarts` allows it.
    #[default]
    Restart,
    /// Only report the rank, with the same evidence.
    Report,
}

/// Check of GPUs before an attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DoctorMode {
    /// Check the driver's counters, as `xlaunch doctor --quick` does.
    #[default]
    Quick,
    /// No check.
    Off,
}

impl Default for LaunchSection {
    fn default() -> Self {
        Self {
            nproc: None,
            devices: Vec::new(),
            max_restarts: 0,
            restart_window: 0.0,
            shutdown_timeout: 30.0,
            shutdown_timeout_max: 600.0,
            join_timeout: 120.0,
            hang: OnHang::Restart,
            hang_timeout: 0.0,
            doctor: DoctorMode::default(),
        }
    }
}
