//! A deterministic ring all-reduce between CPU workers, over unix or TCP sockets.
//!
//! ```text
//! trainer thread --loans--> comm thread: reduce-scatter, all-gather --socket--> next rank
//!                                                                   <--socket-- previous rank
//! ```
//! The elements are cut into as many chunks as there are ranks. Chunk c starts at rank c + 1 and travels the ring once
//! while each rank adds its own part, `x[c] + (x[c-1] + ... + (x[c+2] + x[c+1]))`, so that its sum is finished at rank c;
//! then it travels once more to all others. Each sum is formed once, in an order that depends on nothing but the ranks,
//! and copied: all ranks end with the same bytes. Each way of the two is also there alone, and gives the same bits.

mod connect;
mod thread;
mod wire;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use xlaunch_pool::{DType, Lease as Loan};

use crate::collective::{AbortHandle, Collective, CommError, Result, expect_parts};
pub use connect::RingListener;
use thread::Job;
use wire::Socket;

/// One rank's place in the ring. Dropping it without [`finalize`](Collective::finalize) breaks the ring for all.
pub struct Ring {
    rank: usize,
    world: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Replies behind each gather that nobody waits for yet, in order.
    gathered: VecDeque<Receiver<Result<()>>>,
    stop: Arc<Stop>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring(rank {} of {})", self.rank, self.world)
    }
}

/// Ends everything under way, from any thread.
struct Stop {
    aborted: AtomicBool,
    sockets: [Socket; 2],
}

impl Stop {
    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.sockets.iter().for_each(Socket::shutdown);
    }
}

impl Ring {
    /// Connects to the next rank and accepts the previous one. `addresses` holds every rank's, by rank.
    pub fn connect(
        listener: RingListener,
        rank: usize,
        addresses: &[String],
        timeout: Duration,
    ) -> Result<Self> {
        let world = addresses.len();
        let lost =
            |peer: usize, error: &std::io::Error| CommError::PeerLost { peer, reason: error.to_string() };
        let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
        let (to_next, from_previous) = connect::neighbours(&listener, rank, addresses, timeout)?;
        let stop = Stop {
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
            .map_err(|error| CommError::PeerLost { peer: rank, reason: format!("no thread: {error}") })?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self { rank, world, jobs, thread, gathered: VecDeque::new(), stop: Arc::new(stop) })
    }

    /// Hands a job to the comm thread, which lives as long as `self.jobs`.
    fn submit(&self, job: Job) -> Result<()> {
        self.check()?;
        match &self.jobs {
            Some(jobs) if jobs.send(job).is_ok() => Ok(()),
            _ => Err(CommError::Aborted),
        }
    }

    /// Submits a job that replies.
    fn ask(&self, job: impl FnOnce(Sender<Result<()>>) -> Job) -> Result<Receiver<Result<()>>> {
        let (reply, done) = channel();
        self.submit(job(reply))?;
        Ok(done)
    }

    /// Waits for a job's reply, and so for everything submitted before it.
    fn wait(&self, done: &Receiver<Result<()>>) -> Result<()> {
        let result = done.recv().unwrap_or(Err(CommError::Aborted));
        // A socket that was shut down under a transfer looks like a lost peer.
        self.check().and(result)
    }
}

impl Collective for Ring {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn register(&mut self, _: Loan) -> Result<bool> {
        Ok(false)
    }

    fn all_reduce(&mut self, elements: Loan, dtype: DType) -> Result<()> {
        self.submit(Job::AllReduce(elements, dtype))
    }

    fn reduce_scatter(&mut self, from: Loan, into: Loan, dtype: DType) -> Result<()> {
        expect_parts(&from, &into, self.world);
        self.submit(Job::ReduceScatter(from, into, dtype))
    }

    fn all_gather(&mut self, from: Loan, into: Loan) -> Result<()> {
        expect_parts(&into, &from, self.world);
        self.submit(Job::AllGather(from, into))?;
        let gathered = self.ask(Job::Finish)?;
        self.gathered.push_back(gathered);
        Ok(())
    }

    fn finish_gather(&mut self) -> Result<()> {
        self.gathered.pop_front().map_or(Ok(()), |gathered| self.wait(&gathered))
    }

    fn broadcast(&mut self, elements: Loan, root: usize) -> Result<()> {
        self.submit(Job::Broadcast(elements, root))
    }

    fn finish(&mut self) -> Result<()> {
        self.gathered.clear();
        self.wait(&self.ask(Job::Finish)?)
    }

    fn check(&self) -> Result<()> {
        match self.stop.aborted.load(Ordering::SeqCst) {
            true => Err(CommError::Aborted),
            false => Ok(()),
        }
    }

    fn abort_handle(&self) -> AbortHandle {
        let stop = self.stop.clone();
        AbortHandle::new(move || stop.abort())
    }

    fn finalize(self: Box<Self>) -> Result<()> {
        self.wait(&self.ask(Job::Goodbye)?)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.stop.abort();
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed already; the rank ends anyway.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
