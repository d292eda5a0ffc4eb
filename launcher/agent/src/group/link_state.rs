//! An agent's side of the link to a remote coordinator: pure. `link` owns the connections, and does what this says.
//!
//! - **Lease.** The coordinator considers a node lost when it has not heard from it for the time of the lease. The link
//!   counts from when it sent the last message that was answered, which is earlier, and ends the workers before the
//!   lease is over ([`FromGroup::CutOff`]).
//! - **Connections.** One that is silent is given up for another. The closing of a connection tells the coordinator
//!   that this agent is gone, so `link` closes it only when the coordinator knows a newer one.
//! - **Membership.** An agent that the coordinator does not know any more ends its workers and becomes a new member.
//!
//! Invariant: no attempt begins here, and no worker lives, after the time at which the coordinator may have given the
//! ranks of this node to another one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{
    AgentMessage, CoordinatorMessage, Greeting, GroupEnd, GroupRules, NodeHeartbeat, Welcome,
};

use super::outbox::Outbox;

/// Between heartbeats, as long as the coordinator has not said otherwise.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(1);
/// A coordinator whose address refuses connections for this long is gone.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);
/// For a network to come back before an agent without workers gives up, if the coordinator may wait for it.
const RETURN_TIMEOUT: Duration = Duration::from_secs(60);
/// For the reply to a greeting on an open connection, if no workers live.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Heartbeats without an answer after which a connection is given up. An open connection can stay silent long after a
/// cut: TCP waits ever longer before it tries again.
const SILENT_HEARTBEATS: u32 = 3;
/// For workers to be killed, between the end of the lease here and at the coordinator.
const FENCE_SHARE: f64 = 0.125;
const MIN_FENCE: Duration = Duration::from_millis(500);

/// What the driver learns.
#[derive(Debug)]
pub enum FromGroup {
    /// The coordinator has sent this.
    Message(ToAgent),
    /// The coordinator is reached over a connection, or no longer.
    Connected(bool),
    /// The coordinator has not answered for so long that it may soon consider this node lost; for the user.
    CutOff(String),
    /// What the user has to know about connections: one line.
    Notice(String),
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closed {
    /// The job is over, or the driver is gone.
    Over,
    /// Another one may follow.
    Lost,
    /// The coordinator does not know this agent any more.
    Forgotten,
}

/// What follows from a message or from the time.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) to_driver: Option<FromGroup>,
    pub(super) to_coordinator: Option<AgentMessage>,
    pub(super) closed: Option<Closed>,
}

#[derive(Debug)]
pub(super) struct LinkState {
    greeting: Greeting,
    outbox: Outbox<FromAgent>,
    lease: Duration,
    /// Between heartbeats.
    interval: Duration,
    /// When the last message was sent that the coordinator has answered.
    alive: Instant,
    greeted: Instant,
    connection: Option<Heartbeats>,
    /// The coordinator has accepted the greeting.
    admitted: bool,
    /// It has accepted this one, or one before.
    was_admitted: bool,
    /// Workers of an attempt may live.
    attempting: bool,
    /// The driver knows that the coordinator is out of reach.
    cut_off: bool,
    /// When the agent gives up.
    give_up: Instant,
    refused_since: Option<Instant>,
}

/// Heartbeats on an open connection.
#[derive(Debug)]
struct Heartbeats {
    next: Instant,
    /// When those were sent that have not been answered, oldest first. Answers come in the same order.
    unanswered: VecDeque<Instant>,
}

impl LinkState {
    pub(super) fn new(greeting: Greeting, join_timeout: Duration, now: Instant) -> Self {
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

    /// How long the coordinator has to answer a greeting: as long as a heartbeat, if workers live.
    pub(super) fn reply_timeout(&self) -> Duration {
        if self.attempting { SILENT_HEARTBEATS * self.interval } else { REPLY_TIMEOUT }
    }

    /// The first message on a connection.
    pub(super) fn greet(&mut self, now: Instant) -> AgentMessage {
        (self.greeted, self.refused_since) = (now, None);
        self.greeting.connection += 1;
        self.message(0, FromAgent::Greeting(self.greeting.clone()))
    }

    /// The coordinator has received the greeting. Returns what it has not acknowledged.
    pub(super) fn connected(&mut self, now: Instant) -> Vec<AgentMessage> {
        self.connection = Some(Heartbeats { next: now, unanswered: VecDeque::new() });
        let waiting = self.outbox.waiting().filter(|_| self.admitted);
        waiting.map(|(sequence, body)| self.message(*sequence, body.clone())).collect()
    }

    pub(super) fn disconnected(&mut self) {
        self.connection = None;
    }

    /// There is no connection. Whether the coordinator will not come back; `refused` if no process listens where it
    /// was, or another one does.
    pub(super) fn has_failed(&mut self, refused: bool, now: Instant) -> bool {
        let since = self.refused_since.unwrap_or(now);
        self.refused_since = refused.then_some(since);
        // Where it was once, another one will not come.
        let is_gone = refused && self.was_admitted && now >= since + REFUSED_TIMEOUT;
        is_gone || now >= self.give_up
    }

    /// When [`has_failed`](Self::has_failed) becomes true at the latest.
    pub(super) fn gives_up_at(&self) -> Instant {
        self.give_up
    }

    /// The agent has been a member.
    pub(super) fn was_admitted(&self) -> bool {
        self.was_admitted
    }

    /// Workers of an attempt may live.
    pub(super) fn is_attempting(&self) -> bool {
        self.attempting
    }

    /// A message of the driver, which is kept until it is acknowledged.
    pub(super) fn send(&mut self, body: FromAgent) -> AgentMessage {
        if matches!(body, FromAgent::Ended(_)) {
            self.attempting = false;
        }
        let sequence = self.outbox.push(body.clone());
        self.message(sequence, body)
    }

    pub(super) fn heartbeat(&self) -> AgentMessage {
        self.message(0, FromAgent::Heartbeat(NodeHeartbeat {}))
    }

    fn message(&self, sequence: u64, body: FromAgent) -> AgentMessage {
        AgentMessage { sequence, acknowledged: self.outbox.received(), body: Some(body) }
    }

    pub(super) fn receive(&mut self, message: CoordinatorMessage, now: Instant) -> Step {
        self.outbox.acknowledge(message.acknowledged);
        match message.body {
            // It still knows this agent, as of the greeting.
            None => self.answered(self.greeted, now),
            Some(ToAgent::Heartbeat(_)) => {
                let sent = self.connection.as_mut().and_then(|it| it.unanswered.pop_front());
                sent.into_iter().for_each(|sent| self.answered(sent, now));
            }
            // Too late: if the coordinator still knows this agent on the next connection, it says so again.
            Some(ToAgent::Begin(_)) if now >= self.due() => {
                return Step { closed: Some(Closed::Lost), ..Step::default() };
            }
            // To the coordinator this agent is another one, so its messages count from 1 again.
            Some(ToAgent::Welcome(welcome)) if !welcome.refusal.is_empty() => return self.refused(welcome),
            Some(body) if self.outbox.accept(message.sequence) => return self.accepted(body, now),
            Some(_) => {}
        }
        Step::default()
    }

    /// The coordinator had heard from this agent at `sent` or later.
    fn answered(&mut self, sent: Instant, now: Instant) {
        (self.alive, self.cut_off) = (self.alive.max(sent), false);
        self.is_there(now);
    }

    /// The coordinator is within reach.
    fn is_there(&mut self, now: Instant) {
        // Without restarts the job ends with the lease of a node that had workers.
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

    /// When [`tick`](Self::tick) is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let beats =
            self.connection.as_ref().map(|it| self.given_up(it).map_or(it.next, |at| at.min(it.next)));
        let cut = (self.attempting && !self.cut_off).then(|| self.due());
        beats.into_iter().chain(cut).min()
    }

    pub(super) fn tick(&mut self, now: Instant) -> Step {
        let mut step = Step::default();
        if self.attempting && now >= self.due() {
            let silence = now.saturating_duration_since(self.alive).as_secs_f64();
            step.to_driver = self.cut(format!("no contact to the coordinator for {silence:.0} s"));
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

    /// When workers have to be gone, with time to kill them.
    fn due(&self) -> Instant {
        let fence = self.lease.mul_f64(FENCE_SHARE).max(MIN_FENCE);
        self.alive + self.lease.saturating_sub(fence)
    }

    /// When an open connection is as good as lost.
    fn given_up(&self, beats: &Heartbeats) -> Option<Instant> {
        beats.unanswered.front().map(|sent| *sent + SILENT_HEARTBEATS * self.interval)
    }

    /// The driver has to end the workers; `None` if it knows.
    pub(super) fn cut(&mut self, reason: String) -> Option<FromGroup> {
        let is_new = !std::mem::replace(&mut self.cut_off, true);
        is_new.then_some(FromGroup::CutOff(reason))
    }

    /// The agent becomes a new member, with this id, once no worker lives.
    pub(super) fn renew(&mut self, instance: Vec<u8>) {
        self.outbox = Outbox::default();
        (self.greeting.instance, self.greeting.new, self.admitted) = (instance, true, false);
    }

    /// Of the agent's process, and of this membership.
    pub(super) fn instance(&self) -> &[u8] {
        &self.greeting.instance
    }
}

/// Whether the loss of a node may be followed by another attempt.
fn allows_restarts(rules: &GroupRules) -> bool {
    rules.max_restarts > 0 || rules.free_codes.contains(&ExitCode::Retryable.code().into())
}

/// The end of the job as this agent sees it, without the coordinator.
pub(super) fn end(exit: ExitCode, root: String) -> FromGroup {
    FromGroup::Message(ToAgent::End(GroupEnd { exit_code: exit.code().into(), root, ..GroupEnd::default() }))
}
