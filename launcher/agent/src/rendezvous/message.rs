//! Calls for the driver's task.

use tokio::sync::{mpsc, oneshot};
use tonic::Status;
use xlaunch_proto::convert::Join;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{AgentCommand, CheckpointReply, GetJobReply, GetJobRequest};

use super::barrier::Reply;

/// A call. Everything that changes the job goes through one queue.
#[derive(Debug)]
pub enum Message {
    GetJob(GetJobRequest, oneshot::Sender<Result<GetJobReply, Status>>),
    Join(Join, Reply),
    SessionOpened {
        rank: u32,
        attempt: u32,
        commands: mpsc::Sender<Result<AgentCommand, Status>>,
    },
    SessionClosed {
        rank: u32,
        attempt: u32,
    },
    Report {
        rank: u32,
        attempt: u32,
        report: Report,
    },
    /// Stop the job. Holds a description of the caller.
    Stop(String),
    /// Save a checkpoint. Answered when it is complete, or refused.
    Checkpoint(oneshot::Sender<Result<CheckpointReply, Status>>),
    /// Send a signal to every worker.
    Signal(i32),
}
