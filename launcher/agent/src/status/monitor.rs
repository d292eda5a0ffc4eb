//! The thread that samples running ranks: their resource usage, and the time of their last output. It also restores
//! deleted log directories, because programs write their error files there.
//!
//! It samples every few seconds, and sooner on request. The thread may have to wait for a disk or a driver; callers
//! never do.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::board::Board;
use super::sample::Sampler;

/// Interval between samples without a request.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum interval as a multiple of the duration of the last sample: on a host with thousands of processes, sampling
/// is slow.
const SAMPLE_COST_FACTOR: u32 = 250;
/// A sample younger than this answers a request.
const MAX_SAMPLE_AGE: Duration = Duration::from_secs(1);
/// Time that a caller waits for a newer sample.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(250);

/// A handle to the thread, which ends with the last handle.
#[derive(Clone, Debug)]
pub(crate) struct Monitor {
    requests: SyncSender<()>,
}

impl Monitor {
    /// Starts to sample the ranks on `board` and to record the samples there. `private` is the agent's own directory,
    /// which others restore.
    pub(crate) fn start(board: watch::Sender<Board>, private: &Path) -> std::io::Result<Self> {
        let (requests, receiver) = sync_channel(1);
        let private = private.to_path_buf();
        std::thread::Builder::new().name("monitor".into()).spawn(move || run(&board, &private, &receiver))?;
        Ok(Self { requests })
    }

    /// Requests a sample if the last one is too old, and waits for it for a moment.
    pub(crate) async fn refresh(&self, board: &mut watch::Receiver<Board>) {
        let oldest = Instant::now().checked_sub(MAX_SAMPLE_AGE).unwrap_or_else(Instant::now);
        if board.borrow().is_sampled_since(oldest) {
            return;
        }
        // A request that is already queued is enough.
        let _ = self.requests.try_send(());
        let sampled = board.wait_for(|board| board.is_sampled_since(oldest));
        // After a timeout, the caller gets the old sample.
        let _ = tokio::time::timeout(REFRESH_TIMEOUT, sampled).await;
    }
}

fn run(board: &watch::Sender<Board>, private: &Path, requests: &Receiver<()>) {
    let mut sampler = Sampler::new();
    let (mut last_sample, mut pause): (Option<Instant>, _) = (None, SAMPLE_INTERVAL);
    loop {
        match requests.recv_timeout(pause) {
            Err(RecvTimeoutError::Disconnected) => return,
            Ok(()) if last_sample.is_some_and(|last| last.elapsed() < MAX_SAMPLE_AGE) => continue,
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
        }
        let start = Instant::now();
        last_sample = Some(sample(board, private, &mut sampler));
        pause = SAMPLE_INTERVAL.max(start.elapsed() * SAMPLE_COST_FACTOR);
    }
}

/// Takes a sample. Returns its time.
fn sample(board: &watch::Sender<Board>, private: &Path, sampler: &mut Sampler) -> Instant {
    let (running, dirs) = {
        let board = board.borrow();
        let running = board.running();
        let dirs: Vec<_> = running.iter().map(|(rank, _)| board.log_dir(*rank)).collect();
        (running, dirs)
    };
    let pids: Vec<u32> = running.iter().map(|(_, pid)| *pid).collect();
    dirs.iter().for_each(|dir| restore(dir, private));
    let uses = sampler.sample(&pids, Instant::now());
    let outputs: Vec<_> = dirs.iter().map(|dir| last_output(dir)).collect();
    let now = Instant::now();
    board.send_modify(|board| {
        for (((rank, pid), usage), output) in running.iter().zip(&uses).zip(outputs) {
            board.set_usage(*rank, *pid, usage, now);
            if let Some(output) = output {
                board.set_last_output(*rank, *pid, output);
            }
        }
        board.sampled(now);
    });
    now
}

/// Creates a rank's directory again if it was deleted.
fn restore(dir: &Path, private: &Path) {
    let others_restore = dir.starts_with(private) && !private.is_dir();
    if !others_restore && !dir.is_dir() {
        // If this fails, the next sample tries again.
        let _ = fs_err::create_dir_all(dir);
    }
}

/// Returns the time at which a rank's log files last changed.
fn last_output(dir: &Path) -> Option<Instant> {
    let changed = |name: &str| fs_err::metadata(dir.join(name)).ok()?.modified().ok();
    let newest = ["stdout.log", "stderr.log"].into_iter().filter_map(changed).max()?;
    let ago = SystemTime::now().duration_since(newest).unwrap_or_default();
    Instant::now().checked_sub(ago)
}
