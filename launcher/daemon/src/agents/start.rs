//! Processes that the daemon starts for itself, detached or as systemd units: examinations of GPUs, and hooks.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::PATH;

/// Arguments of the process.
pub(super) const DOCTOR: [&str; 3] = ["doctor", "--json", "--while-stdin-is-open"];
/// Prefixes of the daemon's variables that are passed to the process: the operator's settings for libraries and
/// workers.
const PASSED_ON_PREFIXES: [&str; 3] = ["LD_LIBRARY_PATH", "XLAUNCH_", "NCCL_"];

/// An examination to start.
#[derive(Clone, Debug)]
pub(crate) struct ExaminationStart {
    /// UUIDs of the GPUs.
    pub(crate) gpus: Vec<String>,
    /// Directory for the files of the process. It belongs to the daemon's user.
    pub(crate) dir: PathBuf,
    pub(crate) timeout: Duration,
}

impl ExaminationStart {
    pub(super) fn temporary(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    /// Creates an empty directory that other users can neither read nor write.
    pub(super) fn prepare(&self) -> io::Result<()> {
        let temporary = self.temporary();
        match fs_err::remove_dir_all(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let create = |dir: &Path| DirBuilder::new().recursive(true).mode(0o700).create(dir);
        create(&temporary)
    }

    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let is_passed_on = |name: &str| PASSED_ON_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        let passed_on = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok().filter(|name| is_passed_on(name))?, value.into_string().ok()?))
        });
        let (temporary, cache) = (self.temporary().display().to_string(), self.dir.join("cache"));
        let own = [
            ("PATH", PATH.to_owned()),
            ("CUDA_VISIBLE_DEVICES", self.gpus.join(",")),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
            ("HOME", temporary.clone()),
            ("TMPDIR", temporary.clone()),
            ("XDG_RUNTIME_DIR", temporary),
            ("XLAUNCH_CACHE", cache.display().to_string()),
        ];
        passed_on.chain(own.map(|(name, value)| (name.to_owned(), value))).collect()
    }
}

/// The process's ends of its pipes.
pub(super) struct Stdio {
    pub(super) input: OwnedFd,
    pub(super) output: OwnedFd,
    pub(super) errors: OwnedFd,
}

/// A hook to run.
#[derive(Clone, Debug)]
pub(crate) struct HookStart {
    pub(crate) job: u64,
    /// `None` runs it as the daemon's user.
    pub(crate) uid: Option<u32>,
    pub(crate) moment: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) environment: Vec<(&'static str, String)>,
    pub(crate) timeout: Duration,
}

/// Describes a hook that was killed at its timeout, as a predicate.
pub(crate) fn took_too_long(timeout: Duration) -> String {
    format!("took longer than {} s (hooks.timeout)", timeout.as_secs())
}
