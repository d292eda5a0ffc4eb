//! What made a worker fail, as far as it can be known from outside: pure. What the evidence does not prove is said with
//! "perhaps"; where it says nothing there is no cause.

use rustix::io::Errno;

use super::Evidence;
use super::python::{self, Exception};
use crate::spawn::Exit;
use crate::spawn::oom::OomKills;

/// How C++ begins the message of an exception that nobody caught.
const WHAT: &str = "what():  ";

/// What to do where the host has too little memory.
const MEMORY: &str = "give the job more memory, or use less: fewer data loader workers, smaller batches";

/// What happened, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// One line.
    pub what: String,
    /// One line, where something can be advised.
    pub advice: Option<String>,
}

impl Cause {
    fn of(what: impl Into<String>) -> Self {
        Self { what: what.into(), advice: None }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

/// The cause of a worker's failure; `None` if nothing is known beyond how it ended.
pub fn cause(evidence: &Evidence) -> Option<Cause> {
    if let Some(error) = evidence.spawn_error {
        return not_started(error, evidence);
    }
    let exit = evidence.exit?;
    // SIGINT, SIGKILL and SIGTERM are what xlaunch sends.
    if exit == Exit::Code(0) || evidence.signalled && matches!(ended_by_signal(exit), Some(2 | 9 | 15)) {
        return None;
    }
    memory(exit, evidence)
        .or_else(|| told(exit, evidence))
        .or_else(|| ended_by_signal(exit).and_then(|signal| signalled(exit, signal, evidence)))
        .or_else(|| shell(exit, evidence))
}

/// The system could not start the program.
fn not_started(error: i32, evidence: &Evidence) -> Option<Cause> {
    let program = evidence.program.to_string_lossy();
    let path = evidence.search_path.to_string_lossy();
    let cause = match Errno::from_raw_os_error(error) {
        Errno::NOENT if program.contains('/') => Cause::of(format!(
            "there is no file {program}, or its first line names an interpreter that is not there"
        )),
        Errno::NOENT => Cause::of(format!("there is no program {program}"))
            .advise(format!("install it, or give its path; directories searched (PATH): {path}")),
        Errno::ACCESS => Cause::of(format!("{program} may not be executed")).advise(format!(
            "chmod +x {program}; perhaps it is a directory, or its file system is mounted noexec"
        )),
        Errno::NOEXEC => Cause::of(format!("{program} is no program that this machine can execute"))
            .advise("perhaps it is a script whose first line lacks #!, or was built for another processor"),
        Errno::TOOBIG => Cause::of("the arguments and the environment are too long for the system"),
        Errno::AGAIN => Cause::of("no more processes are allowed")
            .advise("raise the limits: ulimit -u, or the container's pids limit"),
        Errno::NOMEM => Cause::of("the system has no memory left to start a process"),
        _ => return None,
    };
    Some(cause)
}

/// The signal that ended the worker, or a child whose end a shell passed on.
fn ended_by_signal(exit: Exit) -> Option<i32> {
    match exit {
        Exit::Signal(signal) => Some(signal),
        Exit::Code(code @ 129..=159) => Some(code - 128),
        Exit::Code(_) | Exit::Unknown => None,
    }
}

/// The kernel ran out of memory, by its own counts.
fn memory(exit: Exit, evidence: &Evidence) -> Option<Cause> {
    let OomKills { rank, launch, host } = evidence.oom_kills;
    let killed = ended_by_signal(exit) == Some(9);
    let what = match (rank, launch, host) {
        (1.., ..) | (_, 1.., _) if killed => "the kernel killed it for lack of memory".to_owned(),
        (_, _, Some(1)) if killed => {
            "it was killed, as a process of this host was by the kernel for lack of memory".into()
        }
        (_, _, Some(host @ 2..)) if killed => {
            format!("it was killed, as {host} processes of this host were by the kernel for lack of memory")
        }
        (1, ..) => "the kernel killed one of its processes for lack of memory".into(),
        (2.., ..) => format!("the kernel killed {rank} of its processes for lack of memory"),
        _ => return None,
    };
    Some(Cause::of(what).advise(MEMORY))
}

/// What the worker itself said.
fn told(exit: Exit, evidence: &Evidence) -> Option<Cause> {
    let killed = ended_by_signal(exit);
    if killed == Some(9) {
        // What it said before has nothing to do with it.
        return None;
    }
    let recorded = evidence.error_file.as_deref().and_then(python::recorded);
    let sure = recorded.is_some() || exit == Exit::Code(1);
    // A program that a signal ended had got over the exceptions before.
    let traced = || python::exception(&evidence.stderr).filter(|_| killed.is_none());
    let Exception { line, place } = match recorded.or_else(traced) {
        Some(exception) => exception,
        None => return said(killed, evidence),
    };
    let place = place.map_or(String::new(), |place| format!(" ({place})"));
    let perhaps = if sure { "" } else { "perhaps " };
    known(&line, &format!("{line}{place}"), evidence)
        .or_else(|| Some(Cause::of(format!("{perhaps}{line}{place}"))))
}

/// The last line of stderr that says what went wrong, where there is no exception.
fn said(killed: Option<i32>, evidence: &Evidence) -> Option<Cause> {
    let python: &[&str] = match killed {
        Some(_) => &["Fatal Python error: "],
        None => &["can't open file", ": No module named ", "Fatal Python error: "],
    };
    let abort: &[&str] = if killed == Some(6) { &[WHAT, "Assertion `"] } else { &[] };
    let any = ["EADDRINUSE", "CUDA out of memory", "CUDA error: ", "error while loading shared libraries"];
    let says = |line: &&str| [python, abort, &any].concat().iter().any(|part| line.contains(part));
    let mut lines = evidence.stderr.iter().rev().map(|line| python::without_rank(line).trim());
    let line = lines.find(says)?;
    let line = line.strip_prefix(WHAT).unwrap_or(line);
    let place = python::fault(&evidence.stderr).map_or(String::new(), |place| format!(" ({place})"));
    let whole = format!("{line}{place}");
    known(line, &whole, evidence).or_else(|| Some(Cause::of(whole)))
}

/// Failures that have a known way out. `whole` is the line with its place.
fn known(line: &str, whole: &str, evidence: &Evidence) -> Option<Cause> {
    let has = |parts: &[&str]| parts.iter().any(|part| line.contains(part));
    let name = line.split(':').next().unwrap_or(line).rsplit('.').next().unwrap_or(line);
    let whole = Cause::of(whole);
    let program = evidence.program.to_string_lossy();
    let cause = if has(&["OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory"]) {
        Cause::of(format!("the GPU's memory ran out: {}", whole.what))
            .advise("use less of it (smaller batches), or see who else does: nvidia-smi")
    } else if name == "MemoryError" || has(&["DefaultCPUAllocator: can't allocate memory"]) {
        Cause::of(format!("the host's memory ran out: {}", whole.what))
    } else if has(&["is killed by signal: Killed"]) {
        match evidence.oom_kills.launch {
            0 => whole.advise("perhaps for lack of memory; the kernel's log says: dmesg, or journalctl -k"),
            _ => Cause::of(format!("the kernel killed a process for lack of memory: {}", whole.what))
                .advise(MEMORY),
        }
    } else if has(&["insufficient shared memory", "out of shared memory"]) {
        whole.advise("enlarge /dev/shm (in a container: --shm-size), or use fewer data loader workers")
    } else if has(&["EADDRINUSE", "Address already in use", "address already in use"]) {
        let what = port(line).map_or("an address is in use".into(), |port| format!("port {port} is in use"));
        Cause::of(format!("{what}: {}", whole.what)).advise(
            "choose another; where it is MASTER_PORT, leave out --master-port: then xlaunch finds a free one",
        )
    } else if has(&[
        "Watchdog caught collective operation timeout",
        "Timed out waiting",
        "wait timeout after",
        "has timed out",
    ]) {
        Cause::of(format!("ranks waited for each other in vain: {}", whole.what)).advise(
            "perhaps one of them hangs, ended, or called another collective: compare their last lines",
        )
    } else if has(&[
        "gloo/transport",
        "ncclRemoteError",
        "remote server shutdown",
        "failed to recv, got 0 bytes",
    ]) {
        whole.advise("perhaps another rank ended first: see what its last lines say")
    } else if has(&["NCCL", "DistBackendError"]) {
        whole.advise("NCCL_DEBUG=INFO in the environment makes NCCL say more")
    } else if name == "ModuleNotFoundError" || line.contains(": No module named ") {
        match program.is_empty() {
            true => whole,
            false => whole.advise(format!(
                "install it for {program}, or start the workers with the Python that has it"
            )),
        }
    } else if name == "KeyboardInterrupt" {
        Cause::of("it was interrupted (SIGINT, Ctrl-C)")
    } else {
        return None;
    };
    Some(cause)
}

/// The number of a port, where a line names one: `port: 29500`, `port 29500`, `('::', 29500)`.
fn port(line: &str) -> Option<u16> {
    let number = |text: &str| {
        let text = text.trim_start_matches([':', ' ', '=']);
        let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        text[..end].parse().ok().filter(|port| *port > 0)
    };
    let named = line.match_indices("port").find_map(|(at, word)| number(&line[at + word.len()..]));
    named.or_else(|| line.match_indices(',').find_map(|(at, _)| number(&line[at + 1..])))
}

/// A signal that xlaunch did not send.
fn signalled(exit: Exit, signal: i32, evidence: &Evidence) -> Option<Cause> {
    let cause = match signal {
        1 => Cause::of("its terminal or session went away (SIGHUP)"),
        2 => Cause::of("it was interrupted (SIGINT, Ctrl-C)"),
        4 => Cause::of("it came to an illegal instruction")
            .advise("perhaps it, or a library that it loads, was built for another processor"),
        7 => Cause::of("it used memory that could not be provided (SIGBUS)")
            .advise("perhaps /dev/shm is full: df -h /dev/shm; in a container, enlarge it with --shm-size"),
        8 => Cause::of("it divided by zero, or the like (SIGFPE)"),
        9 if evidence.oom_kills.host == Some(0) => {
            Cause::of("it was killed, neither by xlaunch nor by the kernel for lack of memory")
                .advise("somebody sent it SIGKILL: a person, or a program that looks after this host")
        }
        9 => Cause::of("it was killed, not by xlaunch: perhaps by the kernel for lack of memory")
            .advise("the kernel's log says: dmesg, or journalctl -k"),
        11 if evidence.program.is_empty() => Cause::of("it used memory that is not its own (SIGSEGV)"),
        11 => Cause::of("it used memory that is not its own (SIGSEGV)")
            .advise("PYTHONFAULTHANDLER=1 in the environment makes Python say where"),
        13 => Cause::of("it wrote to a pipe that nobody reads any more (SIGPIPE)"),
        15 => Cause::of("it was asked to end (SIGTERM), not by xlaunch"),
        24 => Cause::of("it used up its CPU time (SIGXCPU)").advise("see ulimit -t"),
        25 => Cause::of("it wrote a file that is larger than allowed (SIGXFSZ)").advise("see ulimit -f"),
        _ => return None,
    };
    Some(match exit {
        Exit::Signal(_) => cause,
        _ => Cause { what: format!("perhaps a process that it started: {}", cause.what), ..cause },
    })
}

/// Codes by which shells say that they could not start something.
fn shell(exit: Exit, evidence: &Evidence) -> Option<Cause> {
    let (what, word) = match exit {
        Exit::Code(127) => ("a shell did not find a command", "not found"),
        Exit::Code(126) => ("a shell found a command that it could not execute", "ermission denied"),
        _ => return None,
    };
    let said = evidence.stderr.iter().rev().find(|line| line.contains(word));
    Some(match said {
        Some(line) => Cause::of(format!("{what}: {}", line.trim())),
        None => Cause::of(format!("perhaps {what}")),
    })
}

#[cfg(test)]
#[path = "cause_tests.rs"]
mod tests;
