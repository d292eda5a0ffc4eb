//! Programs that make the files. They are installed into `target/dist-tools`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::release::Release;
use crate::Error;
use crate::workspace::{cargo, forget_package, output};

/// Linker and C compiler for old systems, as packages of PyPI. `zig` has the symbols of every glibc.
const ZIG: [&str; 2] = ["ziglang==0.17.1", "cargo-zigbuild==0.24.1"];
/// Crates with programs, and their versions.
const CRATES: [(&str, &str); 2] = [("cargo-deb", "3.8.0"), ("cargo-generate-rpm", "0.21.1")];

/// Where programs are found.
#[derive(Debug)]
pub(super) struct Tools {
    path: OsString,
}

impl Tools {
    /// The programs that this machine has.
    pub(super) fn installed(release: &Release) -> Self {
        let directory = release.target.join("dist-tools/bin");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let directories = [directory].into_iter().chain(std::env::split_paths(&path));
        Self { path: std::env::join_paths(directories).unwrap_or(path) }
    }

    /// Installs the programs that are missing. Those elsewhere on this machine do not count: other versions make other
    /// bits.
    pub(super) fn install(release: &Release) -> Result<Self, Error> {
        let directory = release.target.join("dist-tools");
        let is_missing = |name: &str| !directory.join("bin").join(name).is_file();
        if is_missing("cargo-zigbuild") {
            output(Command::new("python3").args(["-m", "venv"]).arg(&directory))?;
            output(Command::new(directory.join("bin/pip")).args(["install", "--quiet"]).args(ZIG))?;
        }
        for (name, version) in CRATES {
            if is_missing(name) {
                let mut install = cargo(&release.root);
                install.args(["install", "--quiet", "--locked", "--version", version, name, "--root"]);
                output(install.arg(&directory))?;
            }
        }
        Ok(Self::installed(release))
    }

    /// The path of a program, if there is one.
    pub(super) fn find(&self, name: &str) -> Option<PathBuf> {
        std::env::split_paths(&self.path).map(|directory| directory.join(name)).find(|path| path.is_file())
    }

    /// A program, to be run in a directory.
    pub(super) fn command(&self, name: &str, directory: &Path) -> Result<Command, Error> {
        let program = self.find(name).ok_or_else(|| format!("`{name}` is not installed"))?;
        let mut command = Command::new(program);
        forget_package(&mut command);
        command.current_dir(directory).env("PATH", &self.path);
        Ok(command)
    }
}
