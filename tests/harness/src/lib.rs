//! A `main` for test suites that need something a machine may not have: a GPU, root, PyTorch.
//!
//! The built-in harness knows only passed and failed at run time, so a test that returns early looks passed. Here each
//! group of tests names its requirement, a function that says what is missing. Tests of an unmet requirement are
//! reported as ignored, and the reason is printed as `not run: SUITE::TEST: REASON` for the gate's closing list.
//!
//! ```ignore
//! xlaunch_harness::suite! {
//!     trains_on_one_rank, trains_on_two_ranks;
//!     needs gpu: trains_on_a_gpu;
//! }
//!
//! fn gpu() -> Result<(), String> { .. }
//! fn trains_on_one_rank() { .. }
//! ```
//! The target in `Cargo.toml` says `harness = false`. A function that is missing from the list is unused, which the
//! compiler reports.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// What is missing, where a requirement is not met.
pub type Requirement = Result<(), String>;

/// Tests that share a requirement.
#[derive(Debug)]
pub struct Group {
    /// Asked once, before the first test runs.
    pub requirement: fn() -> Requirement,
    /// Names and functions of the tests; a test fails by panicking.
    pub tests: Vec<(&'static str, fn())>,
}

/// Runs the groups as the command line asks, which is that of the built-in harness.
#[expect(clippy::print_stderr, reason = "why tests are not run is for the reader of the output")]
pub fn run(suite: &str, groups: Vec<Group>) -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for Group { requirement, tests } in groups {
        let missing = requirement().err();
        for (name, test) in tests {
            if let Some(reason) = &missing {
                eprintln!("not run: {suite}::{name}: {reason}");
            }
            let run = move || {
                test();
                Ok(())
            };
            trials.push(Trial::test(name, run).with_ignored_flag(missing.is_some()));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The requirement of tests that run everywhere.
pub fn nothing() -> Requirement {
    Ok(())
}

/// Defines `main` for a list of tests, some of which need something.
#[macro_export]
macro_rules! suite {
    ($($groups:tt)*) => {
        fn main() -> ::std::process::ExitCode {
            let mut groups = ::std::vec::Vec::new();
            $crate::groups!(groups; $($groups)*);
            $crate::run(env!("CARGO_CRATE_NAME"), groups)
        }
    };
}

/// Part of [`suite`].
#[doc(hidden)]
#[macro_export]
macro_rules! groups {
    ($list:ident;) => {};
    ($list:ident; needs $requirement:path: $($test:path),+ $(,)?; $($rest:tt)*) => {
        $list.push($crate::Group {
            requirement: $requirement,
            tests: ::std::vec![$((stringify!($test), $test as fn())),+],
        });
        $crate::groups!($list; $($rest)*);
    };
    ($list:ident; $($test:path),+ $(,)?; $($rest:tt)*) => {
        $crate::groups!($list; needs $crate::nothing: $($test),+; $($rest)*);
    };
}
