//! The agent: looks after the workers of one job on this node.
//!
//! - [`state`] decides: a pure function from events to actions, each with its reason;
//! - [`driver`] does: the one task that owns the state, and everything that touches processes and sockets.

pub mod driver;
pub mod state;
