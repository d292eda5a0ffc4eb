//! The words of the state machine: what happens to a job, what is to be done, how it ends.

use std::time::Duration;

use xlaunch_proto::exit::ExitCode;

use crate::command::Restarts;
use crate::spawn::Exit;

/// What a job is, as far as it matters to its end.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Number of workers.
    pub world: u32,
    /// What they are.
    pub kind: Kind,
    /// Which failures are followed by a new attempt.
    pub restarts: Restarts,
    /// Time that workers have to stop.
    pub shutdown_timeout: Duration,
    /// Exit with the root cause's code.
    pub propagate_exit_code: bool,
    /// Spreads the restarts of many jobs that failed together.
    pub seed: u64,
}

/// What workers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The built-in trainer's: they meet, can be asked to stop with a checkpoint, and their exit codes are ours.
    Trainer,
    /// Of any command: what they do is their affair, and their exit codes mean what they like.
    Command,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker could not be started.
    SpawnFailed {
        /// Whose process.
        rank: u32,
        /// In the system's words.
        reason: String,
    },
    /// All ranks have joined.
    Met,
    /// The ranks did not meet.
    MeetingFailed(String),
    /// A worker is gone.
    Exited {
        /// Whose process.
        rank: u32,
        /// Its status.
        exit: Exit,
    },
    /// SIGINT, SIGTERM, or a Stop call.
    Stop(StopCause),
    /// Time has passed.
    Tick,
}

/// Who asked for a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// This signal. A second SIGINT ends at once.
    Signal(i32),
    /// The gRPC call.
    Call,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start all workers of this attempt, and a new meeting.
    Start {
        /// From 0.
        attempt: u32,
    },
    /// Ask all workers to stop at a step boundary, with a checkpoint.
    AskToStop,
    /// This signal to the groups of all workers.
    Signal(i32),
    /// SIGKILL to all that workers have started.
    Kill,
    /// Tell the user.
    Say(String),
    /// Remember that this attempt has failed and another follows.
    Restart {
        /// From 0.
        attempt: u32,
        /// Whose failure it was; `None` for the group's.
        rank: Option<u32>,
        /// In words.
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
    /// The failure that started it all.
    pub root: Option<Failure>,
    /// What failed in its wake.
    pub others: Vec<Failure>,
}

/// One failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whose; `None` for the group's.
    pub rank: Option<u32>,
    /// In words.
    pub what: String,
    /// How its process ended, where there was one.
    pub status: Option<Exit>,
    pub(crate) exit: ExitCode,
    /// Whether it is the wake of another one: a lost peer, or our own signal.
    pub(crate) follows: bool,
}

/// Where the job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Workers start and join.
    Meeting,
    /// Workers train.
    Running,
    /// Workers are to end.
    Stopping,
    /// All are gone, and are started again in a while.
    Waiting,
    /// The job is over.
    Ended,
}
