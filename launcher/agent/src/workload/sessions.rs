//! The sessions of one attempt's workers: which ranks have opened one, and the deadline for all of them. Pure except
//! for queueing commands, which never waits.
//!
//! A worker opens the communicator between the rendezvous and its session. That is collective and has no timeout of its
//! own: `ncclCommInitRank` hangs for as long as one rank does not take part. So the agent sets a deadline for all
//! ranks, counted from the end of the rendezvous.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tonic::Status;
use xlaunch_proto::v1::AgentCommand;
use xlaunch_proto::v1::agent_command::Command;
use xlaunch_spec::quantities::ranks_text;

/// Sends commands to one worker.
pub(crate) type Commands = mpsc::Sender<Result<AgentCommand, Status>>;

#[derive(Debug)]
pub(super) struct Sessions {
    /// Indexed by rank.
    ranks: Vec<RankSession>,
    /// The time by which every rank must have opened its session; `None` before the rendezvous is complete.
    due: Option<Instant>,
    timeout: Duration,
}

#[derive(Debug, Default)]
struct RankSession {
    has_opened: bool,
    /// `None` while the session is closed.
    commands: Option<Commands>,
}

impl Sessions {
    pub(super) fn new(world: u32) -> Self {
        let ranks = (0..world).map(|_| RankSession::default()).collect();
        Self { ranks, due: None, timeout: Duration::ZERO }
    }

    /// Starts the deadline: the rendezvous is complete.
    pub(super) fn all_joined(&mut self, timeout: Duration, now: Instant) {
        (self.due, self.timeout) = (now.checked_add(timeout), timeout);
    }

    /// Records that a rank has opened its session. Returns `false` if there is no such rank.
    pub(super) fn opened(&mut self, rank: u32, commands: Commands) -> bool {
        let Some(session) = self.ranks.get_mut(rank as usize) else { return false };
        *session = RankSession { has_opened: true, commands: Some(commands) };
        true
    }

    /// Closes a session. Dropping the last sender ends the stream of commands, which tells the worker that its last
    /// report has arrived.
    pub(super) fn closed(&mut self, rank: u32) {
        if let Some(session) = self.ranks.get_mut(rank as usize) {
            session.commands = None;
        }
    }

    /// Queues a command for a worker. A worker that does not empty its queue hangs, so a command that finds the queue
    /// full is dropped.
    pub(super) fn send(&self, rank: u32, command: Command) {
        if let Some(commands) = self.ranks.get(rank as usize).and_then(|session| session.commands.as_ref()) {
            let _ = commands.try_send(Ok(AgentCommand { command: Some(command) }));
        }
    }

    pub(super) fn send_to_all(&self, command: &Command) {
        (0..).zip(&self.ranks).for_each(|(rank, _)| self.send(rank, command.clone()));
    }

    /// The earliest time at which [`expired`](Self::expired) may return a reason.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.filter(|_| self.ranks.iter().any(|session| !session.has_opened))
    }

    /// Returns a message that names the ranks without a session if the deadline has passed at `now`.
    pub(super) fn expired(&self, now: Instant) -> Option<String> {
        self.deadline().filter(|due| now >= *due)?;
        let missing = (0..).zip(&self.ranks).filter(|(_, session)| !session.has_opened);
        Some(format!(
            "{} of {} joined, but did not open the communicator within {} s (launch.join_timeout)",
            ranks_text(missing.map(|(rank, _): (u32, _)| rank)),
            self.ranks.len(),
            self.timeout.as_secs_f64()
        ))
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::StopCommand;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(120);

    #[test]
    fn ranks_without_a_session_are_named_at_the_deadline() {
        let (mut sessions, now) = (Sessions::new(4), Instant::now());
        assert_eq!(sessions.deadline(), None, "ranks are joining");
        sessions.all_joined(TIMEOUT, now);
        let (commands, _receiver) = mpsc::channel(1);
        assert!(sessions.opened(0, commands.clone()) && sessions.opened(2, commands.clone()));
        assert!(!sessions.opened(4, commands.clone()));
        // Rank 2 has opened its session, although it is closed by now.
        sessions.closed(2);
        assert_eq!(sessions.deadline(), Some(now + TIMEOUT));
        assert_eq!(sessions.expired(now + TIMEOUT - Duration::from_millis(1)), None);
        let reason = sessions.expired(now + TIMEOUT).unwrap();
        assert!(reason.starts_with("ranks 1, 3 of 4 joined, but did not open"), "{reason}");
        assert!(sessions.opened(1, commands.clone()) && sessions.opened(3, commands));
        assert_eq!((sessions.deadline(), sessions.expired(now + TIMEOUT)), (None, None));
    }

    #[test]
    fn commands_reach_open_sessions_and_a_full_queue_does_not_block() {
        let mut sessions = Sessions::new(3);
        let channels: Vec<_> = (0..3).map(|_| mpsc::channel(1)).collect();
        for (rank, (commands, _)) in (0..).zip(&channels) {
            sessions.opened(rank, commands.clone());
        }
        sessions.closed(1);
        for _ in 0..2 {
            sessions.send_to_all(&Command::Stop(StopCommand {}));
        }
        let received: Vec<usize> = channels.iter().map(|(_, receiver)| receiver.len()).collect();
        assert_eq!(received, [1, 0, 1]);
    }
}
