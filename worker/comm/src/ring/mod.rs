//! A deterministic ring all-reduce between CPU workers, over unix or TCP sockets.
//!
//! ```text
//! trainer thread --leases--> comm thread: reduce-scatter, all-gather --socket--> next rank
//!                                                                    <--socket-- previous rank
//! ```
//! The elements are cut into one chunk per rank. Reduce-scatter: chunk c starts at rank c + 1 and travels around the
//! ring while each rank adds its own part, `x[c] + (x[c-1] + ... + (x[c+2] + x[c+1]))`, so that rank c ends up with the
//! sum of its chunk. All-gather: the sum travels around once more, to all other ranks. All-reduce is the one followed
//! by the other; the two are also available separately. An operation among some of the ranks goes around the whole
//! ring, too: every participating set of ranks has a lane of its own, in which the others contribute zeros.
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

use crate::collective::{
    AbortHandle, Among, Collective, CommError, Exchange, Groups, Operation, Result, Wait,
};
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
    groups: Groups,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// The comm thread's state after each bucket.
    done: Receiver<Result<()>>,
    /// The last one received.
    state: Result<()>,
    /// Numbers of buckets started, and received from `done`.
    started: usize,
    ended: usize,
    /// Numbers of the buckets that have not been waited for, the oldest first.
    scatters: VecDeque<usize>,
    gathers: VecDeque<usize>,
    /// Number of the last bucket of the exchange in progress.
    exchanged: usize,
    abort: Arc<AbortState>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring(rank {} of {})", self.groups.rank, self.groups.world)
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
        let (ended, done) = channel();
        let worker = thread::Worker::new(rank, world, to_next, from_previous, ended);
        let thread = std::thread::Builder::new()
            .name("ring".into())
            .spawn(move || worker.run(&queue))
            .map_err(|error| CommError::PeerLost {
                peer: rank,
                reason: format!("failed to start its thread: {error}"),
            })?;
        Ok(Self {
            groups: Groups::single(rank, world),
            jobs: Some(jobs),
            thread: Some(thread),
            done,
            state: Ok(()),
            started: 0,
            ended: 0,
            scatters: VecDeque::new(),
            gathers: VecDeque::new(),
            exchanged: 0,
            abort: Arc::new(abort),
        })
    }

    /// Queues a job for the comm thread, which runs as long as `self.jobs` is open.
    fn submit(&self, job: Job) -> Result<()> {
        self.check()?;
        match &self.jobs {
            Some(jobs) if jobs.send(job).is_ok() => Ok(()),
            _ => Err(CommError::Aborted),
        }
    }

    /// Waits for the first `number` buckets.
    fn wait_for(&mut self, number: usize) -> Result<()> {
        while self.ended < number {
            self.state = self.done.recv().unwrap_or(Err(CommError::Aborted));
            self.ended += 1;
        }
        // An abort shuts down the sockets, which the comm thread reports as a lost peer.
        self.check().and(self.state.clone())
    }
}

impl Collective for Ring {
    fn rank(&self) -> usize {
        self.groups.rank
    }

    fn world_size(&self) -> usize {
        self.groups.world
    }

    fn divide(&mut self, size: usize) -> Result<()> {
        self.groups.size = size;
        Ok(())
    }

    fn start_among(&mut self, among: Among, operation: Operation) -> Result<()> {
        operation.expect_shards(self.groups.member(among));
        let (count, pending) = match &operation {
            Operation::AllReduce { buckets, .. } => (buckets.len(), None),
            Operation::ReduceScatter { buckets, .. } => (buckets.len(), Some(&mut self.scatters)),
            Operation::AllGather { buckets } => (buckets.len(), Some(&mut self.gathers)),
            Operation::Broadcast { .. } => (1, None),
        };
        if let Some(pending) = pending {
            pending.extend(self.started + 1..=self.started + count);
        }
        self.started += count;
        self.submit(Job::Run(operation, self.groups, among))
    }

    fn exchange(&mut self, exchange: Exchange) -> Result<()> {
        let finishes = !matches!(exchange, Exchange::Start(_));
        if let Exchange::Run(operation) | Exchange::Start(operation) = exchange {
            let pending = (self.scatters.len(), self.gathers.len());
            self.start_among(Among::Group, operation)?;
            self.scatters.truncate(pending.0);
            self.gathers.truncate(pending.1);
            self.exchanged = self.started;
        }
        if finishes { self.wait_for(self.exchanged) } else { Ok(()) }
    }

    fn wait(&mut self, wait: Wait) -> Result<()> {
        self.check()?;
        let number = match wait {
            Wait::OldestScatter => self.scatters.pop_front(),
            Wait::OldestGather => self.gathers.pop_front(),
            Wait::All => {
                self.scatters.clear();
                self.gathers.clear();
                Some(self.started)
            }
        };
        number.map_or(Ok(()), |number| self.wait_for(number))
    }

    fn check(&self) -> Result<()> {
        if self.abort.aborted.load(Ordering::SeqCst) { Err(CommError::Aborted) } else { Ok(()) }
    }

    fn abort_handle(&self) -> AbortHandle {
        let state = self.abort.clone();
        AbortHandle::new(move || state.abort())
    }

    fn finalize(mut self: Box<Self>) -> Result<()> {
        self.started += 1;
        self.submit(Job::Barrier)?;
        self.wait(Wait::All)
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
