//! A lock-free stack of frees that were deferred because the lock was held when the buffer was dropped. Any thread
//! pushes without waiting; the next thread to hold the lock takes the whole stack.

use std::ptr;

use crate::sync::{AtomicPtr, Ordering};

/// A stack of values whose owners are gone.
pub(crate) struct DeferredFrees<T> {
    head: AtomicPtr<Node<T>>,
}

struct Node<T> {
    value: T,
    next: *mut Node<T>,
}

impl<T> std::fmt::Debug for DeferredFrees<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DeferredFrees")
    }
}

// SAFETY: values move from the pushing thread to the taking thread and are not shared.
unsafe impl<T: Send> Send for DeferredFrees<T> {}
// SAFETY: as above; the head is atomic, and nodes belong to the thread that took them.
unsafe impl<T: Send> Sync for DeferredFrees<T> {}

impl<T> DeferredFrees<T> {
    pub(crate) fn new() -> Self {
        Self { head: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Adds a value; never waits for another thread.
    pub(crate) fn push(&self, value: T) {
        let node = Box::into_raw(Box::new(Node { value, next: ptr::null_mut() }));
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node was allocated above and is not shared until the exchange below succeeds.
            unsafe { (*node).next = head };
            match self.head.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Returns whether the stack was empty a moment ago.
    pub(crate) fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed).is_null()
    }

    /// Takes all values, starting with the one pushed last.
    pub(crate) fn take(&self) -> impl Iterator<Item = T> {
        // The whole stack is taken by one exchange, so the ABA problem of popping single nodes cannot occur.
        let mut node = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        std::iter::from_fn(move || {
            (!node.is_null()).then(|| {
                // SAFETY: the exchange made this thread the owner of the chain; `Box::into_raw` made each node.
                let Node { value, next } = *unsafe { Box::from_raw(node) };
                node = next;
                value
            })
        })
    }
}

impl<T> Drop for DeferredFrees<T> {
    fn drop(&mut self) {
        self.take().for_each(drop);
    }
}
