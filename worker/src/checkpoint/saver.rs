//! The thread of a rank that writes checkpoints while training continues.
//!
//! ```text
//! training thread --snapshot--> thread: write this rank's part --> agent: have all ranks written theirs?
//!                 <--buffers--                   rank 0: commit, delete old checkpoints, report <--'
//! ```
//! With memory snapshots there are two sets of buffers, used in turn, and a snapshot is complete in memory before it is
//! written to disk: a failing disk does not affect it. If host memory is too small for any copy of the state, there are
//! no buffers: the training thread waits, and hands over the state piece by piece as it is written.
//!
//! One save is in flight at a time. In the all-reduce of a step all ranks agree on whether one is ([`Saver::is_busy`]
//! is this rank's input), so that all of them begin or skip the next save.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use xlaunch_engine::{HostAllocator, HostBuffer};
use xlaunch_proto::disk::Disk;
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_proto::v1::{CheckpointFailed, CheckpointNotDeleted, CheckpointReport};

use super::lock::OwnLock;
use super::retention::Candidate;
use super::tensors::Arena;
pub use super::write::Written;
use super::write::{PIECE_LEN, Values, Writer, commit, delete, temporary};
use super::{CheckpointError, Memory, Portion, Retention, Snapshot, State, directory, name};
use crate::fail;
use crate::model::layout::Parameters;

/// Connection between the ranks of a save. Implemented by the session with the agent.
pub trait Exchange: Send {
    /// Tells the others that this rank has written its part, or why it could not.
    fn written(&mut self, step: u64, result: Result<Vec<Written>, String>);
    /// Rank 0: waits until every rank has answered. Returns all parts, or the reason why a rank failed.
    fn all_written(&mut self, step: u64) -> Result<Vec<Written>, String>;
    /// Waits until the agent has read all reports of this rank so far, or the agent is lost.
    fn flush(&mut self);
    /// Reports the result of a save to the agent.
    fn report(&mut self, report: Report);
}

/// Settings of a rank's saves.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names describe the fields")]
pub struct Settings {
    pub dir: PathBuf,
    pub layout: Parameters,
    pub portion: Portion,
    pub rank: usize,
    /// Ranks below this one write; the others have an empty portion and send no answer.
    pub writers: usize,
    pub retention: Retention,
    /// The contents of `tokenizer.json`, written by rank 0.
    pub tokenizer: Option<Vec<u8>>,
    /// The checkpoint that the run was resumed from.
    pub source: Option<PathBuf>,
    /// Allocates the buffers for snapshots.
    pub host: HostAllocator,
    pub buffers: Buffers,
}

/// Host memory for the state that is being saved.
#[derive(Clone, Debug)]
pub enum Buffers {
    /// One copy in private memory.
    Own,
    /// Two copies in files that outlive this process.
    Files {
        /// The files.
        memory: Memory,
        /// True if unusable files are an error. Otherwise there is one copy in private memory instead.
        required: bool,
    },
    /// No copy: training waits until the state is written.
    Pieces,
}

/// A save in progress.
struct Job {
    source: Source,
    state: State,
    start: Instant,
}

/// Source of the values to save.
enum Source {
    Copy(Snapshot),
    Pieces(Pieces),
}

/// The checkpoint thread's end of a save in pieces: values that the training thread reads on request.
struct Pieces {
    requests: Sender<(Arena, Range<usize>, HostBuffer)>,
    answers: Receiver<HostBuffer>,
    buffer: HostBuffer,
}

impl Values for Pieces {
    fn get(&mut self, arena: Arena, range: Range<usize>) -> io::Result<&[f32]> {
        let gone = || io::Error::other("the training thread has failed to read the state");
        let (len, buffer) = (range.len(), std::mem::take(&mut self.buffer));
        self.requests.send((arena, range, buffer)).map_err(|_| gone())?;
        self.buffer = self.answers.recv().map_err(|_| gone())?;
        Ok(&self.buffer[..len])
    }
}

/// The result of a save, or of starting the thread.
struct Ended {
    /// Buffers for the next saves.
    buffers: Vec<Snapshot>,
    result: Result<(), CheckpointError>,
}

/// The training thread's handle of the saving thread.
#[derive(Debug)]
pub struct Saver {
    jobs: Sender<Job>,
    ended: Receiver<Ended>,
    busy: Arc<AtomicBool>,
    in_flight: bool,
    /// Buffers that are not in use. The first ones will be overwritten next.
    buffers: VecDeque<Snapshot>,
    /// Allocates the buffer of a save in pieces, which has no snapshot buffers.
    host: Option<HostAllocator>,
}

impl Saver {
    /// Starts the thread.
    pub fn start(settings: Settings, exchange: Box<dyn Exchange>) -> io::Result<Self> {
        Self::with_disk(settings, exchange, Disk::default())
    }

    pub(super) fn with_disk(settings: Settings, exchange: Box<dyn Exchange>, disk: Disk) -> io::Result<Self> {
        let Settings { dir, layout, portion, rank, writers, .. } = settings;
        let Settings { retention, tokenizer, source, host, buffers, .. } = settings;
        let (jobs, queue) = channel();
        let (sender, ended) = channel();
        let busy = Arc::new(AtomicBool::new(false));
        let len = portion.len();
        let writer = Writer { layout, portion, rank, writers };
        let reported_failure = false;
        let lock = OwnLock::look(&dir);
        let mut thread =
            Thread { dir, lock, writer, retention, tokenizer, source, exchange, disk, reported_failure };
        let flag = busy.clone();
        let pieces = matches!(buffers, Buffers::Pieces).then(|| host.clone());
        thread::Builder::new().name("checkpoint".into()).spawn(move || {
            // Allocate on this thread: touching gigabytes for the first time takes longer than a step.
            let (buffers, result) = match allocate(&host, len, &buffers) {
                Ok(buffers) => (buffers, Ok(())),
                Err(error) => (Vec::new(), Err(error)),
            };
            if sender.send(Ended { buffers, result }).is_err() {
                return;
            }
            while let Ok(job) = queue.recv() {
                let Job { source, state, start } = job;
                let (buffers, result) = thread.save(source, state, start);
                flag.store(false, Ordering::Release);
                if sender.send(Ended { buffers: Vec::from_iter(buffers), result }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs, ended, busy, in_flight: true, buffers: VecDeque::new(), host: pieces })
    }

    /// Returns whether this rank is still writing.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }

    /// Waits for the save in flight, or for the first buffers, and returns its result. `Ok` if no save is in flight.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        if !std::mem::take(&mut self.in_flight) {
            return Ok(());
        }
        // The thread lives as long as this handle.
        let Ok(Ended { buffers, result }) = self.ended.recv() else { return Ok(()) };
        self.buffers.extend(buffers);
        result
    }

    /// Same as [`wait`](Self::wait), but returns `Ok` if the save has not ended yet.
    pub fn poll(&mut self) -> Result<(), CheckpointError> {
        if !self.in_flight {
            return Ok(());
        }
        let Ok(Ended { buffers, result }) = self.ended.try_recv() else { return Ok(()) };
        self.in_flight = false;
        self.buffers.extend(buffers);
        result
    }

    /// Returns buffers to fill for a snapshot and pass to [`begin`](Self::begin). Call [`wait`](Self::wait) first.
    /// Erases the memory snapshot that they hold.
    pub fn take_buffers(&mut self) -> Result<Snapshot, CheckpointError> {
        let buffers = self.buffers.pop_front().unwrap_or_default();
        buffers.erase().map_err(memory_failed)?;
        Ok(buffers)
    }

    /// Begins a save. The previous one must have been waited for.
    pub fn begin(&mut self, snapshot: Snapshot, state: State, start: Instant) {
        self.start_job(Source::Copy(snapshot), state, start);
    }

    /// Returns whether there are no buffers. Then call [`save_in_pieces`](Self::save_in_pieces) instead of
    /// [`take_buffers`](Self::take_buffers) and [`begin`](Self::begin).
    pub fn has_no_buffers(&self) -> bool {
        self.host.is_some()
    }

    /// Begins a save without buffers, and returns when the thread needs no more values. `read` fills a slice with the
    /// values at a range of a virtual buffer that holds the portion's ranges back to back.
    ///
    /// # Errors
    /// If `read` fails; the save fails, too.
    pub fn save_in_pieces<E>(
        &mut self,
        state: State,
        start: Instant,
        mut read: impl FnMut(Arena, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (requests, asked) = channel::<(Arena, Range<usize>, HostBuffer)>();
        let (answer, answers) = channel();
        let buffer = self.host.iter().map(|host| host.alloc(PIECE_LEN)).next().unwrap_or_default();
        self.start_job(Source::Pieces(Pieces { requests, answers, buffer }), state, start);
        while let Ok((arena, range, mut buffer)) = asked.recv() {
            let len = range.len();
            read(arena, range, &mut buffer[..len])?;
            // If the thread needs no more values, writing has failed; it reports that when it ends the save.
            let _ = answer.send(buffer);
        }
        Ok(())
    }

    fn start_job(&mut self, source: Source, state: State, start: Instant) {
        self.busy.store(true, Ordering::Release);
        // As in `wait`, the thread lives as long as this handle.
        self.in_flight = self.jobs.send(Job { source, state, start }).is_ok();
    }
}

/// Allocates buffers for the values of a portion.
#[expect(clippy::print_stderr, reason = "the agent shows stderr; training continues")]
fn allocate(host: &HostAllocator, len: usize, buffers: &Buffers) -> Result<Vec<Snapshot>, CheckpointError> {
    match buffers {
        Buffers::Pieces => return Ok(Vec::new()),
        Buffers::Files { memory, required } => match memory.allocate(host) {
            Err(error) if *required => return Err(error),
            Err(error) => eprintln!("warning: no snapshots are kept in memory: {error}"),
            Ok(buffers) => return Ok(buffers),
        },
        Buffers::Own => {}
    }
    let [params, m, v] = [(); 3].map(|()| host.alloc(len));
    Ok(vec![Snapshot { params, m, v, slot: None }])
}

fn memory_failed(error: io::Error) -> CheckpointError {
    CheckpointError::Write { path: "memory snapshot".into(), reason: error.to_string() }
}

struct Thread {
    dir: PathBuf,
    lock: OwnLock,
    writer: Writer,
    retention: Retention,
    tokenizer: Option<Vec<u8>>,
    source: Option<PathBuf>,
    exchange: Box<dyn Exchange>,
    disk: Disk,
    reported_failure: bool,
}

impl Thread {
    /// Writes and commits a checkpoint if this rank is a writer. Returns the buffers of a copy, for reuse, and the
    /// result.
    fn save(
        &mut self,
        source: Source,
        state: State,
        start: Instant,
    ) -> (Option<Snapshot>, Result<(), CheckpointError>) {
        if self.writer.rank >= self.writer.writers {
            let buffers = match source {
                Source::Copy(snapshot) => Some(snapshot),
                Source::Pieces(_) => None,
            };
            return (buffers, Ok(()));
        }
        fail::set_step(state.step);
        let temporary = temporary(&self.dir, state.step);
        let (buffers, written) = match source {
            Source::Copy(snapshot) => {
                self.complete(&snapshot, &state);
                let written = self.write(&temporary, &mut &snapshot);
                (Some(snapshot), written)
            }
            Source::Pieces(mut pieces) => (None, self.write(&temporary, &mut pieces)),
        };
        let written = written.map_err(|error| format!("rank {}: {error}", self.writer.rank));
        (buffers, self.commit(written, &state, start))
    }

    /// Writes this rank's part, unless the directory has become that of another job.
    fn write(&mut self, to: &Path, values: &mut dyn Values) -> io::Result<Vec<Written>> {
        self.lock.check()?;
        self.writer.write(&self.disk, to, values)
    }

    /// Turns a copy in files into a complete memory snapshot.
    fn complete(&mut self, snapshot: &Snapshot, state: &State) {
        if self.writer.rank == 0 && snapshot.slot.is_some() {
            // Rank 0 has sent its metrics to the agent. An attempt that resumes from the snapshot does not report them
            // again.
            self.exchange.flush();
        }
        if let Err(error) = snapshot.complete(state) {
            self.report_failure(state.step, Path::new("memory snapshot"), &error.to_string());
        }
    }

    /// Tells the other ranks which files this one has written. Rank 0 turns the parts of all ranks into a checkpoint.
    fn commit(
        &mut self,
        written: Result<Vec<Written>, String>,
        state: &State,
        start: Instant,
    ) -> Result<(), CheckpointError> {
        let (step, temporary) = (state.step, temporary(&self.dir, state.step));
        let path = self.dir.join(name(step));
        let failed = |reason: String| CheckpointError::Write { path: path.clone(), reason };
        self.exchange.written(step, written);
        if self.writer.rank != 0 {
            // Rank 0 is told, and decides how to continue.
            return Ok(());
        }
        let saved = self.exchange.all_written(step).and_then(|parts| {
            let tokenizer = self.tokenizer.as_deref();
            commit(&self.disk, &self.dir, state, tokenizer, parts).map_err(|error| error.to_string())
        });
        match saved {
            Ok(path) => {
                self.exchange.report(Report::Checkpoint(CheckpointReport {
                    step,
                    path: path.display().to_string(),
                    seconds: start.elapsed().as_secs_f64(),
                }));
                self.delete_old(state);
                Ok(())
            }
            Err(reason) => {
                if self.lock.check().is_ok() {
                    // If this fails, the next start of the job removes the rest.
                    let _ = self.disk.remove_dir(&temporary);
                }
                self.report_failure(step, &path, &reason);
                Err(failed(reason))
            }
        }
    }

    fn report_failure(&mut self, step: u64, path: &Path, reason: &str) {
        let (path, reason) = (path.display().to_string(), reason.to_owned());
        self.exchange.report(Report::CheckpointFailed(CheckpointFailed { step, path, reason }));
    }

    /// Deletes checkpoints that the retention rules do not keep, of this run and of the runs that it continues.
    fn delete_old(&mut self, newest: &State) {
        let found = match directory::scan(&self.dir) {
            Ok(found) => found,
            Err(error) => return self.not_deleted(&self.dir.clone(), &error),
        };
        let belongs = |state: &State| {
            state.run == newest.run
                || newest.parents.iter().any(|parent| parent.run == state.run && state.step <= parent.step)
        };
        // The path to resume from may lead through other links than the directory of checkpoints.
        let resolved = |path: &Path| fs_err::canonicalize(path).unwrap_or_else(|_| path.into());
        let source = self.source.as_deref().map(resolved);
        let candidate = |found: &directory::Found| {
            let state = found.state.as_ref().ok().filter(|state| belongs(state) && !found.pinned)?;
            let is_source = source.as_ref().is_some_and(|source| *source == resolved(&found.path));
            Some(Candidate { step: found.step, val_loss: state.val_loss, is_source })
        };
        let candidates = found.iter().filter_map(candidate).collect();
        for step in self.retention.to_delete(candidates) {
            let path = self.dir.join(name(step));
            if let Err(error) = delete(&self.disk, &self.dir, step) {
                self.not_deleted(&path, &error);
            }
        }
    }

    /// Reports the failure once: the same failure would follow every save.
    fn not_deleted(&mut self, path: &Path, reason: &dyn fmt::Display) {
        if !std::mem::replace(&mut self.reported_failure, true) {
            let (path, reason) = (path.display().to_string(), reason.to_string());
            self.exchange.report(Report::CheckpointNotDeleted(CheckpointNotDeleted { path, reason }));
        }
    }
}
