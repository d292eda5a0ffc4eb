//! The protocol between xlaunch's processes: gRPC messages, job descriptions, ids, exit codes and environment
//! variables.
//!
//! - [`v1`] is generated from `xlaunch/v1/agent.proto` and `xlaunch/v1/node.proto`;
//! - [`convert`] converts wire messages to checked values; no other code in the project validates wire data;
//! - [`spec`] is the description of a training job, shared by `train.toml`, the wire and checkpoints; [`model`] is its
//!   model;
//! - [`net`] connects processes: gRPC over unix sockets, peer credentials, connection limits;
//! - [`json`] and [`labels`] render messages for programs and people;
//! - [`ids`] are typed ids, [`exit`] is the table of exit codes, [`mod@env`] names the environment variables of
//!   workers.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod convert;
pub mod env;
pub mod exit;
pub mod ids;
mod invalid;
pub mod json;
pub mod labels;
pub mod model;
pub mod net;
mod phase;
pub mod spec;

/// Version of this build. The launcher and its workers must have the same.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `xlaunch/v1` as an encoded `FileDescriptorSet`, for gRPC reflection.
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
