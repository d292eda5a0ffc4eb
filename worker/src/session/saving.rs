//! The checkpoints of a run: starts the thread that saves them, and sets damaged ones aside.

use std::path::{Path, PathBuf};

use xlaunch_comm::Sharding;
use xlaunch_proto::snapshot::{Identity, SnapshotId};
use xlaunch_proto::v1::GetJobReply;
use xlaunch_spec::ids::Digest;
use xlaunch_spec::job::{JobSpec, MemorySnapshots};

use super::initial::Start;
use super::{Context, Trainer};
use crate::checkpoint::saver::{self, Buffers, Saver};
use crate::checkpoint::{
    self, Adapted, Batch, CheckpointError, Memory, Portion, Retention, State, directory,
};
use crate::data::Dataset;
use xlaunch_spec::lineage::Fingerprint;

use crate::error::{Result, WorkerError};
use crate::inherited::Inherited;
use crate::model::BackendHandle;
use crate::model::layout::Layout;
use crate::train::Checkpoints;
use crate::weights::Weights;

/// Opens the memory files that the agent keeps for this rank. `None` if there are none.
pub(super) fn memory(context: &Context<'_>, layout: &Layout, sharding: &Sharding) -> Result<Option<Memory>> {
    let Context { environment, job, .. } = *context;
    // Ranks that save nothing have no portion to resume from.
    if environment.snapshot_fds.is_empty() || !environment.is_shared() {
        return Ok(None);
    }
    let (rank, world) = (environment.rank, environment.world_size);
    let identity = Identity { run: Digest::of(job.run_id.as_bytes()), rank: rank.0, world: world.0 };
    let portion = Portion::new(layout, sharding, rank.index(), world.index());
    let layout = [layout.trained().fingerprint(), sharding.layout()].concat();
    let resume = job.memory_snapshot.map(|it| SnapshotId { step: it.step, attempt: it.attempt });
    let (fds, attempt) = (&environment.snapshot_fds, environment.attempt.0);
    let memory = Memory::open(fds, identity, &layout, portion, attempt, resume);
    let failed = |source| WorkerError::Io { what: "failed to open the memory for snapshots".into(), source };
    memory.map(Some).map_err(failed)
}

/// Starts the thread that saves checkpoints. Returns `None` for a benchmark.
pub(super) fn open(
    context: &Context<'_>,
    backend: &BackendHandle,
    trainer: &Trainer,
    start: &Start,
    dataset: &Dataset,
    data: Fingerprint,
    memory: Option<Memory>,
) -> Result<Option<Checkpoints>> {
    let Context { environment, control, spec, job } = *context;
    if job.bench.is_some() {
        return Ok(None);
    }
    let (rank, writers) = (environment.rank.index(), environment.writers as usize);
    let (model, portion) =
        (&trainer.model, Portion::new(&trainer.model.layout, trainer.optimizer.sharding(), rank, writers));
    // Read on every rank, as all states must contain the same version.
    let tokenizer = dataset.tokenizer.json()?;
    let version = checkpoint::version(spec, &model.shape, tokenizer.is_some());
    let settings = saver::Settings {
        dir: checkpoint_dir(spec, Path::new(&job.run_dir)),
        layout: model.layout.whole().clone(),
        portion: portion.clone(),
        rank,
        writers,
        retention: Retention::of(spec),
        tokenizer: tokenizer.filter(|_| rank == 0),
        source: (!job.resume_from.is_empty()).then(|| PathBuf::from(&job.resume_from)),
        host: backend.host_allocator(),
        buffers: match memory {
            _ if job.save_in_pieces => Buffers::Pieces,
            Some(memory) => {
                Buffers::Files { memory, required: spec.checkpoint.memory == MemorySnapshots::On }
            }
            None => Buffers::Own,
        },
    };
    let failed = |source| WorkerError::Io { what: "failed to start the checkpoint thread".into(), source };
    let exchange =
        control.exchange().ok_or_else(|| failed(std::io::Error::other("it was started already")))?;
    let frozen = |adapters: bool| start.frozen.clone().filter(|_| spec.lora.is_on() == adapters);
    let template = State {
        version,
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
        best: None,
        end_of_text: dataset.tokenizer.load()?.and_then(|tokenizer| tokenizer.end_of_text()),
        inherited: inherited(spec, job, start, dataset),
        spec: serde_json::to_value(spec).unwrap_or_default(),
        adapted: frozen(true).map(|frozen| Adapted { lora: spec.lora.clone(), frozen }),
        reference: frozen(false),
    };
    let saver = Saver::start(settings, exchange).map_err(failed)?;
    Ok(Some(Checkpoints::new(saver, portion, template, &spec.checkpoint)))
}

/// Returns the files that came with the initial weights of a new run, with the chat template of its data. Not all nodes
/// need to have them: the state of the first rank counts.
fn inherited(spec: &JobSpec, job: &GetJobReply, start: &Start, dataset: &Dataset) -> Option<Inherited> {
    let init = spec.checkpoint.init.as_ref().filter(|_| job.resume_from.is_empty());
    let of_init = || Weights::open(Path::new(init?)).ok()?.inherited();
    let inherited = start.inherited.clone().or_else(of_init);
    let Some((dir, chat)) = dataset.tokenizer.chats() else { return inherited };
    let mut inherited = inherited.unwrap_or_default();
    inherited.add_chats(Inherited::read(dir), &chat.ends);
    Some(inherited)
}

/// Returns the directory in which this run saves its checkpoints.
fn checkpoint_dir(spec: &JobSpec, run_dir: &Path) -> PathBuf {
    spec.checkpoint.dir.as_ref().map_or_else(|| run_dir.join("checkpoints"), PathBuf::from)
}

/// Renames the checkpoint to resume from if it is damaged, unless the user has named it: then no other checkpoint may
/// take its place. A damaged memory snapshot has been erased already.
pub(super) fn set_aside(error: WorkerError, spec: &JobSpec, job: &GetJobReply) -> WorkerError {
    let path = Path::new(&job.resume_from);
    let is_named = Path::new(&spec.checkpoint.resume) == path;
    match error {
        WorkerError::Checkpoint(error @ CheckpointError::Damaged { .. }) if !is_named => {
            // Another rank may have renamed it already, or may be doing so now.
            match (directory::mark_damaged(path), directory::marked_damaged(path)) {
                (Ok(renamed), _) => {
                    WorkerError::SetAside(format!("{error}; renamed to {}", renamed.display()))
                }
                (Err(_), Some(renamed)) if !path.exists() => {
                    // This rank may have missed files only because they were renamed.
                    let error = directory::state(&renamed).err().unwrap_or(error);
                    let renamed = renamed.display();
                    WorkerError::SetAside(format!("{error}; another rank has renamed it to {renamed}"))
                }
                _ => error.into(),
            }
        }
        WorkerError::Checkpoint(error @ CheckpointError::DamagedMemory { .. }) => {
            WorkerError::SetAside(error.to_string())
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::save;

    #[test]
    fn damage_is_reported_if_another_rank_has_renamed_the_checkpoint_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), 10);
        let path = dir.path().join("step-00000010");
        fs_err::write(path.join("model.safetensors"), "short").unwrap();
        directory::mark_damaged(&path).unwrap();
        let job = GetJobReply { resume_from: path.display().to_string(), ..GetJobReply::default() };
        let error = directory::state(&path).unwrap_err();
        assert!(error.to_string().contains("manifest.json"), "{error}");
        let text = set_aside(error.into(), &JobSpec::default(), &job).to_string();
        assert!(text.contains("model.safetensors has 5 bytes instead of"), "{text}");
        assert!(text.ends_with("step-00000010.damaged"), "{text}");
    }
}
