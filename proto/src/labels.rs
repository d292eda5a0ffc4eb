//! States and kinds in a word, the same wherever they are shown: on the terminal, in JSON, in metrics.

use crate::v1::{GpuState, JobKind, JobState, NodeJobState, RankState};

/// What a job runs.
pub fn kind(kind: JobKind) -> &'static str {
    match kind {
        JobKind::Unspecified => "unknown",
        JobKind::Trainer => "trainer",
        JobKind::Command => "command",
    }
}

/// Of a job of the daemon.
pub fn node_job_state(state: NodeJobState) -> &'static str {
    match state {
        NodeJobState::Unspecified => "unknown",
        NodeJobState::Queued => "queued",
        NodeJobState::Starting => "starting",
        NodeJobState::Running => "running",
        NodeJobState::Stopping => "stopping",
        NodeJobState::Done => "done",
        NodeJobState::Failed => "failed",
        NodeJobState::Cancelled => "cancelled",
        NodeJobState::Lost => "lost",
    }
}

/// Of a launch.
pub fn job_state(state: JobState) -> &'static str {
    match state {
        JobState::Unspecified => "unknown",
        JobState::Starting => "starting",
        JobState::Rendezvous => "rendezvous",
        JobState::Running => "running",
        JobState::Stopping => "stopping",
        JobState::Done => "done",
        JobState::Failed => "failed",
    }
}

/// Of a GPU, to the daemon.
pub fn gpu_state(state: GpuState) -> &'static str {
    match state {
        GpuState::Unspecified => "unknown",
        GpuState::Free => "free",
        GpuState::Held => "held",
        GpuState::Drained => "drained",
        GpuState::Sick => "sick",
        GpuState::Foreign => "foreign",
    }
}

/// Of a rank.
pub fn rank_state(state: RankState) -> &'static str {
    match state {
        RankState::Unspecified => "unknown",
        RankState::Started => "started",
        RankState::Joined => "joined",
        RankState::Running => "running",
        RankState::Exited => "exited",
    }
}
