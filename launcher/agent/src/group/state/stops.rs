//! Requests to stop: of the whole job, or of one node that others can do without.

use std::time::Instant;

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{GroupEnd, GroupRules, GroupStop};

use super::{Coordinator, Member, MemberId, Output, Phase, Stage};

const PREEMPTION_SIGNAL: u32 = 15;

impl Coordinator {
    /// A user, or the system of one node, wants the agent there to stop. Preemption of a node is announced by SIGTERM:
    /// the job goes on if it can do without.
    pub(super) fn stop_requested(&mut self, id: MemberId, signal: u32, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if signal == PREEMPTION_SIGNAL
            && !member.hosts_coordinator
            && self.stop.is_none()
            && self.can_do_without(id)
        {
            return self.leave(id, signal, now);
        }
        self.stop.get_or_insert(signal);
        match self.phase {
            Phase::Running => {
                // An interrupt that arrives on all nodes, as over ssh, is one: a second one kills workers.
                let member = self.members.get_mut(&id);
                let requests = member.map_or(0, |member| {
                    member.stop_requests += 1;
                    member.stop_requests
                });
                if requests > self.stops_passed_on {
                    self.stops_passed_on = requests;
                    self.send_to_running(None, &ToAgent::Stop(GroupStop { signal }));
                }
            }
            Phase::Ended(_) => {}
            _ => self.stop_without_workers(signal),
        }
    }

    /// Ends the job before its first attempt, or between two of them.
    fn stop_without_workers(&mut self, signal: u32) {
        let stopped = format!("stopped by {}", request(signal));
        let Some(last) = &self.last_root else {
            let notice = format!("{stopped} before the workers had started");
            return self.end(stop(exit_code(signal, &self.rules), notice));
        };
        let text =
            format!("{stopped} before the next attempt; the last one failed: {}", last.text_in(self.nodes));
        if self.rules.trainer && !self.saved {
            let root = format!("{text}; no checkpoint was saved in this run");
            let exit_code = ExitCode::Retryable.code().into();
            return self.end(GroupEnd { exit_code, root, stopped: true, ..GroupEnd::default() });
        }
        self.end(stop(exit_code(signal, &self.rules), text));
    }

    /// The member ends: at once if it runs nothing, or else when the others have ended this attempt, too.
    fn leave(&mut self, id: MemberId, signal: u32, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.leaving = Some(signal);
        let (reason, is_idle) = (format!("{} leaves", member.name()), member.stage == Stage::Idle);
        match self.phase {
            Phase::Preparing { .. } if !is_idle => self.prepare_again(now),
            Phase::Running if !is_idle => self.pause(reason),
            _ => self.release_leaving(),
        }
    }

    /// Members that leave, and run nothing, end.
    pub(super) fn release_leaving(&mut self) {
        let is_free = |member: &Member| !matches!(member.stage, Stage::Running | Stage::Ended(_));
        let is_between = !matches!(self.phase, Phase::Running);
        let leaving = self.members.iter().filter(|(_, member)| is_between || is_free(member));
        let leaving: Vec<_> = leaving.filter_map(|(id, member)| Some((*id, member.leaving?))).collect();
        for (id, signal) in leaving {
            let member = self.members.remove(&id);
            let notice = format!("this node leaves the job because of {}; the others go on", request(signal));
            let end = stop(exit_code(signal, &self.rules), notice);
            self.send(id, ToAgent::End(GroupEnd { left: true, ..end }));
            self.outputs.push(Output::Forget(id));
            // The group is as large as it can be at once.
            let had_rank = member.is_some_and(|member| member.node_rank.is_some());
            self.nodes = self.nodes.saturating_sub(u32::from(had_rank));
        }
    }

    /// Whether enough nodes remain, spares included.
    fn can_do_without(&self, id: MemberId) -> bool {
        let Some(reference) = &self.reference else { return false };
        let others = self.members.iter().filter(|(other, it)| **other != id && it.leaving.is_none());
        let has_checkpoints =
            self.unshared && self.members.get(&id).is_some_and(|it| it.node_rank == Some(0));
        !has_checkpoints
            && !self.rules.fixed_ranks
            && others.count() >= reference.min_nodes as usize
            && reference.max_nodes > 1
    }
}

/// The end of a node without workers.
fn stop(exit_code: u32, notice: String) -> GroupEnd {
    GroupEnd { exit_code, notice, stopped: true, ..GroupEnd::default() }
}

/// What asked for a stop.
fn request(signal: u32) -> String {
    match signal {
        0 => "a user".into(),
        1 => "SIGHUP".into(),
        2 => "SIGINT".into(),
        3 => "SIGQUIT".into(),
        15 => "SIGTERM".into(),
        other => format!("signal {other}"),
    }
}

/// What an agent exits with that was stopped by this signal, or by a call.
pub(super) fn exit_code(signal: u32, rules: &GroupRules) -> u32 {
    match u8::try_from(signal) {
        Ok(_) if signal == PREEMPTION_SIGNAL && rules.sigterm_is_preemption => {
            ExitCode::Retryable.code().into()
        }
        // The signals that stop a training job stop it alike.
        Ok(signal @ 1..) if !rules.trainer => ExitCode::Signal(signal).code().into(),
        _ => ExitCode::Stopped.code().into(),
    }
}
