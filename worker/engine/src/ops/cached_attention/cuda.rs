//! Launches of attention over the cache. The kernels are compiled on first use, per head width and number of query
//! heads per key head.

use xlaunch_pool::DType;

use super::{CachedAttention, CachedAttentionShape};
use crate::cuda::on_demand::{Compilation, OnDemand};
use crate::cuda::{Arg, Gpu, Launch, Macro, Source, args, expect, source};
use crate::error::Result;
use crate::ops::Scalar;

/// Threads of a block.
const CACHED_THREADS: u32 = 256;
/// Positions whose keys and values a thread fetches together.
const UNROLL: usize = 4;
/// Maximum number of query heads that a block keeps in registers.
const MAX_GROUP: usize = 4;

const CACHED_SOURCE: Source = source!("cached_attention/kernel.cu");
const CACHED_KERNELS: [&str; 2] = ["cached_attention", "cache_store"];

/// The kernels by head width and query heads per block.
#[derive(Debug, Default)]
pub(crate) struct CachedKernels(OnDemand<(usize, usize)>);

/// Returns the source, its macros and its kernels for this head width and number of query heads per block.
pub(crate) fn source_for((width, group): (usize, usize)) -> Compilation {
    let macros = vec![
        Macro::int("WIDTH", width),
        Macro::int("GROUP", group),
        Macro::int("LANES", (width / 8).next_power_of_two()),
        Macro::int("THREADS", CACHED_THREADS as usize),
        Macro::int("UNROLL", UNROLL),
    ];
    (CACHED_SOURCE, macros, CACHED_KERNELS.to_vec())
}

impl CachedKernels {
    pub(crate) fn run(&self, gpu: &Gpu, a: CachedAttention<'_>) -> Result<()> {
        let s = a.shape;
        gpu.expect_act(a.qkv, s.rows * s.qkv_width());
        gpu.expect_act(a.out, s.rows * s.heads * s.width);
        [a.keys, a.values].into_iter().for_each(|cache| gpu.expect_act(cache, s.cache()));
        gpu.expect_optional_act(a.sinks, s.heads);
        [a.slots, a.positions].into_iter().for_each(|ids| expect(ids, DType::I32, s.rows));
        if let Some(table) = a.rope {
            expect(table, DType::F32, table.len().max(s.capacity * s.width));
        }
        expect(a.partials, DType::F32, a.partials.len().max(s.partials()));
        expect(a.counters, DType::I32, a.counters.len().max(s.rows * s.heads));
        let group = group(s);
        let blocks = s.heads / group;
        if !a.distinct {
            let threads = (s.width / 8 * s.kv_heads).next_multiple_of(32).min(CACHED_THREADS as usize) as u32;
            let args =
                args![a.qkv, a.rope, a.slots, a.positions, a.keys, a.values, s.heads, s.kv_heads, s.capacity];
            // SAFETY: checked above; slots and positions are within the cache by the operation's contract.
            unsafe { self.launch(gpu, "cache_store", s, Launch::blocks(s.rows, threads), args) }?;
        }
        let launch = Launch { grid: (s.splits(), blocks, s.rows), block: (CACHED_THREADS, 1), shared: 0 };
        let args = args![
            a.qkv,
            a.rope,
            a.slots,
            a.positions,
            a.keys,
            a.values,
            a.sinks,
            a.out,
            a.partials,
            a.counters,
            s.heads,
            s.kv_heads,
            s.capacity,
            s.split(),
            a.distinct,
            s.scale(),
            s.window(),
            s.options.softcap.map_or(0.0, Scalar::get)
        ];
        // SAFETY: as above; there is scratch memory for every split and a counter for every head of a row.
        unsafe { self.launch(gpu, "cached_attention", s, launch, args) }
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// Same as for [`Kernels::launch`](crate::cuda::Kernels::launch).
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        name: &'static str,
        s: CachedAttentionShape,
        launch: Launch,
        args: &[Arg],
    ) -> Result<()> {
        let key = ((s.width, group(s)), name);
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(&gpu.kernels, key, source_for, launch, args) }
    }
}

/// Returns the number of query heads per block: as many of those of a key head as it can keep.
fn group(s: CachedAttentionShape) -> usize {
    let per_key_head = s.heads / s.kv_heads;
    (1..=MAX_GROUP).rev().find(|group| per_key_head.is_multiple_of(*group)).unwrap_or(1)
}
