//! Tags: the program's description of a request's purpose.

use std::cell::Cell;

thread_local!(static TAG: Cell<&'static str> = const { Cell::new("") });

/// Ends the tag when dropped and restores the previous one.
#[derive(Debug)]
#[must_use = "the tag ends when this is dropped"]
pub struct Tag {
    previous: &'static str,
    /// Makes the type `!Send`: the tag must end on the thread on which it began.
    not_send: std::marker::PhantomData<*const ()>,
}

/// Tags the requests of this thread with `name`, such as `attention.backward`, until the guard is dropped. Reports and
/// snapshots show the tag with the line of code that made the request.
pub fn tag(name: &'static str) -> Tag {
    Tag { previous: TAG.replace(name), not_send: std::marker::PhantomData }
}

impl Drop for Tag {
    fn drop(&mut self) {
        TAG.set(self.previous);
    }
}

/// Returns the current tag of this thread; empty if there is none.
pub(crate) fn current() -> &'static str {
    TAG.get()
}
