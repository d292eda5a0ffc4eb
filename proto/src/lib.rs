//! What xlaunch's processes agree on: the gRPC messages, the job description, ids and exit codes.
//!
//! - [`v1`] is generated from `xlaunch/v1/agent.proto` and `xlaunch/v1/node.proto`;
//! - [`convert`] turns wire messages into checked values: nothing else in the project validates wire data;
//! - [`spec`] is the job description, the one definition behind `train.toml`, the wire and checkpoints;
//! - [`net`] connects processes: gRPC over unix sockets, peer credentials, limits of connections;
//! - [`json`] and [`labels`] show messages to people and programs;
//! - [`ids`] are the typed ids; [`exit`] is the table of exit codes; [`mod@env`] names the variables a worker is given.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod convert;
pub mod env;
pub mod exit;
pub mod ids;
pub mod json;
pub mod labels;
pub mod model;
pub mod net;
mod phase;
pub mod spec;

/// Version of this build; launcher and workers must match.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The files of `xlaunch/v1` as an encoded `FileDescriptorSet`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors"));

/// Generated messages and services of `xlaunch/v1`.
#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("xlaunch.v1");
}
