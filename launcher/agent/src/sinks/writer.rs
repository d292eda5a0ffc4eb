//! The queue and the writer thread of one sink.

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
    /// Nothing follows.
    Finish,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Everything was written.
    Finished,
    Failed,
}

/// The driver's side of a sink.
#[derive(Debug)]
pub(super) struct Writer {
    name: &'static str,
    queue: mpsc::Sender<Item>,
    /// Items that found the queue full.
    dropped: Arc<AtomicU64>,
    state: watch::Receiver<State>,
    /// Takes messages about this sink; `None` for the console itself, which cannot report its own failure.
    console: Option<LinePrinter>,
}

impl Writer {
    /// Starts the thread, which opens the sink: that may block, too.
    pub(super) fn start<S: ReportSink>(
        name: &'static str,
        queue_length: usize,
        open: impl FnOnce() -> io::Result<S> + Send + 'static,
        console: Option<LinePrinter>,
    ) -> io::Result<Self> {
        let (queue, items) = mpsc::channel(queue_length);
        let (state, observer) = watch::channel(State::Running);
        let dropped = Arc::new(AtomicU64::new(0));
        let (counter, is_console, printer) = (dropped.clone(), console.is_none(), console.clone());
        let run = move || Thread { sink: open()?, items, dropped: counter, is_console }.run();
        std::thread::Builder::new().name(name.into()).spawn(move || match run() {
            Ok(()) => drop(state.send_replace(State::Finished)),
            Err(error) => {
                // Before the state: `Sinks::finish` closes the console once all files have ended.
                if let Some(printer) = printer {
                    printer.print(format!("xlaunch: {name} is no longer written: {error}"));
                }
                state.send_replace(State::Failed);
            }
        })?;
        Ok(Self { name, queue, dropped, state: observer, console })
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Queues an item without waiting. A sink that has failed takes nothing; that was reported.
    pub(super) fn offer(&self, item: Item) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(item)
            && self.dropped.fetch_add(1, Ordering::Relaxed) == 0
            && let Some(console) = &self.console
        {
            console.print(format!("xlaunch: {} is written too slowly: reports are dropped", self.name));
        }
    }

    pub(super) async fn request_finish(&self, deadline: Instant) {
        // Past the deadline, or after a failure, `finished` tells.
        let _ = timeout_at(deadline, self.queue.send(Item::Finish)).await;
    }

    /// Whether everything that was queued has been written by the deadline. What has not is reported.
    pub(super) async fn finished(&self, deadline: Instant) -> bool {
        let mut state = self.state.clone();
        let ended = timeout_at(deadline, state.wait_for(|state| *state != State::Running)).await;
        let state = ended.map_or(State::Running, |ended| ended.map_or(State::Failed, |state| *state));
        let dropped = self.dropped.load(Ordering::Relaxed);
        if let Some(console) = &self.console {
            match state {
                State::Running => {
                    let before = if dropped > 0 {
                        format!("{dropped} reports were dropped, and ")
                    } else {
                        String::new()
                    };
                    console.print(format!(
                        "xlaunch: {} is incomplete: {before}the last reports could not be written in time",
                        self.name
                    ));
                }
                State::Finished if dropped > 0 => console
                    .print(format!("xlaunch: {} is incomplete: {dropped} reports were dropped", self.name)),
                State::Finished | State::Failed => {}
            }
        }
        state == State::Finished
    }
}

/// The sink's side.
struct Thread<S> {
    sink: S,
    items: mpsc::Receiver<Item>,
    dropped: Arc<AtomicU64>,
    is_console: bool,
}

impl<S: ReportSink> Thread<S> {
    fn run(mut self) -> io::Result<()> {
        loop {
            match self.items.blocking_recv() {
                Some(Item::Report(report)) => self.sink.report(&report)?,
                Some(Item::Line(line)) => self.sink.line(&line)?,
                Some(Item::Finish) | None => {
                    self.print_dropped()?;
                    return self.sink.finish();
                }
            }
            // Not while it is behind: the count would only add to the load.
            if self.items.is_empty() {
                self.print_dropped()?;
            }
        }
    }

    /// A console says itself what it has lost; for files, `Writer::finished` does.
    fn print_dropped(&mut self) -> io::Result<()> {
        match self.is_console.then(|| self.dropped.swap(0, Ordering::Relaxed)) {
            None | Some(0) => Ok(()),
            Some(count) => {
                self.sink.line(&format!("xlaunch: {count} lines were dropped: the console was too slow"))
            }
        }
    }
}
