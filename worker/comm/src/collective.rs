//! The [`Collective`] trait, its operations, errors and abort handle.

use std::fmt;
use std::sync::Arc;

use xlaunch_pool::{DType, Lease};

/// Result of a collective call.
pub type Result<T> = std::result::Result<T, CommError>;

/// Errors of communication between ranks.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// NCCL is not on this host.
    #[error("failed to load NCCL: looked for {looked_for}")]
    Library {
        /// Names and locations that were tried.
        looked_for: String,
    },
    /// NCCL reported an error.
    #[error("{what}: NCCL says {reason}")]
    Nccl {
        /// The operation that failed.
        what: &'static str,
        /// NCCL's error text.
        reason: String,
    },
    /// The CUDA driver reported an error.
    #[error("{what}: CUDA says {reason}")]
    Cuda {
        /// The operation that failed.
        what: &'static str,
        /// The driver's error text.
        reason: String,
    },
    /// A ring neighbour closed its connection, never connected, or violated the protocol.
    #[error("lost the connection to rank {peer}: {reason}")]
    PeerLost {
        /// The neighbour.
        peer: usize,
        /// The observed failure.
        reason: String,
    },
    /// Two ranks are in different collectives: one of them has skipped a collective.
    #[error("rank {peer} and this rank are in different collectives: {reason}")]
    Disagree {
        /// The neighbour.
        peer: usize,
        /// The collective of each of the two.
        reason: String,
    },
    /// [`AbortHandle::abort`] was called.
    #[error("the collective was aborted")]
    Aborted,
}

/// A collective operation. Memory is leased to it when it is started, and the leases end when it has been waited for.
#[derive(Debug)]
pub enum Operation {
    /// An in-place sum over ranks of the elements (F32 or Bf16) of each bucket. Every rank ends with the same bytes.
    AllReduce { buckets: Vec<Lease>, dtype: DType },
    /// A sum like that of `AllReduce`, of which each rank gets one shard: the first lease of a bucket is cut into one
    /// shard per rank, and shard `rank` is written to the second lease. Shards are equal, except that the last one may
    /// be longer. The contents of the first lease are unspecified afterwards.
    ReduceScatter { buckets: Vec<[Lease; 2]>, dtype: DType },
    /// Copies every rank's shard, the first lease of a bucket, to all ranks, into shard `rank` of the second lease.
    AllGather { buckets: Vec<[Lease; 2]> },
    /// Copies the elements of rank `root` to all ranks.
    Broadcast { elements: Lease, root: usize },
}

/// An operation of the ranks of a group, as a part of the work on the compute stream. It is a reduce-scatter or an
/// all-gather.
#[derive(Debug)]
pub enum Exchange {
    /// Runs it in order with that work.
    Run(Operation),
    /// Starts it, ordered after the work enqueued so far, to run beside what is enqueued until it is finished.
    Start(Operation),
    /// Orders the started operation before all work that is enqueued afterwards, and ends its leases.
    Finish,
}

impl Operation {
    /// Panics unless each bucket can consist of one shard per rank: anything else is a bug of the caller.
    pub(crate) fn expect_shards(&self, (rank, world): (usize, usize)) {
        let (buckets, whole) = match self {
            Self::ReduceScatter { buckets, .. } => (buckets, 0),
            Self::AllGather { buckets } => (buckets, 1),
            Self::AllReduce { .. } | Self::Broadcast { .. } => return,
        };
        for bucket in buckets {
            Shards::new(bucket[whole].bytes(), bucket[1 - whole].bytes(), rank, world);
        }
    }
}

/// The shards of a bucket, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shards {
    /// Length of each rank's shard.
    pub(crate) equal: usize,
    /// Length of what the last rank's shard has after that.
    pub(crate) rest: usize,
}

impl Shards {
    /// Returns the shards of a bucket of `whole` bytes, of which rank `rank` has `own`.
    pub(crate) fn new(whole: usize, own: usize, rank: usize, world: usize) -> Self {
        let is_last = rank + 1 == world;
        let fits = |others: &usize| match world {
            1 => *others == 0,
            _ => !is_last || others.is_multiple_of(world - 1),
        };
        let others = whole.checked_sub(own).filter(fits);
        let equal = others.map(|others| if is_last && world > 1 { others / (world - 1) } else { own });
        let found = equal.and_then(|equal| Some(Self { equal, rest: whole.checked_sub(equal * world)? }));
        found.unwrap_or_else(|| panic!("{whole} bytes in {world} shards, {own} of rank {rank}"))
    }
}

/// The ranks that take part in an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Among {
    /// All ranks.
    #[default]
    All,
    /// The ranks of the same group.
    Group,
    /// The ranks at the same position in their groups.
    Peers,
}

/// Division of the ranks into groups of consecutive ranks, and the place of one rank.
///
/// ```text
/// ranks:      0 1 2 3 | 4 5 6 7      groups of 4
/// of rank 5:            group 4..8, peers 1 and 5
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Number of ranks in a group. Divides the number of ranks.
    pub size: usize,
}

impl Groups {
    /// Places all ranks in one group each.
    pub fn single(rank: usize, world: usize) -> Self {
        Self { rank, world, size: 1 }
    }

    /// Returns this rank's index among the ranks of an operation, and their number.
    pub fn member(self, among: Among) -> (usize, usize) {
        match among {
            Among::All => (self.rank, self.world),
            Among::Group => (self.rank % self.size, self.size),
            Among::Peers => (self.rank / self.size, self.world / self.size),
        }
    }

    /// Returns the disjoint sets of ranks that make such operations side by side.
    pub fn sets(self, among: Among) -> Vec<Vec<usize>> {
        let mut sets = vec![Vec::new(); self.world / self.member(among).1];
        (0..self.world).for_each(|rank| sets[Self { rank, ..self }.set(among)].push(rank));
        sets
    }

    /// Returns which of the disjoint sets of ranks that make such operations side by side this rank belongs to.
    pub fn set(self, among: Among) -> usize {
        match among {
            Among::All => 0,
            Among::Group => self.rank / self.size,
            Among::Peers => self.rank % self.size,
        }
    }
}

/// Started operations to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The oldest bucket of an [`Operation::ReduceScatter`] that has not been waited for, if any.
    OldestScatter,
    /// The oldest bucket of an [`Operation::AllGather`] that has not been waited for, if any.
    OldestGather,
    /// Everything.
    All,
}

/// The communicator of one rank. Every rank makes the same calls in the same order.
///
/// Operations are asynchronous: they run on a second CUDA stream or a second thread.
///
/// Several buckets that are started together are one operation on a GPU. That matters during GEMMs, which occupy all
/// multiprocessors: a kernel of NCCL has to wait until one of them ends, and buckets started one by one each have to
/// wait.
pub trait Collective: Send + fmt::Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Registers the pool segment of this buffer as an NCCL window: until the collective ends, all ranks access each
    /// other's copy of it directly, and the block is kept. Pass a lease of `0..0` of a buffer from
    /// [`Pool::registered`](xlaunch_pool::Pool::registered): it overlaps no lease that is reduced there. Every rank
    /// calls this for the same buffers of the same pool requests in the same order, before any graph capture. If
    /// windows are not supported, returns false on all ranks; operations then work as without registration.
    ///
    /// # Errors
    /// A failure on only one rank is fatal: the other ranks wait for it and have to be aborted.
    fn register(&mut self, _memory: Lease) -> Result<bool> {
        Ok(false)
    }

    /// Divides the ranks into groups of `size`, for operations among some of them. Every rank calls it, once.
    fn divide(&mut self, size: usize) -> Result<()>;

    /// Starts an operation of all ranks, ordered after all work enqueued on the compute stream so far.
    fn start(&mut self, operation: Operation) -> Result<()> {
        self.start_among(Among::All, operation)
    }

    /// Starts an operation of some ranks. Every rank calls it, with the ranks that it belongs to. Broadcasts are always
    /// among all ranks.
    fn start_among(&mut self, among: Among, operation: Operation) -> Result<()>;

    /// Runs an operation of the ranks of a group, or a part of one. Operations of [`start`](Self::start) remain to be
    /// waited for. An exchange is finished before the next one begins.
    fn exchange(&mut self, exchange: Exchange) -> Result<()>;

    /// Waits: orders started operations before all work that is enqueued on the compute stream afterwards, and ends
    /// their leases. Blocks the host on the CPU; only enqueues on a GPU.
    fn wait(&mut self, wait: Wait) -> Result<()>;

    /// Starts an operation and waits for it, and for all earlier ones.
    fn run(&mut self, operation: Operation) -> Result<()> {
        self.start(operation)?;
        self.wait(Wait::All)
    }

    /// Fails if an operation has failed asynchronously or was aborted. Results that were read back must not be used
    /// until a subsequent call to this succeeds.
    fn check(&self) -> Result<()>;

    /// Returns a handle with which another thread can make calls in progress return [`CommError::Aborted`] when a peer
    /// is known to be lost.
    fn abort_handle(&self) -> AbortHandle;

    /// Shuts down in an orderly way. Every rank calls it once all its operations have been waited for.
    fn finalize(self: Box<Self>) -> Result<()>;
}

/// Aborts a collective from any thread, any number of times.
#[derive(Clone)]
pub struct AbortHandle(Arc<dyn Fn() + Send + Sync>);

impl AbortHandle {
    /// Creates a handle that calls `abort` each time it is used.
    pub fn new(abort: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(abort))
    }

    /// Makes calls in progress, and all later ones, fail.
    pub fn abort(&self) {
        (self.0)();
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortHandle")
    }
}
