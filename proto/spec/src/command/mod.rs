//! The description of a command to launch: the content of a torchrun-style command line, independent of any node.
//!
//! ```text
//! command line --flags, PET_*--> CommandSpec --JSON--> daemon (queue, disk) --JSON--> agent --resolve--> argv, workers
//! ```
//! The command line is parsed once, where the user typed it. Values that depend on the node that runs the command are
//! left unresolved: the number of workers for `auto`, `gpu` and `cpu`, and, unless the same node runs them, the
//! interpreter of Python programs.

mod check;
mod group;
mod os_text;
mod signal;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use group::{
    Backend, Endpoint, GroupSpec, MAX_ENDPOINT_PORTS, MAX_LOSS_TIMEOUT, MAX_NODES, MIN_KEEP_ALIVE_INTERVAL,
    MIN_LOSS_TIMEOUT, NodeCount, Security,
};
pub use os_text::quote_line;
pub use signal::Signal;

/// Version of the serialised form.
pub const COMMAND_SPEC_VERSION: u32 = 1;
/// Maximum number of workers on a node.
pub const MAX_NPROC: u32 = 1 << 16;
/// Maximum timeout. It can be added to any instant without overflow.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(1_000_000_000);

/// The restart policy of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// Maximum number of restarts.
    pub most: u32,
    /// Sliding window in which restarts are counted; zero counts those of the whole job.
    pub window: Duration,
    /// Exit codes that are never restarted.
    pub not_after: BTreeSet<i32>,
    /// Exit codes after which a restart is immediate and not counted, because their cause does not recur.
    pub free: BTreeSet<i32>,
}

/// A command, and how to launch and supervise its workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// Workers per node.
    pub nproc: Nproc,
    /// The program that each worker runs.
    pub program: Program,
    /// The Python interpreter of the program, for a daemon on the node where the command line was typed. Default: found
    /// where the command runs.
    #[serde(default, with = "os_text::path")]
    pub interpreter: Option<PathBuf>,
    /// Arguments of the program. `$local_rank` and `${local_rank}` are replaced by the worker's local rank, and `$$` in
    /// arguments of Python programs by `$`.
    #[serde(with = "os_text::list")]
    pub arguments: Vec<OsString>,
    /// Python modules that one process per node imports before it forks the workers. Default: none, and workers are
    /// spawned.
    #[serde(default)]
    pub preload: Vec<String>,
    /// `ROLE_NAME`, and part of the prefix of log lines.
    pub role: String,
    /// `TORCHELASTIC_RUN_ID`. Default: random.
    pub run_id: Option<String>,
    /// `MASTER_ADDR`.
    pub master_addr: String,
    /// `MASTER_PORT`. Default: a free port for every attempt.
    pub master_port: Option<u16>,
    /// True to restrict each worker to one GPU with `CUDA_VISIBLE_DEVICES`, and to set `LOCAL_RANK` to 0 for all.
    pub virtual_local_rank: bool,
    /// CPU affinity of the workers. Default: none.
    pub binding: Option<Binding>,
    /// Maximum number of restarts after failures.
    pub max_restarts: u32,
    /// Exit codes of workers after which there is no restart.
    pub no_restart_codes: BTreeSet<i32>,
    /// Exit codes of workers that mean that the job was preempted: it ends without a restart and can be queued again.
    #[serde(default)]
    pub requeue_codes: BTreeSet<i32>,
    /// Time between SIGTERM and SIGKILL.
    pub shutdown_timeout: Duration,
    /// Signals to xlaunch that terminate the job.
    pub signals: Vec<Signal>,
    /// True to exit with the code of the worker that failed first instead of 1.
    pub propagate_exit_code: bool,
    /// Time after which a rank is reported that produces no output and uses neither CPU nor GPU.
    pub stall_timeout: Duration,
    /// Time after which the attempt is ended if a rank that has sent a heartbeat sends no further one; zero: never.
    /// Default: adapts to the intervals between heartbeats.
    #[serde(default)]
    pub hang_timeout: Option<Duration>,
    /// True to turn on PyTorch's flight recorder in the workers.
    #[serde(default)]
    pub flight_recorder: bool,
    /// Destinations of the workers' output.
    pub logs: LogOptions,
}

/// Workers per node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Nproc {
    /// One per GPU, or one per core on a node without GPUs.
    Auto,
    /// One per GPU.
    Gpu,
    /// One per core.
    Cpu,
    /// This many.
    Count(u32),
}

impl Nproc {
    /// Returns the number of workers on a node with these GPUs (or the reason why they are unknown) and cores.
    pub fn resolve(self, gpus: &Result<u32, String>, cores: u32) -> Result<u32, String> {
        match (self, gpus) {
            (Self::Count(count), _) => Ok(count),
            (Self::Auto, Ok(gpus)) if *gpus > 0 => Ok(*gpus),
            (Self::Auto | Self::Cpu, _) => Ok(cores),
            (Self::Gpu, Ok(0)) => Err("--nproc-per-node gpu: no GPU is visible".into()),
            (Self::Gpu, Ok(gpus)) => Ok(*gpus),
            (Self::Gpu, Err(reason)) => Err(format!("--nproc-per-node gpu: no GPU was found: {reason}")),
        }
    }
}

/// The program of a worker. All kinds but `Binary` need a Python interpreter, which is found on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// `python SCRIPT`.
    Script(#[serde(with = "os_text")] OsString),
    /// `python -m MODULE`.
    Module(#[serde(with = "os_text")] OsString),
    /// A Python script, executed by `runpy.run_path`.
    RunPath(#[serde(with = "os_text")] OsString),
    /// An executable.
    Binary(#[serde(with = "os_text")] OsString),
}

impl Program {
    /// Returns the script, module or executable.
    pub fn target(&self) -> &OsStr {
        match self {
            Self::Script(target) | Self::Module(target) | Self::RunPath(target) | Self::Binary(target) => {
                target
            }
        }
    }
}

/// CPU affinity of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Binding {
    /// All cores of the NUMA node of its GPU; without GPUs, of the NUMA node assigned to its rank.
    Node,
    /// All cores of the socket of that NUMA node.
    Socket,
    /// An exclusive share of the cores of that NUMA node.
    Exclusive,
    /// A group of cores that share a last-level cache; each worker of a NUMA node gets a different group.
    CoreComplex,
}

/// Destinations of the output of workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogOptions {
    /// Directory below which log files are kept; see [`kept_in`](Self::kept_in).
    #[serde(with = "os_text::path")]
    pub dir: Option<PathBuf>,
    /// Streams that are written to files but not to the console.
    pub redirects: PerRank,
    /// Streams that are written to files and to the console.
    pub tee: PerRank,
    /// Local ranks whose output is shown on the console. Default: all.
    pub shown: Option<BTreeSet<u32>>,
    /// Lines of stdout that contain any of these are copied to `filtered_stdout.log` of the attempt.
    pub stdout_filters: Vec<String>,
    /// Lines of stderr that contain any of these are copied to `filtered_stderr.log` of the attempt.
    pub stderr_filters: Vec<String>,
    /// Prefix of lines on the console, in which `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}` are
    /// replaced.
    pub prefix: Option<String>,
    /// Size at which a log file is renamed to `NAME.1`, replacing the previous one.
    pub rotate_bytes: Option<u64>,
}

impl LogOptions {
    /// Returns the directory below which log files are kept. By default, and with torchrun's `/dev/null`, they are
    /// deleted with the run.
    pub fn kept_in(&self) -> Option<&Path> {
        self.dir.as_deref().filter(|dir| *dir != Path::new("/dev/null"))
    }
}

/// A choice of streams for each local rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerRank {
    /// The choice for ranks that are not in `ranks`.
    pub all: Streams,
    /// The choices for single local ranks.
    pub ranks: BTreeMap<u32, Streams>,
}

impl PerRank {
    /// Returns the choice for this local rank.
    pub fn of(&self, local_rank: u32) -> Streams {
        self.ranks.get(&local_rank).copied().unwrap_or(self.all)
    }
}

/// A choice of a worker's two output streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "named after the streams")]
pub struct Streams {
    pub stdout: bool,
    pub stderr: bool,
}

impl CommandSpec {
    /// Creates the description of a launch of one worker, with torchrun's defaults for everything else.
    pub fn new(program: Program, arguments: Vec<OsString>) -> Self {
        Self {
            nproc: Nproc::Count(1),
            program,
            interpreter: None,
            arguments,
            preload: Vec::new(),
            role: "default".into(),
            run_id: None,
            master_addr: "127.0.0.1".into(),
            master_port: None,
            virtual_local_rank: false,
            binding: None,
            max_restarts: 0,
            no_restart_codes: BTreeSet::new(),
            requeue_codes: BTreeSet::new(),
            shutdown_timeout: Duration::from_secs(30),
            signals: vec![Signal::Term, Signal::Int, Signal::Hup, Signal::Quit],
            propagate_exit_code: false,
            stall_timeout: Duration::from_secs(300),
            hang_timeout: None,
            flight_recorder: false,
            logs: LogOptions::default(),
        }
    }

    /// Returns the name of the command's runs: the program's file name without extension, or the full name of a module.
    pub fn name(&self) -> String {
        let stem = match &self.program {
            Program::Module(module) => Some(module.as_os_str()),
            program => Path::new(program.target()).file_stem(),
        };
        stem.map_or_else(|| "command".into(), |stem| stem.to_string_lossy().replace('/', "-"))
    }

    /// Returns the serialised form.
    pub fn to_json(&self) -> Vec<u8> {
        // Plain data with string keys: serialisation cannot fail.
        serde_json::to_vec(&Versioned { version: COMMAND_SPEC_VERSION, spec: self }).unwrap_or_default()
    }

    /// Parses the form of [`to_json`](Self::to_json) and checks the result.
    pub fn from_json(json: &[u8]) -> Result<Self, CommandSpecError> {
        // The version is read first, because the rest of another version may have any form.
        let Header { version } = serde_json::from_slice(json)?;
        if version != COMMAND_SPEC_VERSION {
            return Err(CommandSpecError::Version(version));
        }
        let Versioned::<Self> { spec, .. } = serde_json::from_slice(json)?;
        spec.check()?;
        Ok(spec)
    }
}

/// Written as the command line of a worker, quoted for a shell, with `python` for the interpreter.
impl fmt::Display for CommandSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let interpreter: &[&str] = match self.program {
            Program::Script(_) | Program::RunPath(_) => &["python"],
            Program::Module(_) => &["python", "-m"],
            Program::Binary(_) => &[],
        };
        let words = interpreter.iter().map(OsStr::new).chain([self.program.target()]);
        f.write_str(&quote_line(words.chain(self.arguments.iter().map(OsString::as_os_str))))
    }
}

/// Why a command description cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CommandSpecError {
    /// The text is not a command description in JSON.
    #[error("invalid command description: {0}")]
    Json(#[from] serde_json::Error),
    /// The description was written by another version of xlaunch.
    #[error("command description has version {0}, but this build reads version {COMMAND_SPEC_VERSION}")]
    Version(u32),
    /// A value out of bounds.
    #[error("{field} {problem}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// The problem, as the end of a sentence that starts with the field's name.
        problem: String,
    },
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    spec: T,
}

#[cfg(test)]
mod tests;
