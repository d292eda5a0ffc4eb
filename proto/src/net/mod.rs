//! Sockets of xlaunch's processes: gRPC over unix sockets, who is at the other end, and how many may connect.
//!
//! ```text
//! client --connect--> socket --accept: credentials, limits--> Connection --> tonic or hyper
//! ```
//! - [`connect`]: a gRPC channel over a unix socket;
//! - [`limits`]: which connections stay open when there are too many (pure, but for closing them);
//! - [`accept`]: the accept loop of a server, which admits connections by these limits.
//!
//! Invariant: no client, however many connections it opens and however long it says nothing, keeps another user out.

pub mod accept;
pub mod connect;
pub mod limits;

pub use accept::{Credentials, accept, peer_credentials};
pub use connect::{connect, connect_stream};
pub use limits::{Connection, Connections, Limits, Peer};
