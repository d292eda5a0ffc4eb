//! The task that owns a group's state: events from the agents' connections come in, decisions go out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::sleep_until;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{AgentMessage, CoordinatorHeartbeat, CoordinatorMessage, Greeting};

use super::outbox::Outbox;
use super::refusals::RefusalLog;
use super::state::{Coordinator, Input, MemberId, Output};
use xlaunch_host::clock;

/// Time that the coordinator waits at the end of the job for members to learn its outcome. Covers a network outage that
/// is too short to lose a node.
const MEMBER_DRAIN_TIMEOUT: Duration = Duration::from_secs(15);
/// Same for an agent that is no longer a member: its last message is already on its way, or the node is lost.
const FORGOTTEN_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// An event on an agent's connection.
#[derive(Debug)]
pub enum Event {
    /// An agent has sent its greeting.
    Opened {
        /// The first message on the connection.
        greeting: Greeting,
        /// Number of the last message that the agent has received.
        acknowledged: u64,
        /// Channel for messages to the agent.
        replies: mpsc::UnboundedSender<CoordinatorMessage>,
        /// Receives the connection's id.
        opened: oneshot::Sender<Connection>,
    },
    /// A message has arrived.
    Received(Connection, AgentMessage),
    /// The connection is closed. May be sent twice: first as [`HowClosed::ByNetwork`], then as [`HowClosed::ByAgent`]
    /// once it is known that the agent's process is gone.
    Closed(Connection, HowClosed),
}

/// Reason for the end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HowClosed {
    /// The agent closed it, or its process is gone. Either way, none of its workers is alive.
    ByAgent,
    /// The network ended it, as far as the coordinator knows. The agent may not have noticed, so its workers count as
    /// gone only after silence for the time of the lease.
    ByNetwork,
}

/// Identifies one connection of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    id: MemberId,
    number: u64,
}

/// A running coordinator. It ends when the job is over, or when this handle is dropped.
#[derive(Debug)]
pub struct Handle {
    events: mpsc::UnboundedSender<Event>,
    notices: mpsc::UnboundedSender<String>,
    has_members: Arc<AtomicBool>,
    task: JoinHandle<u32>,
}

impl Handle {
    /// Starts a coordinator. If an agent hosts it (`hosted`), that agent has to open the first connection. `notices`
    /// receives lines for the user about nodes that are refused.
    pub fn start(state: Coordinator, hosted: bool, notices: mpsc::UnboundedSender<String>) -> Self {
        let (events, inbox) = mpsc::unbounded_channel();
        let task = Task { notices: Some(notices.clone()), ..Task::new(state, hosted) };
        let has_members = task.has_members.clone();
        Self { events, notices, has_members, task: tokio::spawn(run(task, inbox)) }
    }

    /// Returns the channel for lines to the user.
    pub fn notices(&self) -> mpsc::UnboundedSender<String> {
        self.notices.clone()
    }

    /// Returns whether an agent of another process has become a member.
    pub fn has_members(&self) -> bool {
        self.has_members.load(Ordering::Relaxed)
    }

    /// Returns the channel to which connections report their events.
    pub fn events(&self) -> mpsc::UnboundedSender<Event> {
        self.events.clone()
    }

    /// Waits until the job has ended and its agents know it. Returns the job's exit code.
    pub async fn ended(mut self) -> Option<u32> {
        (&mut self.task).await.ok()
    }

    /// Waits until all agents know that the job has ended.
    pub async fn finish(mut self) {
        let _ = tokio::time::timeout(2 * MEMBER_DRAIN_TIMEOUT, &mut self.task).await;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The group's state with the connections of its members.
#[derive(Debug)]
pub struct Task {
    state: Coordinator,
    agents: BTreeMap<MemberId, Agent>,
    /// Next number. Members and connections share the sequence.
    next: u64,
    /// Time at which the job ended.
    over: Option<Instant>,
    notices: Option<mpsc::UnboundedSender<String>>,
    refusals: RefusalLog,
    has_members: Arc<AtomicBool>,
}

/// An agent that has sent its greeting.
#[derive(Debug)]
struct Agent {
    instance: Vec<u8>,
    host: String,
    /// The agent was not a member before. Only then is its refusal news to the user.
    is_new: bool,
    connection: u64,
    replies: Option<mpsc::UnboundedSender<CoordinatorMessage>>,
    outbox: Outbox<ToAgent>,
    /// Highest connection number among the greetings received; the agent counts its connections.
    greeted: u64,
    /// The agent is not, or no longer, a member.
    forgotten: bool,
    /// The agent closed its connection, or its process is gone.
    gone: bool,
}

/// Returns the job's exit code.
async fn run(mut task: Task, mut inbox: mpsc::UnboundedReceiver<Event>) -> u32 {
    while !task.is_finished(Instant::now()) {
        let deadline = task.deadline().unwrap_or_else(|| Instant::now() + clock::IDLE_SLEEP);
        tokio::select! {
            event = inbox.recv() => match event {
                Some(event) => task.event(event, Instant::now()),
                None => break,
            },
            () = sleep_until(deadline.into()) => task.tick(Instant::now()),
        }
    }
    task.state.exit_code().unwrap_or(0)
}

impl Task {
    pub fn new(state: Coordinator, hosted: bool) -> Self {
        let next = Coordinator::HOST + u64::from(!hosted);
        let (refusals, has_members) = (RefusalLog::default(), Arc::default());
        Self { state, agents: BTreeMap::new(), next, over: None, notices: None, refusals, has_members }
    }

    /// Returns whether all agents know how the job has ended, or have had enough time to learn it.
    pub fn is_finished(&mut self, now: Instant) -> bool {
        if !self.state.is_over() {
            return false;
        }
        let over = *self.over.get_or_insert(now);
        self.agents.values().all(|agent| agent.knows_all() || now >= over + agent.drain_timeout())
    }

    pub fn deadline(&self) -> Option<Instant> {
        let ends = self.agents.values().filter(|agent| !agent.knows_all()).map(Agent::drain_timeout);
        let end = self.over.zip(ends.max()).map(|(over, time)| over + time);
        self.state.deadline().or(end)
    }

    pub fn tick(&mut self, now: Instant) {
        self.input(Input::Tick, now);
    }

    pub fn event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Opened { greeting, acknowledged, replies, opened } => {
                let connection = self.open(greeting, acknowledged, replies, now);
                // The receiver is gone if the connection has closed meanwhile. That is reported as an event of its own.
                let _ = opened.send(connection);
            }
            Event::Received(connection, message) => self.received(connection, message, now),
            Event::Closed(connection, how) => self.closed(connection, how, now),
        }
    }

    fn open(
        &mut self,
        greeting: Greeting,
        acknowledged: u64,
        replies: mpsc::UnboundedSender<CoordinatorMessage>,
        now: Instant,
    ) -> Connection {
        let known = self.agents.iter_mut().find(|(_, agent)| agent.instance == greeting.instance);
        let number = self.next;
        if let Some((id, agent)) = known.filter(|(_, agent)| !agent.forgotten) {
            let id = *id;
            self.next += 1;
            // The agent has already given up this connection for a newer one. Or it hosts this coordinator, and its
            // link to another one, which it is about to give up, has found this one.
            if greeting.connection <= agent.greeted || id == Coordinator::HOST {
                return Connection { id, number };
            }
            agent.greeted = greeting.connection;
            agent.outbox.acknowledge(acknowledged);
            (agent.connection, agent.replies, agent.gone) = (number, Some(replies), false);
            agent.greet_again();
            self.input(Input::Connected(id), now);
            return Connection { id, number };
        }
        self.next += 1;
        let agent = Agent {
            instance: greeting.instance.clone(),
            host: greeting.host.clone(),
            is_new: greeting.new,
            connection: number,
            replies: Some(replies),
            outbox: Outbox::default(),
            greeted: greeting.connection,
            forgotten: false,
            gone: false,
        };
        self.agents.insert(number, agent);
        self.input(Input::Greeted(number, greeting), now);
        Connection { id: number, number }
    }

    fn received(&mut self, connection: Connection, message: AgentMessage, now: Instant) {
        let Some(agent) = self.agent(connection) else { return };
        agent.outbox.acknowledge(message.acknowledged);
        let Some(body) = message.body.filter(|_| !agent.forgotten) else { return };
        if matches!(body, FromAgent::Heartbeat(_)) {
            agent.transmit(0, Some(ToAgent::Heartbeat(CoordinatorHeartbeat {})));
            return self.input(Input::Heard(connection.id), now);
        }
        if agent.outbox.accept(message.sequence) {
            self.input(Input::Heard(connection.id), now);
            self.input(Input::Message(connection.id, body), now);
        }
    }

    fn closed(&mut self, connection: Connection, how: HowClosed, now: Instant) {
        let Some(agent) = self.agent(connection) else { return };
        let forgotten = agent.forgotten;
        agent.replies = None;
        if how == HowClosed::ByAgent {
            agent.gone = true;
            self.input(Input::Disconnected(connection.id), now);
        }
        if forgotten {
            self.agents.remove(&connection.id);
        }
    }

    /// Returns the agent if this is its newest connection.
    fn agent(&mut self, connection: Connection) -> Option<&mut Agent> {
        self.agents.get_mut(&connection.id).filter(|agent| agent.connection == connection.number)
    }

    fn input(&mut self, input: Input, now: Instant) {
        for output in self.state.handle(input, now) {
            match output {
                Output::Send(id, body) => {
                    if let ToAgent::Welcome(welcome) = &body {
                        self.welcomed(id, &welcome.refusal, now);
                    }
                    if let Some(agent) = self.agents.get_mut(&id) {
                        agent.send(body);
                    }
                }
                Output::Forget(id) => {
                    if let Some(agent) = self.agents.get_mut(&id) {
                        agent.forgotten = true;
                        if agent.replies.is_none() {
                            self.agents.remove(&id);
                        }
                    }
                }
            }
        }
    }
}

impl Task {
    /// Records that an agent was admitted, or tells the user of this node that it was refused.
    fn welcomed(&mut self, id: MemberId, refusal: &str, now: Instant) {
        if refusal.is_empty() {
            self.has_members.fetch_or(id != Coordinator::HOST, Ordering::Relaxed);
            return;
        }
        let Some(agent) = self.agents.get(&id).filter(|agent| agent.is_new && !self.state.is_over()) else {
            return;
        };
        let line = self.refusals.refused(&format!("a launch on {}", agent.host), refusal, now);
        // The receiver is gone if the user's process has ended.
        line.into_iter().zip(&self.notices).for_each(|(line, notices)| _ = notices.send(line));
    }
}

impl Agent {
    fn send(&mut self, body: ToAgent) {
        let sequence = self.outbox.push(body.clone());
        self.transmit(sequence, Some(body));
    }

    /// Sends the first messages on a further connection of the same agent. The one without a body says that the agent
    /// is still known. A heartbeat would not do: the agent would take it for the reply to one of its own.
    fn greet_again(&self) {
        self.transmit(0, None);
        for (sequence, body) in self.outbox.waiting() {
            self.transmit(*sequence, Some(body.clone()));
        }
    }

    fn transmit(&self, sequence: u64, body: Option<ToAgent>) {
        if let Some(replies) = &self.replies {
            let message = CoordinatorMessage { sequence, acknowledged: self.outbox.received(), body };
            // If the connection has closed, the message is sent again on the next one.
            let _ = replies.send(message);
        }
    }

    /// Returns whether the agent has acknowledged every message, or is gone.
    fn knows_all(&self) -> bool {
        self.gone || self.outbox.is_empty()
    }

    fn drain_timeout(&self) -> Duration {
        if self.forgotten { FORGOTTEN_DRAIN_TIMEOUT } else { MEMBER_DRAIN_TIMEOUT }
    }
}

#[cfg(test)]
mod tests {
    use xlaunch_proto::v1::GroupRules;

    use super::*;
    use crate::hosting::new_coordinator;

    #[test]
    fn other_link_of_the_hosting_agent_does_not_take_the_place_of_its_own() {
        let mut task = Task::new(new_coordinator("run".into()), true);
        let mut open = |connection| {
            let (replies, inbox) = mpsc::unbounded_channel();
            let greeting = Greeting {
                instance: vec![1],
                host: "h0".into(),
                workers: 1,
                min_nodes: 2,
                max_nodes: 2,
                rules: Some(GroupRules { join_timeout: 600.0, lease: 12.0, ..GroupRules::default() }),
                new: true,
                connection,
                ..Greeting::default()
            };
            let opened = Event::Opened { greeting, acknowledged: 0, replies, opened: oneshot::channel().0 };
            task.event(opened, Instant::now());
            inbox
        };
        let (mut own, mut other) = (open(0), open(1));
        assert!(
            matches!(own.try_recv().unwrap().body, Some(ToAgent::Welcome(welcome)) if welcome.refusal.is_empty())
        );
        assert_eq!(other.try_recv().unwrap_err(), mpsc::error::TryRecvError::Disconnected);
        let end = std::iter::from_fn(|| Some(own.try_recv())).find_map(Result::err);
        assert_eq!(end, Some(mpsc::error::TryRecvError::Empty));
    }
}
