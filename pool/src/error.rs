//! Errors of a pool, and the report of a pool that ran out of memory.

use std::fmt;
use std::path::PathBuf;

use crate::backing::DriverFailure;
use crate::core::{AllocError, Site};
use crate::stats::fragmentation;
use crate::stream::{MAX_STREAMS, StreamId};

/// A call that failed. The pool stays usable.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The request exceeds the address range.
    #[error("cannot allocate {requested} bytes: more than the address range of the pool")]
    TooLarge {
        /// Bytes requested; `u64::MAX` if the size overflows.
        requested: u64,
    },
    /// There is no memory for the request.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
    /// A driver call failed for a reason other than lack of memory.
    #[error("cannot use device memory: {0}")]
    Driver(#[from] DriverFailure),
    /// Debug mode found bytes that were overwritten.
    #[error(transparent)]
    Corrupted(Box<Corruption>),
    /// The pool has [`MAX_STREAMS`] streams already.
    #[error("cannot add a stream: a pool has at most {MAX_STREAMS}")]
    TooManyStreams,
    /// A planned buffer is for work of one stream only.
    #[error("cannot record a use by another stream: the address of the buffer is planned for one stream")]
    PlannedBuffer,
    /// The call needs the pool's allocator, or its CUDA streams, and the pool has none.
    #[error("not supported: the pool is off, or not a pool of CUDA memory")]
    Off,
}

impl PoolError {
    /// Converts the error of a call that requests no buffer, so there is no report to attach.
    pub(crate) fn without_report(error: AllocError) -> Self {
        match error {
            AllocError::Driver(failure) => Self::Driver(failure),
            AllocError::TooLarge { bytes } | AllocError::Limit { needed: bytes, .. } => {
                Self::TooLarge { requested: bytes }
            }
        }
    }
}

/// Report of a request that found no memory. [`Display`](fmt::Display) prints all of it, including what would have made
/// the request succeed.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// Bytes requested.
    pub requested: u64,
    /// Stream for which the request was made.
    pub stream: StreamId,
    /// Origin of the request.
    pub site: Option<Site>,
    /// Final reason of the failure.
    pub cause: AllocError,
    /// Bytes of live buffers.
    pub live: u64,
    /// Bytes allocated from the driver.
    pub mapped: u64,
    /// Bytes that the program reserved for other libraries.
    pub external: u64,
    /// The limit in bytes, if there is one.
    pub limit: Option<u64>,
    /// Free and total bytes of the device, if the driver reports them.
    pub device: Option<(u64, u64)>,
    /// Size of the largest free block in bytes.
    pub largest_free: u64,
    /// Free bytes that work of other streams may still use, by stream.
    pub pending: Vec<(StreamId, u64)>,
    /// The sites that hold the most memory, largest first: bytes, number of buffers, site.
    pub top: Vec<(u64, u64, Option<Site>)>,
    /// The snapshot that was written, if [`Pool::snapshot_on_failure`](crate::Pool::snapshot_on_failure) named a
    /// directory.
    pub snapshot: Option<PathBuf>,
}

impl OutOfMemory {
    /// Returns the mapped bytes that are not live.
    pub fn free(&self) -> u64 {
        self.mapped - self.live
    }

    /// Returns what would have made the request succeed.
    fn advice(&self) -> String {
        match &self.cause {
            AllocError::Limit { needed, limit } => {
                let over = (self.mapped + self.external + needed).saturating_sub(*limit);
                format!("raise the limit by {}, or free as much in one block", human(over))
            }
            // Of the device's free memory, the driver keeps a part for itself.
            _ => format!("free {0} in one block, or make {0} available on the device", human(self.requested)),
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory: cannot allocate {} at {}", human(self.requested), SiteName(self.site))?;
        if self.stream != StreamId::default() {
            write!(f, " for stream {}", self.stream.index())?;
        }
        write!(f, ": {}", self.cause)?;
        write!(
            f,
            "\n  live {}, mapped {}, largest free block {} of {} free (fragmentation {:.0} %)",
            human(self.live),
            human(self.mapped),
            human(self.largest_free),
            human(self.free()),
            100.0 * fragmentation(self.free(), self.largest_free)
        )?;
        if self.external > 0 {
            write!(f, ", external {}", human(self.external))?;
        }
        if let Some(limit) = self.limit {
            write!(f, ", limit {}", human(limit))?;
        }
        if let Some((free, total)) = self.device {
            write!(f, "\n  device memory: {} free of {}", human(free), human(total))?;
        }
        for (stream, bytes) in &self.pending {
            write!(f, "\n  {} free but pending on stream {}", human(*bytes), stream.index())?;
        }
        if !self.top.is_empty() {
            write!(f, "\n  largest holders:")?;
        }
        for (bytes, buffers, site) in &self.top {
            write!(f, "\n    {:>10}  {buffers:>6} buffers  {}", human(*bytes), SiteName(*site))?;
        }
        if let Some(path) = &self.snapshot {
            write!(f, "\n  snapshot for PyTorch's memory_viz: {}", path.display())?;
        }
        write!(f, "\n  help: {}", self.advice())
    }
}

impl std::error::Error for OutOfMemory {}

/// Report of overwritten memory, from debug mode.
#[derive(Clone, Debug)]
pub struct Corruption {
    /// Kind of the overwritten memory.
    pub kind: CorruptionKind,
    /// Position of the first overwritten byte, from the start of the buffer.
    pub offset: u64,
    /// Bytes requested for the buffer.
    pub requested: u64,
    /// Site that allocated the buffer.
    pub allocated: Option<Site>,
    /// Site of the drop of the buffer, as `file:line:column`, if the program has debug information.
    pub freed: String,
}

/// Kinds of [`Corruption`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorruptionKind {
    /// A buffer was written to after it was dropped.
    UseAfterFree,
    /// Bytes past the end of a buffer were written.
    Overrun,
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            CorruptionKind::UseAfterFree => "written to after it was freed",
            CorruptionKind::Overrun => "written past its end",
        };
        write!(
            f,
            "memory corruption: a buffer of {} was {what}, at byte {}\n  allocated at {}\n  freed at {}",
            human(self.requested),
            self.offset,
            SiteName(self.allocated),
            self.freed
        )
    }
}

impl std::error::Error for Corruption {}

/// A site as `tag (file:line:column)`.
struct SiteName(Option<Site>);

impl fmt::Display for SiteName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(Site { location, tag: "" }) => write!(f, "{location}"),
            Some(Site { location, tag }) => write!(f, "{tag} ({location})"),
            None => f.write_str("an unknown site"),
        }
    }
}

/// A size with a binary unit.
#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
fn human(bytes: u64) -> String {
    let bytes_f = bytes as f64;
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{:.1} KiB", bytes_f / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes_f / 1_048_576.0),
        _ => format!("{:.2} GiB", bytes_f / 1_073_741_824.0),
    }
}
