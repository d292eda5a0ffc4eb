//! The task that owns a group's state: connections of agents in, decisions out.

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
use crate::clock;

/// For agents to learn how the job has ended, after a cut that loses no node, too.
const MEMBER_DRAIN_TIMEOUT: Duration = Duration::from_secs(15);
/// The same for one that is no longer a member: its last message is on its way, or the node is lost.
const FORGOTTEN_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// What happens on connections of agents.
#[derive(Debug)]
pub enum Event {
    /// An agent has greeted.
    Opened {
        /// Its first message.
        greeting: Greeting,
        /// The last message that it has received.
        acknowledged: u64,
        /// Takes what is for the agent.
        replies: mpsc::UnboundedSender<CoordinatorMessage>,
        /// Gets the number of the connection.
        opened: oneshot::Sender<Connection>,
    },
    /// A message has arrived.
    Received(Connection, AgentMessage),
    /// The connection is closed. It may become known only later that it was the agent who has closed it.
    Closed(Connection, HowClosed),
}

/// How a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HowClosed {
    /// The agent has closed it, or its process is gone: none of its workers lives.
    ByAgent,
    /// The network has ended it, as far as is known here. The agent may not have noticed, so only silence for the time
    /// of the lease tells that its workers are gone.
    ByNetwork,
}

/// A connection of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    id: MemberId,
    number: u64,
}

/// A running coordinator. It ends when the job is over, and with this.
#[derive(Debug)]
pub struct Handle {
    events: mpsc::UnboundedSender<Event>,
    notices: mpsc::UnboundedSender<String>,
    has_members: Arc<AtomicBool>,
    task: JoinHandle<u32>,
}

impl Handle {
    /// Starts a coordinator. If an agent hosts it, that has to open the first connection. `notices` gets lines for the
    /// user about nodes that are refused.
    pub fn start(state: Coordinator, hosted: bool, notices: mpsc::UnboundedSender<String>) -> Self {
        let (events, inbox) = mpsc::unbounded_channel();
        let task = Task { notices: Some(notices.clone()), ..Task::new(state, hosted) };
        let has_members = task.has_members.clone();
        Self { events, notices, has_members, task: tokio::spawn(run(task, inbox)) }
    }

    /// Gets lines for the user.
    pub(super) fn notices(&self) -> mpsc::UnboundedSender<String> {
        self.notices.clone()
    }

    /// Whether an agent of another process has become a member.
    pub(crate) fn has_members(&self) -> bool {
        self.has_members.load(Ordering::Relaxed)
    }

    /// Where connections send what happens on them.
    pub(super) fn events(&self) -> mpsc::UnboundedSender<Event> {
        self.events.clone()
    }

    /// Waits until the job has ended and its agents know that. Returns its exit code.
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
pub(super) struct Task {
    state: Coordinator,
    agents: BTreeMap<MemberId, Agent>,
    /// Of agents, and of connections.
    next: u64,
    /// When the job has ended.
    over: Option<Instant>,
    notices: Option<mpsc::UnboundedSender<String>>,
    refusals: RefusalLog,
    has_members: Arc<AtomicBool>,
}

/// An agent that has greeted.
#[derive(Debug)]
struct Agent {
    instance: Vec<u8>,
    host: String,
    /// It has had no membership before that it could have lost.
    is_new: bool,
    connection: u64,
    replies: Option<mpsc::UnboundedSender<CoordinatorMessage>>,
    outbox: Outbox<ToAgent>,
    /// The highest number of its connections that has arrived.
    greeted: u64,
    /// It is not, or no longer, a member.
    forgotten: bool,
    /// It has closed its connection.
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
    pub(super) fn new(state: Coordinator, hosted: bool) -> Self {
        let next = Coordinator::HOST + u64::from(!hosted);
        let (refusals, has_members) = (RefusalLog::default(), Arc::default());
        Self { state, agents: BTreeMap::new(), next, over: None, notices: None, refusals, has_members }
    }

    /// Whether all agents know how the job has ended, or had time to learn it.
    pub(super) fn is_finished(&mut self, now: Instant) -> bool {
        if !self.state.is_over() {
            return false;
        }
        let over = *self.over.get_or_insert(now);
        self.agents.values().all(|agent| agent.knows_all() || now >= over + agent.drain_timeout())
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let ends = self.agents.values().filter(|agent| !agent.knows_all()).map(Agent::drain_timeout);
        let end = self.over.zip(ends.max()).map(|(over, time)| over + time);
        self.state.deadline().or(end)
    }

    pub(super) fn tick(&mut self, now: Instant) {
        self.input(Input::Tick, now);
    }

    pub(super) fn event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Opened { greeting, acknowledged, replies, opened } => {
                let connection = self.open(greeting, acknowledged, replies, now);
                // The connection may have closed meanwhile, which it reports.
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
            if greeting.connection <= agent.greeted {
                // The agent has given this one up.
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

    /// The agent, if this is its newest connection.
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
    /// An agent was admitted, or refused: which the user of this node has to know.
    fn welcomed(&mut self, id: MemberId, refusal: &str, now: Instant) {
        if refusal.is_empty() {
            self.has_members.fetch_or(id != Coordinator::HOST, Ordering::Relaxed);
            return;
        }
        let Some(agent) = self.agents.get(&id).filter(|agent| agent.is_new && !self.state.is_over()) else {
            return;
        };
        let line = self.refusals.refused(&format!("a launch on {}", agent.host), refusal, now);
        // The user's process may have ended.
        line.into_iter().zip(&self.notices).for_each(|(line, notices)| _ = notices.send(line));
    }
}

impl Agent {
    fn send(&mut self, body: ToAgent) {
        let sequence = self.outbox.push(body.clone());
        self.transmit(sequence, Some(body));
    }

    /// The first messages on another connection of the same agent. The one without a body says that it is still known;
    /// a heartbeat would be taken for the answer to one of its own.
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

    /// Whether it knows all there is to know, or is gone.
    fn knows_all(&self) -> bool {
        self.gone || self.outbox.is_empty()
    }

    fn drain_timeout(&self) -> Duration {
        if self.forgotten { FORGOTTEN_DRAIN_TIMEOUT } else { MEMBER_DRAIN_TIMEOUT }
    }
}
