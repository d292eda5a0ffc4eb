//! Log of the variant selected for each operation and shape, and of the reason why a faster one was not selected.
//!
//! Prints one line to stderr for each operation and shape when it is first seen, and warnings about missing libraries.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

/// Lines printed so far. The log, the warnings, or both may be off.
#[derive(Debug)]
pub(crate) struct VariantLog {
    log: bool,
    warnings: bool,
    printed: RefCell<HashSet<String>>,
}

impl VariantLog {
    pub(crate) fn new(log: bool, warnings: bool) -> Self {
        Self { log, warnings, printed: RefCell::default() }
    }

    /// Logs that an operation on a shape uses this variant. `instead_of` names a faster one and the reason why it was
    /// not selected.
    pub(crate) fn selected(
        &self,
        operation: &'static str,
        shape: impl fmt::Debug,
        variant: &str,
        instead_of: Option<(&str, &str)>,
    ) {
        if !self.log {
            return;
        }
        self.print(match instead_of {
            Some((faster, reason)) => format!("{operation} {shape:?}: {variant}, not {faster}: {reason}"),
            None => format!("{operation} {shape:?}: {variant}"),
        });
    }

    /// Warns that something is missing on this host; `what` is the consequence.
    pub(crate) fn missing(&self, what: &str, reason: &str) {
        if self.warnings {
            self.print(format!("warning: {what}: {reason}"));
        }
    }

    #[expect(clippy::print_stderr, reason = "the purpose of this log")]
    fn print(&self, line: String) {
        if !self.printed.borrow().contains(&line) {
            eprintln!("{line}");
            self.printed.borrow_mut().insert(line);
        }
    }
}
