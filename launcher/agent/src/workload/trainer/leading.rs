//! What the node of rank 0 does for all: it has the curves, and keeps other jobs out of the directory of checkpoints.
//!
//! A node keeps rank 0 as long as it is a member. When it has left, another one takes over in the next attempt, and
//! continues the same files.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{HeldLock, METRICS, TrainerWorkload};
use crate::sinks::metrics::Metrics;
use crate::sinks::samples::Samples;
use crate::sinks::tensorboard::TensorBoard;
use crate::workload::Workload;
use crate::workload::host_memory::SaveBuffers;
use crate::workload::snapshots::{Snapshots, note_of_nodes};

/// Name of the sink of sampled texts.
const SAMPLES: &str = "samples.jsonl";
/// The node that had the lock of the checkpoints releases it as it ends.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// The duties of the node of rank 0.
#[derive(Debug)]
pub(super) struct Lead {
    lock: Lock,
}

/// The lock of `checkpoint.dir`.
#[derive(Debug)]
enum Lock {
    /// Without that directory, each run has its own.
    NotNeeded,
    Held {
        _lock: HeldLock,
    },
    /// The node that had rank 0 before may still hold it.
    Wanted {
        since: Instant,
        told: bool,
    },
}

impl TrainerWorkload<'_> {
    /// This node has rank 0 in the attempt that begins.
    pub(super) fn lead(&mut self) -> io::Result<()> {
        if self.lead.is_some() {
            return Ok(());
        }
        self.run.lead();
        let lock = match (self.plan.lock.take(), &self.plan.spec.checkpoint.dir) {
            (Some(lock), _) => Lock::Held { _lock: lock },
            (None, Some(_)) if self.plan.bench.is_none() => {
                Lock::Wanted { since: Instant::now(), told: false }
            }
            (None, _) => Lock::NotNeeded,
        };
        self.lead = Some(Lead { lock });
        self.keep_lock();
        self.open_curves()
    }

    /// Locks `checkpoint.dir` as soon as the node that had rank 0 before has released it.
    pub(super) fn keep_lock(&mut self) {
        let checkpoint_dir = self.plan.spec.checkpoint.dir.as_ref();
        let Some(Lead { lock }) = &mut self.lead else { return };
        let (Lock::Wanted { since, told }, Some(dir)) = (&mut *lock, checkpoint_dir) else { return };
        match (self.plan.files.lock)(Path::new(dir), &self.plan.spec.job.name) {
            Ok(held) => *lock = Lock::Held { _lock: held },
            Err(problem) if since.elapsed() >= LOCK_TIMEOUT && !std::mem::replace(told, true) => {
                self.notify(&format!("xlaunch: {problem}; two jobs would replace each other's checkpoints"));
            }
            Err(_) => {}
        }
    }

    /// Opens the files of rank 0's reports.
    fn open_curves(&mut self) -> io::Result<()> {
        let (spec, is_bench) = (self.plan.spec, self.plan.bench.is_some());
        let files = || (self.run.path.clone(), self.plan.parent.clone());
        if spec.observe.metrics {
            self.metrics_path = Some(Metrics::path(&self.run.path));
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

    /// Snapshots in memory are of attempts with one node. Those of an earlier attempt are older than the checkpoint
    /// with which the group has changed.
    pub(super) fn use_memory(&mut self) -> io::Result<()> {
        if self.assignment.has_peers() {
            (self.snapshots, self.resume_snapshot) = (None, None);
        } else if self.plan.buffers == SaveBuffers::Snapshots && self.snapshots.is_none() {
            self.snapshots = Some(Snapshots::create(&self.run.id, self.plan.placement.workers)?);
        }
        Ok(())
    }

    /// Tells the user once what several nodes mean for checkpoints.
    pub(super) fn describe_group(&mut self) {
        if self.assignment.writers < self.assignment.world
            && !std::mem::replace(&mut self.told_unshared, true)
        {
            let dir = self.checkpoint_dir();
            self.notify(&format!(
                "xlaunch: nodes do not share {}: node 0 keeps the checkpoints, and the job ends if it is lost",
                dir.display()
            ));
        }
        let note = note_of_nodes(self.plan.spec).filter(|_| self.assignment.has_peers());
        if let Some(note) = note.filter(|_| !std::mem::replace(&mut self.told_without_memory, true)) {
            self.notify(&format!("xlaunch: {note}"));
        }
    }
}
