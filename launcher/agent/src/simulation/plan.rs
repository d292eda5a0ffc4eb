//! The scenario derived from a seed: the job, its nodes, and the faults that hit them.

use std::time::Duration;

use xlaunch_proto::v1::{Greeting, GroupRules};

use crate::state::Kind;

/// Time from which no fault begins, all networks have healed, and workers end soon.
pub(super) const CALM_AFTER: Duration = Duration::from_secs(60);

/// A generator of pseudo-random numbers (splitmix64).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, end: u32) -> u32 {
        u32::try_from(self.next() % u64::from(end.max(1))).unwrap()
    }

    pub(super) fn percent(&mut self, chance: u32) -> bool {
        self.below(100) < chance
    }

    /// A random duration in `from..to` milliseconds.
    pub(super) fn ms(&mut self, from: u32, to: u32) -> Duration {
        Duration::from_millis(u64::from(from + self.below(to - from)))
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// Packets to the coordinator, from it, or both are lost for `time`.
    Cut { up: bool, down: bool, time: Duration },
    /// Messages take up to this long for ten seconds.
    Slow(Duration),
    /// The network resets the connection; says which ends notice.
    Reset { agent: bool, coordinator: bool },
    /// The agent is killed, and started again after `again`.
    Kill { again: Option<Duration> },
    /// The host loses power, and starts again after `again`.
    PowerOff { again: Option<Duration> },
    /// A signal to the agent, or a call if 0.
    Stop(u32),
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    /// Number of workers on each host.
    pub(super) workers: Vec<u32>,
    /// Start time of the agent on each host.
    pub(super) starts: Vec<Duration>,
    /// Clock rate of each host.
    pub(super) clocks: Vec<f64>,
    pub(super) fixed_ranks: bool,
    pub(super) nodes: (u32, u32),
    /// All hosts see the same checkpoint directory; otherwise each has its own.
    pub(super) shared: bool,
    pub(super) restarts: u32,
    pub(super) lease: u32,
    /// The agent of host 0 runs the coordinator.
    pub(super) hosted: bool,
    pub(super) faults: Vec<(Duration, usize, Fault)>,
    /// Probability in percent that a worker fails by itself during an attempt.
    pub(super) crashes: u32,
}

impl Plan {
    pub(super) fn new(random: &mut Random) -> Self {
        let hosts = 1 + random.below(5);
        let fixed_ranks = random.percent(40);
        let most = if fixed_ranks { hosts } else { 1 + random.below(hosts) };
        let least = if fixed_ranks { most } else { 1 + random.below(most) };
        let starts =
            (0..hosts).map(|_| if random.percent(85) { random.ms(0, 3000) } else { random.ms(3000, 25_000) });
        let starts = starts.collect();
        let clocks = (0..hosts).map(|_| 0.99 + f64::from(random.below(2001)) / 100_000.0).collect();
        let count = random.below(7);
        let fault = |random: &mut Random| {
            let at = random.ms(0, 40_000);
            (at, random.below(hosts) as usize, fault(random))
        };
        Self {
            kind: if random.percent(50) { Kind::Trainer } else { Kind::Command },
            workers: (0..hosts).map(|_| 1 + random.below(3)).collect(),
            starts,
            clocks,
            fixed_ranks,
            nodes: (least, most),
            shared: random.percent(50),
            restarts: random.below(4),
            lease: [3, 6, 12, 12][random.below(4) as usize],
            hosted: random.percent(60),
            faults: (0..count).map(|_| fault(random)).collect(),
            crashes: [0, 10, 40][random.below(3) as usize],
        }
    }

    /// A training job that grows node by node, and loses some of them again.
    pub(super) fn growth(random: &mut Random) -> Self {
        let hosts = 3;
        let starts = (0..hosts).map(|host| random.ms(8000 * host, 8000 * host + 8000)).collect();
        let fault = |random: &mut Random| {
            let again = random.percent(70).then(|| random.ms(500, 8000));
            let fault = match random.below(10) {
                0..5 => Fault::Stop(15),
                5..8 => Fault::Kill { again },
                _ => Fault::PowerOff { again },
            };
            (random.ms(5000, 50_000), random.below(hosts) as usize, fault)
        };
        Self {
            kind: Kind::Trainer,
            workers: vec![1; hosts as usize],
            starts,
            clocks: vec![1.0; hosts as usize],
            fixed_ranks: false,
            nodes: (1, hosts),
            shared: random.percent(50),
            restarts: 3,
            lease: 3,
            hosted: random.percent(40),
            faults: (0..1 + random.below(5)).map(|_| fault(random)).collect(),
            crashes: [0, 10][random.below(2) as usize],
        }
    }

    /// The only faults are cuts of up to 8 s, with the default lease.
    pub(super) fn short_cuts(random: &mut Random) -> Self {
        let cut = |at: u32, random: &mut Random| {
            let both = random.percent(50);
            let up = both || random.percent(50);
            let fault = Fault::Cut { up, down: both || !up, time: random.ms(1000, 8000) };
            (Duration::from_secs(at.into()), random.below(3) as usize, fault)
        };
        Self {
            workers: vec![2; 3],
            starts: vec![Duration::ZERO; 3],
            nodes: (3, 3),
            shared: true,
            restarts: 3,
            lease: 12,
            hosted: true,
            fixed_ranks: true,
            crashes: 0,
            clocks: vec![0.99, 1.0, 1.01],
            // Far enough apart for the agents to come back in between.
            faults: vec![cut(5, random), cut(19, random)],
            kind: Kind::Trainer,
        }
    }

    pub(super) fn greeting(&self, host: usize, incarnation: u32) -> Greeting {
        let rules = GroupRules {
            trainer: self.kind == Kind::Trainer,
            max_restarts: self.restarts,
            final_codes: vec![65],
            free_codes: vec![78],
            fixed_ranks: self.fixed_ranks,
            join_timeout: 30.0,
            last_call_timeout: 3.0,
            heartbeat_interval: 1.0,
            lease: self.lease.into(),
            ..GroupRules::default()
        };
        let rank = u32::try_from(host).unwrap();
        let instance = [rank.to_be_bytes(), incarnation.to_be_bytes(), [0; 4], [0; 4]].concat();
        Greeting {
            instance,
            version: "1".into(),
            node_rank: self.fixed_ranks.then_some(rank),
            host: format!("h{host}"),
            address: format!("10.0.0.{host}"),
            workers: self.workers[host],
            min_nodes: self.nodes.0,
            max_nodes: self.nodes.1,
            new: true,
            rules: Some(rules),
            ..Greeting::default()
        }
    }
}

fn fault(random: &mut Random) -> Fault {
    let again = |random: &mut Random| random.percent(70).then(|| random.ms(500, 20_000));
    match random.below(100) {
        0..40 => {
            let (up, down) = [(true, true), (true, false), (false, true)][random.below(3) as usize];
            Fault::Cut { up, down, time: random.ms(1000, 30_000) }
        }
        40..55 => Fault::Reset { agent: random.percent(50), coordinator: random.percent(50) },
        55..65 => Fault::Slow(random.ms(100, 6000)),
        65..80 => Fault::Kill { again: again(random) },
        80..90 => Fault::PowerOff { again: again(random) },
        _ => Fault::Stop([2, 15, 15, 0][random.below(4) as usize]),
    }
}
