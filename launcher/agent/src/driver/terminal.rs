//! Handles workers that use the terminal; see [`spawn::terminal`](xlaunch_host::spawn::terminal).

use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};

use super::Driver;
use xlaunch_host::clock;
use xlaunch_host::signals::is_ignored;
use xlaunch_host::spawn::terminal::{self, Answer, Relayed};
use xlaunch_host::spawn::{has_stopped_child, run_of};

/// Time for the console to print the reason before this process stops.
const REASON_FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

impl Driver<'_> {
    pub(super) fn terminal_deadline(&self) -> Instant {
        self.terminal.deadline().unwrap_or_else(|| Instant::now() + clock::IDLE_SLEEP)
    }

    /// Answers the workers that were stopped because they use the terminal. Called on SIGCHLD.
    pub(super) async fn answer_terminal_users(&mut self) {
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
                Signal::TTIN | Signal::TTOU => self.answer_terminal_user(rank, worker).await,
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

    async fn answer_terminal_user(&mut self, local_rank: u32, worker: u32) {
        let rank = self.membership.assignment().first_rank + local_rank;
        match self.terminal.answer(worker) {
            Some(Answer::Grant) => self.grant_terminal(worker),
            Some(Answer::Suspend) => {
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
                    self.grant_terminal(worker);
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

    fn grant_terminal(&mut self, worker: u32) {
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
