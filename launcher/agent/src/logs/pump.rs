//! The thread that moves a worker's output from its pipe, or pseudoterminal, to all destinations, until the worker
//! closes its end.
//!
//! The thread waits only for the disk and for its turn on the console. While it waits, the pipe fills up and the worker
//! blocks, which bounds the memory used.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::console::{Console, PARTIAL_LINE_DELAY, View};
use super::files::{Filtered, LogFile};
use super::lines::Lines;
use super::tail::Tail;

/// Interval between polls of a pipe that is being drained.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);
const CHUNK_BYTES: usize = 64 << 10;

/// The destinations of one stream.
#[derive(Debug)]
pub(super) struct Destinations {
    pub(super) file: LogFile,
    pub(super) tail: Option<Arc<Tail>>,
    pub(super) filtered: Option<Filtered>,
    pub(super) shown: Shown,
}

/// Presentation of a stream on the console.
pub(super) enum Shown {
    Nothing,
    View(View),
    /// Passes each line to a function.
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

/// The running pump of one stream.
#[derive(Debug)]
pub(super) struct Pump {
    pipe: Arc<File>,
    counts: Arc<Counts>,
    console: Option<Arc<Console>>,
    ended: Option<oneshot::Receiver<()>>,
}

#[derive(Debug, Default)]
struct Counts {
    read: AtomicU64,
    /// Bytes that were written to all destinations.
    moved: AtomicU64,
}

impl Pump {
    /// Starts the thread. `console` is the console that `destinations` may wait for.
    pub(super) fn start(
        pipe: OwnedFd,
        destinations: Destinations,
        console: Option<Arc<Console>>,
    ) -> std::io::Result<Self> {
        let (done, ended) = oneshot::channel();
        let pipe = Arc::new(File::from(pipe));
        let counts = Arc::new(Counts::default());
        let (source, progress) = (pipe.clone(), counts.clone());
        let own = console.clone().filter(|_| source.is_terminal());
        std::thread::Builder::new().name("log".into()).spawn(move || {
            pump(&source, destinations, &progress, own.as_deref());
            // The receiver is gone once the job has ended.
            let _ = done.send(());
        })?;
        Ok(Self { pipe, counts, console, ended: Some(ended) })
    }

    /// Waits for the rest of an exited worker's stream. Returns when the pipe is closed; when all bytes that the worker
    /// wrote have been moved, if another process keeps the pipe open; or after `timeout` without progress.
    pub(super) async fn end(&mut self, timeout: Duration) {
        // In this order, bytes that are read between the two calls count twice. In the other order, they would not
        // count at all.
        let buffered = rustix::io::ioctl_fionread(&*self.pipe).unwrap_or(0);
        let target = self.counts.read.load(Ordering::Relaxed) + buffered;
        loop {
            let before = self.progress();
            let Some(ended) = &mut self.ended else { return };
            if tokio::time::timeout(timeout, ended).await.is_ok() {
                self.ended = None;
                return;
            }
            let now = self.progress();
            if now.0 >= target || now == before {
                return;
            }
        }
    }

    /// Number of bytes that the worker has written and that have not been moved; 0 after the end of the stream.
    pub(super) fn unread(&self) -> u64 {
        if self.ended.is_none() {
            return 0;
        }
        let (read, moved) =
            (self.counts.read.load(Ordering::Relaxed), self.counts.moved.load(Ordering::Relaxed));
        rustix::io::ioctl_fionread(&*self.pipe).unwrap_or(0) + read.saturating_sub(moved)
    }

    pub(super) fn written(&self) -> Written {
        Written { pipe: self.pipe.clone(), counts: self.counts.clone() }
    }

    /// Gives a worker's terminal the size of the console. Returns whether this stream is a terminal.
    pub(super) fn resize(&self) -> bool {
        let own = self.console.as_ref().filter(|_| self.pipe.is_terminal());
        own.inspect(|own| own.resize(&self.pipe)).is_some()
    }

    /// Number of bytes of this stream that were moved, and of all streams that were written to the console.
    fn progress(&self) -> (u64, u64) {
        let written = self.console.as_ref().map_or(0, |console| console.written.load(Ordering::Relaxed));
        (self.counts.moved.load(Ordering::Relaxed), written)
    }
}

/// The output that a worker has written to one stream so far.
#[derive(Debug)]
pub(crate) struct Written {
    pipe: Arc<File>,
    counts: Arc<Counts>,
}

impl Written {
    /// Waits until this output has been moved, for at most `timeout`. Unlike [`Pump::end`], this does not wait for the
    /// pipe to be closed, as another process may hold it open.
    pub(crate) async fn wait(&self, timeout: Duration) {
        let give_up = Instant::now() + timeout;
        // The pipe must be found dry twice in a row, because bytes that are just being read are in neither count.
        let mut dry = 0;
        while dry < 2 && Instant::now() < give_up {
            dry = if self.is_dry() { dry + 1 } else { 0 };
            tokio::time::sleep(DRAIN_POLL_INTERVAL).await;
        }
    }

    fn is_dry(&self) -> bool {
        let Counts { read, moved } = &*self.counts;
        rustix::io::ioctl_fionread(&*self.pipe).unwrap_or(0) == 0
            && read.load(Ordering::Relaxed) == moved.load(Ordering::Relaxed)
    }
}

/// Moves everything. `own` is the terminal whose size the worker's terminal follows.
fn pump(mut pipe: &File, mut destinations: Destinations, counts: &Counts, own: Option<&Console>) {
    let mut buffer = vec![0; CHUNK_BYTES];
    // The time at which the unfinished line began.
    let mut held: Option<Instant> = None;
    loop {
        if let Some(since) = held {
            match readable(pipe, destinations.hold(since, Instant::now())) {
                Ok(false) if destinations.hold(since, Instant::now()).is_zero() => {
                    destinations.flush();
                    held = None;
                }
                Ok(false) => continue,
                Err(Errno::INTR) => continue,
                Ok(true) | Err(_) => {}
            }
        }
        match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                counts.read.fetch_add(count as u64, Ordering::Relaxed);
                if let Some(own) = own {
                    own.resize(pipe);
                }
                destinations.feed(&buffer[..count]);
                counts.moved.fetch_add(count as u64, Ordering::Relaxed);
                let ended = buffer[..count].contains(&b'\n');
                held = destinations
                    .has_partial_line()
                    .then(|| held.filter(|_| !ended).unwrap_or_else(Instant::now));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    destinations.end();
}

/// Returns whether the pipe has data or is closed within `timeout`, which must be less than a second.
fn readable(pipe: &File, timeout: Duration) -> Result<bool, Errno> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(timeout.subsec_nanos()) };
    Ok(poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&timeout))? > 0)
}

impl Destinations {
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

    fn has_partial_line(&self) -> bool {
        matches!(&self.shown, Shown::View(view) if view.has_partial_line())
    }

    /// Returns how much longer to hold back an unfinished line that began at `since`. Must be polled, because another
    /// writer's line, which it would interrupt, may end at any time.
    fn hold(&self, since: Instant, now: Instant) -> Duration {
        let Shown::View(view) = &self.shown else { return Duration::ZERO };
        (since + view.partial_line_delay()).saturating_duration_since(now).min(PARTIAL_LINE_DELAY)
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
            Shown::View(view) => view.end(),
            Shown::Lines(lines, each) => lines.end(each),
        }
    }
}
