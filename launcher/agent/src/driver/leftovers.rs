//! Processes that are still running when all workers of a command have succeeded, such as a detached upload. They are
//! killed, as after a failure, but the user is told.

use std::time::Duration;

use xlaunch_host::process::Process;
use xlaunch_spec::exit::ExitCode;

use super::Driver;
use crate::ending::Ending;
use crate::report::escaped;

/// Time for helpers to exit by themselves after the last worker. The fork server of Python's `multiprocessing` does so
/// when the worker's end of a pipe is closed. [Cleaners](Process::is_cleaner) get more.
const HELPER_EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of processes that the line names.
const MAX_NAMED_LEFTOVERS: usize = 4;

impl Driver<'_> {
    /// Kills the processes of the attempt. If a command has succeeded, records those that had to be killed.
    pub(super) async fn kill_attempt(&mut self) {
        let succeeded = self.workload.program().is_some() && self.attempt.has_succeeded();
        if let Some(processes) = self.attempt.processes.as_ref().filter(|_| succeeded) {
            processes.wait(HELPER_EXIT_TIMEOUT).await;
        }
        let killed = self.attempt.kill();
        if succeeded {
            self.attempt.left_running = killed;
        }
    }

    /// Names the processes that a successful job had left running.
    pub(super) fn report_leftovers(&self, ending: &Ending) {
        let leftovers = &self.attempt.left_running;
        if ending.exit == ExitCode::Done && !leftovers.is_empty() {
            self.notify(&line(leftovers));
        }
    }
}

fn line(leftovers: &[Process]) -> String {
    let count = leftovers.len();
    let named = leftovers.iter().take(MAX_NAMED_LEFTOVERS);
    let named: Vec<String> =
        named.map(|process| format!("{} ({})", escaped(&process.name), process.pid)).collect();
    let others = match count.saturating_sub(MAX_NAMED_LEFTOVERS) {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    let plural = if count == 1 { "" } else { "es" };
    format!("ended {count} process{plural} that the workers had left running: {}{others}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_names_the_first_processes_and_counts_the_others() {
        let own = Process::own().unwrap();
        let process = |pid: u32| Process { pid, name: "a\nb".into(), ..own.clone() };
        let all: Vec<Process> = (1..=6).map(process).collect();
        let ended = |count: usize| line(&all[..count]);
        assert_eq!(ended(1), "ended 1 process that the workers had left running: a\\nb (1)");
        let named = "a\\nb (1), a\\nb (2), a\\nb (3), a\\nb (4)";
        assert_eq!(ended(4), format!("ended 4 processes that the workers had left running: {named}"));
        assert_eq!(
            ended(6),
            format!("ended 6 processes that the workers had left running: {named} and 2 more")
        );
    }
}
