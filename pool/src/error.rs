//! What a pool refuses, and the report of a pool that has no memory left.

use std::fmt;
use std::path::PathBuf;

use crate::backing::DriverFailure;
use crate::core::{Refusal, Site, StreamId};

/// A request that could not be served. The pool stays usable.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The size does not fit the address range.
    #[error("a buffer of {requested} bytes is larger than any address range")]
    TooLarge {
        /// Bytes asked for; `u64::MAX` stands for more than can be counted.
        requested: u64,
    },
    /// There is no memory for it.
    #[error(transparent)]
    OutOfMemory(Box<OutOfMemory>),
    /// A driver call failed that has nothing to do with the amount of memory.
    #[error("the device's memory cannot be used: {0}")]
    Driver(#[from] DriverFailure),
    /// Debug mode found memory changed that nobody should have written.
    #[error(transparent)]
    Corrupted(Box<Corruption>),
    /// All numbers for streams are taken.
    #[error("a pool tells at most {} streams apart", crate::core::MAX_STREAMS)]
    TooManyStreams,
    /// The buffer's place is planned, for one stream alone.
    #[error("a buffer whose place is planned is for one stream alone")]
    PlannedBuffer,
    /// What was asked needs the pool's allocator, and the pool is off.
    #[error("the pool is off")]
    Off,
}

impl PoolError {
    /// A refusal of something that is no request for a buffer.
    pub(crate) fn without_report(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Driver(failure) => Self::Driver(failure),
            Refusal::TooLarge { bytes } | Refusal::Limit { needed: bytes, .. } => {
                Self::TooLarge { requested: bytes }
            }
        }
    }
}

/// Why a request found no memory, and what would have made it fit.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub requested: u64,
    /// Whose work they were for.
    pub stream: StreamId,
    /// Who asked.
    pub site: Option<Site>,
    /// What stood against it in the end.
    pub refusal: Refusal,
    /// Bytes in buffers.
    pub live: u64,
    /// Bytes held from the driver.
    pub mapped: u64,
    /// Bytes that others registered.
    pub external: u64,
    /// The limit, if there is one.
    pub limit: Option<u64>,
    /// Free and total bytes of the device, if it tells.
    pub device: Option<(u64, u64)>,
    /// The longest free block.
    pub largest_free: u64,
    /// Free bytes that other streams' work stands against, by stream.
    pub pending: Vec<(StreamId, u64)>,
    /// Who holds most: bytes, buffers, site.
    pub top: Vec<(u64, u64, Option<Site>)>,
    /// The snapshot written, if a place for it was given.
    pub snapshot: Option<PathBuf>,
}

impl OutOfMemory {
    /// Free bytes of what is mapped.
    pub fn free(&self) -> u64 {
        self.mapped - self.live
    }

    /// What would have made the request fit.
    fn advice(&self) -> String {
        let more = |bytes| human(bytes);
        match &self.refusal {
            Refusal::Limit { needed, limit } => {
                let over = (self.mapped + self.external + needed).saturating_sub(*limit);
                format!("a limit higher by {}, or as much freed in one piece", more(over))
            }
            _ => {
                let missing = self.requested.saturating_sub(self.largest_free);
                let device = self.device.map_or(0, |(free, _)| free);
                let missing = missing.saturating_sub(device).max(1);
                format!("{} more free on the device, or as much freed in one piece", more(missing))
            }
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory: {} asked for by {}", human(self.requested), At(self.site))?;
        if self.stream != StreamId::default() {
            write!(f, " on stream {}", self.stream.0)?;
        }
        write!(f, "\n  {}", self.refusal)?;
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
            write!(f, ", held by others {}", human(self.external))?;
        }
        if let Some(limit) = self.limit {
            write!(f, ", limit {}", human(limit))?;
        }
        if let Some((free, total)) = self.device {
            write!(f, "\n  the device has {} free of {}", human(free), human(total))?;
        }
        for (stream, bytes) in &self.pending {
            write!(f, "\n  {} wait for work of stream {}", human(*bytes), stream.0)?;
        }
        if !self.top.is_empty() {
            write!(f, "\n  most is held by")?;
        }
        for (bytes, buffers, site) in &self.top {
            write!(f, "\n    {:>10}  {buffers:>6} buffers  {}", human(*bytes), At(*site))?;
        }
        write!(f, "\n  it would have fitted with {}", self.advice())?;
        if let Some(path) = &self.snapshot {
            write!(f, "\n  snapshot for PyTorch's memory_viz: {}", path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for OutOfMemory {}

/// Memory that was written by somebody whom it did not belong to.
#[derive(Clone, Debug)]
pub struct Corruption {
    /// What happened.
    pub kind: CorruptionKind,
    /// How far into the buffer.
    pub offset: u64,
    /// Bytes the buffer was asked with.
    pub requested: u64,
    /// Who had asked for the buffer.
    pub allocated: Option<Site>,
    /// Where it was dropped, as far as the program's symbols tell.
    pub freed: String,
}

/// Kinds of [`Corruption`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorruptionKind {
    /// A freed buffer was written to.
    UseAfterFree,
    /// Bytes behind a buffer's end were written.
    Overrun,
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            CorruptionKind::UseAfterFree => "written to after it was freed",
            CorruptionKind::Overrun => "written behind its end",
        };
        write!(
            f,
            "a buffer of {} was {what}, at byte {}\n  allocated by {}\n  freed at {}",
            human(self.requested),
            self.offset,
            At(self.allocated),
            self.freed
        )
    }
}

impl std::error::Error for Corruption {}

/// Share of the free bytes that the longest free block cannot serve.
#[expect(clippy::cast_precision_loss, reason = "a share, shown with a few digits")]
pub(crate) fn fragmentation(free: u64, largest: u64) -> f64 {
    if free == 0 { 0.0 } else { 1.0 - largest as f64 / free as f64 }
}

/// A site in words.
struct At(Option<Site>);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(Site { location, tag: "" }) => write!(f, "{location}"),
            Some(Site { location, tag }) => write!(f, "{tag} ({location})"),
            None => f.write_str("an unknown site"),
        }
    }
}

/// Bytes for people.
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
