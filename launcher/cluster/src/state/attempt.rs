//! One attempt: its preparation, the failures of its nodes, its end, and whether another one follows.

use std::time::{Duration, Instant};

use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{
    Begin, GroupEnd, MemberState, NodeEnded, NodeFailed, NodePrepared, NodeRefused, Pause, PeerFailed,
    Restarting, RootCause,
};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::ids::RingKey;

use super::policy::Decision;
use super::{CAUSE_GRACE, Coordinator, Member, MemberId, NodeFailure, Output, Phase, Stage, name, stops};
use crate::group_rendezvous::GroupRendezvous;

/// Note in the report of the job's end.
const CHECKPOINTS_LOST: &str =
    "the checkpoints are on the node that had rank 0; other nodes do not see that directory";

impl Coordinator {
    pub(super) fn prepared(&mut self, id: MemberId, prepared: NodePrepared) {
        let attempt = self.attempt;
        if let Some(member) = self.members.get_mut(&id)
            && member.stage == Stage::Preparing
            && prepared.attempt == attempt
        {
            member.stage = Stage::Prepared(prepared);
        }
    }

    /// Begins the attempt when all its members are ready.
    pub(super) fn settle_preparation(&mut self, expired: bool, now: Instant) {
        let problem = self.members.values().find_map(|member| {
            let problem =
                member.prepared().map(|it| it.problem.clone()).filter(|problem| !problem.is_empty());
            let late = expired && member.stage == Stage::Preparing;
            problem.or_else(|| late.then(|| "was not ready in time".into())).map(|text| (member.name(), text))
        });
        if let Some((who, problem)) = problem {
            return self.preparation_failed(format!("{who} {problem}"), now);
        }
        if self.members.values().any(|member| member.stage == Stage::Preparing) {
            return;
        }
        let all = || self.members.values().filter_map(Member::prepared);
        let master_port = all().map(|it| it.master_port).max().unwrap_or(0);
        let is_shared = all().all(|it| it.shared);
        let nodes = || self.members.values().filter(|it| it.node_rank.is_some());
        let world = nodes().map(|it| it.greeting.workers).sum();
        let Some(first) = nodes().find(|member| member.node_rank == Some(0)) else { return };
        let writers = if is_shared { world } else { first.greeting.workers };
        if self.rules.trainer {
            if !first.prepared().is_some_and(|it| it.shared) {
                return self.end_without_checkpoints(&first.name());
            }
            let keeper = first.greeting.instance.clone();
            (self.unshared, self.keeper) = (!is_shared, Some(keeper));
        }
        let begin = ToAgent::Begin(Begin { attempt: self.attempt, master_port, writers });
        for (id, member) in &mut self.members {
            if matches!(member.stage, Stage::Prepared(_)) {
                member.stage = Stage::Running;
                self.outputs.push(Output::Send(*id, begin.clone()));
            }
        }
        (self.phase, self.ending, self.announce_at, self.pause) = (Phase::Running, false, None, None);
        self.failures.clear();
        self.rendezvous = Some(GroupRendezvous::new(self.nodes, world, RingKey((self.new_key)())));
        // Nodes may have joined in the meantime.
        self.grow();
    }

    /// Ends the job: the node that had the checkpoints is gone, and the one that has rank 0 now would start from
    /// scratch.
    fn end_without_checkpoints(&mut self, first: &str) {
        let root = format!("{first} does not see the checkpoints of the run, and would start afresh");
        let exit_code = ExitCode::Retryable.code().into();
        self.end(GroupEnd { exit_code, root, note: CHECKPOINTS_LOST.into(), ..GroupEnd::default() });
    }

    /// Records that the preparation failed, before any worker was started.
    fn preparation_failed(&mut self, message: String, now: Instant) {
        let cause = RootCause {
            message,
            exit_code: ExitCode::Rendezvous.code().into(),
            infrastructure: true,
            counted_as: "rendezvous".into(),
            ..RootCause::default()
        };
        let failure = NodeFailure { member: None, node_rank: None, host: String::new(), at: now, cause };
        self.failures = vec![failure];
        self.attempt_ended(now);
    }

    pub(super) fn node_failed(&mut self, id: MemberId, failed: NodeFailed, now: Instant) {
        let Some(cause) = failed.cause.filter(|_| self.runs(id, failed.attempt)) else { return };
        self.fail(id, cause, now, now);
    }

    /// Records that all workers of a member are gone.
    pub(super) fn node_ended(&mut self, id: MemberId, ended: NodeEnded, now: Instant) {
        if !self.runs(id, ended.attempt) {
            return;
        }
        self.saved |= ended.saved;
        let root = ended.root.clone();
        if let Some(member) = self.members.get_mut(&id) {
            member.stage = Stage::Ended(ended);
        }
        match (root, self.failures.iter_mut().find(|failure| failure.member == Some(id))) {
            // The final report knows more about the failure than the first one.
            (Some(root), Some(failure)) => failure.cause = root,
            (Some(root), None) => self.fail(id, root, now, now),
            (None, _) => {}
        }
    }

    fn runs(&self, id: MemberId, attempt: u32) -> bool {
        attempt == self.attempt && self.members.get(&id).is_some_and(|member| member.stage == Stage::Running)
    }

    /// Records a failure that began at `at`, and ends the attempt on the other nodes. If it is only a lost connection
    /// to a peer, the peer's node first gets [`CAUSE_GRACE`] to report the cause.
    fn fail(&mut self, id: MemberId, cause: RootCause, at: Instant, now: Instant) {
        let Some(member) = self.members.get(&id) else { return };
        let (host, is_consequence) = (member.greeting.host.clone(), cause.consequence);
        let has_lost_coordinator = is_consequence && cause.rank.is_none();
        let failure = NodeFailure { member: Some(id), node_rank: member.node_rank, host, at, cause };
        match self.failures.iter_mut().find(|earlier| earlier.member == Some(id)) {
            Some(earlier) if earlier.cause.consequence => *earlier = failure,
            Some(_) => {}
            None => self.failures.push(failure),
        }
        if has_lost_coordinator {
            self.blame_suspension(now);
        }
        if is_consequence {
            self.announce_at.get_or_insert(now + CAUSE_GRACE);
        } else {
            self.announce();
        }
    }

    /// Blames a suspension of the coordinator, if there was one. A node that cannot reach the coordinator ends its
    /// workers before the lease is over. If the coordinator was suspended for at least half of the lease, neither that
    /// node nor the network is at fault.
    fn blame_suspension(&mut self, now: Instant) {
        let lease = self.lease();
        let is_cause = |(resumed, time): &(Instant, Duration)| now < *resumed + lease && *time >= lease / 2;
        let Some((resumed, time)) = self.suspended.take_if(|suspended| is_cause(suspended)) else { return };
        let host = self.members.get(&Self::HOST);
        let message = format!(
            "the coordinator did not run for {:.0} s: suspended, or its host is overloaded",
            time.as_secs_f64()
        );
        let failure = NodeFailure {
            // All nodes have to end their workers, the coordinator's own included.
            member: None,
            node_rank: host.and_then(|host| host.node_rank),
            host: host.map_or_else(String::new, |host| host.greeting.host.clone()),
            at: resumed.checked_sub(time).unwrap_or(resumed),
            cause: lost_peer(message),
        };
        self.failures.push(failure);
        self.announce();
    }

    /// Tells all other nodes about the root cause so far.
    pub(super) fn announce(&mut self) {
        self.announce_at = None;
        let Some(root) = self.root().cloned().filter(|_| !self.ending) else { return };
        self.ending = true;
        let message = PeerFailed { attempt: self.attempt, message: root.text() };
        self.send_to_running(root.member, &ToAgent::PeerFailed(message));
    }

    /// Returns the earliest failure that is not a consequence of another.
    fn root(&self) -> Option<&NodeFailure> {
        self.failures.iter().min_by_key(|failure| (failure.cause.consequence, failure.at))
    }

    /// Removes a member that is gone, and its workers with it.
    pub(super) fn lose(&mut self, id: MemberId, now: Instant) {
        let Some(member) = self.members.get(&id).cloned() else { return };
        if matches!(self.phase, Phase::Ended(_)) {
            self.members.remove(&id);
            return;
        }
        if member.stage == Stage::Running {
            let message = match member.closed {
                Some(_) => "the agent is gone".to_owned(),
                None => {
                    let silence = now.saturating_duration_since(member.last_heard);
                    format!("the node was silent for {:.0} s", silence.as_secs_f64())
                }
            };
            self.blame_suspension(now);
            self.fail(id, lost_peer(message), member.last_heard, now);
        }
        self.members.remove(&id);
        self.outputs.push(Output::Forget(id));
        self.checkpoints_lost |= self.unshared && member.node_rank == Some(0);
        if member.node_rank.is_some() {
            let mut status = member.status(false, now);
            status.set_state(MemberState::Lost);
            self.lost.push((member.last_heard, status));
            self.after_loss = true;
            if matches!(self.phase, Phase::Preparing { .. }) {
                self.prepare_again(now);
            }
        }
    }

    /// Pauses the attempt if a waiting node could take part: the others save, and all begin again.
    pub(super) fn grow(&mut self) {
        let most = self.most();
        let is_spare = |it: &&Member| it.stage == Stage::Idle && it.leaving.is_none() && it.closed.is_none();
        let spare = self.members.values().find(is_spare);
        if matches!(self.phase, Phase::Running)
            && self.nodes < most
            && let Some(spare) = spare
        {
            let reason = format!("{} joins", spare.name());
            self.pause(reason);
        }
    }

    /// Asks all members to save and end this attempt, because the group changes.
    pub(super) fn pause(&mut self, reason: String) {
        if self.pause.is_some() || self.ending || self.stop.is_some() {
            return;
        }
        self.send_to_running(None, &ToAgent::Pause(Pause { attempt: self.attempt, reason: reason.clone() }));
        self.pause = Some(reason);
    }

    /// Ends the job because an agent cannot run it.
    pub(super) fn node_refused(&mut self, id: MemberId, refused: &NodeRefused) {
        let Some(member) = self.members.get(&id) else { return };
        let (node_rank, text) = (member.node_rank, format!("{}: {}", member.name(), refused.message));
        self.end(match refused.exit_code {
            // Code 0: there is nothing left to do.
            0 => GroupEnd { notice: text, ..GroupEnd::default() },
            exit_code => GroupEnd { exit_code, node_rank, root: text, ..GroupEnd::default() },
        });
    }

    /// Decides how to continue now that no workers remain.
    pub(super) fn attempt_ended(&mut self, now: Instant) {
        let ends: Vec<NodeEnded> = self
            .members
            .values()
            .filter_map(|member| match &member.stage {
                Stage::Ended(end) => Some(end.clone()),
                _ => None,
            })
            .collect();
        let root = self.root().cloned();
        let paused = self.pause.take().is_some() && root.as_ref().is_none_or(|root| root.cause.consequence);
        let exit_of_root = root.as_ref().and_then(|root| match &self.members.get(&root.member?)?.stage {
            Stage::Ended(end) => Some(end.exit_code),
            _ => None,
        });
        let is_final = self.stop.is_some() || ends.iter().any(|end| end.r#final);
        match root {
            _ if is_final => self.end_stopped(&ends, root.as_ref(), exit_of_root, paused),
            _ if paused => self.next_attempt(now),
            None => {
                let exit_code = ends.iter().map(|end| end.exit_code).max().unwrap_or(0);
                self.end(GroupEnd { exit_code, ..GroupEnd::default() });
            }
            Some(root) => self.decide(&ends, root, now),
        }
    }

    /// Ends the job after a stop or a preemption. The members report whether a checkpoint was saved, by exit code.
    fn end_stopped(
        &mut self,
        ends: &[NodeEnded],
        root: Option<&NodeFailure>,
        exit_of_root: Option<u32>,
        paused: bool,
    ) {
        let root = root.filter(|root| !root.cause.consequence);
        // The codes agree unless a node could not save. 75 then takes precedence, even over the codes of signals, which
        // are higher.
        let retryable = u32::from(ExitCode::Retryable.code());
        let codes = || ends.iter().map(|end| end.exit_code);
        let of_nodes = codes().find(|code| *code == retryable).or_else(|| codes().max());
        // Workers of a command that were ended for a pause did not receive the signal of the stop.
        let own = of_nodes.filter(|_| self.rules.trainer || !paused);
        let of_stop = self.stop.map(|signal| stops::exit_code(signal, &self.rules));
        let saved = u32::from(ExitCode::Stopped.code());
        // Only the coordinator knows whether the stop is a preemption.
        let own = own.map(|code| if code == saved { of_stop.unwrap_or(code) } else { code });
        let exit_code = root.and(exit_of_root).or(own).or(of_stop).unwrap_or(0);
        self.end(match root {
            Some(root) => GroupEnd { exit_code, ..root.end() },
            None if of_stop == Some(exit_code) && exit_code == retryable => {
                let notice =
                    "stopped by SIGTERM, which announces a preemption here: exit code 75 asks for a retry";
                GroupEnd { exit_code, notice: notice.into(), ..GroupEnd::default() }
            }
            None => GroupEnd { exit_code, ..GroupEnd::default() },
        });
    }

    /// Decides whether another attempt follows a failed one.
    fn decide(&mut self, ends: &[NodeEnded], root: NodeFailure, now: Instant) {
        let ended = NodeEnded {
            root: Some(root.cause.clone()),
            progressed: ends.iter().any(|end| end.progressed),
            differing: ends.iter().flat_map(|end| end.differing.clone()).collect(),
            ..NodeEnded::default()
        };
        self.last_root = Some(root.clone());
        if self.checkpoints_lost {
            let exit_code = ExitCode::Retryable.code().into();
            return self.end(GroupEnd { exit_code, note: CHECKPOINTS_LOST.into(), ..root.end() });
        }
        match self.policy.decide(&ended, now) {
            Decision::Final(reason) => self.end_failed(&root, reason.unwrap_or_default()),
            Decision::Restart { delay, number } => {
                let when =
                    if delay.is_zero() { String::new() } else { format!(" in {:.1} s", delay.as_secs_f64()) };
                let count =
                    number.map_or(String::new(), |it| format!(" ({it} {})", self.policy.budget_text()));
                let counted = number.is_some();
                // An uncounted restart says nothing about progress, so its evidence is not kept.
                let keep_evidence = counted && self.policy.fruitless() == 1;
                let restarting = Restarting {
                    attempt: self.attempt,
                    notice: format!("{}; restarting{when}{count}", root.text_in(self.nodes)),
                    root: Some(root.cause.clone()),
                    keep_evidence,
                };
                if keep_evidence {
                    self.first_root = Some(root);
                }
                let ended = self.members.iter().filter(|(_, member)| member.node_rank.is_some());
                let ids: Vec<_> = ended.map(|(id, _)| *id).collect();
                ids.into_iter().for_each(|id| self.send(id, ToAgent::Restarting(restarting.clone())));
                self.restarts += u32::from(counted);
                if delay.is_zero() {
                    self.next_attempt(now)
                } else {
                    (self.attempt, self.phase) = (self.attempt + 1, Phase::Delay { until: now + delay })
                }
            }
        }
    }

    fn next_attempt(&mut self, now: Instant) {
        self.attempt += 1;
        self.start_gathering(now);
    }

    /// Ends the job because of `root`. If several attempts in a row made no progress, the error of the first one is
    /// reported instead: the later ones may be consequences of it.
    fn end_failed(&mut self, root: &NodeFailure, notice: String) {
        let first = self.first_root.take();
        let first = first.filter(|first| {
            let differs = first.text_in(self.nodes) != root.text_in(self.nodes);
            self.policy.fruitless() > 1 && !root.cause.refused && differs
        });
        let note = first.as_ref().map(|_| {
            let attempts = self.policy.fruitless();
            let last = root.text_in(self.nodes);
            format!("this is the first error of {attempts} attempts without progress; the last one failed with {last}")
        });
        let of_kept_attempt = first.is_some();
        let root = first.as_ref().unwrap_or(root);
        let is_lost = root.cause.counted_as == "peer" && root.cause.rank.is_none();
        let is_retryable = self.rules.trainer && root.cause.infrastructure && self.policy.has_budget();
        let exit_code =
            if is_lost || is_retryable { ExitCode::Retryable.code().into() } else { root.cause.exit_code };
        let note = note.unwrap_or_default();
        self.end(GroupEnd { exit_code, of_kept_attempt, note, notice, ..root.end() });
    }
}

impl NodeFailure {
    /// Text for messages: `node 1 (host): rank 5: exit code 3`.
    pub(super) fn text(&self) -> String {
        match self.member {
            None if self.host.is_empty() => format!("the group: {}", self.cause.message),
            _ => match self.cause.rank {
                None => format!("{}: {}", name(self.node_rank, &self.host), self.cause.message),
                Some(rank) => {
                    format!("{}: rank {rank}: {}", name(self.node_rank, &self.host), self.cause.message)
                }
            },
        }
    }

    /// Same as [`text`](Self::text), but names the node only if there are several.
    pub(super) fn text_in(&self, nodes: u32) -> String {
        match (nodes, self.cause.rank) {
            (0 | 1, Some(rank)) => format!("rank {rank}: {}", self.cause.message),
            (0 | 1, None) => format!("the group: {}", self.cause.message),
            _ => self.text(),
        }
    }

    fn end(&self) -> GroupEnd {
        GroupEnd { node_rank: self.node_rank, root: self.text(), ..GroupEnd::default() }
    }
}

/// Root cause for a lost node, or a lost connection to it.
fn lost_peer(message: String) -> RootCause {
    RootCause {
        message,
        exit_code: ExitCode::Retryable.code().into(),
        infrastructure: true,
        counted_as: "peer".into(),
        ..RootCause::default()
    }
}
