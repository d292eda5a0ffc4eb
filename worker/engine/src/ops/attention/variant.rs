//! This crate's attention kernels for a head width, and their tile sizes.
//!
//! Two sets of kernels compute the same function: `kernel.cu` on FP32 units, for every width and element type, and
//! `mma_*.cu` on tensor cores, for bf16 with widths that are multiples of 16 and for tf32 with multiples of 8. For bf16
//! the latter set also has kernels for short sequences and narrow heads, whose blocks keep a whole head in shared
//! memory.

use xlaunch_pool::DType;

use super::{AttentionOptions, AttentionShape};
use crate::cuda::{Launch, Macro, Source, VEC, source};
use crate::options::Precision;

/// Name of the only kernel that does not work in tiles; all others are a [`Kernel`].
pub(super) const DELTA: &str = "attention_bwd_delta";

const FP32: Source = source!("attention/kernel.cu", after "attention/qkv.cuh");
const MMA_TF32: Source = source!(
    "attention/mma_tiled.cu",
    after "attention/qkv.cuh", after "../cuda/headers/mma_tf32.cuh", after "attention/mma_common.cuh"
);
const MMA_BF16: Source = source!(
    "attention/mma_tiled.cu",
    after "attention/qkv.cuh", after "../cuda/headers/mma_bf16.cuh", after "attention/mma_common.cuh"
);
const MMA_TF32_WIDE: Source = source!(
    "attention/mma_values.cu",
    after "attention/qkv.cuh", after "../cuda/headers/mma_tf32.cuh", after "attention/mma_common.cuh",
    after "attention/mma_tiled.cu"
);
const MMA_BF16_WIDE: Source = source!(
    "attention/mma_values.cu",
    after "attention/qkv.cuh", after "../cuda/headers/mma_bf16.cuh", after "attention/mma_common.cuh",
    after "attention/mma_tiled.cu"
);
const MMA_BF16_WHOLE_HEAD: Source = source!(
    "attention/mma_whole_head.cu",
    after "attention/qkv.cuh", after "../cuda/headers/mma_bf16.cuh", after "attention/mma_common.cuh",
    after "attention/mma_tiled.cu"
);

/// Kernels for one head width, element type of activations and kind of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OwnKernels {
    Fp32 { width: usize, scores: Scores },
    Mma { activations: DType, width: usize, scores: Scores, tiles: Tiles },
}

/// Options of the scores for which kernels are compiled. Others are arguments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Scores {
    windowed: bool,
    capped: bool,
    documents: bool,
}

impl From<AttentionOptions> for Scores {
    fn from(options: AttentionOptions) -> Self {
        let AttentionOptions { window, softcap, documents, .. } = options;
        Self { windowed: window.is_some(), capped: softcap.is_some(), documents }
    }
}

impl Scores {
    /// All kinds, plain ones first.
    pub(crate) const ALL: [Self; 8] = {
        let mut all = [Self { windowed: false, capped: false, documents: false }; 8];
        let mut kind = 0;
        while kind < all.len() {
            all[kind] = Self { windowed: kind & 1 != 0, capped: kind & 2 != 0, documents: kind & 4 != 0 };
            kind += 1;
        }
        all
    };

    fn macros(self) -> [Macro; 3] {
        let Self { windowed, capped, documents } = self;
        [("WINDOWED", windowed), ("CAPPED", capped), ("DOCUMENTS", documents)]
            .map(|(name, is_set)| Macro::int(name, usize::from(is_set)))
    }
}

/// Number of rows that a block owns, and number of rows of the other operand that it visits at a time. These are
/// queries and keys, or keys and queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tiles {
    fwd: (usize, usize),
    bwd_queries: (usize, usize),
    bwd_keys: (usize, usize),
    threads: u32,
    /// True if dv has a separate kernel, because its accumulators and those of dk exceed a thread's registers.
    separate_values: bool,
}

/// A kernel that keeps parts of a head in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Fwd,
    BwdQueries,
    BwdKeys,
    BwdValues,
    FwdWholeHead,
    BwdWholeHead,
}

/// Maximum size in bytes of a head's q, k, v and dout that a block keeps.
const WHOLE_HEAD_BYTES: usize = 64 << 10;
/// Number of keys or queries that a warp of the whole-head kernels visits at a time, in forward and backward.
const WHOLE_HEAD_COLS: (usize, usize) = (32, 16);

/// Threads of a block of the FP32 kernels.
const FP32_THREADS: u32 = 256;
/// Threads of a block of the delta kernels. The FP32 one is compiled with the same THREADS as the others in its file.
const DELTA_THREADS: u32 = FP32_THREADS;
/// Extra floats per row of the FP32 kernels' tiles in shared memory.
const ROW_PADDING: usize = 4;

impl OwnKernels {
    /// Selects the fastest kernels for this width and these scores on a device of this compute capability.
    pub(crate) fn select(precision: Precision, capability: (i32, i32), width: usize, scores: Scores) -> Self {
        let activations = precision.activations();
        let plain = Self::Fp32 { width, scores };
        let multiple = match precision {
            Precision::Fp32 => return plain,
            Precision::Tf32 => 8,
            Precision::Bf16 => 16,
        };
        if capability.0 < 8 || !width.is_multiple_of(multiple) {
            return plain;
        }
        // The fastest tile sizes among those tried on an H200 that keep the accumulators in a thread's 255 registers
        // and a block within 99 KiB of shared memory, the limit of compute capability 8.6.
        let (threads, fwd, bwd_queries, bwd_keys) = match (precision, width) {
            (Precision::Bf16, 0..=32) => (128, (128, 128), (64, 64), (64, 64)),
            (Precision::Bf16, 33..=64) => (128, (128, 64), (64, 64), (128, 32)),
            (Precision::Bf16, 65..=128) => (128, (64, 64), (64, 32), (64, 32)),
            (Precision::Bf16, 129..=256) => (128, (64, 32), (64, 16), (64, 16)),
            (_, 0..=32) => (128, (64, 64), (128, 32), (64, 32)),
            (_, 33..=64) => (128, (128, 32), (128, 32), (128, 32)),
            (_, 65..=128) => (128, (64, 32), (64, 16), (64, 16)),
            (_, 129..=256) => (64, (32, 16), (32, 8), (32, 8)),
            _ => return plain,
        };
        let tiles = Tiles { fwd, bwd_queries, bwd_keys, threads, separate_values: width > 128 };
        Self::Mma { activations, width, scores, tiles }
    }

    /// Returns the source, and the macros that it is compiled with.
    pub(crate) fn source(self) -> (Source, Vec<Macro>) {
        let (activations, width, scores, tiles) = match self {
            Self::Fp32 { width, scores } => {
                let mut macros = vec![
                    Macro::int("WIDTH", width),
                    Macro::int("THREADS", FP32_THREADS as usize),
                    Macro::int("TILE", fp32_tile(width)),
                    Macro::int("ROW_PADDING", ROW_PADDING),
                    Macro::int("DELTA_LANES", self.delta_lanes()),
                ];
                macros.extend(scores.macros());
                return (FP32, macros);
            }
            Self::Mma { activations, width, scores, tiles } => (activations, width, scores, tiles),
        };
        let mut macros = vec![
            Macro::int("WIDTH", width),
            Macro::int("THREADS", tiles.threads as usize),
            Macro::int("FWD_ROWS", tiles.fwd.0),
            Macro::int("FWD_COLS", tiles.fwd.1),
            Macro::int("BWD_Q_ROWS", tiles.bwd_queries.0),
            Macro::int("BWD_Q_COLS", tiles.bwd_queries.1),
            Macro::int("BWD_K_ROWS", tiles.bwd_keys.0),
            Macro::int("BWD_K_COLS", tiles.bwd_keys.1),
            Macro::int("SEPARATE_VALUES", usize::from(tiles.separate_values)),
            Macro::int("DELTA_LANES", self.delta_lanes()),
        ];
        macros.extend(scores.macros());
        let Some(seq) = self.max_whole_head_seq() else {
            let source = match (activations, tiles.separate_values) {
                (DType::Bf16, false) => MMA_BF16,
                (DType::Bf16, true) => MMA_BF16_WIDE,
                (_, false) => MMA_TF32,
                (_, true) => MMA_TF32_WIDE,
            };
            return (source, macros);
        };
        macros.extend([
            Macro::int("MAX_SEQ", seq),
            Macro::int("WHOLE_FWD_COLS", WHOLE_HEAD_COLS.0),
            Macro::int("WHOLE_BWD_COLS", WHOLE_HEAD_COLS.1),
        ]);
        (MMA_BF16_WHOLE_HEAD, macros)
    }

    /// Returns the name in logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mma { .. } => "own kernels on tensor cores",
            Self::Fp32 { .. } => "own kernels on FP32 units",
        }
    }

    /// Returns the source's kernels, and those among them that use dynamic shared memory.
    pub(crate) fn kernels(self) -> (Vec<&'static str>, Vec<Kernel>) {
        let mut shared = vec![Kernel::Fwd, Kernel::BwdQueries, Kernel::BwdKeys];
        if self.has_separate_values() {
            shared.push(Kernel::BwdValues);
        }
        if self.max_whole_head_seq().is_some() {
            shared.extend([Kernel::FwdWholeHead, Kernel::BwdWholeHead]);
        }
        (shared.iter().map(|kernel| kernel.name()).chain([DELTA]).collect(), shared)
    }

    /// Returns whether [`Kernel::BwdKeys`] leaves dv to [`Kernel::BwdValues`].
    pub(crate) fn has_separate_values(self) -> bool {
        matches!(self, Self::Mma { tiles, .. } if tiles.separate_values)
    }

    /// Returns the longest sequence whose heads fit into a block, for plain scores. Wider heads leave too few registers
    /// for the accumulators.
    fn max_whole_head_seq(self) -> Option<usize> {
        match self {
            Self::Mma { scores, .. } if scores != Scores::default() => None,
            Self::Mma { activations: DType::Bf16, width: width @ (16 | 32), .. } => {
                Some(WHOLE_HEAD_BYTES / (4 * width * size_of::<u16>()))
            }
            _ => None,
        }
    }

    /// Returns whether the whole-head kernels support this shape.
    pub(crate) fn keeps_whole_head(self, s: AttentionShape) -> bool {
        self.max_whole_head_seq().is_some_and(|longest| s.seq <= longest) && s.kv_heads == s.heads
    }

    /// Returns blocks, threads and shared memory of a kernel.
    pub(crate) fn launch(self, kernel: Kernel, s: AttentionShape) -> Launch {
        let (rows, block) = match self {
            Self::Fp32 { width, .. } => (fp32_tile(width), FP32_THREADS),
            Self::Mma { tiles, .. } => (tiles.of(kernel).0, tiles.threads),
        };
        let grid = match kernel {
            Kernel::Fwd | Kernel::BwdQueries => (s.seq.div_ceil(rows), s.heads, s.batch),
            Kernel::BwdKeys | Kernel::BwdValues => (s.seq.div_ceil(rows), s.kv_heads, s.batch),
            Kernel::FwdWholeHead | Kernel::BwdWholeHead => (s.heads, s.batch, 1),
        };
        Launch { grid, block: (block, 1), shared: self.shared(kernel) }
    }

    /// Returns blocks and threads of [`DELTA`] for `rows` rows of a head.
    pub(crate) fn delta_launch(self, rows: usize) -> Launch {
        Launch::threads(rows * self.delta_lanes(), DELTA_THREADS)
    }

    /// Returns the number of threads per row of [`DELTA`], a power of two that divides the warp size: 32 in the FP32
    /// kernels, otherwise one per vector.
    fn delta_lanes(self) -> usize {
        match self {
            Self::Fp32 { .. } => 32,
            Self::Mma { width, .. } => (width / VEC).next_power_of_two().max(2),
        }
    }

    /// Returns the size in bytes of the shared memory of a kernel's block.
    pub(crate) fn shared(self, kernel: Kernel) -> usize {
        match self {
            Self::Fp32 { width, .. } => {
                let (tile, tiles) = (fp32_tile(width), if kernel == Kernel::Fwd { 3 } else { 4 });
                tile * (tiles * (width + ROW_PADDING) + tile + ROW_PADDING) * size_of::<f32>()
            }
            Self::Mma { activations, width, tiles, .. } => {
                let (rows, cols) = tiles.of(kernel);
                let seq = self.max_whole_head_seq().unwrap_or(0);
                // Rows of WIDTH activations, and floats for lse and delta. Visited tiles are double-buffered.
                let (held, stats) = match kernel {
                    Kernel::Fwd => (rows + 4 * cols, 0),
                    Kernel::BwdQueries => (2 * rows + 4 * cols, 0),
                    Kernel::BwdKeys | Kernel::BwdValues => (2 * rows + 4 * cols, 4 * cols),
                    Kernel::FwdWholeHead => (3 * seq, 0),
                    Kernel::BwdWholeHead => (4 * seq, 2 * seq),
                };
                held * width * activations.size() + stats * size_of::<f32>()
            }
        }
    }
}

impl Tiles {
    fn of(self, kernel: Kernel) -> (usize, usize) {
        match kernel {
            Kernel::Fwd => self.fwd,
            Kernel::BwdQueries => self.bwd_queries,
            Kernel::BwdKeys | Kernel::BwdValues => self.bwd_keys,
            // These kernels have no tiles of their own.
            Kernel::FwdWholeHead | Kernel::BwdWholeHead => (0, 0),
        }
    }
}

impl Kernel {
    /// Returns the name in the source.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fwd => "attention_fwd",
            Self::BwdQueries => "attention_bwd_queries",
            Self::BwdKeys => "attention_bwd_keys",
            Self::BwdValues => "attention_bwd_values",
            Self::FwdWholeHead => "attention_fwd_whole",
            Self::BwdWholeHead => "attention_bwd_whole",
        }
    }
}

/// Returns the number of rows and columns of a tile of the FP32 kernels.
fn fp32_tile(width: usize) -> usize {
    if width <= 64 { 64 } else { 32 }
}
