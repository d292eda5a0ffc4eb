//! Blocks on their way back, when the lock was held as their buffer was dropped: a stack that any thread pushes to
//! without waiting, and that the next holder of the lock takes as a whole.

use std::ptr;

use crate::sync::{AtomicPtr, Ordering};

/// A stack of values.
pub(crate) struct Returns<T> {
    head: AtomicPtr<Node<T>>,
}

struct Node<T> {
    value: T,
    next: *mut Node<T>,
}

impl<T> std::fmt::Debug for Returns<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Returns")
    }
}

// SAFETY: values are moved from the pushing thread to the taking one, and shared by none.
unsafe impl<T: Send> Send for Returns<T> {}
// SAFETY: as above; the head is atomic and nodes belong to whoever took them.
unsafe impl<T: Send> Sync for Returns<T> {}

impl<T> Returns<T> {
    pub(crate) fn new() -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Adds a value; never waits for another thread.
    pub(crate) fn push(&self, value: T) {
        let node = Box::into_raw(Box::new(Node { value, next: ptr::null_mut() }));
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node was made above and is not shared before the exchange below succeeds.
            unsafe { (*node).next = head };
            match self.head.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Whether nothing was there a moment ago.
    pub(crate) fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed).is_null()
    }

    /// Takes all values, the last pushed first.
    pub(crate) fn take(&self) -> impl Iterator<Item = T> {
        // Nodes are taken all at once, so none can be freed and pushed again between a look at the head and an exchange.
        let mut node = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        std::iter::from_fn(move || {
            (!node.is_null()).then(|| {
                // SAFETY: the exchange made this thread the owner of the whole chain, each made by `Box::into_raw`.
                let Node { value, next } = *unsafe { Box::from_raw(node) };
                node = next;
                value
            })
        })
    }
}

impl<T> Drop for Returns<T> {
    fn drop(&mut self) {
        self.take().for_each(drop);
    }
}
