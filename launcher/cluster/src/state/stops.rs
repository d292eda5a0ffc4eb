//! Requests to stop the whole job, or one node if the others can continue without it.

use std::time::Instant;

use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{GroupEnd, GroupRules, GroupStop};
use xlaunch_spec::exit::ExitCode;

use super::{Coordinator, Member, MemberId, Output, Phase, Stage};

const PREEMPTION_SIGNAL: u32 = 15;

impl Coordinator {
    /// Handles the request of a user or of a node's system to stop the agent there. SIGTERM announces the preemption of
    /// a node: the job continues if it does not need that node.
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
                // An interrupt that reaches all nodes, as over ssh, counts once: a second one would kill the workers.
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

    /// Lets the member leave: at once if it runs nothing, otherwise when the other nodes have ended this attempt too.
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

    /// Releases leaving members that run nothing.
    pub(super) fn release_leaving(&mut self) {
        let is_free = |member: &Member| !matches!(member.stage, Stage::Running | Stage::Ended(_));
        let is_between = !matches!(self.phase, Phase::Running);
        let leaving = self.members.iter().filter(|(_, member)| is_between || is_free(member));
        let leaving: Vec<_> = leaving.filter_map(|(id, member)| Some((*id, member.leaving?))).collect();
        for (id, signal) in leaving {
            let member = self.members.remove(&id);
            let notice =
                format!("this node leaves the job because of {}; the other nodes continue", request(signal));
            let end = stop(exit_code(signal, &self.rules), notice);
            self.send(id, ToAgent::End(GroupEnd { left: true, ..end }));
            self.outputs.push(Output::Forget(id));
            // The remaining group counts as complete, so it does not wait for a replacement.
            let had_rank = member.is_some_and(|member| member.node_rank.is_some());
            self.nodes = self.nodes.saturating_sub(u32::from(had_rank));
        }
    }

    /// Returns whether enough nodes remain without this one, spares included.
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

/// Describes a stop without workers.
fn stop(exit_code: u32, notice: String) -> GroupEnd {
    GroupEnd { exit_code, notice, stopped: true, ..GroupEnd::default() }
}

/// Names the source of a stop request.
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

/// Returns the exit code of an agent that was stopped by this signal, or by a call if `signal` is 0.
pub(super) fn exit_code(signal: u32, rules: &GroupRules) -> u32 {
    match u8::try_from(signal) {
        Ok(_) if signal == PREEMPTION_SIGNAL && rules.sigterm_is_preemption => {
            ExitCode::Retryable.code().into()
        }
        // All signals that stop a training job have the same effect, so only a command reports its signal.
        Ok(signal @ 1..) if !rules.trainer => ExitCode::Signal(signal).code().into(),
        _ => ExitCode::Stopped.code().into(),
    }
}
