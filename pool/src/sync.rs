//! Atomics of the standard library, or of the model checker when built with `--cfg loom`.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Between two tries: a hint to the processor, or a sleep.
#[cfg(not(loom))]
pub(crate) fn pause(long: bool, sleep: std::time::Duration) {
    if long { std::thread::sleep(sleep) } else { std::hint::spin_loop() }
}

/// Between two tries: another thread's turn.
#[cfg(loom)]
pub(crate) fn pause(_: bool, _: std::time::Duration) {
    loom::thread::yield_now();
}
