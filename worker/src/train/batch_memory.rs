//! Device memory of a batch, reused by all micro-steps.

use xlaunch_engine::{DType, Documents, Slice, Tensor};
use xlaunch_spec::job::{DocumentMode, JobSpec};

use crate::data::{Batch, DocumentBounds};
use crate::error::Result;
use crate::model::{BackendHandle, Rows};

/// Tokens, targets and documents of B sequences.
#[derive(Debug)]
pub(super) struct BatchMemory {
    batch: usize,
    seq: usize,
    tokens: Tensor,
    targets: Tensor,
    /// First and last tokens of documents, if the job tells documents apart.
    bounds: Option<[Tensor; 2]>,
}

impl BatchMemory {
    /// Allocates memory for sequences of `seq` tokens.
    pub(super) fn new(backend: &BackendHandle, spec: &JobSpec, seq: usize) -> Result<Self> {
        let batch = spec.train.batch;
        let alloc = || backend.alloc_persistent(DType::I32, batch * seq);
        let (tokens, targets) = (alloc()?, alloc()?);
        let bounds = match spec.data.documents() {
            DocumentMode::Joined => None,
            DocumentMode::Masked | DocumentMode::Packed => Some([alloc()?, alloc()?]),
        };
        Ok(Self { batch, seq, tokens, targets, bounds })
    }

    /// Writes a batch. The device reads it in work that is enqueued later.
    pub(super) fn write(&self, backend: &BackendHandle, batch: &Batch) -> Result<()> {
        backend.write_i32(self.tokens.all(), &batch.tokens)?;
        backend.write_i32(self.targets.all(), &batch.targets)?;
        if let Some([first, last]) = &self.bounds {
            let whole;
            let bounds = if let Some(bounds) = &batch.documents {
                bounds
            } else {
                whole = DocumentBounds::whole_rows(self.batch, self.seq);
                &whole
            };
            backend.write_i32(first.all(), &bounds.first)?;
            backend.write_i32(last.all(), &bounds.last)?;
        }
        Ok(())
    }

    /// Returns the shape of a pass over the batch.
    pub(super) fn rows(&self) -> Rows<'_> {
        let documents =
            self.bounds.as_ref().map(|[first, last]| Documents { first: first.all(), last: last.all() });
        Rows { batch: self.batch, seq: self.seq, documents }
    }

    /// Returns the tokens, I32 `[B, T]`.
    pub(super) fn tokens(&self) -> Slice<'_> {
        self.tokens.all()
    }

    /// Returns the targets, I32 `[B, T]`.
    pub(super) fn targets(&self) -> Slice<'_> {
        self.targets.all()
    }
}
