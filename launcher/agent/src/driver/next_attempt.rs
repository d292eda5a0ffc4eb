//! Processes of the next attempt that start while the last one ends. They wait for the reply to their first call before
//! they touch a GPU, and are dropped if the job ends instead.

use super::Driver;
use super::attempt::{Attempt, WorkerExit};
use crate::run_dir::attempt_dir;
use crate::spawn::process_tree::ProcessTree;

impl Driver<'_> {
    /// Starts the workers of the next attempt. If one cannot be started, none is kept: the attempt starts them itself.
    pub(super) async fn prepare(&mut self, number: u32) {
        if self.membership.assignment().has_peers() {
            // Where this node's ranks begin may change.
            return;
        }
        let mut next = Attempt::new(number, self.workers, self.workload.processes());
        let mut processes = ProcessTree::create(&self.run.id, number, self.workers);
        for rank in 0..self.workload.processes() {
            let started = self.start_worker(&mut processes, number, rank).await;
            if let Some(current) = &mut self.attempt.processes {
                current.spare(&processes);
            }
            let Ok(started) = started else { break };
            next.workers[rank as usize] = Some(started);
        }
        next.processes = Some(processes);
        self.next = Some(next);
        if self.next.iter().flat_map(|next| &next.workers).any(Option::is_none) {
            self.drop_next().await;
        }
    }

    /// A worker of the next attempt has exited before that began.
    pub(super) fn next_exited(&mut self, WorkerExit { pid, rank, exit }: WorkerExit) {
        if let Some(next) = self.next.as_mut().filter(|next| next.has(rank, pid)) {
            next.exited(rank, exit);
        }
    }

    /// The workers of attempt `number`, if it has `begun` and all of them wait for it.
    pub(super) async fn take_next(&mut self, number: u32, begun: bool) -> Option<Attempt> {
        let lives = |next: &Attempt| next.ends.iter().all(|end| end.exit.is_none());
        let waits = |next: &Attempt| begun && next.number == number && lives(next);
        if self.next.as_ref().is_some_and(waits) {
            return self.next.take();
        }
        self.drop_next().await;
        None
    }

    /// Ends the workers of the next attempt, which will not begin, and removes their empty logs.
    pub(super) async fn drop_next(&mut self) {
        if let Some(mut next) = self.next.take() {
            self.end(&mut next).await;
            // What remains is empty.
            let _ = fs_err::remove_dir_all(attempt_dir(&self.run.logs, next.number));
        }
    }
}
