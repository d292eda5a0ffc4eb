//! The nodes of one job: a coordinator, and a link from each agent to it.
//!
//! ```text
//! agent of node 0                                        agent of node 1
//!   driver <--mpsc--> coordinator (task, owns state) <--gRPC stream, TLS--> link (task) <--mpsc--> driver
//! ```
//! - [`state`] decides who is a member, when attempts begin, and what follows a failure; pure.
//! - [`coordinator`] is the task that owns that state; it runs in one of the agents, or alone.
//! - [`link`] is an agent's side: it dials again when the connection is lost, repeats what has not arrived, and warns
//!   the driver before the coordinator may consider the node lost; `link_state` is the pure part of it.
//! - `roles` decides which node runs the coordinator; `notices` and `refusals` when the user is told what keeps a node
//!   from joining; pure.
//! - [`outbox`] keeps what has not been acknowledged; `service` is the gRPC service; `presence` tells it whether the
//!   process of an agent is gone; [`join`] opens the link of an agent that has some [`work`]; [`net`] has the
//!   connections; [`interface`] and [`shared`] find out what a node has and sees.
//!
//! A job on one node has a coordinator, too, and its driver a link to it, but no socket.

pub(crate) mod candidacy;
pub mod coordinator;
pub mod interface;
pub mod join;
pub mod link;
mod link_state;
pub mod net;
mod notices;
pub mod outbox;
mod presence;
pub(crate) mod refusals;
pub mod rendezvous;
mod roles;
pub mod rules;
mod service;
pub mod shared;
pub mod state;
pub mod work;

use xlaunch_proto::v1::{Begin, Prepare};

/// The place of this node in an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// The rank of this node.
    pub node_rank: u32,
    /// The number of nodes that take part.
    pub nodes: u32,
    /// The rank of the node's first worker.
    pub first_rank: u32,
    /// Workers of all nodes.
    pub world: u32,
    /// Attempts that followed a failure.
    pub restarts: u32,
    /// `MASTER_ADDR`: the address of node rank 0.
    pub master_address: String,
    /// `MASTER_PORT`: reserved for rank 0, if it listens for the others.
    pub master_port: u16,
    /// Ranks below this one share the directory of the run.
    pub writers: u32,
}

impl Assignment {
    /// What the coordinator has said in these two messages.
    pub fn new(prepare: &Prepare, begin: &Begin) -> Self {
        Self {
            node_rank: prepare.node_rank,
            nodes: prepare.nodes,
            first_rank: prepare.first_rank,
            world: prepare.world_size,
            restarts: prepare.restarts,
            master_address: prepare.master_address.clone(),
            master_port: u16::try_from(begin.master_port).unwrap_or(0),
            writers: begin.writers,
        }
    }

    /// Whether workers have the same ranks, among the same number, in both.
    pub fn has_same_ranks(&self, other: &Self) -> bool {
        let ranks = |it: &Self| (it.node_rank, it.nodes, it.first_rank, it.world, it.writers);
        ranks(self) == ranks(other)
    }

    /// Whether other nodes take part.
    pub fn has_peers(&self) -> bool {
        self.nodes > 1
    }
}
