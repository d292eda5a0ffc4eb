//! The state that training starts from: a checkpoint, given weights, or random weights.

use std::io;
use std::path::Path;
use std::thread::JoinHandle;

use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_proto::model::ModelShape;
use xlaunch_proto::spec::JobSpec;

use crate::checkpoint::{self, Arenas};
use crate::error::{Result, WorkerError};
use crate::model::init;
use crate::model::layout::Layout;

/// Parameters, moments and data position at the first step.
pub(super) struct InitialState {
    pub(super) params: Vec<f32>,
    /// AdamW's first and second moments; `None` without a checkpoint.
    pub(super) moments: Option<(Vec<f32>, Vec<f32>)>,
    /// Steps completed.
    pub(super) step: u64,
    /// Sequences that all ranks have used.
    pub(super) sequences: u64,
}

impl InitialState {
    /// Starts reading or generating the state on separate threads.
    pub(super) fn read_in_background(
        spec: &JobSpec,
        shape: &ModelShape,
        resume_from: &Path,
        threads: usize,
    ) -> Result<JoinHandle<Result<Self>>> {
        let failed = |source| WorkerError::Io { what: "failed to start a thread".into(), source };
        let (spec, shape, resume_from) = (spec.clone(), shape.clone(), resume_from.to_path_buf());
        let threads = ThreadPoolBuilder::new().num_threads(threads).build();
        let threads = threads.map_err(|error| failed(io::Error::other(error)))?;
        std::thread::Builder::new()
            .name("weights".into())
            .spawn(move || Self::read(&spec, &shape, &resume_from, &threads))
            .map_err(failed)
    }

    fn read(spec: &JobSpec, shape: &ModelShape, resume_from: &Path, threads: &ThreadPool) -> Result<Self> {
        let layout = Layout::new(shape);
        if !resume_from.as_os_str().is_empty() {
            let Arenas { params, m, v, state } = checkpoint::load(resume_from, shape, &layout, threads)?;
            return Ok(Self { params, moments: Some((m, v)), step: state.step, sequences: state.sequences });
        }
        let params = match &spec.checkpoint.init {
            Some(path) => checkpoint::load_weights(Path::new(path), &layout, threads)?,
            None => init::weights(&layout, spec.job.seed, threads),
        };
        Ok(Self { params, moments: None, step: 0, sequences: 0 })
    }
}
