//! The state in which training starts: a memory snapshot, a checkpoint, given weights, or random weights.
//!
//! Separate threads read or generate it as soon as the job is known, and hand it over in pieces. The whole state is
//! never in host memory: the threads wait until the model takes their pieces.
//!
//! A rank has only its own portion of a memory snapshot. When all ranks have written their portions to the model, they
//! exchange them ([`exchange_portions`]) through the collective, whose copies are exact.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};
use xlaunch_comm::{Collective, Operation, Wait};
use xlaunch_spec::job::{JobSpec, SpecError};
use xlaunch_spec::model::ModelShape;

use super::{Context, Trainer};
use crate::adapter::ValuesHash;
use crate::best::Best;
use crate::checkpoint::{self, Abandoned, Arena, Frozen, Memory, Parent, Piece, Portion, Sink, State};
use crate::data::DataError;
use xlaunch_spec::lineage::Fingerprint;

use crate::error::{Result, WorkerError};
use crate::inherited::Inherited;
use crate::model::layout::{Layout, Segment};
use crate::model::{Model, init};
use crate::optim::{AdamW, Part};
use crate::phase;
use crate::weights::Weights;

/// Number of pieces of a checkpoint, of up to 4 MiB each, that wait for the model.
const PIECES_READ_AHEAD: usize = 8;

/// Starting position of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Start {
    /// Completed steps.
    pub(super) step: u64,
    /// Number of sequences used so far by all ranks.
    pub(super) sequences: u64,
    /// The runs that this one continues.
    pub(super) parents: Vec<Parent>,
    /// Validation loss of the state, if it was evaluated.
    pub(super) val_loss: Option<f64>,
    /// The best evaluation so far.
    pub(super) best: Option<Best>,
    /// Number of warm-up steps of the continued run, unless the configuration sets its own.
    pub(super) warmup: Option<u64>,
    /// Files that came with the initial weights of the continued run.
    pub(super) inherited: Option<Inherited>,
    /// The weights that the run's adapters adapt or, if it trains all weights on preferences, those of the reference.
    pub(super) frozen: Option<Frozen>,
    /// Fingerprint of the data that it was trained on.
    data: Option<Fingerprint>,
}

/// The state while it is being read.
pub(super) struct Reading {
    pieces: Receiver<Received>,
    thread: JoinHandle<Result<Found>>,
    run_id: String,
}

/// Values for the model.
enum Received {
    /// Part of the state that the run trains.
    State(Piece),
    /// Part of the weights that adapters adapt.
    Frozen(Piece),
    /// Part of the weights or adapters of the reference.
    Reference(Piece),
}

/// The results of reading, other than values.
struct Found {
    /// State of the checkpoint or snapshot that the run resumes from.
    state: Option<State>,
    /// The frozen weights.
    frozen: Option<Frozen>,
}

/// Source of the state.
struct Source {
    spec: JobSpec,
    shape: ModelShape,
    /// Checkpoint to resume from; empty for a fresh start.
    resume_from: PathBuf,
    /// Memory files, if they hold the snapshot to resume from instead.
    memory: Option<Memory>,
    /// Ranges of the arena whose moments belong to this rank.
    moments: Vec<Range<usize>>,
}

impl Reading {
    /// Starts the threads.
    pub(super) fn start(
        context: &Context<'_>,
        shape: &ModelShape,
        memory: Option<Memory>,
        moments: Vec<Range<usize>>,
    ) -> Result<Self> {
        let Context { environment, spec, job, .. } = *context;
        let failed = |source| WorkerError::Io { what: "failed to start a thread".into(), source };
        let threads = ThreadPoolBuilder::new().num_threads(environment.threads).build();
        let threads = threads.map_err(|error| failed(io::Error::other(error)))?;
        let (spec, shape, resume_from) = (spec.clone(), shape.clone(), PathBuf::from(&job.resume_from));
        let source = Source { spec, shape, resume_from, memory: memory.filter(Memory::is_resumed), moments };
        let (sender, pieces) = sync_channel(PIECES_READ_AHEAD);
        let thread = std::thread::Builder::new()
            .name("weights".into())
            .spawn(move || source.read(&threads, &sender))
            .map_err(failed)?;
        Ok(Self { pieces, thread, run_id: job.run_id.clone() })
    }

    /// Passes all pieces on to the model, its optimizer, and the reference.
    pub(super) fn finish(self, trainer: &Trainer) -> Result<Start> {
        let Trainer { model, optimizer, .. } = trainer;
        let Self { pieces, thread, run_id } = self;
        for received in &pieces {
            phase::advance();
            let Piece { arena, at, values } = match received {
                Received::State(piece) => piece,
                Received::Frozen(Piece { at, values, .. }) => {
                    model.write_weights(at, &values)?;
                    continue;
                }
                Received::Reference(Piece { at, values, .. }) => {
                    trainer.reference().map_or(Ok(()), |reference| reference.write_trained(at, &values))?;
                    continue;
                }
            };
            for Segment { whole, own } in model.layout.own_parts(&(at..at + values.len())) {
                let (at, values) = (own.start, &values[whole.start - at..whole.end - at]);
                match arena {
                    Arena::Params => {
                        model.write_trained(at, values)?;
                        optimizer.write(Part::Masters, at, values)?;
                    }
                    Arena::M => optimizer.write(Part::M, at, values)?,
                    Arena::V => optimizer.write(Part::V, at, values)?,
                }
            }
        }
        let found = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        optimizer.round()?;
        let start = found.state.map_or_else(Start::default, |state| Start::after(state, &run_id));
        Ok(Start { frozen: found.frozen, ..start })
    }
}

/// Completes this rank's state with the portions of the others after a start from memory snapshots. Every rank calls
/// it.
pub(super) fn exchange_portions(
    model: &Model,
    optimizer: &AdamW,
    collective: &mut dyn Collective,
) -> Result<()> {
    let (sharding, world) = (optimizer.sharding(), collective.world_size());
    if sharding.is_sharded() {
        // Each rank has only its own portion of masters and moments.
        return Ok(optimizer.gather(model, collective)?);
    }
    for root in 0..world {
        let portion = Portion::new(&model.layout, sharding, root, world);
        for owned in portion.ranges().iter().filter(|owned| !owned.stored.is_empty()) {
            for tensor in optimizer.state(model) {
                let elements = tensor.lend(owned.stored.clone());
                collective.start(Operation::Broadcast { elements, root })?;
            }
        }
    }
    collective.wait(Wait::All)?;
    collective.check()?;
    Ok(optimizer.copy_masters_to(model)?)
}

impl Start {
    fn after(state: State, run_id: &str) -> Self {
        let State { step, sequences, run, mut parents, val_loss, best, warmup, data, inherited, .. } = state;
        // A restart continues its own run.
        if run != run_id {
            parents.push(Parent { run, step });
        }
        Self { step, sequences, parents, val_loss, best, warmup, data, inherited, frozen: None }
    }

    /// Returns the job with the settings that it takes over from the continued run, and with its number of steps.
    /// `rows` is the number of sequences per epoch.
    pub(super) fn complete(&self, spec: &JobSpec, rows: u64, world: u32) -> JobSpec {
        let mut spec = spec.clone();
        spec.train.warmup = spec.train.warmup.or(self.warmup);
        spec.train.count_steps(rows, world, self.step, self.sequences);
        spec
    }

    /// Refuses to continue with other data. For the first attempt, the preflight check has already compared it.
    pub(super) fn check_data(&self, spec: &JobSpec, now: &Fingerprint) -> Result<()> {
        match self.data.as_ref().filter(|before| *before != now && !spec.checkpoint.resume_changed) {
            None => Ok(()),
            Some(before) => {
                Err(DataError::Changed { before: before.to_string(), now: now.to_string() }.into())
            }
        }
    }
}

impl Source {
    fn read(self, threads: &ThreadPool, pieces: &SyncSender<Received>) -> Result<Found> {
        let Self { spec, shape, resume_from, memory, moments } = self;
        let layout = Layout::of_job(&spec, &shape).map_err(SpecError::from)?;
        // Fails if the training thread has given up; it then has an error of its own.
        let sink = |piece| pieces.send(Received::State(piece)).map_err(|_| Abandoned);
        let frozen_sink = |piece| pieces.send(Received::Frozen(piece)).map_err(|_| Abandoned);
        let init = spec.checkpoint.init.as_ref();
        // Weights under adapters, and those of a reference, are not in checkpoints.
        let has_frozen = layout.is_frozen() || spec.dpo.is_on();
        let given = init.filter(|_| has_frozen || resume_from.as_os_str().is_empty() && memory.is_none());
        let given = given.map(|path| Weights::open(Path::new(path))).transpose()?;
        let reference_sink = |piece| pieces.send(Received::Reference(piece)).map_err(|_| Abandoned);
        let frozen = match given.as_ref().filter(|_| has_frozen) {
            None => None,
            Some(given) if layout.is_frozen() => {
                if let Some(adapter) = given.adapter().filter(|_| spec.dpo.is_on()) {
                    // If it has given up, the training thread has an error of its own.
                    let _ = adapter.pieces().try_for_each(|(at, values)| {
                        reference_sink(Piece { arena: Arena::Params, at, values })
                    });
                }
                Some(read_frozen(given.without_adapter(), &shape, threads, &frozen_sink)?)
            }
            Some(given) => Some(read_frozen(given, &shape, threads, &reference_sink)?),
        };
        if let Some(memory) = memory {
            return check_frozen(&resume_from, memory.read(threads, &sink)?, frozen);
        }
        if !resume_from.as_os_str().is_empty() {
            let trained = layout.trained();
            let state = checkpoint::read(&resume_from, &shape, trained, &moments, threads, &sink)?;
            return check_frozen(&resume_from, Some(state), frozen);
        }
        let params = |at, values| sink(Piece { arena: Arena::Params, at, values });
        let adapter = given.as_ref().and_then(Weights::adapter);
        match (&given, adapter) {
            (Some(given), _) if !layout.is_frozen() => given.read(&shape, &layout, threads, &sink)?,
            (_, Some(adapter)) => {
                // If it has given up, the training thread has an error of its own.
                let _ = adapter.pieces().try_for_each(|(at, values)| params(at, values));
            }
            (_, None) => {
                let _ = init::generate(layout.trained(), spec.job.seed, threads, params);
            }
        }
        Ok(Found { state: None, frozen })
    }
}

/// Reads the weights that adapters adapt.
fn read_frozen(
    weights: &Weights,
    shape: &ModelShape,
    threads: &ThreadPool,
    sink: Sink<'_>,
) -> Result<Frozen> {
    let hash = ValuesHash::default();
    let hashed = |piece: Piece| {
        hash.add(piece.at, &piece.values);
        sink(piece)
    };
    weights.read(shape, &Layout::new(shape), threads, &hashed)?;
    Ok(Frozen { path: weights.path().into(), hash: hash.finish() })
}

/// Requires that adapters are continued on the weights that they were trained with, and preferences with the same
/// reference.
fn check_frozen(path: &Path, state: Option<State>, frozen: Option<Frozen>) -> Result<Found> {
    let saved = state.as_ref().and_then(State::frozen);
    if let Some((saved, found)) = saved.zip(frozen.as_ref()) {
        saved.check(path, found)?;
    }
    Ok(Found { state, frozen })
}
