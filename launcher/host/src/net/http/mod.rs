//! HTTP servers of this host, for browsers and for clients of models.
//!
//! - [`connections`]: connections, limited so that idle or hanging clients do not keep others out;
//! - [`guarded`]: bodies of responses that keep something until they are sent;
//! - [`loopback`]: whether a request names a loopback host.

pub mod connections;
pub mod guarded;
pub mod loopback;

pub use connections::{Accept, HttpLimits, serve};
pub use loopback::names_loopback;
