//! Destinations of a training job's reports: progress line, `metrics.jsonl`, `samples.jsonl`, TensorBoard and the final
//! summary.
//!
//! ```text
//!                               ,-> queue -> thread: Progress      (also takes lines for the user)
//! driver's task -> Sinks::report -> queue -> thread: Metrics, Samples
//!                               '-> queue -> thread: TensorBoard
//!               -> Summary                 in memory, updated by the driver's task itself
//! ```
//! Invariants:
//! - The driver's task never waits for a disk or a terminal. Every [`ReportSink`] has a bounded queue and a writer
//!   thread of its own, which also creates its file, so that a sink that blocks delays neither the driver nor another
//!   sink.
//! - Nothing is lost silently. A report that finds the queue of a file full is dropped; the user is told when this
//!   first happens, and gets the number at the end. Dropped console lines are counted, and the count is printed once
//!   the console has caught up.
//! - If a file cannot be written, the user is told, each further report tries again, and the number of missing reports
//!   is printed at the end. A console that cannot be written to is no longer used. Training continues.
//! - [`Sinks::finish`] flushes all queues within a deadline, files first.

mod appender;
pub(crate) mod metrics;
mod points;
pub mod progress;
pub(crate) mod samples;
pub mod summary;
pub(crate) mod tensorboard;
mod writer;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use xlaunch_proto::v1::worker_report::Report;

use writer::{Item, Writer};

/// Capacity of each sink's queue, in reports and lines.
const QUEUE_LENGTH: usize = 4096;

/// A report of one rank.
#[derive(Clone, Debug)]
pub struct RankReport {
    pub rank: u32,
    /// Time at which the agent received the report.
    pub at: Instant,
    pub report: Report,
}

/// A destination of reports. It runs on a thread of its own and may block.
pub(crate) trait ReportSink: Send + 'static {
    /// Writes a report of rank 0. All ranks take every step together, so one rank speaks for all. A file sink that
    /// returns an error keeps the report and writes it later; it tries again with every report.
    fn report(&mut self, report: &RankReport) -> io::Result<()>;

    /// Prints a line for the user.
    fn line(&mut self, _line: &str) -> io::Result<()> {
        Ok(())
    }

    /// Writes the reports that were kept, at the end of the job.
    fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Returns what the user should know since the last call.
    fn take_warning(&mut self) -> Option<String> {
        None
    }

    /// Number of reports that are not written: kept for later, or lost.
    fn missing(&self) -> u64 {
        0
    }
}

/// Prints lines for the user without waiting; clones share one queue.
#[derive(Clone, Debug)]
pub(crate) struct LinePrinter(Arc<Writer>);

impl LinePrinter {
    pub(crate) fn print(&self, line: impl Into<String>) {
        self.0.offer(Item::Line(line.into()));
    }
}

/// All sinks of a job.
#[derive(Debug)]
pub(crate) struct Sinks {
    console: LinePrinter,
    files: Vec<Arc<Writer>>,
}

impl Sinks {
    pub(crate) fn new(console: impl ReportSink) -> io::Result<Self> {
        let writer = Writer::start("progress", QUEUE_LENGTH, || console, None)?;
        Ok(Self { console: LinePrinter(Arc::new(writer)), files: Vec::new() })
    }

    /// Adds a sink that writes a file. `open` runs on the sink's thread, where it may create the file. `name` is used
    /// in messages and by [`finish`](Self::finish).
    pub(crate) fn add_file<S: ReportSink>(
        &mut self,
        name: &'static str,
        open: impl FnOnce() -> S + Send + 'static,
    ) -> io::Result<()> {
        let writer = Writer::start(name, QUEUE_LENGTH, open, Some(self.console.clone()))?;
        self.files.push(Arc::new(writer));
        Ok(())
    }

    pub(crate) fn printer(&self) -> &LinePrinter {
        &self.console
    }

    /// Passes a report to all sinks without waiting. Heartbeats and the reports of ranks other than 0 are dropped here,
    /// as no sink needs them.
    pub(crate) fn report(&self, report: RankReport) {
        if report.rank != 0 || matches!(report.report, Report::Heartbeat(_)) {
            return;
        }
        let report = Arc::new(report);
        for writer in self.files.iter().chain([&self.console.0]) {
            writer.offer(Item::Report(report.clone()));
        }
    }

    /// Flushes all sinks: first the files, then the console, each for at most `timeout`. Returns the names of the files
    /// that are complete.
    pub(crate) async fn finish(self, timeout: Duration) -> BTreeSet<&'static str> {
        let deadline = tokio::time::Instant::now() + timeout;
        // The sinks finish in parallel: all end marks are queued before waiting for the first sink.
        for writer in &self.files {
            writer.request_finish(deadline).await;
        }
        let mut complete = BTreeSet::new();
        for writer in &self.files {
            if writer.finished(deadline).await {
                complete.insert(writer.name());
            }
        }
        let deadline = tokio::time::Instant::now() + timeout;
        self.console.0.request_finish(deadline).await;
        self.console.0.finished(deadline).await;
        complete
    }
}

#[cfg(test)]
mod tests;
