//! End of a job on this node: one value from the state machine to the report, the summary of the run, the result for
//! the daemon, and the exit code.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::SystemTime;

use xlaunch_host::spawn::{Exit, OomKills};
use xlaunch_host::task_limit::Reached;
use xlaunch_proto::v1::StatusReply;
use xlaunch_spec::exit::ExitCode;

/// The ending of a job. The state machine decides how the job has ended; the driver adds what it has collected.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ending {
    /// Exit code of `xlaunch`.
    pub exit: ExitCode,
    /// The root cause of a failure, if it is on this node.
    pub root: Option<Failure>,
    /// All other failures of the same attempt.
    pub others: Vec<Failure>,
    /// The failures are those of the attempt whose evidence was kept, not of the last attempt.
    pub of_kept_attempt: bool,
    /// A stop was requested before anything failed.
    pub stopped: bool,
    /// The job continues without this node.
    pub left: bool,
    /// Global rank of local rank 0.
    pub first_rank: u32,
    /// Description of the root cause, with node and rank, if it is on another node.
    pub elsewhere: Option<String>,
    /// The newest checkpoint of a training job that was stopped without a checkpoint of its last step, or how the last
    /// attempt failed if that is not the root cause.
    pub note: Option<String>,
    /// Evidence by local rank; empty unless the job failed on this node.
    pub evidence: Vec<Evidence>,
    /// The last status, with its history.
    pub status: StatusReply,
    /// Highest memory use observed for all ranks together.
    pub peak_memory_bytes: u64,
    /// This node had rank 0 in its last attempt.
    pub leads: bool,
    /// Lines for the user about lost output of the workers.
    pub losses: Vec<String>,
    /// Directory of the logs, if they are kept.
    pub logs: Option<PathBuf>,
    /// Summary of the training, for stdout.
    pub summary: String,
}

/// The failure of one rank, or of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Local rank; `None` for a failure of the whole group.
    pub rank: Option<u32>,
    /// Message for the user.
    pub message: String,
    /// Error that a command's rank wrote before it exited, in one line.
    pub(crate) error: Option<String>,
    /// Exit status; `None` without a process.
    pub status: Option<Exit>,
    pub(crate) exit: ExitCode,
    /// The rank hung and xlaunch ended it, so its exit status says nothing about the cause.
    pub(crate) hung: bool,
    /// The rank has exited with a code that means preemption.
    pub(crate) preempted: bool,
    /// A consequence of another failure or of a stop: a lost peer, or a signal from xlaunch.
    pub(crate) consequence: bool,
    /// Neither the job's program nor its GPU is at fault: the same job may succeed elsewhere or later.
    pub(crate) infrastructure: bool,
    /// The failure happened on another node.
    pub(crate) elsewhere: bool,
}

/// Evidence about a rank in addition to its [`Failure`]. The default is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evidence {
    /// Process id; 0 if the rank was never started.
    pub pid: u32,
    pub host: String,
    /// Rank of the node, if the job has several.
    pub node_rank: Option<u32>,
    /// Exit status of the process. `None` if it still runs, and for exit codes of the built-in trainer, which the
    /// failure's message explains.
    pub exit: Option<Exit>,
    pub exit_time: Option<SystemTime>,
    /// True if xlaunch had sent the process a signal before it exited.
    pub signalled: bool,
    /// Last lines of stderr, oldest first.
    pub stderr: Vec<String>,
    /// Number of these lines that are too old to be about the exit.
    pub old_lines: usize,
    /// The contents of `TORCHELASTIC_ERROR_FILE`.
    pub error_file: Option<String>,
    /// File with the evidence about the rank's hang, or about its wait for a hung rank.
    pub hang_file: Option<PathBuf>,
    /// OOM kills during the attempt.
    pub oom_kills: OomKills,
    /// Hard limit of CPU time in seconds, if there is one.
    pub cpu_limit: Option<u64>,
    /// Why it did not start.
    pub spawn_failure: Option<SpawnFailure>,
    /// The program that was started; empty for the built-in trainer.
    pub program: OsString,
    /// The `PATH` that was searched for the program.
    pub search_path: OsString,
}

/// The error of the system call that was to start a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpawnFailure {
    /// System error number.
    pub errno: i32,
    /// The limit that has caused it, if it is known.
    pub limit: Option<Reached>,
    /// First line of the program; `None` if the file cannot be read.
    pub first_line: Option<String>,
}

impl Ending {
    /// An ending without failures.
    pub fn new(exit: ExitCode) -> Self {
        Self { exit, ..Self::default() }
    }

    /// Returns the rank of the root cause, if it is a rank of this node.
    pub fn rank(&self) -> Option<u32> {
        Some(self.first_rank + self.root.as_ref()?.rank?)
    }

    pub(crate) fn evidence_of(&self, failure: &Failure) -> Option<&Evidence> {
        self.evidence.get(failure.rank? as usize)
    }
}
