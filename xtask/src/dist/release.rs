//! What all files of a release have in common: version, time and directories.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::Error;
use crate::workspace::{Workspace, cargo, output};

/// A platform that files are published for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Platform {
    X86_64,
    Aarch64,
}

impl Platform {
    pub(super) const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    pub(super) fn of_triple(triple: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|platform| platform.triple() == triple);
        let all = Self::ALL.map(Self::triple).join(", ");
        known.ok_or_else(|| format!("no builds for `{triple}`: the platforms are {all}").into())
    }

    /// The platform of this machine.
    pub(super) fn host() -> Result<Self, Error> {
        Self::of_triple(&format!("{}-unknown-linux-gnu", std::env::consts::ARCH))
    }

    pub(super) fn is_host(self) -> bool {
        self.cpu() == std::env::consts::ARCH
    }

    /// Name of the processor in triples, wheels and RPM packages.
    pub(super) fn cpu(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    pub(super) fn triple(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Debian's name of the platform.
    pub(super) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }
}

/// A release in the making.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) root: PathBuf,
    /// cargo's target directory.
    pub(super) target: PathBuf,
    /// Directory of the finished files.
    pub(super) dist: PathBuf,
    pub(super) version: String,
    /// Time of the commit, in seconds since 1970: the timestamp of all files.
    pub(super) time: u64,
}

impl Release {
    /// Finds version, time and directories, and empties the directory of finished files.
    pub(super) fn begin(workspace: &Workspace) -> Result<Self, Error> {
        let root = workspace.root.clone();
        let mut metadata = cargo(&root);
        metadata.args(["metadata", "--no-deps", "--format-version", "1", "--locked"]);
        let metadata: Value = serde_json::from_str(&output(&mut metadata)?)?;
        let target = PathBuf::from(metadata["target_directory"].as_str().ok_or("no target directory")?);
        let packages = metadata["packages"].as_array().ok_or("no packages")?;
        let launcher = packages.iter().find(|package| package["name"] == "xlaunch");
        let version = launcher.and_then(|package| package["version"].as_str()).ok_or("no crate xlaunch")?;
        let time = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(time) => time,
            Err(_) => output(Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(&root))?,
        };
        let time = time.trim().parse().map_err(|_| format!("SOURCE_DATE_EPOCH: `{time}` is not a number"))?;
        let dist = target.join("dist");
        if dist.exists() {
            std::fs::remove_dir_all(&dist)?;
        }
        std::fs::create_dir_all(&dist)?;
        Ok(Self { root, dist, version: version.to_owned(), time, target })
    }
}
