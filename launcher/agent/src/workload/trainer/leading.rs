//! The duties of the node of rank 0: it writes the curves, and keeps other jobs out of the checkpoint directory.
//!
//! A node keeps rank 0 for as long as it is a member. After it has left, another node takes over in the next attempt
//! and appends to the same files.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use xlaunch_spec::lineage::DirectoryLock;

use super::{METRICS, TrainerWorkload};
use crate::sinks::metrics::Metrics;
use crate::sinks::samples::Samples;
use crate::sinks::tensorboard::TensorBoard;
use crate::workload::Workload;
use crate::workload::host_memory::SaveBuffers;
use crate::workload::snapshots::{Snapshots, note_of_nodes};

/// Name of the sink that writes sampled texts.
const SAMPLES: &str = "samples.jsonl";
/// Time for the previous node of rank 0 to release the lock of `checkpoint.dir`, after which the user is told.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// The duties of the node of rank 0.
#[derive(Debug)]
pub(super) struct Lead {
    lock: Lock,
}

/// The lock of `checkpoint.dir`.
#[derive(Debug)]
enum Lock {
    /// `checkpoint.dir` is not set: each run has a directory of its own.
    NotNeeded,
    Held(Box<dyn DirectoryLock>),
    /// The previous node of rank 0 may still hold it. `told` is set once the user knows.
    Wanted {
        since: Instant,
        told: bool,
    },
}

impl TrainerWorkload<'_> {
    /// Takes over the duties of rank 0's node for the attempt that begins.
    pub(super) fn lead(&mut self) -> io::Result<()> {
        if self.lead.is_some() {
            return Ok(());
        }
        self.run.lead();
        let lock = match (self.plan.lock.take(), &self.plan.spec.checkpoint.dir) {
            (Some(lock), _) => Lock::Held(lock),
            (None, Some(_)) if self.plan.bench.is_none() => {
                Lock::Wanted { since: Instant::now(), told: false }
            }
            (None, _) => Lock::NotNeeded,
        };
        self.lead = Some(Lead { lock });
        self.keep_lock();
        self.open_curves()
    }

    /// Tries to lock `checkpoint.dir` if the previous node of rank 0 still held it at the last try.
    pub(super) fn keep_lock(&mut self) {
        let checkpoint_dir = self.plan.spec.checkpoint.dir.as_ref();
        let Some(Lead { lock }) = &mut self.lead else { return };
        let (Lock::Wanted { since, told }, Some(dir)) = (&mut *lock, checkpoint_dir) else { return };
        match (self.plan.files.lock)(Path::new(dir), &self.plan.spec.job.name) {
            Ok(held) => *lock = Lock::Held(held),
            Err(problem) if since.elapsed() >= LOCK_TIMEOUT && !std::mem::replace(told, true) => {
                self.notify(&format!("xlaunch: {problem}; two jobs would replace each other's checkpoints"));
            }
            Err(_) => {}
        }
    }

    /// Locks `checkpoint.dir` again if it was moved or removed, and workers have created another one. Call this before
    /// anything in it is replaced.
    ///
    /// # Errors
    /// If another job has locked that one.
    pub(super) fn renew_lock(&mut self) -> Result<(), String> {
        let Some(dir) = self.plan.spec.checkpoint.dir.as_ref().map(Path::new) else { return Ok(()) };
        let Some(Lead { lock: Lock::Held(held) }) = &mut self.lead else { return Ok(()) };
        if held.is_in_place() || !dir.exists() {
            return Ok(());
        }
        *held = (self.plan.files.lock)(dir, &self.plan.spec.job.name)?;
        let dir = dir.display();
        self.notify(&format!(
            "xlaunch: checkpoint directory {dir} was moved or removed; saving in a new one"
        ));
        Ok(())
    }

    /// Opens the files that rank 0's reports are written to.
    fn open_curves(&mut self) -> io::Result<()> {
        let (spec, is_bench) = (self.plan.spec, self.plan.bench.is_some());
        let files = || (self.run.path.clone(), self.plan.parent.clone());
        if spec.observe.metrics {
            self.results.metrics = Some(Metrics::path(&self.run.path));
            let (dir, parent) = files();
            self.sinks.add_file(METRICS, move || Metrics::create(&dir, parent.as_deref()))?;
        }
        if !is_bench && spec.train.sample > 0 {
            let (dir, parent) = files();
            self.sinks.add_file(SAMPLES, move || Samples::new(&dir, parent.as_deref()))?;
        }
        if spec.observe.tensorboard {
            let (dir, parent) = files();
            let create = move || TensorBoard::create(&dir, parent.as_deref());
            self.sinks.add_file("TensorBoard's event file", create)?;
        }
        Ok(())
    }

    /// Creates the memory snapshots of this attempt, or drops them if it has several nodes. Snapshots exist on a single
    /// node only, and those of an earlier attempt are older than the checkpoint saved when the group changed.
    pub(super) fn use_memory(&mut self) -> io::Result<()> {
        if self.attempt.assignment.has_peers() {
            self.snapshots = None;
        } else if self.plan.buffers == SaveBuffers::Snapshots && self.snapshots.is_none() {
            self.snapshots = Some(Snapshots::create(&self.run.id, self.plan.placement.workers)?);
        }
        Ok(())
    }

    /// Tells the user, once, how running on several nodes affects checkpoints.
    pub(super) fn describe_group(&mut self) {
        let assignment = &self.attempt.assignment;
        let unshared = (assignment.writers < assignment.world).then(|| {
            let dir = self.checkpoint_dir();
            format!(
                "nodes do not share {}: node 0 keeps the checkpoints, and the job ends if it is lost",
                dir.display()
            )
        });
        let note = note_of_nodes(self.plan.spec).filter(|_| assignment.has_peers());
        for text in unshared.into_iter().chain(note.map(Into::into)) {
            if self.told.insert(text.clone()) {
                self.notify(&format!("xlaunch: {text}"));
            }
        }
    }
}
