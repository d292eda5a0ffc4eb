//! Rules, events and actions of the state machine.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::{GroupEnd, NodeEnded, NodeFailed, Restarting};
use xlaunch_spec::exit::ExitCode;

use crate::ending::Ending;
use xlaunch_host::spawn::Exit;

/// The properties of a job that decide how it ends.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Number of workers on this node.
    pub workers: u32,
    pub kind: Kind,
    /// Failures may lead to restarts.
    pub has_restarts: bool,
    /// Exit codes of a command's workers that mean preemption: the job ends, to be queued again.
    pub requeue_codes: BTreeSet<i32>,
    /// Time between the request to stop, or the signal that ends a command's workers, and SIGKILL.
    pub shutdown_timeout: Duration,
    /// Limit for a trainer whose workers save or evaluate: each sign of progress gives them another `shutdown_timeout`,
    /// up to this time in total.
    pub shutdown_timeout_max: Duration,
    /// Exit with the exit code of the root cause.
    pub propagate_exit_code: bool,
}

/// The kind of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ranks of the built-in trainer: they join a rendezvous, can stop with a checkpoint, and use xlaunch's exit codes.
    Trainer,
    /// Processes of any command. They do none of this, and their exit codes have their own meanings.
    Command,
}

/// An event for the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker could not be started.
    SpawnFailed {
        rank: u32,
        /// The system's error message.
        reason: String,
        /// Exit code of xlaunch.
        exit: ExitCode,
    },
    /// The coordinator begins an attempt.
    Begin {
        /// Number of the attempt, from 0.
        attempt: u32,
        node_rank: u32,
        /// Global rank of local rank 0.
        first_rank: u32,
    },
    /// A failure on another node, described for the user: the workers must be ended.
    PeerFailed(String),
    /// The group changes: the workers must save and end.
    Pause(String),
    /// The failed attempt will be followed by another.
    Restarting(Restarting),
    /// The job is over.
    GroupEnded(GroupEnd),
    /// The coordinator may consider this node lost soon, and start its workers elsewhere.
    CutOff(String),
    /// The rendezvous is complete.
    AllJoined,
    /// The rendezvous failed, or the ranks did not open their communicator after it, for this reason.
    RendezvousFailed(String),
    /// A worker is about to exit because of an error of its own, after which ranks that lose it will fail too; or, with
    /// [`ExitCode::Retryable`], because it has lost a peer.
    OwnError {
        rank: u32,
        /// Error message, in one line.
        message: String,
        /// The code with which it is about to exit.
        exit: ExitCode,
    },
    /// Ranks whose parameters differ from those of the others, with their devices. Every rank reports this.
    ReplicasDiffer {
        /// The differing ranks; all ranks if there is no majority.
        ranks: Vec<(u32, String)>,
        /// Message, in one line.
        message: String,
    },
    /// A worker of a trainer has begun to report.
    SessionOpened { rank: u32 },
    /// A worker of a trainer has done all its work, and is about to exit.
    Finished { rank: u32 },
    /// All reports of a worker have been read.
    SessionClosed { rank: u32 },
    /// Ranks of a running job hang, and must be ended.
    Hung {
        /// At least one rank; the first is the root cause.
        ranks: Vec<u32>,
        /// One line about the first rank.
        message: String,
    },
    /// The hanging ranks have no stacks to print.
    NoStacks,
    /// A worker has made progress in saving or evaluating.
    Progress,
    /// The job has got further than ever before: a step past the furthest of all attempts, or a heartbeat of a command.
    Advanced {
        /// The job counts steps, so from now on a long life alone is not progress.
        by_steps: bool,
    },
    /// The OOM killer has ended this rank, whose exit follows.
    OomKilled { rank: u32 },
    /// Error output of a command's worker whose exit follows.
    Symptom {
        rank: u32,
        /// The error, in one line.
        error: String,
        /// The rank has lost the connection to another rank.
        lost_peer: bool,
        /// Time at which it was written.
        at: Instant,
    },
    /// A checkpoint is complete.
    Checkpoint {
        /// Number of completed steps.
        step: u64,
        /// Directory of the checkpoint.
        path: PathBuf,
    },
    /// Rank 0 has reported a checkpoint as complete that cannot be read back, for this reason. Nothing counts as saved
    /// until another one follows.
    CheckpointIncomplete(String),
    /// The process of a worker has been killed by a signal. [`Exited`](Self::Exited) follows when it is gone, which
    /// takes up to a second if it uses a GPU.
    Killed { rank: u32, signal: i32 },
    /// The process of a worker has exited: exactly once for every worker that was started.
    Exited { rank: u32, exit: Exit },
    /// A stop was requested.
    Stop(StopCause),
    /// The deadline has passed.
    Tick,
}

/// Source of a request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// A signal to xlaunch. A second SIGINT kills the workers.
    Signal(i32),
    /// The gRPC call `Stop`.
    Call,
}

/// An action for the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Tell the coordinator about the first failure of an attempt.
    ReportFailure(NodeFailed),
    /// Tell the coordinator that all workers of an attempt are gone.
    ReportEnd(NodeEnded),
    /// Start all workers of an attempt.
    Start {
        /// Number of the attempt, from 0.
        attempt: u32,
    },
    /// Start the processes of the next attempt in advance: they wait for [`Start`](Self::Start) before they touch a
    /// GPU.
    Prepare {
        /// Number of the attempt, from 1.
        attempt: u32,
    },
    /// Ask all workers to stop at the next step boundary, with a checkpoint.
    RequestStop,
    /// Send a signal to the process groups of all workers.
    Signal(i32),
    /// Make these ranks print the stacks of their Python programs, which ends them. [`Event::NoStacks`] follows if none
    /// runs Python.
    PrintStacks(Vec<u32>),
    /// Send SIGKILL to everything that the workers started.
    Kill,
    /// Show the user a line.
    Notify(String),
    /// Record that an attempt has failed and another one follows.
    Restart {
        /// The failed attempt, from 0.
        attempt: u32,
        /// The rank of the root cause; `None` if it concerns the whole group.
        rank: Option<u32>,
        /// The message of the root cause.
        cause: String,
        /// The report needs the evidence of this attempt if none of the following ones makes progress.
        keep_evidence: bool,
        /// Kind of failure that the restart is counted as: one of
        /// [`RESTART_CAUSES`](xlaunch_proto::accounting::RESTART_CAUSES).
        counted_as: &'static str,
    },
    /// The job is over.
    End(Box<Ending>),
}
