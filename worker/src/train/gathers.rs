//! Gathers the weights in other ranks' shards, one pass at a time.
//!
//! ```text
//! sharded optimizer:   all weights, at the beginning of a step; forward waits for them part by part
//! sharded parameters:  embeddings and head at the beginning of a step; those of a block while an earlier one is
//! computed
//! ```

use std::ops::Range;

use xlaunch_comm::{Collective, Slots, Turn, Wait};

use super::division::Division;
use crate::error::Result;
use crate::model::Model;
use crate::optim::AdamW;

/// The buckets to gather before each part of a pass.
#[derive(Debug)]
pub(super) struct Gathers(Vec<Turn>);

impl Gathers {
    /// Plans the gathers of passes over these parts of the model. `complete` means that the weights gathered once per
    /// step are already present.
    pub(super) fn new(division: &Division, parts: &[Range<usize>], overlap: bool, complete: bool) -> Self {
        if !division.sharding.is_sharded() {
            return Self(Vec::new());
        }
        Self(match &division.weights {
            Some(slots) => slots.gathers(parts, usize::from(overlap), complete),
            None => {
                let ahead = if overlap { parts.len() } else { 0 };
                Slots::whole(division.sharding.plan()).gathers(parts, ahead, complete)
            }
        })
    }

    /// Completes the weights of a part before it is computed. Returns whether that had to wait for other ranks.
    pub(super) fn begin_part(
        &self,
        part: usize,
        model: &Model,
        optimizer: &AdamW,
        collective: &mut dyn Collective,
    ) -> Result<bool> {
        let Some(Turn { now, waits, later }) = self.0.get(part) else { return Ok(false) };
        optimizer.start_gather(model, now, collective)?;
        for _ in 0..*waits {
            collective.wait(Wait::OldestGather)?;
        }
        later.iter().try_for_each(|buckets| optimizer.start_gather(model, buckets, collective))?;
        Ok(*waits > 0)
    }
}
