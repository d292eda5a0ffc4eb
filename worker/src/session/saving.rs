//! The checkpoints of a run: the thread that saves them, and what becomes of a damaged one.

use std::path::{Path, PathBuf};

use xlaunch_comm::Sharding;
use xlaunch_proto::spec::JobSpec;
use xlaunch_proto::v1::GetJobReply;

use super::Context;
use super::initial::Start;
use crate::checkpoint::saver::{self, Saver};
use crate::checkpoint::{self, Batch, CheckpointError, Portion, Retention, State, directory};
use crate::data::Fingerprint;
use crate::error::{Result, WorkerError};
use crate::model::{BackendHandle, Model};
use crate::train::Checkpoints;

/// Starts the thread that saves checkpoints.
/// `None` for a benchmark.
pub(super) fn open(
    context: &Context<'_>,
    backend: &BackendHandle,
    model: &Model,
    sharding: &Sharding,
    start: &Start,
    data: Fingerprint,
) -> Result<Option<Checkpoints>> {
    let Context { environment, control, spec, job } = *context;
    if job.bench.is_some() {
        return Ok(None);
    }
    let (rank, world) = (environment.rank.index(), environment.world_size.index());
    let portion = Portion::new(sharding, rank, world);
    let settings = saver::Settings {
        dir: checkpoint_dir(spec, Path::new(&job.run_dir)),
        layout: model.layout.clone(),
        portion: portion.clone(),
        rank,
        world,
        retention: Retention::of(&spec.checkpoint),
        source: (!job.resume_from.is_empty()).then(|| PathBuf::from(&job.resume_from)),
        host: backend.host_allocator(),
    };
    let failed = |source| WorkerError::Io { what: "failed to start the checkpoint thread".into(), source };
    let exchange =
        control.exchange().ok_or_else(|| failed(std::io::Error::other("it was started already")))?;
    let template = State {
        version: checkpoint::VERSION,
        step: start.step,
        sequences: start.sequences,
        world_size: environment.world_size.0,
        model: model.shape.clone(),
        seed: spec.job.seed,
        run: job.run_id.clone(),
        parents: start.parents.clone(),
        data: Some(data),
        batch: Some(Batch::of(spec)),
        warmup: Some(spec.train.warmup_steps()),
        val_loss: None,
        spec: serde_json::to_value(spec).unwrap_or_default(),
    };
    let saver = Saver::start(settings, exchange).map_err(failed)?;
    Ok(Some(Checkpoints::new(saver, portion, template, &spec.checkpoint)))
}

/// Where this run saves its checkpoints.
fn checkpoint_dir(spec: &JobSpec, run_dir: &Path) -> PathBuf {
    spec.checkpoint.dir.as_ref().map_or_else(|| run_dir.join("checkpoints"), PathBuf::from)
}

/// Renames the checkpoint that was to be resumed if it is damaged, unless the user has named it: then no other one is
/// meant.
pub(super) fn set_aside(error: WorkerError, spec: &JobSpec, job: &GetJobReply) -> WorkerError {
    let path = Path::new(&job.resume_from);
    let is_named = Path::new(&spec.checkpoint.resume) == path;
    match error {
        WorkerError::Checkpoint(error @ CheckpointError::Damaged { .. }) if !is_named => {
            // Another rank may have renamed it already.
            let renamed = !path.exists() || directory::mark_damaged(path).is_ok() || !path.exists();
            let message = format!("{error}; renamed to {}.damaged", path.display());
            if renamed { WorkerError::SetAside(message) } else { error.into() }
        }
        error => error,
    }
}
