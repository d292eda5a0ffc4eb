//! One worker of an attempt, as the state machine sees it.

use std::time::Instant;

#[derive(Debug, Default)]
pub(super) struct Worker {
    pub(super) life: Life,
    /// Session of a trainer's rank, from when it begins to train.
    pub(super) session: Option<Session>,
    /// Symptom of a command's rank that has exited.
    pub(super) symptom: Option<Symptom>,
    /// The OOM killer has ended it.
    pub(super) out_of_memory: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Life {
    #[default]
    Alive,
    /// A signal has killed it, but it has not exited yet.
    Dying,
    Exited,
    /// It has exited after a stop, and confirmed a checkpoint of the last step by its exit code.
    Saved,
}

impl Worker {
    pub(super) fn is_alive(&self) -> bool {
        matches!(self.life, Life::Alive | Life::Dying)
    }
}

/// Progress of a trainer's rank, according to its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Session {
    Open,
    /// The rank has done all its work.
    Finished,
    /// The rank has exited with code 0 before that, but its last reports may still be unread.
    ExitedEarly,
    /// The rank has closed its session before that.
    ClosedEarly,
}

/// Report of a failed rank of a command about the failure.
#[derive(Clone, Debug)]
pub(super) struct Symptom {
    pub(super) kind: Written,
    /// The error, in one line.
    pub(super) error: Option<String>,
    pub(super) at: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    OwnError,
    LostPeer,
    Nothing,
}
