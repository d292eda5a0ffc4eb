//! The pool's lock: held for some ten nanoseconds, but for the rare growth.
//!
//! Giving it up is a plain store, which makes an uncontended pair half as expensive as a mutex of the standard library;
//! that is half of what an allocation costs. Who finds it held spins a little, then sleeps in short turns.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use crate::sync::{AtomicBool, Ordering, pause};

const SPINS: u32 = 100;
const SLEEP: Duration = Duration::from_micros(50);

/// One value, used by one thread at a time. A panic while it is held releases it.
#[derive(Default)]
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: a guard exists for one thread at a time, as `held` goes from false to true by an atomic exchange; so sharing the
// lock hands the value from thread to thread, which `T: Send` allows.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock")
    }
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// The value, when no other thread has it.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        let mut tries = 0;
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            tries += 1;
            pause(tries > SPINS, SLEEP);
        }
    }

    /// The value, unless another thread has it now.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let taken = self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok().then(|| Guard { lock: self })
    }

    /// The value, as nobody else can have it.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

/// Gives the lock up when dropped.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, and its borrow keeps `deref_mut` away.
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
