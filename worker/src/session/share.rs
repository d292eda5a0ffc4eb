//! Copies the state of rank 0 to ranks that cannot read it: if the nodes of a job share no directory, checkpoints and
//! given weights are only on the node of rank 0.
//!
//! ```text
//! rank 0: checkpoint, given or random weights --broadcast: position, weights, moments--> all ranks
//! ```
//! The collective copies bytes, so all ranks continue with the same bits. Random weights, which every rank could
//! compute, are copied like others.

use serde::{Deserialize, Serialize};
use xlaunch_comm::{Collective, Operation, Wait};
use xlaunch_engine::{DType, Tensor};

use super::Trainer;
use super::initial::Start;
use crate::error::{Result, WorkerError};
use crate::model::BackendHandle;
use crate::phase;

/// Elements per broadcast. A ring forwards one broadcast while it receives the next.
const BROADCAST_ELEMENTS: usize = 1 << 20;
/// Number of broadcasts to start before waiting for them, so that the agent sees progress.
const BROADCASTS_IN_FLIGHT: usize = 64;
/// A position takes a few hundred bytes, plus some for each run that was continued.
const MAX_POSITION_BYTES: usize = 16 << 20;

/// Copies rank 0's starting position `start`, and the state of its model, optimizer and reference, to the other ranks.
/// The state must not be sharded. Every rank calls it.
pub(super) fn from_rank_0(
    backend: &BackendHandle,
    trainer: &Trainer,
    start: &Start,
    collective: &mut dyn Collective,
) -> Result<Start> {
    let Trainer { model, optimizer, .. } = trainer;
    let start: Start = broadcast_json(backend, start, collective)?;
    let [weights, m, v] = optimizer.state(model);
    broadcast(weights, collective)?;
    if start.step > 0 {
        broadcast(m, collective)?;
        broadcast(v, collective)?;
    }
    optimizer.copy_masters_to(model)?;
    if model.layout.is_frozen() {
        broadcast(&model.weights, collective)?;
    }
    if let Some(reference) = trainer.reference() {
        broadcast(reference.trained(), collective)?;
    }
    Ok(start)
}

/// Copies rank 0's tensor to the other ranks.
fn broadcast(tensor: &Tensor, collective: &mut dyn Collective) -> Result<()> {
    for (index, first) in (0..tensor.len()).step_by(BROADCAST_ELEMENTS).enumerate() {
        let elements = tensor.lend(first..tensor.len().min(first + BROADCAST_ELEMENTS));
        collective.start(Operation::Broadcast { elements, root: 0 })?;
        if (index + 1) % BROADCASTS_IN_FLIGHT == 0 {
            collective.wait(Wait::All)?;
            phase::advance();
        }
    }
    collective.wait(Wait::All)?;
    Ok(collective.check()?)
}

/// Returns rank 0's value on every rank.
fn broadcast_json<T: Serialize + for<'a> Deserialize<'a>>(
    backend: &BackendHandle,
    value: &T,
    collective: &mut dyn Collective,
) -> Result<T> {
    let invalid = |reason: String| WorkerError::Io {
        what: "failed to receive the position of rank 0".into(),
        source: std::io::Error::new(std::io::ErrorKind::InvalidData, reason),
    };
    let json = serde_json::to_vec(value).map_err(|error| invalid(error.to_string()))?;
    let length = broadcast_bytes(backend, &(json.len() as u64).to_le_bytes(), size_of::<u64>(), collective)?;
    let length = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
    let length = usize::try_from(length).ok().filter(|length| *length <= MAX_POSITION_BYTES);
    let length = length.ok_or_else(|| invalid(format!("it has more than {MAX_POSITION_BYTES} bytes")))?;
    let json = broadcast_bytes(backend, &json, length, collective)?;
    serde_json::from_slice(&json).map_err(|error| invalid(error.to_string()))
}

/// Returns the `length` bytes of rank 0. Each one travels as an element of a tensor, because backends copy numbers, not
/// bytes, back to the host.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the numbers are bytes")]
fn broadcast_bytes(
    backend: &BackendHandle,
    own: &[u8],
    length: usize,
    collective: &mut dyn Collective,
) -> Result<Vec<u8>> {
    let tensor = backend.alloc(DType::F32, length)?;
    let mut numbers: Vec<f32> = own.iter().copied().map(f32::from).collect();
    // On other ranks the length of their own bytes may differ; they are overwritten.
    numbers.resize(length, 0.0);
    backend.write_f32(tensor.all(), &numbers)?;
    broadcast(&tensor, collective)?;
    backend.read_f32(tensor.all(), &mut numbers)?;
    collective.check()?;
    Ok(numbers.into_iter().map(|number| number as u8).collect())
}
