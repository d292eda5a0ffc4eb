//! The nodes of one job: a coordinator, and a link from each agent to it.
//!
//! ```text
//! agent of node 0                                        agent of node 1
//!   driver <--mpsc--> coordinator (task, owns state) <--gRPC stream, TLS--> link (task) <--mpsc--> driver
//! ```
//! Before the link:
//! - [`nodes`]: settings of a job on several nodes;
//! - [`join`]: from the start of an agent to its link; [`candidacy`]: assumes a role, as the coordinator or not;
//! - `roles`: decides which node runs the coordinator (pure); `notices` and [`refusals`]: decide when to tell the user
//!   what keeps a node from joining (pure);
//! - [`net`]: connections, encrypted and authenticated; [`shared`]: whether the nodes share a directory.
//!
//! The coordinator, inside one of the agents or on its own:
//! - [`hosting`]: runs it in this process; [`coordinator`]: the task that owns its state;
//! - [`state`]: decides who is a member, when attempts begin, and how the group reacts to a failure (pure);
//! - [`group_rendezvous`]: the rendezvous of the nodes of one attempt (pure);
//! - `service`: its gRPC service; `presence`: tells whether an agent's process is gone.
//!
//! An agent's side:
//! - [`link`]: dials again when the connection is lost, and warns the driver before the coordinator may declare the
//!   node lost; [`link_state`]: its pure part;
//! - [`outbox`]: messages that have not been acknowledged, which are sent again; used by both sides.
//!
//! A job on one node has a coordinator too, and its driver a link to it, but there is no socket.
#![forbid(unsafe_code)]

pub mod candidacy;
pub mod coordinator;
pub mod group_rendezvous;
pub mod hosting;
pub mod join;
pub mod link;
pub mod link_state;
pub mod net;
pub mod nodes;
mod notices;
pub mod outbox;
mod presence;
pub mod refusals;
mod roles;
mod service;
pub mod shared;
pub mod state;

use xlaunch_proto::v1::{Begin, Prepare};

/// This node's place in an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    pub node_rank: u32,
    /// Number of participating nodes.
    pub nodes: u32,
    /// Global rank of the node's first worker.
    pub first_rank: u32,
    /// Number of workers on all nodes together.
    pub world: u32,
    /// Number of attempts so far that followed a failure.
    pub restarts: u32,
    /// `MASTER_ADDR`: the address of node rank 0.
    pub master_address: String,
    /// `MASTER_PORT`: reserved on the node of rank 0, on which other ranks may connect.
    pub master_port: u16,
    /// Ranks below this number share the run directory.
    pub writers: u32,
}

impl Assignment {
    /// Combines the coordinator's two messages about an attempt.
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

    /// Returns whether both assign the same ranks to the same number of workers.
    pub fn has_same_ranks(&self, other: &Self) -> bool {
        let ranks = |it: &Self| (it.node_rank, it.nodes, it.first_rank, it.world, it.writers);
        ranks(self) == ranks(other)
    }

    /// Returns whether other nodes take part.
    pub fn has_peers(&self) -> bool {
        self.nodes > 1
    }
}
