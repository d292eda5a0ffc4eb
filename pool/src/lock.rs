//! The pool's lock: held for tens of nanoseconds, except while memory is mapped.
//!
//! Releasing the lock is a plain store, so an uncontended lock and unlock cost half as much as with `std::sync::Mutex`,
//! which would be half the cost of an allocation. A waiting thread spins briefly, then sleeps for short periods.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use crate::sync::{AtomicBool, Ordering, back_off};

/// Number of attempts before a waiting thread sleeps between attempts.
const SPIN_ATTEMPTS: u32 = 100;
/// Sleep between attempts of a thread that has spun long enough.
const CONTENDED_SLEEP: Duration = Duration::from_micros(50);

/// A value that only one thread uses at a time. A panic while the lock is held releases it.
#[derive(Default)]
pub(crate) struct SpinLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `held` goes from false to true by an atomic exchange, so at most one thread has a guard at a time: sharing
// the lock moves the value between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SpinLock")
    }
}

impl<T> SpinLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock and takes it.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        let mut attempts = 0;
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            attempts += 1;
            back_off(attempts > SPIN_ATTEMPTS, CONTENDED_SLEEP);
        }
    }

    /// Takes the lock unless another thread holds it.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let taken = self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Guard { lock: self })
    }

    /// Returns the value without locking: the exclusive borrow proves that no guard exists.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

/// Releases the lock when dropped.
pub(crate) struct Guard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, and its borrow excludes `deref_mut`.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and it is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}
