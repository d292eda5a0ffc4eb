//! Our own attention kernels for a head width, and in tiles of which size they work.
//!
//! Two files hold the same: `attention.cu` on plain float units, for every width and element type, and `attention_mma.cu` on
//! matrix units, for bf16 and widths that are multiples of 16, and for tf32 and multiples of 8, each with a header of its
//! products. For bf16 it has kernels for short sequences and narrow heads, too, whose blocks keep a whole head.

use xlaunch_pool::DType;

use crate::backend::Precision;
use crate::cuda::kernels::{Launch, Source, act_macro, source};
use crate::shapes::AttentionShape;

/// The kernel of both files that does not work in tiles.
const DELTA: &str = "attention_bwd_delta";

const PLAIN: Source = source!("attention.cu");
const MMA_BF16: Source = source!("attention_mma.cu", after "mma_bf16.cuh");
const MMA_TF32: Source = source!("attention_mma.cu", after "mma_tf32.cuh");

/// Kernels for one head width and element type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Path {
    Plain { activations: DType, width: usize },
    Mma { activations: DType, width: usize, tiles: Tiles },
}

/// Rows that a block owns and rows that it looks at in turn: queries and keys, or keys and queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Tiles {
    fwd: (usize, usize),
    bwd_queries: (usize, usize),
    bwd_keys: (usize, usize),
}

/// One of the kernels that keep parts of a head in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Kernel {
    Fwd,
    BwdQueries,
    BwdKeys,
    FwdWhole,
    BwdWhole,
}

/// Bytes of a head's q, k, v and dout that a block keeps at most, and rows of keys or queries that a warp looks at in turn,
/// forward and backward.
const WHOLE_BYTES: usize = 64 << 10;
const WHOLE_COLS: (usize, usize) = (32, 32);

/// Threads of a block of the plain and of the matrix-unit kernels.
const PLAIN_THREADS: u32 = 256;
const MMA_THREADS: u32 = 128;

impl Path {
    /// The fastest path for this width on a device of this compute capability.
    pub(in crate::cuda) fn of(precision: Precision, capability: (i32, i32), width: usize) -> Self {
        let activations = precision.activations();
        let plain = Self::Plain { activations, width };
        let multiple = match precision {
            Precision::Fp32 => return plain,
            Precision::Tf32 => 8,
            Precision::Bf16 => 16,
        };
        if capability.0 < 8 || !width.is_multiple_of(multiple) {
            return plain;
        }
        // The fastest of those tried on an H200, of those that leave the accumulators in a thread's 255 registers and, in
        // tf32, a block within 99 KiB of shared memory, what compute capability 8.6 has.
        let tiles = match (precision, width) {
            (Precision::Bf16, 0..=32) => Tiles { fwd: (128, 128), bwd_queries: (64, 64), bwd_keys: (64, 64) },
            (Precision::Bf16, 33..=64) => {
                Tiles { fwd: (128, 64), bwd_queries: (64, 64), bwd_keys: (128, 32) }
            }
            (Precision::Bf16, 65..=128) => Tiles { fwd: (64, 64), bwd_queries: (64, 32), bwd_keys: (64, 32) },
            (_, 0..=32) => Tiles { fwd: (64, 64), bwd_queries: (128, 32), bwd_keys: (64, 32) },
            (_, 33..=64) => Tiles { fwd: (128, 32), bwd_queries: (128, 32), bwd_keys: (128, 32) },
            (_, 65..=128) => Tiles { fwd: (64, 32), bwd_queries: (64, 16), bwd_keys: (64, 16) },
            _ => return plain,
        };
        Self::Mma { activations, width, tiles }
    }

    /// The file, and the macros it is compiled with.
    pub(in crate::cuda) fn source(self) -> (Source, Vec<String>) {
        match self {
            Self::Plain { activations, width } => {
                (PLAIN, vec![act_macro(activations), format!("WIDTH={width}")])
            }
            Self::Mma { activations, width, tiles: Tiles { fwd, bwd_queries, bwd_keys } } => {
                let mut defines = vec![act_macro(activations), format!("WIDTH={width}")];
                for (name, (rows, cols)) in [("FWD", fwd), ("BWD_Q", bwd_queries), ("BWD_K", bwd_keys)] {
                    defines.extend([format!("{name}_ROWS={rows}"), format!("{name}_COLS={cols}")]);
                }
                if let Some(rows) = self.whole() {
                    let (fwd, bwd) = WHOLE_COLS;
                    defines.push(format!("WHOLE={rows}"));
                    defines.extend([format!("WHOLE_FWD_COLS={fwd}"), format!("WHOLE_BWD_COLS={bwd}")]);
                }
                (if activations == DType::Bf16 { MMA_BF16 } else { MMA_TF32 }, defines)
            }
        }
    }

    /// The file's kernels, and those among them that want shared memory.
    pub(in crate::cuda) fn kernels(self) -> (Vec<&'static str>, Vec<Kernel>) {
        let mut shared = vec![Kernel::Fwd, Kernel::BwdQueries, Kernel::BwdKeys];
        if self.whole().is_some() {
            shared.extend([Kernel::FwdWhole, Kernel::BwdWhole]);
        }
        (shared.iter().map(|kernel| kernel.name()).chain([DELTA]).collect(), shared)
    }

    /// Longest sequence of which a block can keep a head. (With wider heads, sums leave too few registers.)
    fn whole(self) -> Option<usize> {
        match self {
            Self::Mma { activations: DType::Bf16, width: width @ (16 | 32), .. } => {
                Some(WHOLE_BYTES / (4 * width * size_of::<u16>()))
            }
            _ => None,
        }
    }

    /// Whether the kernels for whole heads take this shape.
    pub(in crate::cuda) fn keeps_whole(self, s: AttentionShape) -> bool {
        self.whole().is_some_and(|longest| s.seq <= longest) && s.kv_heads == s.heads
    }

    /// Blocks, threads and shared memory of a kernel.
    pub(in crate::cuda) fn launch(self, kernel: Kernel, s: AttentionShape) -> Launch {
        let (rows, block) = match self {
            Self::Plain { width, .. } => (plain_tile(width), PLAIN_THREADS),
            Self::Mma { tiles, .. } => (tiles.of(kernel).0, MMA_THREADS),
        };
        let grid = match kernel {
            Kernel::Fwd | Kernel::BwdQueries => (s.seq.div_ceil(rows), s.heads, s.batch),
            Kernel::BwdKeys => (s.seq.div_ceil(rows), s.kv_heads, s.batch),
            Kernel::FwdWhole | Kernel::BwdWhole => (s.heads, s.batch, 1),
        };
        Launch { grid, block: (block, 1), shared: self.shared(kernel) }
    }

    /// Blocks and threads of `attention_bwd_delta`.
    pub(in crate::cuda) fn delta_launch(self, rows: usize) -> Launch {
        const THREADS: usize = 256;
        let lanes = match self {
            Self::Plain { .. } => 32,
            Self::Mma { width, .. } => (width / 8).next_power_of_two().max(2),
        };
        Launch::blocks((rows * lanes).div_ceil(THREADS), THREADS as u32)
    }

    /// Bytes of shared memory of a kernel's block.
    pub(in crate::cuda) fn shared(self, kernel: Kernel) -> usize {
        match self {
            Self::Plain { width, .. } => {
                let (tile, tiles) = (plain_tile(width), if kernel == Kernel::Fwd { 3 } else { 4 });
                tile * (tiles * (width + 4) + tile + 4) * size_of::<f32>()
            }
            Self::Mma { activations, width, tiles } => {
                let (rows, cols) = tiles.of(kernel);
                let (held, stats) = match kernel {
                    Kernel::Fwd => (rows + 4 * cols, 0),
                    Kernel::BwdQueries => (2 * rows + 4 * cols, 0),
                    Kernel::BwdKeys => (2 * rows + 4 * cols, 4 * cols),
                    Kernel::FwdWhole => (3 * self.whole().unwrap_or(0), 0),
                    Kernel::BwdWhole => (4 * self.whole().unwrap_or(0), 2 * self.whole().unwrap_or(0)),
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
            Kernel::BwdKeys => self.bwd_keys,
            // They work in no tiles of their own.
            Kernel::FwdWhole | Kernel::BwdWhole => (0, 0),
        }
    }
}

impl Kernel {
    /// Its name in the files.
    pub(in crate::cuda) fn name(self) -> &'static str {
        match self {
            Self::Fwd => "attention_fwd",
            Self::BwdQueries => "attention_bwd_queries",
            Self::BwdKeys => "attention_bwd_keys",
            Self::FwdWhole => "attention_fwd_whole",
            Self::BwdWhole => "attention_bwd_whole",
        }
    }
}

/// TILE in attention.cu.
fn plain_tile(width: usize) -> usize {
    if width <= 64 { 64 } else { 32 }
}
