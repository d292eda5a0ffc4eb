//! The coordinator of a job: a pure state machine that owns its membership, its attempts, and the decision to restart.
//!
//! ```text
//!              enough nodes          all prepared             all nodes have ended
//! Gathering ---------------> Preparing ----------> Running ------------------------> Ended
//!     ^  |                      | a node is lost      |  a node fails, leaves or joins: the others end theirs
//!     |  '--deadline--> Ended   '--> Gathering        v
//!     '------------------------------- Delay <-- restart policy
//! ```
//! - **Members** are the admitted agents, identified by [`MemberId`]. Members of the current attempt have node ranks;
//!   the others are spares, which replace members that are lost or leave.
//! - **Nodes are lost** if their connection has closed and is not reopened, or after silence for the time of the lease.
//!   An agent ends its workers before that: it counts from the sending of the last message that the coordinator
//!   received.
//! - **A failure** anywhere ends the attempt everywhere. The root cause is determined when all nodes have ended: it is
//!   the earliest failure that no other failure explains. A lost node counts as failed from when it was last heard.
//! - **Changes of the group** lead to new attempts that do not count against the restart budget: members are asked to
//!   save and to end the current one.
//!
//! Invariants: an attempt begins only when every member has ended the last one or is lost; messages about another
//! attempt are ignored; the job ends once, for all members alike; no attempt follows a stop.
//!
//! - `admission`: who may be a member; `gathering`: when there are enough members, and their ranks; `attempt`: an
//!   attempt from its preparation to its end; `policy`: whether another follows; `stops`: stops and leaving members;
//!   `relay`: messages from one member to others.

mod admission;
mod attempt;
mod gathering;
pub mod policy;
mod relay;
mod stops;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::{
    Greeting, GroupEnd, GroupRules, MemberState, MemberStatus, NodeEnded, NodePrepared, RootCause,
};

use crate::group_rendezvous::GroupRendezvous;
use admission::Claim;
use policy::Policy;
use xlaunch_spec::command::Restarts;

/// Identifies an agent. One that was lost and comes back is a new member.
pub type MemberId = u64;

/// Time for an agent whose connection has closed to open another one.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(1);
/// Time for a node to report a failure of its own after other nodes have lost their connections to it.
const CAUSE_GRACE: Duration = Duration::from_millis(1500);
/// Silence after which status shows a member as silent.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// Interval between checks for silent members.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);
/// A sweep that is overdue by more than this shows that the coordinator itself was suspended. Messages that members
/// sent in the meantime may still be waiting to be read, so silence counts from the resumption.
const SUSPENDED_AFTER: Duration = Duration::from_secs(1);

/// An event for the state machine.
#[derive(Clone, Debug)]
pub enum Input {
    /// An agent that is not a member has introduced itself.
    Greeted(MemberId, Greeting),
    /// A member has opened another connection.
    Connected(MemberId),
    /// The connection of a member has closed.
    Disconnected(MemberId),
    /// A member has sent something, such as a heartbeat, so it is alive.
    Heard(MemberId),
    /// A member has sent this message. Each message arrives once, and in order.
    Message(MemberId, FromAgent),
    /// The deadline has passed.
    Tick,
}

/// An action for the coordinator's task.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send this to a member.
    Send(MemberId, ToAgent),
    /// The agent is not, or no longer, a member. Messages sent to it before are still delivered.
    Forget(MemberId),
}

/// The state of a job's group.
#[derive(Debug)]
pub struct Coordinator {
    run_id: String,
    /// The number of the run's directory; `None` before the first attempt.
    run_number: Option<u32>,
    /// Members must have this run id, or none.
    is_for_run: bool,
    new_key: fn() -> [u8; 32],
    /// Greeting of the first member, with which all others must agree.
    reference: Option<Greeting>,
    rules: GroupRules,
    policy: Policy,
    members: BTreeMap<MemberId, Member>,
    claims: Vec<Claim>,
    phase: Phase,
    /// Number of the current attempt, or else of the next one; counts from 0.
    attempt: u32,
    /// Number of counted restarts after failures.
    restarts: u32,
    /// Number of nodes in the current or last attempt.
    nodes: u32,
    /// Failures of the current attempt, in order of arrival.
    failures: Vec<NodeFailure>,
    /// The members of this attempt have been told that it failed.
    ending: bool,
    /// Time at which the members are told, unless a failure arrives before that explains the known ones.
    announce_at: Option<Instant>,
    /// Reason given to the members for ending this attempt without a failure.
    pause: Option<String>,
    /// Signal of a requested stop; 0 if a user asked by a call.
    stop: Option<u32>,
    /// Number of stop requests that have been passed on to the running nodes.
    stops_passed_on: u32,
    /// Rendezvous of the nodes in the current attempt.
    rendezvous: Option<GroupRendezvous>,
    /// Root cause of the first failed attempt since the last one that made progress.
    first_root: Option<NodeFailure>,
    /// Root cause of the last failed attempt.
    last_root: Option<NodeFailure>,
    /// A node has been lost since the group was last complete.
    after_loss: bool,
    /// Instance id of the agent whose node has the checkpoints of a training job: the last one with node rank 0.
    keeper: Option<Vec<u8>>,
    /// The nodes of this attempt do not share the checkpoint directory; only the node with rank 0 has it.
    unshared: bool,
    /// The node with the checkpoints is lost, so another attempt would start from scratch.
    checkpoints_lost: bool,
    /// Nodes that were lost and not replaced, with the time at which each was last heard. For status.
    lost: Vec<(Instant, MemberStatus)>,
    next_sweep: Option<Instant>,
    /// The last suspension of more than [`SUSPENDED_AFTER`]: when the coordinator resumed, and how long it had not run.
    suspended: Option<(Instant, Duration)>,
    /// True if at least one checkpoint of this run is complete.
    saved: bool,
    outputs: Vec<Output>,
}

/// An admitted agent.
#[derive(Clone, Debug)]
struct Member {
    greeting: Greeting,
    /// Node rank in the current or last attempt.
    node_rank: Option<u32>,
    first_rank: u32,
    stage: Stage,
    last_heard: Instant,
    closed: Option<Instant>,
    /// The member leaves because of this signal, once its workers are gone.
    leaving: Option<u32>,
    /// The coordinator runs in the process of this agent.
    hosts_coordinator: bool,
    /// Number of stop requests from this node.
    stop_requests: u32,
}

/// A member's progress in the current attempt.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// Takes no part in an attempt.
    Idle,
    Preparing,
    Prepared(NodePrepared),
    Running,
    Ended(NodeEnded),
}

/// A failure and its place.
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
        /// Time at which the attempt begins without the nodes that are still missing.
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
    /// Creates a group without members. `new_key` makes the secret of an attempt.
    pub fn new(run_id: String, seed: u64, new_key: fn() -> [u8; 32], now: Instant) -> Self {
        Self {
            run_id,
            run_number: None,
            is_for_run: false,
            new_key,
            reference: None,
            rules: GroupRules::default(),
            policy: Policy::new(Restarts::default(), false, seed),
            members: BTreeMap::new(),
            claims: Vec::new(),
            // A placeholder until the first member brings the real timeouts.
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

    /// Makes the coordinator refuse agents with a run id other than `run_id`.
    #[must_use]
    pub fn for_run(self, run_id: String) -> Self {
        Self { run_id, is_for_run: true, ..self }
    }

    /// Returns whether the job is over and all members have been told.
    pub fn is_over(&self) -> bool {
        self.exit_code().is_some()
    }

    /// Returns the exit code of the job, if it is over.
    pub fn exit_code(&self) -> Option<u32> {
        match &self.phase {
            Phase::Ended(end) => Some(end.exit_code),
            _ => None,
        }
    }

    /// Time at which an [`Input::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        let own = match &self.phase {
            // Before the first member there is nothing to do.
            Phase::Gathering { .. } if self.reference.is_none() => None,
            // Once there are enough members, only the last call counts.
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

    /// Handles an event. Returns the actions to take, in this order.
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

    /// Returns the members and the nodes that were lost and not replaced, for status.
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

    /// Restarts the clocks of all members after a suspension: silence while the coordinator did not run says nothing
    /// about them.
    fn notice_suspension(&mut self, now: Instant) {
        let Some(due) = self.next_sweep.filter(|due| now >= *due + SUSPENDED_AFTER) else { return };
        for member in self.members.values_mut() {
            (member.last_heard, member.closed) = (now, member.closed.map(|_| now));
        }
        self.claims.iter_mut().for_each(|claim| claim.since = now);
        self.suspended = Some((now, now.saturating_duration_since(due)));
    }

    /// Finds lost members. Runs at intervals, not at every input: a thousand members send thousands of messages a
    /// second.
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

    /// Makes the transitions that depend on time or on the state of all members.
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

    /// Duration of silence after which a member is lost.
    fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.rules.lease.max(0.0))
    }

    fn send(&mut self, id: MemberId, message: ToAgent) {
        self.outputs.push(Output::Send(id, message));
    }

    /// Sends to all running members of the current attempt.
    fn send_to_running(&mut self, except: Option<MemberId>, message: &ToAgent) {
        let running = self.members.iter().filter(|(_, member)| member.stage == Stage::Running);
        let ids: Vec<_> = running.map(|(id, _)| *id).filter(|id| Some(*id) != except).collect();
        ids.into_iter().for_each(|id| self.send(id, message.clone()));
    }

    /// Ends the job and tells all members.
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
    /// `is_complete`: the attempt has as many nodes as the job can use.
    fn status(&self, is_complete: bool, now: Instant) -> MemberStatus {
        // The agent that hosts the coordinator sends no heartbeats.
        let silence = if self.hosts_coordinator {
            Duration::ZERO
        } else {
            now.saturating_duration_since(self.last_heard)
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

    /// Name for messages: `node 1 (host)`.
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

/// Name for messages: `node 1 (host)`, or `host` for a node without a rank.
fn name(node_rank: Option<u32>, host: &str) -> String {
    node_rank.map_or_else(|| host.to_owned(), |rank| format!("node {rank} ({host})"))
}
