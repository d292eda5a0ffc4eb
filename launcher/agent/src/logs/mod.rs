//! The output of workers: complete and unchanged in files, on xlaunch's own stdout and stderr as the user chose, and
//! its tail for the report.
//!
//! ```text
//! worker's pipe --pump (a thread)--> files: <dir>/stdout.log, stderr.log; filtered_*.log of the attempt
//!                        |---------> tail: last lines of stderr, for the report
//!                        '---------> console: lines with a prefix, in turns; or the unchanged bytes of a single rank
//! ```
//! - Every byte goes to the files, whatever the console does; a closed console or a full disk stops no worker.
//! - A line on the console belongs to one writer. See `console` for lines that do not end.
//! - Memory is bounded. A worker that writes faster than the console is slowed down; the others get their turns.

pub mod console;
mod files;
mod lines;
mod prefix;
mod pump;
mod tail;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::command::LogOptions;
use console::{Console, View};
use files::{Filter, LogFile};
use lines::{Lines, Piece};
use prefix::{Prefix, Ranks};
pub(crate) use pump::Written;
use pump::{Destinations, Pump, Shown};
use tail::Tail;

/// xlaunch's own lines that may wait for the console.
const CONSOLE_QUEUE: usize = 256;
/// Longer lines are cut on the console of the built-in trainer.
const MAX_LINE_BYTES: usize = 4096;

/// The output of all workers of a run.
#[derive(Debug)]
pub(crate) struct Output {
    kind: Kind,
    /// Rank of the first worker on this node in the current attempt.
    first_rank: AtomicU32,
}

#[derive(Debug)]
enum Kind {
    Command(Box<Shared>),
    Trainer(PrintLine),
}

/// Prints a line without waiting.
#[derive(Clone)]
struct PrintLine(Arc<dyn Fn(String) + Send + Sync>);

impl std::fmt::Debug for PrintLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrintLine")
    }
}

/// What the workers of a command share. Arrays are indexed by stream: stdout, stderr.
#[derive(Debug)]
struct Shared {
    options: LogOptions,
    prefix: Prefix,
    /// More than one rank is shown on the console.
    several: bool,
    consoles: [Arc<Console>; 2],
    filters: [Filter; 2],
    messages: SyncSender<ConsoleMessage>,
}

/// A line of xlaunch's own, or a request to confirm that all earlier lines are written.
#[derive(Debug)]
enum ConsoleMessage {
    Line(String),
    Flush(oneshot::Sender<()>),
}

impl Output {
    /// The output of a command's workers.
    ///
    /// # Errors
    /// No descriptor or thread is available.
    pub(crate) fn new(options: &LogOptions, role: &str, world: u32) -> std::io::Result<Self> {
        Self::on(Console::own()?, options, role, world)
    }

    /// The output of the built-in trainer's workers: stdout goes to its file alone, lines of stderr are also printed by
    /// `print`, which must not block, with the prefix `[rank N] `.
    pub(crate) fn for_trainer(print: impl Fn(String) + Send + Sync + 'static) -> Self {
        Self::of(Kind::Trainer(PrintLine(Arc::new(print))))
    }

    fn of(kind: Kind) -> Self {
        Self { kind, first_rank: AtomicU32::new(0) }
    }

    fn on(
        consoles: [Arc<Console>; 2],
        options: &LogOptions,
        role: &str,
        world: u32,
    ) -> std::io::Result<Self> {
        let on_console = |rank: &u32| (0..2).any(|stream| shows(options, *rank, stream));
        let filter = |words: &[String], name| Filter::new(words, name, options.rotate_bytes);
        let (messages, queue) = sync_channel(CONSOLE_QUEUE);
        let stderr = consoles[1].clone();
        std::thread::Builder::new().name("console".into()).spawn(move || {
            for message in queue {
                match message {
                    ConsoleMessage::Line(line) => stderr.print(format!("{line}\n").as_bytes()),
                    // The caller may have timed out.
                    ConsoleMessage::Flush(done) => drop(done.send(())),
                }
            }
        })?;
        Ok(Self::of(Kind::Command(Box::new(Shared {
            prefix: Prefix::new(role, options.prefix.as_deref()),
            several: (0..world).filter(on_console).count() > 1,
            consoles,
            filters: [
                filter(&options.stdout_filters, "filtered_stdout.log"),
                filter(&options.stderr_filters, "filtered_stderr.log"),
            ],
            options: options.clone(),
            messages,
        }))))
    }

    /// Lines of workers that start from now on are labelled with ranks from this one.
    pub(crate) fn begin_attempt(&self, first_rank: u32) {
        self.first_rank.store(first_rank, Ordering::Relaxed);
    }

    /// Starts to move a worker's output; `dir`, which must exist, is `<logs>/attempt_<n>/<local rank>`.
    ///
    /// # Errors
    /// A file cannot be created.
    pub(crate) fn start(
        &self,
        local_rank: u32,
        dir: &Path,
        stdout: impl Into<OwnedFd>,
        stderr: impl Into<OwnedFd>,
    ) -> std::io::Result<RankOutput> {
        let tail = Arc::new(Tail::default());
        let ranks = Ranks { rank: self.first_rank.load(Ordering::Relaxed) + local_rank, local_rank };
        let start = |stream: usize, pipe: OwnedFd, name: &str, tail: Option<Arc<Tail>>| {
            let path = dir.join(name);
            let (destinations, console) = match &self.kind {
                Kind::Command(shared) => {
                    (shared.destinations(ranks, stream, &path, tail)?, Some(&shared.consoles[stream]))
                }
                Kind::Trainer(print) => (trainer_destinations(print, ranks.rank, &path, tail)?, None),
            };
            Pump::start(pipe, destinations, console.cloned())
        };
        let pumps = [
            start(0, stdout.into(), "stdout.log", None)?,
            start(1, stderr.into(), "stderr.log", Some(tail.clone()))?,
        ];
        Ok(RankOutput { tail, pumps })
    }

    /// Prints a line of xlaunch's own to stderr, never within a worker's line. Does not wait: a blocked console must
    /// not block xlaunch, and loses lines.
    pub(crate) fn print(&self, line: &str) {
        match &self.kind {
            Kind::Command(shared) => drop(shared.messages.try_send(ConsoleMessage::Line(line.into()))),
            Kind::Trainer(print) => (print.0)(line.into()),
        }
    }

    /// Waits until the console has taken all lines of [`print`](Self::print), at most for `timeout`.
    pub(crate) async fn flush(&self, timeout: Duration) {
        if let Kind::Command(shared) = &self.kind {
            let (done, flushed) = oneshot::channel();
            if shared.messages.try_send(ConsoleMessage::Flush(done)).is_ok() {
                // The console may be blocked.
                let _ = tokio::time::timeout(timeout, flushed).await;
            }
        }
    }
}

/// Whether a stream of this rank is shown on the console.
fn shows(options: &LogOptions, local_rank: u32, stream: usize) -> bool {
    let [redirect, tee] = [&options.redirects, &options.tee].map(|choice| {
        let streams = choice.of(local_rank);
        [streams.stdout, streams.stderr][stream]
    });
    (tee || !redirect) && options.shown.as_ref().is_none_or(|shown| shown.contains(&local_rank))
}

impl Shared {
    fn destinations(
        &self,
        ranks: Ranks,
        stream: usize,
        path: &Path,
        tail: Option<Arc<Tail>>,
    ) -> std::io::Result<Destinations> {
        let local_rank = ranks.local_rank;
        let shown = shows(&self.options, local_rank, stream);
        let tee = self.options.tee.of(local_rank);
        let tee = [tee.stdout, tee.stderr][stream];
        // Like torchrun, filter what is teed; if nothing is, filter everything that is shown.
        let attempt = path.ancestors().nth(2).unwrap_or(path);
        let filtered = match shown && (tee || self.options.tee == Default::default()) {
            true => self.filters[stream].open(attempt, self.prefix.filled(ranks))?,
            false => None,
        };
        let console = &self.consoles[stream];
        let view = || {
            let prefix = self.prefix.of(ranks, tee, self.several, console.terminal);
            View::new(console.clone(), prefix)
        };
        Ok(Destinations {
            file: LogFile::create(path, self.options.rotate_bytes)?,
            tail,
            filtered,
            shown: if shown { Shown::View(view()) } else { Shown::Nothing },
        })
    }
}

/// `tail` is given for stderr alone.
fn trainer_destinations(
    print: &PrintLine,
    rank: u32,
    path: &Path,
    tail: Option<Arc<Tail>>,
) -> std::io::Result<Destinations> {
    let PrintLine(print) = print.clone();
    let print_piece = move |piece: Piece<'_>| {
        // The rest of a line that is too long is in the file only.
        if !piece.continues {
            print(format!("[rank {rank}] {}", printable(piece.bytes)));
        }
    };
    let shown = match tail {
        Some(_) => Shown::Lines(Lines::default(), Box::new(print_piece)),
        None => Shown::Nothing,
    };
    Ok(Destinations { file: LogFile::create(path, None)?, tail, filtered: None, shown })
}

/// A line without its line ending, as UTF-8 of limited length.
fn printable(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let cut = if line.len() > MAX_LINE_BYTES { " [...]" } else { "" };
    let text = String::from_utf8_lossy(&line[..line.len().min(MAX_LINE_BYTES)]);
    format!("{}{cut}", text.trim_end_matches('\r'))
}

/// The output of one worker.
#[derive(Debug)]
pub(crate) struct RankOutput {
    tail: Arc<Tail>,
    pumps: [Pump; 2],
}

impl RankOutput {
    /// The last lines of stderr, oldest first, with the time at which each began to arrive.
    pub(crate) fn timed_tail(&self) -> Vec<(String, Option<Instant>)> {
        self.tail.timed_lines()
    }

    /// For another task, to wait for what the worker has written to stderr.
    pub(crate) fn written(&self) -> Written {
        self.pumps[1].written()
    }

    /// Waits until everything that an exited worker wrote has been moved. Gives up after `timeout` without progress:
    /// another process may hold the pipe open, or the console may be blocked.
    pub(crate) async fn end(&mut self, timeout: Duration) {
        let [stdout, stderr] = &mut self.pumps;
        tokio::join!(stdout.end(timeout), stderr.end(timeout));
    }
}

/// Ignores poisoning: no code here can leave the guarded data inconsistent when it panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
