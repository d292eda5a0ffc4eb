//! A launch of any command: torchrun's options with all defaults applied. Pure data: the command line parses it, the
//! agent acts on it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

/// What to start, and how to supervise it.
#[derive(Clone, Debug)]
pub struct CommandSpec {
    /// Name of its runs in directories and in `xlaunch status`: the file name of the script or program, without
    /// extension.
    pub name: String,
    /// Program and arguments of every worker.
    pub argv: Vec<OsString>,
    /// `ROLE_NAME`, and part of the prefix of output lines.
    pub role: String,
    /// `TORCHELASTIC_RUN_ID` if the user chose one.
    pub run_id: Option<String>,
    /// Workers on this node.
    pub nproc: u32,
    /// `MASTER_ADDR`.
    pub master_addr: String,
    /// `MASTER_PORT` if the user chose one; otherwise every attempt gets a free port.
    pub master_port: Option<u16>,
    /// One GPU per worker by `CUDA_VISIBLE_DEVICES`, and `LOCAL_RANK` 0 for all.
    pub virtual_local_rank: bool,
    /// CPU affinity of the workers; `None` leaves them unbound.
    pub binding: Option<Binding>,
    /// Which failures lead to a restart.
    pub restarts: Restarts,
    /// Time between SIGTERM and SIGKILL.
    pub shutdown_timeout: Duration,
    /// Signals to xlaunch that stop the job.
    pub signals: Vec<Signal>,
    /// Exit with the root cause's code instead of 1.
    pub propagate_exit_code: bool,
    /// A rank that neither prints nor uses CPU or GPU for this long is reported.
    pub stall_timeout: Duration,
    /// Where the output of workers goes.
    pub logs: LogOptions,
}

/// Which failures lead to a restart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restarts {
    /// Maximum number of restarts.
    pub most: u32,
    /// Exit codes after which there is none.
    pub not_after: BTreeSet<i32>,
}

/// CPU affinity of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// All cores of its GPU's NUMA node; without GPUs the nodes are distributed over the ranks.
    Node,
    /// All cores of its socket.
    Socket,
    /// A share of its NUMA node's cores, disjoint from those of other workers.
    Exclusive,
    /// Cores that share a last-level cache: one such group per worker of a node.
    CoreComplex,
}

/// Where the output of workers goes.
#[derive(Clone, Debug, Default)]
pub struct LogOptions {
    /// Logs are kept below this directory; without it they are removed with the run.
    pub dir: Option<PathBuf>,
    /// Streams that go to files only.
    pub redirects: PerRank,
    /// Streams that go to files and to the console.
    pub tee: PerRank,
    /// Local ranks whose output is shown on the console; `None` for all.
    pub shown: Option<BTreeSet<u32>>,
    /// Lines of stdout that contain any of these are copied to `filtered_stdout.log` of the attempt.
    pub stdout_filters: Vec<String>,
    /// Lines of stderr that contain any of these are copied to `filtered_stderr.log` of the attempt.
    pub stderr_filters: Vec<String>,
    /// Template of the prefix of lines on the console: `${role_name}`, `${local_rank}`, `${rank}`, `${hostname}`.
    pub prefix: Option<String>,
    /// A log file of this size is renamed to `NAME.1`, which replaces an earlier one.
    pub rotate_bytes: Option<u64>,
}

/// Streams, by local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerRank {
    /// For ranks without an entry in `ranks`.
    pub all: Streams,
    /// By local rank.
    pub ranks: BTreeMap<u32, Streams>,
}

impl PerRank {
    /// The streams of this local rank.
    pub fn of(&self, local_rank: u32) -> Streams {
        self.ranks.get(&local_rank).copied().unwrap_or(self.all)
    }
}

/// A subset of the two output streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
}

/// Signals that may stop a job, by name.
pub const SIGNALS: [(&str, Signal); 8] = [
    ("SIGHUP", Signal::HUP),
    ("SIGINT", Signal::INT),
    ("SIGQUIT", Signal::QUIT),
    ("SIGUSR1", Signal::USR1),
    ("SIGUSR2", Signal::USR2),
    ("SIGALRM", Signal::ALARM),
    ("SIGTERM", Signal::TERM),
    ("SIGXCPU", Signal::XCPU),
];

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A launch of one `true`.
    pub fn spec(name: &str) -> CommandSpec {
        CommandSpec {
            name: name.into(),
            argv: vec!["true".into()],
            role: "default".into(),
            run_id: None,
            nproc: 1,
            master_addr: "127.0.0.1".into(),
            master_port: None,
            virtual_local_rank: false,
            binding: None,
            restarts: Restarts { most: 0, not_after: BTreeSet::new() },
            shutdown_timeout: Duration::from_secs(30),
            signals: Vec::new(),
            propagate_exit_code: false,
            stall_timeout: Duration::from_secs(300),
            logs: LogOptions::default(),
        }
    }
}
