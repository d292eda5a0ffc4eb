//! Fail points: places at which tests make a worker crash, hang, slow down, or compute with a flipped bit.
//!
//! `XLAUNCH_FAIL` holds the rules (`rules`, pure). [`arm`] reads them when the worker starts, and [`at`], [`io()`],
//! [`skips`] and [`flipped_bit`] apply them (`armed`). [`check`] lets the launcher refuse an invalid variable before
//! anything starts.
//!
//! Invariants: without the cargo feature `fail` every place is an empty function, and a variable that is set is refused
//! instead of ignored; a rule has no effect other than its action.

#[cfg(feature = "fail")]
mod armed;
#[cfg(any(feature = "fail", test))]
#[cfg_attr(not(feature = "fail"), allow(dead_code, reason = "the unit tests cover it in every build"))]
mod rules;
#[cfg(not(feature = "fail"))]
mod unarmed;

use xlaunch_proto::env;

#[cfg(feature = "fail")]
pub(crate) use armed::{arm, at, flipped_bit, io, set_step, skips};
#[cfg(not(feature = "fail"))]
pub(crate) use unarmed::{arm, at, flipped_bit, io, set_step, skips};

/// A place in the code of a worker. `rules::PLACES` has the names and descriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Start,
    Join,
    Session,
    Resume,
    Data,
    Forward,
    Reduce,
    Backward,
    AllReduce,
    Optimizer,
    ReadBack,
    Parameters,
    Evaluation,
    Snapshot,
    SaveWrite,
    SaveSync,
    SaveCommit,
    SaveDelete,
}

/// Checks this process's `XLAUNCH_FAIL`. An error begins with the name of the variable.
pub(crate) fn check() -> Result<(), String> {
    match variable() {
        None => Ok(()),
        #[cfg(feature = "fail")]
        Some(value) => armed::parse(&value).map(drop),
        #[cfg(not(feature = "fail"))]
        Some(_) => Err(unarmed::refused()),
    }
}

fn variable() -> Option<String> {
    std::env::var_os(env::FAIL).map(|value| value.to_string_lossy().into_owned())
}
