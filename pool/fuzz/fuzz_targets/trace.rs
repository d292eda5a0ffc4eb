//! Runs byte-coded sequences of requests, frees, waits, limits and driver failures, and checks them with the oracle of
//! the property tests.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

use common::oracle::{CheckedCore, Op};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((setup, bytes)) = bytes.split_first() else { return };
    let mut checked = CheckedCore::new(setup & 1 == 0, usize::from(setup >> 1));
    for op in bytes.as_chunks().0 {
        checked.step(Op::decode(*op));
    }
    if let Err(violation) = checked.core.check() {
        panic!("{violation}");
    }
    checked.finish();
});
