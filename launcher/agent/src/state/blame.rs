//! Decides which failure of an attempt came first, from the reports of ranks and from their exits.
//!
//! A rank that fails breaks the connections of the others, which then fail too, and may be the first to exit. So the
//! order of exits does not show which rank failed first. The evidence distinguishes
//! - errors that a trainer's rank reports before it closes its connections, and losses of a peer, which it reports in
//!   the same way;
//! - a rank that exits with code 0 before it has reported the end of its work;
//! - for commands, what a rank has written to stderr and when: an exception of its own is written before its
//!   connections are closed, and thus before any other rank can notice.

use std::time::Instant;

use xlaunch_spec::exit::ExitCode;

use super::attempt::Attempt;
use super::stage::{Request, Shutdown, Stage};
use super::worker::{Session, Symptom, Worker, Written};
use super::{Action, Event, Kind, STACKS_TIMEOUT, exits};
use crate::ending::Failure;
use xlaunch_host::spawn::Exit;

impl Attempt {
    pub(super) fn session_event(&mut self, event: &Event, now: Instant) -> Vec<Action> {
        let (Event::SessionOpened { rank } | Event::Finished { rank } | Event::SessionClosed { rank }) =
            *event
        else {
            return Vec::new();
        };
        let Some(worker) = self.workers.get_mut(rank as usize) else { return Vec::new() };
        match (event, worker.session) {
            (Event::SessionOpened { .. }, _) if worker.is_alive() => worker.session = Some(Session::Open),
            (Event::Finished { .. }, _) => worker.session = Some(Session::Finished),
            (Event::SessionClosed { .. }, Some(Session::Open)) => worker.session = Some(Session::ClosedEarly),
            (Event::SessionClosed { .. }, Some(Session::ExitedEarly)) => return self.exited_early(rank, now),
            _ => {}
        }
        Vec::new()
    }

    /// Handles a rank's exit with code 0. If a trainer's rank has not reported the end of its work, that becomes a
    /// failure once all its reports have been read.
    pub(super) fn exited_with_0(&mut self, rank: u32, now: Instant) -> Vec<Action> {
        if self.rules.kind == Kind::Command {
            self.first_done.get_or_insert(rank);
            return Vec::new();
        }
        let session = &mut self.workers[rank as usize].session;
        match session {
            Some(Session::ClosedEarly) => return self.exited_early(rank, now),
            Some(Session::Open) => *session = Some(Session::ExitedEarly),
            _ => {}
        }
        Vec::new()
    }

    fn exited_early(&mut self, rank: u32, now: Instant) -> Vec<Action> {
        self.workers[rank as usize].session = Some(Session::Finished);
        self.fail(early_exit(rank), now)
    }

    /// Adds ranks that exited with code 0 although others still needed them. Called at the end of an attempt that
    /// failed. In one that was told to end before, the others end because of that.
    pub(super) fn find_early_exits(&mut self) {
        if !matches!(self.request(), None | Some(Request::StopAfterFailure)) {
            return;
        }
        let Some(first) = self.failures.first() else { return };
        let lost_peer = |failure: &Failure| {
            self.symptom(failure).is_some_and(|symptom| symptom.kind == Written::LostPeer)
        };
        if let Some(rank) = self.first_done
            && self.failures.iter().all(|failure| failure.consequence || lost_peer(failure))
        {
            let exit = first.exit;
            self.failures.push(Failure { exit, ..early_exit(rank) });
        }
        let early = |(rank, worker): (u32, &Worker)| {
            (worker.session == Some(Session::ExitedEarly)).then(|| early_exit(rank))
        };
        self.failures.extend((0..).zip(&self.workers).filter_map(early));
    }

    fn symptom(&self, failure: &Failure) -> Option<&Symptom> {
        self.workers.get(failure.rank? as usize)?.symptom.as_ref()
    }

    /// The parameters of ranks differ. This is the failure of the differing rank, or of the group if there are several.
    /// The other ranks report the same.
    pub(super) fn replicas_differ(
        &mut self,
        ranks: Vec<(u32, String)>,
        message: String,
        now: Instant,
    ) -> Vec<Action> {
        if self.is_killed() || !self.differing.is_empty() {
            return Vec::new();
        }
        let failure = match ranks[..] {
            [(rank, _)] if self.is_alive(rank) => Failure::of_rank(rank, message, ExitCode::Gpu),
            _ => Failure::of_group(message, ExitCode::Gpu),
        };
        self.differing = ranks.into_iter().map(|(_, device)| device).collect();
        self.fail(failure, now)
    }

    /// Handles a rank's report of the error that ends it.
    pub(super) fn own_error(
        &mut self,
        rank: u32,
        message: String,
        exit: ExitCode,
        now: Instant,
    ) -> Vec<Action> {
        if self.is_killed() || self.has_failed(rank) || !self.is_alive(rank) {
            return Vec::new();
        }
        let failure = Failure::of_rank(rank, message, exits::passed_on(Some(exit)));
        self.fail(
            Failure {
                consequence: exit == ExitCode::Retryable,
                infrastructure: exits::is_infrastructure(exit),
                ..failure
            },
            now,
        )
    }

    /// Ends the attempt, since a hanging rank never exits by itself. A trainer's ranks are killed at once; Python
    /// programs of a command first get [`STACKS_TIMEOUT`] to print their stacks. While the job is stopping, a deadline
    /// for that already exists.
    pub(super) fn hung(&mut self, ranks: &[u32], message: &str, now: Instant) -> Vec<Action> {
        if matches!(self.stage, Stage::Stopping { .. }) {
            return Vec::new();
        }
        let hung: Vec<u32> = ranks.iter().copied().filter(|rank| self.is_alive(*rank)).collect();
        let Some((&first, others)) = hung.split_first() else { return Vec::new() };
        self.failures.push(Failure::hung(first, message.to_owned()));
        self.failed_at = Some(now);
        let others = others.iter().map(|rank| Failure::hung(*rank, format!("hung, like rank {first}")));
        self.failures.extend(others);
        match self.rules.kind {
            Kind::Trainer => [vec![self.kill()], self.prepare_next()].concat(),
            Kind::Command => {
                self.shut_down(Shutdown::Exiting { deadline: now + STACKS_TIMEOUT });
                vec![Action::PrintStacks(hung)]
            }
        }
    }

    /// Returns the failure, if the exit of a command's rank is one.
    pub(super) fn command_failure(&mut self, rank: u32, exit: Exit, now: Instant) -> Option<Failure> {
        let silent = Symptom { kind: Written::Nothing, error: None, at: now };
        let symptom = self.workers[rank as usize].symptom.get_or_insert(silent);
        let (lost_peer, error) = (symptom.kind == Written::LostPeer, symptom.error.clone());
        // A worker may also use a requeue code after SIGTERM. That is preemption if xlaunch was stopped, but not if
        // another rank has failed.
        let has_failed = self.failures.iter().any(|failure| !failure.consequence && !failure.preempted);
        match exit {
            Exit::Code(code) if self.rules.requeue_codes.contains(&code) && !has_failed => {
                Some(Failure::preempted(rank, exit, code))
            }
            _ => {
                let hung = self.failures.iter().any(|failure| failure.hung);
                let consequence = self.is_terminated() || hung || lost_peer;
                let failure = exits::of_command(rank, exit, self.rules.propagate_exit_code, consequence)?;
                Some(Failure { error, ..failure })
            }
        }
    }

    /// Sorts the failures of a command by the times at which ranks wrote about them; a rank that wrote nothing counts
    /// from its exit. A rank that had written about an error of its own before xlaunch ended it has failed by itself.
    pub(super) fn order_by_symptoms(&mut self) {
        if self.rules.kind != Kind::Command || self.request().is_some() {
            return;
        }
        let mut failures = std::mem::take(&mut self.failures);
        for failure in &mut failures {
            if self.symptom(failure).is_some_and(|symptom| symptom.kind == Written::OwnError) {
                failure.consequence = false;
            }
        }
        // Failures of the group, failures to start and hangs are known before any exit, and preemption decides how the
        // job ends: the key `None` sorts first.
        let comes_first = |failure: &Failure| failure.hung || failure.preempted;
        failures.sort_by_key(|failure| {
            self.symptom(failure).filter(|_| !comes_first(failure)).map(|symptom| symptom.at)
        });
        self.failures = failures;
    }
}

fn early_exit(rank: u32) -> Failure {
    let message = "exited with code 0 while other ranks needed it".into();
    Failure { status: Some(Exit::Code(0)), ..Failure::of_rank(rank, message, ExitCode::WorkerFailed) }
}
