//! A deterministic ring all-reduce between CPU workers, over unix or TCP sockets.
//!
//! ```text
//! trainer thread --leases--> comm thread: reduce-scatter, all-gather --socket--> next rank
//!                                                                    <--socket-- previous rank
//! ```
//! The elements are cut into one chunk per rank. Reduce-scatter: chunk c starts at rank c + 1 and travels around the
//! ring while each rank adds its own part, `x[c] + (x[c-1] + ... + (x[c+2] + x[c+1]))`, so that rank c ends up with the
//! sum of its chunk. All-gather: the sum travels around once more, to all other ranks. All-reduce is one after the
//! other; the two are also available separately.
//!
//! Invariants:
//! - each sum is computed once, in an order that depends only on the ranks, and then copied. So all ranks end up with
//!   the same bytes, and reduce-scatter plus all-gather gives the same bits as all-reduce;
//! - before the data of a collective, neighbours exchange its number, kind and size (`announcement`): if a rank skips a
//!   collective, the result is an error, not wrong data;
//! - before neighbours exchange anything, they prove to each other that they know the attempt's key (`greeting`).
//!
//! Neighbours on one node use a unix socket (`listen`), others use TCP. The bytes and their order are the same, so a
//! ring over several nodes gives the same bits as one on a single node.

mod accept;
mod announcement;
mod connect;
mod dial;
mod greeting;
mod listen;
mod thread;
mod wire;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use xlaunch_pool::{DType, Lease};

use crate::collective::{AbortHandle, Collective, CommError, Result, expect_shards};
pub use listen::RingListener;
use thread::Job;
use wire::Socket;

/// Position of a rank in the ring, and the address of its next neighbour.
#[derive(Clone, Copy)]
pub struct RingPlace<'a> {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// The address of the next rank's [`RingListener`].
    pub next_address: &'a str,
    /// The attempt's key: a secret that `Debug` does not print.
    pub key: &'a [u8; 32],
}

impl fmt::Debug for RingPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RingPlace(rank {} of {}, next at {})", self.rank, self.world, self.next_address)
    }
}

/// One rank's end of the ring. Dropping it without [`finalize`](Collective::finalize) breaks the ring for all ranks.
pub struct Ring {
    rank: usize,
    world: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// One completion per gather, and per reduce-scatter, that has not been waited for; the oldest first.
    pending_gathers: Pending,
    pending_scatters: Pending,
    abort: Arc<AbortState>,
}

type Pending = VecDeque<Receiver<Result<()>>>;

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring(rank {} of {})", self.rank, self.world)
    }
}

/// State for aborting from any thread.
struct AbortState {
    aborted: AtomicBool,
    /// Clones of both neighbours' sockets: shutting them down ends transfers in progress.
    sockets: [Socket; 2],
}

impl AbortState {
    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.sockets.iter().for_each(Socket::shutdown);
    }
}

impl Ring {
    /// Connects to the next rank and accepts the previous one.
    pub fn connect(listener: RingListener, place: &RingPlace<'_>, timeout: Duration) -> Result<Self> {
        let (rank, world) = (place.rank, place.world);
        let lost =
            |peer: usize, error: &std::io::Error| CommError::PeerLost { peer, reason: error.to_string() };
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let (to_next, from_previous) = connect::neighbours(&listener, place, timeout)?;
        let abort = AbortState {
            aborted: AtomicBool::new(false),
            sockets: [
                to_next.try_clone().map_err(|error| lost(next, &error))?,
                from_previous.try_clone().map_err(|error| lost(previous, &error))?,
            ],
        };
        let (jobs, queue) = channel();
        let worker = thread::Worker::new(rank, world, to_next, from_previous);
        let thread = std::thread::Builder::new()
            .name("ring".into())
            .spawn(move || worker.run(&queue))
            .map_err(|error| CommError::PeerLost {
                peer: rank,
                reason: format!("failed to start its thread: {error}"),
            })?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        let (pending_gathers, pending_scatters) = (Pending::new(), Pending::new());
        Ok(Self { rank, world, jobs, thread, pending_gathers, pending_scatters, abort: Arc::new(abort) })
    }

    /// Queues a job for the comm thread, which runs as long as `self.jobs` is open.
    fn submit(&self, job: Job) -> Result<()> {
        self.check()?;
        match &self.jobs {
            Some(jobs) if jobs.send(job).is_ok() => Ok(()),
            _ => Err(CommError::Aborted),
        }
    }

    /// Queues a job that replies when it is done.
    fn submit_with_reply(&self, job: impl FnOnce(Sender<Result<()>>) -> Job) -> Result<Receiver<Result<()>>> {
        let (reply, done) = channel();
        self.submit(job(reply))?;
        Ok(done)
    }

    /// Waits for a job's reply, and thereby for all jobs queued before it.
    fn wait(&self, done: &Receiver<Result<()>>) -> Result<()> {
        let result = done.recv().unwrap_or(Err(CommError::Aborted));
        // An abort shuts down the sockets, which the comm thread reports as a lost peer.
        self.check().and(result)
    }
}

impl Collective for Ring {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world
    }

    fn register(&mut self, _: Lease) -> Result<bool> {
        Ok(false)
    }

    fn all_reduce(&mut self, buckets: Vec<Lease>, dtype: DType) -> Result<()> {
        buckets.into_iter().try_for_each(|elements| self.submit(Job::AllReduce(elements, dtype)))
    }

    fn reduce_scatter(&mut self, buckets: Vec<[Lease; 2]>, dtype: DType) -> Result<()> {
        for [from, into] in buckets {
            expect_shards(&from, &into, self.world);
            self.submit(Job::ReduceScatter(from, into, dtype))?;
            let done = self.submit_with_reply(Job::Flush)?;
            self.pending_scatters.push_back(done);
        }
        Ok(())
    }

    fn wait_scatter(&mut self) -> Result<()> {
        self.pending_scatters.pop_front().map_or(Ok(()), |done| self.wait(&done))
    }

    fn all_gather(&mut self, buckets: Vec<[Lease; 2]>) -> Result<()> {
        for [from, into] in buckets {
            expect_shards(&into, &from, self.world);
            self.submit(Job::AllGather(from, into))?;
            let done = self.submit_with_reply(Job::Flush)?;
            self.pending_gathers.push_back(done);
        }
        Ok(())
    }

    fn wait_gather(&mut self) -> Result<()> {
        self.pending_gathers.pop_front().map_or(Ok(()), |done| self.wait(&done))
    }

    fn broadcast(&mut self, elements: Lease, root: usize) -> Result<()> {
        self.submit(Job::Broadcast(elements, root))
    }

    fn wait_all(&mut self) -> Result<()> {
        self.pending_gathers.clear();
        self.pending_scatters.clear();
        self.wait(&self.submit_with_reply(Job::Flush)?)
    }

    fn check(&self) -> Result<()> {
        if self.abort.aborted.load(Ordering::SeqCst) { Err(CommError::Aborted) } else { Ok(()) }
    }

    fn abort_handle(&self) -> AbortHandle {
        let state = self.abort.clone();
        AbortHandle::new(move || state.abort())
    }

    fn finalize(self: Box<Self>) -> Result<()> {
        self.wait(&self.submit_with_reply(Job::Barrier)?)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.abort.abort();
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic was printed already.
            let _ = thread.join();
        }
    }
}

/// Creates a nonce for a greeting.
fn nonce() -> std::io::Result<greeting::Nonce> {
    let mut nonce = greeting::Nonce::default();
    // Reads of up to 256 bytes are never short.
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
    Ok(nonce)
}

#[cfg(test)]
mod tests;
