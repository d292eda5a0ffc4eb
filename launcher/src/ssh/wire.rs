//! The protocol between the launching process and a host.
//!
//! ```text
//! host -> launcher (stdout): GREETING BUILD \n                  launcher: is that my build?
//! launcher -> host (stdin):  length (u32, big endian), Description as JSON
//! host -> launcher (stdout): READY \n                           its directory exists
//! launcher -> host (stdin):  GO                                 all hosts are ready
//! launcher -> host (stdin):  the number of a signal, any number of times
//! ```
//! After `GO`, the output of the host is that of the launch. Lines before the greeting come from the login shell.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read};

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

/// Start of the first line from a host.
pub(super) const GREETING: &str = "xlaunch-remote ";
/// The second line from a host.
pub(super) const READY: &str = "ready";
/// The error of a host whose standard input ends before the start.
pub(super) const NO_INPUT: &str = "the ssh client passed on no standard input";
/// The byte that starts the job.
pub(super) const GO: u8 = b'g';
/// Maximum size of a description: Linux accepts at most 6 MiB of arguments and environment, and JSON needs up to four
/// bytes for one.
const MAX_DESCRIPTION_BYTES: u32 = 32 << 20;
/// Signals that are passed on to the hosts.
const SIGNALS: [Signal; 6] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2, Signal::TERM];

/// The launch that a host runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    /// Working directory.
    pub(super) directory: OsString,
    /// Variables to add to the login environment.
    pub(super) environment: Vec<(OsString, OsString)>,
    /// The job's secret; `None` with a single host.
    pub(super) token: Option<Token>,
    /// The name by which the launcher was called: `xlaunch` or `torchrun`.
    pub(super) called_as: String,
    /// The arguments of the command line, without the program's name.
    pub(super) arguments: Vec<OsString>,
}

/// The secret of a job. It must not appear in any log.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Token(pub(super) String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl Description {
    /// Encodes the description, preceded by its length.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let json = serde_json::to_vec(self)?;
        let length = u32::try_from(json.len()).ok().filter(|length| *length <= MAX_DESCRIPTION_BYTES);
        let length = length.ok_or_else(|| {
            io::Error::other(format!("arguments and environment are too long: {} bytes", json.len()))
        })?;
        Ok([&length.to_be_bytes(), json.as_slice()].concat())
    }

    /// Reads exactly one description. Memory grows with the bytes received, not with the announced length.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        if length > MAX_DESCRIPTION_BYTES {
            return Err(io::Error::other(format!("a description of {length} bytes is too long")));
        }
        let mut json = Vec::new();
        from.take(length.into()).read_to_end(&mut json)?;
        if json.len() < length as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&json)?)
    }
}

/// Returns version and commit of this program, which must be the same on all hosts.
pub(super) fn build() -> String {
    match option_env!("XLAUNCH_COMMIT") {
        Some(commit) => format!("{} ({commit})", xlaunch_proto::VERSION),
        None => xlaunch_proto::VERSION.into(),
    }
}

/// Returns the byte for a signal, if it is passed on.
pub(super) fn signal_byte(signal: Signal) -> Option<u8> {
    SIGNALS.contains(&signal).then(|| u8::try_from(signal.as_raw()).ok()).flatten()
}

/// Returns the signal for a byte.
pub(super) fn signal_of(byte: u8) -> Option<Signal> {
    SIGNALS.into_iter().find(|signal| signal_byte(*signal) == Some(byte))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn description() -> Description {
        let odd = OsString::from_vec(b"not \xff UTF-8".to_vec());
        Description {
            directory: "/home/ada/with space/\"quotes\"/'both'/line\nfeed/日本".into(),
            environment: vec![("A".into(), odd.clone()), ("B".into(), "$(reboot) `x` \\".into())],
            token: Some(Token("secret-7f".into())),
            called_as: "xlaunch".into(),
            arguments: vec!["--".into(), "sh".into(), "-c".into(), "echo 'a' \"b\"\n".into(), odd, "".into()],
        }
    }

    #[test]
    fn directories_variables_and_arguments_arrive_unchanged() {
        let bytes = description().encode().unwrap();
        // The signal after the description is not read.
        let mut stream: &[u8] = &[&bytes, &[15][..]].concat();
        assert_eq!(Description::read(&mut stream).unwrap(), description());
        assert_eq!(stream, [15]);
    }

    #[test]
    fn incomplete_or_oversized_descriptions_are_refused() {
        let bytes = description().encode().unwrap();
        for length in [0, 3, 4, bytes.len() - 1] {
            let error = Description::read(&mut &bytes[..length]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{length} bytes");
        }
        let error = Description::read(&mut [255; 8].as_slice()).unwrap_err();
        assert!(error.to_string().contains("4294967295 bytes is too long"), "{error}");
        let huge = Description { arguments: vec!["x".repeat(9 << 20).into()], ..description() };
        assert!(huge.encode().unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn token_is_not_in_debug_output() {
        let shown = format!("{:?}", description());
        assert!(shown.contains("[secret]") && !shown.contains("7f"), "{shown}");
    }

    #[test]
    fn only_signals_that_users_send_are_passed_on() {
        for signal in SIGNALS {
            assert_eq!(signal_byte(signal).and_then(signal_of), Some(signal));
        }
        assert_eq!((signal_byte(Signal::KILL), signal_of(9), signal_of(GO)), (None, None, None));
    }
}
