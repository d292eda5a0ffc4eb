//! An agent's side of the link to a remote coordinator. Pure: `link` owns the connections and carries out the
//! decisions.
//!
//! - **Lease.** The coordinator considers a node lost when it has not heard from it for the time of the lease. The link
//!   counts from the time at which it sent the last message that was answered, which is earlier, and makes the driver
//!   end the workers before the lease expires ([`FromGroup::CutOff`]).
//! - **Connections.** A silent connection is replaced by a new one. Closing a connection tells the coordinator that
//!   this agent is gone, so `link` closes one only once the coordinator knows a newer one.
//! - **Membership.** An agent that the coordinator no longer knows ends its workers and joins as a new member.
//!
//! Invariant: after the time at which the coordinator may have given this node's ranks to another node, no attempt
//! begins on this node and none of its workers is alive.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{
    AgentMessage, CoordinatorMessage, Greeting, GroupEnd, GroupRules, NodeHeartbeat, Welcome,
};
use xlaunch_spec::exit::ExitCode;

use super::outbox::Outbox;

/// Interval between heartbeats until the coordinator sets another.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(1);
/// A coordinator is gone when its address has refused connections for this long.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);
/// Time beyond the lease that an agent waits for the network to come back, if the coordinator may still be waiting for
/// it.
const RETURN_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the reply to a greeting on an open connection, if no workers are alive.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of heartbeat intervals without an answer after which a connection is given up. After an outage, an open
/// connection can stay silent for long: TCP waits ever longer before it retransmits.
const SILENT_HEARTBEATS: u32 = 3;
/// Share of the lease reserved for killing the workers: the lease ends this much earlier here than at the coordinator.
const FENCE_SHARE: f64 = 0.125;
const MIN_FENCE: Duration = Duration::from_millis(500);

/// News from the group for the driver.
#[derive(Debug)]
pub enum FromGroup {
    /// A message from the coordinator.
    Message(ToAgent),
    /// The connection to the coordinator has been opened (true) or lost (false).
    Connected(bool),
    /// The coordinator has not answered for so long that it may soon consider this node lost. The text is for the user.
    CutOff(String),
    /// A line for the user about the connection.
    Notice(String),
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The job is over, or the driver is gone.
    Over,
    /// The connection was lost; another one may follow.
    Lost,
    /// The coordinator no longer knows this agent.
    Forgotten,
}

/// Actions that follow from a message or from the passage of time.
#[derive(Debug, Default)]
pub struct Step {
    pub to_driver: Option<FromGroup>,
    pub to_coordinator: Option<AgentMessage>,
    pub closed: Option<Closed>,
}

#[derive(Debug)]
pub struct LinkState {
    greeting: Greeting,
    outbox: Outbox<FromAgent>,
    lease: Duration,
    /// Interval between heartbeats.
    interval: Duration,
    /// Time at which the last message was sent that the coordinator has answered.
    alive: Instant,
    greeted: Instant,
    connection: Option<Heartbeats>,
    /// The coordinator has accepted the greeting of this membership.
    admitted: bool,
    /// The coordinator has accepted this or an earlier membership.
    was_admitted: bool,
    /// Workers of an attempt may be alive.
    attempting: bool,
    /// The driver has been told that the coordinator is out of reach.
    cut_off: bool,
    /// Time at which the agent gives up.
    give_up: Instant,
    refused_since: Option<Instant>,
}

/// Heartbeats on an open connection.
#[derive(Debug)]
struct Heartbeats {
    next: Instant,
    /// Send times of unanswered heartbeats, oldest first. Answers come in the same order.
    unanswered: VecDeque<Instant>,
}

impl LinkState {
    pub fn new(greeting: Greeting, join_timeout: Duration, now: Instant) -> Self {
        Self {
            greeting,
            outbox: Outbox::default(),
            lease: join_timeout,
            interval: DEFAULT_INTERVAL,
            alive: now,
            greeted: now,
            connection: None,
            admitted: false,
            was_admitted: false,
            attempting: false,
            cut_off: false,
            give_up: now + join_timeout,
            refused_since: None,
        }
    }

    /// Time to wait for the reply to a greeting. While workers may be alive it is the timeout of a heartbeat.
    pub fn reply_timeout(&self) -> Duration {
        if self.attempting { SILENT_HEARTBEATS * self.interval } else { REPLY_TIMEOUT }
    }

    /// Returns the first message on a connection.
    pub fn greet(&mut self, now: Instant) -> AgentMessage {
        (self.greeted, self.refused_since) = (now, None);
        self.greeting.connection += 1;
        self.message(0, FromAgent::Greeting(self.greeting.clone()))
    }

    /// The coordinator has received the greeting. Returns the messages that it has not acknowledged.
    pub fn connected(&mut self, now: Instant) -> Vec<AgentMessage> {
        self.connection = Some(Heartbeats { next: now, unanswered: VecDeque::new() });
        let waiting = self.outbox.waiting().filter(|_| self.admitted);
        waiting.map(|(sequence, body)| self.message(*sequence, body.clone())).collect()
    }

    pub fn disconnected(&mut self) {
        self.connection = None;
    }

    /// Records a failure to connect. Returns whether the coordinator is considered gone for good. `refused` says that
    /// no process listens at its address any more, or a foreign one does.
    pub fn has_failed(&mut self, refused: bool, now: Instant) -> bool {
        let since = self.refused_since.unwrap_or(now);
        self.refused_since = refused.then_some(since);
        // A coordinator that has ended is not replaced by another at the same address.
        let is_gone = refused && self.was_admitted && now >= since + REFUSED_TIMEOUT;
        is_gone || now >= self.give_up
    }

    /// Latest time at which [`has_failed`](Self::has_failed) becomes true.
    pub fn gives_up_at(&self) -> Instant {
        self.give_up
    }

    /// Returns whether the agent has ever been a member.
    pub fn was_admitted(&self) -> bool {
        self.was_admitted
    }

    /// Returns whether workers of an attempt may be alive.
    pub fn is_attempting(&self) -> bool {
        self.attempting
    }

    /// Wraps a message from the driver, which is kept until it is acknowledged.
    pub fn send(&mut self, body: FromAgent) -> AgentMessage {
        if matches!(body, FromAgent::Ended(_)) {
            self.attempting = false;
        }
        let sequence = self.outbox.push(body.clone());
        self.message(sequence, body)
    }

    pub fn heartbeat(&self) -> AgentMessage {
        self.message(0, FromAgent::Heartbeat(NodeHeartbeat {}))
    }

    fn message(&self, sequence: u64, body: FromAgent) -> AgentMessage {
        AgentMessage { sequence, acknowledged: self.outbox.received(), body: Some(body) }
    }

    pub fn receive(&mut self, message: CoordinatorMessage, now: Instant) -> Step {
        self.outbox.acknowledge(message.acknowledged);
        match message.body {
            // The coordinator still knew this agent when it received the greeting.
            None => self.answered(self.greeted, now),
            Some(ToAgent::Heartbeat(_)) => {
                let sent = self.connection.as_mut().and_then(|it| it.unanswered.pop_front());
                sent.into_iter().for_each(|sent| self.answered(sent, now));
            }
            // Too late to begin. If the coordinator still knows this agent on the next connection, it sends this again.
            Some(ToAgent::Begin(_)) if now >= self.due() => {
                return Step { closed: Some(Closed::Lost), ..Step::default() };
            }
            // The coordinator takes this agent for a new one, so its messages count from 1 again.
            Some(ToAgent::Welcome(welcome)) if !welcome.refusal.is_empty() => return self.refused(welcome),
            Some(body) if self.outbox.accept(message.sequence) => return self.accepted(body, now),
            Some(_) => {}
        }
        Step::default()
    }

    /// The coordinator heard from this agent at `sent` or later.
    fn answered(&mut self, sent: Instant, now: Instant) {
        (self.alive, self.cut_off) = (self.alive.max(sent), false);
        self.is_there(now);
    }

    /// The coordinator is within reach, so the time to give up moves.
    fn is_there(&mut self, now: Instant) {
        // Without restarts, the job ends when the lease of a node with workers does: there is nothing to come back to.
        let returns = !self.attempting || self.greeting.rules.as_ref().is_none_or(allows_restarts);
        self.give_up = now + self.lease + if returns { RETURN_TIMEOUT } else { Duration::ZERO };
    }

    fn refused(&self, welcome: Welcome) -> Step {
        if !self.greeting.new {
            return Step { closed: Some(Closed::Forgotten), ..Step::default() };
        }
        let exit = ExitCode::from_code(i32::try_from(welcome.exit_code).unwrap_or(0));
        let to_driver = end(exit.unwrap_or(ExitCode::Rendezvous), welcome.refusal);
        Step { to_driver: Some(to_driver), closed: Some(Closed::Over), ..Step::default() }
    }

    fn accepted(&mut self, body: ToAgent, now: Instant) -> Step {
        let closed = match &body {
            ToAgent::Welcome(welcome) => {
                self.admit(welcome, now);
                None
            }
            ToAgent::Begin(_) => {
                (self.attempting, self.cut_off) = (true, false);
                self.is_there(now);
                None
            }
            ToAgent::End(_) => Some(Closed::Over),
            _ => None,
        };
        Step { to_driver: Some(FromGroup::Message(body)), closed, ..Step::default() }
    }

    fn admit(&mut self, welcome: &Welcome, now: Instant) {
        (self.admitted, self.was_admitted, self.greeting.new) = (true, true, false);
        let seconds = |value| Duration::try_from_secs_f64(value).unwrap_or(Duration::from_secs(1));
        self.interval = seconds(welcome.heartbeat_interval).max(Duration::from_millis(50));
        self.lease = seconds(welcome.lease);
        self.answered(self.greeted, now);
    }

    /// Time at which [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<Instant> {
        let beats =
            self.connection.as_ref().map(|it| self.given_up(it).map_or(it.next, |at| at.min(it.next)));
        let cut = (self.attempting && !self.cut_off).then(|| self.due());
        beats.into_iter().chain(cut).min()
    }

    pub fn tick(&mut self, now: Instant) -> Step {
        let mut step = Step::default();
        if self.attempting && now >= self.due() {
            let silence = now.saturating_duration_since(self.alive).as_secs_f64();
            step.to_driver = self.cut(format!("no contact with the coordinator for {silence:.0} s"));
        }
        if self.connection.as_ref().and_then(|it| self.given_up(it)).is_some_and(|at| now >= at) {
            step.closed = Some(Closed::Lost);
        } else if let Some(beats) = self.connection.as_mut().filter(|it| now >= it.next) {
            beats.next = now + self.interval;
            beats.unanswered.push_back(now);
            step.to_coordinator = Some(self.heartbeat());
        }
        step
    }

    /// Time at which killing the workers has to begin, so that they are gone before the lease ends at the coordinator.
    fn due(&self) -> Instant {
        let fence = self.lease.mul_f64(FENCE_SHARE).max(MIN_FENCE);
        self.alive + self.lease.saturating_sub(fence)
    }

    /// Time at which an open but silent connection is given up.
    fn given_up(&self, beats: &Heartbeats) -> Option<Instant> {
        beats.unanswered.front().map(|sent| *sent + SILENT_HEARTBEATS * self.interval)
    }

    /// Tells the driver to end the workers; `None` if it has been told already.
    pub fn cut(&mut self, reason: String) -> Option<FromGroup> {
        let is_new = !std::mem::replace(&mut self.cut_off, true);
        is_new.then_some(FromGroup::CutOff(reason))
    }

    /// Prepares to join as a new member with this id. Called only when no worker is alive.
    pub fn renew(&mut self, instance: Vec<u8>) {
        self.outbox = Outbox::default();
        (self.greeting.instance, self.greeting.new, self.admitted) = (instance, true, false);
    }

    /// Id of the agent's process and this membership.
    pub fn instance(&self) -> &[u8] {
        &self.greeting.instance
    }
}

/// Returns whether another attempt may follow the loss of a node.
fn allows_restarts(rules: &GroupRules) -> bool {
    rules.max_restarts > 0 || rules.free_codes.contains(&ExitCode::Retryable.code().into())
}

/// Returns the end of the job as this agent decides it without the coordinator.
pub fn end(exit: ExitCode, root: String) -> FromGroup {
    FromGroup::Message(ToAgent::End(GroupEnd { exit_code: exit.code().into(), root, ..GroupEnd::default() }))
}
