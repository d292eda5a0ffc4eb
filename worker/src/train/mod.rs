//! Training: the step, the loop around it, evaluation and sampling.
//!
//! - `run`: the loop: learning rate, reports, evaluation, checkpoints, stopping;
//! - `step`: one step: forward, backward overlapped with bucketed all-reduce, clipping, AdamW;
//! - `gradients`: buffers for gradients, and the parts that are sent to other ranks;
//! - `preferences`: losses of pairs of answers, and the reference that they are compared with;
//! - `compare`: compares the parameters of all ranks;
//! - `replay`: captures work as a CUDA graph and replays it;
//! - `trace`: a timeline of some steps;
//! - `checkpoints`: decides when a rank saves, and with which state;
//! - `evaluate`, `sample`, `replicas`: what runs between and after steps.
//!
//! Invariants: the host waits for the device once per step, to read back loss and flags; nothing in a step depends on
//! the wall clock; all ranks make the same decisions after the same step.

mod batch_memory;
mod checkpoints;
mod compare;
mod division;
mod evaluate;
mod gathers;
mod gradients;
mod preferences;
mod replay;
mod replicas;
mod run;
mod sample;
mod step;
mod trace;

pub use checkpoints::Checkpoints;
pub use compare::compare_replicas;
pub use division::{Division, wire_dtype};
pub use evaluate::Evaluator;
pub use gradients::Gradients;
pub use preferences::Preferences;
pub use replicas::max_difference_to_rank_0;
pub use run::{Outcome, Run};
pub use sample::Sampler;
pub(crate) use step::SMALL_ALL_REDUCE_BYTES;
pub use step::{PendingStep, Requests, StepResult, Stepper};
pub use trace::Tracer;
