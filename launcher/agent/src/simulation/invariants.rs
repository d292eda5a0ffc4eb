//! Invariants that must hold after every event.

use std::collections::BTreeMap;
use std::time::Instant;

use xlaunch_proto::v1::{Begin, Prepare};

use super::World;
use crate::state::Kind;

/// The assignment that the nodes of an attempt were told.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// Host, first rank and number of workers, by node rank.
    nodes: BTreeMap<u32, (usize, u32, u32)>,
    world: u32,
    count: u32,
    port: u32,
}

/// Event counts, so that a simulation in which nothing happens is noticed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Summary {
    pub(super) attempts: u32,
    pub(super) restarts: u32,
    pub(super) cut_off: u32,
    pub(super) renewed: u32,
    pub(super) left: u32,
    pub(super) done: u32,
    /// Attempts that resumed from a checkpoint saved by a different number of nodes.
    pub(super) resized: u32,
}

impl Summary {
    pub(super) fn add(&mut self, other: Self) {
        self.attempts += other.attempts;
        self.restarts += other.restarts;
        self.cut_off += other.cut_off;
        self.renewed += other.renewed;
        self.left += other.left;
        self.done += other.done;
        self.resized += other.resized;
    }
}

/// The end of an agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct AgentEnd {
    #[expect(dead_code, reason = "shown if the test fails")]
    pub(super) host: usize,
    pub(super) code: u8,
    /// The coordinator told the agent about the end.
    pub(super) told: bool,
    /// The agent was a member.
    pub(super) admitted: bool,
    /// The agent was sent SIGTERM.
    pub(super) leaving: bool,
}

impl World {
    pub(super) fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    /// Checks the beginning of an attempt on one node.
    pub(super) fn check_begin(&mut self, host: usize, prepare: &Prepare, begin: &Begin) {
        let attempt = prepare.attempt;
        let workers = self.plan.workers[host];
        let told = self.told.entry(attempt).or_insert_with(|| Told {
            world: prepare.world_size,
            count: prepare.nodes,
            port: begin.master_port,
            ..Told::default()
        });
        let agrees =
            (told.world, told.count, told.port) == (prepare.world_size, prepare.nodes, begin.master_port);
        let own = (prepare.first_rank, prepare.first_rank + workers);
        let overlaps = told.nodes.values().any(|(_, first, count)| own.0 < first + count && *first < own.1);
        let taken = told.nodes.insert(prepare.node_rank, (host, prepare.first_rank, workers)).is_some();
        let is_complete = u32::try_from(told.nodes.len()).unwrap() == told.count;
        let sum: u32 = told.nodes.values().map(|(_, _, workers)| workers).sum();
        let fits =
            own.1 <= told.world && prepare.node_rank < told.count && (!is_complete || sum == told.world);
        let text = format!("attempt {attempt} on h{host}: {prepare:?}, {begin:?}; {told:?}");
        self.require(agrees && !overlaps && !taken && fits, || format!("ranks: {text}"));
        self.check_checkpoints(host, prepare, begin);
        let is_fixed = !self.plan.fixed_ranks || prepare.node_rank as usize == host;
        self.require(is_fixed, || format!("fixed node rank: {text}"));
        self.require(prepare.restarts <= self.plan.restarts, || format!("restart budget: {text}"));
        let port = self.nodes[host].agent.as_ref().map_or(0, |agent| agent.port);
        let is_reserved = prepare.node_rank != 0 || begin.master_port == port;
        self.require(is_reserved, || format!("master port, {port} was reserved: {text}"));
        self.summary.restarts = self.summary.restarts.max(prepare.restarts);
        self.summary.attempts = self.summary.attempts.max(attempt + 1);
    }

    /// Index of the directory in which a host's agent keeps its checkpoints.
    fn directory(&self, host: usize) -> usize {
        if self.plan.shared { 0 } else { host }
    }

    /// Returns whether a host sees the checkpoint directory of the agent with this instance id.
    pub(super) fn sees_checkpoints(&self, host: usize, instance: &[u8]) -> bool {
        let keeper = instance.first_chunk().map_or(0, |host| u32::from_be_bytes(*host));
        self.directory(host) == self.directory(keeper as usize)
    }

    /// Records that rank 0 has announced a checkpoint to its agent.
    pub(super) fn save(&mut self, host: usize) {
        let nodes = self.agent(host).nodes();
        self.saved = Some((self.saved.map_or(1, |(number, _)| number + 1), nodes));
        let directory = self.directory(host);
        self.directories.insert(directory, self.saved.map_or(0, |(number, _)| number));
    }

    /// Checks that an attempt resumes from the last announced checkpoint, and that all ranks that write the next one
    /// write to the directory of rank 0.
    fn check_checkpoints(&mut self, host: usize, prepare: &Prepare, begin: &Begin) {
        if self.plan.kind != Kind::Trainer {
            return;
        }
        let text = format!("attempt {} on h{host}: {prepare:?}, {begin:?}", prepare.attempt);
        if prepare.node_rank == 0 {
            let found = self.directories.get(&self.directory(host)).copied();
            let saved = self.saved;
            self.require(found == saved.map(|(number, _)| number), || {
                format!("goes on from checkpoint {found:?}, {saved:?} was announced: {text}")
            });
            self.summary.resized += u32::from(saved.is_some_and(|(_, nodes)| nodes != prepare.nodes));
        }
        let first = self.told[&prepare.attempt].nodes.get(&0).map(|(host, ..)| *host);
        let is_apart = first.is_some_and(|first| self.directory(first) != self.directory(host));
        self.require(!is_apart || prepare.first_rank >= begin.writers, || {
            format!("writes to another directory than rank 0: {text}")
        });
    }

    /// Checks the start of a worker: no other worker of the same rank or of another attempt may be alive.
    pub(super) fn check_start(&mut self, host: usize, rank: u32, attempt: u32) {
        let other = self
            .live
            .iter()
            .map(|worker| &self.workers[*worker])
            .find(|other| other.rank == rank || other.attempt != attempt);
        if let Some(other) = other {
            let text = format!("rank {rank} of attempt {attempt} starts on h{host} while {other:?} lives");
            self.require(false, || text);
        }
    }

    /// Checks the end of the simulation: all agents have ended, or time is up.
    pub(super) fn check_end(&mut self, deadline: Instant) {
        let late: Vec<usize> =
            (0..self.nodes.len()).filter(|host| self.nodes[*host].agent.is_some()).collect();
        let (now, live) = (self.now, self.live.len());
        self.require(late.is_empty() && live == 0, || {
            format!("agents of hosts {late:?} and {live} workers live {:?} after the end", now - deadline)
        });
        let told: Vec<AgentEnd> = self.ends.iter().filter(|end| end.told && !end.leaving).copied().collect();
        let agree = told.windows(2).all(|pair| pair[0].code == pair[1].code);
        self.require(agree, || format!("agents were told different codes: {told:?}"));
        let is_calm = self.plan.faults.is_empty();
        let all_told = self.ends.iter().all(|end| end.told || !end.admitted);
        let ends = self.ends.clone();
        self.require(!is_calm || all_told, || {
            format!("not all agents were told how the job has ended: {ends:?}")
        });
        let is_done = told.iter().all(|end| end.code == 0);
        self.summary.done = u32::from(is_done && !told.is_empty());
        self.summary.left =
            self.ends.iter().filter(|end| end.leaving && !is_done).count().try_into().unwrap();
    }
}
