//! Connections between agents and the coordinator, with the guarantees of TCP: messages arrive in order and once, late,
//! or not at all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::{AgentMessage, CoordinatorMessage};

use super::{Happening, World};
use xlaunch_cluster::coordinator::{self, Event, HowClosed};

/// A connection of an agent, possibly closed.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) host: usize,
    pub(super) incarnation: u32,
    /// Agent and coordinator are in the same process.
    local: bool,
    /// Nothing arrives any more, not even the news that it has ended.
    pub(super) lost: bool,
    handle: Option<coordinator::Connection>,
    replies: Option<mpsc::UnboundedReceiver<CoordinatorMessage>>,
    up: VecDeque<(Instant, Up)>,
    down: VecDeque<(Instant, Down)>,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most are messages")]
pub(super) enum Up {
    Message(AgentMessage),
    End,
}

#[derive(Debug)]
pub(super) enum Down {
    /// The coordinator has received the greeting.
    Opened,
    Message(CoordinatorMessage),
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Up,
    Down,
}

impl World {
    pub(super) fn connect(&mut self, host: usize, local: bool) -> usize {
        let incarnation = self.nodes[host].incarnation;
        self.connections.push(Connection {
            host,
            incarnation,
            local,
            lost: false,
            handle: None,
            replies: None,
            up: VecDeque::new(),
            down: VecDeque::new(),
        });
        self.connections.len() - 1
    }

    /// Sends from the agent to the coordinator.
    pub(super) fn send_up(&mut self, connection: usize, item: Up) {
        let due = self.arrival(connection);
        let it = &mut self.connections[connection];
        it.up.push_back((due, item));
        if it.up.len() == 1 {
            self.schedule(due, Happening::Deliver(connection, Direction::Up));
        }
    }

    fn send_down(&mut self, connection: usize, item: Down) {
        let due = self.arrival(connection);
        let it = &mut self.connections[connection];
        it.down.push_back((due, item));
        if it.down.len() == 1 {
            self.schedule(due, Happening::Deliver(connection, Direction::Down));
        }
    }

    fn arrival(&mut self, connection: usize) -> Instant {
        if self.connections[connection].local {
            return self.now;
        }
        let slow = self.nodes[self.connections[connection].host].slow;
        let extra = slow.filter(|(until, _)| self.now < *until).map_or(1, |(_, most)| most.as_millis());
        let delay = self.random.ms(1, 5) + self.random.ms(0, u32::try_from(extra).unwrap());
        self.now + delay
    }

    /// Time until which nothing arrives between this host and the coordinator.
    pub(super) fn cut_until(&self, host: usize, direction: Direction) -> Option<Instant> {
        let of = |host: usize, up: bool| {
            let node = &self.nodes[host];
            if up { node.up_cut } else { node.down_cut }
        };
        let is_up = direction == Direction::Up;
        let own = of(host, is_up);
        // On the coordinator's host, the direction is reversed: it receives what others send.
        let hosts = self.plan.hosted.then(|| of(0, !is_up));
        own.into_iter().chain(hosts.flatten()).max().filter(|until| self.now < *until)
    }

    pub(super) fn deliver(&mut self, connection: usize, direction: Direction) {
        let it = &self.connections[connection];
        if it.lost {
            return;
        }
        let cut = self.cut_until(it.host, direction).filter(|_| !it.local);
        if let Some(until) = cut {
            // TCP waits ever longer before it retransmits.
            let backoff = self.random.ms(1, 8000);
            return self.schedule(until + backoff, Happening::Deliver(connection, direction));
        }
        let next = match direction {
            Direction::Up => {
                let item = self.connections[connection].up.pop_front();
                item.into_iter().for_each(|(_, item)| self.arrived_up(connection, item));
                self.connections[connection].up.front().map(|(due, _)| *due)
            }
            Direction::Down => {
                let item = self.connections[connection].down.pop_front();
                item.into_iter().for_each(|(_, item)| self.arrived_down(connection, item));
                self.connections[connection].down.front().map(|(due, _)| *due)
            }
        };
        if let Some(due) = next {
            self.schedule(due.max(self.now), Happening::Deliver(connection, direction));
        }
    }

    fn arrived_up(&mut self, connection: usize, item: Up) {
        self.note(|| format!("to the coordinator on {connection}: {item:?}"));
        let Some(task) = &mut self.coordinator else { return };
        match (item, self.connections[connection].handle) {
            (Up::Message(message), Some(handle)) => task.event(Event::Received(handle, message), self.now),
            (
                Up::Message(AgentMessage { acknowledged, body: Some(FromAgent::Greeting(greeting)), .. }),
                None,
            ) => {
                let ((replies, receiver), (opened, mut handle)) =
                    (mpsc::unbounded_channel(), oneshot::channel());
                task.event(Event::Opened { greeting, acknowledged, replies, opened }, self.now);
                let it = &mut self.connections[connection];
                (it.handle, it.replies) = (handle.try_recv().ok(), Some(receiver));
                self.send_down(connection, Down::Opened);
            }
            (Up::Message(message), None) => panic!("{message:?} before a greeting"),
            (Up::End, Some(handle)) => task.event(Event::Closed(handle, HowClosed::ByAgent), self.now),
            (Up::End, None) => {}
        }
        self.after_coordinator();
    }

    fn arrived_down(&mut self, connection: usize, item: Down) {
        let Connection { host, incarnation, .. } = self.connections[connection];
        let node = &self.nodes[host];
        let is_current = node.incarnation == incarnation
            && node.agent.as_ref().is_some_and(|agent| agent.connection == Some(connection));
        if is_current {
            self.note(|| format!("to h{host} on {connection}: {item:?}"));
            self.agent_hears(host, item);
        }
    }

    pub(super) fn coordinator_ticks(&mut self) {
        if let Some(task) = &mut self.coordinator {
            task.tick(self.now);
        }
        self.after_coordinator();
    }

    /// Delivers the coordinator's replies, and ends it when the job is over.
    fn after_coordinator(&mut self) {
        for connection in 0..self.connections.len() {
            while let Some(Ok(message)) =
                self.connections[connection].replies.as_mut().map(mpsc::UnboundedReceiver::try_recv)
            {
                self.send_down(connection, Down::Message(message));
            }
        }
        if self.coordinator.as_mut().is_some_and(|task| task.is_finished(self.now)) {
            self.end_coordinator();
        }
    }

    /// Ends the coordinator's process; its kernel closes all connections.
    pub(super) fn end_coordinator(&mut self) {
        self.note(|| "the coordinator ends".into());
        self.coordinator = None;
        for connection in 0..self.connections.len() {
            if self.connections[connection].handle.is_some() {
                self.send_down(connection, Down::End);
            }
        }
    }

    /// The network ends a connection.
    pub(super) fn reset(&mut self, host: usize, agent: bool, coordinator: bool) {
        let Some(connection) = self.nodes[host].agent.as_ref().and_then(|agent| agent.connection) else {
            return;
        };
        let it = &mut self.connections[connection];
        if it.local {
            return;
        }
        it.lost = true;
        if let (true, Some(handle), Some(task)) = (coordinator, it.handle, &mut self.coordinator) {
            task.event(Event::Closed(handle, HowClosed::ByNetwork), self.now);
            self.after_coordinator();
        }
        if agent {
            self.lose_connection(host);
        }
    }

    pub(super) fn round_trip(&mut self) -> Duration {
        self.random.ms(1, 10)
    }
}
