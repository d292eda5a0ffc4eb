//! Training: the step, the loop around it, evaluation and sampling.
//!
//! - `step`: forward, backward with overlapped buckets, clipping, AdamW; one wait for the device per step;
//! - `replay`: work captured once and replayed since;
//! - `run`: the loop: data, schedule, reports, evaluation, checkpoints, stopping;
//! - `trace`: a timeline of some steps;
//! - `evaluate`, `sample`, `replicas`: what happens between and after steps.

mod evaluate;
mod replay;
mod replicas;
mod run;
mod sample;
mod step;
mod trace;

pub use evaluate::Evaluator;
pub use replicas::largest_difference;
pub use run::{Outcome, Run};
pub use sample::sample;
pub use step::{Requests, Started, StepResult, Stepper, sharding, wire_dtype};
pub use trace::Tracer;
