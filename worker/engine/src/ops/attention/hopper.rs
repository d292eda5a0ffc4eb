//! Attention in bf16 on compute capability 9.0: launches of `hopper_*.cu`.
//!
//! Backward has two forms. Blocks of keys can add their parts of dq to fp32 sums, in the order in which they finish; or
//! a kernel of its own computes dq in a fixed order, and the scores a second time for that.

use cudarc::driver::sys::CUtensorMap;
use xlaunch_pool::DType;

use super::cudnn::Direction;
use super::{AttentionBackward, AttentionForward, AttentionShape};
use crate::cuda::hopper::{HopperKernel, OTHER_SHARED, SQUARE, THREADS, WARPGROUP, tensor_map};
use crate::cuda::{Gpu, Macro, Source, VEC, args, source};
use crate::error::Result;
use crate::tensor::{Slice, Tensor};

/// Name in the log.
pub(super) const HOPPER_NAME: &str = "own kernels for compute capability 9.0";

const FWD: Source = source!(
    "attention/hopper_fwd.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh", after "attention/hopper.cuh"
);
const BWD: Source = source!(
    "attention/hopper_bwd.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh", after "attention/hopper.cuh"
);
const BWD_QUERIES: Source = source!(
    "attention/hopper_bwd_queries.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh", after "attention/hopper.cuh"
);
const BWD_ROWS: Source = source!(
    "attention/hopper_bwd_rows.cu",
    after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh", after "attention/hopper.cuh"
);

/// Bytes of the tensors that blocks work on at a time and visit repeatedly, so that they stay in the L2 cache (50 MiB).
const SECTION_BYTES: usize = 16 << 20;

/// Tiles per SM below which the longest ones matter more than the cache.
const FEW_TILES: usize = 8;

/// Keys in a tile of forward and of [`Kernels::bwd`].
const KEYS: usize = 128;
/// Elements of a tile of queries in [`Kernels::bwd`], of all columns: two squares.
const QUERY_ELEMENTS: usize = 2 * SQUARE * SQUARE;
/// Threads of a block of the kernels that go through rows.
const HEAD_ROW_THREADS: u32 = 256;

/// Computation of dq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryGradients {
    /// Sums in fp32, to which blocks add in any order.
    Sums,
    /// A kernel of its own, in a fixed order.
    Separate,
}

/// The kernels for a head width.
pub(crate) struct Kernels {
    pub(crate) fwd: HopperKernel,
    /// Kernels that prepare backward, indexed by [`QueryGradients`].
    pub(crate) prepare: [HopperKernel; 2],
    pub(crate) bwd: [HopperKernel; 2],
    pub(crate) finish: HopperKernel,
    pub(crate) queries: HopperKernel,
    /// Queries in a block of `queries`.
    rows: usize,
}

impl Kernels {
    pub(crate) fn all(&self) -> impl Iterator<Item = &HopperKernel> {
        let several = self.prepare.iter().chain(&self.bwd);
        several.chain([&self.fwd, &self.finish, &self.queries])
    }
}

/// The kernels for heads of 64, then of 128.
pub(crate) static KERNELS: [Kernels; 2] = [
    Kernels {
        fwd: fwd(64, &fwd_macros(64)),
        prepare: [
            rows("attention_bwd_hopper_prepare", &row_macros(64, 1)),
            rows("attention_bwd_hopper_prepare", &row_macros(64, 0)),
        ],
        bwd: [bwd(64, 1, &bwd_macros(64, 1)), bwd(64, 0, &bwd_macros(64, 0))],
        finish: rows("attention_bwd_hopper_finish", &row_macros(64, 1)),
        queries: queries(64, &queries_macros(64)),
        rows: 64 * queries_groups(64),
    },
    Kernels {
        fwd: fwd(128, &fwd_macros(128)),
        prepare: [
            rows("attention_bwd_hopper_prepare", &row_macros(128, 1)),
            rows("attention_bwd_hopper_prepare", &row_macros(128, 0)),
        ],
        bwd: [bwd(128, 1, &bwd_macros(128, 1)), bwd(128, 0, &bwd_macros(128, 0))],
        finish: rows("attention_bwd_hopper_finish", &row_macros(128, 1)),
        queries: queries(128, &queries_macros(128)),
        rows: 64 * queries_groups(128),
    },
];

/// Warpgroups that multiply in forward, with 64 queries each.
const FWD_GROUPS: usize = 2;
/// Tiles of keys and of values that [`Kernels::queries`] keeps in shared memory.
const QUERIES_STAGES: usize = 4;

/// Tiles of keys and of values that forward keeps in shared memory.
const fn fwd_stages(width: usize) -> usize {
    256 / width
}

/// Warpgroups that multiply in [`Kernels::queries`], with 64 queries each.
const fn queries_groups(width: usize) -> usize {
    if width == 64 { 3 } else { 2 }
}

/// Registers of a thread that loads tiles, and of one that multiplies. Together they fit into those of an SM.
const fn registers(groups: usize) -> [Macro; 2] {
    let (loads, multiplies) = if groups == 3 { (32, 160) } else { (40, 232) };
    [Macro::int("PRODUCER", loads), Macro::int("CONSUMER", multiplies)]
}

const fn fwd_macros(width: usize) -> [Macro; 6] {
    let [producer, consumer] = registers(FWD_GROUPS);
    let (groups, stages) = (Macro::int("GROUPS", FWD_GROUPS), Macro::int("STAGES", fwd_stages(width)));
    [Macro::int("WIDTH", width), groups, Macro::int("KEYS", KEYS), stages, producer, consumer]
}

const fn fwd(width: usize, macros: &'static [Macro]) -> HopperKernel {
    let tiles = (FWD_GROUPS * SQUARE + 2 * fwd_stages(width) * KEYS) * width * size_of::<u16>();
    HopperKernel {
        source: FWD,
        name: "attention_fwd_hopper",
        macros,
        threads: THREADS,
        shared: tiles + OTHER_SHARED,
    }
}

/// Tiles of queries and of dout that [`Kernels::bwd`] keeps in shared memory.
const fn bwd_stages(width: usize) -> usize {
    if width == 64 { 3 } else { 2 }
}

const fn bwd_macros(width: usize, sums: usize) -> [Macro; 5] {
    let [producer, consumer] = registers(2);
    let (stages, sums) = (Macro::int("STAGES", bwd_stages(width)), Macro::int("SUMS", sums));
    [Macro::int("WIDTH", width), stages, sums, producer, consumer]
}

const fn bwd(width: usize, sums: usize, macros: &'static [Macro]) -> HopperKernel {
    let queries = QUERY_ELEMENTS / width;
    let tiles = 2 * KEYS * width + 2 * bwd_stages(width) * QUERY_ELEMENTS + sums * 2 * queries * KEYS;
    let stats = bwd_stages(width) * queries * 2 * size_of::<f32>();
    let shared = tiles * size_of::<u16>() + stats + OTHER_SHARED;
    HopperKernel { source: BWD, name: "attention_bwd_hopper", macros, threads: THREADS, shared }
}

const fn queries_macros(width: usize) -> [Macro; 6] {
    let groups = queries_groups(width);
    let [producer, consumer] = registers(groups);
    let (keys, stages) = (Macro::int("KEYS", SQUARE), Macro::int("STAGES", QUERIES_STAGES));
    [Macro::int("WIDTH", width), Macro::int("GROUPS", groups), keys, stages, producer, consumer]
}

const fn queries(width: usize, macros: &'static [Macro]) -> HopperKernel {
    let groups = queries_groups(width);
    let shared = 2 * (groups + QUERIES_STAGES) * SQUARE * width * size_of::<u16>() + OTHER_SHARED;
    let threads = (groups as u32 + 1) * WARPGROUP;
    HopperKernel { source: BWD_QUERIES, name: "attention_bwd_hopper_queries", macros, threads, shared }
}

const fn row_macros(width: usize, sums: usize) -> [Macro; 2] {
    [Macro::int("WIDTH", width), Macro::int("SUMS", sums)]
}

const fn rows(name: &'static str, macros: &'static [Macro]) -> HopperKernel {
    HopperKernel { source: BWD_ROWS, name, macros, threads: HEAD_ROW_THREADS, shared: 0 }
}

/// Returns the number of rows of sums and statistics of a head: they are padded to whole tiles.
pub(super) fn padded_length(s: AttentionShape) -> usize {
    match s.width {
        64 | 128 => s.seq.next_multiple_of(QUERY_ELEMENTS / s.width),
        _ => s.seq,
    }
}

/// Returns the kernels for a shape, if they can run it on this device.
pub(super) fn select(gpu: &Gpu, s: AttentionShape) -> Option<&'static Kernels> {
    let kernels = match s.width {
        64 => &KERNELS[0],
        128 => &KERNELS[1],
        _ => return None,
    };
    let tiles = s.seq.div_ceil(SQUARE).saturating_mul(s.batch * s.heads);
    let is_supported = gpu.activations == DType::Bf16
        && s.options.softcap.is_none()
        && gpu.hopper.supports(&[], &[s.qkv_width()], &[s.seq, tiles]);
    is_supported.then_some(kernels)
}

/// Returns whether the kernels are faster than those of cuDNN 9.19, by `tests/gpu/results/attention-h100.txt`. Windows
/// were not measured.
pub(super) fn is_faster_than_cudnn(s: AttentionShape, direction: Direction) -> bool {
    s.options.window.is_none()
        && match direction {
            Direction::Forward => s.width == 128 && s.seq >= 4096,
            Direction::Backward => s.width == 64 && s.seq <= 2048 && s.heads >= 4 * s.kv_heads,
        }
}

/// Returns the number of heads to work on at a time, of `total` heads with this many tiles and cached bytes each. If
/// SMs have few tiles each, a section has at least two for each: as its longest tiles come first, the SMs then finish
/// the last section together.
fn section(gpu: &Gpu, total: usize, tiles: usize, bytes: usize) -> usize {
    let multiprocessors = gpu.hopper.multiprocessors();
    let has_few = total * tiles < FEW_TILES * multiprocessors;
    let least = if has_few { (2 * multiprocessors).div_ceil(tiles) } else { 1 };
    (SECTION_BYTES / bytes).max(least).clamp(1, total)
}

/// Maps of boxes of 64 x 64 elements.
fn map(x: Slice<'_>, s: AttentionShape, row: usize) -> Result<CUtensorMap> {
    tensor_map(x, [row, s.seq, s.batch], [SQUARE, SQUARE, 1])
}

/// # Safety
/// The operands are supported and have the sizes of the shape; `out` and `lse` do not overlap `qkv`.
pub(super) unsafe fn forward(
    gpu: &Gpu,
    kernels: &'static Kernels,
    s: AttentionShape,
    a: AttentionForward<'_>,
) -> Result<()> {
    let AttentionForward { qkv, documents, out, lse, .. } = a;
    let tiles = s.seq.div_ceil(FWD_GROUPS * SQUARE);
    let blocks = (tiles * s.batch * s.heads).min(gpu.hopper.multiprocessors());
    let section = query_section(gpu, s, tiles);
    let args = args![
        map(qkv, s, s.qkv_width())?,
        out,
        lse,
        documents.map(|documents| documents.first),
        s.window(),
        s.batch,
        s.seq,
        s.heads,
        s.kv_heads,
        section,
        s.scale()
    ];
    // SAFETY: the caller's promise; there are no more blocks than tiles.
    unsafe { gpu.hopper.launch(&kernels.fwd, (blocks, 1, 1), args) }
}

/// Returns the section of kernels whose blocks have the queries of one of `tiles` tiles, and visit keys and values.
fn query_section(gpu: &Gpu, s: AttentionShape, tiles: usize) -> usize {
    let group = s.heads / s.kv_heads;
    let bytes = 2 * s.seq * s.width * DType::Bf16.size();
    group * section(gpu, s.batch * s.kv_heads, group * tiles, bytes)
}

/// # Safety
/// The operands are supported and have the sizes of the shape; `dqkv` does not overlap the others.
pub(super) unsafe fn backward(
    gpu: &Gpu,
    kernels: &'static Kernels,
    (s, form): (AttentionShape, QueryGradients),
    a: AttentionBackward<'_>,
) -> Result<()> {
    let AttentionBackward { qkv, documents, out, dout, lse, dqkv, .. } = a;
    let row = s.qkv_width();
    let queries = QUERY_ELEMENTS / s.width;
    let rows = s.batch * s.heads * padded_length(s);
    let query_tiles = rows / queries;
    let stats = gpu.alloc(DType::F32, 2 * rows)?;
    let sums = (form == QueryGradients::Sums).then(|| gpu.alloc(DType::F32, rows * s.width)).transpose()?;
    let sums = sums.as_ref().map(Tensor::all);
    let (stats, maps) = (stats.all(), [map(qkv, s, row)?, map(dout, s, s.heads * s.width)?]);
    let [qkv_map, dout_map] = maps;
    let (prepare, bwd) = (&kernels.prepare[form as usize], &kernels.bwd[form as usize]);
    let key_tiles = s.seq.div_ceil(KEYS);
    // Queries, dout and the sums, which are twice as large, of one head: blocks visit one after another.
    let visited = if sums.is_some() { 4 } else { 2 } * s.seq * s.width * DType::Bf16.size();
    let key_section = section(gpu, s.batch * s.kv_heads, key_tiles, visited);
    let prepare_args = args![out, dout, lse, stats, sums, s.batch, s.seq, s.heads];
    let args = args![
        qkv_map,
        dout_map,
        stats,
        sums,
        dqkv,
        documents.map(|documents| documents.last),
        s.window(),
        s.batch,
        s.seq,
        s.heads,
        s.kv_heads,
        key_section,
        s.scale()
    ];
    let key_blocks = s.batch * s.kv_heads * key_tiles;
    let row_blocks = (rows * s.width / VEC).div_ceil(HEAD_ROW_THREADS as usize);
    // SAFETY: the caller's promise; statistics and sums have the sizes that the kernels expect, and kernels write
    // disjoint parts of dqkv.
    unsafe {
        gpu.hopper.launch(prepare, (row_blocks, 1, 1), prepare_args)?;
        gpu.hopper.launch(bwd, (key_blocks, 1, 1), args)?;
        if let Some(sums) = sums {
            let args = args![sums, dqkv, s.seq, s.heads, s.kv_heads, s.scale()];
            return gpu.hopper.launch(&kernels.finish, (query_tiles, 1, 1), args);
        }
        let tiles = s.seq.div_ceil(kernels.rows);
        let (blocks, section) = (s.batch * s.heads * tiles, query_section(gpu, s, tiles));
        let args = args![
            qkv_map,
            dout_map,
            stats,
            dqkv,
            documents.map(|documents| documents.first),
            s.window(),
            s.batch,
            s.seq,
            s.heads,
            s.kv_heads,
            section,
            s.scale()
        ];
        gpu.hopper.launch(&kernels.queries, (blocks, 1, 1), args)
    }
}
