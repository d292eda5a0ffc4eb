//! Handles workers that use the terminal; see [`spawn::terminal`](xlaunch_host::spawn::terminal).

use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};

use super::Driver;
use xlaunch_host::clock;
use xlaunch_host::signals::{Signals, is_ignored};
use xlaunch_host::spawn::terminal::{self, Answer, Relayed};
use xlaunch_host::spawn::{has_stopped_child, run_of};

/// Time for the console to print the reason before this process stops.
const REASON_FLUSH_TIMEOUT: Duration = Duration::from_millis(500);
/// Time for signals that arrived together with SIGCONT to reach the driver.
const SIGNAL_DELAY: Duration = Duration::from_millis(10);
/// Limit on the wait for the output that precedes a prompt.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(50);

impl Driver<'_> {
    pub(super) fn terminal_deadline(&self) -> Instant {
        self.terminal.deadline().unwrap_or_else(|| Instant::now() + clock::IDLE_SLEEP)
    }

    /// Answers the workers that were stopped because they use the terminal. Called on SIGCHLD.
    pub(super) async fn answer_terminal_users(&mut self, signals: &Signals) {
        if !has_stopped_child() {
            return;
        }
        let workers = (0_u32..).zip(&self.attempt.workers);
        let stopped = workers.filter_map(|(rank, started)| {
            let worker = &started.as_ref()?.worker;
            Some((rank, worker.pid, worker.stopped_by()?))
        });
        for (rank, worker, signal) in stopped.collect::<Vec<_>>() {
            match signal {
                Signal::TTIN | Signal::TTOU => self.answer_terminal_user(rank, worker, signals).await,
                _ => {}
            }
        }
    }

    /// Acts on a signal of the terminal that was meant for the whole job, as if this process had received it.
    pub(super) fn relayed(&mut self, Relayed { worker, signal }: Relayed) {
        if signal == Signal::TSTP && !terminal::has_shell() {
            // It has stopped the worker.
            return self.attempt.resume();
        }
        self.attempt.has_received(worker, signal);
        // Cannot fail: the target is this process itself.
        let _ = kill_process(getpid(), signal);
    }

    async fn answer_terminal_user(&mut self, local_rank: u32, worker: u32, signals: &Signals) {
        let rank = self.membership.assignment().first_rank + local_rank;
        match self.terminal.answer(worker) {
            Some(Answer::Grant) => self.grant_terminal(local_rank, worker).await,
            Some(Answer::Suspend) => {
                // `kill %1` sends SIGTERM and SIGCONT, and the worker may ask again before SIGTERM has had its effect.
                tokio::time::sleep(SIGNAL_DELAY).await;
                if signals.has_pending() || self.membership.has_requested_stop() {
                    // The worker asks again if it still runs afterwards.
                    return self.attempt.resume();
                }
                // An outer launch gives the terminal to this one, its worker, when that stops itself.
                if !is_worker() {
                    self.notify(&format!(
                        "rank {rank} waits for terminal input: suspended, continue with `fg`"
                    ));
                    self.workload.output().flush(REASON_FLUSH_TIMEOUT).await;
                }
                // The shell may have brought the job to the foreground in the meantime, and would not continue it
                // again.
                if self.terminal.answer(worker) == Some(Answer::Grant) {
                    self.grant_terminal(local_rank, worker).await;
                } else {
                    // The kernel sends this to a background process that reads: an outer launch sees the reason.
                    self.suspend(if is_ignored(Signal::TTIN) { Signal::STOP } else { Signal::TTIN });
                }
            }
            Some(Answer::HangUp) => {
                self.notify(&format!(
                    "rank {rank} waits for terminal input, but xlaunch can no longer get to the \
                     foreground: sending the rank SIGHUP"
                ));
                // This is what the kernel sends to a stopped process group that nothing can continue.
                self.attempt.hang_up(local_rank);
            }
            // There is no terminal, so another process sent the signal.
            None => {}
        }
    }

    async fn grant_terminal(&mut self, local_rank: u32, worker: u32) {
        // A program writes its prompt to the terminal itself, after what it has printed.
        if let Some(started) = self.attempt.process(local_rank) {
            started.output.drain(DRAIN_TIMEOUT).await;
        }
        if let Err(error) = self.terminal.grant(worker) {
            self.notify(&format!(
                "process {worker} waits for the terminal, but handing it over failed: {error}"
            ));
        }
    }

    /// Takes the terminal back, and gives it to the next worker that waits for it.
    pub(super) fn next_terminal_user(&mut self) {
        if let Err(error) = self.terminal.grant_next() {
            self.notify(&format!("a worker waits for the terminal, but handing it over failed: {error}"));
        }
    }
}

/// Returns whether this launch is a worker of another one.
fn is_worker() -> bool {
    run_of(|name| std::env::var_os(name)).is_some()
}
