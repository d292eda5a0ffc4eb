//! The output of workers: whole and unchanged to files, to xlaunch's own stdout and stderr as the user chose, its end
//! kept for the report.
//!
//! ```text
//! worker's pipe --pump (a thread)--> files: <dir>/stdout.log, stderr.log; filtered_*.log of the attempt
//!                        |---------> tail: last lines of stderr, for the report
//!                        '---------> console: lines behind a prefix, in turns; or bytes as they are, of one rank
//! ```
//! - Every byte goes to the files, whatever the console does; a closed console or a full disk stops no worker.
//! - A line on the console belongs to one writer. See `console` for what happens to one that does not end.
//! - Memory is bounded. A worker that writes faster than the console takes is slowed; the others have their turns.

mod console;
mod files;
mod lines;
mod prefix;
mod pump;
mod tail;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::command::LogOptions;
use console::{Console, View};
use files::{Filter, LogFile};
use lines::{Lines, Piece};
use prefix::Prefix;
use pump::{Flow, Shown, Sinks};
use tail::Tail;

/// Lines of xlaunch's own that may wait for the console.
const SAYINGS: usize = 256;
/// Bytes of a line that the built-in trainer's console shows.
const WIDTH: usize = 4096;

/// The output of all workers of a run.
#[derive(Debug)]
pub struct Output(Kind);

#[derive(Debug)]
enum Kind {
    Command(Box<Shared>),
    /// Where lines of stderr go, as far as it takes them.
    Trainer(mpsc::Sender<String>),
}

/// What the workers of a command share. Pairs are stdout's and stderr's.
#[derive(Debug)]
struct Shared {
    options: LogOptions,
    prefix: Prefix,
    several: bool,
    consoles: [Arc<Console>; 2],
    filters: [Filter; 2],
    sayings: SyncSender<Saying>,
}

/// A line of xlaunch's own, or the question whether all before it are out.
#[derive(Debug)]
enum Saying {
    Line(String),
    Flush(oneshot::Sender<()>),
}

impl Output {
    /// Workers of a command, with what the user chose for their output.
    ///
    /// # Errors
    /// The system has no descriptors or threads left.
    pub fn new(options: &LogOptions, role: &str, world: u32) -> std::io::Result<Self> {
        Self::on(Console::own()?, options, role, world)
    }

    /// Workers of the built-in trainer: stdout goes to its file alone, lines of stderr also to `lines`, behind
    /// `[rank N] `. Lines that are not taken in time are left to the file.
    pub fn for_trainer(lines: mpsc::Sender<String>) -> Self {
        Self(Kind::Trainer(lines))
    }

    fn on(
        consoles: [Arc<Console>; 2],
        options: &LogOptions,
        role: &str,
        world: u32,
    ) -> std::io::Result<Self> {
        let on_console = |rank: &u32| (0..2).any(|stream| shows(options, *rank, stream));
        let filter = |words: &[String], name| Filter::new(words, name, options.rotate_bytes);
        let (sayings, queue) = sync_channel(SAYINGS);
        let stderr = consoles[1].clone();
        std::thread::Builder::new().name("say".into()).spawn(move || {
            for saying in queue {
                match saying {
                    Saying::Line(line) => stderr.say(format!("{line}\n").as_bytes()),
                    // Who asked may have lost patience.
                    Saying::Flush(done) => drop(done.send(())),
                }
            }
        })?;
        Ok(Self(Kind::Command(Box::new(Shared {
            prefix: Prefix::new(role, options.prefix.as_deref()),
            several: (0..world).filter(on_console).count() > 1,
            consoles,
            filters: [
                filter(&options.stdout_filters, "filtered_stdout.log"),
                filter(&options.stderr_filters, "filtered_stderr.log"),
            ],
            options: options.clone(),
            sayings,
        }))))
    }

    /// Begins to move a worker's output; `dir`, which exists, is `<logs>/attempt_<n>/<local rank>`.
    ///
    /// # Errors
    /// A file cannot be created.
    pub fn start(
        &self,
        local_rank: u32,
        dir: &Path,
        stdout: impl Into<OwnedFd>,
        stderr: impl Into<OwnedFd>,
    ) -> std::io::Result<RankOutput> {
        let tail = Arc::new(Tail::default());
        let start = |stream: usize, pipe: OwnedFd, name: &str, tail: Option<Arc<Tail>>| {
            let path = dir.join(name);
            let (sinks, console) = match &self.0 {
                Kind::Command(shared) => {
                    (shared.sinks(local_rank, stream, &path, tail)?, Some(&shared.consoles[stream]))
                }
                Kind::Trainer(lines) => (trainer_sinks(lines, local_rank, &path, tail)?, None),
            };
            Flow::start(pipe, sinks, console.cloned())
        };
        let flows = [
            start(0, stdout.into(), "stdout.log", None)?,
            start(1, stderr.into(), "stderr.log", Some(tail.clone()))?,
        ];
        Ok(RankOutput { tail, flows })
    }

    /// A line of xlaunch's own, on stderr and never within a worker's. Waits for nothing: a console that stands still
    /// must not keep xlaunch from its work, and loses lines.
    pub fn say(&self, line: &str) {
        match &self.0 {
            Kind::Command(shared) => drop(shared.sayings.try_send(Saying::Line(line.into()))),
            Kind::Trainer(lines) => drop(lines.try_send(line.into())),
        }
    }

    /// Waits until the console has taken what [`say`](Self::say) gave it, but no longer than `patience`.
    pub async fn flush(&self, patience: Duration) {
        if let Kind::Command(shared) = &self.0 {
            let (done, flushed) = oneshot::channel();
            if shared.sayings.try_send(Saying::Flush(done)).is_ok() {
                // A console that stands still has had its time.
                let _ = tokio::time::timeout(patience, flushed).await;
            }
        }
    }
}

/// Whether a stream of this rank goes to the console.
fn shows(options: &LogOptions, local_rank: u32, stream: usize) -> bool {
    let [redirect, tee] = [&options.redirects, &options.tee].map(|choice| {
        let streams = choice.of(local_rank);
        [streams.stdout, streams.stderr][stream]
    });
    (tee || !redirect) && options.shown.as_ref().is_none_or(|shown| shown.contains(&local_rank))
}

impl Shared {
    fn sinks(
        &self,
        local_rank: u32,
        stream: usize,
        path: &Path,
        tail: Option<Arc<Tail>>,
    ) -> std::io::Result<Sinks> {
        let shown = shows(&self.options, local_rank, stream);
        let tee = self.options.tee.of(local_rank);
        let tee = [tee.stdout, tee.stderr][stream];
        // As torchrun has it: lines of what is teed. Where nothing is, of all that is shown.
        let attempt = path.ancestors().nth(2).unwrap_or(path);
        let filtered = match shown && (tee || self.options.tee == Default::default()) {
            true => self.filters[stream].open(attempt, self.prefix.filled(local_rank))?,
            false => None,
        };
        let console = &self.consoles[stream];
        let view = || {
            let prefix = self.prefix.of(local_rank, tee, self.several, console.terminal);
            View::new(console.clone(), prefix)
        };
        Ok(Sinks {
            file: LogFile::create(path, self.options.rotate_bytes)?,
            tail,
            filtered,
            shown: if shown { Shown::View(view()) } else { Shown::Nothing },
        })
    }
}

/// The stream that has a tail is stderr.
fn trainer_sinks(
    lines: &mpsc::Sender<String>,
    rank: u32,
    path: &Path,
    tail: Option<Arc<Tail>>,
) -> std::io::Result<Sinks> {
    let lines = lines.clone();
    let say = move |piece: Piece<'_>| {
        // The rest of a line that is too long is left to the file, and so is what the console does not take in time.
        if !piece.continues {
            let _ = lines.try_send(format!("[rank {rank}] {}", plain(piece.bytes)));
        }
    };
    let shown = match tail {
        Some(_) => Shown::Lines(Lines::default(), Box::new(say)),
        None => Shown::Nothing,
    };
    Ok(Sinks { file: LogFile::create(path, None)?, tail, filtered: None, shown })
}

/// A line without its end, in UTF-8, and not too long.
fn plain(line: &[u8]) -> String {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let cut = if line.len() > WIDTH { " [...]" } else { "" };
    let text = String::from_utf8_lossy(&line[..line.len().min(WIDTH)]);
    format!("{}{cut}", text.trim_end_matches('\r'))
}

/// The output of one worker.
#[derive(Debug)]
pub struct RankOutput {
    tail: Arc<Tail>,
    flows: [Flow; 2],
}

impl RankOutput {
    /// The last lines of stderr, at most 200, oldest first.
    pub fn tail(&self) -> Vec<String> {
        self.tail.lines()
    }

    /// Waits until what a dead worker wrote is where it belongs: as long as that gets on, but no longer than `patience`
    /// for something else that holds its output open, or for a console that stands still.
    pub async fn end(&mut self, patience: Duration) {
        let [stdout, stderr] = &mut self.flows;
        tokio::join!(stdout.end(patience), stderr.end(patience));
    }
}

/// What a mutex here guards is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
