//! Sockets that servers of xlaunch listen on: credentials of peers, and limits on connections.
//!
//! ```text
//! client --connect--> socket --accept: credentials, limits--> Connection --> tonic or hyper
//! ```
//! - [`admission`]: decides who gets in when there are too many callers (pure);
//! - [`limits`]: the open connections of a server, some of which the decision closes;
//! - [`mod@accept`]: the accept loop of a server, which applies these limits; [`http`]: that of HTTP servers.
//!
//! Invariant: a client that opens many connections, or sends nothing on them, cannot lock out another user.

pub mod accept;
pub mod admission;
pub mod http;
pub mod limits;

pub use accept::{accept, peer_credentials};
pub use admission::{Limits, Replaces};
pub use limits::{Connection, Connections, Credentials, Peer};
