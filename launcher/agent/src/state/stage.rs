//! How far an attempt has got, and how far its workers have been told to end.

use std::time::Instant;

use super::{SIGTERM, StopCause};

#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    Rendezvous,
    Running,
    Stopping { request: Option<Request>, shutdown: Shutdown },
}

/// The request to end an attempt that has not failed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// The group changes: another attempt follows.
    Pause,
    Stop(StopCause),
    /// A stop that came after a failure: it only prevents the restart.
    StopAfterFailure,
    /// A second SIGINT, which has killed the workers.
    Interrupt,
}

/// Progress in ending the workers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shutdown {
    /// Workers are expected to exit by themselves, after they have printed their stacks if they hang.
    Exiting { deadline: Instant },
    /// Workers of a trainer save a checkpoint. Progress extends the deadline up to the limit.
    Saving { deadline: Instant, limit: Instant },
    /// Workers of a command have been sent a signal that ends them.
    Terminated { deadline: Instant },
    /// Workers have been sent SIGKILL.
    Killed,
}

impl Request {
    /// Returns the signal for the workers of a command, which also decides the exit code.
    pub(super) fn signal(self) -> i32 {
        match self {
            Self::Stop(StopCause::Signal(signal)) => signal,
            _ => SIGTERM,
        }
    }
}

impl Shutdown {
    /// Time at which the remaining workers are terminated or killed.
    pub(super) fn deadline(self) -> Option<Instant> {
        match self {
            Self::Exiting { deadline } | Self::Saving { deadline, .. } | Self::Terminated { deadline } => {
                Some(deadline)
            }
            Self::Killed => None,
        }
    }
}
