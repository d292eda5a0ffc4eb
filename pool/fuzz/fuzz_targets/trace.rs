//! Any sequence of requests, returns, orders, limits and driver failures, against the oracle of the property tests.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

use common::{Driven, Op};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((how, bytes)) = bytes.split_first() else { return };
    let mut driven = Driven::new(how & 1 == 0, usize::from(how >> 1));
    for op in bytes.as_chunks().0 {
        driven.step(Op::decode(*op));
    }
    if let Err(wrong) = driven.core.check() {
        panic!("{wrong}");
    }
    driven.finish();
});
