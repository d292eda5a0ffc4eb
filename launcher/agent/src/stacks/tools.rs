//! Gets stacks from installed tools: gdb, or else eu-stack, and in addition py-spy for Python.
//!
//! Only one debugger can be attached to a process, so only one tool for native code is used; py-spy reads the memory of
//! a process without stopping it. All tools run at the same time.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use xlaunch_proto::v1::{ProcessStacks, StackDump};

use xlaunch_host::process::Process;
use xlaunch_host::spawn::helper;
use xlaunch_host::system_errors;

/// Time limit for a tool to print stacks. A debugger may have to read gigabytes of symbols.
pub(super) const TOOL_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit on the output kept of a tool, so that the stacks of a process fit into one message that the daemon passes on.
const MAX_DUMP_BYTES: u64 = 64 << 10;
/// Maximum number of tools that run at the same time. Processes beyond that are reported without stacks.
const MAX_TOOLS: usize = 24;

/// Returns the stacks of each process.
pub(super) fn dump(processes: &[&ProcessStacks]) -> Vec<Vec<StackDump>> {
    let installed: Vec<Tool> = Tool::ALL.into_iter().filter(|tool| tool.program().is_some()).collect();
    let mut running = 0;
    std::thread::scope(|scope| {
        let mut start = |process: &ProcessStacks| {
            let mut dumps = Vec::new();
            if let Some(problem) = obstacle(process, &installed) {
                dumps.push(Err(StackDump { problem: problem.into(), ..StackDump::default() }));
                return dumps;
            }
            for tool in selected(&installed, is_python(process.pid)) {
                running += 1;
                let left_out =
                    |problem| StackDump { tool: tool.name().into(), problem, ..StackDump::default() };
                dumps.push(if running > MAX_TOOLS {
                    Err(left_out("left out: too many processes".into()))
                } else {
                    let (pid, thread) = (process.pid, std::thread::Builder::new().name("stacks".into()));
                    let started = thread.spawn_scoped(scope, move || tool.run(pid));
                    started.map_err(|error| {
                        left_out(format!("failed to start: {}", system_errors::describe(&error)))
                    })
                });
            }
            dumps
        };
        let started: Vec<_> = processes.iter().map(|process| start(process)).collect();
        let finish = |dump: Result<std::thread::ScopedJoinHandle<'_, StackDump>, StackDump>| match dump {
            // A panic has been printed already.
            Ok(thread) => thread.join().unwrap_or_default(),
            Err(dump) => dump,
        };
        started.into_iter().map(|dumps| dumps.into_iter().map(finish).collect()).collect()
    })
}

/// The reason why a process has no stacks, if any.
fn obstacle(process: &ProcessStacks, installed: &[Tool]) -> Option<&'static str> {
    match process.state.as_str() {
        "T" => Some("no stacks: the process is stopped, and a debugger would continue it"),
        _ if process.tracer_pid != 0 => Some("no stacks: a debugger is attached"),
        _ if installed.is_empty() => Some("no stacks: install gdb, eu-stack (elfutils) or py-spy"),
        _ => None,
    }
}

/// Selects the tools for a process.
fn selected(installed: &[Tool], python: bool) -> Vec<Tool> {
    let native = installed.iter().find(|tool| **tool != Tool::PySpy);
    let python = installed.iter().find(|tool| **tool == Tool::PySpy && python);
    python.into_iter().chain(native).copied().collect()
}

fn is_python(pid: u32) -> bool {
    let program = fs_err::read_link(format!("/proc/{pid}/exe")).ok();
    let name = program.as_deref().and_then(|path| path.file_name());
    name.is_some_and(|name| name.to_string_lossy().starts_with("python"))
}

/// A program that prints stacks. Of those for native code, the first one that is installed is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Gdb,
    EuStack,
    PySpy,
}

impl Tool {
    const ALL: [Self; 3] = [Self::Gdb, Self::EuStack, Self::PySpy];

    fn name(self) -> &'static str {
        match self {
            Self::Gdb => "gdb",
            Self::EuStack => "eu-stack",
            Self::PySpy => "py-spy",
        }
    }

    /// Finds the tool in `PATH`.
    fn program(self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|dir| dir.join(self.name())).find(|file| file.is_file())
    }

    fn command(self, pid: u32) -> Command {
        let mut command = Command::new(self.program().unwrap_or_else(|| self.name().into()));
        let pid = pid.to_string();
        match self {
            // Neither downloads symbols nor reads start-up files.
            Self::Gdb => command
                .args(["-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-p", &pid])
                .args(["-ex", "thread apply all bt"]),
            Self::EuStack => command.args(["-p", &pid]),
            Self::PySpy => command.args(["dump", "--nonblocking", "--pid", &pid]),
        };
        command
    }

    fn run(self, pid: u32) -> StackDump {
        let mut command = self.command(pid);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let dump = |text, problem| StackDump { tool: self.name().into(), text, problem };
        let process = Process::read(pid);
        match helper::run(command, TOOL_TIMEOUT, read, read) {
            Ok(done) => {
                // A debugger attaches with a SIGSTOP for each thread. If it is killed before it has seen all of them,
                // the process stays stopped.
                if done.success != Some(true)
                    && let Some(process) = process
                {
                    process.signal(Signal::CONT);
                }
                let (text, errors) = (done.stdout, done.stderr);
                let first =
                    errors.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().to_owned();
                match (done.success, text.trim().is_empty()) {
                    (None, _) => dump(text, format!("stopped after {} s", TOOL_TIMEOUT.as_secs())),
                    (Some(true), false) => dump(text, String::new()),
                    _ => dump(text, first),
                }
            }
            Err(error) => {
                dump(String::new(), format!("failed to start: {}", system_errors::describe(&error)))
            }
        }
    }
}

/// Reads the beginning of the output. The rest is read and dropped, so that the tool does not block.
fn read(mut output: impl Read) -> String {
    let mut bytes = Vec::new();
    // An error ends the output.
    let _ = output.by_ref().take(MAX_DUMP_BYTES).read_to_end(&mut bytes);
    let _ = std::io::copy(&mut output, &mut std::io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tool_for_native_code_is_used_and_py_spy_for_python() {
        let all = Tool::ALL;
        assert_eq!(selected(&all, false), [Tool::Gdb]);
        assert_eq!(selected(&all, true), [Tool::PySpy, Tool::Gdb]);
        assert_eq!(selected(&all[1..], false), [Tool::EuStack]);
        assert_eq!(selected(&all[2..], false), []);
    }

    #[test]
    fn stopped_and_traced_processes_are_left_alone() {
        let process = |state: &str, tracer_pid| ProcessStacks {
            state: state.into(),
            tracer_pid,
            ..ProcessStacks::default()
        };
        assert!(obstacle(&process("T", 0), &Tool::ALL).unwrap().contains("stopped"));
        assert!(obstacle(&process("S", 7), &Tool::ALL).unwrap().contains("debugger is attached"));
        assert!(obstacle(&process("R", 0), &[]).unwrap().contains("install gdb"));
        assert_eq!(obstacle(&process("R", 0), &Tool::ALL), None);
    }
}
