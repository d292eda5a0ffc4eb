//! The end of an attempt on this node, the report to the coordinator, and the end of the job.

use std::path::PathBuf;
use std::time::Instant;

use xlaunch_proto::v1::{GroupEnd, NodeEnded, Restarting, RootCause};
use xlaunch_spec::exit::ExitCode;

use super::attempt::Attempt;
use super::stage::Request;
use super::worker::{Life, Worker};
use super::{Action, HEALTHY_AFTER, Job, Kind, Phase, exits};
use crate::ending::{Ending, Failure};
use xlaunch_host::spawn::Exit;

impl Job {
    /// Ends the attempt, because the last worker is gone. Returns the report to the coordinator.
    pub(super) fn attempt_ended(&mut self, now: Instant) -> Vec<Action> {
        let Phase::Attempt(mut attempt) = std::mem::replace(&mut self.phase, Phase::Waiting(None)) else {
            return Vec::new();
        };
        let (ended, last) = attempt.end(self.counts_steps, self.checkpoint.as_ref(), now);
        self.phase = Phase::Waiting(Some(Box::new(last)));
        let end = attempt.group_end.map_or_else(Vec::new, |end| self.end(&end));
        [vec![Action::Kill, Action::ReportEnd(ended)], end].concat()
    }

    /// Records that another attempt will follow.
    pub(super) fn restarting(&mut self, restarting: Restarting) -> Vec<Action> {
        let Restarting { attempt, notice, root, keep_evidence, .. } = restarting;
        if keep_evidence && let Phase::Waiting(last) = &self.phase {
            let last = last.iter().flat_map(|last| last.root.iter().chain(&last.others));
            self.first_failures = last.cloned().collect();
        }
        let RootCause { rank, message: cause, counted_as, .. } = root.unwrap_or_default();
        let counted_as = exits::known_kind(&counted_as);
        vec![Action::Notify(notice), Action::Restart { attempt, rank, cause, keep_evidence, counted_as }]
    }

    /// Ends the job.
    pub(super) fn end(&mut self, end: &GroupEnd) -> Vec<Action> {
        let last = match std::mem::replace(&mut self.phase, Phase::Ended { failed: false }) {
            Phase::Waiting(last) => last,
            Phase::Attempt(_) | Phase::Ended { .. } => None,
        };
        let has_failed = last.as_ref().is_some_and(|last| last.root.is_some()) || end.of_kept_attempt;
        let is_here = end.node_rank.is_some() && end.node_rank == self.place.node_rank && has_failed;
        let mut ending = match last.filter(|_| !end.stopped) {
            Some(_) if end.of_kept_attempt => Box::new(failed(std::mem::take(&mut self.first_failures))),
            Some(last) => last,
            // No attempt has run, or the job ends between two of them.
            None => {
                let stopped = end.stopped || end.root.is_empty();
                Box::new(Ending { stopped, ..Ending::new(ExitCode::Done) })
            }
        };
        (ending.of_kept_attempt, ending.left) = (end.of_kept_attempt, end.left);
        ending.first_rank = self.place.first_rank;
        if u32::from(ending.exit.code()) != end.exit_code {
            ending.exit = self.exit(end.exit_code);
        }
        if !end.note.is_empty() {
            ending.note = Some(end.note.clone());
        }
        if !end.root.is_empty() && !is_here {
            (ending.root, ending.elsewhere) = (None, Some(end.root.clone()));
            ending.others.clear();
        }
        self.phase = Phase::Ended { failed: ending.root.is_some() };
        let notice = (!end.notice.is_empty()).then(|| Action::Notify(end.notice.clone()));
        notice.into_iter().chain([Action::Kill, Action::End(ending)]).collect()
    }

    fn exit(&self, code: u32) -> ExitCode {
        let code = u8::try_from(code).unwrap_or(1);
        match ExitCode::from_code(code.into()) {
            Some(ExitCode::Stopped | ExitCode::Interrupted) | None if self.rules.kind == Kind::Command => {
                if code > 128 {
                    ExitCode::Signal(code - 128)
                } else {
                    ExitCode::Worker(code)
                }
            }
            known => known.unwrap_or(ExitCode::WorkerFailed),
        }
    }
}

impl Attempt {
    /// Returns the report of an attempt whose last worker is gone, and the ending of the job if no other attempt
    /// follows. `checkpoint`: step and path of the newest checkpoint of this run.
    fn end(
        &mut self,
        counts_steps: bool,
        checkpoint: Option<&(u64, PathBuf)>,
        now: Instant,
    ) -> (NodeEnded, Ending) {
        self.find_early_exits();
        self.order_by_symptoms();
        let mut failures = std::mem::take(&mut self.failures);
        let request = self.request();
        let paused = request == Some(Request::Pause);
        // Exit code of the job if it is stopped before the next attempt; it tells whether the workers have saved.
        let paused_exit = paused.then(|| self.ending(request, failures.clone(), checkpoint).exit);
        if let Some(problem) = self.incomplete.as_ref().filter(|_| !paused) {
            // Not after a pause: the next attempt takes an earlier checkpoint and says so.
            failures.push(Failure::of_group(problem.clone(), ExitCode::Data));
        }
        let request = request.filter(|_| !paused);
        let is_final = request.is_some() || failures.iter().any(|failure| failure.preempted);
        failures.retain(|failure| !failure.elsewhere);
        let root = root_of(&failures).map(|index| self.cause(&failures[index]));
        let by_age = self.rules.kind == Kind::Command && !counts_steps;
        let ending = self.ending(request, failures, checkpoint);
        let ended = NodeEnded {
            attempt: self.place.attempt,
            // A consequence of a pause is not a failure.
            root: root.filter(|root| !(paused && root.consequence)),
            progressed: self.progressed || by_age && self.has_lived(now),
            differing: std::mem::take(&mut self.differing),
            r#final: is_final,
            exit_code: paused_exit.unwrap_or(ending.exit).code().into(),
            saved: checkpoint.is_some(),
        };
        (ended, ending)
    }

    /// Returns whether the attempt ran long enough before it failed to count as progress.
    fn has_lived(&self, now: Instant) -> bool {
        self.failed_at.unwrap_or(now).saturating_duration_since(self.start) >= HEALTHY_AFTER
    }

    /// Converts a failure to the coordinator's form.
    pub(super) fn cause(&self, failure: &Failure) -> RootCause {
        // The attempt could not begin, for example because all checkpoints are damaged. The next one could not, either.
        let is_data = self.rules.kind == Kind::Trainer && failure.exit == ExitCode::Data;
        let refused = (is_data && failure.status.is_none() && failure.rank.is_some())
            .then_some(Exit::Code(ExitCode::Data.code().into()));
        let code_text = match (self.rules.kind, failure.status.or(refused)) {
            (_, None) => String::new(),
            (Kind::Trainer, Some(exit)) => exit.to_string(),
            (Kind::Command, Some(exit)) => exit.of_command(),
        };
        RootCause {
            rank: failure.rank.map(|rank| self.place.first_rank + rank),
            message: what(failure),
            code_text,
            code: failure.code().or(refused.map(|_| ExitCode::Data.code().into())),
            exit_code: failure.exit.code().into(),
            consequence: failure.consequence,
            infrastructure: failure.infrastructure,
            counted_as: exits::counted_as(failure, !self.differing.is_empty()).into(),
            refused: failure.status.is_none() && failure.exit == ExitCode::Gpu,
        }
    }

    fn ending(
        &self,
        request: Option<Request>,
        failures: Vec<Failure>,
        checkpoint: Option<&(u64, PathBuf)>,
    ) -> Ending {
        let clean = |exit| Ending { stopped: true, ..Ending::new(exit) };
        let has_saved = |worker: &Worker| worker.life == Life::Saved;
        match (request, self.rules.kind) {
            (Some(Request::Interrupt), _) => clean(ExitCode::Interrupted),
            (None | Some(Request::StopAfterFailure), _) => failed(failures),
            (Some(_), Kind::Trainer) if self.incomplete.is_none() && self.workers.iter().all(has_saved) => {
                clean(ExitCode::Stopped)
            }
            // The last step was already in progress when the stop came.
            (Some(_), Kind::Trainer) if failures.is_empty() && !self.workers.iter().any(has_saved) => {
                clean(ExitCode::Done)
            }
            (Some(_), Kind::Trainer) => without_checkpoint(failures, checkpoint),
            // Consequences of a stop are not failures of the job.
            (Some(request), Kind::Command) => match failures.iter().find(|failure| !failure.consequence) {
                None => clean(u8::try_from(request.signal()).map_or(ExitCode::Internal, ExitCode::Signal)),
                Some(failure) => Ending { stopped: failure.preempted, ..failed(failures) },
            },
        }
    }
}

/// Ending of a job that was not stopped, or had failed before.
fn failed(mut failures: Vec<Failure>) -> Ending {
    let root = root_of(&failures).map(|index| failures.remove(index));
    let exit = root.as_ref().map_or(ExitCode::Done, |root| root.exit);
    Ending { root, others: failures, ..Ending::new(exit) }
}

/// Ending of a training job that was stopped but has not saved its last step.
fn without_checkpoint(mut failures: Vec<Failure>, checkpoint: Option<&(u64, PathBuf)>) -> Ending {
    if failures.iter().all(|failure| failure.consequence) {
        let message = "stopped without a checkpoint of the last step".into();
        failures.insert(0, Failure::of_group(message, ExitCode::Retryable));
    }
    let note = match checkpoint {
        Some((step, path)) => format!("newest checkpoint: step {step}, {}", path.display()),
        None => "newest checkpoint: none was saved in this run".into(),
    };
    Ending { exit: ExitCode::Retryable, stopped: true, note: Some(note), ..failed(failures) }
}

/// Returns the index of the root cause.
fn root_of(failures: &[Failure]) -> Option<usize> {
    failures.iter().position(|failure| !failure.consequence).or((!failures.is_empty()).then_some(0))
}

/// Describes a failure: `exit code 1: ValueError: bad`.
fn what(failure: &Failure) -> String {
    match &failure.error {
        Some(error) => format!("{}: {error}", failure.message),
        None => failure.message.clone(),
    }
}
