//! The end of an attempt: another one, or the end of the job.

use std::time::Instant;

use xlaunch_proto::exit::ExitCode;

use super::policy::{AttemptFailure, Decision};
use super::{Action, Event, Failure, HEALTHY_AFTER, Job, Kind, Phase, exits, first_phase, outcome};

impl Job {
    /// The last worker is gone.
    pub(super) fn attempt_ended(&mut self, now: Instant) -> Vec<Action> {
        self.deadline = None;
        self.find_early_exits();
        self.order_by_symptoms();
        let failures = std::mem::take(&mut self.failures);
        let root = outcome::root_of(&failures).map(|index| failures[index].clone());
        let is_final = self.stop.is_some() || failures.iter().any(|failure| failure.preempted);
        let Some(root) = root.filter(|_| !is_final) else { return self.end(failures) };
        let code = root.code();
        let code_text = match (self.rules.kind, root.status) {
            (_, None) => String::new(),
            (Kind::Trainer, Some(exit)) => exit.to_string(),
            (Kind::Command, Some(exit)) => exit.of_command(),
        };
        let counted_as = exits::counted_as(&root, !self.differing.is_empty());
        let by_age = self.rules.kind == Kind::Command && !self.counts_steps;
        let progressed = self.progressed || by_age && self.has_lived(now);
        let differing = std::mem::take(&mut self.differing);
        let failure = AttemptFailure { code, code_text: &code_text, progressed, differing: &differing };
        match self.policy.decide(failure, now) {
            Decision::Final(reason) => {
                let notice = reason.map(Action::Notify);
                notice.into_iter().chain(self.end_failed(failures, &root)).collect()
            }
            Decision::Restart { delay, number } => {
                self.attempt += 1;
                let counted = number.is_some();
                let when = match delay.is_zero() {
                    true => String::new(),
                    false => format!(" in {:.1} s", delay.as_secs_f64()),
                };
                let number = number
                    .map_or(String::new(), |number| format!(" ({number} {})", self.policy.budget_text()));
                let notice = Action::Notify(format!("{}; restarting{when}{number}", who(&root)));
                // An uncounted restart says nothing about progress.
                let keep_evidence = counted && self.policy.fruitless() == 1;
                let (attempt, rank, cause) = (self.attempt - 1, root.rank, root.message);
                let restart = Action::Restart { attempt, rank, cause, keep_evidence, counted_as };
                if keep_evidence {
                    self.first_failures.clone_from(&failures);
                }
                self.last_failures = failures;
                (self.phase, self.deadline) = (Phase::RestartDelay, Some(now + delay));
                let start = if delay.is_zero() { self.begin_attempt(now) } else { Vec::new() };
                [vec![Action::Kill, notice, restart], start].concat()
            }
        }
    }

    /// Whether the attempt ran so long before it failed that it counts as progress.
    fn has_lived(&self, now: Instant) -> bool {
        let failed = self.failed_at.unwrap_or(now);
        failed.saturating_duration_since(self.attempt_start) >= HEALTHY_AFTER
    }

    /// The job ends because of `root`, the first of these failures. If several attempts in a row made no progress, the
    /// error of the first of them is the one that counts: later ones may be consequences of it.
    fn end_failed(&mut self, failures: Vec<Failure>, root: &Failure) -> Vec<Action> {
        let first = std::mem::take(&mut self.first_failures);
        let first_root = outcome::root_of(&first).map(|index| first[index].clone());
        // A fault that was found in a GPU before the attempt is a consequence of nothing.
        let is_refused = root.status.is_none() && root.exit == ExitCode::Gpu;
        let first_root = first_root.filter(|_| self.policy.fruitless() > 1 && !is_refused);
        let Some(first_root) = first_root.filter(|first| who(first) != who(root)) else {
            return self.end_with_root(failures, root, |_| {});
        };
        let attempts = self.policy.fruitless();
        let note = format!(
            "this is the first error of {attempts} attempts without progress; the last one failed with {}",
            who(root)
        );
        self.end_with_root(first, &first_root, |outcome| {
            (outcome.of_kept_attempt, outcome.note) = (true, Some(note));
        })
    }

    fn end_with_root(
        &mut self,
        failures: Vec<Failure>,
        root: &Failure,
        change: impl FnOnce(&mut super::Outcome),
    ) -> Vec<Action> {
        let retryable = self.is_retryable(root);
        self.end_with(failures, |outcome| {
            change(outcome);
            outcome.exit = if retryable { ExitCode::Retryable } else { outcome.exit };
        })
    }

    /// Whether a training job has spent its restarts on failures that are not its own. For torchrun, and so for any
    /// command, every failure is one of a worker.
    fn is_retryable(&self, root: &Failure) -> bool {
        self.rules.kind == Kind::Trainer && root.infrastructure && self.policy.has_budget()
    }

    /// No worker exists, so a stop ends the job at once.
    pub(super) fn during_restart_delay(&mut self, event: &Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Stop(cause) => {
                (self.stop, self.failed_before_stop) = (Some(*cause), true);
                let failures = std::mem::take(&mut self.last_failures);
                self.end(failures)
            }
            Event::Tick if self.deadline.is_some_and(|deadline| now >= deadline) => self.begin_attempt(now),
            _ => Vec::new(),
        }
    }

    pub(super) fn begin_attempt(&mut self, now: Instant) -> Vec<Action> {
        self.phase = first_phase(self.rules.kind);
        self.attempt_start = now;
        self.alive.fill(true);
        (self.terminated, self.killed, self.deadline) = (false, false, None);
        (self.progressed, self.failed_at, self.first_done) = (false, None, None);
        self.sessions.clear();
        self.symptoms.clear();
        self.out_of_memory.clear();
        self.dying.clear();
        self.last_failures.clear();
        vec![Action::Start { attempt: self.attempt }]
    }

    pub(super) fn end(&mut self, failures: Vec<Failure>) -> Vec<Action> {
        self.end_with(failures, |_| {})
    }

    fn end_with(&mut self, failures: Vec<Failure>, change: impl FnOnce(&mut super::Outcome)) -> Vec<Action> {
        self.phase = Phase::Ended;
        self.deadline = None;
        let end = outcome::End {
            kind: self.rules.kind,
            stop: self.stop,
            failed_before_stop: self.failed_before_stop,
            interrupted: self.interrupted,
            all_stopped: self.stopped == self.rules.world,
            none_stopped: self.stopped == 0,
            checkpoint: self.checkpoint.as_ref(),
        };
        let mut outcome = end.outcome(failures);
        change(&mut outcome);
        vec![Action::Kill, Action::End(outcome)]
    }
}

/// `rank 1: exit code 3`.
fn who(failure: &Failure) -> String {
    let who = failure.rank.map_or_else(|| "the group".into(), |rank| format!("rank {rank}"));
    format!("{who}: {}", failure.message)
}
