//! The session: reports and heartbeats out, commands in, until the trainer is done or the agent is lost.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::agent_client::AgentClient;
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{Heartbeat, Hello, WorkerReport};

use super::{Request, Shared};

/// Time between heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats without an answer after which the agent counts as lost. It is not told by a clock: a process that was stopped
/// finds much time gone by, and the answers still to be read.
const LEASE: u32 = 15;
/// Time for the trainer to end by itself once the collective is aborted.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// Time for the agent to take the last reports.
const FAREWELL: Duration = Duration::from_secs(5);

pub(super) async fn run(
    mut agent: AgentClient<Channel>,
    hello: Hello,
    mut requests: mpsc::UnboundedReceiver<Request>,
    shared: Arc<Shared>,
) {
    let (reports, outgoing) = mpsc::unbounded_channel();
    let send = |report: Report| {
        // Fails only when the stream is gone, which the incoming side notices.
        let _ = reports.send(WorkerReport { report: Some(report) });
    };
    send(Report::Hello(hello));
    let mut commands = match agent.session(UnboundedReceiverStream::new(outgoing)).await {
        Ok(commands) => commands.into_inner(),
        Err(status) => return lose(&shared, &mut requests, status.message()).await,
    };
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut unanswered = 0;
    loop {
        tokio::select! {
            request = requests.recv() => match request {
                Some(Request::Report(report)) => send(report),
                Some(_) => {}
                None => break,
            },
            command = commands.next() => match command {
                Some(Ok(command)) => {
                    unanswered = 0;
                    match command.command {
                        Some(Command::Stop(_)) => shared.stop.store(true, Ordering::Relaxed),
                        Some(Command::Checkpoint(_)) => shared.checkpoint.store(true, Ordering::Relaxed),
                        Some(Command::HeartbeatAck(_)) | None => {}
                    }
                }
                Some(Err(status)) => return lose(&shared, &mut requests, status.message()).await,
                None => return lose(&shared, &mut requests, "it closed the session").await,
            },
            _ = heartbeat.tick() => {
                if unanswered == LEASE {
                    return lose(&shared, &mut requests, "it does not answer heartbeats").await;
                }
                unanswered += 1;
                send(Report::Heartbeat(beat(&shared)));
            }
        }
    }
    // The trainer is done: closing our side lets the agent read everything, then close its own.
    drop(reports);
    let end = async { while let Some(Ok(_)) = commands.next().await {} };
    // An agent that takes no last reports sees the exit code all the same.
    let _ = tokio::time::timeout(FAREWELL, end).await;
}

fn beat(shared: &Shared) -> Heartbeat {
    let (phase, lasts) = shared.trainer.get().map(|trainer| trainer.read()).unwrap_or_default();
    let step = shared.step.load(Ordering::Relaxed);
    Heartbeat { step, phase: phase.into(), phase_seconds: lasts.as_secs_f64() }
}

/// The agent is gone: unblock the trainer, and end the process if it does not end by itself.
async fn lose(shared: &Shared, requests: &mut mpsc::UnboundedReceiver<Request>, reason: &str) {
    *shared.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
    shared.stop.store(true, Ordering::Relaxed);
    let abort = shared.abort.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(abort) = abort {
        abort.abort();
    }
    let closed = async { while requests.recv().await.is_some() {} };
    if tokio::time::timeout(LAST_WORDS, closed).await.is_err() {
        #[expect(
            clippy::exit,
            reason = "the trainer hangs in a call that nothing interrupts, and must not outlive its agent"
        )]
        std::process::exit(i32::from(ExitCode::Retryable.code()));
    }
}
