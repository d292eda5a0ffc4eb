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

/// Every interleaving of the ways that memory comes back, by the model checker:
/// `RUSTFLAGS="--cfg loom" cargo test -p xlaunch-pool --no-default-features --release --lib model`.
#[cfg(all(test, loom))]
mod model {
    use loom::cell::Cell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::lock::Lock;

    /// A pool in small: blocks that are free, as bits, and those on their way.
    struct Pool {
        free: Lock<Cell<u32>>,
        returns: Returns<u32>,
    }

    impl Pool {
        /// As `Inner::put_back`.
        fn put_back(&self, block: u32) {
            match self.free.try_lock() {
                Some(free) => Self::add(&free, block),
                None => self.returns.push(block),
            }
        }

        /// As `Inner::lock` and the allocator: all that is free, taken.
        fn take_all(&self) -> u32 {
            let free = self.free.lock();
            self.returns.take().for_each(|block| Self::add(&free, block));
            free.replace(0)
        }

        fn add(free: &Cell<u32>, block: u32) {
            assert_eq!(free.get() & block, 0, "a block came back twice");
            free.set(free.get() | block);
        }
    }

    #[test]
    fn every_block_comes_back_once() {
        loom::model(|| {
            let pool = Arc::new(Pool { free: Lock::new(Cell::new(0)), returns: Returns::new() });
            let threads: Vec<_> = [0b001, 0b010]
                .map(|block| {
                    let pool = pool.clone();
                    thread::spawn(move || pool.put_back(block))
                })
                .into();
            pool.put_back(0b100);
            let taken = pool.take_all();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let rest = pool.take_all();
            assert_eq!((taken & rest, taken | rest), (0, 0b111));
        });
    }
}
