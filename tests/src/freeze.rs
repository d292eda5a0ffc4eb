//! Stops a single thread of another process.

use std::io::{BufRead, BufReader, Error, Read, Result};
use std::process::{Child, Command, Stdio};

use crate::requirements::python_path;

/// A thread that `peers/freeze.py` holds by ptrace until this is dropped. Other threads of its process continue.
#[derive(Debug)]
pub struct FrozenThread(Child);

impl FrozenThread {
    /// Stops a thread; the id of a process means its main thread.
    ///
    /// # Errors
    /// If Python is missing or tracing is not permitted.
    pub fn new(thread: u32) -> Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/freeze.py");
        let mut command = Command::new(python_path());
        command.args([script, &thread.to_string()]);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut frozen = Self(piped.spawn()?);
        let mut line = String::new();
        if let Some(stdout) = &mut frozen.0.stdout {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.trim() == "frozen" {
            return Ok(frozen);
        }
        let mut reason = String::new();
        if let Some(stderr) = &mut frozen.0.stderr {
            stderr.read_to_string(&mut reason)?;
        }
        Err(Error::other(reason.trim().to_owned()))
    }
}

impl Drop for FrozenThread {
    fn drop(&mut self) {
        // The script detaches at the end of its input.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
