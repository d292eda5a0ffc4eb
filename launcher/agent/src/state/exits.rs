//! What the exit of a worker means: nothing, or a failure with its exit code and whether another failure led to it.

use xlaunch_proto::exit::ExitCode;

use super::{Failure, SIGTERM};
use crate::spawn::Exit;

/// A trainer's worker that was asked to stop: the checkpoint of the last step is complete.
pub(super) const STOPPED: Exit = Exit::Code(143);
const SIGKILL: i32 = 9;

/// What had happened in the attempt before a worker exited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Circumstances {
    /// Ranks are still joining.
    pub(super) joining: bool,
    pub(super) another_failed: bool,
    /// xlaunch has sent SIGKILL.
    pub(super) killed: bool,
}

/// The failure, if this exit of a trainer's worker is one.
pub(super) fn of_trainer(rank: u32, exit: Exit, circumstances: &Circumstances) -> Option<Failure> {
    let known = match exit {
        Exit::Code(code) => ExitCode::from_code(code),
        Exit::Signal(_) | Exit::Unknown => None,
    };
    let (message, exit_code, consequence) = match known {
        Some(ExitCode::Done) if circumstances.joining => {
            ("exited before it joined".into(), ExitCode::Rendezvous, circumstances.killed)
        }
        Some(ExitCode::Done) => return None,
        _ => {
            // Ranks that lost a peer, or were refused by a rendezvous that has failed.
            let refused = known == Some(ExitCode::Rendezvous) && circumstances.another_failed;
            // Any other SIGKILL may come from the OOM killer, which makes it a root cause.
            let ours = exit == Exit::Signal(SIGKILL) && circumstances.killed;
            let consequence = known == Some(ExitCode::Retryable) || ours || refused;
            (exit.to_string(), passed_on(known), consequence)
        }
    };
    Some(Failure { status: Some(exit), consequence, ..Failure::of_rank(rank, message, exit_code) })
}

/// The code of a job whose root cause is a trainer's worker with this one.
pub(super) fn passed_on(known: Option<ExitCode>) -> ExitCode {
    match known {
        Some(
            code @ (ExitCode::Data
            | ExitCode::Rendezvous
            | ExitCode::Internal
            | ExitCode::Retryable
            | ExitCode::Gpu),
        ) => code,
        _ => ExitCode::WorkerFailed,
    }
}

/// The failure, if this exit of a command's worker is one. After our signal, every exit is a consequence of it.
pub(super) fn of_command(rank: u32, exit: Exit, propagate: bool, terminated: bool) -> Option<Failure> {
    if exit == Exit::Code(0) {
        return None;
    }
    let own = match exit {
        Exit::Code(code) => u8::try_from(code).unwrap_or(1),
        Exit::Signal(signal) => u8::try_from(signal).map_or(1, |signal| 128 | signal),
        Exit::Unknown => 1,
    };
    let message = match exit {
        // xlaunch's table of exit codes does not apply to other programs.
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(_) | Exit::Unknown => exit.to_string(),
    };
    let code = if propagate { ExitCode::Worker(own) } else { ExitCode::WorkerFailed };
    Some(Failure { status: Some(exit), consequence: terminated, ..Failure::of_rank(rank, message, code) })
}

impl Failure {
    pub(super) fn of_rank(rank: u32, message: String, exit: ExitCode) -> Self {
        Self { rank: Some(rank), ..Self::of_group(message, exit) }
    }

    pub(super) fn of_group(message: String, exit: ExitCode) -> Self {
        Self { rank: None, message, status: None, exit, hung: false, preempted: false, consequence: false }
    }

    /// A rank that hangs on its own (`message`), or together with the first of the hung ranks.
    pub(super) fn hung(rank: u32, message: String) -> Self {
        Self { hung: true, ..Self::of_rank(rank, message, ExitCode::Retryable) }
    }

    /// A worker has exited with one of the codes for preemption.
    pub(super) fn preempted(rank: u32, exit: Exit, code: i32) -> Self {
        let message = format!("exit code {code}: preempted (--requeue-codes)");
        let failure = Self::of_rank(rank, message, ExitCode::Retryable);
        Self { status: Some(exit), preempted: true, ..failure }
    }

    /// The rank of this failure, which was known before, has exited.
    pub(super) fn exited(&mut self, exit: Exit) {
        self.status = Some(exit);
        if matches!(exit, Exit::Code(_)) && !self.hung {
            self.message = format!("{exit}: {}", self.message);
        }
    }

    /// The exit code that tells about the cause.
    pub(super) fn code(&self) -> Option<i32> {
        match self.status {
            Some(Exit::Code(code)) if !self.hung => Some(code),
            _ => None,
        }
    }
}

impl super::StopCause {
    /// The signal for the workers of a command, which also decides the exit code.
    pub(super) fn signal(self) -> i32 {
        match self {
            Self::Signal(signal) => signal,
            Self::Call => SIGTERM,
        }
    }
}
