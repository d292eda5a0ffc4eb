//! A test harness for suites that need something a machine may not have: a GPU, root, PyTorch.
//!
//! The built-in harness decides at compile time which tests are ignored, so a test that returns early because something
//! is missing counts as passed. Here tests are grouped by requirement, a function that reports what is missing. A test
//! with an unmet requirement is reported as ignored, and the reason is printed on stderr as `not run: SUITE::TEST:
//! REASON`. With `--include-ignored` such a test fails: for machines that must have everything.
//!
//! ```text
//! // Cargo.toml: [[test]] name = "training", harness = false
//! mod resume; // has its own list: xlaunch_harness::tests! { .. }
//!
//! xlaunch_harness::suite! {
//!     trains_on_one_rank, trains_on_two_ranks;
//!     needs gpu: trains_on_gpu;
//!     needs gpu, root: resets_gpu;
//!     modules resume;
//! }
//!
//! fn gpu() -> xlaunch_harness::Requirement { .. }
//! fn trains_on_one_rank() { .. }
//! ```
//!
//! Suites whose tests mostly wait for processes run faster with `threads_per_core 2;` at the head of the list.
//!
//! Test functions are private, so a function that is missing from the list is dead code, which the compiler reports.
//! The same applies to the list of a module that is missing from `modules`.
//!
//! After the last test, those that took long are listed with their times, as other tests ran beside them.
//!
//! The command line is that of the built-in harness, except that there is at most one filter. `cargo nextest` reports
//! the same tests as skipped, without reasons. Requirements are probed only if a selected test has them: nextest starts
//! one process per test.
#![forbid(unsafe_code)]

pub mod emulator;

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

/// Tests that take at least this long are listed with their times.
const SLOW_TEST: Duration = Duration::from_secs(10);

/// Times and names of slow tests.
static SLOW_TESTS: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Variable that makes suites run everything, also what takes minutes.
const LONG_VARIABLE: &str = "XLAUNCH_TEST_LONG";

/// Returns whether suites run everything, also what takes minutes.
#[must_use]
pub fn is_long() -> bool {
    std::env::var_os(LONG_VARIABLE).is_some()
}

/// A probe of the machine. The error says what is missing and how to get it.
pub type Requirement = Result<(), String>;

/// Requirement of tests that run only if suites run everything.
///
/// # Errors
/// How to run everything, if they do not.
pub fn long() -> Requirement {
    is_long().then_some(()).ok_or_else(|| format!("takes minutes: set {LONG_VARIABLE}=1"))
}

/// Tests of one module with the same requirements.
#[derive(Debug)]
pub struct Group {
    /// Path of the module, as given by `module_path!()`; starts with the name of the suite.
    pub module: &'static str,
    /// Requirements, all of which must be met.
    pub requirements: Vec<fn() -> Requirement>,
    /// Names and functions of the tests. A test fails by panicking.
    pub tests: Vec<(&'static str, fn())>,
}

/// Runs the groups according to the arguments of this process; unless these say otherwise, with this many threads per
/// core.
#[expect(clippy::print_stderr, reason = "reasons are part of the report")]
pub fn run(suite: &str, threads_per_core: usize, groups: Vec<Group>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    arguments.test_threads.get_or_insert(threads_per_core * cores);
    let plan = Plan::new(suite, groups, &arguments);
    if !arguments.list {
        plan.not_run.iter().for_each(|line| eprintln!("{line}"));
    }
    let code = libtest_mimic::run(&arguments, plan.trials).exit_code();
    let mut slow = SLOW_TESTS.lock().unwrap_or_else(PoisonError::into_inner);
    slow.sort_unstable_by(|a, b| b.cmp(a));
    slow.iter().for_each(|(time, name)| eprintln!("{:4.0} s {suite}::{name}", time.as_secs_f64()));
    code
}

struct Plan {
    trials: Vec<Trial>,
    /// One line for each selected test with an unmet requirement.
    not_run: Vec<String>,
}

impl Plan {
    fn new(suite: &str, groups: Vec<Group>, arguments: &Arguments) -> Self {
        let mut plan = Self { trials: Vec::new(), not_run: Vec::new() };
        for group in groups {
            let inner = group.module.strip_prefix(suite).unwrap_or(group.module).trim_start_matches("::");
            let names = group.tests.iter().map(|(name, _)| match inner {
                "" => (*name).to_owned(),
                _ => format!("{inner}::{name}"),
            });
            let names: Vec<String> = names.collect();
            // `--ignored` would filter out tests that are not ignored, but at this point that is not known yet.
            let selected = |name: &String| {
                let probe = Trial::test(name.clone(), || Ok(())).with_ignored_flag(arguments.ignored);
                !arguments.is_filtered_out(&probe)
            };
            let missing = if names.iter().any(selected) { missing(&group.requirements) } else { None };
            if let Some(reason) = &missing {
                let lines = names.iter().filter(|name| selected(name));
                plan.not_run.extend(lines.map(|name| format!("not run: {suite}::{name}: {reason}")));
            }
            for (name, (_, test)) in names.into_iter().zip(group.tests) {
                plan.trials.push(trial(name, test, missing.clone()));
            }
        }
        plan
    }
}

/// Returns all reasons of unmet requirements.
fn missing(requirements: &[fn() -> Requirement]) -> Option<String> {
    let reasons: Vec<String> = requirements.iter().filter_map(|probe| probe().err()).collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

fn trial(name: String, test: fn(), missing: Option<String>) -> Trial {
    let ignored = missing.is_some();
    let thread_name = name.clone();
    let run = move || {
        if let Some(reason) = missing {
            return Err(Failed::from(format!("requirement not met: {reason}")));
        }
        // As in the built-in harness: panic messages name the thread, and no test inherits another test's thread.
        let begin = Instant::now();
        let thread = std::thread::Builder::new().name(thread_name.clone()).spawn(test)?;
        let result = thread.join();
        if begin.elapsed() >= SLOW_TEST {
            SLOW_TESTS.lock().unwrap_or_else(PoisonError::into_inner).push((begin.elapsed(), thread_name));
        }
        result.unwrap_or_else(|panic| resume_unwind(panic));
        Ok(())
    };
    Trial::test(name, run).with_ignored_flag(ignored)
}

/// Defines `main` for a suite: its tests by requirement, and the modules with lists of their own.
#[macro_export]
macro_rules! suite {
    ($($list:tt)*) => {
        fn main() -> ::std::process::ExitCode {
            let mut groups = ::std::vec::Vec::new();
            $crate::groups!(groups; $($list)*);
            $crate::run(env!("CARGO_CRATE_NAME"), $crate::threads_per_core!($($list)*), groups)
        }
    };
}

/// Lists the tests of a module, by requirement.
#[macro_export]
macro_rules! tests {
    ($($list:tt)*) => {
        pub(crate) fn tests() -> ::std::vec::Vec<$crate::Group> {
            let mut groups = ::std::vec::Vec::new();
            $crate::groups!(groups; $($list)*);
            groups
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! threads_per_core {
    (threads_per_core $threads:literal; $($rest:tt)*) => {
        $threads
    };
    ($($rest:tt)*) => {
        1
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! groups {
    ($groups:ident; threads_per_core $threads:literal; $($rest:tt)*) => {
        $crate::groups!($groups; $($rest)*);
    };
    ($groups:ident;) => {};
    ($groups:ident; modules $($module:ident),+ $(,)?; $($rest:tt)*) => {
        $($groups.extend($module::tests());)+
        $crate::groups!($groups; $($rest)*);
    };
    ($groups:ident; needs $($requirement:path),+: $($test:path),+ $(,)?; $($rest:tt)*) => {
        $crate::groups!(@push $groups, [$($requirement),+], $($test),+);
        $crate::groups!($groups; $($rest)*);
    };
    ($groups:ident; $($test:path),+ $(,)?; $($rest:tt)*) => {
        $crate::groups!(@push $groups, [], $($test),+);
        $crate::groups!($groups; $($rest)*);
    };
    (@push $groups:ident, [$($requirement:path),*], $($test:path),+) => {
        $groups.extend([$crate::Group {
            module: module_path!(),
            requirements: ::std::vec![$($requirement as fn() -> $crate::Requirement),*],
            tests: ::std::vec![$((stringify!($test), $test as fn())),+],
        }]);
    };
}

#[cfg(test)]
mod tests;
