//! Description of how the agents of a job's nodes find each other, as determined by flags, `PET_*` variables and the
//! engine of a launch on several nodes. Without a [`GroupSpec`] a job runs on one node and opens no TCP socket.
//!
//! ```text
//! flags, PET_*, engine (Slurm, Kubernetes, ...) --> GroupSpec --check--> agent: join the coordinator at `endpoint`
//! ```
//! Invariants, all enforced by [`GroupSpec::check`]:
//! - 1 <= `nodes.min` <= `nodes.max` <= [`MAX_NODES`], and `min == max` in a static group;
//! - a static group's node has a rank, and every rank is below `nodes.max`;
//! - the endpoint has a host and between 1 and [`MAX_ENDPOINT_PORTS`] ports, none of them 0;
//! - the time after which a silent host is lost is between [`MIN_LOSS_TIMEOUT`] and [`MAX_LOSS_TIMEOUT`].
//!
//! The job's token is a secret and never part of the description.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::{at_most, check_text, invalid};
use super::{CommandSpecError, MAX_TIMEOUT};

/// Maximum number of nodes of a job.
pub const MAX_NODES: u32 = 65_536;
/// Maximum number of ports of an endpoint.
pub const MAX_ENDPOINT_PORTS: usize = 16;
/// Minimum time after which a silent host is lost.
pub const MIN_LOSS_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time after which a silent host is lost.
pub const MAX_LOSS_TIMEOUT: Duration = Duration::from_secs(60);
/// Minimum time between two heartbeats.
pub const MIN_KEEP_ALIVE_INTERVAL: Duration = Duration::from_millis(100);

/// A group of nodes, and how their agents find each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// Numbers of nodes that the job needs and can use.
    pub nodes: NodeCount,
    /// This node's rank: required in a static group, a preference in a dynamic one.
    pub node_rank: Option<u32>,
    /// Source of node ranks and membership.
    pub backend: Backend,
    /// Address of the coordinator.
    pub endpoint: Endpoint,
    /// True if this node's agent contains the coordinator. Default: node rank 0 in a static group, and the host that
    /// has the endpoint's address in a dynamic one.
    pub hosts_coordinator: Option<bool>,
    /// Id of the run, equal on all nodes of a job. Default: chosen by the coordinator.
    pub run_id: Option<String>,
    /// Maximum time for all nodes to join.
    pub join_timeout: Duration,
    /// Time to wait for more nodes once `nodes.min` have joined.
    pub last_call_timeout: Duration,
    /// Time between heartbeats of an agent.
    pub keep_alive_interval: Duration,
    /// Number of heartbeats that may be missing before the host is lost.
    pub keep_alive_max_attempt: u32,
    /// Address at which the other nodes reach this host.
    pub local_addr: Option<String>,
    /// Network interface with the address at which the other nodes reach this host.
    pub interface: Option<String>,
    /// Mutual authentication of agents and coordinator.
    pub security: Security,
    /// True if SIGTERM means that this node is preempted and will be started again: a job that it stops then exits with
    /// the code for a retry, even with a complete checkpoint.
    #[serde(default)]
    pub sigterm_is_preemption: bool,
}

/// A range of numbers of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "named after what they are")]
pub struct NodeCount {
    pub min: u32,
    pub max: u32,
}

/// Source of node ranks and membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// Fixed nodes with fixed ranks; torchrun's `static`.
    Static,
    /// Nodes join and leave; torchrun's `c10d`.
    Dynamic,
}

/// Address of the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Host name or address; IPv6 without brackets.
    pub host: String,
    /// Ports. The coordinator listens on the first free one, and agents try them in the same order until a listener
    /// proves that it is this job's coordinator. There are several only if the ports are derived from an engine's job.
    pub ports: Vec<u16>,
}

/// Mutual authentication of agents and coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Security {
    /// No authentication: plain TCP, for trusted networks.
    Insecure,
    /// TLS with keys derived from the job's token.
    Token,
    /// TLS, with munge credentials in place of a token.
    Munge,
}

impl GroupSpec {
    /// Creates the specification of a job with the default timeouts.
    pub fn new(nodes: NodeCount, backend: Backend, endpoint: Endpoint, security: Security) -> Self {
        Self {
            nodes,
            node_rank: None,
            backend,
            endpoint,
            hosts_coordinator: None,
            run_id: None,
            join_timeout: Duration::from_secs(600),
            last_call_timeout: Duration::from_secs(30),
            keep_alive_interval: Duration::from_secs(1),
            keep_alive_max_attempt: 12,
            local_addr: None,
            interface: None,
            security,
            sigterm_is_preemption: false,
        }
    }

    /// Returns the duration of silence after which a host is lost.
    pub fn loss_timeout(&self) -> Duration {
        self.keep_alive_interval.saturating_mul(self.keep_alive_max_attempt)
    }

    /// Checks the invariants, and that no text is long or contains a zero byte.
    pub fn check(&self) -> Result<(), CommandSpecError> {
        let NodeCount { min, max } = self.nodes;
        if min == 0 || min > max || max > MAX_NODES {
            return Err(invalid(
                "nodes",
                format!("are {}, expected 1 to {MAX_NODES}, MIN <= MAX", self.nodes),
            ));
        }
        if self.backend == Backend::Static && min != max {
            return Err(invalid(
                "nodes",
                format!("are {}, but a static group has a fixed number", self.nodes),
            ));
        }
        match self.node_rank {
            None if self.backend == Backend::Static => {
                return Err(invalid("node_rank", "is missing in a static group".into()));
            }
            Some(rank) if rank >= max => {
                return Err(invalid("node_rank", format!("is {rank}, expected 0 to {}", max - 1)));
            }
            _ => {}
        }
        if self.endpoint.host.is_empty() {
            return Err(invalid("endpoint", "has no host".into()));
        }
        at_most("endpoint", "ports", self.endpoint.ports.len(), MAX_ENDPOINT_PORTS)?;
        if self.endpoint.ports.is_empty() || self.endpoint.ports.contains(&0) {
            return Err(invalid("endpoint", "needs a port from 1 to 65535".into()));
        }
        check_text("endpoint", self.endpoint.host.as_ref())?;
        for (field, text) in
            [("run_id", &self.run_id), ("local_addr", &self.local_addr), ("interface", &self.interface)]
        {
            check_text(field, text.as_deref().unwrap_or_default().as_ref())?;
        }
        for (field, timeout) in
            [("join_timeout", self.join_timeout), ("last_call_timeout", self.last_call_timeout)]
        {
            if timeout > MAX_TIMEOUT {
                return Err(invalid(field, format!("is longer than {} s", MAX_TIMEOUT.as_secs())));
            }
        }
        self.check_keep_alive()
    }

    fn check_keep_alive(&self) -> Result<(), CommandSpecError> {
        if self.keep_alive_interval < MIN_KEEP_ALIVE_INTERVAL {
            return Err(invalid(
                "keep_alive_interval",
                format!("is shorter than {} s", MIN_KEEP_ALIVE_INTERVAL.as_secs_f64()),
            ));
        }
        let lost = self.loss_timeout();
        if (MIN_LOSS_TIMEOUT..=MAX_LOSS_TIMEOUT).contains(&lost) {
            return Ok(());
        }
        Err(invalid(
            "keep_alive_interval",
            format!(
                "x keep_alive_max_attempt is {} s, expected {} to {} s",
                lost.as_secs_f64(),
                MIN_LOSS_TIMEOUT.as_secs(),
                MAX_LOSS_TIMEOUT.as_secs()
            ),
        ))
    }
}

/// Written as `N`, or `MIN:MAX`.
impl fmt::Display for NodeCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max { write!(f, "{}", self.min) } else { write!(f, "{}:{}", self.min, self.max) }
    }
}

/// Written as torchrun's name.
impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => "static",
            Self::Dynamic => "c10d",
        })
    }
}

/// Written as `HOST:PORT` with the first port, and brackets around an IPv6 address.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.ports.first().copied().unwrap_or_default();
        if self.host.contains(':') {
            write!(f, "[{}]:{port}", self.host)
        } else {
            write!(f, "{}:{port}", self.host)
        }
    }
}

impl fmt::Display for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Insecure => "none",
            Self::Token => "token",
            Self::Munge => "munge",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(change: impl FnOnce(&mut GroupSpec)) -> GroupSpec {
        let endpoint = Endpoint { host: "h0".into(), ports: vec![29400] };
        let mut group =
            GroupSpec::new(NodeCount { min: 1, max: 2 }, Backend::Dynamic, endpoint, Security::Token);
        change(&mut group);
        group
    }

    #[test]
    fn description_survives_serialisation() {
        let group = group(|group| group.run_id = Some("7.0".into()));
        let json = serde_json::to_vec(&group).unwrap();
        assert_eq!(serde_json::from_slice::<GroupSpec>(&json).unwrap(), group);
        assert!(group.check().is_ok());
        assert_eq!(group.loss_timeout(), Duration::from_secs(12));
    }

    #[test]
    fn impossible_groups_are_refused() {
        type Change = fn(&mut GroupSpec);
        let changes: [(Change, &str); 13] = [
            (|group| group.nodes = NodeCount { min: 0, max: 1 }, "nodes are 0:1"),
            (|group| group.nodes = NodeCount { min: 3, max: 2 }, "nodes are 3:2"),
            (|group| group.nodes.max = MAX_NODES + 1, "nodes are 1:65537"),
            (|group| group.backend = Backend::Static, "a static group has a fixed number"),
            (|group| group.node_rank = Some(2), "node_rank is 2, expected 0 to 1"),
            (
                |group| (group.backend, group.nodes.min) = (Backend::Static, 2),
                "node_rank is missing in a static group",
            ),
            (|group| group.endpoint.host.clear(), "endpoint has no host"),
            (|group| group.endpoint.ports = vec![0], "endpoint needs a port"),
            (|group| group.endpoint.ports = vec![1; 17], "endpoint has 17 ports"),
            (|group| group.run_id = Some("x".repeat(5000)), "run_id has 5000 bytes"),
            (|group| group.interface = Some("a\0".into()), "interface has a zero byte"),
            (|group| group.keep_alive_max_attempt = 2, "is 2 s, expected 3 to 60 s"),
            (|group| group.keep_alive_interval = Duration::ZERO, "is shorter than 0.1 s"),
        ];
        for (change, problem) in changes {
            let error = group(change).check().unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn endpoint_has_brackets_around_ipv6() {
        let shown = |host: &str| Endpoint { host: host.into(), ports: vec![7, 8] }.to_string();
        assert_eq!((shown("fd77::10"), shown("h0")), ("[fd77::10]:7".into(), "h0:7".into()));
    }
}
