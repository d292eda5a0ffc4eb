//! What buffers are for, said by the program around its requests.

use std::cell::Cell;

thread_local!(static TAG: Cell<&'static str> = const { Cell::new("") });

/// Ends its tag when dropped; the one before applies again.
#[derive(Debug)]
#[must_use = "the tag ends when this is dropped"]
pub struct Tag {
    before: &'static str,
    /// Ends on the thread it began on.
    thread: std::marker::PhantomData<*const ()>,
}

/// Requests of this thread are noted as being for `name`, such as `attention.backward`, until the guard is dropped.
pub fn tag(name: &'static str) -> Tag {
    Tag { before: TAG.replace(name), thread: std::marker::PhantomData }
}

impl Drop for Tag {
    fn drop(&mut self) {
        TAG.set(self.before);
    }
}

/// The present tag; empty outside any.
pub(crate) fn current() -> &'static str {
    TAG.get()
}
