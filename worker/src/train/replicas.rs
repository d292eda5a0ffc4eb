//! Whether all ranks hold the same parameters.

use xlaunch_comm::Collective;
use xlaunch_engine::DType;

use crate::error::Result;
use crate::model::{BackendHandle, Model};

/// Largest difference between this rank's parameters and rank 0's. Every rank calls it.
pub fn largest_difference(
    backend: &BackendHandle,
    model: &Model,
    collective: &mut dyn Collective,
) -> Result<f64> {
    let len = model.params.len();
    let reference = backend.alloc(DType::F32, len)?;
    backend.cast(model.params.all(), reference.all())?;
    collective.broadcast(reference.lend(0..len), 0)?;
    collective.finish()?;
    let (mut theirs, mut ours) = (vec![0.0; len], vec![0.0; len]);
    backend.read_f32(reference.all(), &mut theirs)?;
    backend.read_f32(model.params.all(), &mut ours)?;
    let differences = theirs.iter().zip(&ours).map(|(a, b)| f64::from((a - b).abs()));
    Ok(differences.fold(0.0, f64::max))
}
