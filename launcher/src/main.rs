//! The `xlaunch` binary.
fn main() {}
