//! The session stream: sends reports and heartbeats, receives commands, until training ends or the agent is lost.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Heartbeat, Hello, WorkerReport};
use xlaunch_spec::exit::ExitCode;

use super::{Request, Shared};
use crate::phase;

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Unacknowledged heartbeats after which the agent is considered lost. This is a count instead of a time: a worker that
/// was suspended (SIGSTOP) resumes with an outdated clock, but finds the acknowledgements in its socket.
const MAX_UNACKNOWLEDGED_HEARTBEATS: u32 = 15;
/// Time for the training thread to end after the collective was aborted.
const ABORT_EXIT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for the agent to read the last reports.
const REPORT_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn run(
    mut agent: AgentClient<Channel>,
    hello: Hello,
    mut requests: mpsc::UnboundedReceiver<Request>,
    shared: Arc<Shared>,
) {
    let (reports, outgoing) = mpsc::unbounded_channel();
    let send = |report: Report| {
        // Sending fails only if the stream is closed, which the receiving side reports.
        let _ = reports.send(WorkerReport { report: Some(report) });
    };
    send(Report::Hello(hello));
    let mut commands = match agent.session(UnboundedReceiverStream::new(outgoing)).await {
        Ok(commands) => commands.into_inner(),
        Err(status) => return agent_lost(&shared, &mut requests, status.message()).await,
    };
    let mut heartbeat = interval(HEARTBEAT_INTERVAL);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut unacknowledged = 0;
    let mut flushes = Flushes::default();
    let mut failure = None;
    loop {
        tokio::select! {
            request = requests.recv() => match request {
                Some(Request::Report(report)) => send(report),
                Some(Request::Flush(waiting)) => {
                    send(Report::Heartbeat(heartbeat_of(&shared)));
                    flushes.begin(waiting);
                }
                Some(Request::Fail(failed, waiting)) => {
                    send(Report::Failed(failed));
                    failure = Some(waiting);
                }
                Some(_) => {}
                None => break,
            },
            command = commands.next() => match command {
                Some(Ok(command)) => {
                    unacknowledged = 0;
                    match command.command {
                        Some(Command::Stop(_)) => shared.stop_requested.store(true, Ordering::Relaxed),
                        Some(Command::Checkpoint(_)) => {
                            shared.checkpoint_requested.store(true, Ordering::Relaxed);
                        }
                        Some(Command::FailedAck(_)) => drop(failure.take()),
                        Some(Command::CommitCheckpoint(commit)) => {
                            // The receiver exists only in a job that saves checkpoints.
                            let _ = shared.commits.get().map(|commits| commits.send(commit));
                        }
                        Some(Command::HeartbeatAck(_)) => flushes.acknowledge(),
                        None => {}
                    }
                }
                Some(Err(status)) => return agent_lost(&shared, &mut requests, status.message()).await,
                None => return agent_lost(&shared, &mut requests, "it closed the session").await,
            },
            _ = heartbeat.tick() => {
                if unacknowledged == MAX_UNACKNOWLEDGED_HEARTBEATS {
                    return agent_lost(&shared, &mut requests, "it stopped answering heartbeats").await;
                }
                unacknowledged += 1;
                flushes.sent += 1;
                send(Report::Heartbeat(heartbeat_of(&shared)));
            }
        }
    }
    // Training has ended. Half-close the stream: the agent reads everything, then closes its side.
    drop(reports);
    let end = async { while let Some(Ok(_)) = commands.next().await {} };
    // An agent that does not read the last reports in time still sees the exit code.
    let _ = tokio::time::timeout(REPORT_DRAIN_TIMEOUT, end).await;
}

/// Waits for the agent to read reports. The agent reads in order, so it has read them once it acknowledges a later
/// heartbeat.
#[derive(Default)]
struct Flushes {
    /// Number of heartbeats sent.
    sent: u64,
    acknowledged: u64,
    /// Waiting senders, each with the number of its heartbeat.
    waiting: Vec<(u64, std::sync::mpsc::Sender<()>)>,
}

impl Flushes {
    /// Records that a heartbeat was sent for this waiter.
    fn begin(&mut self, waiting: std::sync::mpsc::Sender<()>) {
        self.sent += 1;
        self.waiting.push((self.sent, waiting));
    }

    fn acknowledge(&mut self) {
        self.acknowledged += 1;
        self.waiting.retain(|(heartbeat, _)| *heartbeat > self.acknowledged);
    }
}

fn heartbeat_of(shared: &Shared) -> Heartbeat {
    let (phase, duration) = shared.trainer.read();
    let step = shared.step.load(Ordering::Relaxed);
    let phase_seconds = duration.as_secs_f64();
    let (progress, collectives) = (phase::progress(), shared.trainer.collectives());
    Heartbeat {
        step,
        phase: phase.into(),
        phase_seconds,
        progress,
        collectives,
        marks: shared.trainer.marks(),
    }
}

/// Unblocks the training thread after the loss of the agent, and exits the process if that does not end the thread.
async fn agent_lost(shared: &Shared, requests: &mut mpsc::UnboundedReceiver<Request>, reason: &str) {
    *shared.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
    shared.stop_requested.store(true, Ordering::Relaxed);
    let abort = shared.abort.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(abort) = abort {
        // Abort on a separate thread: `ncclCommAbort` may hang if the driver does not respond. If the thread cannot be
        // started, the process still exits after the timeout.
        let _ = std::thread::Builder::new().name("abort".into()).spawn(move || abort.abort());
    }
    let closed = async { while requests.recv().await.is_some() {} };
    if tokio::time::timeout(ABORT_EXIT_TIMEOUT, closed).await.is_err() {
        #[expect(clippy::exit, reason = "the training thread hangs in a call that cannot be interrupted")]
        std::process::exit(i32::from(ExitCode::Retryable.code()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{TryRecvError, channel};

    use super::*;

    #[test]
    fn flush_ends_with_the_acknowledgement_of_its_own_heartbeat() {
        let mut flushes = Flushes { sent: 1, ..Flushes::default() };
        let (waiting, flushed) = channel();
        flushes.begin(waiting);
        flushes.acknowledge();
        assert_eq!(flushed.try_recv(), Err(TryRecvError::Empty));
        flushes.acknowledge();
        assert_eq!(flushed.try_recv(), Err(TryRecvError::Disconnected));
    }
}
