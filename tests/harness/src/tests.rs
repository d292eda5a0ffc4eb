use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::Conclusion;

use super::*;

mod sample {
    use super::*;

    crate::tests! {
        passes, panics;
        needs met: with_met_requirement;
        needs gpu, met, root: with_unmet_requirements;
        modules inner;
    }

    mod inner {
        crate::tests! { in_inner_module; }

        fn in_inner_module() {}
    }

    fn passes() {
        assert_eq!(std::thread::current().name(), Some("sample::passes"));
    }

    fn panics() {
        panic!("two is not three");
    }

    fn with_met_requirement() {}

    fn with_unmet_requirements() {
        unreachable!("its requirements are not met");
    }

    fn met() -> Requirement {
        Ok(())
    }

    fn gpu() -> Requirement {
        Err("no GPU".into())
    }

    fn root() -> Requirement {
        Err("not root".into())
    }
}

const UNMET: &str = "not run: xlaunch_harness::tests::sample::with_unmet_requirements: no GPU; not root";

fn arguments(words: &[&str]) -> Arguments {
    Arguments::from_iter(["suite", "--test-threads=1"].iter().chain(words))
}

/// Plans the sample, with names as in a suite named `xlaunch_harness::tests`.
fn plan(words: &[&str]) -> Plan {
    Plan::new("xlaunch_harness::tests", sample::tests(), &arguments(words))
}

fn conclude(words: &[&str]) -> Conclusion {
    libtest_mimic::run(&arguments(&[words, &["--logfile", "/dev/null"]].concat()), plan(words).trials)
}

#[test]
fn tests_are_named_by_module_and_those_with_unmet_requirements_are_ignored() {
    let trials = plan(&[]).trials;
    let found: Vec<(&str, bool)> =
        trials.iter().map(|trial| (trial.name(), trial.has_ignored_flag())).collect();
    let expected = [
        ("sample::passes", false),
        ("sample::panics", false),
        ("sample::with_met_requirement", false),
        ("sample::with_unmet_requirements", true),
        ("sample::inner::in_inner_module", false),
    ];
    assert_eq!(found, expected);
}

#[test]
fn tests_of_the_suites_root_have_no_prefix() {
    let group = Group { module: "suite", requirements: Vec::new(), tests: vec![("a", || ())] };
    assert_eq!(Plan::new("suite", vec![group], &arguments(&[])).trials[0].name(), "a");
}

#[test]
fn every_unmet_requirement_is_reported_for_selected_tests_only() {
    assert_eq!(plan(&[]).not_run, [UNMET]);
    assert_eq!(plan(&["with_unmet"]).not_run, [UNMET]);
    assert_eq!(plan(&["--ignored"]).not_run, [UNMET]);
    assert_eq!(plan(&["--exact", "sample::passes"]).not_run, [""; 0]);
    assert_eq!(plan(&["--skip", "with_unmet"]).not_run, [""; 0]);
}

#[test]
fn requirements_are_probed_once_and_only_for_selected_tests() {
    static PROBES: AtomicUsize = AtomicUsize::new(0);
    fn probe() -> Requirement {
        PROBES.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    let groups = || {
        let tests: Vec<(&str, fn())> = vec![("a", || ()), ("b", || ())];
        vec![Group { module: "suite", requirements: vec![probe], tests }]
    };
    Plan::new("suite", groups(), &arguments(&["--exact", "c"]));
    assert_eq!(PROBES.load(Ordering::Relaxed), 0);
    Plan::new("suite", groups(), &arguments(&[]));
    assert_eq!(PROBES.load(Ordering::Relaxed), 1);
}

#[test]
fn panic_fails_only_its_own_test() {
    let conclusion = conclude(&[]);
    assert_eq!((conclusion.num_passed, conclusion.num_failed, conclusion.num_ignored), (3, 1, 1));
}

#[test]
fn include_ignored_fails_tests_with_unmet_requirements() {
    let conclusion = conclude(&["--include-ignored"]);
    assert_eq!((conclusion.num_passed, conclusion.num_failed, conclusion.num_ignored), (3, 2, 0));
    let conclusion = conclude(&["--ignored"]);
    assert_eq!((conclusion.num_passed, conclusion.num_failed, conclusion.num_filtered_out), (0, 1, 4));
}
