//! Small checkpoints for tests.

use std::path::{Path, PathBuf};
use std::time::Instant;

use xlaunch_comm::bucket::Plan;
use xlaunch_comm::{Groups, Sharding};
use xlaunch_engine::{HostAllocator, HostBuffer};
use xlaunch_proto::disk::Disk;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_spec::job::JobSpec;
use xlaunch_spec::model::{ModelSection, ModelShape};

use super::saver::{Buffers, Exchange, Saver, Settings, Written};
use super::*;
use crate::model::layout::{ALIGN, Layout};

/// A model whose embedding spans many blocks.
pub(crate) fn shape() -> ModelShape {
    let section = ModelSection {
        layers: Some(1),
        dim: Some(16),
        heads: Some(2),
        ffn: Some(24),
        vocab: Some(1001),
        ..ModelSection::default()
    };
    section.resolve().unwrap()
}

/// Returns the state of a run after `step` steps.
pub(crate) fn state(run: &str, step: u64) -> State {
    let spec = JobSpec::default();
    State {
        version: version(&spec, &shape(), false),
        step,
        sequences: 16 * step,
        world_size: 2,
        model: shape(),
        seed: spec.job.seed,
        run: run.into(),
        parents: Vec::new(),
        data: None,
        batch: None,
        warmup: None,
        val_loss: None,
        best: None,
        end_of_text: None,
        inherited: None,
        spec: serde_json::to_value(spec).unwrap(),
        adapted: None,
        reference: None,
    }
}

/// Returns element `at` of an arena after `step` steps.
#[expect(clippy::cast_precision_loss, reason = "test data")]
pub(crate) fn value(arena: Arena, at: usize, step: u64) -> f32 {
    let offset = match arena {
        Arena::Params => 0.0,
        Arena::M => 0.25,
        Arena::V => 0.5,
    };
    (at % 1_000_003) as f32 + step as f32 + offset
}

/// Returns the snapshot of a rank's portion after `step` steps.
pub(crate) fn snapshot(portion: &Portion, step: u64) -> Snapshot {
    let fill = |arena| {
        let elements = portion.ranges().iter().flat_map(|owned| owned.arena.clone());
        HostBuffer::from(elements.map(|at| value(arena, at, step)).collect::<Vec<f32>>())
    };
    Snapshot { params: fill(Arena::Params), m: fill(Arena::M), v: fill(Arena::V), slot: None }
}

/// Sharding that gives a rank its shards, or everything.
pub(crate) fn sharding(layout: &Layout, rank: usize, world: usize, sharded: bool) -> Sharding {
    let plan = Plan::new(&layout.ends(), ALIGN, 4, 1 << 14, 1 << 12);
    if sharded {
        Sharding::new(plan, 1, Groups::single(rank, world))
    } else {
        Sharding::replicated(plan, Groups::single(rank, world))
    }
}

/// Exchange of a single rank, whose own answer completes the save.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    pub(crate) written: Option<Result<Vec<Written>, String>>,
    pub(crate) reports: Option<std::sync::mpsc::Sender<Report>>,
}

impl Exchange for Alone {
    fn written(&mut self, _step: u64, result: Result<Vec<Written>, String>) {
        self.written = Some(result);
    }

    fn all_written(&mut self, _step: u64) -> Result<Vec<Written>, String> {
        self.written.take().unwrap()
    }

    fn flush(&mut self) {}

    fn report(&mut self, report: Report) {
        if let Some(reports) = &self.reports {
            reports.send(report).unwrap();
        }
    }
}

/// The settings of a single rank.
pub(crate) fn settings(dir: &Path, retention: Retention) -> Settings {
    let layout = Layout::new(&shape());
    let portion = Portion::new(&layout, &sharding(&layout, 0, 1, false), 0, 1);
    Settings {
        dir: dir.into(),
        layout: layout.trained().clone(),
        portion,
        rank: 0,
        writers: 1,
        retention,
        tokenizer: None,
        source: None,
        host: HostAllocator::default(),
        buffers: Buffers::Own,
    }
}

/// Saves a state with a single rank.
pub(super) fn save_with(
    settings: Settings,
    disk: Disk,
    exchange: Alone,
    state: State,
) -> Result<(), CheckpointError> {
    let snapshot = snapshot(&settings.portion, state.step);
    let mut saver = Saver::with_disk(settings, Box::new(exchange), disk).unwrap();
    saver.wait().unwrap();
    saver.begin(snapshot, state, Instant::now());
    saver.wait()
}

/// Saves a checkpoint of the run `run`.
pub(crate) fn save(dir: &Path, step: u64) -> PathBuf {
    save_with(settings(dir, Retention::default()), Disk::default(), Alone::default(), state("run", step))
        .unwrap();
    dir.join(name(step))
}

/// Saves a checkpoint of another model with these parameters, after ten steps.
pub(crate) fn save_model(dir: &Path, shape: &ModelShape, params: &[f32]) -> PathBuf {
    let layout = Layout::new(shape);
    let portion = Portion::new(&layout, &sharding(&layout, 0, 1, false), 0, 1);
    let snapshot = Snapshot {
        params: HostBuffer::from(
            portion
                .ranges()
                .iter()
                .flat_map(|owned| &params[owned.arena.clone()])
                .copied()
                .collect::<Vec<f32>>(),
        ),
        ..snapshot(&portion, 10)
    };
    let settings =
        Settings { layout: layout.trained().clone(), portion, ..settings(dir, Retention::default()) };
    let state = State { model: shape.clone(), ..state("run", 10) };
    let mut saver = Saver::with_disk(settings, Box::new(Alone::default()), Disk::default()).unwrap();
    saver.wait().unwrap();
    saver.begin(snapshot, state, Instant::now());
    saver.wait().unwrap();
    dir.join(name(10))
}
