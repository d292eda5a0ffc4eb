//! Attention in bf16 on compute capability 9.0: launches of `hopper_*.cu`.
//!
//! Backward has two forms. Blocks of keys can add their parts of dq to fp32 sums, in the order in which they finish; or
//! a separate kernel computes dq in a fixed order, for which it computes the scores a second time.

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

/// A file after the headers of all of them, and after others.
macro_rules! hopper_source {
    ($file:literal $(, after $other:literal)*) => {
        source!(
            $file,
            after "../cuda/headers/hopper.cuh", after "../cuda/headers/hopper_tiles.cuh", after "attention/hopper.cuh"
            $(, after $other)*
        )
    };
}

const FWD: Source = hopper_source!("attention/hopper_fwd.cu");
const BWD_NARROW: Source = hopper_source!("attention/hopper_bwd_narrow.cu", after "attention/hopper_bwd.cu");
const BWD_WIDE: Source = hopper_source!("attention/hopper_bwd_wide.cu", after "attention/hopper_bwd.cu");
const BWD_QUERIES: Source = hopper_source!("attention/hopper_bwd_queries.cu");
const BWD_ROWS: Source = hopper_source!("attention/hopper_bwd_rows.cu");

/// Bytes of the tensors that blocks work on at a time and visit repeatedly, so that they stay in the L2 cache (50 MiB).
const SECTION_BYTES: usize = 16 << 20;

/// Tiles per SM below which the longest ones matter more than the cache.
const FEW_TILES: usize = 8;

/// Threads of a block of [`Kernels::prepare`].
const PREPARE_THREADS: u32 = 256;

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
    width: usize,
    /// Whether scores are capped.
    capped: bool,
    pub(crate) fwd: HopperKernel,
    /// Kernels that prepare backward, indexed by [`QueryGradients`].
    pub(crate) prepare: [HopperKernel; 2],
    pub(crate) bwd: [HopperKernel; 2],
    pub(crate) finish: HopperKernel,
    pub(crate) queries: HopperKernel,
}

impl Kernels {
    pub(crate) fn all(&self) -> impl Iterator<Item = &HopperKernel> {
        let several = self.prepare.iter().chain(&self.bwd);
        several.chain([&self.fwd, &self.finish, &self.queries])
    }
}

/// The kernels for heads of this width, with capped scores or not.
macro_rules! kernels {
    ($width:literal) => {
        kernels!($width, false)
    };
    ($width:literal, $capped:literal) => {
        Kernels {
            width: $width,
            capped: $capped,
            fwd: fwd($width, &fwd_macros($width, $capped)),
            prepare: [prepare(&row_macros($width, 1)), prepare(&row_macros($width, 0))],
            bwd: [
                bwd($width, 1, &bwd_macros($width, 1, $capped)),
                bwd($width, 0, &bwd_macros($width, 0, $capped)),
            ],
            finish: finish($width, &row_macros($width, 1)),
            queries: query_gradients($width, &queries_macros($width, $capped)),
        }
    };
}

/// The kernels for the head widths of models. Capped scores and the accumulators of narrower heads do not fit into the
/// registers of the same threads; Gemma 2, which has such scores, has heads of 256.
pub(crate) static KERNELS: [Kernels; 7] = [
    kernels!(64),
    kernels!(80),
    kernels!(96),
    kernels!(128),
    kernels!(192),
    kernels!(256),
    kernels!(256, true),
];

/// Warpgroups that multiply in forward, with 64 queries each.
const FWD_GROUPS: usize = 2;

/// Number of squares side by side in the rows of a head.
const fn slices(width: usize) -> usize {
    width.div_ceil(SQUARE)
}

/// Elements of 64 rows of a head in shared memory.
const fn row_squares(width: usize) -> usize {
    slices(width) * SQUARE * SQUARE
}

/// Keys in a tile of forward and of [`Kernels::bwd`].
const fn keys(width: usize) -> usize {
    if slices(width) > 2 { SQUARE } else { 2 * SQUARE }
}

/// Queries in a tile of [`Kernels::bwd`].
const fn queries(width: usize) -> usize {
    if slices(width) == 1 { 2 * SQUARE } else { SQUARE }
}

/// Parts of the sums of dq for a tile of queries; see `hopper.cuh`.
const fn parts(width: usize) -> usize {
    if slices(width) == 1 { 2 } else { slices(width) }
}

/// Threads per row of [`Kernels::prepare`].
const fn lanes(width: usize) -> usize {
    (slices(width) * SQUARE / VEC).next_power_of_two()
}

/// Tiles of keys and of values that forward keeps in shared memory.
const fn fwd_stages(width: usize) -> usize {
    match slices(width) {
        1 => 4,
        3 => 3,
        _ => 2,
    }
}

/// Tiles of queries and of dout that [`Kernels::bwd`] keeps in shared memory.
const fn bwd_stages(width: usize) -> usize {
    if slices(width) == 1 { 3 } else { 2 }
}

/// Warpgroups that multiply in [`Kernels::queries`], with 64 queries each.
const fn queries_groups(width: usize) -> usize {
    match slices(width) {
        1 => 3,
        2 => 2,
        _ => 1,
    }
}

/// Tiles of keys and of values that [`Kernels::queries`] keeps in shared memory.
const fn queries_stages(width: usize) -> usize {
    if slices(width) > 2 { 2 } else { 4 }
}

/// Registers of a thread that loads tiles, and of one that multiplies. Together they fit into those of an SM.
const fn registers(groups: usize) -> [Macro; 2] {
    let (loads, multiplies) = match groups {
        1 => (120, 248),
        2 => (40, 232),
        _ => (32, 160),
    };
    [Macro::int("PRODUCER", loads), Macro::int("CONSUMER", multiplies)]
}

const fn fwd_macros(width: usize, capped: bool) -> [Macro; 7] {
    let [producer, consumer] = registers(FWD_GROUPS);
    let (groups, stages) = (Macro::int("GROUPS", FWD_GROUPS), Macro::int("STAGES", fwd_stages(width)));
    let (keys, capped) = (Macro::int("KEYS", keys(width)), Macro::int("CAPPED", capped as usize));
    [Macro::int("WIDTH", width), groups, keys, stages, capped, producer, consumer]
}

const fn fwd(width: usize, macros: &'static [Macro]) -> HopperKernel {
    let rows = FWD_GROUPS + 2 * fwd_stages(width) * keys(width) / SQUARE;
    let shared = rows * row_squares(width) * size_of::<u16>() + OTHER_SHARED;
    HopperKernel { source: FWD, name: "attention_fwd_hopper", macros, threads: THREADS, shared }
}

const fn bwd_macros(width: usize, sums: usize, capped: bool) -> [Macro; 7] {
    let [producer, consumer] = registers(2);
    let (stages, sums) = (Macro::int("STAGES", bwd_stages(width)), Macro::int("SUMS", sums));
    let (keys, capped) = (Macro::int("KEYS", keys(width)), Macro::int("CAPPED", capped as usize));
    [Macro::int("WIDTH", width), keys, stages, sums, capped, producer, consumer]
}

const fn bwd(width: usize, sums: usize, macros: &'static [Macro]) -> HopperKernel {
    let (keys, queries, stages) = (keys(width), queries(width), bwd_stages(width));
    let tiles = 2 * (keys + stages * queries) / SQUARE * row_squares(width);
    let is_wide = slices(width) > 2;
    let scores = (sums * 2 + is_wide as usize) * queries * keys;
    let stats = stages * queries * 2 * size_of::<f32>();
    let shared = (tiles + scores) * size_of::<u16>() + stats + OTHER_SHARED;
    let source = if is_wide { BWD_WIDE } else { BWD_NARROW };
    HopperKernel { source, name: "attention_bwd_hopper", macros, threads: THREADS, shared }
}

const fn queries_macros(width: usize, capped: bool) -> [Macro; 7] {
    let groups = queries_groups(width);
    let [producer, consumer] = registers(groups);
    let (keys, stages) = (Macro::int("KEYS", SQUARE), Macro::int("STAGES", queries_stages(width)));
    let (groups, capped) = (Macro::int("GROUPS", groups), Macro::int("CAPPED", capped as usize));
    [Macro::int("WIDTH", width), groups, keys, stages, capped, producer, consumer]
}

const fn query_gradients(width: usize, macros: &'static [Macro]) -> HopperKernel {
    let groups = queries_groups(width);
    let rows = 2 * (groups + queries_stages(width));
    let shared = rows * row_squares(width) * size_of::<u16>() + OTHER_SHARED;
    let threads = (groups as u32 + 1) * WARPGROUP;
    HopperKernel { source: BWD_QUERIES, name: "attention_bwd_hopper_queries", macros, threads, shared }
}

const fn row_macros(width: usize, sums: usize) -> [Macro; 3] {
    [Macro::int("WIDTH", width), Macro::int("SUMS", sums), Macro::int("CAPPED", 0)]
}

const fn prepare(macros: &'static [Macro]) -> HopperKernel {
    let (name, threads) = ("attention_bwd_hopper_prepare", PREPARE_THREADS);
    HopperKernel { source: BWD_ROWS, name, macros, threads, shared: 0 }
}

const fn finish(width: usize, macros: &'static [Macro]) -> HopperKernel {
    let (name, threads) = ("attention_bwd_hopper_finish", parts(width) as u32 * WARPGROUP);
    HopperKernel { source: BWD_ROWS, name, macros, threads, shared: 0 }
}

/// Returns an upper bound of the bytes that backward needs in addition to its operands.
pub(super) fn backward_bytes(s: AttentionShape) -> usize {
    let has_kernels = KERNELS.iter().any(|kernels| kernels.width == s.width);
    let (seq, width) =
        if has_kernels { (padded_length(s), slices(s.width) * SQUARE) } else { (s.seq, s.width) };
    DType::F32.size() * s.batch * s.heads * seq * (width + 2)
}

/// Returns the number of rows of sums and statistics of a head: they are padded to whole tiles.
fn padded_length(s: AttentionShape) -> usize {
    s.seq.next_multiple_of(queries(s.width))
}

/// Returns the kernels for a shape, if they can run it on this device.
pub(super) fn select(gpu: &Gpu, s: AttentionShape) -> Option<&'static Kernels> {
    let capped = s.options.softcap.is_some();
    let kernels = KERNELS.iter().find(|kernels| kernels.width == s.width && kernels.capped == capped)?;
    let tiles = s.seq.div_ceil(SQUARE).saturating_mul(s.batch * s.heads);
    let is_supported =
        gpu.activations == DType::Bf16 && gpu.hopper.supports(&[], &[s.qkv_width()], &[s.seq, tiles]);
    is_supported.then_some(kernels)
}

/// Returns whether the kernels are faster than those of cuDNN 9.19, by `tests/gpu/results/attention-h100.txt`. Windows
/// were not measured.
pub(super) fn is_faster_than_cudnn(s: AttentionShape, direction: Direction) -> bool {
    s.options.window.is_none()
        && match (direction, s.width) {
            (Direction::Forward, 80 | 96) => true,
            (Direction::Forward, 128) => s.seq >= 4096,
            (Direction::Forward, _) => false,
            (Direction::Backward, 64 | 96) => s.seq <= 2048 && shares_keys(s),
            (Direction::Backward, 80) => shares_keys(s),
            (Direction::Backward, 192) => true,
            (Direction::Backward, 256) => s.seq <= 2048,
            (Direction::Backward, _) => false,
        }
}

/// Returns the faster computation of dq, by the same measurements.
pub(super) fn faster_query_gradients(s: AttentionShape) -> QueryGradients {
    match s.width {
        80 | 256 => QueryGradients::Separate,
        96 | 192 if shares_keys(s) => QueryGradients::Separate,
        _ => QueryGradients::Sums,
    }
}

/// Returns whether several query heads share a key head. Its block of keys then visits the queries of them all.
fn shares_keys(s: AttentionShape) -> bool {
    s.heads >= 4 * s.kv_heads
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
        s.scale(),
        s.softcap()
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
    let rows = s.batch * s.heads * padded_length(s);
    let query_tiles = rows / queries(s.width);
    let stats = gpu.alloc(DType::F32, 2 * rows)?;
    let sums = (form == QueryGradients::Sums)
        .then(|| gpu.alloc(DType::F32, rows * slices(s.width) * SQUARE))
        .transpose()?;
    let sums = sums.as_ref().map(Tensor::all);
    let (stats, maps) = (stats.all(), [map(qkv, s, row)?, map(dout, s, s.heads * s.width)?]);
    let [qkv_map, dout_map] = maps;
    let (prepare, bwd) = (&kernels.prepare[form as usize], &kernels.bwd[form as usize]);
    let key_tiles = s.seq.div_ceil(keys(s.width));
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
        s.scale(),
        s.softcap()
    ];
    let key_blocks = s.batch * s.kv_heads * key_tiles;
    let row_blocks = (rows * lanes(s.width)).div_ceil(PREPARE_THREADS as usize);
    // SAFETY: the caller's promise; statistics and sums have the sizes that the kernels expect, and kernels write
    // disjoint parts of dqkv.
    unsafe {
        gpu.hopper.launch(prepare, (row_blocks, 1, 1), prepare_args)?;
        gpu.hopper.launch(bwd, (key_blocks, 1, 1), args)?;
        if let Some(sums) = sums {
            let args = args![sums, dqkv, s.seq, s.heads, s.kv_heads, s.scale()];
            return gpu.hopper.launch(&kernels.finish, (query_tiles, 1, 1), args);
        }
        let tiles = s.seq.div_ceil(queries_groups(s.width) * SQUARE);
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
            s.scale(),
            s.softcap()
        ];
        gpu.hopper.launch(&kernels.queries, (blocks, 1, 1), args)
    }
}
