//! Atomics, and the wait between two attempts to take a lock. The tests in `pool/loom` compile the users of this
//! module with the atomics of a model checker instead.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Backs off between two attempts to take a lock: a spin hint to the processor, or a sleep once `long`.
pub(crate) fn back_off(long: bool, sleep: std::time::Duration) {
    if long { std::thread::sleep(sleep) } else { std::hint::spin_loop() }
}
