//! The agents of many nodes in one process, each with its own connection to the coordinator.

use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use prost::Message;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use xlaunch_agent::work;
use xlaunch_cluster::group_rendezvous::NodeJoin;
use xlaunch_cluster::link::{FromGroup, Link};
use xlaunch_cluster::net::{Security, Token};
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::coordinator_message::Body as ToAgent;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{
    Greeting, Heartbeat, NodeEnded, NodeFailed, NodePrepared, RankReport, RankReports, RootCause,
    WorkerReport,
};
use xlaunch_spec::command::{self, Backend, Endpoint, GroupSpec, NodeCount};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::ids::Digest;
use xlaunch_spec::job::JobSpec;

use crate::nodes::{Milestone, Plan};
use crate::raise_file_limit;

/// Maximum time for all nodes to join.
const JOIN_TIMEOUT: Duration = Duration::from_secs(100);
/// Maximum time for all nodes to learn of a failure.
const FAILURE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between reports of a node about its ranks.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// An event at a node.
enum Change {
    Joined,
    PeerFailed(Instant, String),
    /// The node is no longer a member, for this reason.
    Lost(String),
}

/// Simulates the agents that the plan on stdin describes: the child process.
///
/// # Errors
/// A node could not join, or was lost.
pub(super) async fn simulate() -> io::Result<String> {
    let plan = read_plan()?;
    run(&plan).await?;
    Ok(String::new())
}

fn read_plan() -> io::Result<Plan> {
    let mut text = Vec::new();
    io::stdin().lock().read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

async fn run(plan: &Plan) -> io::Result<()> {
    raise_file_limit(plan.nodes, "nodes")?;
    let security = security(plan)?;
    let (to_main, mut changes) = mpsc::unbounded_channel();
    let (fail, failing) = watch::channel(None);
    let start = Instant::now();
    let mut agents = JoinSet::new();
    for node in 0..plan.nodes {
        let agent = Agent {
            node,
            workers: workers(plan, node),
            link: link(plan, node, security.clone()),
            changes: to_main.clone(),
            attempt: None,
        };
        agents.spawn(agent.run(failing.clone()));
    }
    let joined = tokio::time::timeout(JOIN_TIMEOUT, all(&mut changes, plan.nodes)).await;
    joined.map_err(|_| io::Error::other(format!("not all nodes have joined within {JOIN_TIMEOUT:?}")))??;
    report(Milestone::Joined(start.elapsed().as_secs_f64()))?;
    if let Ok(change) = tokio::time::timeout(plan.hold, changes.recv()).await {
        return Err(lost(change));
    }
    report(Milestone::Held)?;
    let start = Instant::now();
    let _ = fail.send(Some(plan.nodes / 2));
    let known = tokio::time::timeout(FAILURE_TIMEOUT, all(&mut changes, plan.nodes - 1)).await;
    let last = known.map_err(|_| io::Error::other("not all nodes have learnt of a failure"))??;
    report(Milestone::Failed(last.unwrap_or(start).saturating_duration_since(start).as_secs_f64()))?;
    // Wait until all agents know that the job has ended.
    while agents.join_next().await.is_some() {}
    Ok(())
}

/// Waits for `nodes` changes. Returns the time at which the last of them learnt of a failure.
async fn all(changes: &mut mpsc::UnboundedReceiver<Change>, nodes: u32) -> io::Result<Option<Instant>> {
    let mut last = None;
    for _ in 0..nodes {
        match changes.recv().await {
            Some(Change::Joined) => {}
            Some(Change::PeerFailed(at, _)) => last = last.max(Some(at)),
            other => return Err(lost(other)),
        }
    }
    Ok(last)
}

fn lost(change: Option<Change>) -> io::Error {
    io::Error::other(match change {
        Some(Change::Lost(reason)) => reason,
        Some(Change::PeerFailed(_, message)) => format!("a node was lost: {message}"),
        Some(Change::Joined) | None => "an agent has ended".into(),
    })
}

/// Reports a milestone to the process with the coordinator.
fn report(milestone: Milestone) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", serde_json::json!(milestone))?;
    stdout.flush()
}

fn security(plan: &Plan) -> io::Result<Security> {
    let Some(token) = &plan.token else { return Ok(Security::Insecure) };
    let token = BASE64_STANDARD.decode(token).map_err(io::Error::other)?;
    let token = Token::from_bytes(token, "the plan").map_err(io::Error::other)?;
    Security::from_token(&token).map_err(io::Error::other)
}

/// Creates the link of one node, which starts to connect at once.
fn link(plan: &Plan, node: u32, security: Security) -> Link {
    let endpoint = Endpoint { host: Ipv4Addr::LOCALHOST.to_string(), ports: vec![plan.port] };
    let nodes = NodeCount { min: plan.nodes, max: plan.nodes };
    let group = GroupSpec::new(nodes, Backend::Static, endpoint.clone(), command::Security::Token);
    let mut spec = JobSpec::default();
    spec.launch.max_restarts = 0;
    let workers = workers(plan, node);
    let greeting = Greeting {
        node_rank: Some(node),
        host: format!("node{node}"),
        address: Ipv4Addr::LOCALHOST.to_string(),
        min_nodes: plan.nodes,
        max_nodes: plan.nodes,
        ..work::of_trainer(&spec, None, workers, Some(&group))
    };
    Link::remote(endpoint, security, greeting, JOIN_TIMEOUT)
}

/// Returns the number of ranks of a node. The numbers of any two nodes differ by at most one.
fn workers(plan: &Plan, node: u32) -> u32 {
    plan.ranks / plan.nodes + u32::from(node < plan.ranks % plan.nodes)
}

/// The agent of one node, without workers.
struct Agent {
    node: u32,
    workers: u32,
    link: Link,
    changes: mpsc::UnboundedSender<Change>,
    /// The running attempt, and its first rank on this node.
    attempt: Option<(u32, u32)>,
}

impl Agent {
    /// Runs until the end of the job, or until the node is lost.
    async fn run(mut self, mut failing: watch::Receiver<Option<u32>>) {
        let mut reports = interval(REPORT_INTERVAL);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut over = false;
        let mut first_rank = 0;
        loop {
            tokio::select! {
                            message = self.link.next() => match message {
                                Some(FromGroup::Message(ToAgent::Prepare(prepare))) => {
                                    first_rank = prepare.first_rank;
                                    self.link.send(FromAgent::Prepared(NodePrepared {
                                        attempt: prepare.attempt,
                                        master_port: 1,
                                        shared: true,
                                        ..NodePrepared::default()
                                    }));
                                }
                                Some(FromGroup::Message(ToAgent::Begin(begin))) => {
                                    self.attempt = Some((begin.attempt, first_rank));
                                    self.join(begin.attempt);
                                }
                                Some(FromGroup::Message(ToAgent::Join(join))) => if join.problem.is_empty() {
            self.tell(Change::Joined)
            } else {
            return self.tell(Change::Lost(join.problem))
            }
                                Some(FromGroup::Message(ToAgent::PeerFailed(failed))) => {
                                    over = true;
                                    self.tell(Change::PeerFailed(Instant::now(), failed.message));
                                    self.end(failed.attempt, None);
                                }
                                Some(FromGroup::Message(ToAgent::End(end))) => {
                                    if !over {
                                        self.tell(Change::Lost(format!("node {}: {}", self.node, end.root)));
                                    }
                                    return;
                                }
                                Some(FromGroup::CutOff(reason)) => {
                                    return self.tell(Change::Lost(format!("node {}: {reason}", self.node)));
                                }
                                Some(FromGroup::Message(_) | FromGroup::Connected(_) | FromGroup::Notice(_)) => {}
                                None => return,
                            },
                            _ = reports.tick() => self.report(),
                            Ok(()) = failing.changed() => {
                                let is_failing = *failing.borrow_and_update() == Some(self.node);
                                if is_failing && let Some((attempt, _)) = self.attempt {
                                    over = true;
                                    self.fail(attempt);
                                }
                            }
                        }
        }
    }

    fn tell(&self, change: Change) {
        // The receiver is gone only if the measurement has failed.
        let _ = self.changes.send(change);
    }

    fn join(&self, attempt: u32) {
        let join = NodeJoin {
            config_hash: Digest::of(b"bench"),
            layout_hash: Digest::of(b"bench"),
            nccl_id: None,
            ring_address: format!("tcp:10.0.{}.{}:29500", self.node / 256, self.node % 256),
            has_gpus: false,
        };
        self.link.send(FromAgent::Join(join.to_wire(attempt)));
    }

    /// Sends the report about this node's ranks that the agent of rank 0 receives.
    fn report(&self) {
        let Some((attempt, first_rank)) = self.attempt else { return };
        let heartbeat = WorkerReport {
            report: Some(Report::Heartbeat(Heartbeat {
                step: 1000,
                phase_seconds: 0.1,
                collectives: 5000,
                ..Heartbeat::default()
            })),
        }
        .encode_to_vec();
        let reports = (first_rank..first_rank + self.workers)
            .map(|rank| RankReport { rank, report: heartbeat.clone() })
            .collect();
        self.link.send(FromAgent::Reports(RankReports { attempt, reports }));
    }

    fn fail(&mut self, attempt: u32) {
        let exit_code = ExitCode::WorkerFailed.code().into();
        let cause = RootCause { message: "exit code 1".into(), exit_code, ..RootCause::default() };
        self.link.send(FromAgent::Failed(NodeFailed { attempt, cause: Some(cause.clone()) }));
        self.end(attempt, Some(cause));
    }

    fn end(&mut self, attempt: u32, root: Option<RootCause>) {
        self.attempt = None;
        let exit_code = ExitCode::WorkerFailed.code().into();
        self.link.send(FromAgent::Ended(NodeEnded { attempt, root, exit_code, ..NodeEnded::default() }));
    }
}
