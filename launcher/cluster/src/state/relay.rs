//! Passes messages from one member on to others without looking inside.

use std::time::Instant;

use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{self as wire, GroupNodes, NodeHung, Query, QueryReply};

use super::{Coordinator, Member, MemberId, Output, Stage};
use crate::group_rendezvous::{GroupProgress, NodeJoin};

impl Coordinator {
    pub(super) fn relay(&mut self, id: MemberId, message: FromAgent, now: Instant) {
        let attempt = self.attempt;
        let is_current = |of: u32| of == attempt;
        match message {
            FromAgent::Resume(resume) if is_current(resume.attempt) => {
                self.send_to_running(Some(id), &ToAgent::Resume(resume));
            }
            FromAgent::Saved(saved) if is_current(saved.attempt) => {
                self.send_to_rank(0, ToAgent::Saved(saved));
            }
            FromAgent::Reports(reports) if is_current(reports.attempt) => {
                self.send_to_rank(0, ToAgent::Reports(reports));
            }
            FromAgent::Heartbeats(heartbeats) if is_current(heartbeats.attempt) => {
                self.send_to_rank(0, ToAgent::Heartbeats(heartbeats));
            }
            FromAgent::Hung(hung) if is_current(hung.attempt) => self.hung(id, &hung),
            FromAgent::Query(query) => self.query(id, query, now),
            FromAgent::QueryReply(reply) => {
                let asker = reply.asker;
                if self.members.contains_key(&asker) {
                    self.send(asker, ToAgent::QueryReply(QueryReply { node: id, ..reply }));
                }
            }
            _ => {}
        }
    }

    /// The workers of a node have joined. If the node was the last, tells every node about its neighbour.
    pub(super) fn node_joined(&mut self, id: MemberId, join: wire::NodeJoin) {
        let Some(member) = self.members.get(&id) else { return };
        let Some(node_rank) = member.node_rank.filter(|_| member.stage == Stage::Running) else { return };
        let Some(rendezvous) = self.rendezvous.as_mut().filter(|_| join.attempt == self.attempt) else {
            return;
        };
        let progress = match NodeJoin::try_from(join) {
            Ok(join) => rendezvous.join(node_rank, join),
            Err(problem) => GroupProgress::Failed(format!("{}: {problem}", member.name())),
        };
        let mut replies: Vec<Option<wire::GroupJoin>> = match progress {
            GroupProgress::Waiting | GroupProgress::Ignored(_) => return,
            GroupProgress::Complete(replies) => {
                replies.into_iter().map(|reply| Some(reply.to_wire(self.attempt))).collect()
            }
            GroupProgress::Failed(problem) => {
                let reply = wire::GroupJoin { attempt: self.attempt, problem, ..wire::GroupJoin::default() };
                vec![Some(reply); self.nodes as usize]
            }
        };
        for (id, member) in &self.members {
            let reply = member.node_rank.and_then(|rank| replies.get_mut(rank as usize)?.take());
            self.outputs.extend(reply.map(|reply| Output::Send(*id, ToAgent::Join(reply))));
        }
    }

    /// Passes a query on: to the node that has already begun to answer it, to the node of a rank, or to all nodes of
    /// the attempt.
    fn query(&mut self, id: MemberId, query: Query, now: Instant) {
        let query = Query { asker: id, ..query };
        let asked: Vec<MemberId> = match (query.node, query.rank) {
            (Some(node), _) => Vec::from_iter(self.members.contains_key(&node).then_some(node)),
            (None, Some(rank)) => self.member_of(rank).into_iter().collect(),
            (None, None) => {
                let nodes = self.nodes(now);
                self.send(id, ToAgent::Nodes(GroupNodes { nodes }));
                let others =
                    self.members.iter().filter(|(it, member)| **it != id && member.node_rank.is_some());
                others.map(|(id, _)| *id).collect()
            }
        };
        if asked.is_empty() && query.rank.is_some() {
            let problem = Some(wire::query_reply::Answer::Problem("its node is gone".into()));
            let reply = QueryReply { id: query.id, asker: id, answer: problem, last: true, node: id };
            return self.send(id, ToAgent::QueryReply(reply));
        }
        asked.into_iter().for_each(|id| self.send(id, ToAgent::Query(query.clone())));
    }

    /// Ranks hang. The node of the first one ends its own hanging ranks; all other nodes collect evidence.
    fn hung(&mut self, id: MemberId, hung: &NodeHung) {
        let culprit = hung.ranks.first().and_then(|rank| self.member_of(*rank));
        let others = self.members.iter().filter(|(it, member)| **it != id && member.stage == Stage::Running);
        let others = others.map(|(id, member)| {
            let own = member.first_rank..member.first_rank + member.greeting.workers;
            let is_own = |rank: &&u32| culprit == Some(*id) && own.contains(rank);
            let ranks = hung.ranks.iter().filter(is_own).copied().collect();
            (*id, NodeHung { attempt: hung.attempt, ranks, message: hung.message.clone() })
        });
        let others: Vec<_> = others.collect();
        others.into_iter().for_each(|(id, hung)| self.send(id, ToAgent::Hung(hung)));
    }

    fn send_to_rank(&mut self, rank: u32, message: ToAgent) {
        if let Some(id) = self.member_of(rank) {
            self.send(id, message);
        }
    }

    /// Returns the member that runs this rank.
    fn member_of(&self, rank: u32) -> Option<MemberId> {
        let has = |member: &Member| {
            let ranks = member.first_rank..member.first_rank + member.greeting.workers;
            member.node_rank.is_some() && ranks.contains(&rank)
        };
        self.members.iter().find(|(_, member)| has(member)).map(|(id, _)| *id)
    }
}
