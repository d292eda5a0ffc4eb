//! The start of an attempt: the job description that workers fetch, the state they resume from, and their rendezvous.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tonic::Status;
use xlaunch_proto::convert::Join;
use xlaunch_proto::snapshot::SnapshotId;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::{GetJobReply, GetJobRequest, MemorySnapshot};

use super::{TrainerPlan, TrainerWorkload};
use crate::rendezvous::Rendezvous;
use crate::rendezvous::barrier::{JoinBarrier, JoinOutcome, Reply};
use crate::state::Event;
use crate::status::board::Board;
use crate::workload::Workload;
use crate::workload::host_memory::SaveBuffers;
use crate::workload::snapshots::Snapshots;
use xlaunch_cluster::Assignment;
use xlaunch_spec::lineage::Recovered;

impl TrainerWorkload<'_> {
    pub(super) fn checkpoint_dir(&self) -> PathBuf {
        let configured = self.plan.spec.checkpoint.dir.as_ref().map(PathBuf::from);
        configured.unwrap_or_else(|| self.run.path.join("checkpoints"))
    }

    pub(super) fn get_job(&self, request: &GetJobRequest) -> Result<GetJobReply, Status> {
        if request.version != xlaunch_proto::VERSION {
            let message = format!(
                "rank {} runs xlaunch {}, the agent runs {}",
                request.rank,
                request.version,
                xlaunch_proto::VERSION
            );
            return Err(Status::failed_precondition(message));
        }
        let path = |path: &Path| path.to_string_lossy().into_owned();
        Ok(GetJobReply {
            spec_json: self.plan.spec.to_json(),
            run_dir: path(&self.run.path),
            resume_from: self.plan.resume_from.as_deref().map(path).unwrap_or_default(),
            bench: self.plan.bench.clone(),
            run_id: self.run.id.clone(),
            memory_snapshot: self.attempt.resume_snapshot,
            save_in_pieces: self.plan.buffers == SaveBuffers::Pieces,
        })
    }

    /// Finds the state that the next attempt resumes from: the newest memory snapshot or the newest checkpoint.
    pub(super) fn recover(&mut self) -> io::Result<()> {
        self.renew_lock().map_err(io::Error::other)?;
        let (dir, source) = (self.checkpoint_dir(), self.plan.resume_from.as_deref());
        let snapshot = self.snapshots.as_ref().and_then(Snapshots::newest);
        let recovered = (self.plan.files.recover)(&dir, &self.run.id, source, snapshot.map(|id| id.step));
        let Recovered { checkpoint, from_memory, on_disk, notes } =
            recovered.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        notes.iter().for_each(|note| self.notify(&format!("xlaunch: {note}")));
        self.attempt.resume_snapshot = snapshot
            .filter(|_| from_memory)
            .map(|SnapshotId { step, attempt }| MemorySnapshot { step, attempt, on_disk });
        if !from_memory {
            self.plan.resume_from = checkpoint;
        }
        Ok(())
    }

    pub(super) fn join(&mut self, join: Join, reply: Reply, board: &watch::Sender<Board>) -> Option<Event> {
        let (rank, device) = (join.rank.0, join.device_uuid.clone());
        let outcome = self.attempt.barrier.join(join, reply);
        if matches!(outcome, JoinOutcome::Waiting | JoinOutcome::Complete(_)) {
            let local_rank = rank.saturating_sub(self.attempt.assignment.first_rank);
            board.send_modify(|board| board.joined(local_rank, &device));
            self.attempt.devices.insert(local_rank, device);
        }
        match outcome {
            JoinOutcome::Waiting | JoinOutcome::Ignored => None,
            JoinOutcome::Complete(node) => {
                self.send(FromAgent::Join(node.to_wire(self.attempt.number)));
                None
            }
            JoinOutcome::Failed(problem) => Some(Event::RendezvousFailed(problem)),
        }
    }

    /// Answers the workers of this attempt that wait for their job description.
    pub(super) fn answer_waiting(&mut self) {
        for (request, reply) in std::mem::take(&mut self.waiting) {
            // The caller may be gone.
            let _ = reply.send(self.get_job(&request));
        }
    }

    pub(super) fn join_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.plan.spec.launch.join_timeout)
    }
}

/// Creates the rendezvous of an attempt that starts now.
pub(super) fn barrier(plan: &TrainerPlan<'_>, attempt: u32, assignment: &Assignment) -> JoinBarrier {
    let deadline = Instant::now() + Duration::from_secs_f64(plan.spec.launch.join_timeout);
    let (first, world) = (assignment.first_rank, assignment.world);
    let ranks = first..first + plan.placement.workers;
    JoinBarrier::new(Rendezvous::new(ranks, world, attempt, plan.spec.digest(), deadline))
}
