//! A temporary directory in which any command is launched, with a runtime directory separate from those of other tests.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::{Output, Process, xlaunch_path};

/// Prefixes of environment variables that would change a launch.
const LAUNCHER_VARIABLES: [&str; 6] = ["PET_", "XLAUNCH_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "OMP_"];

/// Removes variables that a launch around this test may have set.
pub(crate) fn without_launcher_variables(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if LAUNCHER_VARIABLES.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(&*name);
        }
    }
}

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
    /// Creates an empty directory, with `xlaunch` as the launcher.
    ///
    /// # Panics
    /// If no temporary directory can be created.
    pub fn new() -> Self {
        Self::with_program(xlaunch_path())
    }

    /// Same as [`Self::new`], with another program, such as the real torchrun or a shell around `xlaunch`.
    ///
    /// # Panics
    /// The same as for [`Self::new`].
    pub fn with_program(program: impl AsRef<Path>) -> Self {
        let dir = TempDir::new().expect("create a temporary directory");
        std::fs::create_dir(dir.path().join("runtime")).expect("create the runtime directory");
        Self { dir, program: program.as_ref().to_path_buf() }
    }

    /// Returns the working directory of the launcher.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns `XDG_RUNTIME_DIR` and `TMPDIR` of the launcher.
    pub fn runtime_dir(&self) -> PathBuf {
        self.dir.path().join("runtime")
    }

    /// Writes a file.
    ///
    /// # Panics
    /// If that fails.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).expect("write a file");
        path
    }

    /// Reads a file; returns an empty string if it does not exist.
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }

    /// Returns the launcher with these arguments.
    pub fn command<A: AsRef<OsStr>>(&self, args: &[A]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).current_dir(self.path());
        command.env("XDG_RUNTIME_DIR", self.runtime_dir()).env("TMPDIR", self.runtime_dir());
        without_launcher_variables(&mut command);
        command
    }

    /// Starts the launcher.
    pub fn spawn<A: AsRef<OsStr>>(&self, args: &[A]) -> Process {
        Process::spawn(&mut self.command(args))
    }

    /// Runs the launcher to its end.
    pub fn run<A: AsRef<OsStr>>(&self, args: &[A]) -> Output {
        self.spawn(args).wait()
    }

    /// Starts `nproc` workers that run a shell script, with additional options of the launcher.
    pub fn spawn_shell(&self, options: &[&str], nproc: u32, script: &str) -> Process {
        let nproc = nproc.to_string();
        self.spawn(&[options, &["--nproc-per-node", &nproc, "--", "sh", "-c", script]].concat())
    }

    /// Same as [`Self::spawn_shell`], but waits for the end.
    pub fn run_shell(&self, options: &[&str], nproc: u32, script: &str) -> Output {
        self.spawn_shell(options, nproc, script).wait()
    }
}
