//! The agent: looks after the workers of one job on this node.
//!
//! - [`state`] decides: a pure function from events to actions, each with its reason;
//! - `policy`, a part of that: which failed attempts are followed by another one, and when;
//! - [`driver`] does: the one task that owns the state, and everything that touches processes and sockets;
//! - [`trainer`]: what is particular to workers of the built-in trainer.

pub mod driver;
mod policy;
pub mod state;
mod status;
pub mod trainer;
