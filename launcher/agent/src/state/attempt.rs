//! One attempt: its workers, their failures, and how firmly they have been told to end.

use std::sync::Arc;
use std::time::Instant;

use xlaunch_proto::v1::{GroupEnd, NodeFailed};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::quantities::ranges_text;

use super::stage::{Request, Shutdown, Stage};
use super::worker::{Life, Symptom, Worker, Written};
use super::{Action, Event, FAILURE_GRACE, Kind, Rules, SIGINT, SIGTERM, StopCause, exits};
use crate::ending::Failure;
use xlaunch_host::spawn::Exit;

/// Everything that is known about an attempt while it lasts.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) rules: Arc<Rules>,
    pub(super) place: Place,
    pub(super) start: Instant,
    pub(super) stage: Stage,
    /// Indexed by local rank.
    pub(super) workers: Vec<Worker>,
    pub(super) failures: Vec<Failure>,
    /// Time at which the first failure was noticed.
    pub(super) failed_at: Option<Instant>,
    /// This attempt has got further than those before.
    pub(super) progressed: bool,
    /// First rank of a command that has exited with code 0.
    pub(super) first_done: Option<u32>,
    /// Devices whose parameters differ from those of other ranks.
    pub(super) differing: Vec<String>,
    /// Reason why the checkpoint last reported in this attempt is not complete.
    pub(super) incomplete: Option<String>,
    /// Report of a failure that the coordinator has.
    reported: Option<Reported>,
    /// The end of the job, which takes effect when the last worker is gone.
    pub(super) group_end: Option<GroupEnd>,
}

/// Place of this node in an attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// Number of the attempt, from 0.
    pub(super) attempt: u32,
    /// `None` before the first attempt.
    pub(super) node_rank: Option<u32>,
    /// Global rank of local rank 0.
    pub(super) first_rank: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reported {
    Consequence,
    Cause,
}

impl Attempt {
    pub(super) fn new(rules: Arc<Rules>, place: Place, now: Instant) -> Self {
        Self {
            place,
            start: now,
            stage: match rules.kind {
                Kind::Trainer => Stage::Rendezvous,
                Kind::Command => Stage::Running,
            },
            workers: (0..rules.workers).map(|_| Worker::default()).collect(),
            failures: Vec::new(),
            failed_at: None,
            progressed: false,
            first_done: None,
            differing: Vec::new(),
            incomplete: None,
            reported: None,
            group_end: None,
            rules,
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Stopping { shutdown, .. } => shutdown.deadline(),
            Stage::Rendezvous | Stage::Running => None,
        }
    }

    /// Returns whether the last worker is gone.
    pub(super) fn is_over(&self) -> bool {
        self.workers.iter().all(|worker| !worker.is_alive())
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::SpawnFailed { rank, reason, exit } => {
                self.workers[rank as usize].life = Life::Exited;
                let message = format!("failed to start: {reason}");
                return self.fail(Failure::of_rank(rank, message, exit), now);
            }
            Event::Begin { .. } | Event::Restarting(_) => {}
            Event::PeerFailed(message) => return self.peer_failed(message, now),
            Event::Pause(reason) => return self.pause(&reason, now),
            Event::CutOff(reason) => return self.cut_off(reason, now),
            Event::GroupEnded(end) => {
                self.group_end = Some(end);
                return vec![self.kill()];
            }
            Event::AllJoined => {
                if matches!(self.stage, Stage::Rendezvous) {
                    self.stage = Stage::Running;
                }
            }
            Event::RendezvousFailed(message) => {
                return self.fail(Failure::of_group(message, ExitCode::Rendezvous), now);
            }
            Event::OwnError { rank, message, exit } => return self.own_error(rank, message, exit, now),
            Event::ReplicasDiffer { ranks, message } => return self.replicas_differ(ranks, message, now),
            Event::SessionOpened { .. } | Event::Finished { .. } | Event::SessionClosed { .. } => {
                return self.session_event(&event, now);
            }
            Event::OomKilled { rank } => {
                if let Some(worker) = self.workers.get_mut(rank as usize) {
                    worker.out_of_memory = true;
                }
            }
            Event::Symptom { rank, error, lost_peer, at } => {
                let kind = if lost_peer { Written::LostPeer } else { Written::OwnError };
                self.workers[rank as usize].symptom = Some(Symptom { kind, error: Some(error), at });
            }
            Event::Advanced { .. } => self.progressed = true,
            Event::Hung { ranks, message } => return self.hung(&ranks, &message, now),
            Event::NoStacks => {
                if self.rules.kind == Kind::Command && !self.is_terminated() {
                    return vec![self.terminate(now)];
                }
            }
            Event::Killed { rank, signal } => return self.killed_by(rank, signal, now),
            Event::Exited { rank, exit } => return self.exited(rank, exit, now),
            Event::Stop(cause) => return self.stop(cause, now),
            Event::Progress => {
                if let Stage::Stopping { shutdown: Shutdown::Saving { deadline, limit }, .. } =
                    &mut self.stage
                {
                    *deadline = (*limit).min(now + self.rules.shutdown_timeout);
                }
            }
            Event::Checkpoint { .. } => self.incomplete = None,
            Event::CheckpointIncomplete(problem) => self.incomplete = Some(problem),
            Event::Tick => return self.tick(now),
        }
        Vec::new()
    }

    fn exited(&mut self, rank: u32, exit: Exit, now: Instant) -> Vec<Action> {
        self.workers[rank as usize].life = Life::Exited;
        // There is at most one: the error that the rank has reported, or its hang.
        let reported = self.failures.iter_mut().find(|failure| failure.rank == Some(rank));
        if let Some(failure) = reported {
            failure.exited(exit);
            return self.after_failure(now);
        }
        let failure = match self.rules.kind {
            Kind::Trainer if exit == exits::STOPPED && self.request().is_some() => {
                self.workers[rank as usize].life = Life::Saved;
                None
            }
            Kind::Trainer => exits::of_trainer(rank, exit, &self.circumstances(rank)),
            Kind::Command => self.command_failure(rank, exit, now),
        };
        match failure {
            Some(failure) => self.fail(failure, now),
            None if exit == Exit::Code(0) => self.exited_with_0(rank, now),
            None => Vec::new(),
        }
    }

    /// A trainer's worker has been killed but has not exited. The cause is known, so its peers need not wait for its
    /// exit.
    fn killed_by(&mut self, rank: u32, signal: i32, now: Instant) -> Vec<Action> {
        if self.rules.kind == Kind::Command || self.is_killed() || self.has_failed(rank) {
            return Vec::new();
        }
        match self.workers.get_mut(rank as usize) {
            Some(worker) if worker.is_alive() => worker.life = Life::Dying,
            _ => return Vec::new(),
        }
        let failure = exits::of_trainer(rank, Exit::Signal(signal), &self.circumstances(rank));
        failure.map_or_else(Vec::new, |failure| self.fail(failure, now))
    }

    pub(super) fn is_alive(&self, rank: u32) -> bool {
        self.workers.get(rank as usize).is_some_and(Worker::is_alive)
    }

    /// Returns whether a failure of this rank is known.
    pub(super) fn has_failed(&self, rank: u32) -> bool {
        self.failures.iter().any(|failure| failure.rank == Some(rank))
    }

    fn circumstances(&self, rank: u32) -> exits::Circumstances {
        exits::Circumstances {
            joining: matches!(self.stage, Stage::Rendezvous),
            another_failed: !self.failures.is_empty(),
            killed: self.is_killed(),
            out_of_memory: self.workers.get(rank as usize).is_some_and(|worker| worker.out_of_memory),
            replicas_differ: !self.differing.is_empty(),
        }
    }

    pub(super) fn fail(&mut self, failure: Failure, now: Instant) -> Vec<Action> {
        self.failures.push(failure);
        self.failed_at.get_or_insert(now);
        self.after_failure(now)
    }

    /// Ends the other workers once the cause of the failure is known.
    fn after_failure(&mut self, now: Instant) -> Vec<Action> {
        if self.is_terminated() {
            return Vec::new();
        }
        let is_cause = |failure: &Failure| failure.elsewhere || !failure.consequence;
        let is_known = self.first_done.is_some() || self.failures.iter().any(is_cause);
        // Hanging ranks may still print their stacks.
        let is_exiting = |rank: u32| self.workers[rank as usize].life == Life::Alive;
        if is_known && !self.failures.iter().filter_map(|failure| failure.rank).any(is_exiting) {
            return match self.rules.kind {
                Kind::Trainer => [vec![self.kill()], self.prepare_next()].concat(),
                Kind::Command => vec![self.terminate(now)],
            };
        }
        // The first failure sets the deadline; later ones do not move it.
        let due = now + FAILURE_GRACE;
        self.shut_down(Shutdown::Exiting {
            deadline: self.deadline().map_or(due, |earlier| earlier.min(due)),
        });
        Vec::new()
    }

    /// Prepares the next attempt, because starting processes takes as long as ending others. Whether they are needed is
    /// decided when those have ended.
    pub(super) fn prepare_next(&self) -> Vec<Action> {
        if self.request().is_none() && self.rules.has_restarts {
            vec![Action::Prepare { attempt: self.place.attempt + 1 }]
        } else {
            Vec::new()
        }
    }

    pub(super) fn request(&self) -> Option<Request> {
        match self.stage {
            Stage::Stopping { request, .. } => request,
            Stage::Rendezvous | Stage::Running => None,
        }
    }

    pub(super) fn is_killed(&self) -> bool {
        matches!(self.stage, Stage::Stopping { shutdown: Shutdown::Killed, .. })
    }

    /// Returns whether the workers have been sent a signal that ends them.
    pub(super) fn is_terminated(&self) -> bool {
        let Stage::Stopping { shutdown, .. } = self.stage else { return false };
        matches!(shutdown, Shutdown::Terminated { .. } | Shutdown::Killed)
    }

    pub(super) fn shut_down(&mut self, shutdown: Shutdown) {
        self.stage = Stage::Stopping { request: self.request(), shutdown };
    }

    fn terminate(&mut self, now: Instant) -> Action {
        self.shut_down(Shutdown::Terminated { deadline: now + self.rules.shutdown_timeout });
        Action::Signal(SIGTERM)
    }

    pub(super) fn kill(&mut self) -> Action {
        self.shut_down(Shutdown::Killed);
        Action::Kill
    }

    fn stop(&mut self, cause: StopCause, now: Instant) -> Vec<Action> {
        let by_interrupt = cause == StopCause::Signal(SIGINT);
        let message = match (&mut self.stage, self.rules.kind) {
            (Stage::Stopping { request, shutdown }, _) => {
                match request {
                    // The workers have already been told to end, because of a failure or because the group changes.
                    None | Some(Request::Pause) if self.failures.is_empty() => {
                        *request = Some(Request::Stop(cause));
                    }
                    None | Some(Request::Pause) => *request = Some(Request::StopAfterFailure),
                    Some(Request::Stop(_) | Request::StopAfterFailure) if by_interrupt => {
                        (*request, *shutdown) = (Some(Request::Interrupt), Shutdown::Killed);
                        let message = "second interrupt: killing the workers".into();
                        return vec![Action::Notify(message), Action::Kill];
                    }
                    Some(Request::Stop(_) | Request::StopAfterFailure | Request::Interrupt) => {}
                }
                return Vec::new();
            }
            (_, Kind::Command) => {
                let seconds = self.rules.shutdown_timeout.as_secs_f64();
                format!("stopping: the workers have {seconds} s to exit")
            }
            (Stage::Rendezvous, Kind::Trainer) => "stopping before training began".into(),
            (Stage::Running, Kind::Trainer) => "stopping at the next step, with a checkpoint".into(),
        };
        let action = self.ask_to_end(Request::Stop(cause), now);
        let again = by_interrupt && !self.is_killed();
        let again = if again { " (interrupt again to kill the workers)" } else { "" };
        vec![Action::Notify(format!("{message}{again}")), action]
    }

    /// Makes the workers save and end, because another attempt follows.
    fn pause(&mut self, reason: &str, now: Instant) -> Vec<Action> {
        if matches!(self.stage, Stage::Stopping { .. }) {
            return Vec::new();
        }
        let checkpoint = if self.rules.kind == Kind::Trainer { " with a checkpoint" } else { "" };
        let notice = format!("{reason}: starting again{checkpoint}");
        vec![Action::Notify(notice), self.ask_to_end(Request::Pause, now)]
    }

    /// Asks workers that have not been told to end yet.
    fn ask_to_end(&mut self, request: Request, now: Instant) -> Action {
        let Rules { shutdown_timeout, shutdown_timeout_max, kind, .. } = *self.rules;
        let deadline = now + shutdown_timeout;
        let (shutdown, action) = match (kind, self.stage) {
            (Kind::Command, _) => (Shutdown::Terminated { deadline }, Action::Signal(request.signal())),
            (Kind::Trainer, Stage::Rendezvous) => (Shutdown::Killed, Action::Kill),
            (Kind::Trainer, _) => {
                let limit = now + shutdown_timeout.max(shutdown_timeout_max);
                (Shutdown::Saving { deadline, limit }, Action::RequestStop)
            }
        };
        self.stage = Stage::Stopping { request: Some(request), shutdown };
        action
    }

    /// Workers on another node have failed. The workers here may not have noticed, or never will.
    fn peer_failed(&mut self, message: String, now: Instant) -> Vec<Action> {
        if self.failures.iter().any(|failure| failure.rank.is_none()) {
            return Vec::new();
        }
        let failure = Failure::of_group(message, ExitCode::Retryable);
        // Failures noticed here first are consequences of it.
        self.fail(Failure { consequence: true, elsewhere: true, ..failure }, now)
    }

    /// Kills the workers, because the coordinator may start the ranks of this node elsewhere.
    fn cut_off(&mut self, reason: String, now: Instant) -> Vec<Action> {
        let notice = Action::Notify(format!("{reason}: ending the workers of this node"));
        // Only the coordinator knows whether this node, the network or the coordinator itself is to blame.
        let failure = Failure::of_group(reason, ExitCode::Retryable);
        self.failures.push(Failure { consequence: true, ..failure });
        self.failed_at.get_or_insert(now);
        vec![notice, self.kill()]
    }

    /// Reports the first failure to the coordinator, and once more if a cause is found after a mere loss of a peer.
    pub(super) fn report_failure(&mut self) -> Option<Action> {
        let own = || self.failures.iter().filter(|failure| !failure.elsewhere);
        let root = own().find(|failure| !failure.consequence).or_else(|| own().next())?;
        // The loss of a peer is reported at once too: its node may not know that it has failed.
        let kind = if root.consequence { Reported::Consequence } else { Reported::Cause };
        if self.reported >= Some(kind) || self.request().is_some() {
            return None;
        }
        let cause = Some(self.cause(root));
        self.reported = Some(kind);
        Some(Action::ReportFailure(NodeFailed { attempt: self.place.attempt, cause }))
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        if self.rules.kind == Kind::Command && !self.is_terminated() {
            // Ranks have lost a peer, but no other rank has failed in the meantime; or not all hanging ranks have
            // printed their stacks.
            return vec![self.terminate(now)];
        }
        let alive = (self.place.first_rank..).zip(&self.workers).filter(|(_, worker)| worker.is_alive());
        let ranks = ranges_text(alive.map(|(rank, _)| rank));
        let notice = format!("killing ranks that did not exit in time: {ranks}");
        vec![Action::Notify(notice), self.kill()]
    }
}
