//! The thread of a pipe: moves what a worker writes to everything that wants it, until the pipe ends.
//!
//! It waits for its disk and for its turn on the console, for nothing else; meanwhile the pipe fills up and the worker
//! waits, so that memory is bounded.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::console::{Console, View};
use super::files::{Filtered, LogFile};
use super::lines::Lines;
use super::tail::Tail;

/// Bytes moved at once.
const CHUNK: usize = 64 << 10;
/// Age at which the beginning of a line that has not ended is shown.
const PATIENCE: Duration = Duration::from_millis(100);

/// Where a stream goes.
#[derive(Debug)]
pub(super) struct Sinks {
    pub(super) file: LogFile,
    pub(super) tail: Option<Arc<Tail>>,
    pub(super) filtered: Option<Filtered>,
    pub(super) shown: Shown,
}

/// What of a stream a person sees.
pub(super) enum Shown {
    Nothing,
    View(View),
    /// Each line for itself.
    Lines(Lines, Box<dyn FnMut(super::lines::Piece<'_>) + Send>),
}

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nothing => "Nothing",
            Self::View(_) => "View",
            Self::Lines(..) => "Lines",
        })
    }
}

/// A stream on its way.
#[derive(Debug)]
pub(super) struct Flow {
    pipe: Arc<File>,
    counts: Arc<Counts>,
    console: Option<Arc<Console>>,
    ended: Option<oneshot::Receiver<()>>,
}

/// How far a stream has come.
#[derive(Debug, Default)]
struct Counts {
    read: AtomicU64,
    moved: AtomicU64,
}

impl Flow {
    /// Starts the thread. `console` is what `sinks` may have to wait for.
    pub(super) fn start(pipe: OwnedFd, sinks: Sinks, console: Option<Arc<Console>>) -> std::io::Result<Self> {
        let (done, ended) = oneshot::channel();
        let pipe = Arc::new(File::from(pipe));
        let counts = Arc::new(Counts::default());
        let (source, progress) = (pipe.clone(), counts.clone());
        std::thread::Builder::new().name("log".into()).spawn(move || {
            pump(&source, sinks, &progress);
            // Nobody waits once the job has ended.
            let _ = done.send(());
        })?;
        Ok(Self { pipe, counts, console, ended: Some(ended) })
    }

    /// Waits for the end of a stream whose worker is dead: until the pipe ends, or all that the worker can have written
    /// is where it belongs and something that it started keeps the pipe open, or nothing has moved for `patience`.
    pub(super) async fn end(&mut self, patience: Duration) {
        // In this order: what is read in between counts twice, and never not at all.
        let waiting = rustix::io::ioctl_fionread(&*self.pipe).unwrap_or(0);
        let due = self.counts.read.load(Ordering::Relaxed) + waiting;
        loop {
            let before = self.progress();
            let Some(ended) = &mut self.ended else { return };
            if tokio::time::timeout(patience, ended).await.is_ok() {
                self.ended = None;
                return;
            }
            let now = self.progress();
            if now.0 >= due || now == before {
                return;
            }
        }
    }

    /// Bytes of this stream that are where they belong, and bytes of all streams that the console took.
    fn progress(&self) -> (u64, u64) {
        let taken = self.console.as_ref().map_or(0, |console| console.taken.load(Ordering::Relaxed));
        (self.counts.moved.load(Ordering::Relaxed), taken)
    }
}

fn pump(mut pipe: &File, mut sinks: Sinks, counts: &Counts) {
    let mut buffer = vec![0; CHUNK];
    // When the beginning of a line is to be shown.
    let mut due: Option<Instant> = None;
    loop {
        if let Some(at) = due {
            match readable(pipe, at.saturating_duration_since(Instant::now())) {
                Ok(false) => {
                    sinks.flush();
                    due = None;
                }
                Err(Errno::INTR) => continue,
                Ok(true) | Err(_) => {}
            }
        }
        match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                counts.read.fetch_add(count as u64, Ordering::Relaxed);
                sinks.feed(&buffer[..count]);
                counts.moved.fetch_add(count as u64, Ordering::Relaxed);
                let ended = buffer[..count].contains(&b'\n');
                due = sinks
                    .waits()
                    .then(|| due.filter(|_| !ended).unwrap_or_else(|| Instant::now() + PATIENCE));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    sinks.end();
}

/// Whether the pipe has something, or its end, within this time.
fn readable(pipe: &File, patience: Duration) -> Result<bool, Errno> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(patience.subsec_nanos()) };
    Ok(poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&timeout))? > 0)
}

impl Sinks {
    fn feed(&mut self, bytes: &[u8]) {
        self.file.write(bytes);
        if let Some(tail) = &self.tail {
            tail.feed(bytes);
        }
        if let Some(filtered) = &mut self.filtered {
            filtered.feed(bytes);
        }
        match &mut self.shown {
            Shown::Nothing => {}
            Shown::View(view) => view.feed(bytes),
            Shown::Lines(lines, each) => lines.feed(bytes, each),
        }
    }

    fn waits(&self) -> bool {
        matches!(&self.shown, Shown::View(view) if view.waits())
    }

    fn flush(&mut self) {
        if let Shown::View(view) = &mut self.shown {
            view.flush();
        }
    }

    fn end(&mut self) {
        if let Some(filtered) = &mut self.filtered {
            filtered.end();
        }
        match &mut self.shown {
            Shown::Nothing => {}
            Shown::View(view) => view.flush(),
            Shown::Lines(lines, each) => lines.flush(each),
        }
    }
}
