//! Exit status of a process, with a description for the user.

use std::fmt;

/// The first real-time signal that programs can use: C libraries reserve the kernel's first two (32 and 33).
const SIGRTMIN: i32 = 34;

/// Exit status of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Exited with this code.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
    /// Unknown; never counts as success.
    Unknown,
}

/// Describes the exit. Codes are explained with their meaning for the built-in trainer.
impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => match xlaunch_spec::exit::ExitCode::of_worker(*code) {
                Some(known) => write!(f, "exit code {code} ({})", known.meaning()),
                None => write!(f, "exit code {code}"),
            },
            Self::Signal(signal @ SIGRTMIN..=64) => {
                write!(f, "signal {signal} (SIGRTMIN+{}: a real-time signal)", signal - SIGRTMIN)
            }
            Self::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
            Self::Unknown => f.write_str("unknown exit"),
        }
    }
}

impl Exit {
    /// Describes the exit of a command, whose exit codes are its own.
    pub fn of_command(self) -> String {
        match self {
            Self::Code(code) => format!("exit code {code}"),
            Self::Signal(_) | Self::Unknown => self.to_string(),
        }
    }
}

/// `SIGTERM`, without a description.
pub fn short_signal_name(signal: i32) -> &'static str {
    let name = signal_name(signal);
    name.split_once(':').map_or(name, |(name, _)| name)
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP: terminal closed",
        2 => "SIGINT: interrupted",
        3 => "SIGQUIT: quit from the terminal",
        4 => "SIGILL: illegal instruction",
        5 => "SIGTRAP: breakpoint",
        6 => "SIGABRT: aborted",
        7 => "SIGBUS: bus error",
        8 => "SIGFPE: arithmetic error",
        9 => "SIGKILL: killed",
        10 => "SIGUSR1: user-defined signal without a handler",
        11 => "SIGSEGV: invalid memory reference",
        12 => "SIGUSR2: user-defined signal without a handler",
        13 => "SIGPIPE: wrote to a closed pipe",
        14 => "SIGALRM: timer expired",
        15 => "SIGTERM: terminated",
        16 => "SIGSTKFLT: coprocessor fault",
        24 => "SIGXCPU: out of CPU time",
        25 => "SIGXFSZ: file too large",
        26 => "SIGVTALRM: CPU timer expired",
        27 => "SIGPROF: profiling timer expired",
        29 => "SIGIO: I/O possible, without a handler",
        30 => "SIGPWR: power failure",
        31 => "SIGSYS: bad system call",
        _ => "unknown signal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fatal_signal_has_a_name() {
        // SIGSTOP, SIGCONT and similar, and signals ignored by default; 32 and 33 belong to the C library.
        let not_fatal = [17, 18, 19, 20, 21, 22, 23, 28, 32, 33];
        for signal in (1..=64).filter(|signal| !not_fatal.contains(signal)) {
            let text = Exit::Signal(signal).to_string();
            assert!(text.contains("(SIG"), "{text}");
        }
        assert_eq!(Exit::Signal(37).to_string(), "signal 37 (SIGRTMIN+3: a real-time signal)");
    }
}
