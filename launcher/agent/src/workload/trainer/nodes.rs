//! Training jobs on several nodes: messages about workers from the coordinator and from other nodes' agents.
//!
//! The agent of rank 0 leads: it finds the checkpoint to resume from, commits checkpoints, compares all ranks to find
//! hung and slow ones, and writes the training curves. The other agents forward their ranks' reports to it.

use std::path::PathBuf;
use std::time::Instant;

use prost::Message as _;
use tokio::sync::watch;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{self, NodeResume, RankReport, ShardSaved, WorkerReport};

use super::TrainerWorkload;
use crate::state::Event;
use crate::status::board::Board;
use xlaunch_cluster::group_rendezvous::GroupJoin;

impl TrainerWorkload<'_> {
    /// Returns whether this node has rank 0, and with it the files of the run.
    pub(super) fn leads(&self) -> bool {
        self.attempt.assignment.node_rank == 0
    }

    /// The local rank of a global rank, or `None` if that rank is on another node.
    pub(super) fn local_rank(&self, rank: u32) -> Option<u32> {
        rank.checked_sub(self.attempt.assignment.first_rank)
            .filter(|local| *local < self.plan.placement.workers)
    }

    /// Handles a message of the coordinator or of another node's agent.
    pub(super) fn hear(&mut self, message: ToAgent, board: &watch::Sender<Board>) -> Option<Event> {
        match message {
            ToAgent::Join(join) => self.group_joined(join, board),
            ToAgent::Resume(resume) => {
                self.resume(resume);
                None
            }
            ToAgent::Saved(saved) if saved.attempt == self.attempt.number => {
                if let Ok(shard) = ShardSaved::decode(&*saved.shard) {
                    self.shard_saved(saved.rank, shard);
                }
                None
            }
            ToAgent::Reports(reports) if reports.attempt == self.attempt.number => {
                for RankReport { rank, report } in reports.reports {
                    let report = WorkerReport::decode(&*report).ok().and_then(|report| report.report);
                    if let Some(report) = report {
                        self.reported_remotely(rank, &report, board);
                    }
                }
                None
            }
            _ => None,
        }
    }

    /// Handles the checkpoint to resume from, which the agent of rank 0 has found.
    fn resume(&mut self, resume: NodeResume) {
        if resume.attempt != self.attempt.number || self.attempt.resume_known {
            return;
        }
        self.attempt.resume_known = true;
        self.plan.resume_from = Some(resume.path).filter(|path| !path.is_empty()).map(PathBuf::from);
        self.answer_waiting();
    }

    /// Handles the outcome of the rendezvous: all nodes have joined, or they disagree.
    fn group_joined(&mut self, join: v1::GroupJoin, board: &watch::Sender<Board>) -> Option<Event> {
        if join.attempt != self.attempt.number {
            return None;
        }
        match GroupJoin::try_from(join) {
            Ok(join) => {
                self.attempt.barrier.finish(&join);
                let now = Instant::now();
                self.attempt.sessions.all_joined(self.join_timeout(), now);
                board.send_modify(|board| board.time.joined(now));
                if self.leads() {
                    self.hang_detector.all_joined(self.attempt.assignment.world, now);
                }
                Some(Event::AllJoined)
            }
            Err(problem) => {
                self.attempt.barrier.refuse(&problem);
                Some(Event::RendezvousFailed(problem))
            }
        }
    }

    /// Sends a message to the coordinator, which passes it on if it is for another agent.
    pub(super) fn send(&self, message: FromAgent) {
        // The link ends only after the job.
        let _ = self.messages.send(message);
    }
}
