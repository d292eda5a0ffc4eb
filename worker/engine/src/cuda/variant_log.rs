//! A log of the variant selected for each operation and shape, and why not a faster one.
//!
//! One line on stderr for each operation and shape, when it is first seen.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

/// Lines printed so far; `None` if the log is off.
#[derive(Debug)]
pub(crate) struct VariantLog(Option<RefCell<HashSet<String>>>);

impl VariantLog {
    pub(crate) fn new(on: bool) -> Self {
        Self(on.then(RefCell::default))
    }

    /// An operation on a shape uses this variant; `instead_of` names a faster one and why it was not selected.
    pub(crate) fn selected(
        &self,
        operation: &'static str,
        shape: impl fmt::Debug,
        variant: &str,
        instead_of: Option<(&str, &str)>,
    ) {
        let Some(printed) = &self.0 else { return };
        let line = match instead_of {
            Some((faster, reason)) => format!("{operation} {shape:?}: {variant}, not {faster}: {reason}"),
            None => format!("{operation} {shape:?}: {variant}"),
        };
        if printed.borrow_mut().insert(line.clone()) {
            print(&line);
        }
    }
}

#[expect(clippy::print_stderr, reason = "the purpose of this log")]
fn print(line: &str) {
    eprintln!("{line}");
}
