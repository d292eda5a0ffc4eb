//! What a trainer needs of a collective library.

use std::fmt;
use std::sync::Arc;

use xlaunch_pool::{DType, Lease as Loan};

/// Result of a collective call.
pub type Result<T> = std::result::Result<T, CommError>;

/// What can go wrong between ranks.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// NCCL is not on this host.
    #[error("failed to load NCCL: looked for {looked_for}")]
    Library {
        /// Names and places tried.
        looked_for: String,
    },
    /// NCCL reported an error.
    #[error("{what}: NCCL says {reason}")]
    Nccl {
        /// What was tried.
        what: &'static str,
        /// In NCCL's words.
        reason: String,
    },
    /// The CUDA driver reported an error.
    #[error("{what}: CUDA says {reason}")]
    Cuda {
        /// What was tried.
        what: &'static str,
        /// In the driver's words.
        reason: String,
    },
    /// A neighbour is gone or speaks another language.
    #[error("lost the connection to rank {peer}: {reason}")]
    PeerLost {
        /// The neighbour.
        peer: usize,
        /// How it showed.
        reason: String,
    },
    /// [`AbortHandle::abort`] was called.
    #[error("the collective was aborted")]
    Aborted,
}

/// Sums and copies over all ranks. Every rank makes the same calls in the same order.
///
/// They run beside the caller's own work: on a second CUDA stream or a second thread. What is lent to them comes back at
/// [`finish`](Self::finish).
pub trait Collective: Send + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// Lets all ranks work directly on each other's segment of the pool that this buffer lies in, until the collective ends;
    /// the block is kept that long. Lend `0..0` of a buffer from [`Pool::registered`](xlaunch_pool::Pool::registered): it
    /// overlaps no loan of what is summed there. Every rank calls it for the same buffers of the same pool requests in the
    /// same order, before anything is captured. False, on all ranks alike, where nothing is gained: sums are formed
    /// as they were.
    ///
    /// # Errors
    /// A rank that is refused alone cannot go on without the others, who wait for it: it fails, and they are aborted.
    fn register(&mut self, memory: Loan) -> Result<bool>;

    /// Starts the sum of the lent elements (F32 or Bf16), in place, ordered after all work given to the compute stream so
    /// far. Every rank ends with the same bytes.
    fn all_reduce(&mut self, elements: Loan, dtype: DType) -> Result<()>;

    /// Starts the same sum, of which this rank gets its part: of as many equal parts of `from` as there are ranks, that of
    /// the rank's number, in `into`. What `from` holds afterwards is unspecified. For two ranks and more.
    fn reduce_scatter(&mut self, from: Loan, into: Loan, dtype: DType) -> Result<()>;

    /// Starts the copy of every rank's `from` to all ranks: to the part of `into` of the rank's number, of as many equal
    /// parts as there are ranks. For two ranks and more.
    fn all_gather(&mut self, from: Loan, into: Loan) -> Result<()>;

    /// Orders the first of the [`all_gather`](Self::all_gather)s since the last [`finish`](Self::finish), which then is the
    /// first no more, before all work given to the compute stream from now on, and returns its loans. Nothing where there
    /// is none.
    fn finish_gather(&mut self) -> Result<()>;

    /// Starts the copy of `root`'s elements to all ranks.
    fn broadcast(&mut self, elements: Loan, root: usize) -> Result<()>;

    /// Orders everything started before all work given to the compute stream from now on, and returns the loans.
    /// On the CPU this waits; on a GPU it only enqueues.
    fn finish(&mut self) -> Result<()>;

    /// Fails if a sum under way has failed or was aborted: results read back before this are not to be used.
    fn check(&self) -> Result<()>;

    /// For another thread, to make calls under way return [`CommError::Aborted`] when a peer is known to be gone.
    fn abort_handle(&self) -> AbortHandle;

    /// Ends in agreement: every rank calls it when all its sums are finished.
    fn finalize(self: Box<Self>) -> Result<()>;
}

/// Panics unless `whole` is as long as one `part` per rank: the caller's mistake.
pub(crate) fn expect_parts(whole: &Loan, part: &Loan, world: usize) {
    let (whole, part) = (whole.bytes(), part.bytes());
    assert!(world > 1 && whole == part * world, "{whole} bytes in {world} parts of {part}");
}

/// Aborts a collective from any thread, any number of times.
#[derive(Clone)]
pub struct AbortHandle(Arc<dyn Fn() + Send + Sync>);

impl AbortHandle {
    /// Calls `abort` when used.
    pub fn new(abort: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(abort))
    }

    /// Makes calls under way, and all later ones, fail.
    pub fn abort(&self) {
        (self.0)();
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortHandle")
    }
}
