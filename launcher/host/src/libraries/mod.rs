//! The CUDA libraries of a training job's workers, selected once per launch, so that all ranks load the same files.
//!
//! ```text
//! directories --search--> files --version--> candidates --select (pure)--> Libraries --links--> variables of workers
//! ```
//! The newest version that works with the driver is selected, wherever it is: an old library in the loader's path must
//! not slow training down when a newer one is installed next to PyTorch. `XLAUNCH_CUDNN` and similar variables replace
//! the selection. Nothing is loaded here, and no error is raised: a worker reports a missing library.
//!
//! Workers get the paths of cuDNN and NCCL in variables. NVRTC and cuBLASLt are loaded by name, so a directory with
//! links of these names comes first in `LD_LIBRARY_PATH`, followed by the directories of the selected files, where they
//! find their own parts.

mod links;
mod search;
mod select;
#[cfg(test)]
mod tests;
mod version;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

pub use version::Version;

/// A library that workers load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Nvrtc,
    CublasLt,
    Cudnn,
    Nccl,
}

impl Kind {
    /// NVRTC comes first, because cuDNN must be built for the same major version of CUDA.
    pub const ALL: [Self; 4] = [Self::Nvrtc, Self::CublasLt, Self::Cudnn, Self::Nccl];

    /// Returns the name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Cudnn => "cuDNN",
            Self::Nccl => "NCCL",
        }
    }

    /// Returns the variable that names the file to load.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Nvrtc => "XLAUNCH_NVRTC",
            Self::CublasLt => "XLAUNCH_CUBLASLT",
            Self::Cudnn => "XLAUNCH_CUDNN",
            Self::Nccl => "XLAUNCH_NCCL",
        }
    }

    /// Returns the file's name without a version, by which the loader may be asked for it.
    fn file(self) -> &'static str {
        match self {
            Self::Nvrtc => "libnvrtc.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Cudnn => "libcudnn.so",
            Self::Nccl => "libnccl.so",
        }
    }

    /// Returns the names of files whose interface is known.
    fn files(self) -> Vec<String> {
        let majors: &[u64] = match self {
            Self::Nvrtc | Self::CublasLt => &[13, 12],
            Self::Cudnn => &[9],
            Self::Nccl => &[2],
        };
        majors.iter().map(|major| format!("{}.{major}", self.file())).chain([self.file().into()]).collect()
    }

    /// Returns the start of the name of the Python package with the library.
    fn package(self) -> &'static str {
        match self {
            Self::Nvrtc => "nvidia_cuda_nvrtc",
            Self::CublasLt => "nvidia_cublas",
            Self::Cudnn => "nvidia_cudnn",
            Self::Nccl => "nvidia_nccl",
        }
    }
}

/// A file that was found or named by the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub path: PathBuf,
    /// `None` if neither the file's name nor a package says it.
    pub version: Option<Version>,
    /// Major version of CUDA that the library was built for or belongs to, if known.
    cuda: Option<u64>,
    /// True if the dynamic loader finds the file's directory by itself.
    in_loader_path: bool,
}

/// The file selected for a library, and those that were not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    pub kind: Kind,
    /// `None` if the library is not installed, or no file works with the driver.
    pub file: Option<File>,
    /// Files that were passed over, newest first, each with the reason.
    pub others: Vec<(File, String)>,
}

/// The libraries of this host, one entry per [`Kind`].
#[derive(Clone, Debug)]
pub struct Libraries {
    pub selected: Vec<Selected>,
    links: Option<PathBuf>,
    library_path: OsString,
}

impl Libraries {
    /// Searches this host. `variable` looks up the environment of the workers.
    pub fn find(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let driver = search::driver_cuda(Path::new("/"));
        let host = search::Host { root: Path::new("/"), variable };
        let selected = select::all(&host, driver);
        // The user can change what is in the cache.
        let links = if host.is_restricted() { None } else { links::create(&selected, variable) };
        Self { selected, links, library_path: variable("LD_LIBRARY_PATH").unwrap_or_default() }
    }

    /// Returns the variables with which a process loads the selected files.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let file = |selected: &Selected| Some((selected.kind, selected.file.clone()?));
        let files: Vec<(Kind, File)> = self.selected.iter().filter_map(file).collect();
        let mut variables: Vec<(&'static str, OsString)> =
            files.iter().map(|(kind, file)| (kind.variable(), file.path.clone().into_os_string())).collect();
        let mut dirs: Vec<PathBuf> = self.links.iter().cloned().collect();
        for (_, file) in files.iter().filter(|(_, file)| !file.in_loader_path) {
            dirs.extend(file.path.parent().map(Path::to_path_buf));
        }
        dirs.extend(std::env::split_paths(&self.library_path));
        let mut unique: Vec<PathBuf> = Vec::new();
        for dir in dirs.into_iter().filter(|dir| !dir.as_os_str().is_empty()) {
            if !unique.contains(&dir) {
                unique.push(dir);
            }
        }
        // A directory whose name contains a colon cannot be listed.
        variables.extend(std::env::join_paths(unique).ok().map(|path| ("LD_LIBRARY_PATH", path)));
        variables
    }

    /// Returns the selection for `environment.json` and `xlaunch env --json`.
    pub fn to_json(&self) -> Value {
        let version = |file: &File| file.version.as_ref().map(ToString::to_string);
        let other = |(file, reason): &(File, String)| {
            let version = version(file);
            json!({ "path": file.path, "version": version, "reason": reason })
        };
        let library = |selected: &Selected| {
            json!({
                "name": selected.kind.name(),
                "path": selected.file.as_ref().map(|file| &file.path),
                "version": selected.file.as_ref().and_then(version),
                "passed_over": selected.others.iter().map(other).collect::<Vec<_>>(),
            })
        };
        self.selected.iter().map(library).collect()
    }
}
