//! Processes of the next attempt, started while the last one ends. They wait for the reply to their first call before
//! they touch a GPU, and are dropped if the job ends instead.

use super::Driver;
use super::attempt::{Attempt, WorkerExit};
use crate::run_dir::attempt_dir;
use xlaunch_cluster::Assignment;
use xlaunch_host::spawn::process_tree::ProcessTree;

impl Driver<'_> {
    /// Starts the workers of the next attempt. If one cannot be started, all are dropped: the attempt then starts its
    /// own.
    pub(super) async fn prepare(&mut self, number: u32) {
        if self.membership.assignment().has_peers() {
            // The first rank of this node may change.
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
        let is_incomplete = next.workers.iter().any(Option::is_none);
        self.next = Some((next, self.membership.assignment().clone()));
        if is_incomplete {
            self.drop_next().await;
        }
    }

    /// Records that a worker of the next attempt has exited before the attempt began.
    pub(super) fn next_exited(&mut self, WorkerExit { pid, rank, exit }: WorkerExit) {
        if let Some((next, _)) = self.next.as_mut().filter(|(next, _)| next.has(rank, pid)) {
            next.exited(rank, exit);
        }
    }

    /// Takes the workers of attempt `number`, if the preparations succeeded (`begun`) and all workers are waiting for
    /// it. If nodes have joined or left, the ranks differ, and the workers were started in vain.
    pub(super) async fn take_next(&mut self, number: u32, begun: bool) -> Option<Attempt> {
        let place = self.membership.assignment();
        let lives = |next: &Attempt| next.ends.iter().all(|end| end.exit.is_none());
        let waits = |(next, started_for): &(Attempt, Assignment)| {
            begun && next.number == number && started_for.has_same_ranks(place) && lives(next)
        };
        if self.next.as_ref().is_some_and(waits) {
            return self.next.take().map(|(next, _)| next);
        }
        self.drop_next().await;
        None
    }

    /// Ends the workers of the next attempt, which will not begin, and removes its empty log directory.
    pub(super) async fn drop_next(&mut self) {
        if let Some((mut next, _)) = self.next.take() {
            self.end(&mut next).await;
            // A leftover directory is empty.
            let _ = fs_err::remove_dir_all(attempt_dir(&self.run.logs, next.number));
        }
    }
}
