//! Prints lines for the user on stderr.

use std::fmt;
use std::io::Write;

/// Prints a line to stderr unchanged. Errors are ignored: if stderr is closed or its disk is full, the exit code still
/// reports the result.
pub(crate) fn print_line(text: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
