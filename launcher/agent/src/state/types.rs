//! Events, actions and outcomes of the state machine.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::{GroupEnd, NodeEnded, NodeFailed, Restarting};

use crate::spawn::Exit;

/// The properties of a job that decide how it ends.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Number of workers on this node.
    pub workers: u32,
    /// What the workers are.
    pub kind: Kind,
    /// Failures may be followed by restarts.
    pub has_restarts: bool,
    /// Exit codes of a command's workers that mean that the job was preempted: it ends, to be queued again.
    pub requeue_codes: BTreeSet<i32>,
    /// Between the request to stop, or the signal that ends a command's workers, and SIGKILL.
    pub shutdown_timeout: Duration,
    /// The same for a trainer whose workers save or evaluate: they get `shutdown_timeout` after each sign of
    /// progress, and this long in all.
    pub shutdown_timeout_max: Duration,
    /// Exit with the code of the root cause.
    pub propagate_exit_code: bool,
}

/// What workers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Ranks of the built-in trainer: they join a rendezvous, can stop with a checkpoint, and use xlaunch's exit codes.
    Trainer,
    /// Processes of any command: none of this holds, and their exit codes mean what they like.
    Command,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker could not be started.
    SpawnFailed {
        /// The rank without a process.
        rank: u32,
        /// The system's error message.
        reason: String,
        /// What xlaunch exits with.
        exit: ExitCode,
    },
    /// The coordinator begins an attempt.
    Begin {
        /// From 0.
        attempt: u32,
        /// Of this node.
        node_rank: u32,
        /// The rank of local rank 0.
        first_rank: u32,
    },
    /// A failure on another node, for the user: the workers are to be ended.
    PeerFailed(String),
    /// The group changes: the workers are to save, and end.
    Pause(String),
    /// The failed attempt will be followed by another one.
    Restarting(Restarting),
    /// The job is over.
    GroupEnded(GroupEnd),
    /// The coordinator may consider this node lost soon, and start its workers elsewhere.
    CutOff(String),
    /// The rendezvous is complete.
    AllJoined,
    /// The rendezvous failed, or the ranks did not open their communicator after it, for this reason.
    RendezvousFailed(String),
    /// A worker is about to exit for an error of its own, after which ranks that lose it will fail, too; or, with
    /// [`ExitCode::Retryable`], because it has lost a peer.
    OwnError {
        /// The rank.
        rank: u32,
        /// One line.
        message: String,
        /// The code with which it is about to exit.
        exit: ExitCode,
    },
    /// Ranks whose parameters differ from those of the others, with their devices. Every rank reports it.
    ReplicasDiffer {
        /// All ranks if there is no majority.
        ranks: Vec<(u32, String)>,
        /// One line.
        message: String,
    },
    /// A worker of a trainer has begun to report.
    SessionOpened {
        /// The rank.
        rank: u32,
    },
    /// A worker of a trainer has done all its work, and is about to exit.
    Finished {
        /// The rank.
        rank: u32,
    },
    /// All reports of a worker have been read.
    SessionClosed {
        /// The rank.
        rank: u32,
    },
    /// Ranks of a running job hang, and are to be ended.
    Hung {
        /// Not empty; the first is the root cause.
        ranks: Vec<u32>,
        /// One line about the first rank.
        message: String,
    },
    /// The ranks that hang have no stacks to print.
    NoStacks,
    /// A worker has made progress in saving or evaluating.
    Progress,
    /// The job is further than ever: a step beyond the furthest of all attempts, or a heartbeat of a command.
    Advanced {
        /// The job counts its steps, so a long life alone is not progress from now on.
        by_steps: bool,
    },
    /// The OOM killer has ended this rank, whose exit follows.
    OomKilled {
        /// The rank.
        rank: u32,
    },
    /// What a command's worker, whose exit follows, has written about its failure.
    Symptom {
        /// The rank.
        rank: u32,
        /// One line.
        error: String,
        /// It has lost the connection to another rank.
        lost_peer: bool,
        /// When it wrote that.
        at: Instant,
    },
    /// A checkpoint is complete.
    Checkpoint {
        /// Steps completed.
        step: u64,
        /// Its directory.
        path: PathBuf,
    },
    /// Rank 0 has reported a checkpoint as complete that cannot be read back, for this reason. Until another one
    /// follows, nothing is saved.
    CheckpointIncomplete(String),
    /// The process of a worker has been killed by a signal. [`Exited`](Self::Exited) follows when it is gone, which for
    /// one that uses a GPU takes up to a second.
    Killed {
        /// The rank.
        rank: u32,
        /// The signal.
        signal: i32,
    },
    /// The process of a worker has exited: exactly once for every worker that was started.
    Exited {
        /// The rank of the process.
        rank: u32,
        /// How it ended.
        exit: Exit,
    },
    /// A stop was requested.
    Stop(StopCause),
    /// The deadline has passed.
    Tick,
}

/// Where a request to stop came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// A signal to xlaunch. A second SIGINT kills the workers.
    Signal(i32),
    /// The gRPC call `Stop`.
    Call,
    /// The group changes: another attempt follows.
    Pause,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Tell the coordinator of the first failure of an attempt.
    ReportFailure(NodeFailed),
    /// Tell the coordinator that all workers of an attempt are gone.
    ReportEnd(NodeEnded),
    /// Start all workers of an attempt.
    Start {
        /// From 0.
        attempt: u32,
    },
    /// Start the processes of the next attempt, if there is one: they wait for [`Start`](Self::Start) before they touch
    /// a GPU.
    Prepare {
        /// From 1.
        attempt: u32,
    },
    /// Ask all workers to stop at the next step boundary, with a checkpoint.
    RequestStop,
    /// Send a signal to the process groups of all workers.
    Signal(i32),
    /// Let these ranks print the stacks of their Python programs, which ends them. [`Event::NoStacks`] follows if none
    /// runs Python.
    PrintStacks(Vec<u32>),
    /// Send SIGKILL to everything that the workers started.
    Kill,
    /// Show the user a line.
    Notify(String),
    /// Record that an attempt has failed and another follows.
    Restart {
        /// The failed attempt, from 0.
        attempt: u32,
        /// The rank of the root cause; `None` if it concerns the whole group.
        rank: Option<u32>,
        /// The message of the root cause.
        cause: String,
        /// The report needs the evidence of this attempt if none of the next ones makes progress.
        keep_evidence: bool,
        /// What it is counted as: one of [`RESTART_CAUSES`](xlaunch_proto::accounting::RESTART_CAUSES).
        counted_as: &'static str,
    },
    /// The job is over.
    End(Outcome),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What `xlaunch` exits with.
    pub exit: ExitCode,
    /// The root cause of a failure.
    pub root: Option<Failure>,
    /// All other failures of the same attempt.
    pub others: Vec<Failure>,
    /// That is the last attempt whose evidence was to be kept, in place of the last attempt.
    pub of_kept_attempt: bool,
    /// A stop was requested before anything failed.
    pub stopped: bool,
    /// The rank of local rank 0.
    pub first_rank: u32,
    /// The root cause if it is on another node, with node and rank.
    pub elsewhere: Option<String>,
    /// What remains of a training job that was stopped without a checkpoint of its last step, or how the last attempt
    /// failed if that is not the root cause.
    pub note: Option<String>,
}

/// The failure of one rank, or of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The local rank; `None` for a failure of the whole group.
    pub rank: Option<u32>,
    /// What happened, for the user.
    pub message: String,
    /// The error that a command's rank had written before it exited, in one line.
    pub(crate) error: Option<String>,
    /// How the process ended; `None` without a process.
    pub status: Option<Exit>,
    pub(crate) exit: ExitCode,
    /// The rank hung and xlaunch ended it, so its exit status says nothing about the cause.
    pub(crate) hung: bool,
    /// The rank has exited with a code that means so.
    pub(crate) preempted: bool,
    /// Another failure or a stop has led to this one: a lost peer, or a signal from xlaunch.
    pub(crate) consequence: bool,
    /// Neither the job's program nor its GPU is at fault: the same job may succeed elsewhere or later.
    pub(crate) infrastructure: bool,
    /// It happened on another node.
    pub(crate) elsewhere: bool,
}

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No workers exist: the coordinator begins the next attempt, or ends the job.
    Waiting,
    /// Workers start and join.
    Rendezvous,
    /// Workers work.
    Running,
    /// Workers are being stopped.
    Stopping,
    /// The job is over.
    Ended,
}
