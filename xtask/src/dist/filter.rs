//! Passes bytes through a command such as gzip.

use std::io::{Seek, Write};
use std::process::Command;

use crate::Error;

/// Returns what a command writes for this input.
pub(super) fn filter(command: &mut Command, input: &[u8]) -> Result<Vec<u8>, Error> {
    // A file, unlike a pipe, need not be written while the output is read.
    let mut file = tempfile::tempfile()?;
    file.write_all(input)?;
    file.rewind()?;
    let output = command.stdin(file).output()?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", command.get_program().display(), output.status).into());
    }
    Ok(output.stdout)
}
