//! Text for people: tables and blocks of text from gRPC messages. Pure.
//!
//! - [`text`]: cells, columns, units, and escaping: names, reasons and command lines come from other users, so nothing
//!   in them may act on the terminal;
//! - [`launch`]: a launch and its ranks; [`job`]: a job of the daemon; [`jobs`]: the queue; [`node`]: the node's GPUs;
//! - [`sanitize`]: another user's log.
//!
//! JSON for programs is derived from the messages ([`xlaunch_proto::json`]).

pub(crate) mod history;
pub(crate) mod job;
pub(crate) mod jobs;
pub(crate) mod launch;
pub(crate) mod node;
pub(crate) mod sanitize;
pub(crate) mod text;
