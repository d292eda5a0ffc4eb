//! The comm thread: runs queued collectives one after the other.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender};

use half::bf16;
use xlaunch_pool::{DType, Lease, Space};

use super::announcement::{self, Announcement, Kind};
use super::wire::{Side, Socket, exchange};
use crate::collective::{CommError, Operation, Result, Shards};

/// Work for the comm thread.
pub(super) enum Job {
    Run(Operation),
    /// Ends when every rank has reached it.
    Barrier,
}

pub(super) struct Worker {
    rank: usize,
    world: usize,
    next: Socket,
    previous: Socket,
    /// Receives `state` after each bucket, and after a barrier.
    ended: Sender<Result<()>>,
    /// The first error. It breaks the ring: everything later fails with it.
    state: Result<()>,
    /// Number of collectives so far.
    started: u64,
    /// Receive buffer for a chunk of the previous rank, before it is added.
    inbox: Vec<u8>,
}

impl Worker {
    pub(super) fn new(
        rank: usize,
        world: usize,
        next: Socket,
        previous: Socket,
        ended: Sender<Result<()>>,
    ) -> Self {
        Self { rank, world, next, previous, ended, state: Ok(()), started: 0, inbox: Vec::new() }
    }

    /// Runs jobs until the sender of `queue` is dropped.
    pub(super) fn run(mut self, queue: &Receiver<Job>) {
        for job in queue {
            match job {
                Job::Run(Operation::AllReduce { buckets, dtype }) => {
                    for elements in buckets {
                        self.bucket(|this| this.all_reduce(elements, dtype));
                    }
                }
                Job::Run(Operation::ReduceScatter { buckets, dtype }) => {
                    for [from, into] in buckets {
                        self.bucket(|this| this.reduce_scatter(from, into, dtype));
                    }
                }
                Job::Run(Operation::AllGather { buckets }) => {
                    for [from, into] in buckets {
                        self.bucket(|this| this.all_gather(from, into));
                    }
                }
                Job::Run(Operation::Broadcast { elements, root }) => {
                    self.bucket(|this| this.broadcast(elements, root));
                }
                Job::Barrier => self.bucket(Self::barrier),
            }
        }
    }

    /// Runs one bucket, unless the ring is broken. Its leases have been dropped, and thereby ended, when this reports
    /// its end.
    fn bucket(&mut self, run: impl FnOnce(&mut Self) -> Result<()>) {
        self.state = std::mem::replace(&mut self.state, Ok(())).and_then(|()| run(self));
        // The last buckets of a ring that is dropped are not waited for.
        let _ = self.ended.send(self.state.clone());
    }

    fn all_reduce(&mut self, mut lease: Lease, dtype: DType) -> Result<()> {
        let bytes = host_bytes(&mut lease);
        self.announce(Kind::AllReduce, bytes.len())?;
        let chunks = self.even_chunks(bytes.len(), dtype.size());
        self.reduce_scatter_chunks(bytes, &chunks, dtype)?;
        self.all_gather_chunks(bytes, &chunks)
    }

    fn reduce_scatter(&mut self, mut from: Lease, mut into: Lease, dtype: DType) -> Result<()> {
        let (bytes, own) = (host_bytes(&mut from), host_bytes(&mut into));
        self.announce(Kind::ReduceScatter, bytes.len())?;
        let shards = self.shards(bytes.len(), own.len());
        self.reduce_scatter_chunks(bytes, &shards, dtype)?;
        own.copy_from_slice(&bytes[shards[self.rank].clone()]);
        Ok(())
    }

    fn all_gather(&mut self, mut from: Lease, mut into: Lease) -> Result<()> {
        let (own, bytes) = (host_bytes(&mut from), host_bytes(&mut into));
        self.announce(Kind::AllGather, bytes.len())?;
        let shards = self.shards(bytes.len(), own.len());
        bytes[shards[self.rank].clone()].copy_from_slice(own);
        self.all_gather_chunks(bytes, &shards)
    }

    /// Goes once around the ring. Afterwards this rank has the sum of chunk `rank`; other chunks hold partial sums.
    fn reduce_scatter_chunks(
        &mut self,
        bytes: &mut [u8],
        chunks: &[Range<usize>],
        dtype: DType,
    ) -> Result<()> {
        // Starting at `rank + n` keeps the subtractions below from underflowing.
        let (n, rank) = (self.world, self.rank);
        for step in 1..n {
            let [out, into] = [step, step + 1].map(|back| chunks[(rank + n - back) % n].clone());
            let mut inbox = std::mem::take(&mut self.inbox);
            inbox.resize(into.len().max(inbox.len()), 0);
            self.exchange(&bytes[out], &mut inbox[..into.len()])?;
            add(&mut bytes[into.clone()], &inbox[..into.len()], dtype);
            self.inbox = inbox;
        }
        Ok(())
    }

    /// Goes once around the ring: every rank's chunk `rank` is copied to all ranks.
    fn all_gather_chunks(&mut self, bytes: &mut [u8], chunks: &[Range<usize>]) -> Result<()> {
        let (n, rank) = (self.world, self.rank);
        for step in 0..n - 1 {
            let [out, into] = [step, step + 1].map(|back| chunks[(rank + n - back) % n].clone());
            let (out, into) = disjoint(bytes, out, into);
            self.exchange(out, into)?;
        }
        Ok(())
    }

    /// Passes the root's bytes from rank to rank.
    fn broadcast(&mut self, mut lease: Lease, root: usize) -> Result<()> {
        let bytes = host_bytes(&mut lease);
        self.announce(Kind::Broadcast, bytes.len())?;
        if self.rank != root {
            self.exchange(&[], bytes)?;
        }
        if (self.rank + 1) % self.world != root {
            self.exchange(bytes, &mut [])?;
        }
        Ok(())
    }

    /// Waits for all ranks: after `world - 1` rounds, a byte of every rank has reached every other one through the
    /// neighbours.
    fn barrier(&mut self) -> Result<()> {
        self.announce(Kind::Barrier, 0)?;
        (1..self.world).try_for_each(|_| self.exchange(&[0], &mut [0]))
    }

    /// Begins a collective: checks that the previous rank begins the same one.
    fn announce(&mut self, kind: Kind, bytes: usize) -> Result<()> {
        self.started += 1;
        let own = Announcement::new(self.started, kind, bytes);
        let mut theirs = [0; announcement::BYTES];
        self.exchange(&own.to_bytes(), &mut theirs)?;
        let theirs = Announcement::from_bytes(theirs);
        if theirs == own {
            return Ok(());
        }
        let peer = (self.rank + self.world - 1) % self.world;
        Err(CommError::Disagree { peer, reason: format!("it is in {theirs}; this rank in {own}") })
    }

    /// Returns one chunk per rank of a buffer of `bytes` bytes. Chunks consist of whole elements of `size` bytes, and
    /// their lengths differ by at most one element.
    fn even_chunks(&self, bytes: usize, size: usize) -> Vec<Range<usize>> {
        let (count, n) = (bytes / size, self.world);
        (0..n).map(|c| count * c / n * size..count * (c + 1) / n * size).collect()
    }

    /// Returns the shard of each rank in a buffer of `bytes` bytes, of which this rank has `own`.
    fn shards(&self, bytes: usize, own: usize) -> Vec<Range<usize>> {
        let (Shards { equal, .. }, n) = (Shards::new(bytes, own, self.rank, self.world), self.world);
        (0..n).map(|rank| rank * equal..if rank + 1 == n { bytes } else { (rank + 1) * equal }).collect()
    }

    fn exchange(&mut self, out: &[u8], into: &mut [u8]) -> Result<()> {
        exchange(&mut self.next, out, &mut self.previous, into).map_err(|(side, error)| {
            let peer = match side {
                Side::Next => (self.rank + 1) % self.world,
                Side::Previous => (self.rank + self.world - 1) % self.world,
            };
            CommError::PeerLost { peer, reason: error.to_string() }
        })
    }
}

/// Returns the leased bytes.
fn host_bytes(lease: &mut Lease) -> &mut [u8] {
    assert!(lease.space() == Space::Host, "the ring reduces host memory only");
    // SAFETY: the lease keeps the host block alive and gives its holder exclusive access to the range until it is
    // dropped: the owner of the buffer checks `is_leased` before accessing a range. Host blocks are initialised when
    // they are mapped.
    unsafe { std::slice::from_raw_parts_mut(lease.address() as *mut u8, lease.bytes()) }
}

/// Borrows two ranges of `bytes` that do not overlap: one to send, one to receive into.
fn disjoint(bytes: &mut [u8], out: Range<usize>, into: Range<usize>) -> (&[u8], &mut [u8]) {
    if out.end <= into.start {
        let (low, high) = bytes.split_at_mut(into.start);
        (&low[out], &mut high[..into.len()])
    } else {
        let (low, high) = bytes.split_at_mut(out.start);
        (&high[..out.len()], &mut low[into])
    }
}

/// Computes `sum += part`, element by element, in f32.
fn add(sum: &mut [u8], part: &[u8], dtype: DType) {
    match dtype {
        DType::F32 => {
            for (sum, part) in sum.chunks_exact_mut(4).zip(part.chunks_exact(4)) {
                let value = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let total = value(sum) + value(part);
                sum.copy_from_slice(&total.to_ne_bytes());
            }
        }
        DType::Bf16 => {
            for (sum, part) in sum.chunks_exact_mut(2).zip(part.chunks_exact(2)) {
                let value = |bytes: &[u8]| bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32();
                let total = bf16::from_f32(value(sum) + value(part));
                sum.copy_from_slice(&total.to_ne_bytes());
            }
        }
        other => panic!("all-reduce of {} is not supported", other.name()),
    }
}
