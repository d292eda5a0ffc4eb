//! Finds the files of a library in the directories where users have them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::{File, Kind, version};

/// Directories of the dynamic loader besides those in its configuration.
const LOADER_DIRS: [&str; 4] = ["lib64", "usr/lib64", "lib", "usr/lib"];
/// CUDA's name of this platform. Servers with Arm processors follow the standard SBSA.
const CUDA_TARGET: &str = if cfg!(target_arch = "aarch64") { "sbsa-linux" } else { "x86_64-linux" };
/// First driver releases that support a major version of CUDA, newest first.
const DRIVERS: [(u64, u64); 3] = [(580, 13), (525, 12), (450, 11)];

/// A host's file system and the environment of the workers.
pub(super) struct Host<'a> {
    /// `/`, except in tests.
    pub(super) root: &'a Path,
    pub(super) variable: &'a dyn Fn(&str) -> Option<OsString>,
}

/// Returns the major version of CUDA that the driver supports, from the version of its kernel module.
pub(super) fn driver_cuda(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/driver/nvidia/version")).ok()?;
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    let release = line.split_whitespace().find_map(|word| word.split_once('.')?.0.parse::<u64>().ok())?;
    DRIVERS.iter().find(|(first, _)| release >= *first).map(|(_, cuda)| *cuda)
}

/// Returns the files of a library in these directories, each given with whether the loader finds it by itself. Several
/// links to one file count once.
pub(super) fn files(kind: Kind, dirs: &[(PathBuf, bool)]) -> Vec<File> {
    let mut found: Vec<(PathBuf, File)> = Vec::new();
    for (dir, in_loader_path) in dirs {
        for path in kind.files().into_iter().map(|name| dir.join(name)) {
            let Ok(real) = path.canonicalize() else { continue };
            if !real.is_file() || found.iter().any(|(known, _)| *known == real) {
                continue;
            }
            let (version, cuda) = version::of(kind, &path);
            found.push((real, File { path, version, cuda, in_loader_path: *in_loader_path }));
        }
    }
    found.into_iter().map(|(_, file)| file).collect()
}

impl Host<'_> {
    /// Returns the directories in the order of preference among equal versions, each with whether the loader finds it
    /// by itself.
    pub(super) fn dirs(&self) -> Vec<(PathBuf, bool)> {
        let listed = (self.variable)("LD_LIBRARY_PATH").unwrap_or_default();
        let listed: Vec<PathBuf> = std::env::split_paths(&listed).filter(|dir| dir.is_absolute()).collect();
        let others = [self.cuda_dirs(), self.wheel_dirs()].concat();
        let loader = self.loader_dirs().into_iter().map(|dir| (dir, true));
        listed
            .into_iter()
            .map(|dir| (dir, false))
            .chain(loader)
            .chain(others.into_iter().map(|dir| (dir, false)))
            .collect()
    }

    fn loader_dirs(&self) -> Vec<PathBuf> {
        let mut dirs = Vec::new();
        self.read_loader_config(&self.root.join("etc/ld.so.conf"), &mut dirs);
        let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
        for dir in ["lib", "usr/lib"] {
            dirs.push(self.root.join(dir).join(&triple));
        }
        dirs.extend(LOADER_DIRS.map(|dir| self.root.join(dir)));
        dirs
    }

    /// Reads directories and `include` lines, whose last component may be a pattern such as `*.conf`.
    fn read_loader_config(&self, file: &Path, dirs: &mut Vec<PathBuf>) {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
            if let Some(pattern) = line.strip_prefix("include ") {
                let pattern = self.absolute(Path::new(pattern.trim()));
                let end = pattern.extension().unwrap_or_default();
                for included in pattern.parent().map(entries).unwrap_or_default() {
                    if included.extension().unwrap_or_default() == end && included != *file {
                        let text = std::fs::read_to_string(&included).unwrap_or_default();
                        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('/'));
                        dirs.extend(lines.map(|line| self.absolute(Path::new(line))));
                    }
                }
            } else if line.starts_with('/') {
                dirs.push(self.absolute(Path::new(line)));
            }
        }
    }

    /// Returns the directories of CUDA toolkits.
    fn cuda_dirs(&self) -> Vec<PathBuf> {
        let named = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| (self.variable)(name));
        let mut toolkits: Vec<PathBuf> = named.filter(|path| !path.is_empty()).map(PathBuf::from).collect();
        let local = entries(&self.root.join("usr/local"));
        toolkits.extend(local.into_iter().filter(|dir| name(dir).starts_with("cuda")));
        toolkits.push(self.root.join("opt/cuda"));
        let target = format!("targets/{CUDA_TARGET}/lib");
        toolkits.iter().flat_map(|dir| [dir.join("lib64"), dir.join(&target)]).collect()
    }

    /// Returns the directories of libraries in Python environments: the active one, that of the `python3` in `PATH`,
    /// and the user's.
    fn wheel_dirs(&self) -> Vec<PathBuf> {
        let path = |name: &str| (self.variable)(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let mut prefixes: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect();
        let search = path("PATH").unwrap_or_default();
        let python = std::env::split_paths(&search).find(|dir| dir.join("python3").is_file());
        if let Some(bin) = python {
            // A link in a directory such as ~/bin leads to the interpreter of an installation.
            let real = bin.join("python3").canonicalize().ok();
            let real = real.as_deref().and_then(Path::parent).and_then(Path::parent).map(Path::to_path_buf);
            prefixes.extend(bin.parent().map(Path::to_path_buf).into_iter().chain(real));
        }
        if !self.is_restricted() {
            prefixes.extend(path("HOME").map(|home| home.join(".local")));
        }
        prefixes.push(self.root.join("usr/local"));
        let mut dirs = Vec::new();
        for prefix in prefixes {
            // Conda packages install libraries here.
            dirs.push(prefix.join("lib"));
            let pythons = [entries(&prefix.join("lib")), entries(&prefix.join("lib64"))].concat();
            for python in pythons.into_iter().filter(|dir| name(dir).starts_with("python3")) {
                for site in ["site-packages", "dist-packages"] {
                    let packages = entries(&python.join(site).join("nvidia"));
                    dirs.extend(packages.into_iter().map(|package| package.join("lib")));
                }
            }
        }
        dirs
    }

    /// Returns whether the environment is that of a job that must not choose its code: the daemon withholds `PATH`
    /// then, which any other environment has. Only directories that the system's administrator controls are trusted.
    pub(super) fn is_restricted(&self) -> bool {
        (self.variable)("PATH").is_none()
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

/// Returns the paths in a directory, sorted so that the result does not depend on the file system; none if it cannot be
/// read.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    paths
}

fn name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}
