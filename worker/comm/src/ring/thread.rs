//! The comm thread: runs queued collectives one after the other.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender};

use half::bf16;
use xlaunch_pool::{DType, Lease, Space};

use super::announcement::{self, Announcement, Kind};
use super::wire::{Side, Socket, exchange};
use crate::collective::{Among, CommError, Groups, Operation, Result, Shards};

/// Work for the comm thread.
pub(super) enum Job {
    Run(Operation, Groups, Among),
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
                Job::Run(Operation::AllReduce { buckets, dtype }, groups, among) => {
                    for elements in buckets {
                        self.bucket(|this| this.all_reduce(elements, dtype, Lanes::new(groups, among)));
                    }
                }
                Job::Run(Operation::ReduceScatter { buckets, dtype }, groups, among) => {
                    for pair in buckets {
                        self.bucket(|this| this.reduce_scatter(pair, dtype, Lanes::new(groups, among)));
                    }
                }
                Job::Run(Operation::AllGather { buckets }, groups, among) => {
                    for pair in buckets {
                        self.bucket(|this| this.all_gather(pair, Lanes::new(groups, among)));
                    }
                }
                Job::Run(Operation::Broadcast { elements, root }, ..) => {
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

    fn all_reduce(&mut self, mut lease: Lease, dtype: DType, lanes: Lanes) -> Result<()> {
        let bytes = host_bytes(&mut lease);
        self.announce(Kind::AllReduce, lanes.count() * bytes.len())?;
        let own = even_chunks(bytes.len(), dtype.size(), lanes.members());
        let chunks = lanes.chunks(&own, bytes.len());
        lanes.within(bytes, |bytes| {
            self.reduce_scatter_chunks(bytes, &chunks, dtype)?;
            self.all_gather_chunks(bytes, &chunks)
        })
    }

    fn reduce_scatter(&mut self, [mut from, mut into]: [Lease; 2], dtype: DType, lanes: Lanes) -> Result<()> {
        let (bytes, own) = (host_bytes(&mut from), host_bytes(&mut into));
        self.announce(Kind::ReduceScatter, lanes.count() * bytes.len())?;
        let shards = lanes.shards(bytes.len(), own.len());
        let chunks = lanes.chunks(&shards, bytes.len());
        lanes.within(bytes, |bytes| self.reduce_scatter_chunks(bytes, &chunks, dtype))?;
        own.copy_from_slice(&bytes[shards[lanes.index()].clone()]);
        Ok(())
    }

    fn all_gather(&mut self, [mut from, mut into]: [Lease; 2], lanes: Lanes) -> Result<()> {
        let (own, bytes) = (host_bytes(&mut from), host_bytes(&mut into));
        self.announce(Kind::AllGather, lanes.count() * bytes.len())?;
        let shards = lanes.shards(bytes.len(), own.len());
        bytes[shards[lanes.index()].clone()].copy_from_slice(own);
        let chunks = lanes.chunks(&shards, bytes.len());
        lanes.within(bytes, |bytes| self.all_gather_chunks(bytes, &chunks))
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

/// The sets of ranks that make the same operation side by side. Each has a lane, as long as the operation's buffer, in
/// a longer buffer that goes around the ring.
#[derive(Clone, Copy)]
struct Lanes {
    groups: Groups,
    among: Among,
}

impl Lanes {
    fn new(groups: Groups, among: Among) -> Self {
        Self { groups, among }
    }

    /// Returns the number of ranks of each set.
    fn members(self) -> usize {
        self.groups.member(self.among).1
    }

    /// Returns the index of this rank in its set.
    fn index(self) -> usize {
        self.groups.member(self.among).0
    }

    fn count(self) -> usize {
        self.groups.world / self.members()
    }

    /// Returns the shard of each rank of a set in a buffer of `bytes` bytes, of which this rank has `own`.
    fn shards(self, bytes: usize, own: usize) -> Vec<Range<usize>> {
        let (index, n) = self.groups.member(self.among);
        let Shards { equal, .. } = Shards::new(bytes, own, index, n);
        (0..n).map(|rank| rank * equal..if rank + 1 == n { bytes } else { (rank + 1) * equal }).collect()
    }

    /// Returns the chunk of each rank in all lanes, which are `len` bytes long. `parts` are those of the ranks of a
    /// set.
    fn chunks(self, parts: &[Range<usize>], len: usize) -> Vec<Range<usize>> {
        let chunk = |rank| {
            let of = Groups { rank, ..self.groups };
            let (part, start) = (&parts[of.member(self.among).0], of.set(self.among) * len);
            start + part.start..start + part.end
        };
        (0..self.groups.world).map(chunk).collect()
    }

    /// Calls `run` with all lanes, of which this rank has `own`.
    fn within(self, own: &mut [u8], run: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        if self.count() == 1 {
            return run(own);
        }
        let mut lanes = vec![0; self.count() * own.len()];
        let start = self.groups.set(self.among) * own.len();
        lanes[start..start + own.len()].copy_from_slice(own);
        run(&mut lanes)?;
        own.copy_from_slice(&lanes[start..start + own.len()]);
        Ok(())
    }
}

/// Returns one chunk for each of `n` ranks of a buffer of `bytes` bytes. Chunks consist of whole elements of `size`
/// bytes, and their lengths differ by at most one element.
fn even_chunks(bytes: usize, size: usize, n: usize) -> Vec<Range<usize>> {
    let count = bytes / size;
    (0..n).map(|c| count * c / n * size..count * (c + 1) / n * size).collect()
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
