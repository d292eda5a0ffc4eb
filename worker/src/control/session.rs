//! The session stream: sends reports and heartbeats, receives commands, until training ends or the agent is lost.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, getppid};
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
/// Unacknowledged heartbeats after which a running agent is considered lost. This is a count instead of a time: a
/// worker that was suspended (SIGSTOP) resumes with an outdated clock, but finds the acknowledgements in its socket.
const MAX_UNACKNOWLEDGED_HEARTBEATS: u32 = 15;
/// Time for the training thread to end after the collective was aborted.
const ABORT_EXIT_TIMEOUT: Duration = Duration::from_secs(3);

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
    let mut watch = AgentWatch { agent: getppid(), unacknowledged: 0 };
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
                    watch.unacknowledged = 0;
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
                if watch.is_lost() {
                    return agent_lost(&shared, &mut requests, "it stopped answering heartbeats").await;
                }
                flushes.sent += 1;
                send(Report::Heartbeat(heartbeat_of(&shared)));
            }
        }
    }
    // Training has ended. Half-close the stream: the agent reads everything, then closes its side.
    drop(reports);
    loop {
        tokio::select! {
            command = commands.next() => match command {
                Some(Ok(_)) => watch.unacknowledged = 0,
                Some(Err(_)) | None => return,
            },
            // An agent that does not read the last reports in time still sees the exit code.
            _ = heartbeat.tick() => if watch.is_lost() { return },
        }
    }
}

/// Decides whether the agent is lost, although the connection to it is open.
struct AgentWatch {
    /// The agent's process, which has started this one.
    agent: Option<Pid>,
    unacknowledged: u32,
}

impl AgentWatch {
    /// Counts a heartbeat, and returns whether the agent is lost. An agent that was stopped, by SIGSTOP or a debugger,
    /// is not: it answers once it is continued, and if it is killed instead, the connection breaks.
    fn is_lost(&mut self) -> bool {
        if self.unacknowledged == MAX_UNACKNOWLEDGED_HEARTBEATS {
            return true;
        }
        self.unacknowledged = if self.agent.is_some_and(is_stopped) { 0 } else { self.unacknowledged + 1 };
        false
    }
}

fn is_stopped(process: Pid) -> bool {
    let stat = fs_err::read(format!("/proc/{process}/stat")).unwrap_or_default();
    // The state follows the name, which may contain any bytes.
    let state = String::from_utf8_lossy(&stat).rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
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
    use std::process::Command;
    use std::sync::mpsc::{TryRecvError, channel};

    use rustix::process::{Signal, kill_process};

    use super::*;

    #[test]
    fn agent_that_does_not_answer_is_lost_only_while_it_runs() {
        let mut sleep = Command::new("sleep").arg("100").spawn().unwrap();
        let agent = Pid::from_child(&sleep);
        let mut watch = AgentWatch { agent: Some(agent), unacknowledged: 3 };
        kill_process(agent, Signal::STOP).unwrap();
        while !is_stopped(agent) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!((0..100).all(|_| !watch.is_lost()));
        kill_process(agent, Signal::CONT).unwrap();
        while is_stopped(agent) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!((0..MAX_UNACKNOWLEDGED_HEARTBEATS).all(|_| !watch.is_lost()));
        assert!(watch.is_lost());
        sleep.kill().unwrap();
        sleep.wait().unwrap();
    }

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
