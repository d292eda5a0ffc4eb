//! Limits of a command description that comes from another process.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::{CommandSpec, CommandSpecError, MAX_NPROC, MAX_TIMEOUT, Nproc, Program};

pub(super) const MAX_ARGUMENTS: usize = 4096;
/// Maximum total size of the arguments, with their terminating zeros.
pub(super) const MAX_ARGUMENT_BYTES: usize = 512 << 10;
pub(super) const MAX_FIELD_BYTES: usize = 4096;
/// Maximum number of entries of each list and map other than the arguments.
pub(super) const MAX_ENTRIES: usize = 4096;

impl CommandSpec {
    /// Checks a description that comes from another process: lengths are bounded, and no text contains a zero byte.
    pub fn check(&self) -> Result<(), CommandSpecError> {
        if let Nproc::Count(count) = self.nproc
            && !(1..=MAX_NPROC).contains(&count)
        {
            return Err(invalid("nproc", format!("is {count}, expected 1 to {MAX_NPROC}")));
        }
        let target = self.program.target();
        at_most("arguments", "entries", self.arguments.len(), MAX_ARGUMENTS)?;
        let words = || self.arguments.iter().map(OsString::as_os_str).chain([target]);
        at_most("arguments", "bytes", words().map(|word| word.len() + 1).sum(), MAX_ARGUMENT_BYTES)?;
        if words().any(|word| word.as_bytes().contains(&0)) {
            return Err(invalid("arguments", "have a zero byte".into()));
        }
        if target.is_empty() {
            return Err(invalid("program", "is empty".into()));
        }
        let logs = &self.logs;
        let text = |path: &Option<PathBuf>| path.clone().unwrap_or_default();
        check_text("role", self.role.as_ref())?;
        check_text("run_id", self.run_id.as_deref().unwrap_or_default().as_ref())?;
        check_text("master_addr", self.master_addr.as_ref())?;
        check_text("logs.prefix", logs.prefix.as_deref().unwrap_or_default().as_ref())?;
        check_text("logs.dir", text(&logs.dir).as_os_str())?;
        check_text("interpreter", text(&self.interpreter).as_os_str())?;
        for (field, filters) in
            [("logs.stdout_filters", &logs.stdout_filters), ("logs.stderr_filters", &logs.stderr_filters)]
        {
            at_most(field, "entries", filters.len(), MAX_ENTRIES)?;
            filters.iter().try_for_each(|filter| check_text(field, filter.as_ref()))?;
        }
        self.preload.iter().try_for_each(|module| check_text("preload", module.as_ref()))?;
        if !self.preload.is_empty() && matches!(self.program, Program::Binary(_)) {
            return Err(invalid("preload", "needs a Python script or module as the program".into()));
        }
        for (field, entries) in [
            ("preload", self.preload.len()),
            ("signals", self.signals.len()),
            ("no_restart_codes", self.no_restart_codes.len()),
            ("requeue_codes", self.requeue_codes.len()),
            ("logs.redirects", logs.redirects.ranks.len()),
            ("logs.tee", logs.tee.ranks.len()),
            ("logs.shown", logs.shown.as_ref().map_or(0, BTreeSet::len)),
        ] {
            at_most(field, "entries", entries, MAX_ENTRIES)?;
        }
        for (field, timeout) in [
            ("shutdown_timeout", self.shutdown_timeout),
            ("stall_timeout", self.stall_timeout),
            ("hang_timeout", self.hang_timeout.unwrap_or_default()),
        ] {
            if timeout > MAX_TIMEOUT {
                return Err(invalid(field, format!("is longer than {} s", MAX_TIMEOUT.as_secs())));
            }
        }
        Ok(())
    }
}

pub(super) fn check_text(field: &'static str, text: &OsStr) -> Result<(), CommandSpecError> {
    at_most(field, "bytes", text.len(), MAX_FIELD_BYTES)?;
    if text.as_bytes().contains(&0) { Err(invalid(field, "has a zero byte".into())) } else { Ok(()) }
}

pub(super) fn at_most(
    field: &'static str,
    unit: &str,
    got: usize,
    limit: usize,
) -> Result<(), CommandSpecError> {
    if got > limit {
        Err(invalid(field, format!("has {got} {unit}, at most {limit} are allowed")))
    } else {
        Ok(())
    }
}

pub(super) fn invalid(field: &'static str, problem: String) -> CommandSpecError {
    CommandSpecError::Invalid { field, problem }
}
