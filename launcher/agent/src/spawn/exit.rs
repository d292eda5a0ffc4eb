//! How a process ended, in words.

use std::fmt;

/// First real-time signal of C libraries; the kernel's first two are theirs.
const REAL_TIME: i32 = 34;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// Nobody can say: never a success.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => match xlaunch_proto::exit::ExitCode::from_code(*code) {
                Some(known) => write!(f, "exit code {code} ({})", known.meaning()),
                None => write!(f, "exit code {code}"),
            },
            Self::Signal(signal @ REAL_TIME..=64) => {
                write!(f, "signal {signal} (SIGRTMIN+{}: a real-time signal)", signal - REAL_TIME)
            }
            Self::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
            Self::Unknown => f.write_str("unknown exit"),
        }
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP: its terminal was closed",
        2 => "SIGINT: interrupted",
        3 => "SIGQUIT: quit by the terminal",
        4 => "SIGILL: illegal instruction",
        5 => "SIGTRAP: breakpoint",
        6 => "SIGABRT: aborted",
        7 => "SIGBUS: bad memory access",
        8 => "SIGFPE: arithmetic error",
        9 => "SIGKILL: killed",
        10 => "SIGUSR1: a user's signal without a handler",
        11 => "SIGSEGV: bad memory access",
        12 => "SIGUSR2: a user's signal without a handler",
        13 => "SIGPIPE: wrote to a closed pipe",
        14 => "SIGALRM: a timer ran out",
        15 => "SIGTERM: asked to end",
        16 => "SIGSTKFLT: coprocessor fault",
        24 => "SIGXCPU: out of CPU time",
        25 => "SIGXFSZ: file too large",
        26 => "SIGVTALRM: a timer of CPU time ran out",
        27 => "SIGPROF: a profiling timer ran out",
        29 => "SIGIO: input or output possible, without a handler",
        30 => "SIGPWR: power failure",
        31 => "SIGSYS: forbidden system call",
        _ => "a signal without a name",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fatal_signal_has_a_name() {
        // Stop, continue and those that are ignored by default end nobody; 32 and 33 belong to the C library.
        let harmless = [17, 18, 19, 20, 21, 22, 23, 28, 32, 33];
        for signal in (1..=64).filter(|signal| !harmless.contains(signal)) {
            let text = Exit::Signal(signal).to_string();
            assert!(text.contains("(SIG"), "{text}");
        }
        assert_eq!(Exit::Signal(37).to_string(), "signal 37 (SIGRTMIN+3: a real-time signal)");
    }
}
