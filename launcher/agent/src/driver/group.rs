//! The driver's side of the group: preparations for an attempt, messages from the coordinator, and the translation of
//! ranks.
//!
//! Everything inside the agent uses local ranks; workers and users know the ranks of the job.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::mpsc;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{NodePrepared, Prepare, StopRequested};

use super::Driver;
use crate::rendezvous::message::Message;
use crate::rendezvous::peers::Peers;
use crate::state::{Event, StopCause};
use crate::status::board::Board;
use crate::waiting::{self, Group};
use crate::workload::Hang;
use xlaunch_cluster::Assignment;
use xlaunch_cluster::link::FromGroup;

/// Timeout for connecting to the next node.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for users on other nodes who follow logs to get the last lines of an attempt.
const LAST_LINES_TIMEOUT: Duration = Duration::from_millis(500);

/// This node's place in the group.
#[derive(Debug)]
pub(super) struct Membership {
    messages: mpsc::UnboundedSender<FromAgent>,
    prepare: Prepare,
    assignment: Assignment,
    /// Whether this node has asked to be stopped.
    stop_requested: bool,
}

impl Membership {
    pub(super) fn new(group: &Group) -> Self {
        let assignment = Assignment::new(&group.first, &xlaunch_proto::v1::Begin::default());
        let messages = group.link.sender();
        Self { messages, prepare: group.first.clone(), assignment, stop_requested: false }
    }

    /// Returns the attempt that the coordinator announced last.
    pub(super) fn prepare(&self) -> Prepare {
        self.prepare.clone()
    }

    pub(super) fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Returns the rank of this node, if there are other nodes.
    pub(super) fn node_rank(&self) -> Option<u32> {
        self.assignment.has_peers().then_some(self.assignment.node_rank)
    }

    pub(super) fn send(&self, message: FromAgent) {
        // The receiver is gone only after the end of the job.
        let _ = self.messages.send(message);
    }

    /// Passes on the wish of the user to stop the job, or of the system to stop this node. The coordinator answers.
    pub(super) fn request_stop(&mut self, signal: Option<Signal>) {
        self.stop_requested = true;
        let signal = signal.and_then(|signal| u32::try_from(signal.as_raw()).ok()).unwrap_or(0);
        self.send(FromAgent::StopRequested(StopRequested { signal }));
    }

    pub(super) fn has_requested_stop(&self) -> bool {
        self.stop_requested
    }

    /// Converts a worker's message to its local rank. Returns `None` if the rank belongs to another node, and thus to
    /// another attempt.
    pub(super) fn of_local_rank(&self, mut message: Message) -> Option<Message> {
        let first = self.assignment.first_rank;
        let rank = match &mut message {
            Message::GetJob(request, _) => &mut request.rank,
            // The rendezvous uses the ranks of the job.
            Message::Join(..) => return Some(message),
            Message::SessionOpened { rank, .. }
            | Message::SessionClosed { rank, .. }
            | Message::Report { rank, .. } => rank,
            Message::Stop(_) | Message::Checkpoint(_) | Message::Signal(_) => return Some(message),
        };
        *rank = rank.checked_sub(first)?;
        Some(message)
    }
}

impl Driver<'_> {
    /// Gets ready for an attempt and tells the coordinator; if modules are still being imported, once that is done.
    pub(super) fn prepare_attempt(&mut self, prepare: Prepare) {
        self.membership.prepare = prepare.clone();
        if self.importing {
            return;
        }
        let mut prepared = NodePrepared { attempt: prepare.attempt, ..NodePrepared::default() };
        if prepare.node_rank == 0 {
            match self.workload.reserve_port() {
                Ok(port) => prepared.master_port = port.into(),
                Err(error) => prepared.problem = format!("found no port for rank 0: {error}"),
            }
        }
        prepared.shared = self.workload.is_shared(&prepare.checkpoints_instance);
        if prepare.nodes == 1 {
            return self.membership.send(FromAgent::Prepared(prepared));
        }
        let messages = self.membership.messages.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = reach_next(&prepare)
                && prepared.problem.is_empty()
            {
                prepared.problem = unreachable(&prepare, &error);
            }
            // The receiver is gone only after the end of the job.
            let _ = messages.send(FromAgent::Prepared(prepared));
        });
    }

    /// Handles a message from the coordinator. Returns events for the job.
    pub(super) fn group_message(&mut self, message: FromGroup) -> Vec<Event> {
        let message = match message {
            FromGroup::CutOff(reason) => return vec![Event::CutOff(reason)],
            FromGroup::Connected(connected) => {
                self.board.send_modify(|board| board.set_connected(connected));
                return Vec::new();
            }
            FromGroup::Notice(text) => {
                self.notify(&text);
                return Vec::new();
            }
            FromGroup::Message(message) => message,
        };
        let attempt = self.job.attempt();
        let event = match message {
            ToAgent::Prepare(prepare) => {
                self.board.send_modify(|board| board.set_spare(false));
                self.prepare_attempt(prepare);
                None
            }
            ToAgent::Begin(begin) if begin.attempt == self.membership.prepare.attempt => {
                self.membership.assignment = Assignment::new(&self.membership.prepare, &begin);
                let Assignment { node_rank, first_rank, .. } = self.membership.assignment;
                Some(Event::Begin { attempt: begin.attempt, node_rank, first_rank })
            }
            ToAgent::PeerFailed(failed) if failed.attempt == attempt => {
                Some(Event::PeerFailed(failed.message))
            }
            ToAgent::Pause(pause) if pause.attempt == attempt => Some(Event::Pause(pause.reason)),
            ToAgent::Stop(stop) => {
                let signal = i32::try_from(stop.signal).ok().filter(|signal| *signal != 0);
                Some(Event::Stop(signal.map_or(StopCause::Call, StopCause::Signal)))
            }
            ToAgent::Restarting(restarting) => Some(Event::Restarting(restarting)),
            ToAgent::End(end) => Some(Event::GroupEnded(end)),
            ToAgent::Hung(hung) if hung.attempt == attempt => {
                let first = self.membership.assignment.first_rank;
                let culprits = hung.ranks.iter().filter_map(|rank| rank.checked_sub(first));
                let culprits: Vec<u32> = culprits.filter(|rank| *rank < self.workers).collect();
                let hints = culprits.iter().map(|rank| (*rank, hung.message.clone())).collect();
                self.board.send_modify(|board| board.set_hints(hints));
                self.examine(Hang { number: 0, culprits, cause: hung.message, ends: true });
                None
            }
            ToAgent::Waiting(waiting) => {
                waiting::waits(&self.board, &waiting, |text| self.notify(text));
                None
            }
            question @ (ToAgent::Nodes(_) | ToAgent::Query(_) | ToAgent::QueryReply(_)) => {
                if let Some(peers) = &self.peers {
                    peers.received(question);
                }
                None
            }
            other => self.workload.group_message(other, &self.job, &self.board),
        };
        event.into_iter().collect()
    }

    /// Sends the last lines of an attempt to other nodes that follow them. Must happen before the coordinator learns of
    /// the end of the attempt: afterwards the job may be over and the connection gone.
    pub(super) async fn send_logs(&mut self) {
        let Some(peers) = self.peers.clone().filter(Peers::is_sending_logs) else { return };
        self.end_attempt().await;
        self.board.send_modify(Board::attempt_ended);
        peers.logs_sent(LAST_LINES_TIMEOUT).await;
    }
}

fn unreachable(prepare: &Prepare, error: &io::Error) -> String {
    format!(
        "cannot reach {host} at {address} port {port}: {error}; if {host} has another address for the other nodes, \
         choose it with `--interface` or `--local-addr`; otherwise, open its ports to them",
        host = prepare.next_host,
        address = prepare.next_address,
        port = prepare.next_probe_port
    )
}

/// Connects to the next node, as its workers are about to do.
fn reach_next(prepare: &Prepare) -> io::Result<()> {
    let port = u16::try_from(prepare.next_probe_port).map_err(io::Error::other)?;
    let mut addresses = (prepare.next_address.as_str(), port).to_socket_addrs()?;
    let address = addresses.next().ok_or(io::ErrorKind::NotFound)?;
    TcpStream::connect_timeout(&address, PROBE_TIMEOUT).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_node_is_named_with_its_address_and_the_flag_that_chooses_another() {
        let prepare = Prepare {
            next_host: "h1".into(),
            next_address: "10.0.0.5".into(),
            next_probe_port: 29401,
            ..Prepare::default()
        };
        assert_eq!(
            unreachable(&prepare, &io::ErrorKind::ConnectionRefused.into()),
            "cannot reach h1 at 10.0.0.5 port 29401: connection refused; if h1 has another address for the other \
             nodes, choose it with `--interface` or `--local-addr`; otherwise, open its ports to them"
        );
    }
}
