//! A launch of any command, in a directory of its own, with its runtime files apart from those of other tests.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::{Finished, Running, xlaunch};

/// A directory to launch commands in.
#[derive(Debug)]
pub struct Launch {
    dir: TempDir,
    program: PathBuf,
}

impl Default for Launch {
    fn default() -> Self {
        Self::new()
    }
}

impl Launch {
    /// An empty directory.
    ///
    /// # Panics
    /// If there is no temporary directory.
    pub fn new() -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        std::fs::create_dir(dir.path().join("runtime")).expect("a runtime directory");
        Self { dir, program: xlaunch().to_path_buf() }
    }

    /// The same for another launcher, such as the real torchrun.
    pub fn of(program: &Path) -> Self {
        Self { program: program.to_path_buf(), ..Self::new() }
    }

    /// The directory, which commands start in.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the launcher keeps what is not to be kept.
    pub fn runtime(&self) -> PathBuf {
        self.dir.path().join("runtime")
    }

    /// Writes a file into the directory.
    ///
    /// # Panics
    /// If that fails.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).expect("a file in the temporary directory");
        path
    }

    /// Reads a file of the directory; empty if there is none.
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }

    /// The launcher with these arguments.
    pub fn command<A: AsRef<OsStr>>(&self, args: &[A]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).current_dir(self.path());
        command.env("XDG_RUNTIME_DIR", self.runtime()).env("TMPDIR", self.runtime());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if ["PET_", "XLAUNCH_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "OMP_"]
                .iter()
                .any(|p| name.starts_with(p))
            {
                command.env_remove(&*name);
            }
        }
        command
    }

    /// Starts it.
    pub fn start<A: AsRef<OsStr>>(&self, args: &[A]) -> Running {
        Running::start(&mut self.command(args))
    }

    /// Runs it to its end.
    pub fn run<A: AsRef<OsStr>>(&self, args: &[A]) -> Finished {
        self.start(args).finish()
    }

    /// Runs a shell script on so many workers, with these options before.
    pub fn shell(&self, options: &[&str], nproc: u32, script: &str) -> Finished {
        self.start_shell(options, nproc, script).finish()
    }

    /// Starts it.
    pub fn start_shell(&self, options: &[&str], nproc: u32, script: &str) -> Running {
        let nproc = nproc.to_string();
        let words = [options, &["--nproc-per-node", &nproc, "--", "sh", "-c", script]].concat();
        self.start(&words)
    }
}
