//! Prints lines for the user on stderr.

use std::fmt;
use std::io::Write;

/// Prints a line to stderr unchanged, in a single write: other processes, such as Slurm's, may write to the same file.
/// Errors are ignored: if stderr is closed or its disk is full, the exit code still reports the result.
pub fn print_line(text: fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}
