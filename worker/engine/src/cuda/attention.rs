//! Which attention kernels run for a shape, and in tiles of which size.
//!
//! cuDNN's where it has some (see `cudnn`). Otherwise our own, of which two files hold the same: `attention.cu` on plain
//! float units, for every width and element type, and `attention_mma.cu` on matrix units, for bf16 and widths that are
//! multiples of 16.

use std::rc::Rc;

use xlaunch_pool::DType;

use super::CudaBackend;
use super::cudnn::{AttentionPlan, Direction, Operands};
use super::kernels::{Launch, Source, act_macro, source};
use crate::backend::{Backend, EngineError, Result};
use crate::shapes::AttentionShape;

/// Kernels of both files.
pub(super) const NAMES: [&str; 4] =
    ["attention_fwd", "attention_bwd_delta", "attention_bwd_queries", "attention_bwd_keys"];

const PLAIN: Source = source!("attention.cu");
const MMA: Source = source!("attention_mma.cu");

/// Kernels for one head width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    Plain { width: usize },
    Mma { width: usize, tiles: Tiles },
}

/// Rows that a block owns and rows that it looks at in turn: queries and keys, or keys and queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiles {
    fwd: (usize, usize),
    bwd_queries: (usize, usize),
    bwd_keys: (usize, usize),
}

/// One of the kernels that work in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Fwd,
    BwdQueries,
    BwdKeys,
}

/// Threads of a block of the plain and of the matrix-unit kernels.
const PLAIN_THREADS: u32 = 256;
const MMA_THREADS: u32 = 128;

impl Path {
    /// The fastest path for this width on a device of this compute capability.
    pub(super) fn of(activations: DType, capability: (i32, i32), width: usize) -> Self {
        let fits = activations == DType::Bf16 && capability.0 >= 8 && width.is_multiple_of(16);
        // The fastest of those tried on an H200, of those that leave the accumulators in a thread's 255 registers.
        let tiles = match width {
            0..=32 => Tiles { fwd: (128, 128), bwd_queries: (64, 64), bwd_keys: (64, 64) },
            33..=64 => Tiles { fwd: (128, 64), bwd_queries: (64, 64), bwd_keys: (128, 32) },
            65..=128 => Tiles { fwd: (64, 64), bwd_queries: (64, 32), bwd_keys: (64, 32) },
            _ => return Self::Plain { width },
        };
        if fits { Self::Mma { width, tiles } } else { Self::Plain { width } }
    }

    /// The file, and the macros it is compiled with.
    pub(super) fn source(self, activations: DType) -> (Source, Vec<String>) {
        match self {
            Self::Plain { width } => (PLAIN, vec![act_macro(activations), format!("WIDTH={width}")]),
            Self::Mma { width, tiles: Tiles { fwd, bwd_queries, bwd_keys } } => {
                let mut defines = vec![act_macro(activations), format!("WIDTH={width}")];
                for (name, (rows, cols)) in [("FWD", fwd), ("BWD_Q", bwd_queries), ("BWD_K", bwd_keys)] {
                    defines.extend([format!("{name}_ROWS={rows}"), format!("{name}_COLS={cols}")]);
                }
                (MMA, defines)
            }
        }
    }

    /// Blocks, threads and shared memory of a kernel; `heads` are those of queries or of keys.
    pub(super) fn launch(self, kernel: Kernel, s: AttentionShape, heads: usize) -> Launch {
        let (rows, block) = match self {
            Self::Plain { width } => (plain_tile(width), PLAIN_THREADS),
            Self::Mma { tiles, .. } => (tiles.of(kernel).0, MMA_THREADS),
        };
        let grid = (s.seq.div_ceil(rows), heads, s.batch);
        Launch { grid, block: (block, 1), shared: self.shared(kernel) }
    }

    /// Blocks and threads of `attention_bwd_delta`.
    pub(super) fn delta_launch(self, rows: usize) -> Launch {
        const THREADS: usize = 256;
        let lanes = match self {
            Self::Plain { .. } => 32,
            Self::Mma { width, .. } => (width / 8).next_power_of_two().max(2),
        };
        Launch::blocks((rows * lanes).div_ceil(THREADS), THREADS as u32)
    }

    /// Bytes of shared memory of a kernel's block.
    pub(super) fn shared(self, kernel: Kernel) -> usize {
        match self {
            Self::Plain { width } => {
                let (tile, tiles) = (plain_tile(width), if kernel == Kernel::Fwd { 3 } else { 4 });
                tile * (tiles * (width + 4) + tile + 4) * size_of::<f32>()
            }
            Self::Mma { width, tiles } => {
                let (rows, cols) = tiles.of(kernel);
                let owned = if kernel == Kernel::Fwd { rows } else { 2 * rows };
                let stats = if kernel == Kernel::BwdKeys { 4 * cols * size_of::<f32>() } else { 0 };
                (owned + 4 * cols) * width * size_of::<u16>() + stats
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
        }
    }
}

impl Kernel {
    /// Its name in both files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fwd => "attention_fwd",
            Self::BwdQueries => "attention_bwd_queries",
            Self::BwdKeys => "attention_bwd_keys",
        }
    }
}

impl CudaBackend {
    /// cuDNN's plan, where it is the way to go.
    pub(super) fn cudnn_plan(&self, s: AttentionShape, direction: Direction) -> Option<Rc<AttentionPlan>> {
        let plan = match &self.cudnn {
            Ok(cudnn) => cudnn.plan(s, direction),
            Err(reason) => Err(reason.clone()),
        };
        let own = match self.kernels.attention(s.width) {
            Path::Mma { .. } => "own kernels on matrix units",
            Path::Plain { .. } => "own kernels on plain units",
        };
        let (path, instead_of) = match &plan {
            Ok(_) => ("cuDNN", None),
            Err(reason) => (own, Some(("cuDNN", reason.as_str()))),
        };
        self.fallback.took(direction.operation(), s, path, instead_of);
        plan.ok()
    }

    /// Enqueues cuDNN's plan.
    ///
    /// # Safety
    /// The operands are addresses of what the operation of the plan's direction and shape has.
    pub(super) unsafe fn cudnn_execute(
        &self,
        plan: &AttentionPlan,
        direction: Direction,
        operands: &Operands,
    ) -> Result<()> {
        let operation = direction.operation();
        let failed =
            |reason| EngineError::Cuda { what: format!("failed to enqueue cuDNN's {operation}"), reason };
        let cudnn = self.cudnn.as_ref().map_err(|reason| failed(reason.clone()))?;
        let scratch = self.alloc(DType::U8, plan.scratch)?;
        self.device.profiler.time(
            &self.device.stream,
            || format!("{operation} by cuDNN"),
            // SAFETY: the plan is of this library; the scratch memory is as large as it wants; the rest is the caller's
            // promise.
            || unsafe { cudnn.execute(plan, operands, scratch.all().address()) }.map_err(failed),
        )
    }
}

impl Direction {
    fn operation(self) -> &'static str {
        match self {
            Self::Forward => "attention_fwd",
            Self::Backward => "attention_bwd",
        }
    }
}

/// TILE in attention.cu.
fn plain_tile(width: usize) -> usize {
    if width <= 64 { 64 } else { 32 }
}
