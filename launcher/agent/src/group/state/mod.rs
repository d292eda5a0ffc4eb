//! The coordinator of a job: a pure state machine that owns its membership, its attempts, and the decision to restart.
//!
//! ```text
//!              enough nodes          all prepared             all nodes have ended
//! Gathering ---------------> Preparing ----------> Running ------------------------> Ended
//!     ^  |                      | a node is lost      |  a node fails, leaves or joins: the others end theirs
//!     |  '--deadline--> Ended   '--> Gathering        v
//!     '------------------------------- Delay <-- restart policy
//! ```
//! - **Members** are the agents that were admitted, by [`MemberId`]. Those of an attempt have node ranks; others are
//!   spares, which replace members that are lost or leave.
//! - **Nodes are lost** if their connection has closed and no other follows, or after a silence as long as the lease.
//!   An agent ends its workers before that: it counts from when it sent what the coordinator has heard last.
//! - **A failure** anywhere ends the attempt everywhere. What was the first failure is decided when all nodes have
//!   ended: the earliest that no other failure explains. A lost node failed when it was last heard.
//! - **Changes of the group** lead to attempts outside the budget: members are asked to save and end theirs.
//!
//! Invariants: an attempt begins only when every member has ended the last one or is lost; what members send about
//! another attempt is ignored; the job ends once, for all members alike; after a stop there is no other attempt.
//!
//! - `admission`: who may be a member; `gathering`: when there are enough, and their ranks; `attempt`: from its
//!   preparation to its end; `policy`: whether another follows; `stops`: stops and leaving members; `relay`: messages
//!   from one member to others.

mod admission;
mod attempt;
mod gathering;
pub(crate) mod policy;
mod relay;
mod stops;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{Greeting, GroupEnd, GroupRules, MemberState, MemberStatus, NodePrepared, RootCause};

use crate::command::Restarts;
use crate::group::rendezvous::GroupRendezvous;
use admission::Claim;
use policy::Policy;

/// Names an agent: one that was lost and comes back is another member.
pub type MemberId = u64;

/// For an agent whose connection has closed to open another one.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(1);
/// For a node to report an error of its own after others have lost their connections to it.
const CAUSE_GRACE: Duration = Duration::from_millis(1500);
/// Silence after which status shows a member as silent.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// Between looks at the members' silence.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);
/// A sweep that is later than this shows that the coordinator itself did not run. What members have sent meanwhile may
/// still wait to be read, so their silence counts from then on.
const SUSPENDED_AFTER: Duration = Duration::from_secs(1);

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// An agent that is not a member has introduced itself.
    Greeted(MemberId, Greeting),
    /// A member has opened another connection.
    Connected(MemberId),
    /// The connection of a member has closed.
    Disconnected(MemberId),
    /// A member has sent something.
    Heard(MemberId),
    /// A member has sent this; each message arrives once, and in order.
    Message(MemberId, FromAgent),
    /// The deadline has passed.
    Tick,
}

/// What the task has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send this to a member.
    Send(MemberId, ToAgent),
    /// The agent is not, or no longer, a member; what was sent to it before is still delivered.
    Forget(MemberId),
}

/// The state of a job's group.
#[derive(Debug)]
pub struct Coordinator {
    run_id: String,
    /// Members have this run id, or none.
    is_for_run: bool,
    new_key: fn() -> [u8; 32],
    /// Of the first member; all others agree with it.
    reference: Option<Greeting>,
    rules: GroupRules,
    policy: Policy,
    members: BTreeMap<MemberId, Member>,
    claims: Vec<Claim>,
    phase: Phase,
    /// The current attempt, or the next one; from 0.
    attempt: u32,
    /// Attempts that followed a failure and were counted.
    restarts: u32,
    /// Nodes of the current or last attempt.
    nodes: u32,
    /// Of the current attempt, in order of arrival.
    failures: Vec<NodeFailure>,
    /// The members of this attempt were told that it has failed.
    ending: bool,
    /// When they are told if no failure comes that explains those that have.
    announce_at: Option<Instant>,
    /// Why the members of this attempt were asked to end it without a failure.
    pause: Option<String>,
    /// The signal of a stop; 0 for a call.
    stop: Option<u32>,
    /// Requests to stop that running nodes were told of.
    stops_passed_on: u32,
    /// Of the nodes of a trainer's attempt.
    rendezvous: Option<GroupRendezvous>,
    /// The root cause of the first attempt since the last that made progress.
    first_root: Option<NodeFailure>,
    /// That of the last attempt.
    last_root: Option<NodeFailure>,
    /// A node was lost since the group was last complete.
    after_loss: bool,
    /// The agent whose node has the checkpoints of a training job: the one that had node rank 0 last.
    keeper: Option<Vec<u8>>,
    /// The nodes of this attempt do not share the directory with the checkpoints, which node rank 0 has.
    unshared: bool,
    /// That node is lost: another start would be a fresh one.
    checkpoints_lost: bool,
    /// Nodes that were lost and not replaced, and when they were last heard; for status.
    lost: Vec<(Instant, MemberStatus)>,
    next_sweep: Option<Instant>,
    /// When this coordinator last ran again after it had not run for longer than [`SUSPENDED_AFTER`], and how long that
    /// was.
    suspended: Option<(Instant, Duration)>,
    /// A checkpoint of this run is complete.
    saved: bool,
    outputs: Vec<Output>,
}

/// An agent that was admitted.
#[derive(Clone, Debug)]
struct Member {
    greeting: Greeting,
    /// Node rank in the current or last attempt.
    node_rank: Option<u32>,
    first_rank: u32,
    stage: Stage,
    last_heard: Instant,
    closed: Option<Instant>,
    /// It ends with this signal once its workers are gone.
    leaving: Option<u32>,
    /// The coordinator runs in its process.
    hosts_coordinator: bool,
    /// Requests to stop from this node.
    stop_requests: u32,
}

/// How far a member is with the current attempt.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// It runs nothing.
    Idle,
    Preparing,
    Prepared(NodePrepared),
    Running,
    Ended(NodeEnd),
}

/// What a member has reported at the end of an attempt.
#[derive(Clone, Debug, Default, PartialEq)]
struct NodeEnd {
    progressed: bool,
    differing: Vec<String>,
    is_final: bool,
    exit_code: u32,
}

/// A failure, and where.
#[derive(Clone, Debug, PartialEq)]
struct NodeFailure {
    /// `None` if it concerns the whole group.
    member: Option<MemberId>,
    node_rank: Option<u32>,
    host: String,
    at: Instant,
    cause: RootCause,
}

#[derive(Clone, Debug)]
enum Phase {
    Gathering {
        deadline: Instant,
        /// When the attempt begins without the nodes that are still missing.
        last_call: Option<Instant>,
        next_notice: Instant,
    },
    Delay {
        until: Instant,
    },
    Preparing {
        deadline: Instant,
    },
    Running,
    Ended(GroupEnd),
}

impl Coordinator {
    /// A group without members. `new_key` makes the secret of an attempt.
    pub fn new(run_id: String, seed: u64, new_key: fn() -> [u8; 32], now: Instant) -> Self {
        Self {
            run_id,
            is_for_run: false,
            new_key,
            reference: None,
            rules: GroupRules::default(),
            policy: Policy::new(Restarts::default(), seed),
            members: BTreeMap::new(),
            claims: Vec::new(),
            // The first member brings the real time-outs.
            phase: gathering::phase(Duration::from_secs(600), now),
            attempt: 0,
            restarts: 0,
            nodes: 0,
            failures: Vec::new(),
            ending: false,
            announce_at: None,
            pause: None,
            stop: None,
            stops_passed_on: 0,
            rendezvous: None,
            first_root: None,
            last_root: None,
            after_loss: false,
            keeper: None,
            unshared: false,
            checkpoints_lost: false,
            lost: Vec::new(),
            next_sweep: None,
            suspended: None,
            saved: false,
            outputs: Vec::new(),
        }
    }

    /// Refuses agents of other runs than `run_id`.
    #[must_use]
    pub fn for_run(self, run_id: String) -> Self {
        Self { run_id, is_for_run: true, ..self }
    }

    /// The job is over, and all members have been told.
    pub fn is_over(&self) -> bool {
        self.exit_code().is_some()
    }

    /// The exit code of the job, if it is over.
    pub fn exit_code(&self) -> Option<u32> {
        match &self.phase {
            Phase::Ended(end) => Some(end.exit_code),
            _ => None,
        }
    }

    /// When a [`Input::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        let own = match &self.phase {
            // Before the first member there is nothing to do.
            Phase::Gathering { .. } if self.reference.is_none() => None,
            // With enough members only the last call counts.
            Phase::Gathering { deadline, last_call, next_notice } => {
                Some(last_call.unwrap_or(*deadline).min(*next_notice))
            }
            Phase::Delay { until } => Some(*until),
            Phase::Preparing { deadline } => Some(*deadline),
            Phase::Running => self.announce_at,
            Phase::Ended(_) => None,
        };
        own.into_iter().chain(self.next_sweep).min()
    }

    /// What has to be done, in this order.
    pub fn handle(&mut self, input: Input, now: Instant) -> Vec<Output> {
        self.notice_suspension(now);
        match input {
            Input::Greeted(id, greeting) => self.greeted(id, greeting, now),
            Input::Connected(id) => {
                if let Some(member) = self.members.get_mut(&id) {
                    (member.closed, member.last_heard) = (None, now);
                }
            }
            Input::Disconnected(id) => {
                if let Some(member) = self.members.get_mut(&id) {
                    member.closed = Some(now);
                } else if self.withdraw_claim(id) {
                    self.outputs.push(Output::Forget(id));
                }
            }
            Input::Heard(id) => {
                if let Some(member) = self.members.get_mut(&id) {
                    member.last_heard = now;
                }
            }
            Input::Message(id, message) => self.message(id, message, now),
            Input::Tick => {}
        }
        self.sweep(now);
        self.settle(now);
        self.settle_claims(now);
        std::mem::take(&mut self.outputs)
    }

    /// The members, and nodes that were lost and not replaced, for status.
    pub fn nodes(&self, now: Instant) -> Vec<MemberStatus> {
        let lost = self.lost.iter().map(|(last_heard, status)| MemberStatus {
            seconds_since_heartbeat: now.saturating_duration_since(*last_heard).as_secs_f64(),
            ..status.clone()
        });
        let begun = matches!(self.phase, Phase::Preparing { .. } | Phase::Running);
        let is_complete = begun && self.nodes >= self.most();
        let members = self.members.values().map(|member| member.status(is_complete, now));
        let mut nodes: Vec<_> = members.chain(lost).collect();
        nodes.sort_by_key(|node| (node.node_rank.is_none(), node.node_rank));
        nodes
    }

    fn message(&mut self, id: MemberId, message: FromAgent, now: Instant) {
        if !self.members.contains_key(&id) {
            return;
        }
        match message {
            FromAgent::Prepared(prepared) => self.prepared(id, prepared),
            FromAgent::Failed(failed) => self.node_failed(id, failed, now),
            FromAgent::Ended(ended) => self.node_ended(id, ended, now),
            FromAgent::Refused(refused) => self.node_refused(id, &refused),
            FromAgent::StopRequested(request) => self.stop_requested(id, request.signal, now),
            FromAgent::Join(join) => self.node_joined(id, join),
            other => self.relay(id, other, now),
        }
    }

    /// Silence while the coordinator did not run says nothing about the members.
    fn notice_suspension(&mut self, now: Instant) {
        let Some(due) = self.next_sweep.filter(|due| now >= *due + SUSPENDED_AFTER) else { return };
        for member in self.members.values_mut() {
            (member.last_heard, member.closed) = (now, member.closed.map(|_| now));
        }
        self.claims.iter_mut().for_each(|claim| claim.since = now);
        self.suspended = Some((now, now.saturating_duration_since(due)));
    }

    /// Finds members that are lost. Not at every input: a thousand members send thousands of messages a second.
    fn sweep(&mut self, now: Instant) {
        if self.next_sweep.is_some_and(|due| now < due) {
            return;
        }
        let remote = self.members.values().any(|member| !member.hosts_coordinator);
        self.next_sweep = (remote && !self.is_over()).then(|| now + SWEEP_INTERVAL);
        let lease = self.lease();
        let is_lost = |member: &Member| {
            let closed = member.closed.is_some_and(|closed| now >= closed + RECONNECT_GRACE);
            let silent = now.saturating_duration_since(member.last_heard) >= lease;
            !member.hosts_coordinator && (closed || silent)
        };
        let lost: Vec<_> = self.members.iter().filter(|(_, it)| is_lost(it)).map(|(id, _)| *id).collect();
        for id in lost {
            self.lose(id, now);
        }
    }

    /// Whether something follows from the time, or from what all members have done.
    fn settle(&mut self, now: Instant) {
        match &self.phase {
            Phase::Gathering { .. } => self.gather(now),
            Phase::Delay { until } if now >= *until => self.start_gathering(now),
            Phase::Preparing { deadline } => {
                let expired = now >= *deadline;
                self.settle_preparation(expired, now);
            }
            Phase::Running => {
                if self.announce_at.is_some_and(|due| now >= due) {
                    self.announce();
                }
                if self.members.values().all(|member| member.stage != Stage::Running) {
                    self.attempt_ended(now);
                }
            }
            Phase::Delay { .. } | Phase::Ended(_) => {}
        }
    }

    /// Silence after which a member is lost.
    fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.rules.lease.max(0.0))
    }

    fn send(&mut self, id: MemberId, message: ToAgent) {
        self.outputs.push(Output::Send(id, message));
    }

    /// Sends to all members of the current attempt.
    fn send_to_running(&mut self, except: Option<MemberId>, message: &ToAgent) {
        let running = self.members.iter().filter(|(_, member)| member.stage == Stage::Running);
        let ids: Vec<_> = running.map(|(id, _)| *id).filter(|id| Some(*id) != except).collect();
        ids.into_iter().for_each(|id| self.send(id, message.clone()));
    }

    /// The job is over.
    fn end(&mut self, end: GroupEnd) {
        for (id, member) in &self.members {
            let exit_code =
                member.leaving.map_or(end.exit_code, |signal| stops::exit_code(signal, &self.rules));
            self.outputs.push(Output::Send(*id, ToAgent::End(GroupEnd { exit_code, ..end.clone() })));
        }
        (self.phase, self.next_sweep) = (Phase::Ended(end), None);
    }
}

impl Member {
    /// `is_complete`: an attempt has as many nodes as the job can use.
    fn status(&self, is_complete: bool, now: Instant) -> MemberStatus {
        // The agent around the coordinator sends no heartbeats.
        let silence = match self.hosts_coordinator {
            true => Duration::ZERO,
            false => now.saturating_duration_since(self.last_heard),
        };
        let state = match self.node_rank {
            None if is_complete => MemberState::Spare,
            None => MemberState::Waiting,
            Some(_) if silence >= SILENT_AFTER => MemberState::Silent,
            Some(_) => MemberState::Active,
        };
        MemberStatus {
            node_rank: self.node_rank,
            host: self.greeting.host.clone(),
            address: self.greeting.address.clone(),
            state: state.into(),
            first_rank: self.first_rank,
            workers: self.greeting.workers,
            seconds_since_heartbeat: silence.as_secs_f64(),
        }
    }

    /// `node 1 (host)`.
    fn name(&self) -> String {
        name(self.node_rank.or(self.greeting.node_rank), &self.greeting.host)
    }

    fn prepared(&self) -> Option<&NodePrepared> {
        match &self.stage {
            Stage::Prepared(prepared) => Some(prepared),
            _ => None,
        }
    }
}

/// `node 1 (host)`, or `host` for one without a rank.
fn name(node_rank: Option<u32>, host: &str) -> String {
    node_rank.map_or_else(|| host.to_owned(), |rank| format!("node {rank} ({host})"))
}
