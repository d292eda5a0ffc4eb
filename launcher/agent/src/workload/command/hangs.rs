//! Hung ranks of a command. With several nodes, the agent of rank 0 compares the heartbeats of all ranks; hung ranks
//! are terminated by the agent of their node.
//!
//! ```text
//! files --> agent of another node --RankHeartbeats--> agent of rank 0: HeartbeatMonitor --NodeHung--> all agents
//! ```
//! Each agent sends its ranks' heartbeats only to the agent of rank 0, once a second and when a rank exits, so the
//! traffic grows with the number of ranks, not with its square.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use tokio::sync::watch;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::{NodeHung, RankHeartbeat, RankHeartbeats};
use xlaunch_spec::quantities::{ranks_text, seconds};

use super::CommandWorkload;
use crate::stacks::Subject;
use crate::state::Event;
use crate::status::board::Board;
use crate::workload::heartbeat::files::{Change, HeartbeatFiles};
use crate::workload::{Hang, HangReport};
use xlaunch_host::devices;
use xlaunch_host::process::Process;

/// Changes that have not yet been sent to the agent of rank 0.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    changes: Vec<RankHeartbeat>,
    /// Ranks whose process is stopped, as last sent.
    stopped: Vec<u32>,
}

/// State of the nodes in this attempt, from the messages of the others.
#[derive(Debug, Default)]
pub(super) struct NodeStates {
    /// Node rank and host of each node, by its first rank.
    nodes: BTreeMap<u32, (u32, String)>,
    /// Ranks whose process is stopped.
    stopped: BTreeSet<u32>,
}

impl CommandWorkload<'_> {
    /// Returns whether this node has rank 0, so that all heartbeats are compared here.
    fn leads(&self) -> bool {
        self.attempt.assignment.node_rank == 0
    }

    /// Records the heartbeats that ranks of this node have written since the last call.
    pub(super) fn poll_heartbeats(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Event> {
        let changes = self.attempt.heartbeat_files.as_mut().map(HeartbeatFiles::poll).unwrap_or_default();
        let first = self.attempt.assignment.first_rank;
        let mut advanced = false;
        for (local, change) in changes {
            match change {
                // The rank wrote it before its exit, which has already been handled.
                _ if self.attempt.exited.contains(&local) => {}
                Change::Heartbeat { step, age } => {
                    advanced |= self.heartbeats.record(first + local, step, age, now);
                    board.send_modify(|board| board.heartbeat(local, step, now));
                    self.add_unsent(RankHeartbeat {
                        rank: first + local,
                        step,
                        age: age.as_secs_f64(),
                        ended: false,
                    });
                }
                Change::Removed => self.heartbeats_end(local),
            }
        }
        advanced.then(|| Event::Advanced { by_steps: self.heartbeats.has_steps() })
    }

    /// Records that a rank of this node sends no more heartbeats.
    pub(super) fn heartbeats_end(&mut self, local_rank: u32) {
        let rank = self.attempt.assignment.first_rank + local_rank;
        self.heartbeats.remove(rank);
        self.add_unsent(RankHeartbeat { rank, ended: true, ..RankHeartbeat::default() });
    }

    fn add_unsent(&mut self, change: RankHeartbeat) {
        if !self.leads() {
            self.attempt.unsent.changes.push(change);
        }
    }

    /// Reports hung ranks on the node of rank 0; on other nodes, sends the heartbeats there. Returns a hang if this
    /// node is to collect evidence about it.
    pub(super) fn find_hang(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Hang> {
        if !self.leads() {
            let stopped = if self.heartbeats.tick(now) {
                self.in_job(stopped_ranks(&board.borrow().subjects()))
            } else {
                Vec::new()
            };
            self.send_heartbeats(stopped);
            return None;
        }
        let nodes = &self.attempt.nodes;
        let stopped = || &stopped_ranks(&board.borrow().subjects()) | &nodes.stopped;
        let HangReport { message, rank_hints, hang } =
            self.heartbeats.poll(now, stopped, |ranks| nodes.names(ranks))?;
        self.output.print(&format!("xlaunch: {message}"));
        board.send_modify(|board| {
            match hang {
                Some(_) => board.time.hung(),
                None => board.time.continues(now),
            }
            board.set_hints(rank_hints);
        });
        let mut hang = hang?;
        let (local, others): (Vec<u32>, Vec<u32>) =
            hang.culprits.iter().partition(|rank| **rank < self.command.nproc);
        if self.attempt.assignment.has_peers() {
            // If no culprit is on this node, the agent of the first culprit terminates them. All agents collect
            // evidence.
            let ranks = if local.is_empty() { others } else { Vec::new() };
            let message = hang.cause.clone();
            self.send(FromAgent::Hung(NodeHung { attempt: self.attempt.number, ranks, message }));
        }
        hang.culprits = local;
        Some(hang)
    }

    /// Sends the changes, if there are any. `stopped` are the ranks whose process is stopped.
    pub(super) fn send_heartbeats(&mut self, stopped: Vec<u32>) {
        if self.attempt.unsent.changes.is_empty() && self.attempt.unsent.stopped == stopped {
            return;
        }
        self.attempt.unsent.stopped.clone_from(&stopped);
        let changes = std::mem::take(&mut self.attempt.unsent.changes);
        self.send(FromAgent::Heartbeats(RankHeartbeats {
            attempt: self.attempt.number,
            node_rank: self.attempt.assignment.node_rank,
            host: devices::host_name(),
            first_rank: self.attempt.assignment.first_rank,
            changes,
            stopped,
        }));
    }

    /// Tells the agent of rank 0 immediately that a rank has exited: this node may not poll for hangs any more.
    pub(super) fn send_exit(&mut self, local_rank: u32) {
        self.heartbeats_end(local_rank);
        self.send_heartbeats(self.attempt.unsent.stopped.clone());
    }

    /// Handles the heartbeats of another node's ranks.
    pub(super) fn heard(&mut self, heartbeats: RankHeartbeats, now: Instant) {
        if heartbeats.attempt != self.attempt.number || !self.leads() {
            return;
        }
        for RankHeartbeat { rank, step, age, ended } in &heartbeats.changes {
            let age = seconds(*age);
            if *ended {
                self.heartbeats.remove(*rank)
            } else {
                self.heartbeats.record_remote(*rank, *step, age, now)
            }
        }
        self.attempt.nodes.heard(heartbeats);
    }

    /// Returns whether the hung ranks of this node have made no progress since the hang was reported.
    pub(super) fn lasts(&self, hang: &Hang, now: Instant) -> bool {
        if self.leads() {
            self.heartbeats.lasts(hang)
        } else {
            let culprits = self.in_job(hang.culprits.iter().copied());
            culprits.iter().any(|rank| self.heartbeats.is_silent(*rank, now))
        }
    }

    fn in_job(&self, local_ranks: impl IntoIterator<Item = u32>) -> Vec<u32> {
        local_ranks.into_iter().map(|rank| self.attempt.assignment.first_rank + rank).collect()
    }

    fn send(&self, message: FromAgent) {
        // The link ends only after the job.
        let _ = self.messages.send(message);
    }
}

impl NodeStates {
    fn heard(&mut self, heartbeats: RankHeartbeats) {
        let RankHeartbeats { node_rank, host, first_rank, stopped, .. } = heartbeats;
        self.add(first_rank, node_rank, host);
        let next = self.nodes.range(first_rank + 1..).next().map_or(u32::MAX, |(first, _)| *first);
        self.stopped.retain(|rank| !(first_rank..next).contains(rank));
        self.stopped.extend(stopped);
    }

    pub(super) fn add(&mut self, first_rank: u32, node_rank: u32, host: String) {
        self.nodes.insert(first_rank, (node_rank, host));
    }

    /// Formats ranks, such as `node 1 (host): ranks 2-3 (local ranks 0-1)`, or `rank 3` for a job on one node.
    fn names(&self, ranks: &[u32]) -> String {
        let mut by_node: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for rank in ranks {
            let first = self.nodes.range(..=rank).next_back().map_or(0, |(first, _)| *first);
            by_node.entry(first).or_default().push(*rank);
        }
        let names = by_node.iter().map(|(first, ranks)| match self.nodes.get(first) {
            Some((node_rank, host)) => {
                let local: Vec<u32> = ranks.iter().map(|rank| rank - first).collect();
                format!("node {node_rank} ({host}): {} (local {})", ranks_text(ranks), ranks_text(&local))
            }
            None => ranks_text(ranks),
        });
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Returns the local ranks that have a process stopped by a signal.
fn stopped_ranks(subjects: &[Subject]) -> BTreeSet<u32> {
    let all = Process::all();
    let is_stopped = |subject: &&Subject| Process::tree(&all, subject.pid).iter().any(|it| it.is_stopped());
    subjects.iter().filter(is_stopped).map(|subject| subject.rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(node_rank: u32, first_rank: u32, stopped: &[u32]) -> RankHeartbeats {
        let host = format!("h{node_rank}");
        RankHeartbeats { node_rank, host, first_rank, stopped: stopped.into(), ..RankHeartbeats::default() }
    }

    #[test]
    fn ranks_are_named_with_node_host_and_local_rank() {
        let mut nodes = NodeStates::default();
        assert_eq!(nodes.names(&[1, 2]), "ranks 1-2", "of one node");
        nodes.add(0, 0, "h0".into());
        nodes.heard(from(1, 2, &[]));
        assert_eq!(nodes.names(&[3]), "node 1 (h1): rank 3 (local rank 1)");
        nodes.heard(from(2, 4, &[]));
        let expected = "node 0 (h0): rank 1 (local rank 1), node 2 (h2): ranks 4-6 (local ranks 0-2)";
        assert_eq!(nodes.names(&[1, 4, 5, 6]), expected);
    }

    #[test]
    fn stopped_ranks_of_a_node_replace_its_earlier_ones() {
        let mut nodes = NodeStates::default();
        nodes.heard(from(1, 2, &[2, 3]));
        nodes.heard(from(2, 4, &[5]));
        nodes.heard(from(1, 2, &[3]));
        assert_eq!(nodes.stopped, [3, 5].into());
        nodes.heard(from(2, 4, &[]));
        assert_eq!(nodes.stopped, [3].into());
    }
}
