//! Output of queries: answers go to stdout, everything else to stderr.

use std::io::{self, ErrorKind, Write};

use xlaunch_spec::exit::ExitCode;

use crate::render::text::escape;
use xlaunch_agent::stderr::{print_line, write_all};
use xlaunch_host::clock;
use xlaunch_spec::refusal::Refusal;

/// Why a query ends without a complete answer.
#[derive(Debug)]
pub(super) enum QueryError {
    Refused(Refusal),
    /// The reader has closed stdout, as `head` does. This is not an error of the query.
    StdoutClosed,
}

impl From<String> for QueryError {
    fn from(message: String) -> Self {
        Self::Refused(Refusal::new(ExitCode::WorkerFailed, message))
    }
}

impl From<Refusal> for QueryError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Returns the exit code of a query, and prints its error.
pub(super) fn finish(result: Result<ExitCode, QueryError>) -> ExitCode {
    match result {
        Ok(exit) => exit,
        Err(QueryError::StdoutClosed) => ExitCode::Done,
        Err(QueryError::Refused(Refusal { exit, message })) => {
            print_note(&format!("error: {}", message.trim()));
            exit
        }
    }
}

/// Prints the whole answer to stdout. If the reader has closed stdout, the exit code is the same.
pub(super) fn answer(text: &str, exit: ExitCode) -> ExitCode {
    answered(write(text.as_bytes()), exit)
}

/// Returns the exit code of a query after its whole answer was `written` to stdout, and prints the error. If the reader
/// has closed stdout, the exit code is the same.
pub(super) fn answered(written: io::Result<()>, exit: ExitCode) -> ExitCode {
    match written.map_err(|error| not_written(&error)) {
        Err(QueryError::StdoutClosed) => exit,
        printed => finish(printed.map(|()| exit)),
    }
}

/// Prints escaped text to stderr.
pub(super) fn print_note(text: &str) {
    let lines: Vec<_> = text.lines().map(escape).collect();
    print_line(format_args!("{}", lines.join("\n")));
}

/// Prints the summary and the failure report of a job. A reader that is gone wants neither.
pub(super) fn print_end(summary: &str, report: &str) {
    let lost = write(summary.as_bytes()).err().filter(|error| error.kind() != ErrorKind::BrokenPipe);
    let lost = lost.map(|error| format!("xlaunch: the summary was not written to stdout: {error}\n"));
    let text = lost.unwrap_or_default() + report;
    // An error of stderr cannot be reported.
    let _ = write_all(io::stderr().lock(), text.as_bytes());
}

/// Prints part of the answer to stdout.
pub(super) fn print(bytes: &[u8]) -> Result<(), QueryError> {
    write(bytes).map_err(|error| not_written(&error))
}

fn write(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.flush()?;
    write_all(stdout, bytes)
}

fn not_written(error: &io::Error) -> QueryError {
    match error.kind() {
        ErrorKind::BrokenPipe => QueryError::StdoutClosed,
        _ => format!("failed to write to stdout: {error}").into(),
    }
}

/// Seconds since 1970.
pub(super) fn unix_seconds() -> u64 {
    clock::unix().as_secs()
}

/// Characters per line of the terminal; unlimited if stdout is not a terminal.
pub(super) fn terminal_width() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0);
    size.map_or(usize::MAX, |size| size.ws_col.into())
}

/// Returns `text` with the control sequences that replace the previous answer on the terminal; the `first` answer
/// clears the screen.
pub(super) fn redraw(text: &str, first: bool) -> String {
    if first { format!("\x1b[2J\x1b[H{text}") } else { format!("\x1b[H\x1b[J{text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_closed_pipe_is_no_error_of_an_answer() {
        let written = |kind: ErrorKind| answered(Err(kind.into()), ExitCode::Done);
        assert_eq!(written(ErrorKind::BrokenPipe), ExitCode::Done);
        assert_eq!(written(ErrorKind::StorageFull), ExitCode::WorkerFailed);
        assert_eq!(answered(Ok(()), ExitCode::Done), ExitCode::Done);
    }
}
