//! Determines the likely cause of a worker's failure, and advice for the user. Pure. A cause that the evidence does not
//! prove is worded with "perhaps"; without evidence no cause is given.

use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::python::{self, Exception};
use super::{Evidence, escaped};
use crate::ending::SpawnFailure;
use xlaunch_host::spawn::{Exit, OomKills};
use xlaunch_host::system_errors::{FILE_LIMIT_HELP, SYSTEM_CALL_HELP, TASK_LIMIT, TASK_LIMIT_HELP};
use xlaunch_host::task_limit::Reached;

/// Prefix of the message of an uncaught C++ exception.
const CPP_WHAT: &str = "what():  ";

/// Longest time between a worker's output about its failure and its exit: Python's cleanup may take seconds.
pub(crate) const MAX_SYMPTOM_AGE: Duration = Duration::from_secs(10);
/// Parts of messages of PyTorch's back ends when the connection to another rank, or to the store on rank 0, is lost.
const LOST_PEER: [&str; 8] = [
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote server shutdown",
    "failed to recv, got 0 bytes",
    "Connection was likely closed",
];

/// Parts of messages of Python, OpenMP and this project when the system refuses to create a process or a thread.
const THREAD_REFUSED: [&str; 5] = [
    "can't start new thread",
    "[Errno 11] Resource temporarily unavailable",
    "Resource temporarily unavailable (os error 11)",
    "Thread creation failed",
    "pthread_create failed",
];

/// Advice if a program has read the end of its standard input.
const INPUT_HELP: &str = "perhaps its standard input has ended: only rank 0 reads that of xlaunch, or rank N with \
                          --local-ranks-filter N";
/// Advice if the host is out of memory.
const HOST_MEMORY_HELP: &str =
    "give the job more memory, or use less: fewer data loader workers, smaller batches";

/// The cause of a failure. Both texts are a single line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cause {
    pub(super) what: String,
    /// Advice, if there is any.
    pub(super) help: Option<String>,
}

impl Cause {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), help: None }
    }

    fn with_help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }
}

/// Returns the likely cause; `None` if nothing is known beyond the exit status.
pub(super) fn cause(evidence: &Evidence) -> Option<Cause> {
    if let Some(failure) = &evidence.spawn_failure {
        return not_started(failure, evidence);
    }
    let exit = evidence.exit?;
    // xlaunch itself sends SIGINT, SIGKILL and SIGTERM.
    let ended_by_xlaunch = evidence.signalled && matches!(ended_by_signal(exit), Some(2 | 9 | 15));
    if exit == Exit::Code(0) || ended_by_xlaunch {
        return None;
    }
    oom(exit, evidence)
        .or_else(|| worker_output(exit, evidence))
        .or_else(|| ended_by_signal(exit).and_then(|signal| foreign_signal(exit, signal, evidence)))
        .or_else(|| shell_code(exit, evidence))
}

/// A failed worker's own output about its failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Symptom {
    /// One line, escaped: `ValueError: bad`.
    pub(crate) error: String,
    /// True if the error is a lost connection to another rank.
    pub(crate) lost_peer: bool,
    /// Time at which the worker began to write it.
    pub(crate) at: Instant,
}

/// Finds the symptom in the last lines of stderr of a worker that has just exited: the last Python exception or, if the
/// worker aborted without one, the message of a C++ exception. Exceptions written earlier were handled.
pub(crate) fn symptom(stderr: &[(String, Option<Instant>)], exit: Exit, now: Instant) -> Option<Symptom> {
    let lines: Vec<String> = stderr.iter().map(|(line, _)| line.clone()).collect();
    let symptom = |begin: usize, line: &str| {
        let at = stderr.get(begin)?.1.filter(|at| now.saturating_duration_since(*at) < MAX_SYMPTOM_AGE)?;
        let lost_peer = LOST_PEER.iter().any(|part| line.contains(part));
        Some(Symptom { error: escaped(line), lost_peer, at })
    };
    let exception =
        |lines: &[String]| symptom(python::last_traceback(lines)?, &python::exception(lines)?.line);
    let aborted = || {
        let at = lines.iter().position(|line| line.contains(CPP_WHAT))?;
        symptom(at, cpp_message(&lines[at]))
    };
    match ended_by_signal(exit) {
        None | Some(15) => exception(&lines),
        // An exception closes the connections of a rank, upon which a library thread may abort the process as it exits.
        Some(6) => exception(python::before_abort(&lines)).or_else(aborted),
        Some(_) => None,
    }
}

/// Returns the likely cause of the root failure. Unlike [`cause`], it also looks at a rank that had failed but was
/// terminated by xlaunch before it exited.
pub(super) fn cause_of_root(evidence: &Evidence) -> Option<Cause> {
    let exception = || python::exception(&evidence.stderr).filter(|_| evidence.signalled);
    cause(evidence).or_else(|| {
        let Exception { line, place } = exception()?;
        let place = place.map_or(String::new(), |place| format!(" ({place})"));
        Some(Cause::new(format!("perhaps {line}{place}")))
    })
}

/// Cause of a failure to start the program.
fn not_started(failure: &SpawnFailure, evidence: &Evidence) -> Option<Cause> {
    let program = evidence.program.to_string_lossy();
    let path = evidence.search_path.to_string_lossy();
    if let Some(Reached { what, help }) = &failure.limit {
        return Some(Cause::new(what).with_help(help));
    }
    let cause = match Errno::from_raw_os_error(failure.errno) {
        Errno::NOENT if program.contains('/') => match &failure.first_line {
            None => Cause::new(format!("file `{program}` not found")),
            Some(line) if line.ends_with('\r') => {
                Cause::new(format!("the first line of `{program}` has a Windows line end (CRLF)"))
                    .with_help(format!("sed -i 's/\\r$//' {program}"))
            }
            Some(line) => Cause::new(format!(
                "the interpreter in the first line of `{program}` is not found: `{}`",
                line.trim_start_matches("#!").trim()
            )),
        },
        Errno::NOENT if program.ends_with(".py") => Cause::new(format!("program `{program}` not found"))
            .with_help("to run it with Python, leave out `--` and `--no-python`"),
        Errno::NOENT => Cause::new(format!("program `{program}` not found"))
            .with_help(format!("install it, or give its path; directories searched (PATH): {path}")),
        Errno::ACCESS => Cause::new(format!("`{program}` is not executable")).with_help(format!(
            "chmod +x {program}; it may also be a directory, or on a file system mounted noexec"
        )),
        Errno::NOEXEC => Cause::new(format!("`{program}` is not an executable for this machine")).with_help(
            "a script needs #! in its first line; a binary must be built for this CPU architecture",
        ),
        Errno::TOOBIG => Cause::new("arguments and environment are too long for the system"),
        Errno::AGAIN => Cause::new(TASK_LIMIT).with_help(TASK_LIMIT_HELP),
        Errno::MFILE => Cause::new("too many open files").with_help(FILE_LIMIT_HELP),
        Errno::PERM | Errno::NOSYS => {
            Cause::new("perhaps a system call was refused").with_help(SYSTEM_CALL_HELP)
        }
        Errno::NOMEM => Cause::new("no memory is left to start a process"),
        _ => return None,
    };
    Some(cause)
}

/// The signal that killed the worker, or a child of it whose signal n a shell reported as exit code 128 + n.
fn ended_by_signal(exit: Exit) -> Option<i32> {
    match exit {
        Exit::Signal(signal) => Some(signal),
        Exit::Code(code @ 129..=159) => Some(code - 128),
        Exit::Code(_) | Exit::Unknown => None,
    }
}

/// Cause if the kernel's counters show OOM kills.
fn oom(exit: Exit, evidence: &Evidence) -> Option<Cause> {
    let OomKills { rank, launch, host } = evidence.oom_kills;
    let killed = ended_by_signal(exit) == Some(9);
    let what = match (rank, launch, host) {
        (1.., ..) | (_, 1.., _) if killed => "killed by the kernel's OOM killer".to_owned(),
        (_, _, Some(1)) if killed => {
            "killed by SIGKILL while the OOM killer killed a process on this host".into()
        }
        (_, _, Some(host @ 2..)) if killed => {
            format!("killed by SIGKILL while the OOM killer killed {host} processes on this host")
        }
        (1, ..) => "the OOM killer killed one of its processes".into(),
        (2.., ..) => format!("the OOM killer killed {rank} of its processes"),
        _ => return None,
    };
    Some(Cause::new(what).with_help(HOST_MEMORY_HELP))
}

/// Cause from the worker's own output: the error file, an exception, or another known line on stderr.
fn worker_output(exit: Exit, evidence: &Evidence) -> Option<Cause> {
    let killed = ended_by_signal(exit);
    if killed == Some(9) {
        // Earlier output is unrelated.
        return None;
    }
    let recorded = evidence.error_file.as_deref().and_then(python::from_error_file);
    let recent = python::before_abort(evidence.stderr.get(evidence.old_lines..).unwrap_or_default());
    let traced = || match killed {
        None => python::exception(&evidence.stderr),
        // A library thread may abort a program that is exiting because of an exception.
        Some(6) => python::exception(recent),
        // A program killed by any other signal had handled its earlier exceptions.
        Some(_) => None,
    };
    let is_recorded = recorded.is_some();
    let Some(Exception { line, place }) = recorded.or_else(traced) else {
        return stderr_line(killed, evidence);
    };
    let place = place.map_or(String::new(), |place| format!(" ({place})"));
    let is_last = || recent.last().is_some_and(|last| python::without_rank(last).trim_end() == line);
    let sure = is_recorded || exit == Exit::Code(1) || killed == Some(6) && is_last();
    let perhaps = if sure { "" } else { "perhaps " };
    known(&line, &format!("{line}{place}"), evidence)
        .or_else(|| Some(Cause::new(format!("{perhaps}{line}{place}"))))
}

/// Cause from the last line of stderr with a known message, for output without an exception.
fn stderr_line(killed: Option<i32>, evidence: &Evidence) -> Option<Cause> {
    let python: &[&str] = match killed {
        Some(_) => &["Fatal Python error: "],
        None => &["can't open file", ": No module named ", "Fatal Python error: "],
    };
    let abort: &[&str] = if killed == Some(6) { &[CPP_WHAT, "Assertion `"] } else { &[] };
    let own = ["EADDRINUSE", "CUDA out of memory", "CUDA error: ", "error while loading shared libraries"];
    let any = [&own[..], &THREAD_REFUSED, &["(os error 24)"]].concat();
    let is_known = |line: &&str| [python, abort, &any].concat().iter().any(|part| line.contains(part));
    let mut lines = evidence.stderr.iter().rev().map(|line| python::without_rank(line).trim());
    let line = lines.find(is_known)?;
    let line = cpp_message(line);
    let place = python::fault(&evidence.stderr).map_or(String::new(), |place| format!(" ({place})"));
    let whole = format!("{line}{place}");
    known(line, &whole, evidence).or_else(|| Some(Cause::new(whole)))
}

/// Strips the prefix of an uncaught C++ exception's message from a line of stderr.
fn cpp_message(line: &str) -> &str {
    let line = line.trim();
    line.strip_prefix(CPP_WHAT).unwrap_or(line)
}

/// Adds advice for known failures. `whole` is the line with its place in the source.
fn known(line: &str, whole: &str, evidence: &Evidence) -> Option<Cause> {
    let has = |parts: &[&str]| parts.iter().any(|part| line.contains(part));
    let name = line.split(':').next().unwrap_or(line).rsplit('.').next().unwrap_or(line);
    let whole = Cause::new(whole);
    let program = evidence.program.to_string_lossy();
    let cause = if has(&["OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory"]) {
        Cause::new(format!("GPU out of memory: {}", whole.what))
            .with_help("use smaller batches, or check for other processes on the GPU: nvidia-smi")
    } else if name == "MemoryError" || has(&["DefaultCPUAllocator: can't allocate memory"]) {
        Cause::new(format!("host out of memory: {}", whole.what))
    } else if has(&["is killed by signal: Killed"]) {
        match evidence.oom_kills.launch {
            0 => whole.with_help("perhaps by the OOM killer; check the kernel log: dmesg, or journalctl -k"),
            _ => Cause::new(format!("the OOM killer killed a process: {}", whole.what))
                .with_help(HOST_MEMORY_HELP),
        }
    } else if has(&["insufficient shared memory", "out of shared memory"]) {
        whole.with_help("enlarge /dev/shm (in a container: --shm-size), or use fewer data loader workers")
    } else if has(&["EADDRINUSE", "Address already in use", "address already in use"]) {
        let what = port(line).map_or("an address is in use".into(), |port| format!("port {port} is in use"));
        Cause::new(format!("{what}: {}", whole.what)).with_help(
            "choose another port; for MASTER_PORT, omit --master-port and xlaunch finds a free one",
        )
    } else if has(&[
        "Watchdog caught collective operation timeout",
        "Timed out waiting",
        "wait timeout after",
        "has timed out",
    ]) {
        Cause::new(format!("a collective timed out: {}", whole.what)).with_help(
            "a rank may hang, have exited, or have called another collective: compare the last lines of all ranks",
        )
    } else if has(&THREAD_REFUSED) {
        Cause::new(format!("{TASK_LIMIT}: {}", whole.what)).with_help(TASK_LIMIT_HELP)
    } else if has(&["Too many open files", "(os error 24)"]) {
        whole.with_help(FILE_LIMIT_HELP)
    } else if has(&["CUDA error: "]) {
        whole.with_help(
            "an earlier operation on the GPU may have failed: set CUDA_LAUNCH_BLOCKING=1 to find the one that did",
        )
    } else if has(&LOST_PEER) {
        whole.with_help("perhaps another rank exited first: check its last lines")
    } else if has(&["NCCL", "DistBackendError"]) {
        whole.with_help("set NCCL_DEBUG=INFO for details from NCCL")
    } else if line.contains("No module named 'encodings'") {
        whole.with_help(
            "Python does not find its own library: unset PYTHONHOME, or set it to this Python's prefix",
        )
    } else if name == "ModuleNotFoundError" || line.contains(": No module named ") {
        if program.is_empty() {
            whole
        } else {
            whole.with_help(format!(
                "install it for {program}, activate its virtual environment, or set PYTHON_EXEC=/PATH/TO/python"
            ))
        }
    } else if name == "BdbQuit" || line.starts_with("EOFError: EOF when reading a line") {
        whole.with_help(INPUT_HELP)
    } else if name == "KeyboardInterrupt" {
        Cause::new("interrupted (SIGINT, Ctrl-C)")
    } else {
        return None;
    };
    Some(cause)
}

/// Finds the port number in a line such as `port: 29500`, `port 29500` or `('::', 29500)`.
fn port(line: &str) -> Option<u16> {
    let number = |text: &str| {
        let text = text.trim_start_matches([':', ' ', '=']);
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text[..end].parse().ok().filter(|port| *port > 0)
    };
    let named = line.match_indices("port").find_map(|(at, word)| number(&line[at + word.len()..]));
    named.or_else(|| line.match_indices(',').find_map(|(at, _)| number(&line[at + 1..])))
}

/// Cause of death by a signal that xlaunch did not send.
fn foreign_signal(exit: Exit, signal: i32, evidence: &Evidence) -> Option<Cause> {
    let cause = match signal {
        1 => Cause::new("its terminal or session was closed (SIGHUP)"),
        2 => Cause::new("interrupted (SIGINT, Ctrl-C)"),
        4 => Cause::new("illegal instruction (SIGILL)")
            .with_help("the program or one of its libraries may be built for another CPU"),
        7 => Cause::new("memory could not be provided (SIGBUS)")
            .with_help("/dev/shm may be full: df -h /dev/shm; in a container, enlarge it with --shm-size"),
        8 => Cause::new("division by zero or another arithmetic error (SIGFPE)"),
        9 if evidence.oom_kills.host == Some(0) => {
            Cause::new("killed by SIGKILL, sent neither by xlaunch nor by the OOM killer")
                .with_help(or_cpu_limit("the program itself, another program or a user sent it", evidence))
        }
        9 => Cause::new("killed by SIGKILL, not sent by xlaunch: perhaps by the OOM killer")
            .with_help(or_cpu_limit("check the kernel log: dmesg, or journalctl -k", evidence)),
        11 if evidence.program.is_empty() => Cause::new("invalid memory access (SIGSEGV)"),
        11 => Cause::new("invalid memory access (SIGSEGV)")
            .with_help("set PYTHONFAULTHANDLER=1 for a Python traceback"),
        13 => Cause::new("wrote to a pipe whose reader is gone (SIGPIPE)"),
        15 => Cause::new("terminated by SIGTERM, not sent by xlaunch"),
        24 => Cause::new("CPU time limit exceeded (SIGXCPU)").with_help("see ulimit -t"),
        25 => Cause::new("file size limit exceeded (SIGXFSZ)").with_help("see ulimit -f"),
        _ => return None,
    };
    Some(match exit {
        Exit::Signal(_) => cause,
        _ => Cause { what: format!("perhaps one of its child processes: {}", cause.what), ..cause },
    })
}

/// Adds the limit of CPU time, if there is one, to the advice about SIGKILL. The kernel sends SIGXCPU only if the soft
/// limit is lower than the hard one, and `ulimit -t` sets both.
fn or_cpu_limit(help: &str, evidence: &Evidence) -> String {
    match evidence.cpu_limit {
        None => help.to_owned(),
        Some(seconds) => {
            format!("{help}; or its CPU time limit was used up (RLIMIT_CPU is {seconds} s, `ulimit -t`)")
        }
    }
}

/// Cause for the exit codes of a shell that could not start a command.
fn shell_code(exit: Exit, evidence: &Evidence) -> Option<Cause> {
    let (what, word) = match exit {
        Exit::Code(127) => ("shell: command not found", "not found"),
        Exit::Code(126) => ("shell: command not executable", "ermission denied"),
        _ => return None,
    };
    let said = evidence.stderr.iter().rev().find(|line| line.contains(word));
    Some(match said {
        Some(line) => Cause::new(format!("{what}: {}", line.trim())),
        None => Cause::new(format!("perhaps {what}")),
    })
}

#[cfg(test)]
mod tests;
