//! Where the reports of a training job go: the progress line, `metrics.jsonl`, `samples.jsonl`, TensorBoard, the
//! closing summary.
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
//! - Nothing is lost silently. A report that finds the queue of a file full is dropped, which is reported at the first
//!   one and, with the number, at the end. Lines that the console did not take are counted, and the count is printed
//!   once the console has caught up.
//! - A file that cannot be written is reported, and tried again with every report; what is missing is said at the end.
//!   A console that cannot be written takes nothing more. Training goes on.
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

/// Reports that may wait for a file, and reports and lines that may wait for the console.
const QUEUE_LENGTH: usize = 4096;

/// What one rank reported.
#[derive(Clone, Debug)]
pub struct RankReport {
    pub rank: u32,
    /// When the agent received it.
    pub at: Instant,
    pub report: Report,
}

/// Writes reports somewhere. Runs on a thread of its own and may block.
pub(crate) trait ReportSink: Send + 'static {
    /// A report of rank 0: all ranks take every step together, so that one speaks for all. A file that returns an error
    /// keeps the report for later.
    fn report(&mut self, report: &RankReport) -> io::Result<()>;

    /// A line for the user.
    fn line(&mut self, _line: &str) -> io::Result<()> {
        Ok(())
    }

    /// The job is over: writes what was kept.
    fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Reports that were kept or lost.
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

    /// Adds a sink that writes a file, which `open` may create, on the sink's thread; `name` is for messages and for
    /// [`finish`](Self::finish).
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

    /// Passes a report on, without waiting. What no sink wants is left out here: heartbeats, and ranks other than 0.
    pub(crate) fn report(&self, report: RankReport) {
        if report.rank != 0 || matches!(report.report, Report::Heartbeat(_)) {
            return;
        }
        let report = Arc::new(report);
        for writer in self.files.iter().chain([&self.console.0]) {
            writer.offer(Item::Report(report.clone()));
        }
    }

    /// Flushes all sinks, for at most `timeout` the files and then for at most `timeout` the console. Returns the names
    /// of the files that are complete.
    pub(crate) async fn finish(self, timeout: Duration) -> BTreeSet<&'static str> {
        let deadline = tokio::time::Instant::now() + timeout;
        // In parallel: the marks are queued first, then waited for.
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
