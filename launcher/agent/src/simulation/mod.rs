//! Simulates whole jobs on simulated networks: the real coordinator, the real links and the real jobs of up to five
//! nodes, on a simulated clock. Networks are slow, drop packets in one direction or both, and reset connections; agents
//! are killed and start again, hosts lose power, workers fail, jobs are stopped; clocks differ by up to 1 %.
//!
//! A seed determines everything. A failure prints its seed and a trace of all events. The ordinary test runs 1,000
//! seeds in a few seconds; `XLAUNCH_TEST_SEEDS=0..10000`, as in the gate, takes half a minute.

mod invariants;
mod network;
mod node;
mod plan;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_proto::v1::{JobState, NodePrepared};

use crate::state::Event;
use invariants::{AgentEnd, Summary, Told};
use network::{Connection, Direction};
use node::Node;
use plan::{CALM_AFTER, Fault, Plan, Random};
use workers::Worker;
use xlaunch_cluster::coordinator::Task;
use xlaunch_cluster::state::Coordinator;
use xlaunch_host::spawn::Exit;

/// Time for a job to end after its network has healed: agents wait for others, and for the coordinator.
const END_TIMEOUT: Duration = Duration::from_secs(240);

#[derive(Debug)]
enum Happening {
    Start(usize),
    Fault(usize, Fault),
    Deliver(usize, Direction),
    Dial {
        host: usize,
        incarnation: u32,
        epoch: u64,
    },
    DialFailed {
        host: usize,
        incarnation: u32,
        epoch: u64,
        refused: bool,
    },
    ReplyTimeout {
        host: usize,
        incarnation: u32,
        epoch: u64,
    },
    Prepared {
        host: usize,
        incarnation: u32,
        prepared: NodePrepared,
    },
    Joined {
        host: usize,
        incarnation: u32,
        attempt: u32,
    },
    /// A worker has finished its work.
    Done(usize),
    Exit(usize, Exit),
}

#[derive(Debug)]
struct World {
    plan: Plan,
    random: Random,
    start: Instant,
    now: Instant,
    queue: BTreeMap<(Instant, u64), Happening>,
    scheduled: u64,
    /// `None` once its process has ended.
    coordinator: Option<Task>,
    /// The coordinator's host has lost power.
    is_coordinator_off: bool,
    nodes: Vec<Node>,
    connections: Vec<Connection>,
    workers: Vec<Worker>,
    live: BTreeSet<usize>,
    /// Attempts in which a worker has failed.
    broken: BTreeSet<u32>,
    /// Times at which the workers of each attempt are done.
    lengths: BTreeMap<u32, Instant>,
    next_port: u32,
    told: BTreeMap<u32, Told>,
    /// Number of announced checkpoints, and the number of nodes that saved the last one.
    saved: Option<(u32, u32)>,
    /// Number of the last checkpoint in each directory.
    directories: BTreeMap<usize, u32>,
    ends: Vec<AgentEnd>,
    violation: Option<String>,
    summary: Summary,
    trace: Option<Vec<String>>,
}

impl World {
    fn new(plan: Plan, random: Random, trace: bool) -> Self {
        let start = Instant::now();
        let state = Coordinator::new("run".into(), 1, || [7; 32], start);
        let mut world = Self {
            coordinator: Some(Task::new(state, plan.hosted)),
            random,
            start,
            now: start,
            queue: BTreeMap::new(),
            scheduled: 0,
            is_coordinator_off: false,
            nodes: plan.workers.iter().map(|_| Node::default()).collect(),
            connections: Vec::new(),
            workers: Vec::new(),
            live: BTreeSet::new(),
            broken: BTreeSet::new(),
            lengths: BTreeMap::new(),
            next_port: 20_000,
            told: BTreeMap::new(),
            saved: None,
            directories: BTreeMap::new(),
            ends: Vec::new(),
            violation: None,
            summary: Summary::default(),
            trace: trace.then(Vec::new),
            plan,
        };
        for (host, at) in world.plan.starts.clone().into_iter().enumerate() {
            // The agent that runs the coordinator opens the first connection.
            let at = if world.plan.hosted && host == 0 { Duration::ZERO } else { at };
            world.schedule(start + at, Happening::Start(host));
        }
        for (at, host, fault) in world.plan.faults.clone() {
            world.schedule(start + at, Happening::Fault(host, fault));
        }
        world
    }

    fn run(&mut self) -> Result<Summary, String> {
        let deadline = self.start + CALM_AFTER + END_TIMEOUT;
        let mut steps = 0;
        while self.now < deadline && self.violation.is_none() {
            let event = self.queue.keys().next().map(|(at, _)| *at);
            let agents = (0..self.nodes.len()).filter_map(|host| Some((self.agent_deadline(host)?, host)));
            let agent = agents.min();
            let coordinator = self.coordinator.as_ref().and_then(Task::deadline);
            let due = event.into_iter().chain(agent.map(|(at, _)| at)).chain(coordinator).min();
            let Some(due) = due else { break };
            steps = if due > self.now { 0 } else { steps + 1 };
            self.require(steps < 10_000, || "time does not go on".into());
            self.now = self.now.max(due);
            if event == Some(due) {
                let (_, happening) = self.queue.pop_first().unwrap();
                self.happen(happening);
            } else if let Some((_, host)) = agent.filter(|(at, _)| *at == due) {
                self.agent_ticks(host);
            } else {
                self.coordinator_ticks();
            }
            if self.is_over() {
                break;
            }
        }
        self.check_end(deadline);
        match self.violation.take() {
            None => Ok(self.summary),
            Some(violation) => Err(violation),
        }
    }

    fn is_over(&self) -> bool {
        let is_start =
            |it: &Happening| matches!(it, Happening::Start(_) | Happening::Fault(..) | Happening::Exit(..));
        self.nodes.iter().all(|node| node.agent.is_none()) && !self.queue.values().any(is_start)
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Start(host) if self.nodes[host].agent.is_none() => self.start_agent(host),
            Happening::Start(_) => {}
            Happening::Fault(host, fault) => self.fault(host, fault),
            Happening::Deliver(connection, direction) => self.deliver(connection, direction),
            Happening::Dial { host, incarnation, epoch } => {
                if self.is_current(host, incarnation, Some(epoch)) {
                    self.dial(host, incarnation, epoch);
                }
            }
            Happening::DialFailed { host, incarnation, epoch, refused } => {
                if self.is_current(host, incarnation, Some(epoch)) {
                    self.dial_failed(host, refused);
                }
            }
            Happening::ReplyTimeout { host, incarnation, epoch } => {
                if self.is_current(host, incarnation, Some(epoch)) {
                    self.reply_timeout(host);
                }
            }
            Happening::Prepared { host, incarnation, prepared } => {
                if self.is_current(host, incarnation, None) {
                    self.link_send(host, FromAgent::Prepared(prepared));
                }
            }
            Happening::Joined { host, incarnation, attempt } => {
                if self.is_current(host, incarnation, None) {
                    let job = self.agent(host).job();
                    if (job.attempt(), job.state()) == (attempt, JobState::Rendezvous) {
                        self.job_event(host, Event::AllJoined);
                        self.job_event(host, Event::Advanced { by_steps: true });
                    }
                }
            }
            Happening::Done(worker) => self.done(worker),
            Happening::Exit(worker, exit) => self.exit(worker, exit),
        }
    }

    fn fault(&mut self, host: usize, fault: Fault) {
        self.note(|| format!("h{host}: {fault:?}"));
        let again = match fault {
            Fault::Cut { up, down, time } => {
                let until = Some(self.now + time.min(self.start + CALM_AFTER - self.now));
                let node = &mut self.nodes[host];
                node.up_cut = if up { node.up_cut.max(until) } else { node.up_cut };
                node.down_cut = if down { node.down_cut.max(until) } else { node.down_cut };
                None
            }
            Fault::Slow(most) => {
                self.nodes[host].slow = Some((self.now + Duration::from_secs(10), most));
                None
            }
            Fault::Reset { agent, coordinator } => {
                self.reset(host, agent, coordinator);
                None
            }
            Fault::Stop(signal) => {
                self.request_stop(host, signal);
                None
            }
            Fault::Kill { again } => {
                self.kill_agent(host, false);
                again
            }
            Fault::PowerOff { again } => {
                self.kill_agent(host, true);
                again
            }
        };
        if let Some(time) = again.filter(|_| !(self.plan.hosted && host == 0)) {
            self.schedule(self.now + time, Happening::Start(host));
        }
    }

    fn schedule(&mut self, at: Instant, happening: Happening) {
        self.scheduled += 1;
        self.queue.insert((at, self.scheduled), happening);
    }

    /// Returns the time on a host's own clock.
    fn clock(&self, host: usize) -> Instant {
        self.start + (self.now - self.start).mul_f64(self.plan.clocks[host])
    }

    /// Returns the true time at which a host's clock shows `local`.
    fn real_time(&self, host: usize, local: Instant) -> Instant {
        let time = local.saturating_duration_since(self.start).div_f64(self.plan.clocks[host]);
        // Rounding must not make it too early.
        self.start + time + Duration::from_micros(1)
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        let time = self.now - self.start;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:9.4} {}", time.as_secs_f64(), text()));
        }
    }
}

fn simulate(
    seeds: Range<u64>,
    plan: fn(&mut Random) -> Plan,
    expect: fn(&World) -> Result<(), String>,
) -> Summary {
    let world = |seed, trace| {
        let mut random = Random::new(seed);
        let plan = plan(&mut random);
        World::new(plan, random, trace)
    };
    let run = |world: &mut World| world.run().and_then(|summary| expect(world).map(|()| summary));
    let mut total = Summary::default();
    for seed in seeds {
        match run(&mut world(seed, false)) {
            Ok(summary) => total.add(summary),
            Err(violation) => {
                let mut again = world(seed, true);
                let _ = run(&mut again);
                let trace = again.trace.unwrap_or_default().join("\n");
                panic!("{trace}\nseed {seed}: {:#?}\nseed {seed}: {violation}", again.plan);
            }
        }
    }
    total
}

fn seeds() -> Range<u64> {
    let chosen = std::env::var("XLAUNCH_TEST_SEEDS").ok();
    let range = chosen.as_deref().and_then(|it| it.split_once(".."));
    range.map_or(0..1000, |(from, to)| from.parse().unwrap()..to.parse().unwrap())
}

#[test]
fn at_most_one_attempt_is_active_and_every_job_ends_whatever_the_network_does() {
    let total = simulate(seeds(), Plan::new, |_| Ok(()));
    let happened = [total.attempts, total.restarts, total.cut_off, total.renewed, total.left, total.done];
    assert!(seeds().count() < 1000 || happened.iter().all(|count| *count > 0), "{total:?}");
}

#[test]
fn resized_training_resumes_from_the_last_announced_checkpoint() {
    let total = simulate(seeds(), Plan::growth, |_| Ok(()));
    assert!(seeds().count() < 1000 || (total.resized > 500 && total.left > 0), "{total:?}");
}

#[test]
fn cuts_that_are_shorter_than_the_lease_restart_nothing() {
    let expect = |world: &World| {
        let is_done = world.ends.len() == 3 && world.ends.iter().all(|end| end.code == 0);
        let is_first = world.summary.attempts == 1;
        (is_done && is_first).then_some(()).ok_or_else(|| format!("{:?}, {:?}", world.summary, world.ends))
    };
    simulate(0..100, Plan::short_cuts, expect);
}
