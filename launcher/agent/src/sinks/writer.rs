//! Queue and writer thread of a sink.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};

use super::{LinePrinter, RankReport, ReportSink};

#[derive(Clone, Debug)]
pub(super) enum Item {
    Report(Arc<RankReport>),
    Line(String),
    /// End of the queue: nothing follows.
    Finish,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// All reports except for `missing` were written.
    Finished {
        missing: u64,
    },
    Failed,
}

/// The driver's side of a sink.
#[derive(Debug)]
pub(super) struct Writer {
    name: &'static str,
    queue: mpsc::Sender<Item>,
    /// Number of items dropped because the queue was full.
    dropped: Arc<AtomicU64>,
    state: watch::Receiver<State>,
    /// Prints messages about this sink; `None` for the console itself, which cannot report its own failure.
    console: Option<LinePrinter>,
}

impl Writer {
    /// Starts the thread. The sink is opened on it, because opening may block too.
    pub(super) fn start<S: ReportSink>(
        name: &'static str,
        queue_length: usize,
        open: impl FnOnce() -> S + Send + 'static,
        console: Option<LinePrinter>,
    ) -> io::Result<Self> {
        let (queue, items) = mpsc::channel(queue_length);
        let (state, observer) = watch::channel(State::Running);
        let dropped = Arc::new(AtomicU64::new(0));
        let (counter, printer) = (dropped.clone(), console.clone());
        let run =
            move || Thread { name, sink: open(), items, dropped: counter, printer, failing: false }.run();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let ended = run().map_or(State::Failed, |missing| State::Finished { missing });
            state.send_replace(ended);
        })?;
        Ok(Self { name, queue, dropped, state: observer, console })
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Queues an item without waiting. The items of a sink that has failed are dropped; the failure was reported.
    pub(super) fn offer(&self, item: Item) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(item)
            && self.dropped.fetch_add(1, Ordering::Relaxed) == 0
            && let Some(console) = &self.console
        {
            console.print(format!("xlaunch: {} is written too slowly: reports are dropped", self.name));
        }
    }

    pub(super) async fn request_finish(&self, deadline: Instant) {
        // `finished` reports a passed deadline or a failure.
        let _ = timeout_at(deadline, self.queue.send(Item::Finish)).await;
    }

    /// Waits until all queued items are written, at most until the deadline. Returns whether they are; if not, the user
    /// is told.
    pub(super) async fn finished(&self, deadline: Instant) -> bool {
        let mut state = self.state.clone();
        let ended = timeout_at(deadline, state.wait_for(|state| *state != State::Running)).await;
        let state = ended.map_or(State::Running, |ended| ended.map_or(State::Failed, |state| *state));
        let (name, dropped) = (self.name, self.dropped.load(Ordering::Relaxed));
        let problem = match state {
            State::Running if dropped > 0 => {
                format!("{dropped} reports were dropped, and the last reports could not be written in time")
            }
            State::Running => "the last reports could not be written in time".into(),
            State::Finished { missing: 0 } if dropped == 0 => return true,
            State::Finished { missing: 0 } => format!("{dropped} reports were dropped"),
            State::Finished { missing } => format!("{} reports are missing", missing.saturating_add(dropped)),
            State::Failed => return false,
        };
        if let Some(console) = &self.console {
            console.print(format!("xlaunch: {name} is incomplete: {problem}"));
        }
        // The console has printed the count of its own dropped lines itself.
        self.console.is_none()
    }
}

/// The thread's side of a sink.
struct Thread<S> {
    name: &'static str,
    sink: S,
    items: mpsc::Receiver<Item>,
    dropped: Arc<AtomicU64>,
    /// `None` for the console itself.
    printer: Option<LinePrinter>,
    /// True if the last write to the file failed.
    failing: bool,
}

impl<S: ReportSink> Thread<S> {
    /// Runs the thread. Returns the number of reports that are missing at the end. The console stops at its first
    /// error.
    fn run(mut self) -> io::Result<u64> {
        loop {
            let result = match self.items.blocking_recv() {
                Some(Item::Report(report)) => self.sink.report(&report),
                Some(Item::Line(line)) => self.sink.line(&line),
                Some(Item::Finish) | None => {
                    self.print_dropped()?;
                    let result = self.sink.finish();
                    self.tell(result)?;
                    return Ok(self.sink.missing());
                }
            };
            self.tell(result)?;
            // Not while items are queued: the line would add to the load.
            if self.items.is_empty() {
                self.print_dropped()?;
            }
        }
    }

    /// Tells the user when a file can no longer be written, and when it can again.
    fn tell(&mut self, result: io::Result<()>) -> io::Result<()> {
        let Some(printer) = &self.printer else { return result };
        let was_failing = std::mem::replace(&mut self.failing, result.is_err());
        match result {
            Err(error) if !was_failing => printer.print(format!(
                "xlaunch: {} cannot be written: {error}; trying again with every report",
                self.name
            )),
            Ok(()) if was_failing => printer.print(format!("xlaunch: {} is written again", self.name)),
            _ => {}
        }
        if let Some(warning) = self.sink.take_warning() {
            printer.print(format!("xlaunch: {warning}"));
        }
        Ok(())
    }

    /// Prints the number of lines that the console has dropped. `Writer::finished` reports the losses of files.
    fn print_dropped(&mut self) -> io::Result<()> {
        match self.printer.is_none().then(|| self.dropped.swap(0, Ordering::Relaxed)) {
            None | Some(0) => Ok(()),
            Some(count) => {
                self.sink.line(&format!("xlaunch: {count} lines were dropped: the console was too slow"))
            }
        }
    }
}
