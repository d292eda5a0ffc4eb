//! The gradients of a step, from backward through the reduction to the optimizer.
//!
//! ```text
//!               one micro-step              several micro-steps, reduced in bf16
//! replicated:   arena (reduced in place)    arena (F32) -> rounded (reduced in place)
//! sharded:      arena -> shard              arena (F32) -> rounded -> shard
//! in slots:     arena -> shard              arena -> shard -> sum (F32), in every micro-step
//! ```
//! With `comm.shard = "gradients"` or `"parameters"` the arena has [`Slots`] for the buckets of only a few blocks: a
//! bucket is reduced as soon as it is written, and another one reuses its memory.
//!
//! Micro-steps are added up in F32, because bf16 would lose most of the contribution of the later ones. Without slots,
//! only their sum is rounded, once, and only if it is sent to other ranks.

use std::ops::Range;

use xlaunch_comm::{Collective, Operation, Sharding, Slots, Wait, Write};
use xlaunch_engine::{Accumulate, AddTo, Cast, DType, Tensor};

use super::division::Division;
use crate::error::Result;
use crate::model::layout::Layout;
use crate::model::{BackendHandle, GradientArena};

/// The gradients of all trained parameters on one rank.
#[derive(Debug)]
pub struct Gradients {
    backend: BackendHandle,
    sharding: Sharding,
    arena: Tensor,
    slots: Option<Slots>,
    /// Waits and slots before each of the layout's parts of a backward pass; empty without slots.
    writes: Vec<Write>,
    /// Ranges that belong to no parameter.
    gaps: Vec<Range<usize>>,
    rounded: Option<Tensor>,
    /// This rank's shard of the reduced gradients; `None` without sharding.
    shard: Option<Tensor>,
    /// Sum of the shards of several micro-steps; `None` if they are added up before the reduction.
    sum: Option<Tensor>,
    /// Reductions of every gradient in a step.
    reductions: usize,
}

impl Gradients {
    /// Creates zero gradients of `layout`, to be reduced over `world` ranks in the element type `wire`, of steps with
    /// `accumulate` micro-steps.
    pub fn new(
        backend: &BackendHandle,
        layout: &Layout,
        division: &Division,
        wire: DType,
        accumulate: usize,
        world: usize,
    ) -> Result<Self> {
        let Division { sharding, gradients: slots, .. } = division;
        let reductions = if slots.is_some() { accumulate } else { 1 };
        let own = if accumulate == reductions { wire } else { DType::F32 };
        let len = slots.as_ref().map_or(sharding.arena_len(), Slots::len);
        let rounds = own != wire && world > 1;
        let arena =
            if rounds { backend.alloc_persistent(own, len) } else { backend.alloc_collective(own, len) };
        let gradients = Self {
            arena: arena?,
            rounded: rounds.then(|| backend.alloc_collective(wire, len)).transpose()?,
            shard: sharding
                .is_sharded()
                .then(|| backend.alloc_collective(wire, sharding.len()))
                .transpose()?,
            sum: (reductions > 1)
                .then(|| backend.alloc_persistent(DType::F32, sharding.len()))
                .transpose()?,
            reductions,
            writes: slots.as_ref().map_or_else(Vec::new, |slots| slots.writes(&layout.backward_parts())),
            slots: slots.clone(),
            gaps: layout.trained().gaps(),
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

    /// Returns the arena that backward writes or adds to.
    pub fn arena(&self) -> GradientArena<'_> {
        GradientArena { tensor: &self.arena, slots: self.slots.as_ref() }
    }

    /// Returns how a backward pass writes the arena in a micro-step with this place in a step.
    pub fn accumulation(&self, acc: Accumulate) -> Accumulate {
        if self.sum.is_some() { Accumulate::Overwrite } else { acc }
    }

    /// Makes room for a part of a backward pass.
    pub fn begin_part(&self, part: usize, collective: &mut dyn Collective) -> Result<()> {
        let Some(write) = self.writes.get(part) else { return Ok(()) };
        for _ in 0..write.waits {
            collective.wait(Wait::OldestScatter)?;
        }
        // Gaps contain data of other buckets that used the same memory.
        let is_written = |gap: &&Range<usize>| {
            write.buckets.iter().any(|bucket| bucket.start <= gap.start && gap.end <= bucket.end)
        };
        for gap in self.gaps.iter().filter(is_written) {
            self.backend.zero(self.arena().slice(gap.clone()))?;
        }
        Ok(())
    }

    /// Starts the all-reduce or reduce-scatter of several buckets together, after the last micro-step has written them,
    /// or after each one if it [is to be reduced](Self::reduces).
    pub fn reduce(&self, buckets: &[Range<usize>], collective: &mut dyn Collective) -> Result<()> {
        if buckets.is_empty() {
            return Ok(());
        }
        if let Some(rounded) = &self.rounded {
            for bucket in buckets {
                self.backend
                    .run(Cast { x: self.arena.slice(bucket.clone()), y: rounded.slice(bucket.clone()) })?;
            }
        }
        let sent = self.sent();
        let lend = |bucket| sent.lend(self.arena().place(bucket));
        let dtype = sent.dtype();
        for (among, buckets) in self.sharding.plan().runs(buckets) {
            let operation = match &self.shard {
                None => Operation::AllReduce { buckets: buckets.iter().map(lend).collect(), dtype },
                Some(shard) => {
                    let own = |bucket| shard.lend(self.sharding.in_shard(bucket));
                    let pairs = buckets.iter().map(|bucket| [lend(bucket), own(bucket)]);
                    Operation::ReduceScatter { buckets: pairs.collect(), dtype }
                }
            };
            collective.start_among(among, operation)?;
        }
        Ok(())
    }

    /// Returns whether a micro-step is to be reduced, which for the last one is always the case.
    pub fn reduces(&self, is_last: bool) -> bool {
        is_last || self.sum.is_some()
    }

    /// Adds the reduced gradients of a micro-step to the sum, or begins the sum with them.
    pub fn end_micro_step(&self, acc: Accumulate, collective: &mut dyn Collective) -> Result<()> {
        let (Some(shard), Some(sum)) = (&self.shard, &self.sum) else { return Ok(()) };
        collective.wait(Wait::All)?;
        let (x, y) = (shard.all(), sum.all());
        Ok(match acc {
            Accumulate::Overwrite => self.backend.run(Cast { x, y }),
            Accumulate::Add => self.backend.run(AddTo { x, y }),
        }?)
    }

    /// Returns the input of the optimizer when all buckets are reduced: all gradients, or this rank's shard.
    pub fn reduced(&self) -> &Tensor {
        self.sum.as_ref().or(self.shard.as_ref()).unwrap_or(self.sent())
    }

    /// Returns the buffers that are lent to collectives.
    pub fn buffers(&self) -> impl Iterator<Item = &Tensor> {
        [Some(self.sent()), self.shard.as_ref()].into_iter().flatten()
    }

    /// Returns the number of bytes that this rank contributes to the reduction of a step.
    pub fn bytes(&self) -> u64 {
        (self.sharding.arena_len() * self.sent().dtype().size() * self.reductions) as u64
    }

    /// Returns whether a bucket has to be reduced as soon as it is written.
    pub fn reduces_at_once(&self) -> bool {
        self.slots.is_some()
    }

    fn sent(&self) -> &Tensor {
        self.rounded.as_ref().unwrap_or(&self.arena)
    }
}
