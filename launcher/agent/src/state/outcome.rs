//! The end of a job: its exit code, its root cause, and the checkpoint that a stop has left.

use std::path::PathBuf;

use xlaunch_spec::exit::ExitCode;

use super::{Failure, Kind, Outcome, StopCause};

impl Outcome {
    /// Returns the rank of the root cause, if it is a rank of this node.
    pub fn rank(&self) -> Option<u32> {
        Some(self.first_rank + self.root.as_ref()?.rank?)
    }
}

/// Everything that is known when the last worker is gone, apart from the failures.
#[derive(Debug)]
pub(super) struct End<'a> {
    pub(super) kind: Kind,
    pub(super) stop: Option<StopCause>,
    pub(super) failed_before_stop: bool,
    pub(super) interrupted: bool,
    /// Every worker of a trainer has confirmed the checkpoint of the last step.
    pub(super) all_stopped: bool,
    pub(super) none_stopped: bool,
    /// Step and path of the newest checkpoint of this run.
    pub(super) checkpoint: Option<&'a (u64, PathBuf)>,
}

impl End<'_> {
    pub(super) fn outcome(&self, failures: Vec<Failure>) -> Outcome {
        let clean = |exit| Outcome { exit, stopped: true, ..failed(Vec::new()) };
        if self.interrupted {
            return clean(ExitCode::Interrupted);
        }
        match (self.stop.filter(|_| !self.failed_before_stop), self.kind) {
            (None, _) => failed(failures),
            (Some(_), Kind::Trainer) if self.all_stopped => clean(ExitCode::Stopped),
            // The last step was already in progress when the stop came.
            (Some(_), Kind::Trainer) if self.none_stopped && failures.is_empty() => clean(ExitCode::Done),
            (Some(_), Kind::Trainer) => self.without_checkpoint(failures),
            // Consequences of a stop are not failures of the job.
            (Some(cause), Kind::Command) => match failures.iter().find(|failure| !failure.consequence) {
                None => clean(u8::try_from(cause.signal()).map_or(ExitCode::Internal, ExitCode::Signal)),
                Some(failure) => Outcome { stopped: failure.preempted, ..failed(failures) },
            },
        }
    }

    /// Outcome of a training job that was stopped but has not saved its last step.
    fn without_checkpoint(&self, mut failures: Vec<Failure>) -> Outcome {
        if failures.iter().all(|failure| failure.consequence) {
            let message = "stopped without a checkpoint of the last step".into();
            failures.insert(0, Failure::of_group(message, ExitCode::Retryable));
        }
        let note = match self.checkpoint {
            Some((step, path)) => format!("newest checkpoint: step {step}, {}", path.display()),
            None => "newest checkpoint: none was saved in this run".into(),
        };
        let outcome = failed(failures);
        Outcome { exit: ExitCode::Retryable, stopped: true, note: Some(note), ..outcome }
    }
}

/// Outcome of a job that was not stopped, or had failed before.
pub(super) fn failed(mut failures: Vec<Failure>) -> Outcome {
    let root = root_of(&failures).map(|index| failures.remove(index));
    let exit = root.as_ref().map_or(ExitCode::Done, |root| root.exit);
    Outcome {
        exit,
        root,
        others: failures,
        of_kept_attempt: false,
        stopped: false,
        first_rank: 0,
        elsewhere: None,
        note: None,
    }
}

/// Returns the index of the root cause.
pub(super) fn root_of(failures: &[Failure]) -> Option<usize> {
    failures.iter().position(|failure| !failure.consequence).or((!failures.is_empty()).then_some(0))
}
