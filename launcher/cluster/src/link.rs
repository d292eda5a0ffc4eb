//! An agent's link to the coordinator of its job.
//!
//! ```text
//! driver --Body--> link --AgentMessage--> coordinator
//! driver <--FromGroup-- link <--CoordinatorMessage--
//! ```
//! A coordinator in the same process is reached over channels. A remote one is reached over a connection, which the
//! link reopens whenever it is lost. `link_state` decides what is sent on it and how to react to silence.

use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, sleep_until};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use tonic::{Response, Streaming};
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::group_client::GroupClient;
use xlaunch_proto::v1::{AgentMessage, CoordinatorMessage, Greeting};
use xlaunch_spec::command::Endpoint;
use xlaunch_spec::exit::ExitCode;

use super::coordinator::{Event, Handle, HowClosed};
pub use super::link_state::FromGroup;
use super::link_state::{self, Closed, LinkState, Step};
use super::net::{Connection, Dialed, Dialer, Security, Urgency};
use super::notices::Notices;
use super::shared::PROCESS_BYTES;

/// Time for the last message on a connection to arrive before the connection is closed.
const LAST_MESSAGE_DELAY: Duration = Duration::from_millis(100);

/// A link to a coordinator.
#[derive(Debug)]
pub struct Link {
    messages: mpsc::UnboundedSender<FromAgent>,
    inbox: mpsc::UnboundedReceiver<FromGroup>,
}

impl Link {
    /// Opens a link to a coordinator in this process. `notices` has lines for the user about other nodes.
    pub async fn local(
        coordinator: &Handle,
        greeting: Greeting,
        mut notices: mpsc::UnboundedReceiver<String>,
    ) -> Self {
        let (events, (replies, mut outgoing)) = (coordinator.events(), mpsc::unbounded_channel());
        let (messages, mut own) = mpsc::unbounded_channel();
        let (to_driver, inbox) = mpsc::unbounded_channel();
        let (opened, connection) = oneshot::channel();
        let _ = events.send(Event::Opened { greeting, acknowledged: 0, replies, opened });
        // Without an answer the coordinator is gone, and the driver's receiver ends at once.
        if let Ok(connection) = connection.await {
            tokio::spawn(async move {
                let (mut sequence, mut acknowledged) = (0, 0);
                loop {
                    let body = tokio::select! {
                        body = own.recv() => match body {
                            Some(body) => { sequence += 1; Some(body) }
                            None => break,
                        },
                        message = outgoing.recv() => match message {
                            Some(CoordinatorMessage { sequence, body: Some(body), .. }) => {
                                acknowledged = sequence;
                                let _ = to_driver.send(FromGroup::Message(body));
                                None
                            }
                            Some(_) => None,
                            None => break,
                        },
                        Some(notice) = notices.recv() => {
                            let _ = to_driver.send(FromGroup::Notice(notice));
                            continue;
                        }
                    };
                    let sequence = if body.is_some() { sequence } else { 0 };
                    let message = AgentMessage { sequence, acknowledged, body };
                    let _ = events.send(Event::Received(connection, message));
                }
                let _ = events.send(Event::Closed(connection, HowClosed::ByAgent));
            });
        }
        Self { messages, inbox }
    }

    /// Opens a link to the coordinator at an endpoint.
    pub fn remote(
        endpoint: Endpoint,
        security: Security,
        greeting: Greeting,
        join_timeout: Duration,
    ) -> Self {
        let (messages, own) = mpsc::unbounded_channel();
        let (to_driver, inbox) = mpsc::unbounded_channel();
        let remote = Remote {
            dialer: Dialer::new(endpoint, security),
            state: LinkState::new(greeting, join_timeout, Instant::now()),
            own,
            to_driver,
            given_up: Vec::new(),
        };
        tokio::spawn(remote.run());
        Self { messages, inbox }
    }

    /// Sends a message to the coordinator, now or when it can be reached again.
    pub fn send(&self, body: FromAgent) {
        // The receiver is gone only after the end of the job.
        let _ = self.messages.send(body);
    }

    /// Returns a sender for messages to the coordinator, for other tasks of this agent.
    pub fn sender(&self) -> mpsc::UnboundedSender<FromAgent> {
        self.messages.clone()
    }

    /// Returns the next event; `None` if the coordinator has gone after the end of the job.
    pub async fn next(&mut self) -> Option<FromGroup> {
        self.inbox.recv().await
    }
}

struct Remote {
    dialer: Dialer,
    state: LinkState,
    own: mpsc::UnboundedReceiver<FromAgent>,
    to_driver: mpsc::UnboundedSender<FromGroup>,
    /// Connections that were given up but are still open: closing one would tell the coordinator that this agent is
    /// gone, unless it knows a newer one.
    given_up: Vec<Stream>,
}

/// An open connection with its stream.
struct Stream {
    _channel: Channel,
    outgoing: mpsc::UnboundedSender<AgentMessage>,
    replies: Option<Streaming<CoordinatorMessage>>,
}

impl Remote {
    async fn run(mut self) {
        loop {
            let Some(channel) = self.connect().await else { return };
            match self.attend(channel).await {
                Closed::Over => return,
                Closed::Lost => {}
                Closed::Forgotten => {
                    if !self.renew().await {
                        return;
                    }
                }
            }
            self.dialer.restart();
        }
    }

    /// Connects to the coordinator, trying for as long as it may come back. Returns `None` if it does not, or if the
    /// driver is gone.
    async fn connect(&mut self) -> Option<Channel> {
        let mut notices = Notices::new(Instant::now());
        loop {
            let now = Instant::now();
            self.tick();
            if self.state.has_failed(self.dialer.is_gone(), now) {
                self.lost(self.dialer.problem());
                return None;
            }
            // A configuration that has worked once is not the cause.
            if let Some(error) = self.dialer.take_final_error().filter(|_| !self.state.was_admitted()) {
                self.pass_on(link_state::end(ExitCode::Rendezvous, error.to_string()));
                return None;
            }
            if notices.is_due(now) {
                self.pass_on(FromGroup::Notice(self.waiting(now)));
            }
            let wake = [Some(self.state.gives_up_at()), Some(notices.deadline()), self.state.deadline()];
            let wake = wake.into_iter().flatten().min().unwrap_or(now);
            let urgency = if self.state.is_attempting() { Urgency::Working } else { Urgency::Joining };
            tokio::select! {
                dialed = self.dialer.next(urgency) => match dialed {
                    Dialed::Connected(Connection { channel, .. }) => return Some(channel),
                    Dialed::Failed => {}
                },
                body = self.own.recv() => drop(self.state.send(body?)),
                () = sleep_until(wake.into()) => {}
            }
        }
    }

    fn tick(&mut self) {
        let step = self.state.tick(Instant::now());
        step.to_driver.into_iter().for_each(|message| self.pass_on(message));
    }

    /// Returns the line for a user who waits.
    fn waiting(&self, now: Instant) -> String {
        let seconds = self.state.gives_up_at().saturating_duration_since(now).as_secs();
        let lost = if self.state.was_admitted() { "the connection to the coordinator is lost: " } else { "" };
        format!("{lost}{}; trying for another {seconds} s", self.dialer.problem())
    }

    /// Uses one connection until it is lost.
    async fn attend(&mut self, channel: Channel) -> Closed {
        let (outgoing, messages) = mpsc::unbounded_channel();
        let _ = outgoing.send(self.state.greet(Instant::now()));
        let mut client = GroupClient::new(channel.clone());
        let opening = client.attend(UnboundedReceiverStream::new(messages));
        let opened = self.opened(opening).await;
        let Some(replies) = opened else { return Closed::Over };
        let mut stream = Stream { _channel: channel, outgoing, replies };
        let closed = self.exchange(&mut stream).await;
        self.state.disconnected();
        self.pass_on(FromGroup::Connected(false));
        if closed == Closed::Lost {
            self.given_up.push(stream);
        }
        closed
    }

    /// Waits for the reply to a greeting. The outer `None` means that the driver is gone; the inner one that no reply
    /// came.
    async fn opened(
        &mut self,
        opening: impl Future<Output = Result<Response<Streaming<CoordinatorMessage>>, tonic::Status>>,
    ) -> Option<Option<Streaming<CoordinatorMessage>>> {
        let deadline = Instant::now() + self.state.reply_timeout();
        let mut opening = pin!(opening);
        loop {
            self.tick();
            let wake = self.state.deadline().map_or(deadline, |at| at.min(deadline));
            tokio::select! {
                opened = &mut opening => return Some(opened.ok().map(Response::into_inner)),
                body = self.own.recv() => drop(self.state.send(body?)),
                () = sleep_until(wake.into()) => {
                    if Instant::now() >= deadline {
                        return Some(None);
                    }
                }
            }
        }
    }

    async fn exchange(&mut self, stream: &mut Stream) -> Closed {
        let Some(replies) = &mut stream.replies else { return Closed::Lost };
        for message in self.state.connected(Instant::now()) {
            let _ = stream.outgoing.send(message);
        }
        self.pass_on(FromGroup::Connected(true));
        loop {
            // While a connection is open there is always a deadline.
            let deadline = self.state.deadline().unwrap_or_else(Instant::now);
            let step = tokio::select! {
                reply = replies.next() => match reply {
                    Some(Ok(reply)) => {
                        // The coordinator knows this connection now.
                        self.given_up.clear();
                        self.state.receive(reply, Instant::now())
                    }
                    Some(Err(_)) | None => return Closed::Lost,
                },
                body = self.own.recv() => match body {
                    Some(body) => Step { to_coordinator: Some(self.state.send(body)), ..Step::default() },
                    None => return Closed::Over,
                },
                () = sleep_until(deadline.into()) => self.state.tick(Instant::now()),
            };
            step.to_driver.into_iter().for_each(|message| self.pass_on(message));
            step.to_coordinator.into_iter().for_each(|message| _ = stream.outgoing.send(message));
            match step.closed {
                None => {}
                Some(Closed::Lost) => return Closed::Lost,
                Some(closed) => {
                    // The last acknowledgement has to reach the coordinator.
                    let _ = stream.outgoing.send(self.state.heartbeat());
                    sleep(LAST_MESSAGE_DELAY).await;
                    return closed;
                }
            }
        }
    }

    /// Joins as a new member once no worker of the old membership is alive. Returns false if the driver is gone.
    async fn renew(&mut self) -> bool {
        while self.state.is_attempting() {
            let cut = self.state.cut("the coordinator considered this node lost".into());
            cut.into_iter().for_each(|message| self.pass_on(message));
            match self.own.recv().await {
                Some(body) => drop(self.state.send(body)),
                None => return false,
            }
        }
        let process = self.state.instance().iter().take(PROCESS_BYTES).copied();
        let instance = process.chain(new_instance()).take(2 * PROCESS_BYTES).collect();
        self.state.renew(instance);
        true
    }

    /// Reports that the coordinator is not coming back.
    fn lost(&self, problem: String) {
        self.pass_on(if self.state.was_admitted() {
            link_state::end(ExitCode::Retryable, format!("the coordinator was lost: {problem}"))
        } else {
            link_state::end(ExitCode::Rendezvous, problem)
        });
    }

    fn pass_on(&self, message: FromGroup) {
        // The receiver is gone only after the end of the job.
        let _ = self.to_driver.send(message);
    }
}

/// Returns a random id for an agent's process.
pub fn new_instance() -> Vec<u8> {
    use std::hash::{BuildHasher, RandomState};
    let half = || RandomState::new().hash_one(std::process::id()).to_be_bytes();
    [half(), half()].concat()
}
