//! An agent: its real link state and its real job, joined by a simulated driver.

use std::time::{Duration, Instant};

use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{AgentMessage, Begin, NodePrepared, Prepare, StopRequested};
use xlaunch_spec::exit::ExitCode;

use super::invariants::AgentEnd;
use super::network::{Direction, Down, Up};
use super::{Happening, World};
use crate::state::{Action, Event, Job, Rules, StopCause};
use xlaunch_cluster::link_state::{self, Closed, FromGroup, LinkState, Step};

/// Timeouts and delays between attempts to connect, in place of the real dialer's.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT_WITH_WORKERS: Duration = Duration::from_secs(1);
const RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Node {
    /// Number of times an agent was started here.
    pub(super) incarnation: u32,
    pub(super) agent: Option<Agent>,
    pub(super) up_cut: Option<Instant>,
    pub(super) down_cut: Option<Instant>,
    /// Time until which messages are slow, and the maximum delay.
    pub(super) slow: Option<(Instant, Duration)>,
}

#[derive(Debug)]
pub(super) struct Agent {
    link: LinkState,
    /// `Some` if the coordinator is in the same process: the number of the last message sent to it.
    local: Option<u64>,
    phase: LinkPhase,
    /// Counts phases, so that timeouts of earlier ones are ignored.
    epoch: u64,
    pub(super) connection: Option<usize>,
    /// Silent connections, to be closed when the coordinator knows a newer one.
    given_up: Vec<usize>,
    pause: Duration,
    job: Job,
    prepare: Option<Prepare>,
    /// The master port that it reserved last, for rank 0.
    pub(super) port: u32,
    pub(super) workers: Vec<usize>,
    told: bool,
    /// The coordinator has refused it.
    refused: bool,
    admitted: bool,
    leaving: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkPhase {
    Dialing,
    Opening,
    Open,
    /// The coordinator no longer knows this member, whose workers are still alive.
    Renewing,
    Over,
}

impl Agent {
    pub(super) fn first_rank(&self) -> u32 {
        self.prepare.as_ref().map_or(0, |prepare| prepare.first_rank)
    }

    /// Number of nodes in the attempt.
    pub(super) fn nodes(&self) -> u32 {
        self.prepare.as_ref().map_or(0, |prepare| prepare.nodes)
    }

    pub(super) fn job(&self) -> &Job {
        &self.job
    }
}

impl World {
    pub(super) fn start_agent(&mut self, host: usize) {
        let node = &mut self.nodes[host];
        node.incarnation += 1;
        let greeting = self.plan.greeting(host, node.incarnation);
        let rules = Rules {
            workers: self.plan.workers[host],
            kind: self.plan.kind,
            has_restarts: self.plan.restarts > 0,
            requeue_codes: [99].into(),
            shutdown_timeout: Duration::from_secs(4),
            shutdown_timeout_max: Duration::from_secs(8),
            propagate_exit_code: false,
        };
        let is_local = self.plan.hosted && host == 0;
        let now = self.clock(host);
        let mut agent = Agent {
            link: LinkState::new(greeting, Duration::from_secs(30), now),
            local: is_local.then_some(0),
            phase: LinkPhase::Dialing,
            epoch: 0,
            connection: None,
            given_up: Vec::new(),
            pause: RETRY_DELAY,
            job: Job::new(rules),
            prepare: None,
            port: 0,
            workers: Vec::new(),
            told: false,
            refused: false,
            admitted: false,
            leaving: false,
        };
        self.note(|| format!("h{host}: the agent starts"));
        if is_local {
            let greeting = agent.link.greet(now);
            (agent.phase, agent.connection) = (LinkPhase::Open, Some(self.connect(host, true)));
            let connection = self.connections.len() - 1;
            self.nodes[host].agent = Some(agent);
            self.send_up(connection, Up::Message(greeting));
        } else {
            self.nodes[host].agent = Some(agent);
            self.dial_in(host, Duration::ZERO);
        }
    }

    fn dial_in(&mut self, host: usize, time: Duration) {
        let incarnation = self.nodes[host].incarnation;
        let Some(agent) = &mut self.nodes[host].agent else { return };
        agent.epoch += 1;
        (agent.phase, agent.connection) = (LinkPhase::Dialing, None);
        let epoch = agent.epoch;
        self.schedule(self.now + time, Happening::Dial { host, incarnation, epoch });
    }

    pub(super) fn dial(&mut self, host: usize, incarnation: u32, epoch: u64) {
        let (now, round_trip) = (self.clock(host), self.round_trip());
        let is_cut =
            self.cut_until(host, Direction::Up).or_else(|| self.cut_until(host, Direction::Down)).is_some();
        let works = self.agent(host).link.is_attempting();
        let time = if works { CONNECT_TIMEOUT_WITH_WORKERS } else { CONNECT_TIMEOUT };
        let failed = |refused| Happening::DialFailed { host, incarnation, epoch, refused };
        if is_cut || self.is_coordinator_off {
            return self.schedule(self.now + time, failed(false));
        }
        if self.coordinator.is_none() {
            return self.schedule(self.now + round_trip, failed(true));
        }
        let connection = self.connect(host, false);
        let agent = self.agent(host);
        (agent.phase, agent.connection, agent.pause) = (LinkPhase::Opening, Some(connection), RETRY_DELAY);
        let (greeting, time) = (agent.link.greet(now), agent.link.reply_timeout());
        self.send_up(connection, Up::Message(greeting));
        self.schedule(self.now + time, Happening::ReplyTimeout { host, incarnation, epoch });
    }

    pub(super) fn dial_failed(&mut self, host: usize, refused: bool) {
        let now = self.clock(host);
        let agent = self.agent(host);
        if agent.link.has_failed(refused, now) {
            agent.phase = LinkPhase::Over;
            let code = if agent.link.was_admitted() { ExitCode::Retryable } else { ExitCode::Rendezvous };
            return self.group_message(host, link_state::end(code, "lost".into()));
        }
        let pause = agent.pause;
        agent.pause = if agent.link.is_attempting() { RETRY_DELAY } else { (pause * 2).min(MAX_RETRY_DELAY) };
        self.dial_in(host, pause);
    }

    pub(super) fn reply_timeout(&mut self, host: usize) {
        if self.agent(host).phase == LinkPhase::Opening {
            self.lose_connection(host);
        }
    }

    /// Returns whether the agent's process still runs and its link is in the same phase.
    pub(super) fn is_current(&self, host: usize, incarnation: u32, epoch: Option<u64>) -> bool {
        let node = &self.nodes[host];
        let agent = node.agent.as_ref().filter(|_| node.incarnation == incarnation);
        agent.is_some_and(|agent| epoch.is_none_or(|epoch| epoch == agent.epoch))
    }

    pub(super) fn agent(&mut self, host: usize) -> &mut Agent {
        self.nodes[host].agent.as_mut().unwrap()
    }

    /// The agent has noticed that its connection has ended.
    pub(super) fn lose_connection(&mut self, host: usize) {
        let agent = self.agent(host);
        if !matches!(agent.phase, LinkPhase::Open | LinkPhase::Opening) {
            return;
        }
        agent.link.disconnected();
        if let Some(connection) = agent.connection.take() {
            agent.given_up.push(connection);
        }
        self.agent(host).pause = RETRY_DELAY;
        self.dial_failed(host, false);
    }

    pub(super) fn agent_hears(&mut self, host: usize, item: Down) {
        let now = self.clock(host);
        let agent = self.agent(host);
        let connection = agent.connection.unwrap();
        match (item, agent.local) {
            (Down::Opened, None) if agent.phase == LinkPhase::Opening => {
                agent.phase = LinkPhase::Open;
                let waiting = agent.link.connected(now);
                waiting.into_iter().for_each(|message| self.send_up(connection, Up::Message(message)));
            }
            (Down::Message(message), Some(_)) => {
                let acknowledged = message.sequence;
                self.send_up(connection, Up::Message(AgentMessage { sequence: 0, acknowledged, body: None }));
                message.body.into_iter().for_each(|body| self.group_message(host, FromGroup::Message(body)));
            }
            (Down::Message(message), None) if agent.phase == LinkPhase::Open => {
                for old in std::mem::take(&mut agent.given_up) {
                    self.send_up(old, Up::End);
                }
                let agent = self.agent(host);
                agent.refused |=
                    matches!(&message.body, Some(ToAgent::Welcome(it)) if !it.refusal.is_empty());
                let step = agent.link.receive(message, now);
                self.follow(host, step);
            }
            (Down::End, None) => self.lose_connection(host),
            _ => {}
        }
    }

    fn follow(&mut self, host: usize, step: Step) {
        if let (Some(message), Some(connection)) = (step.to_coordinator, self.agent(host).connection) {
            self.send_up(connection, Up::Message(message));
        }
        if let (Some(closed @ (Closed::Over | Closed::Forgotten)), Some(connection)) =
            (step.closed, self.agent(host).connection)
        {
            let agent = self.agent(host);
            let heartbeat = agent.link.heartbeat();
            let is_over = closed == Closed::Over;
            agent.phase = if is_over { LinkPhase::Over } else { LinkPhase::Renewing };
            agent.link.disconnected();
            agent.epoch += 1;
            self.send_up(connection, Up::Message(heartbeat));
            self.send_up(connection, Up::End);
        }
        step.to_driver.into_iter().for_each(|message| self.group_message(host, message));
        if self.nodes[host].agent.is_none() {
            return;
        }
        match step.closed {
            Some(Closed::Lost) => self.lose_connection(host),
            Some(Closed::Forgotten) => {
                self.summary.renewed += 1;
                let cut = self.agent(host).link.cut("forgotten".into());
                let cut = cut.filter(|_| self.agent(host).link.is_attempting());
                cut.into_iter().for_each(|message| self.group_message(host, message));
                self.renew(host);
            }
            _ => {}
        }
    }

    fn renew(&mut self, host: usize) {
        let next = self.scheduled;
        let Some(agent) = &mut self.nodes[host].agent else { return };
        if agent.phase == LinkPhase::Renewing && !agent.link.is_attempting() {
            let process = agent.link.instance().iter().take(8).copied();
            let instance = process.chain(next.to_be_bytes()).collect();
            agent.link.renew(instance);
            self.dial_in(host, Duration::ZERO);
        }
    }

    /// Sends a message from the driver to the coordinator.
    pub(super) fn link_send(&mut self, host: usize, body: FromAgent) {
        let agent = self.agent(host);
        let message = match &mut agent.local {
            Some(sequence) => {
                *sequence += 1;
                AgentMessage { sequence: *sequence, acknowledged: 0, body: Some(body) }
            }
            None => agent.link.send(body),
        };
        if let Some(connection) = agent.connection.filter(|_| agent.phase == LinkPhase::Open) {
            self.send_up(connection, Up::Message(message));
        }
        self.renew(host);
    }

    fn group_message(&mut self, host: usize, message: FromGroup) {
        let message = match message {
            FromGroup::CutOff(reason) => {
                self.summary.cut_off += 1;
                return self.job_event(host, Event::CutOff(reason));
            }
            FromGroup::Connected(_) | FromGroup::Notice(_) => return,
            FromGroup::Message(message) => message,
        };
        let is_over = self.agent(host).phase == LinkPhase::Over && self.agent(host).connection.is_none();
        let agent = self.agent(host);
        let attempt = agent.job.attempt();
        let event = match message {
            ToAgent::Welcome(_) => {
                (agent.admitted, agent.refused) = (true, false);
                return;
            }
            ToAgent::Prepare(prepare) => return self.prepare(host, prepare),
            ToAgent::Begin(begin) => return self.begin(host, begin),
            ToAgent::PeerFailed(failed) if failed.attempt == attempt => Event::PeerFailed(failed.message),
            ToAgent::Pause(pause) if pause.attempt == attempt => Event::Pause(pause.reason),
            ToAgent::Stop(stop) => {
                let signal = i32::try_from(stop.signal).ok().filter(|signal| *signal != 0);
                Event::Stop(signal.map_or(StopCause::Call, StopCause::Signal))
            }
            ToAgent::Restarting(restarting) => Event::Restarting(restarting),
            ToAgent::End(end) => {
                agent.told = !is_over && !agent.refused;
                Event::GroupEnded(end)
            }
            _ => return,
        };
        self.job_event(host, event);
    }

    fn prepare(&mut self, host: usize, prepare: Prepare) {
        let shared = self.sees_checkpoints(host, &prepare.checkpoints_instance);
        let mut prepared = NodePrepared { attempt: prepare.attempt, shared, ..NodePrepared::default() };
        if prepare.node_rank == 0 {
            self.next_port += 1;
            (prepared.master_port, self.agent(host).port) = (self.next_port, self.next_port);
        }
        let time = match prepare.nodes {
            1 => Duration::ZERO,
            // The next node is dialed.
            _ if self.random.percent(90) => self.random.ms(1, 300),
            _ => self.random.ms(300, 5000),
        };
        self.agent(host).prepare = Some(prepare);
        let incarnation = self.nodes[host].incarnation;
        self.schedule(self.now + time, Happening::Prepared { host, incarnation, prepared });
    }

    fn begin(&mut self, host: usize, begin: Begin) {
        let prepare = self.agent(host).prepare.clone();
        if let Some(prepare) = prepare.filter(|prepare| prepare.attempt == begin.attempt) {
            self.check_begin(host, &prepare, &begin);
            let Prepare { attempt, node_rank, first_rank, .. } = prepare;
            self.job_event(host, Event::Begin { attempt, node_rank, first_rank });
        }
    }

    pub(super) fn request_stop(&mut self, host: usize, signal: u32) {
        if let Some(agent) = &mut self.nodes[host].agent
            && agent.prepare.is_some()
        {
            agent.leaving |= signal == 15;
            self.link_send(host, FromAgent::StopRequested(StopRequested { signal }));
        }
    }

    /// Passes an event to the job and carries out the resulting actions.
    pub(super) fn job_event(&mut self, host: usize, event: Event) {
        let now = self.clock(host);
        self.note(|| format!("h{host}: {event:?}"));
        let actions = self.agent(host).job.handle(event, now);
        for action in actions {
            match action {
                Action::ReportFailure(failed) => self.link_send(host, FromAgent::Failed(failed)),
                Action::ReportEnd(ended) => self.link_send(host, FromAgent::Ended(ended)),
                Action::Start { attempt } => self.start_workers(host, attempt),
                Action::RequestStop => self.stop_workers(host, None),
                Action::Signal(signal) => self.stop_workers(host, Some(signal)),
                Action::PrintStacks(_) => self.job_event(host, Event::NoStacks),
                Action::Kill => self.kill_workers(host),
                Action::End(ending) => self.agent_exits(host, ending.exit.code()),
                Action::Prepare { .. } | Action::Notify(_) | Action::Restart { .. } => {}
            }
        }
    }

    fn agent_exits(&mut self, host: usize, code: u8) {
        let Agent { told, admitted, leaving, .. } = *self.agent(host);
        self.note(|| format!("h{host}: the agent exits with {code}"));
        self.ends.push(AgentEnd { host, code, told, admitted, leaving });
        self.end_agent(host);
        let lives = self.live.iter().any(|worker| self.workers[*worker].host == host);
        self.require(!lives, || format!("the agent of h{host} has left workers"));
    }

    /// Ends the agent's process; its kernel closes its connections.
    pub(super) fn end_agent(&mut self, host: usize) {
        let incarnation = self.nodes[host].incarnation;
        self.nodes[host].agent = None;
        for connection in 0..self.connections.len() {
            let it = &self.connections[connection];
            if (it.host, it.incarnation) == (host, incarnation) {
                self.send_up(connection, Up::End);
            }
        }
    }

    pub(super) fn agent_deadline(&self, host: usize) -> Option<Instant> {
        let agent = self.nodes[host].agent.as_ref()?;
        let has_link = agent.local.is_none() && !matches!(agent.phase, LinkPhase::Over | LinkPhase::Renewing);
        let link = agent.link.deadline().filter(|_| has_link);
        let local = link.into_iter().chain(agent.job.deadline()).min()?;
        Some(self.real_time(host, local).max(self.now))
    }

    pub(super) fn agent_ticks(&mut self, host: usize) {
        let now = self.clock(host);
        let agent = self.agent(host);
        if agent.job.deadline().is_some_and(|due| now >= due) {
            self.job_event(host, Event::Tick);
        } else {
            let step = agent.link.tick(now);
            self.follow(host, step);
        }
    }
}
