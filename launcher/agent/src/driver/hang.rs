//! Collects evidence of a hang, and decides whether it ends the attempt.
//!
//! ```text
//! Workload::report_stalls --Hang--> thread: debugger attached? /proc, stacks --> hang.txt; flight recorders
//!                                      '--Examined--> driver --Hung--> Job
//! ```
//! Waiting for disks and debuggers may take a long time, so it happens on a thread of its own rather than in the
//! driver's task. While a debugger is attached to any rank, the hang is only reported: a user is inspecting a process,
//! and the other ranks wait for it. The thread then waits until the debugger is gone, and gives the job
//! [`DEBUGGER_GRACE`] to continue.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::mpsc;
use xlaunch_spec::quantities::ranks_text;

use super::Driver;
use crate::python::flight_recorder::FlightRecorders;
use crate::run_dir::rank_dir;
use crate::stacks::{self, Detail, Subject, Tracer};
use crate::state::Event;
use crate::workload::Hang;
use xlaunch_host::clock;

/// Name of the evidence file in a rank's directory.
pub(super) const HANG_FILE: &str = "hang.txt";
/// Interval between checks whether a debugger is still attached.
const DEBUGGER_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time for a job to resume progress after a debugger has been detached.
const DEBUGGER_GRACE: Duration = Duration::from_secs(60);

/// Findings about a hang.
#[derive(Debug)]
pub(super) struct Examined {
    hang: Hang,
    /// The debugger that keeps the attempt from being ended.
    tracer: Option<Tracer>,
    /// File with evidence about the first culprit, or the reason why it could not be written. `None` if that was
    /// reported before, or if no culprit is on this node.
    file: Option<Result<PathBuf, String>>,
    /// Number of ranks that were told to dump their flight recorders and had time to do so.
    dumps: usize,
}

impl Driver<'_> {
    /// Starts to examine the ranks of a hang.
    pub(super) fn examine(&self, hang: Hang) {
        let dir = |rank| rank_dir(&self.run.logs, self.job.attempt(), rank);
        let ranks = self.board.borrow().subjects();
        let ranks = ranks.into_iter().map(|subject| (dir(subject.rank), subject)).collect();
        let recorders = self.workload.flight_recorders();
        let first_rank = self.membership.assignment().first_rank;
        let examination = Examination { hang, first_rank, ranks, recorders, results: self.examined.clone() };
        let started = std::thread::Builder::new().name("hang".into()).spawn(move || examination.run());
        if let Err(error) = started {
            self.notify(&format!("no evidence of the hang: failed to start a thread: {error}"));
        }
    }

    /// Reports the findings. Returns the event that ends the attempt, if the hang lasts.
    pub(super) fn hang_examined(&self, examined: Examined) -> Option<Event> {
        let Examined { hang, tracer, file, dumps } = examined;
        match file {
            Some(Ok(path)) => self.notify(&format!("evidence of the hang: {}", path.display())),
            Some(Err(error)) => self.notify(&format!("no evidence of the hang: {error}")),
            None => {}
        }
        if dumps > 0 {
            self.notify(&format!("told {dumps} ranks to dump their flight recorders"));
        }
        if hang.culprits.is_empty() {
            // The culprits are on another node, which ends them.
            return None;
        }
        if let Some(Tracer { rank, pid, debugger: (name, tracer) }) = tracer {
            let rank = self.membership.assignment().first_rank + rank;
            self.notify(&format!(
                "rank {rank} (process {pid}) is traced by {name} (process {tracer}): the hang is only reported"
            ));
            return None;
        }
        let ends = hang.ends && self.workload.hang_lasts(&hang);
        ends.then_some(Event::Hung { ranks: hang.culprits, message: hang.cause })
    }
}

/// The work of the thread.
struct Examination {
    hang: Hang,
    /// Rank of local rank 0, for messages: everything else uses local ranks.
    first_rank: u32,
    /// All running ranks, with their directories.
    ranks: Vec<(PathBuf, Subject)>,
    recorders: Option<FlightRecorders>,
    results: mpsc::UnboundedSender<Examined>,
}

impl Examination {
    fn run(self) {
        let tracer = self.tracer();
        let traced = tracer.is_some();
        let file = self.write_evidence();
        self.report(tracer, file);
        if !traced || !self.hang.ends || self.hang.culprits.is_empty() {
            return;
        }
        while self.tracer().is_some() {
            if self.results.is_closed() {
                return;
            }
            std::thread::sleep(DEBUGGER_POLL_INTERVAL);
        }
        std::thread::sleep(DEBUGGER_GRACE);
        self.report(self.tracer(), None);
    }

    /// Sends the findings to the driver. Ranks that are about to be ended first dump their flight recorders.
    fn report(&self, tracer: Option<Tracer>, file: Option<Result<PathBuf, String>>) {
        let ends = self.hang.ends && tracer.is_none();
        let ranks = self.ranks.iter().map(|(_, subject)| subject.rank);
        let dumps = self.recorders.as_ref().filter(|_| ends).map_or(0, |recorders| recorders.dump(ranks));
        // The receiver is gone only if the job has ended.
        let _ = self.results.send(Examined { hang: self.hang.clone(), tracer, file, dumps });
    }

    fn tracer(&self) -> Option<Tracer> {
        stacks::tracer(self.ranks.iter().map(|(_, subject)| subject))
    }

    /// Writes the evidence of all running ranks. Returns the file of the first culprit, if it is on this node.
    fn write_evidence(&self) -> Option<Result<PathBuf, String>> {
        let detail = |rank| if self.hang.culprits.contains(&rank) { Detail::Stacks } else { Detail::Kernel };
        let asked: Vec<_> =
            self.ranks.iter().map(|(_, subject)| (subject.clone(), detail(subject.rank))).collect();
        let found = stacks::collect(&asked);
        let culprits: Vec<u32> = self.hang.culprits.iter().map(|rank| self.first_rank + rank).collect();
        let culprits =
            if culprits.is_empty() { "ranks of another node".into() } else { ranks_text(&culprits) };
        let head =
            format!("{} UTC: {culprits}: {}\n\n", clock::timestamp(clock::unix().as_secs()), self.hang.cause);
        let mut first = self.hang.culprits.first().map(|_| Err("its process has exited".to_owned()));
        for ((dir, subject), rank) in self.ranks.iter().zip(&found) {
            let path = dir.join(HANG_FILE);
            let written = write(&path, &format!("{head}{}", stacks::text(rank))).map(|()| path);
            if self.hang.culprits.first() == Some(&subject.rank) {
                first = Some(written);
            }
        }
        first
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs_err::write(path, text).map_err(|error| error.to_string())
}
