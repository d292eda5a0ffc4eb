//! The streams of a worker's output: pipes, or for stdout a pseudoterminal if xlaunch shows its bytes unchanged on a
//! terminal, because programs choose colours, progress bars and line editing by `isatty`.
//!
//! The pseudoterminal is for output only; workers read from xlaunch's own terminal (see `terminal`). It leaves the
//! processing of output to that terminal, so that log files contain the bytes that the worker wrote. Stderr is always a
//! pipe: pagers read keys from the terminal that it names, and no keys arrive on this one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, OutputModes, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

use super::Options;

/// Both ends of one stream.
#[derive(Debug)]
pub struct Stream {
    /// The end that xlaunch reads. A read fails with `EIO` at the end of a pseudoterminal.
    pub reader: File,
    /// The worker's end.
    pub writer: OwnedFd,
}

impl Options {
    /// Opens a worker's stdout and stderr.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn open_output(&self) -> io::Result<[Stream; 2]> {
        // A container may have no pseudoterminals; a pipe does not look as good, but nothing is lost.
        let terminal = self.stdout_is_terminal.then(|| pseudoterminal(io::stdout().as_fd()).ok()).flatten();
        Ok([terminal.map_or_else(pipe, Ok)?, pipe()?])
    }
}

fn pipe() -> io::Result<Stream> {
    let (reader, writer) = io::pipe()?;
    Ok(Stream { reader: OwnedFd::from(reader).into(), writer: writer.into() })
}

/// Opens a pseudoterminal with the size and modes of xlaunch's `own` terminal.
fn pseudoterminal(own: BorrowedFd<'_>) -> rustix::io::Result<Stream> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let reader = openpt(flags)?;
    grantpt(&reader)?;
    unlockpt(&reader)?;
    let writer = ioctl_tiocgptpeer(&reader, flags)?;
    let mut modes = tcgetattr(own)?;
    modes.output_modes.remove(OutputModes::OPOST);
    tcsetattr(&writer, OptionalActions::Now, &modes)?;
    tcsetwinsize(&writer, tcgetwinsize(own)?)?;
    Ok(Stream { reader: reader.into(), writer })
}

/// Gives a worker's pseudoterminal the size of xlaunch's `own` terminal, which the user may have changed.
pub fn follow_size(pseudoterminal: impl AsFd, own: impl AsFd) {
    if let (Ok(theirs), Ok(size)) = (tcgetwinsize(&pseudoterminal), tcgetwinsize(own))
        && (theirs.ws_row, theirs.ws_col) != (size.ws_row, size.ws_col)
    {
        // The size is cosmetic.
        let _ = tcsetwinsize(pseudoterminal, size);
    }
}
