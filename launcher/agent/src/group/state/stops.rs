//! Requests to stop: of the whole job, or of one node that others can do without.

use std::time::Instant;

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{GroupEnd, GroupStop};

use super::{Coordinator, Member, MemberId, Output, Phase, Stage};

const LEAVE_SIGNAL: u32 = 15;

impl Coordinator {
    /// A user, or the system of one node, wants the agent there to stop. Preemption of a node is announced by SIGTERM:
    /// the job goes on if it can do without.
    pub(super) fn stop_requested(&mut self, id: MemberId, signal: u32, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if signal == LEAVE_SIGNAL
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
            // No worker exists. Between two attempts, the failure of the last one counts.
            _ => {
                let root = self.last_root.take();
                self.end(match root {
                    Some(root) => GroupEnd {
                        exit_code: root.cause.exit_code,
                        node_rank: root.node_rank,
                        root: root.text(),
                        ..GroupEnd::default()
                    },
                    None => GroupEnd { exit_code: exit_code(signal), ..GroupEnd::default() },
                });
            }
        }
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
            let left = GroupEnd { exit_code: exit_code(signal), left: true, ..GroupEnd::default() };
            self.send(id, ToAgent::End(left));
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

/// What an agent exits with that was stopped by this signal, or by a call.
pub(super) fn exit_code(signal: u32) -> u32 {
    match u8::try_from(signal) {
        Ok(signal @ 1..) => ExitCode::Signal(signal).code().into(),
        _ => ExitCode::Stopped.code().into(),
    }
}
