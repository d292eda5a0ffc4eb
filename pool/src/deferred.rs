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

/// Model checking of all interleavings of immediate and deferred frees: `cargo test -p xlaunch-pool
/// --no-default-features --features loom --lib loom_model`.
#[cfg(all(test, feature = "loom"))]
mod loom_model {
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::lock::SpinLock;

    /// The pool reduced to the relevant parts: a bit mask of free blocks, and the deferred frees.
    struct Pool {
        free: SpinLock<Cell<u32>>,
        deferred: DeferredFrees<u32>,
    }

    impl Pool {
        /// Same as `Inner::free_block`.
        fn free_block(&self, block: u32) {
            match self.free.try_lock() {
                Some(free) => Self::add(&free, block),
                None => self.deferred.push(block),
            }
        }

        /// Same as `Inner::lock` followed by allocating all free blocks.
        fn take_all(&self) -> u32 {
            let free = self.free.lock();
            self.deferred.take().for_each(|block| Self::add(&free, block));
            free.replace(0)
        }

        fn add(free: &Cell<u32>, block: u32) {
            assert_eq!(free.get() & block, 0, "a block was freed twice");
            free.set(free.get() | block);
        }
    }

    #[test]
    fn every_block_is_freed_exactly_once() {
        loom::model(|| {
            let pool = Arc::new(Pool { free: SpinLock::new(Cell::new(0)), deferred: DeferredFrees::new() });
            let threads: Vec<_> = [0b001, 0b010]
                .map(|block| {
                    let pool = pool.clone();
                    thread::spawn(move || pool.free_block(block))
                })
                .into();
            pool.free_block(0b100);
            let taken = pool.take_all();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let rest = pool.take_all();
            assert_eq!((taken & rest, taken | rest), (0, 0b111));
        });
    }
}
