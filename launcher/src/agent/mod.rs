//! The agent: looks after the workers of one job on this node.
//!
//! - [`state`] decides: a pure function from events to actions, each with its reason;
//! - `policy`, a part of that: which failed attempts are followed by another one, and when;
//! - [`driver`] does: the one task that owns the state, and everything that touches processes and sockets;
//! - [`work`]: the two kinds of job; [`trainer`] and [`commands`], what is particular to each;
//! - `signals`: what xlaunch itself is sent.

pub mod commands;
pub mod driver;
mod hang;
mod policy;
mod signals;
pub mod state;
pub mod trainer;
pub mod work;
