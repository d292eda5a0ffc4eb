//! Collects evidence about the ranks of a failed job, for the report.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

use rustix::process::{Resource, getrlimit};

use super::Driver;
use super::hang::HANG_FILE;
use crate::ending::Evidence;
use crate::report::{self, Symptom};
use crate::run_dir::rank_dir;
use crate::state::Event;
use xlaunch_host::devices;
use xlaunch_host::spawn::Exit;

/// Maximum number of bytes read from a worker's error file.
const MAX_ERROR_FILE_BYTES: u64 = 1 << 20;

impl Driver<'_> {
    /// Returns the evidence of the current or last attempt, by rank.
    pub(super) fn all_evidence(&self) -> Vec<Evidence> {
        (0..self.workers).map(|rank| self.evidence(rank)).collect()
    }

    /// Returns what a command's worker, which has exited, wrote about its failure.
    pub(super) fn symptom(&self, rank: u32, exit: Exit) -> Option<Event> {
        let started = self.attempt.process(rank)?;
        if exit == Exit::Code(0) || self.workload.program().is_none() {
            return None;
        }
        let Symptom { error, lost_peer, at } =
            report::symptom(&started.output.timed_tail(), exit, Instant::now())?;
        Some(Event::Symptom { rank, error, lost_peer, at })
    }

    fn evidence(&self, rank: u32) -> Evidence {
        let started = self.attempt.process(rank);
        let end = self.attempt.ends.get(rank as usize).cloned().unwrap_or_default();
        let program = self.workload.program();
        let rank_dir = rank_dir(&self.run.logs, self.attempt.number, rank);
        let hang_file = rank_dir.join(HANG_FILE);
        let tail = started.map(|started| started.output.timed_tail()).unwrap_or_default();
        let is_old = |at: Instant| {
            end.at.is_some_and(|exited| exited.saturating_duration_since(at) >= report::MAX_SYMPTOM_AGE)
        };
        let oom_kills = self.attempt.processes.as_ref().map(|processes| processes.oom_kills(rank));
        Evidence {
            pid: started.map_or(0, |started| started.worker.pid),
            host: devices::host_name(),
            node_rank: self.membership.node_rank(),
            // The report explains a command's exit codes only: those of the built-in trainer have their own meanings.
            // Signals mean the same everywhere.
            exit: end.exit.filter(|exit| program.is_some() || matches!(exit, Exit::Signal(_))),
            exit_time: end.time,
            signalled: end.signalled,
            old_lines: tail.iter().take_while(|(_, at)| at.is_none_or(is_old)).count(),
            stderr: tail.into_iter().map(|(line, _)| line).collect(),
            error_file: read_start(&rank_dir.join("error.json")),
            hang_file: hang_file.exists().then_some(hang_file),
            oom_kills: oom_kills.unwrap_or_default(),
            // Workers inherit it.
            cpu_limit: getrlimit(Resource::Cpu).maximum,
            spawn_failure: end.spawn_failure,
            program: program.map(OsStr::to_owned).unwrap_or_default(),
            search_path: self.workload.base_environment().get("PATH").unwrap_or_default(),
        }
    }
}

/// Reads the first [`MAX_ERROR_FILE_BYTES`] of a file that a worker may have written.
fn read_start(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    fs_err::File::open(path).ok()?.take(MAX_ERROR_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}
