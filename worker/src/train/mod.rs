//! Training: the step, the loop around it, evaluation and sampling.
//!
//! - `step`: forward, backward with overlapped buckets, clipping, AdamW; one wait for the device per step;
//! - `run`: the loop: data, schedule, reports, evaluation, checkpoints, stopping;
//! - `trace`: a timeline of some steps;
//! - `evaluate`, `sample`, `replicas`: what happens between and after steps.

mod evaluate;
mod replicas;
mod run;
mod sample;
mod step;
mod trace;

pub use evaluate::evaluate;
pub use replicas::largest_difference;
pub use run::{Outcome, Run};
pub use sample::sample;
pub use step::{Requests, StepResult, Stepper, plan_buckets, wire_dtype};
pub use trace::Tracer;
