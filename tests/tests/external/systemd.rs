//! The Debian package and its units under a real systemd: `systemd/boot.sh` boots Debian in namespaces.
//!
//! `XLAUNCH_TEST_SYSTEMD_ROOT` names a directory that keeps the Debian tree between runs; without it, each run
//! downloads one.

#![expect(clippy::print_stderr, reason = "prints the log of the booted system")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use xlaunch_tests::{forget_package, requirements, xlaunch_path};

xlaunch_harness::tests! {
    needs requirements::systemd_analyze:
    unit_is_confined;
    needs requirements::logrotate:
    logrotate_accepts_the_packaged_file;
    needs requirements::systemd_nspawn:
    package_runs_under_systemd;
}

/// Queries the daemon like generic gRPC clients do.
const GRPC_CLIENT: &str = env!("CARGO_BIN_EXE_grpc_client");

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn unit_is_confined() {
    let mut analyze = Command::new("systemd-analyze");
    // The threshold is in tenths: exposure of at most 3.0.
    analyze.args(["security", "--offline=true", "--threshold=30", "--no-pager"]);
    let output = analyze.arg(repository().join("deploy/systemd/xlaunch.service")).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{table}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(table.contains("Overall exposure level for xlaunch.service"), "{table}");
}

fn logrotate_accepts_the_packaged_file() {
    // With the permissions that it has in the packages: logrotate refuses files that others can write.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("xlaunch");
    std::fs::copy(repository().join("deploy/logrotate/xlaunch"), &file).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let output = Command::new("logrotate").arg("--debug").arg(&file).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !log.contains("error: "), "{log}");
    assert!(log.contains("rotating pattern: /var/lib/xlaunch/accounting.jsonl "), "{log}");
}

fn package_runs_under_systemd() {
    // The package contains the binary that is used by all tests.
    xlaunch_path();
    let mut build = Command::new(repository().join("deploy/package.sh"));
    forget_package(&mut build);
    let output = build.arg("--fast").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let package = String::from_utf8(output.stdout).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let boot = repository().join("tests/systemd/boot.sh");
    let output = Command::new(boot).args([package.trim_end(), GRPC_CLIENT]).arg(dir.path()).output().unwrap();
    let log = String::from_utf8_lossy(&output.stdout);
    eprintln!("{log}");
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(
        log.lines().last().is_some_and(|line| line.ends_with("removed and purged")),
        "the test ended early"
    );
}
