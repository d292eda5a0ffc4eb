//! Worker processes: they work, fail, depend on each other, and may or may not end when told to.

use std::time::Duration;

use super::plan::CALM_AFTER;
use super::{Happening, World};
use crate::state::{Event, Kind};
use xlaunch_host::spawn::Exit;

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) host: usize,
    incarnation: u32,
    local_rank: u32,
    pub(super) rank: u32,
    pub(super) attempt: u32,
}

impl World {
    pub(super) fn start_workers(&mut self, host: usize, attempt: u32) {
        let incarnation = self.nodes[host].incarnation;
        let first = self.agent(host).first_rank();
        self.agent(host).workers.clear();
        let is_calm = self.now >= self.start + CALM_AFTER;
        // All workers of an attempt finish at about the same time.
        let length = match self.lengths.get(&attempt) {
            Some(end) => *end,
            None => {
                let length = if is_calm { self.random.ms(500, 3000) } else { self.random.ms(1000, 25_000) };
                self.lengths.insert(attempt, self.now + length);
                self.now + length
            }
        };
        for local_rank in 0..self.plan.workers[host] {
            let rank = first + local_rank;
            self.check_start(host, rank, attempt);
            let worker = self.workers.len();
            self.workers.push(Worker { host, incarnation, local_rank, rank, attempt });
            self.live.insert(worker);
            self.agent(host).workers.push(worker);
            let late = self.random.ms(0, 500);
            self.schedule(length.max(self.now + Duration::from_secs(1)) + late, Happening::Done(worker));
            if !is_calm && self.random.percent(self.plan.crashes) {
                let exit = match self.random.below(6) {
                    0 => Exit::Signal(11),
                    1 => Exit::Signal(9),
                    2 => Exit::Code(0),
                    other => Exit::Code(
                        [1, 3, 75, 65, 78, 99][(other as usize + self.random.below(4) as usize) % 6],
                    ),
                };
                let time = self.random.ms(0, 15_000);
                self.schedule(self.now + time, Happening::Exit(worker, exit));
            }
        }
        if self.plan.kind == Kind::Trainer {
            let time = self.random.ms(50, 800);
            self.schedule(self.now + time, Happening::Joined { host, incarnation, attempt });
        }
    }

    /// Finishes a worker, unless another worker of the attempt has failed.
    pub(super) fn done(&mut self, worker: usize) {
        if !self.broken.contains(&self.workers[worker].attempt) {
            self.exit(worker, Exit::Code(0));
        }
    }

    pub(super) fn exit(&mut self, worker: usize, exit: Exit) {
        if !self.live.remove(&worker) {
            return;
        }
        self.note(|| format!("worker {worker} exits: {exit:?}"));
        let Worker { host, incarnation, local_rank, rank, attempt } = self.workers[worker];
        let is_heard = self.is_current(host, incarnation, None);
        if is_heard && self.plan.kind == Kind::Trainer && rank == 0 && exit == Exit::Code(143) {
            self.save(host);
        }
        if exit != Exit::Code(0) && self.broken.insert(attempt) {
            self.notice_loss(attempt);
        }
        if is_heard {
            self.job_event(host, Event::Exited { rank: local_rank, exit });
        }
    }

    /// Some of the other workers notice that they have lost a peer; the rest hang.
    fn notice_loss(&mut self, attempt: u32) {
        for other in self.live.clone() {
            if self.workers[other].attempt == attempt && self.random.percent(60) {
                let code = if self.plan.kind == Kind::Trainer { 75 } else { 1 };
                let time = self.random.ms(1, 3000);
                self.schedule(self.now + time, Happening::Exit(other, Exit::Code(code)));
            }
        }
    }

    /// Asks the workers of a trainer for a checkpoint, or sends those of a command a signal.
    pub(super) fn stop_workers(&mut self, host: usize, signal: Option<i32>) {
        for worker in self.agent(host).workers.clone() {
            let exit = signal.map_or(Exit::Code(143), Exit::Signal);
            if self.random.percent(85) {
                let time = self.random.ms(1, 2000);
                self.schedule(self.now + time, Happening::Exit(worker, exit));
            }
        }
    }

    pub(super) fn kill_workers(&mut self, host: usize) {
        for worker in self.agent(host).workers.clone() {
            let time = self.random.ms(1, 300);
            self.schedule(self.now + time, Happening::Exit(worker, Exit::Signal(9)));
        }
    }

    /// Kills an agent, and its workers with it.
    pub(super) fn kill_agent(&mut self, host: usize, by_power: bool) {
        if self.nodes[host].agent.is_none() {
            return;
        }
        self.note(|| format!("h{host}: the agent is killed"));
        for worker in self.live.clone() {
            if self.workers[worker].host == host {
                let time = if by_power { Duration::ZERO } else { self.random.ms(1, 200) };
                self.schedule(self.now + time, Happening::Exit(worker, Exit::Signal(9)));
            }
        }
        let incarnation = self.nodes[host].incarnation;
        if by_power {
            for connection in &mut self.connections {
                // Neither side learns that the connection has ended.
                connection.lost |= (connection.host, connection.incarnation) == (host, incarnation);
            }
        }
        if self.plan.hosted && host == 0 && self.coordinator.is_some() {
            self.is_coordinator_off = by_power;
            self.end_coordinator();
        }
        self.end_agent(host);
    }
}
