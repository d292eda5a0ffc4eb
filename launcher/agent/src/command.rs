//! A launch of any command: what torchrun's options describe, with every default filled in. Pure data: `cli::torchrun` makes
//! it, the agent acts on it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

/// What to start, and how to look after it.
#[derive(Clone, Debug)]
pub struct CommandSpec {
    /// Name of its runs, in directories and in `xlaunch status`: the script's or program's file name without extension.
    pub name: String,
    /// Program and arguments of every worker.
    pub argv: Vec<OsString>,
    /// `ROLE_NAME`, and part of the prefix of its lines.
    pub role: String,
    /// `TORCHELASTIC_RUN_ID` where the user chose one.
    pub run_id: Option<String>,
    /// Workers on this node.
    pub nproc: u32,
    /// `MASTER_ADDR`.
    pub master_addr: String,
    /// `MASTER_PORT` where the user chose one; otherwise a free one is found for every attempt.
    pub master_port: Option<u16>,
    /// One GPU per worker by `CUDA_VISIBLE_DEVICES`, and `LOCAL_RANK` 0 for all.
    pub virtual_local_rank: bool,
    /// Which cores a worker may run on.
    pub binding: Option<Binding>,
    /// When workers are started again.
    pub restarts: Restarts,
    /// Time between SIGTERM and SIGKILL.
    pub shutdown_timeout: Duration,
    /// Signals to xlaunch that end the job.
    pub signals: Vec<Signal>,
    /// Exit with the root cause's code instead of 1.
    pub propagate_exit_code: bool,
    /// A rank that prints nothing and uses neither CPU nor GPU for so long is pointed out.
    pub stall_timeout: Duration,
    /// Where output goes.
    pub logs: LogOptions,
}

/// Which failures are followed by a new attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restarts {
    /// How many at most.
    pub most: u32,
    /// Exit codes that are final.
    pub not_after: BTreeSet<i32>,
}

/// Which cores a worker may run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// All of its GPU's NUMA node; without GPUs, of the node that falls to its rank.
    Node,
    /// All of its socket.
    Socket,
    /// Its share of its NUMA node's cores.
    Exclusive,
    /// Cores that share a last-level cache, one group per worker of a node.
    CoreComplex,
}

/// Where the output of workers goes.
#[derive(Clone, Debug, Default)]
pub struct LogOptions {
    /// Logs are kept below this directory; otherwise they go with the run.
    pub dir: Option<PathBuf>,
    /// What goes to files and not to the console.
    pub redirects: PerRank,
    /// What goes to files and to the console.
    pub tee: PerRank,
    /// Local ranks whose output the console shows; all where it is `None`.
    pub shown: Option<BTreeSet<u32>>,
    /// Lines of stdout with any of these go to `filtered_stdout.log` of the attempt, too.
    pub stdout_filters: Vec<String>,
    /// Lines of stderr with any of these go to `filtered_stderr.log` of the attempt, too.
    pub stderr_filters: Vec<String>,
    /// What a line on the console begins with: `${role_name}`, `${local_rank}`, `${rank}`, `${hostname}` are filled in.
    pub prefix: Option<String>,
    /// A log file that has grown so far is renamed to `NAME.1`, of which there is one.
    pub rotate_bytes: Option<u64>,
}

/// A choice of streams for each local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PerRank {
    /// For ranks that are not named.
    pub all: Streams,
    /// For others.
    pub ranks: BTreeMap<u32, Streams>,
}

impl PerRank {
    /// The choice for this local rank.
    pub fn of(&self, local_rank: u32) -> Streams {
        self.ranks.get(&local_rank).copied().unwrap_or(self.all)
    }
}

/// Some of a worker's two streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
}

/// Signals that may end a job, by name.
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

    /// A launch of one `true`, for tests of what launches have in common.
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
