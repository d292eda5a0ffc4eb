//! Atomics of the standard library, or of the loom model checker when built with the feature `loom`.

#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Backs off between two attempts to take a lock: a spin hint to the processor, or a sleep once `long`.
#[cfg(not(feature = "loom"))]
pub(crate) fn back_off(long: bool, sleep: std::time::Duration) {
    if long { std::thread::sleep(sleep) } else { std::hint::spin_loop() }
}

/// Backs off between two attempts to take a lock: lets the model run another thread.
#[cfg(feature = "loom")]
pub(crate) fn back_off(_: bool, _: std::time::Duration) {
    loom::thread::yield_now();
}
