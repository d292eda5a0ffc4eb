//! The output of workers. All of it is copied to files unchanged; the parts that the user chose are shown on xlaunch's
//! own stdout and stderr; the tail is kept for the report.
//!
//! ```text
//! worker's pipe --pump (a thread)--> files: <dir>/stdout.log, stderr.log; filtered_*.log of the attempt
//!                        |---------> tail: last lines of stderr, for the report
//!                        '---------> console: lines with a prefix, in turns; or the unchanged bytes of a single rank
//! ```
//! - Every byte goes to the files, whatever the console does. Neither a closed console nor a full disk stops a worker.
//! - A line on the console belongs to one writer. See `console` for unfinished lines.
//! - If bytes are lost anyway, they are counted, and reported by [`Output::losses`] and in the job's status.
//! - Memory is bounded. A worker that writes faster than the console is slowed down; the others get their turns.

pub mod console;
mod files;
mod lines;
mod prefix;
mod pump;
mod record;
mod tail;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::resolved_command::LogOptions;
use console::{Console, View};
use files::{Filter, Filtered, LogFile};
use lines::{Lines, Piece, whole_characters};
use prefix::{Prefix, Ranks};
pub(crate) use pump::Written;
use pump::{Destinations, Pump, Shown};
pub(crate) use record::LogRecord;
use tail::Tail;

/// Capacity of the queue of xlaunch's own lines for the console.
const CONSOLE_QUEUE: usize = 256;
/// Length at which the built-in trainer cuts lines on the console.
const MAX_LINE_BYTES: usize = 4096;

/// Number of files that [`Output::losses`] lists by name.
const MAX_NAMED_LOSSES: usize = 16;

/// The output of all workers of a run.
#[derive(Debug)]
pub(crate) struct Output {
    kind: Kind,
    /// Records of the current attempt, and those of earlier attempts that have losses.
    records: Mutex<Vec<Arc<LogRecord>>>,
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

impl PrintLine {
    fn print(&self, line: String) {
        (self.0)(line);
    }
}

impl std::fmt::Debug for PrintLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrintLine")
    }
}

/// State that the workers of a command share. Arrays are indexed by stream: stdout, stderr.
#[derive(Debug)]
struct Shared {
    options: LogOptions,
    prefix: Prefix,
    /// True if more than one rank is shown on the console.
    several: bool,
    consoles: [Arc<Console>; 2],
    filters: [Filter; 2],
    messages: SyncSender<ConsoleMessage>,
    /// Number of xlaunch's own lines dropped because the queue was full, since they were last reported.
    dropped: Arc<AtomicU64>,
}

/// Work for the thread that prints xlaunch's own lines.
#[derive(Debug)]
enum ConsoleMessage {
    Line(String),
    /// End a worker's unfinished line.
    EndLine,
    /// Confirm that all earlier messages are done.
    Flush(oneshot::Sender<()>),
}

impl Output {
    /// Creates the output of a command's workers.
    ///
    /// # Errors
    /// No descriptor or thread is available.
    pub(crate) fn new(options: &LogOptions, role: &str, world: u32) -> std::io::Result<Self> {
        Self::on(Console::own()?, options, role, world)
    }

    /// Creates the output of the built-in trainer's workers. Stdout goes to its file only. Lines of stderr are also
    /// passed to `print`, which must not block, with the prefix `[rank N] `.
    pub(crate) fn for_trainer(print: impl Fn(String) + Send + Sync + 'static) -> Self {
        Self::of(Kind::Trainer(PrintLine(Arc::new(print))))
    }

    fn of(kind: Kind) -> Self {
        Self { kind, records: Mutex::default(), first_rank: AtomicU32::new(0) }
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
        let dropped = Arc::<AtomicU64>::default();
        let count = dropped.clone();
        std::thread::Builder::new().name("console".into()).spawn(move || {
            for message in queue {
                match message {
                    ConsoleMessage::Line(line) => {
                        stderr.print(format!("{line}\n").as_bytes());
                        let dropped = count.swap(0, Ordering::Relaxed);
                        if dropped > 0 {
                            stderr.print(format!("{}\n", dropped_lines(dropped)).as_bytes());
                        }
                    }
                    ConsoleMessage::EndLine => stderr.end_line(),
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
            dropped,
        }))))
    }

    /// Returns whether the bytes of a worker's stdout are shown unchanged on a terminal.
    pub(crate) fn shows_stdout_on_terminal(&self, local_rank: u32) -> bool {
        let Kind::Command(shared) = &self.kind else { return false };
        shared.consoles[0].terminal
            && shows(&shared.options, local_rank, 0)
            && shared.prefix(self.ranks(local_rank), 0).is_none()
    }

    fn ranks(&self, local_rank: u32) -> Ranks {
        Ranks { rank: self.first_rank.load(Ordering::Relaxed) + local_rank, local_rank }
    }

    /// Begins an attempt: the output of workers that start from now on is labelled with ranks counted from
    /// `first_rank`.
    pub(crate) fn begin_attempt(&self, first_rank: u32) {
        self.first_rank.store(first_rank, Ordering::Relaxed);
        lock(&self.records).retain(|record| record.describe_loss().is_some());
    }

    /// Starts the threads that move a worker's output. `dir` is `<logs>/attempt_<n>/<local rank>` and must exist.
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
        let ranks = self.ranks(local_rank);
        let start = |stream: usize, pipe: OwnedFd, name: &str, tail: Option<Arc<Tail>>| {
            let path = dir.join(name);
            let record = Arc::new(LogRecord::new(&path, Some(ranks.rank)));
            let (destinations, console) = match &self.kind {
                Kind::Command(shared) => {
                    let limit = shared.options.rotate_bytes;
                    let file = LogFile::create(record.clone(), &path, limit, &self.printer())?;
                    let filtered = self.filtered(shared, ranks, stream, dir)?;
                    let shown = shared.shown(ranks, stream);
                    let console = Some(shared.consoles[stream].clone());
                    (Destinations { file, tail, filtered, shown }, console)
                }
                Kind::Trainer(print) => {
                    let file = LogFile::create(record.clone(), &path, None, &self.printer())?;
                    let shown = shown_lines(print, ranks.rank, tail.is_some());
                    (Destinations { file, tail, filtered: None, shown }, None)
                }
            };
            lock(&self.records).push(record.clone());
            Ok::<_, std::io::Error>((Pump::start(pipe, destinations, console)?, record))
        };
        let (out, out_record) = start(0, stdout.into(), "stdout.log", None)?;
        let (err, err_record) = start(1, stderr.into(), "stderr.log", Some(tail.clone()))?;
        Ok(RankOutput { tail, pumps: [out, err], records: [out_record, err_record] })
    }

    /// Opens the filter for a stream of a rank. As in torchrun, it applies to streams that are teed, or if none is, to
    /// all that are shown.
    fn filtered(
        &self,
        shared: &Shared,
        ranks: Ranks,
        stream: usize,
        dir: &Path,
    ) -> std::io::Result<Option<Filtered>> {
        let options = &shared.options;
        if !(shows(options, ranks.local_rank, stream) && shared.tees(ranks, stream).unwrap_or(true)) {
            return Ok(None);
        }
        let attempt = dir.parent().unwrap_or(dir);
        shared.filters[stream].open(attempt, shared.prefix.filled(ranks), |path, limit| {
            let record = Arc::new(LogRecord::new(path, None));
            lock(&self.records).push(record.clone());
            LogFile::create(record, path, limit, &self.printer())
        })
    }

    /// Returns a handle that does what [`print`](Self::print) does, for threads that write files.
    fn printer(&self) -> PrintLine {
        match &self.kind {
            Kind::Command(shared) => {
                let (messages, dropped) = (shared.messages.clone(), shared.dropped.clone());
                PrintLine(Arc::new(move |line| offer(&messages, &dropped, line)))
            }
            Kind::Trainer(print) => print.clone(),
        }
    }

    /// Describes the output lost so far, for the end of the launch: one line for each file and for the console.
    pub(crate) fn losses(&self) -> Vec<String> {
        let records = lock(&self.records);
        let described: Vec<(u64, String)> = records.iter().filter_map(|it| it.describe_loss()).collect();
        let (named, others) = described.split_at(described.len().min(MAX_NAMED_LOSSES));
        let mut lines: Vec<String> = named.iter().map(|(_, line)| format!("xlaunch: {line}")).collect();
        if !others.is_empty() {
            let bytes: u64 = others.iter().map(|(bytes, _)| bytes).sum();
            lines.push(format!("xlaunch: {bytes} bytes are missing in {} more log files", others.len()));
        }
        if let Kind::Command(shared) = &self.kind {
            let [out, err] = &shared.consoles;
            let one = Arc::ptr_eq(out, err);
            let named = [(out, if one { "the console" } else { "stdout" }), (err, "stderr")];
            let lost = named.iter().take(if one { 1 } else { 2 }).filter_map(|(console, name)| {
                let (bytes, reason) = console.lost()?;
                Some(format!("xlaunch: {bytes} bytes of output were not written to {name}: {reason}"))
            });
            lines.extend(lost);
            let dropped = shared.dropped.swap(0, Ordering::Relaxed);
            lines.extend((dropped > 0).then(|| dropped_lines(dropped)));
        }
        lines
    }

    /// Prints one of xlaunch's own lines to stderr, never in the middle of a worker's line. Does not wait: if the
    /// console is blocked, the line is dropped, because xlaunch must not block.
    pub(crate) fn print(&self, line: &str) {
        match &self.kind {
            Kind::Command(shared) => offer(&shared.messages, &shared.dropped, line.into()),
            Kind::Trainer(print) => print.print(line.into()),
        }
    }

    /// Ends a worker's unfinished line on the console, because xlaunch is about to write to stderr itself. Waits for at
    /// most `timeout`.
    pub(crate) async fn end_line(&self, timeout: Duration) {
        if let Kind::Command(shared) = &self.kind {
            // The queue is full only if the console is blocked.
            let _ = shared.messages.try_send(ConsoleMessage::EndLine);
            self.flush(timeout).await;
        }
    }

    /// Waits until the console has printed all lines of [`print`](Self::print), for at most `timeout`.
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

/// Returns whether a stream of this rank is shown on the console.
fn shows(options: &LogOptions, local_rank: u32, stream: usize) -> bool {
    let [redirect, tee] = [&options.redirects, &options.tee].map(|choice| {
        let streams = choice.of(local_rank);
        [streams.stdout, streams.stderr][stream]
    });
    (tee || !redirect) && options.shown.as_ref().is_none_or(|shown| shown.contains(&local_rank))
}

impl Shared {
    /// Returns whether a stream of this rank is teed; `None` if no stream of any rank is.
    fn tees(&self, ranks: Ranks, stream: usize) -> Option<bool> {
        let tee = self.options.tee.of(ranks.local_rank);
        (self.options.tee != Default::default()).then_some([tee.stdout, tee.stderr][stream])
    }

    fn shown(&self, ranks: Ranks, stream: usize) -> Shown {
        if !shows(&self.options, ranks.local_rank, stream) {
            return Shown::Nothing;
        }
        Shown::View(View::new(self.consoles[stream].clone(), self.prefix(ranks, stream)))
    }

    fn prefix(&self, ranks: Ranks, stream: usize) -> Option<Vec<u8>> {
        self.prefix.of(ranks, self.tees(ranks, stream), self.several, self.consoles[stream].terminal)
    }
}

/// Returns how to show a trainer's stream: lines of stderr with their rank, stdout not at all.
fn shown_lines(print: &PrintLine, rank: u32, is_stderr: bool) -> Shown {
    if !is_stderr {
        return Shown::Nothing;
    }
    let print = print.clone();
    let print_piece = move |piece: Piece<'_>| {
        // The rest of an overlong line goes to the file only.
        if !piece.continues {
            print.print(format!("[rank {rank}] {}", printable(piece.bytes)));
        }
    };
    Shown::Lines(Lines::default(), Box::new(print_piece))
}

/// Queues one of xlaunch's own lines, or counts it as dropped if the queue is full.
fn offer(messages: &SyncSender<ConsoleMessage>, dropped: &AtomicU64, line: String) {
    if messages.try_send(ConsoleMessage::Line(line)).is_err() {
        dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn dropped_lines(count: u64) -> String {
    format!("xlaunch: {count} of xlaunch's own lines were dropped: the console was too slow")
}

/// Converts a line to UTF-8 of limited length, without its line ending.
fn printable(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let cut = if line.len() > MAX_LINE_BYTES { " [...]" } else { "" };
    let text = String::from_utf8_lossy(whole_characters(&line[..line.len().min(MAX_LINE_BYTES)]));
    format!("{}{cut}", text.trim_end_matches('\r'))
}

/// The output of one worker.
#[derive(Debug)]
pub(crate) struct RankOutput {
    tail: Arc<Tail>,
    pumps: [Pump; 2],
    records: [Arc<LogRecord>; 2],
}

impl RankOutput {
    /// Returns the last lines of stderr, oldest first, each with the time at which it began to arrive.
    pub(crate) fn timed_tail(&self) -> Vec<(String, Option<Instant>)> {
        self.tail.timed_lines()
    }

    /// Returns a handle on which another task can wait until the worker's stderr so far has been moved.
    pub(crate) fn written(&self) -> Written {
        self.pumps[1].written()
    }

    /// Waits until the worker's output so far has been moved, for at most `timeout` for each stream.
    pub(crate) async fn drain(&self, timeout: Duration) {
        let [stdout, stderr] = self.pumps.each_ref().map(Pump::written);
        tokio::join!(stdout.wait(timeout), stderr.wait(timeout));
    }

    /// Gives the worker's stdout the size of xlaunch's terminal. Returns whether it is a terminal.
    pub(crate) fn resize(&self) -> bool {
        self.pumps[0].resize()
    }

    /// Waits until all output of an exited worker has been moved. Gives up after `timeout` without progress, because
    /// another process may hold the pipe open, or the console may be blocked.
    pub(crate) async fn end(&mut self, timeout: Duration) {
        let [stdout, stderr] = &mut self.pumps;
        tokio::join!(stdout.end(timeout), stderr.end(timeout));
        for (pump, record) in self.pumps.iter().zip(&self.records) {
            record.set_unread(pump.unread());
        }
    }

    /// The records of stdout and stderr.
    pub(crate) fn records(&self) -> [Arc<LogRecord>; 2] {
        self.records.clone()
    }
}

/// Locks a mutex and ignores poisoning: no code here leaves the guarded data inconsistent when it panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
