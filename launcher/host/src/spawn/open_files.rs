//! The limit of open files. Each worker takes five descriptors in this process, so it raises its soft limit to the hard
//! limit. Child processes get the original limit, because programs that use `select` fail above 1,024.

use std::process::Command;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::sys;

/// The limit before it was raised; unset if it was not.
static ORIGINAL: OnceLock<Rlimit> = OnceLock::new();

/// Raises the soft limit of this process to the hard limit.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).is_ok()
    {
        // Keep the first value: an earlier job of this process may have raised the limit already.
        let _ = ORIGINAL.set(limit);
    }
}

/// Starts the process with the original limit.
pub(super) fn restore_limit(command: &mut Command) {
    if let Some(limit) = ORIGINAL.get() {
        sys::limit_open_files(command, *limit);
    }
}
