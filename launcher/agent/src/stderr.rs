//! Prints lines for the user on stderr, and writes to streams that other programs may have made non-blocking.

use std::fmt;
use std::io;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Prints a line to stderr unchanged, in a single write: other processes, such as Slurm's, may write to the same file.
/// Errors are ignored: if stderr is closed or its disk is full, the exit code still reports the result.
pub fn print_line(text: fmt::Arguments<'_>) {
    let _ = write_all(io::stderr().lock(), format!("{text}\n").as_bytes());
}

/// Writes all bytes to a stream, in a single write if it has room for them. A stream without room is waited for, even
/// if another program that shares it has made it non-blocking.
///
/// # Errors
/// The stream is closed, or its disk is full.
pub fn write_all(stream: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(&stream, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait_for_room(&stream),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until a non-blocking stream has room, or an error.
pub(crate) fn wait_for_room(stream: impl AsFd) {
    // If the wait is interrupted or fails, the next write reports the reason.
    let _ = poll(&mut [PollFd::new(&stream, PollFlags::OUT)], None);
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    #[test]
    fn stream_that_another_program_has_made_non_blocking_gets_everything() {
        let (mut reader, writer) = io::pipe().unwrap();
        fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
        let bytes: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
        let expected = bytes.clone();
        let writing = std::thread::spawn(move || write_all(writer, &bytes));
        let mut found = Vec::new();
        reader.read_to_end(&mut found).unwrap();
        writing.join().unwrap().unwrap();
        assert!(found == expected, "{} bytes", found.len());
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        assert_eq!(write_all(writer, b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
