//! The thread that looks at running ranks: what they use, and when they last wrote something.
//!
//! It looks every few seconds, and sooner when somebody asks. It may wait for a disk or a driver: callers do not.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::board::Board;
use super::sample::Sampler;

/// Between looks that nobody asks for,
const EVERY: Duration = Duration::from_secs(5);
/// or so many times as long as the last one took: on a host with thousands of processes, that is some time.
const PAUSE: u32 = 250;
/// A look that is no older than this is new enough for anyone.
const FRESH: Duration = Duration::from_secs(1);
/// How long a caller waits for a newer one.
const PATIENCE: Duration = Duration::from_millis(250);

/// A handle of the thread, which ends with the last one.
#[derive(Clone, Debug)]
pub struct Monitor {
    asks: SyncSender<()>,
}

impl Monitor {
    /// Starts to look at the ranks on `board`, and to write there what is seen.
    pub fn start(board: watch::Sender<Board>) -> std::io::Result<Self> {
        let (asks, asked) = sync_channel(1);
        std::thread::Builder::new().name("monitor".into()).spawn(move || run(&board, &asked))?;
        Ok(Self { asks })
    }

    /// Has the thread look again where the last time is too long ago, and gives it a moment to do so.
    pub async fn refresh(&self, board: &mut watch::Receiver<Board>) {
        let oldest = Instant::now().checked_sub(FRESH).unwrap_or_else(Instant::now);
        if board.borrow().has_looked_since(oldest) {
            return;
        }
        // One question that waits already is as good as two.
        let _ = self.asks.try_send(());
        let looked = board.wait_for(|board| board.has_looked_since(oldest));
        // What is known is told anyway.
        let _ = tokio::time::timeout(PATIENCE, looked).await;
    }
}

fn run(board: &watch::Sender<Board>, asked: &Receiver<()>) {
    let mut sampler = Sampler::new();
    let (mut last, mut pause): (Option<Instant>, _) = (None, EVERY);
    loop {
        match asked.recv_timeout(pause) {
            Err(RecvTimeoutError::Disconnected) => return,
            Ok(()) if last.is_some_and(|last| last.elapsed() < FRESH) => continue,
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
        }
        let begin = Instant::now();
        last = Some(look(board, &mut sampler));
        pause = EVERY.max(begin.elapsed() * PAUSE);
    }
}

/// Returns when it looked.
fn look(board: &watch::Sender<Board>, sampler: &mut Sampler) -> Instant {
    let (running, dirs) = {
        let board = board.borrow();
        let running = board.running();
        let dirs: Vec<_> = running.iter().map(|(rank, _)| board.log_dir(*rank)).collect();
        (running, dirs)
    };
    let pids: Vec<u32> = running.iter().map(|(_, pid)| *pid).collect();
    let uses = sampler.sample(&pids, Instant::now());
    let outputs: Vec<_> = dirs.iter().map(|dir| last_output(dir)).collect();
    let now = Instant::now();
    board.send_modify(|board| {
        for (((rank, pid), usage), output) in running.iter().zip(&uses).zip(outputs) {
            board.used(*rank, *pid, usage, now);
            if let Some(output) = output {
                board.wrote(*rank, *pid, output);
            }
        }
        board.looked(now);
    });
    now
}

/// When a rank's log files last changed.
fn last_output(dir: &Path) -> Option<Instant> {
    let changed = |name: &str| fs_err::metadata(dir.join(name)).ok()?.modified().ok();
    let newest = ["stdout.log", "stderr.log"].into_iter().filter_map(changed).max()?;
    let ago = SystemTime::now().duration_since(newest).unwrap_or_default();
    Instant::now().checked_sub(ago)
}
