//! Events, actions and outcomes of the state machine.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use xlaunch_proto::exit::ExitCode;

use crate::command::Restarts;
use crate::spawn::Exit;

/// The properties of a job that decide how it ends.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Number of workers.
    pub world: u32,
    /// What the workers are.
    pub kind: Kind,
    /// Which failures lead to a restart.
    pub restarts: Restarts,
    /// Exit codes of a command's workers that mean that the job was preempted: it ends, to be queued again.
    pub requeue_codes: BTreeSet<i32>,
    /// Between the request to stop, or the signal that ends a command's workers, and SIGKILL.
    pub shutdown_timeout: Duration,
    /// The same for a trainer whose workers save or evaluate: they get `shutdown_timeout` after each sign of
    /// progress, and this long in all.
    pub shutdown_timeout_max: Duration,
    /// Exit with the code of the root cause.
    pub propagate_exit_code: bool,
    /// Spreads the restarts of jobs that failed together.
    pub seed: u64,
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
    /// The rendezvous is complete.
    AllJoined,
    /// The rendezvous failed, or the ranks did not open their communicator after it, for this reason.
    RendezvousFailed(String),
    /// A worker is about to exit for an error of its own. Ranks that lose it will fail, too.
    OwnError {
        /// The rank.
        rank: u32,
        /// One line.
        message: String,
        /// The code with which it is about to exit.
        exit: ExitCode,
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
    /// A checkpoint is complete.
    Checkpoint {
        /// Steps completed.
        step: u64,
        /// Its directory.
        path: PathBuf,
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
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start all workers of an attempt.
    Start {
        /// From 0.
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
    /// All other failures of the last attempt.
    pub others: Vec<Failure>,
    /// A stop was requested before anything failed.
    pub stopped: bool,
    /// What remains of a training job that was stopped without a checkpoint of its last step.
    pub note: Option<String>,
}

/// The failure of one rank, or of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// `None` for a failure of the whole group.
    pub rank: Option<u32>,
    /// What happened, for the user.
    pub message: String,
    /// How the process ended; `None` without a process.
    pub status: Option<Exit>,
    pub(crate) exit: ExitCode,
    /// The rank hung and xlaunch ended it, so its exit status says nothing about the cause.
    pub(crate) hung: bool,
    /// The rank has exited with a code that means so.
    pub(crate) preempted: bool,
    /// Another failure or a stop has led to this one: a lost peer, or a signal from xlaunch.
    pub(crate) consequence: bool,
}

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Workers start and join.
    Rendezvous,
    /// Workers work.
    Running,
    /// Workers are being stopped.
    Stopping,
    /// All workers are gone; the next attempt starts after a delay.
    RestartDelay,
    /// The job is over.
    Ended,
}
