//! The package and the units under a real systemd: Debian is booted in namespaces of its own.
//!
//! Needs root, systemd-nspawn, debootstrap and cargo-deb. `XLAUNCH_TEST_SYSTEMD_ROOT` names a directory that keeps the tree of
//! Debian between runs; without it, every run fetches one.

#![expect(clippy::print_stderr, reason = "a skipped test says why, and shows what happened inside")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Asks the daemon what generic clients of gRPC ask.
const CLIENT: &str = env!("CARGO_BIN_EXE_reflect");

/// How `boot.sh` ends where no system can be booted.
const SKIPPED: i32 = 77;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Whether there is such a program; says so where there is none.
fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    if !found {
        eprintln!("skipped: no {program}");
    }
    found
}

#[test]
fn the_unit_is_confined() {
    if !has("systemd-analyze") {
        return;
    }
    let mut analyze = Command::new("systemd-analyze");
    // In tenths: exposure of 3.0 and below.
    analyze.args(["security", "--offline=true", "--threshold=30", "--no-pager"]);
    let output = analyze.arg(repository().join("deploy/systemd/xlaunch.service")).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{table}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(table.contains("Overall exposure level for xlaunch.service"), "{table}");
}

#[test]
fn a_system_boots_with_the_daemon_and_keeps_it_running() {
    if !["systemd-nspawn", "debootstrap", "cargo-deb"].into_iter().all(has) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: not root");
        return;
    }
    // The package is made of the binary that all tests use.
    xlaunch_tests::xlaunch();
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let output = Command::new(repository().join("deploy/package.sh")).arg(profile).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let package = String::from_utf8(output.stdout).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let boot = repository().join("tests/systemd/boot.sh");
    let output = Command::new(boot).args([package.trim_end(), CLIENT]).arg(dir.path()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(SKIPPED) {
        eprintln!("skipped: {errors}");
        return;
    }
    let log = String::from_utf8_lossy(&output.stdout);
    eprintln!("{log}");
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(log.lines().last().is_some_and(|line| line.ends_with("removed and purged")), "it ended early");
}
