//! Hung ranks of a training job. The agent of rank 0 detects them among all ranks; the agent of their node terminates
//! them.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use xlaunch_proto::v1::NodeHung;
use xlaunch_proto::v1::agent_message::Body as FromAgent;
use xlaunch_spec::job::OnHang;

use super::{TrainerPlan, TrainerWorkload};
use crate::status::board::Board;
use crate::workload::{Hang, Workload, hang};
use xlaunch_host::process::Process;

impl TrainerWorkload<'_> {
    /// Reports a hang once it has lasted long enough. Returns it if this node is to collect evidence.
    pub(super) fn find_hang(&mut self, board: &watch::Sender<Board>, now: Instant) -> Option<Hang> {
        self.send_reports();
        let is_stopped = |rank| {
            let subjects = board.borrow().subjects();
            let pid = subjects.into_iter().find(|subject| subject.rank == rank).map(|subject| subject.pid);
            pid.and_then(Process::read).is_some_and(|process| process.state == 'T')
        };
        let report = self.hang_detector.poll(now, is_stopped)?;
        self.notify(&format!("xlaunch: {}", report.message));
        board.send_modify(|board| {
            if report.rank_hints.is_empty() { board.time.continues(now) } else { board.time.hung() }
        });
        self.attempt.hang_hints = report.rank_hints;
        self.show_hints(board);
        let mut hang = report.hang?;
        let (local, others): (Vec<u32>, Vec<u32>) =
            hang.culprits.iter().partition(|rank| self.local_rank(**rank).is_some());
        if hang.ends && self.attempt.assignment.has_peers() {
            // If no culprit is on this node, the agent of the first culprit terminates them. All agents collect
            // evidence.
            let ranks = if local.is_empty() { others } else { Vec::new() };
            let message = hang.cause.clone();
            self.send(FromAgent::Hung(NodeHung { attempt: self.attempt.number, ranks, message }));
        }
        hang.culprits = local;
        (hang.ends || !hang.culprits.is_empty()).then_some(hang)
    }
}

pub(super) fn settings(plan: &TrainerPlan<'_>) -> hang::Settings {
    hang::Settings {
        minimum: Duration::from_secs_f64(plan.spec.launch.hang_timeout),
        // The work of a benchmark between two reports may take any amount of time.
        ends: plan.spec.launch.hang == OnHang::Restart && plan.bench.is_none(),
        gpus: plan.placement.cuda,
    }
}
