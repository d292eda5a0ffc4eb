//! The limit of open files. A worker takes five of this process, so its own soft limit is raised to the hard one.
//! Processes that it starts get the limit that it was started with: programs that use `select` fail above 1,024.

use std::process::Command;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::sys;

/// The limit that this process was started with, if it was raised.
static ORIGINAL: OnceLock<Rlimit> = OnceLock::new();

/// Raises the limit of this process.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok()
    {
        // An earlier job of this process may have raised it.
        let _ = ORIGINAL.set(limit);
    }
}

/// Starts the process with the original limit.
pub(super) fn restore_limit(command: &mut Command) {
    if let Some(limit) = ORIGINAL.get() {
        sys::limit_open_files(command, *limit);
    }
}
