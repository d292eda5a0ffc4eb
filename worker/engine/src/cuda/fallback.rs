//! Which way an operation went, and why not a faster one: for whoever asks why a run is slow.
//!
//! One line on stderr for each operation and shape, the first time it comes by.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

/// What was said so far; `None` where nobody asked.
#[derive(Debug)]
pub(super) struct FallbackLog(Option<RefCell<HashSet<String>>>);

impl FallbackLog {
    pub(super) fn new(on: bool) -> Self {
        Self(on.then(RefCell::default))
    }

    /// An operation on a shape took this path; or not a faster one, named first, for a reason.
    pub(super) fn took(
        &self,
        operation: &'static str,
        shape: impl fmt::Debug,
        path: &str,
        instead_of: Option<(&str, &str)>,
    ) {
        let Some(said) = &self.0 else { return };
        let line = match instead_of {
            Some((faster, reason)) => format!("{operation} {shape:?}: {path}, not {faster}: {reason}"),
            None => format!("{operation} {shape:?}: {path}"),
        };
        if said.borrow_mut().insert(line.clone()) {
            print(&line);
        }
    }
}

#[expect(clippy::print_stderr, reason = "what this log is for")]
fn print(line: &str) {
    eprintln!("{line}");
}
