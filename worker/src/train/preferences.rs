//! Training on preferences, pairs of a better and a worse answer (DPO).
//!
//! ```text
//! reference: forward --losses of tokens--.
//! model:     forward --losses of tokens--+--> losses of pairs, weights of tokens --> gradients of the logits
//! ```
//! The reference is the model that the job starts from: a copy of the initial weights or adapters. Its pass comes
//! first, so that its activations are freed before those of the model are needed.

use xlaunch_engine::{Accumulate, DType, PreferenceLoss, Scale, Slice, Sum, Tensor};
use xlaunch_spec::job::JobSpec;

use crate::error::Result;
use crate::model::{BackendHandle, Model, Rows};

/// The reference, and buffers for a batch.
#[derive(Debug)]
pub struct Preferences {
    backend: BackendHandle,
    /// Computes the losses that those of the model are compared with.
    pub reference: Model,
    beta: f32,
    /// Losses of tokens under the reference, `[B, T]`.
    reference_losses: Tensor,
    /// Derivatives of the losses of pairs by those of tokens, `[B, T]`.
    weights: Tensor,
    /// Sums over the pairs of each row, `[3, B]`: losses, pairs with the right order, margins.
    sums: Tensor,
}

/// Sums over the pairs of the rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairSum {
    Losses,
    Preferred,
    Margins,
}

impl Preferences {
    /// Allocates the buffers, and the reference's own parameters; `None` if the job does not train on preferences.
    #[expect(clippy::cast_possible_truncation, reason = "the operation computes in f32")]
    pub fn new(backend: &BackendHandle, model: &Model, spec: &JobSpec) -> Result<Option<Self>> {
        let Some(beta) = spec.dpo.beta else { return Ok(None) };
        let (batch, tokens) = (spec.train.batch, spec.train.batch * model.shape.seq);
        Ok(Some(Self {
            reference: model.twin()?,
            beta: beta as f32,
            reference_losses: backend.alloc_persistent(DType::F32, tokens)?,
            weights: backend.alloc_persistent(DType::F32, tokens)?,
            sums: backend.alloc_persistent(DType::F32, 3 * batch)?,
            backend: backend.clone(),
        }))
    }

    /// Computes the losses of a batch under the reference.
    pub fn run_reference(&self, rows: Rows<'_>, tokens: Slice<'_>, targets: Slice<'_>) -> Result<()> {
        let output = self.reference.output(rows, tokens)?;
        Ok(self.reference.loss(&output, targets, self.reference_losses.all())?)
    }

    /// Compares `losses`, those of the same batch under the model, with those under the reference. Returns the weights
    /// of the tokens. Without documents, a row has no pair.
    pub fn compare(&self, rows: Rows<'_>, losses: Slice<'_>) -> Result<Slice<'_>> {
        let Rows { batch, seq, documents } = rows;
        if let Some(documents) = documents {
            self.backend.run(PreferenceLoss {
                batch,
                seq,
                beta: self.beta,
                last: documents.last,
                losses,
                reference: self.reference_losses.all(),
                weights: self.weights.all(),
                sums: self.sums.all(),
            })?;
        }
        Ok(self.weights.all())
    }

    /// Returns the sums of each row, `[B]`.
    pub fn sums(&self, sum: PairSum) -> Slice<'_> {
        let batch = self.sums.len() / 3;
        let first = sum as usize * batch;
        self.sums.slice(first..first + batch)
    }

    /// Writes (or adds) `scale` times the sum over all rows to `out`.
    pub fn add_up(&self, sum: PairSum, scale: Slice<'_>, out: Slice<'_>, acc: Accumulate) -> Result<()> {
        Ok(self.backend.run(Sum { x: self.sums(sum), scale: Scale::Memory(scale), out, acc })?)
    }
}
