//! Chaos runs: training jobs with restarts, disturbed by faults from a seeded plan. Each job must end with the same
//! weights and moments, bit for bit, as an undisturbed run.
//!
//! ```text
//! seed, number --plan (pure)--> faults of a job --run--> what happened to it --report (pure)--> table
//! ```
//! Faults come from outside (signals, damaged checkpoints) and from fail points in the workers.

mod kind;
mod plan;
mod report;
mod run;

pub use plan::{FAULTS_PER_JOB, JobPlan, Settings};
pub use report::Report;
pub use run::{JobResult, Runner};
