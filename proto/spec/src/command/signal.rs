//! Signals that can terminate a job.

use serde::{Deserialize, Serialize};

/// A signal that can terminate a job. Values are Linux signal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "named after the signals")]
pub enum Signal {
    #[serde(rename = "SIGHUP")]
    Hup = 1,
    #[serde(rename = "SIGINT")]
    Int = 2,
    #[serde(rename = "SIGQUIT")]
    Quit = 3,
    #[serde(rename = "SIGUSR1")]
    Usr1 = 10,
    #[serde(rename = "SIGUSR2")]
    Usr2 = 12,
    #[serde(rename = "SIGALRM")]
    Alrm = 14,
    #[serde(rename = "SIGTERM")]
    Term = 15,
    #[serde(rename = "SIGXCPU")]
    Xcpu = 24,
}

impl Signal {
    /// All signals.
    pub const ALL: [Self; 8] =
        [Self::Hup, Self::Int, Self::Quit, Self::Usr1, Self::Usr2, Self::Alrm, Self::Term, Self::Xcpu];

    /// Returns the name, such as `SIGTERM`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hup => "SIGHUP",
            Self::Int => "SIGINT",
            Self::Quit => "SIGQUIT",
            Self::Usr1 => "SIGUSR1",
            Self::Usr2 => "SIGUSR2",
            Self::Alrm => "SIGALRM",
            Self::Term => "SIGTERM",
            Self::Xcpu => "SIGXCPU",
        }
    }

    /// Returns the signal with this name or number.
    pub fn parse(text: &str) -> Option<Self> {
        let number = text.parse::<i32>().ok();
        Self::ALL.into_iter().find(|signal| signal.name() == text || number == Some(*signal as i32))
    }
}

impl From<Signal> for rustix::process::Signal {
    fn from(signal: Signal) -> Self {
        match signal {
            Signal::Hup => Self::HUP,
            Signal::Int => Self::INT,
            Signal::Quit => Self::QUIT,
            Signal::Usr1 => Self::USR1,
            Signal::Usr2 => Self::USR2,
            Signal::Alrm => Self::ALARM,
            Signal::Term => Self::TERM,
            Signal::Xcpu => Self::XCPU,
        }
    }
}
