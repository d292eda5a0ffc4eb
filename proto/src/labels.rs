//! Labels of states and kinds, used on the terminal, in JSON and in metrics.

use crate::v1::{
    ExaminationState, FindingLevel, GpuState, JobKind, JobState, MemberState, NodeJobState, RankState,
};

/// Returns the label of a job's kind.
pub fn kind(kind: JobKind) -> &'static str {
    match kind {
        JobKind::Unspecified => "unknown",
        JobKind::Trainer => "trainer",
        JobKind::Command => "command",
    }
}

/// Returns the label of a state of a daemon's job.
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

/// Returns the label of a state of a running job.
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

/// Returns the label of a state of a daemon's GPU.
pub fn gpu_state(state: GpuState) -> &'static str {
    match state {
        GpuState::Unspecified => "unknown",
        GpuState::Free => "free",
        GpuState::Held => "held",
        GpuState::Drained => "drained",
        GpuState::Sick => "sick",
        GpuState::Foreign => "foreign",
        GpuState::Examined => "examined",
    }
}

/// Returns the label of a GPU's state in an examination.
pub fn examination_state(state: ExaminationState) -> &'static str {
    match state {
        ExaminationState::Unspecified => "unknown",
        ExaminationState::Skipped => "skipped",
        ExaminationState::Examined => "examined",
        ExaminationState::Passed => "passed",
        ExaminationState::Failed => "failed",
        ExaminationState::Unknown => "unknown",
    }
}

/// Returns the label of a finding's severity.
pub fn finding_level(level: FindingLevel) -> &'static str {
    match level {
        FindingLevel::Unspecified => "unknown",
        FindingLevel::Ok => "ok",
        FindingLevel::Warning => "warning",
        FindingLevel::Failure => "failure",
    }
}

/// Returns the label of a state of a job's node.
pub fn member_state(state: MemberState) -> &'static str {
    match state {
        MemberState::Unspecified => "unknown",
        MemberState::Active => "active",
        MemberState::Spare => "spare",
        MemberState::Silent => "silent",
        MemberState::Lost => "lost",
        MemberState::Waiting => "waiting",
    }
}

/// Returns the label of a state of a rank.
pub fn rank_state(state: RankState) -> &'static str {
    match state {
        RankState::Unspecified => "unknown",
        RankState::Started => "started",
        RankState::Joined => "joined",
        RankState::Running => "running",
        RankState::Exited => "exited",
    }
}
