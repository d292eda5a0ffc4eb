//! Versions of library files, from the file's name or from the Python package that contains it.

use std::fmt;
use std::path::{Path, PathBuf};

use super::Kind;

/// A version, such as 9.19.0, compared number by number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(Vec<u64>);

impl Version {
    /// Parses numbers separated by dots.
    pub(super) fn parse(text: &str) -> Option<Self> {
        text.split('.').map(|number| number.parse().ok()).collect::<Option<Vec<u64>>>().map(Self)
    }

    pub(super) fn major(&self) -> u64 {
        self.0.first().copied().unwrap_or(0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&numbers.join("."))
    }
}

/// Returns a file's version, and the major version of CUDA that it was built for, as far as they are known.
pub(super) fn of(kind: Kind, path: &Path) -> (Option<Version>, Option<u64>) {
    let (version, cuda) = package(kind, path).unzip();
    let version = real_name(kind, path).or(version);
    match kind {
        // These belong to a release of CUDA. The name of their file has at least the major version.
        Kind::Nvrtc | Kind::CublasLt => {
            let cuda = version.as_ref().map(Version::major).or_else(|| soname(kind, path));
            (version, cuda)
        }
        Kind::Cudnn | Kind::Nccl => (version, cuda.flatten()),
    }
}

/// Returns the version in the name of the file that `path` links to, such as `libcudnn.so.9.14.0`.
fn real_name(kind: Kind, path: &Path) -> Option<Version> {
    let real = path.canonicalize().ok()?;
    let version = Version::parse(suffix(kind, &real)?)?;
    // One number is the version of the interface.
    (version.0.len() > 1).then_some(version)
}

fn soname(kind: Kind, path: &Path) -> Option<u64> {
    Version::parse(suffix(kind, path)?).map(|version| version.major())
}

/// Returns the part of the file's name after `libNAME.so.`.
fn suffix(kind: Kind, path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.strip_prefix(kind.file())?.strip_prefix('.')
}

/// Returns the version of the Python package that contains a file, and the major version of CUDA in the package's name.
/// Packages describe themselves in a directory such as `nvidia_cudnn_cu13-9.19.0.56.dist-info`, next to `nvidia/`.
fn package(kind: Kind, path: &Path) -> Option<(Version, Option<u64>)> {
    let site: PathBuf = path.ancestors().find(|dir| dir.ends_with("nvidia"))?.parent()?.into();
    let entries = std::fs::read_dir(site).ok()?.flatten();
    let packages = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let rest = name.strip_prefix(kind.package())?.strip_suffix(".dist-info")?;
        let (suffix, version) = rest.split_once('-')?;
        let cuda = match suffix.strip_prefix("_cu") {
            Some(cuda) => Some(cuda.parse().ok()?),
            None if suffix.is_empty() => None,
            None => return None,
        };
        Some((Version::parse(version)?, cuda))
    });
    // Packages for two releases of CUDA may be installed side by side: NVRTC's and cuBLAS' are told apart by the name
    // of the file, the others replace each other's file.
    let fits = |version: &Version| match kind {
        Kind::Nvrtc | Kind::CublasLt => soname(kind, path).is_none_or(|major| major == version.major()),
        Kind::Cudnn | Kind::Nccl => true,
    };
    packages.filter(|(version, _)| fits(version)).max()
}
