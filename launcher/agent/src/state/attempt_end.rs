//! The end of an attempt on this node, the report to the coordinator, and the end of the job.

use std::time::Instant;

use xlaunch_proto::v1::{GroupEnd, NodeEnded, Restarting, RootCause};
use xlaunch_spec::exit::ExitCode;

use super::{
    Action, Failure, HEALTHY_AFTER, Job, Kind, Outcome, Phase, StopCause, exits, first_phase, outcome,
};

impl Job {
    pub(super) fn begin_attempt(&mut self, attempt: u32, now: Instant) -> Vec<Action> {
        self.phase = first_phase(self.rules.kind);
        (self.attempt, self.attempt_start) = (attempt, now);
        self.alive.fill(true);
        (self.terminated, self.killed, self.deadline, self.stop_limit) = (false, false, None, None);
        (self.progressed, self.failed_at, self.first_done) = (false, None, None);
        (self.reported, self.stopped, self.last, self.incomplete) = (None, 0, None, None);
        self.sessions.clear();
        self.symptoms.clear();
        self.out_of_memory.clear();
        self.dying.clear();
        vec![Action::Start { attempt }]
    }

    /// Ends the attempt, because the last worker is gone. Returns the report to the coordinator.
    pub(super) fn attempt_ended(&mut self, now: Instant) -> Vec<Action> {
        (self.phase, self.deadline) = (Phase::Waiting, None);
        self.find_early_exits();
        self.order_by_symptoms();
        let mut failures = std::mem::take(&mut self.failures);
        let paused = self.stop == Some(StopCause::Pause);
        // Exit code of the job if it is stopped before the next attempt; it tells whether the workers have saved.
        let paused_exit = paused.then(|| self.outcome(failures.clone()).exit);
        if paused {
            self.stop = None;
        } else if let Some(problem) = &self.incomplete {
            // Not after a pause: the next attempt takes an earlier checkpoint and says so.
            failures.push(Failure::of_group(problem.clone(), ExitCode::Data));
        }
        let own: Vec<Failure> = failures.iter().filter(|failure| !failure.elsewhere).cloned().collect();
        let root = outcome::root_of(&own).map(|index| self.cause(&own[index]));
        let by_age = self.rules.kind == Kind::Command && !self.counts_steps;
        let progressed = self.progressed || by_age && self.has_lived(now);
        let is_final = self.stop.is_some() || failures.iter().any(|failure| failure.preempted);
        let outcome = self.outcome(own);
        let ended = NodeEnded {
            attempt: self.attempt,
            // A consequence of a pause is not a failure.
            root: root.filter(|root| !(paused && root.consequence)),
            progressed,
            differing: std::mem::take(&mut self.differing),
            r#final: is_final,
            exit_code: paused_exit.unwrap_or(outcome.exit).code().into(),
            saved: self.checkpoint.is_some(),
        };
        self.last = Some(outcome);
        let end = self.group_end.take().map_or_else(Vec::new, |end| self.end(&end));
        [vec![Action::Kill, Action::ReportEnd(ended)], end].concat()
    }

    /// Returns whether the attempt ran long enough before it failed to count as progress.
    fn has_lived(&self, now: Instant) -> bool {
        let failed = self.failed_at.unwrap_or(now);
        failed.saturating_duration_since(self.attempt_start) >= HEALTHY_AFTER
    }

    /// Converts a failure to the coordinator's form.
    pub(super) fn cause(&self, failure: &Failure) -> RootCause {
        let code_text = match (self.rules.kind, failure.status) {
            (_, None) => String::new(),
            (Kind::Trainer, Some(exit)) => exit.to_string(),
            (Kind::Command, Some(exit)) => exit.of_command(),
        };
        RootCause {
            rank: failure.rank.map(|rank| self.first_rank + rank),
            message: what(failure),
            code_text,
            code: failure.code(),
            exit_code: failure.exit.code().into(),
            consequence: failure.consequence,
            infrastructure: failure.infrastructure,
            counted_as: exits::counted_as(failure, !self.differing.is_empty()).into(),
            refused: failure.status.is_none() && failure.exit == ExitCode::Gpu,
        }
    }

    /// Records that another attempt will follow.
    pub(super) fn restarting(&mut self, restarting: Restarting) -> Vec<Action> {
        let Restarting { attempt, notice, root, keep_evidence, .. } = restarting;
        if keep_evidence {
            let last = self.last.iter().flat_map(|last| last.root.iter().chain(&last.others));
            self.first_failures = last.cloned().collect();
        }
        let RootCause { rank, message: cause, counted_as, .. } = root.unwrap_or_default();
        let counted_as = exits::known_kind(&counted_as);
        vec![Action::Notify(notice), Action::Restart { attempt, rank, cause, keep_evidence, counted_as }]
    }

    /// Ends the job.
    pub(super) fn end(&mut self, end: &GroupEnd) -> Vec<Action> {
        (self.phase, self.deadline) = (Phase::Ended, None);
        let is_elsewhere = !end.root.is_empty() && !self.is_here(end);
        let mut outcome = match self.last.take().filter(|_| !end.stopped) {
            Some(_) if end.of_kept_attempt => outcome::failed(std::mem::take(&mut self.first_failures)),
            Some(last) => last,
            // No attempt has run, or the job ends between two of them.
            None => Outcome { stopped: end.stopped || end.root.is_empty(), ..self.outcome(Vec::new()) },
        };
        (outcome.of_kept_attempt, outcome.first_rank) = (end.of_kept_attempt, self.first_rank);
        if u32::from(outcome.exit.code()) != end.exit_code {
            outcome.exit = self.exit(end.exit_code);
        }
        if !end.note.is_empty() {
            outcome.note = Some(end.note.clone());
        }
        if is_elsewhere {
            (outcome.root, outcome.elsewhere) = (None, Some(end.root.clone()));
            outcome.others.clear();
        }
        let notice = (!end.notice.is_empty()).then(|| Action::Notify(end.notice.clone()));
        notice.into_iter().chain([Action::Kill, Action::End(outcome)]).collect()
    }

    /// Returns whether the root cause is among the failures of this node.
    fn is_here(&self, end: &GroupEnd) -> bool {
        let has_failed = self.last.as_ref().is_some_and(|last| last.root.is_some());
        end.node_rank.is_some() && end.node_rank == self.node_rank && (has_failed || end.of_kept_attempt)
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

    /// Returns the outcome of the job if no other attempt follows.
    fn outcome(&self, failures: Vec<Failure>) -> Outcome {
        let end = outcome::End {
            kind: self.rules.kind,
            stop: self.stop,
            failed_before_stop: self.failed_before_stop,
            interrupted: self.interrupted,
            all_stopped: self.stopped == self.rules.workers && self.incomplete.is_none(),
            none_stopped: self.stopped == 0,
            checkpoint: self.checkpoint.as_ref(),
        };
        end.outcome(failures)
    }
}

/// Describes a failure: `exit code 1: ValueError: bad`.
fn what(failure: &Failure) -> String {
    match &failure.error {
        Some(error) => format!("{}: {error}", failure.message),
        None => failure.message.clone(),
    }
}
