//! What is known of each rank, for `xlaunch status` and the summary.

use std::time::Instant;

use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{JobState, RankState, RankStatus, StatusReply, StepReport, TrainStarted};

/// The state of a job as callers see it.
#[derive(Debug)]
pub(super) struct Board {
    pub(super) job_id: String,
    pub(super) job_name: String,
    pub(super) attempt: u32,
    pub(super) started: Option<TrainStarted>,
    pub(super) last_step: Option<StepReport>,
    ranks: Vec<(RankStatus, Option<Instant>)>,
}

impl Board {
    pub(super) fn new(job_id: &str, job_name: &str) -> Self {
        Self {
            job_id: job_id.into(),
            job_name: job_name.into(),
            attempt: 0,
            started: None,
            last_step: None,
            ranks: Vec::new(),
        }
    }

    /// A new attempt of `world` ranks begins.
    pub(super) fn reset(&mut self, attempt: u32, world: u32) {
        self.attempt = attempt;
        self.ranks = (0..world)
            .map(|rank| (RankStatus { rank, local_rank: rank, ..Default::default() }, None))
            .collect();
    }

    fn rank(&mut self, rank: u32) -> Option<&mut (RankStatus, Option<Instant>)> {
        self.ranks.get_mut(rank as usize)
    }

    pub(super) fn spawned(&mut self, rank: u32, pid: u32) {
        if let Some((status, _)) = self.rank(rank) {
            status.pid = pid;
            status.set_state(RankState::Started);
        }
    }

    pub(super) fn joined(&mut self, rank: u32, device_uuid: &str) {
        if let Some((status, _)) = self.rank(rank) {
            status.device_uuid = device_uuid.into();
            status.set_state(RankState::Joined);
        }
    }

    pub(super) fn reported(&mut self, rank: u32, report: &Report, now: Instant) {
        if let Some((status, heard)) = self.rank(rank) {
            *heard = Some(now);
            if status.state() != RankState::Exited {
                status.set_state(RankState::Running);
            }
            if let Report::Step(step) = report {
                status.step = step.step + 1;
                status.pool_live_bytes = step.pool_live_bytes;
                status.pool_mapped_bytes = step.pool_mapped_bytes;
                status.pool_peak_bytes = step.pool_peak_bytes;
                status.pool_fragmentation = step.pool_fragmentation;
            }
        }
        match report {
            Report::TrainStarted(started) if rank == 0 => self.started = Some(started.clone()),
            Report::Step(step) if rank == 0 => self.last_step = Some(*step),
            _ => {}
        }
    }

    pub(super) fn exited(&mut self, rank: u32, exit: String) {
        if let Some((status, _)) = self.rank(rank) {
            status.exit = exit;
            status.set_state(RankState::Exited);
        }
    }

    /// The answer to a status query at `now`.
    pub(super) fn reply(&self, state: JobState, reason: &str, now: Instant) -> StatusReply {
        let ranks = self.ranks.iter().map(|(status, heard)| {
            let silence = heard.map_or(0.0, |heard| now.duration_since(heard).as_secs_f64());
            RankStatus { seconds_since_heartbeat: silence, ..status.clone() }
        });
        let step = self.last_step.unwrap_or_default();
        #[expect(clippy::cast_precision_loss, reason = "shown to people")]
        let speed = if step.step_seconds > 0.0 { step.tokens as f64 / step.step_seconds } else { 0.0 };
        StatusReply {
            job_id: self.job_id.clone(),
            job_name: self.job_name.clone(),
            attempt: self.attempt,
            state: state.into(),
            world_size: u32::try_from(self.ranks.len()).unwrap_or(u32::MAX),
            ranks: ranks.collect(),
            step: self.last_step.map_or(0, |step| step.step + 1),
            total_steps: self.started.as_ref().map_or(0, |started| started.total_steps),
            loss: step.loss,
            tokens_per_second: speed,
            reason: reason.into(),
        }
    }
}
