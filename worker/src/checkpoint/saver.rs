//! The thread of a rank that writes checkpoints while training goes on.
//!
//! ```text
//! training thread --snapshot--> thread: write this rank's part --> agent: have all ranks written theirs?
//!                 <--buffers--                   rank 0: commit, delete old checkpoints, report <--'
//! ```
//! With memory snapshots there are two sets of buffers, used in turn, and a snapshot is complete in memory before it is
//! written to disk. A disk that fails does not affect it.
//!
//! One save is in flight at a time. Whether it is is agreed upon by all ranks in a step's all-reduce
//! ([`Saver::is_busy`] is this rank's share of that), so that all of them begin or skip the next one.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use xlaunch_engine::HostAllocator;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{CheckpointFailed, CheckpointReport};

use super::disk::{Disk, Real};
use super::retention::Candidate;
pub use super::write::Written;
use super::write::{Snapshot, Writer, commit, delete, temporary};
use super::{CheckpointError, Memory, Portion, Retention, State, directory, name};
use crate::fail;
use crate::model::layout::Layout;

/// How the ranks of a save learn of each other. Implemented by the session with the agent.
pub trait Exchange: Send {
    /// Tells the others that this rank has written its part, or why not.
    fn written(&mut self, step: u64, result: Result<Vec<Written>, String>);
    /// Rank 0: waits until every rank has answered. All parts, or what failed.
    fn all_written(&mut self, step: u64) -> Result<Vec<Written>, String>;
    /// Waits until the agent has read what this rank has reported so far, or cannot any more.
    fn flush(&mut self);
    /// Tells the agent how a save ended.
    fn report(&mut self, report: Report);
}

/// What a rank saves, and where.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "named after what they are")]
pub struct Settings {
    pub dir: PathBuf,
    pub layout: Layout,
    pub portion: Portion,
    pub rank: usize,
    /// Ranks below this one write; the others have an empty portion, and do not answer.
    pub writers: usize,
    pub retention: Retention,
    /// The contents of `tokenizer.json`, which rank 0 writes.
    pub tokenizer: Option<Vec<u8>>,
    /// The checkpoint that the run was resumed from.
    pub source: Option<PathBuf>,
    /// Allocates the buffers for snapshots.
    pub host: HostAllocator,
    /// Files for the buffers, which are kept when this process ends.
    pub memory: Option<Memory>,
    /// It is an error if `memory` cannot be used.
    pub memory_required: bool,
}

/// A save that was begun.
struct Job {
    snapshot: Snapshot,
    state: State,
    start: Instant,
}

/// A save that has ended, or the start of the thread.
struct Ended {
    /// For the next ones.
    buffers: Vec<Snapshot>,
    result: Result<(), CheckpointError>,
}

/// The training thread's handle.
#[derive(Debug)]
pub struct Saver {
    jobs: Sender<Job>,
    ended: Receiver<Ended>,
    busy: Arc<AtomicBool>,
    in_flight: bool,
    /// Not in use, the ones to be overwritten next first.
    buffers: VecDeque<Snapshot>,
}

impl Saver {
    /// Starts the thread.
    pub fn start(settings: Settings, exchange: Box<dyn Exchange>) -> io::Result<Self> {
        Self::with_disk(settings, exchange, Arc::new(Real))
    }

    pub(super) fn with_disk(
        settings: Settings,
        exchange: Box<dyn Exchange>,
        disk: Arc<dyn Disk>,
    ) -> io::Result<Self> {
        let Settings { dir, layout, portion, rank, writers, .. } = settings;
        let Settings { retention, tokenizer, source, host, memory, memory_required, .. } = settings;
        let (jobs, queue) = channel();
        let (sender, ended) = channel();
        let busy = Arc::new(AtomicBool::new(false));
        let len = portion.len();
        let writer = Writer { layout, portion, rank, writers };
        let reported_failure = false;
        let mut thread =
            Thread { dir, writer, retention, tokenizer, source, exchange, disk, reported_failure };
        let flag = busy.clone();
        thread::Builder::new().name("checkpoint".into()).spawn(move || {
            // Here, because touching gigabytes for the first time takes longer than a step.
            let (buffers, result) = match allocate(&host, len, memory.as_ref(), memory_required) {
                Ok(buffers) => (buffers, Ok(())),
                Err(error) => (Vec::new(), Err(error)),
            };
            if sender.send(Ended { buffers, result }).is_err() {
                return;
            }
            while let Ok(job) = queue.recv() {
                let Job { snapshot, state, start } = job;
                let result = thread.save(&snapshot, state, start);
                flag.store(false, Ordering::Release);
                if sender.send(Ended { buffers: vec![snapshot], result }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs, ended, busy, in_flight: true, buffers: VecDeque::new() })
    }

    /// Whether this rank is still writing.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }

    /// Waits for the save in flight, or for the first buffers, and returns how it ended. `Ok` if there is none.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        if !std::mem::take(&mut self.in_flight) {
            return Ok(());
        }
        // The thread lives as long as this handle.
        let Ok(Ended { buffers, result }) = self.ended.recv() else { return Ok(()) };
        self.buffers.extend(buffers);
        result
    }

    /// As [`wait`](Self::wait), but `Ok` if the save has not ended yet.
    pub fn poll(&mut self) -> Result<(), CheckpointError> {
        if !self.in_flight {
            return Ok(());
        }
        let Ok(Ended { buffers, result }) = self.ended.try_recv() else { return Ok(()) };
        self.in_flight = false;
        self.buffers.extend(buffers);
        result
    }

    /// Buffers for a snapshot, to be filled and passed to [`begin`](Self::begin). After [`wait`](Self::wait).
    /// A memory snapshot in them is gone.
    pub fn take_buffers(&mut self) -> Result<Snapshot, CheckpointError> {
        let buffers = self.buffers.pop_front().unwrap_or_default();
        buffers.erase().map_err(memory_failed)?;
        Ok(buffers)
    }

    /// Begins a save. The one before must have been waited for.
    pub fn begin(&mut self, snapshot: Snapshot, state: State, start: Instant) {
        self.busy.store(true, Ordering::Release);
        // As in `wait`.
        self.in_flight = self.jobs.send(Job { snapshot, state, start }).is_ok();
    }
}

/// Buffers for the values of a portion: two sets from memory files, or one of this process's own.
#[expect(clippy::print_stderr, reason = "the agent shows stderr; training goes on")]
fn allocate(
    host: &HostAllocator,
    len: usize,
    memory: Option<&Memory>,
    required: bool,
) -> Result<Vec<Snapshot>, CheckpointError> {
    match memory.map(|memory| memory.allocate(host)) {
        Some(Err(error)) if required => return Err(error),
        Some(Err(error)) => eprintln!("warning: no snapshots are kept in memory: {error}"),
        Some(Ok(buffers)) => return Ok(buffers),
        None => {}
    }
    let [params, m, v] = [(); 3].map(|()| host.alloc(len));
    Ok(vec![Snapshot { params, m, v, slot: None }])
}

fn memory_failed(error: io::Error) -> CheckpointError {
    CheckpointError::Write { path: "memory snapshot".into(), reason: error.to_string() }
}

struct Thread {
    dir: PathBuf,
    writer: Writer,
    retention: Retention,
    tokenizer: Option<Vec<u8>>,
    source: Option<PathBuf>,
    exchange: Box<dyn Exchange>,
    disk: Arc<dyn Disk>,
    reported_failure: bool,
}

impl Thread {
    fn save(&mut self, snapshot: &Snapshot, state: State, start: Instant) -> Result<(), CheckpointError> {
        let step = state.step;
        if self.writer.rank >= self.writer.writers {
            return Ok(());
        }
        fail::set_step(step);
        let path = self.dir.join(name(step));
        let failed = |reason: String| CheckpointError::Write { path: path.clone(), reason };
        let temporary = temporary(&self.dir, step);
        if self.writer.rank == 0 && snapshot.slot.is_some() {
            // The agent has metrics from rank 0. An attempt that resumes from the snapshot does not report them again.
            self.exchange.flush();
        }
        if let Err(error) = snapshot.complete(&state) {
            self.report_failure(step, Path::new("memory snapshot"), &error.to_string());
        }
        let written = self.writer.write(&*self.disk, &temporary, snapshot);
        let written = written.map_err(|error| format!("rank {}: {error}", self.writer.rank));
        self.exchange.written(step, written);
        if self.writer.rank != 0 {
            // Rank 0 is told, and decides what follows.
            return Ok(());
        }
        let saved = self.exchange.all_written(step).and_then(|parts| {
            let tokenizer = self.tokenizer.as_deref();
            commit(&*self.disk, &self.dir, &state, tokenizer, parts).map_err(|error| error.to_string())
        });
        match saved {
            Ok(path) => {
                self.exchange.report(Report::Checkpoint(CheckpointReport {
                    step,
                    path: path.display().to_string(),
                    seconds: start.elapsed().as_secs_f64(),
                }));
                self.delete_old(&state);
                Ok(())
            }
            Err(reason) => {
                // Whatever remains is removed when the job starts again.
                let _ = self.disk.remove_dir(&temporary);
                self.report_failure(step, &path, &reason);
                Err(failed(reason))
            }
        }
    }

    fn report_failure(&mut self, step: u64, path: &Path, reason: &str) {
        let (path, reason) = (path.display().to_string(), reason.to_owned());
        self.exchange.report(Report::CheckpointFailed(CheckpointFailed { step, path, reason }));
    }

    /// Deletes checkpoints of this run, and of those that it continues, that are not to be kept.
    fn delete_old(&mut self, newest: &State) {
        let found = match directory::scan(&self.dir) {
            Ok(found) => found,
            Err(error) => return self.retention_failed(newest.step, &self.dir.clone(), &error.to_string()),
        };
        let belongs = |state: &State| {
            state.run == newest.run
                || newest.parents.iter().any(|parent| parent.run == state.run && state.step <= parent.step)
        };
        let candidate = |found: &directory::Found| {
            let state = found.state.as_ref().ok().filter(|state| belongs(state) && !found.pinned)?;
            let is_source = self.source.as_ref() == Some(&found.path);
            Some(Candidate { step: found.step, val_loss: state.val_loss, is_source })
        };
        let candidates = found.iter().filter_map(candidate).collect();
        for step in self.retention.to_delete(candidates) {
            let path = self.dir.join(name(step));
            if let Err(error) = delete(&*self.disk, &self.dir, step) {
                self.retention_failed(newest.step, &path, &error.to_string());
            }
        }
    }

    /// Reported once: the same failure would follow every save.
    fn retention_failed(&mut self, step: u64, path: &Path, reason: &str) {
        if !std::mem::replace(&mut self.reported_failure, true) {
            self.report_failure(step, path, &format!("failed to delete it: {reason}"));
        }
    }
}
