//! Advice for system call errors which mean that a limit was reached or that the kernel refuses the call.

use std::io;

use rustix::io::Errno;

use crate::task_limit::{self, Reached};

/// Explanation of a refused thread or process, where it is not known which limit was reached.
pub const TASK_LIMIT: &str = "a limit on processes, threads or memory is reached";
/// Advice for [`TASK_LIMIT`].
pub const TASK_LIMIT_HELP: &str =
    "raise it: ulimit -u, ulimit -v, the container's pids limit, or TasksMax of the unit";
/// Advice for the limit on open files of a process.
pub const FILE_LIMIT_HELP: &str =
    "xlaunch needs about five files per worker; raise the hard limit: ulimit -Hn, or LimitNOFILE of the unit";
/// Advice for refused system calls. waitid on a pidfd needs Linux 5.4, pidfd_open needs 5.3. Some container runtimes
/// refuse calls that they do not know.
pub const SYSTEM_CALL_HELP: &str =
    "xlaunch needs Linux 5.4 or later, and in a container a seccomp profile that allows this call";

/// Describes an error that occurred while something was started or opened, with advice if the reason is a limit or a
/// refused call.
pub fn describe(error: &io::Error) -> String {
    if let Some(Reached { what, help }) = reached_limit(error) {
        return format!("{error}: {what}; {help}");
    }
    let explained = match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => (TASK_LIMIT, TASK_LIMIT_HELP),
        Some(Errno::MFILE) => ("too many open files", FILE_LIMIT_HELP),
        Some(Errno::NFILE) => ("too many open files on this host", "raise fs.file-max: sysctl fs.file-max"),
        Some(Errno::NOMEM) => ("out of memory", "free memory, or raise the memory limit of the container"),
        Some(Errno::PERM | Errno::NOSYS) => ("perhaps a system call was refused", SYSTEM_CALL_HELP),
        _ => return error.to_string(),
    };
    let (what, help) = explained;
    format!("{error}: {what}; {help}")
}

/// Returns the limit that has caused this error of starting a thread or process, if it is known.
pub fn reached_limit(error: &io::Error) -> Option<Reached> {
    let may_be_limit = matches!(Errno::from_io_error(error), Some(Errno::AGAIN | Errno::NOMEM));
    may_be_limit.then(task_limit::reached).flatten()
}

/// Prefixes an error with the operation that failed.
pub fn context(what: impl std::fmt::Display, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {}", describe(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_errors_name_the_limit_to_raise() {
        let text = |errno: Errno| describe(&errno.into());
        for (errno, limit) in [
            (Errno::AGAIN, "ulimit -u"),
            (Errno::MFILE, "ulimit -Hn"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::NOSYS, "Linux 5.4"),
        ] {
            assert!(text(errno).contains(limit), "{}", text(errno));
        }
        assert_eq!(text(Errno::NOENT), io::Error::from(Errno::NOENT).to_string());
    }
}
