//! What a user asks for, independent of the node that runs it and of any wire format.
//!
//! - [`job`] is the description of a training job, shared by `train.toml`, the wire and checkpoints; [`model`] is its
//!   model, [`flops`] counts the operations of a training step and knows the peak rates of GPUs;
//! - [`command`] is the description of any other command to launch;
//! - [`lineage`] describes the data and the checkpoint that a run started from;
//! - [`refusal`] is the error of a job that is not started, [`exit`] the table of exit codes;
//! - [`ids`] are typed ids, [`quantities`] are times and sizes as users write them, [`paths`] normalizes the paths of a
//!   description.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod command;
pub mod exit;
pub mod flops;
pub mod ids;
mod invalid;
pub mod job;
pub mod lineage;
pub mod model;
pub mod paths;
pub mod quantities;
pub mod refusal;
