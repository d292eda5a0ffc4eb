//! Model checking of all interleavings of immediate and deferred frees, and of leases that end while their buffer is
//! dropped. The modules are those of the pool, compiled here with the atomics of the model checker loom, which also
//! explores the orders that x86-64 never shows.

#![expect(dead_code, reason = "the model uses a part of each module")]
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "../src/deferred.rs"]
mod deferred;
#[path = "../src/leases.rs"]
mod leases;
#[path = "../src/lock.rs"]
mod lock;

use deferred::DeferredFrees;
use leases::Leases;
use lock::SpinLock;
use loom::cell::Cell;
use loom::sync::Arc;
use loom::thread;

/// Replaces the module of this name in the pool.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

    /// Lets the model run another thread.
    pub(crate) fn back_off(_: bool, _: std::time::Duration) {
        loom::thread::yield_now();
    }
}

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

/// A leased buffer. The model reports accesses to its memory that are not ordered.
struct Leased {
    leases: Leases,
    memory: Cell<u32>,
}

impl Leased {
    /// Frees the memory: the next user overwrites it.
    fn free(&self) {
        self.memory.set(self.memory.get() + 1);
    }
}

#[test]
fn memory_is_freed_once_after_its_last_use_under_a_lease() {
    loom::model(|| {
        let buffer = Arc::new(Leased { leases: Leases::default(), memory: Cell::new(0) });
        assert!(buffer.leases.add(1, 0..4));
        let lease = buffer.clone();
        let user = thread::spawn(move || {
            let _ = lease.memory.get();
            if lease.leases.end(1, &(0..4)) {
                lease.free();
            }
        });
        // Same as the drop of a buffer.
        if !buffer.leases.inherit(1) {
            buffer.free();
        }
        user.join().unwrap();
        assert_eq!(buffer.memory.get(), 1);
    });
}
