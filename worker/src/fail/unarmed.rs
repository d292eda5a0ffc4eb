//! Builds without fail points: every place is an empty function.

use std::io;

use xlaunch_proto::env;

use super::Place;

pub(crate) fn arm(_rank: u32, _attempt: u32) -> Result<(), String> {
    super::check()
}

pub(super) fn refused() -> String {
    format!(
        "{} is set, but this build has no fail points; unset it, or build xlaunch with `--features fail`",
        env::FAIL
    )
}

#[inline(always)]
pub(crate) fn set_step(_: u64) {}

#[inline(always)]
pub(crate) fn at(_: Place) {}

#[inline(always)]
pub(crate) fn io(_: Place) -> io::Result<()> {
    Ok(())
}

#[inline(always)]
pub(crate) fn skips(_: Place) -> bool {
    false
}

#[inline(always)]
pub(crate) fn flipped_bit(_: Place) -> Option<u64> {
    None
}
