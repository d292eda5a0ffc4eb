//! Descriptions of jobs and commands as users ask for them, independent of the node that runs them and of the wire
//! format.
//!
//! - [`job`]: a training job, as shared by `train.toml`, the wire and checkpoints; [`model`]: its model;
//! - [`command`]: any other command to launch, and its group of nodes;
//! - [`lineage`]: the data and the checkpoint that a run started from;
//! - [`flops`]: the operations of a training step, and the peak rates of GPUs;
//! - [`refusal`]: the error of a job that is not started; [`exit`]: the table of exit codes;
//! - [`ids`]: typed ids; [`quantities`]: times and sizes as users write them; [`paths`]: the paths of a description.
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
