//! Interprets the exit of a worker: it is either no failure, or a failure with an exit code, which may be the
//! consequence of another one.

use xlaunch_proto::accounting::RESTART_CAUSES;
use xlaunch_spec::exit::ExitCode;

use crate::ending::Failure;
use xlaunch_host::spawn::Exit;

/// Exit of a trainer's worker that was asked to stop, when the checkpoint of the last step is complete.
pub(super) const STOPPED: Exit = Exit::Code(143);
const SIGKILL: i32 = 9;
/// Signals that a crashing process does not send itself: SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGTERM.
const OUTSIDE_SIGNALS: [i32; 5] = [1, 2, 3, SIGKILL, 15];

/// Circumstances of the attempt before a worker exited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Circumstances {
    /// Ranks are still joining.
    pub(super) joining: bool,
    pub(super) another_failed: bool,
    /// xlaunch has sent SIGKILL.
    pub(super) killed: bool,
    /// The OOM killer has killed the worker.
    pub(super) out_of_memory: bool,
    /// The parameters of ranks differ, so all ranks end.
    pub(super) replicas_differ: bool,
}

/// Returns the failure, if this exit of a trainer's worker is one.
pub(super) fn of_trainer(rank: u32, exit: Exit, circumstances: &Circumstances) -> Option<Failure> {
    let known = match exit {
        Exit::Code(code) => ExitCode::of_worker(code),
        Exit::Signal(_) | Exit::Unknown => None,
    };
    let (message, exit_code, consequence) = match known {
        // Another attempt would need as much memory.
        _ if circumstances.out_of_memory && !circumstances.killed => (exit.to_string(), ExitCode::Gpu, false),
        Some(ExitCode::Done) if circumstances.joining => {
            ("exited before it joined".into(), ExitCode::Rendezvous, circumstances.killed)
        }
        Some(ExitCode::Done) => return None,
        _ => {
            // Such ranks have lost a peer, or were refused by a rendezvous that had failed.
            let refused = known == Some(ExitCode::Rendezvous) && circumstances.another_failed;
            // Any other SIGKILL may come from the OOM killer, so it is a root cause.
            let ours = exit == Exit::Signal(SIGKILL) && circumstances.killed;
            let differs = known == Some(ExitCode::Gpu) && circumstances.replicas_differ;
            let consequence = known == Some(ExitCode::Retryable) || ours || refused || differs;
            (exit.to_string(), passed_on(known), consequence)
        }
    };
    let outside = matches!(exit, Exit::Signal(signal) if OUTSIDE_SIGNALS.contains(&signal));
    let infrastructure = known.is_some_and(is_infrastructure) || exit_code == ExitCode::Rendezvous || outside;
    Some(Failure {
        status: Some(exit),
        consequence,
        infrastructure: infrastructure && !circumstances.out_of_memory,
        ..Failure::of_rank(rank, message, exit_code)
    })
}

/// Returns whether a worker with this exit code failed for a reason outside its program, its data and its GPU.
pub(super) fn is_infrastructure(code: ExitCode) -> bool {
    matches!(code, ExitCode::Retryable | ExitCode::Rendezvous | ExitCode::SaveFailed)
}

/// Returns the kind of failure that a restart is counted as.
pub(super) fn counted_as(root: &Failure, replicas_differ: bool) -> &'static str {
    match (root.status, root.exit) {
        _ if root.hung => "hang",
        _ if replicas_differ => "replicas",
        (Some(Exit::Signal(signal)), _) if OUTSIDE_SIGNALS.contains(&signal) => "killed",
        (Some(Exit::Signal(_)), _) => "crash",
        (_, ExitCode::Rendezvous) => "rendezvous",
        (_, ExitCode::Retryable) => "peer",
        (_, ExitCode::Gpu) => "gpu",
        (_, ExitCode::Data) if root.infrastructure => "save",
        (_, ExitCode::Data) => "data",
        (Some(Exit::Code(code)), _) if ExitCode::of_worker(code) == Some(ExitCode::DamagedCheckpoint) => {
            "data"
        }
        _ => "error",
    }
}

/// Returns the kind with this name, which the coordinator received from a node.
pub(super) fn known_kind(name: &str) -> &'static str {
    RESTART_CAUSES.iter().find(|kind| **kind == name).unwrap_or(&"error")
}

/// Returns the exit code of a job whose root cause is a trainer's worker with this code.
pub(super) fn passed_on(known: Option<ExitCode>) -> ExitCode {
    match known {
        Some(
            code @ (ExitCode::Usage
            | ExitCode::Data
            | ExitCode::Rendezvous
            | ExitCode::Internal
            | ExitCode::Retryable
            | ExitCode::Gpu),
        ) => code,
        Some(ExitCode::SaveFailed) => ExitCode::Data,
        _ => ExitCode::WorkerFailed,
    }
}

/// Returns the failure, if this exit of a command's worker is one. `consequence`: it was caused by a signal from
/// xlaunch, or by the loss of a peer.
pub(super) fn of_command(rank: u32, exit: Exit, propagate: bool, consequence: bool) -> Option<Failure> {
    if exit == Exit::Code(0) {
        return None;
    }
    let own = match exit {
        Exit::Code(code) => u8::try_from(code).unwrap_or(1),
        Exit::Signal(signal) => u8::try_from(signal).map_or(1, |signal| 128 | signal),
        Exit::Unknown => 1,
    };
    let code = if propagate { ExitCode::Worker(own) } else { ExitCode::WorkerFailed };
    Some(Failure { status: Some(exit), consequence, ..Failure::of_rank(rank, exit.of_command(), code) })
}

impl Failure {
    pub(super) fn of_rank(rank: u32, message: String, exit: ExitCode) -> Self {
        Self { rank: Some(rank), ..Self::of_group(message, exit) }
    }

    pub(super) fn of_group(message: String, exit: ExitCode) -> Self {
        let infrastructure = is_infrastructure(exit);
        Self {
            rank: None,
            message,
            error: None,
            status: None,
            exit,
            hung: false,
            preempted: false,
            consequence: false,
            infrastructure,
            elsewhere: false,
        }
    }

    /// Failure of a rank that hangs on its own (`message`), or together with the first hung rank.
    pub(super) fn hung(rank: u32, message: String) -> Self {
        Self { hung: true, ..Self::of_rank(rank, message, ExitCode::Retryable) }
    }

    /// Failure of a worker that has exited with one of the codes for preemption.
    pub(super) fn preempted(rank: u32, exit: Exit, code: i32) -> Self {
        let message = format!("exit code {code}: preempted (--requeue-codes)");
        let failure = Self::of_rank(rank, message, ExitCode::Retryable);
        Self { status: Some(exit), preempted: true, ..failure }
    }

    /// Adds the exit status: the failure was known before its rank exited.
    pub(super) fn exited(&mut self, exit: Exit) {
        self.status = Some(exit);
        if matches!(exit, Exit::Code(_)) && !self.hung {
            self.message = format!("{exit}: {}", self.message);
        }
    }

    /// Returns the exit code, if it tells about the cause.
    pub(super) fn code(&self) -> Option<i32> {
        match self.status {
            Some(Exit::Code(code)) if !self.hung => Some(code),
            _ => None,
        }
    }
}
