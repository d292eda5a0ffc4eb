//! The gradients of a step: what backward writes, what is reduced, and what the optimizer reads.
//!
//! ```text
//!               one micro-step              several micro-steps, reduced in bf16
//! replicated:   arena (reduced in place)    arena (F32) -> rounded (reduced in place)
//! sharded:      arena -> shard              arena (F32) -> rounded -> shard
//! ```
//! Micro-steps are added in F32, as bf16 would lose most of what the later ones contribute. Only their sum is rounded,
//! once, and only where it is sent to other ranks.

use std::ops::Range;

use xlaunch_comm::{Collective, Sharding};
use xlaunch_engine::{DType, Tensor};

use crate::error::Result;
use crate::model::BackendHandle;

/// The gradients of all parameters on one rank.
#[derive(Debug)]
pub struct Gradients {
    backend: BackendHandle,
    sharding: Sharding,
    arena: Tensor,
    rounded: Option<Tensor>,
    /// This rank's shard of the reduced gradients; `None` without sharding.
    shard: Option<Tensor>,
}

impl Gradients {
    /// Zero gradients of the layout that `sharding` cuts, to be reduced over `world` ranks in the element type `wire`.
    pub fn new(
        backend: &BackendHandle,
        sharding: &Sharding,
        wire: DType,
        accumulate: usize,
        world: usize,
    ) -> Result<Self> {
        let (len, own) = (sharding.arena_len(), if accumulate == 1 { wire } else { DType::F32 });
        let rounds = own != wire && world > 1;
        let arena = match rounds {
            true => backend.alloc_persistent(own, len),
            false => backend.alloc_collective(own, len),
        };
        let gradients = Self {
            arena: arena?,
            rounded: rounds.then(|| backend.alloc_collective(wire, len)).transpose()?,
            shard: sharding
                .is_sharded()
                .then(|| backend.alloc_collective(wire, sharding.len()))
                .transpose()?,
            sharding: sharding.clone(),
            backend: backend.clone(),
        };
        // Gaps between parameters are reduced and enter the norm, but are never written again. A benchmark may skip
        // the reduce-scatter that writes the shard.
        for tensor in [Some(&gradients.arena), gradients.rounded.as_ref(), gradients.shard.as_ref()] {
            tensor.map_or(Ok(()), |tensor| backend.zero(tensor.all()))?;
        }
        Ok(gradients)
    }

    /// What backward writes and adds to: an arena of the layout.
    pub fn arena(&self) -> &Tensor {
        &self.arena
    }

    /// Starts the all-reduce or reduce-scatter of a bucket that the last micro-step has written.
    pub fn reduce(&self, bucket: Range<usize>, collective: &mut dyn Collective) -> Result<()> {
        if let Some(rounded) = &self.rounded {
            self.backend.cast(self.arena.slice(bucket.clone()), rounded.slice(bucket.clone()))?;
        }
        let sent = self.sent();
        match &self.shard {
            None => collective.all_reduce(sent.lend(bucket), sent.dtype())?,
            Some(shard) => {
                let own = shard.lend(self.sharding.in_shard(&bucket));
                collective.reduce_scatter(sent.lend(bucket), own, sent.dtype())?;
            }
        }
        Ok(())
    }

    /// What the optimizer reads when all buckets are reduced: all gradients, or this rank's shard.
    pub fn reduced(&self) -> &Tensor {
        self.shard.as_ref().unwrap_or(self.sent())
    }

    /// What is lent to collectives.
    pub fn buffers(&self) -> impl Iterator<Item = &Tensor> {
        [Some(self.sent()), self.shard.as_ref()].into_iter().flatten()
    }

    /// Bytes that this rank contributes to the reduction of a step.
    pub fn bytes(&self) -> u64 {
        (self.sent().len() * self.sent().dtype().size()) as u64
    }

    fn sent(&self) -> &Tensor {
        self.rounded.as_ref().unwrap_or(&self.arena)
    }
}
