//! Runs the tests: `cargo xtask test` all but the large suites, `cargo xtask test --all` those too. They are built in
//! the profile `bench`, which shares what it compiles with the release build of the `xlaunch` under test.
//!
//! A large suite takes minutes, or does more than write to temporary directories. It has `test = false` in its
//! manifest, so that cargo runs it only by name. cargo runs one test program at a time, though most wait for processes
//! most of the time; here there is one per core. The output of a program is printed when the program ends.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde_json::Value;

use crate::Error;
use crate::workspace::{Workspace, cargo, forget_package, output, run_to_file};

/// The longest suites. They start first, so that none is left to run alone at the end; those that mostly wait run
/// beside those that mostly compute.
const FIRST: [&str; 9] =
    ["kernels", "external", "launch", "daemon", WORKSPACE, "hosts", "training", "nvrtc", "goldens"];

/// The tests that are not in a large suite.
const WORKSPACE: &str = "workspace";

/// Arguments of cargo that build and run tests. The program with fail points is built with the same crates.
const TEST: [&str; 6] = ["test", "--profile", "bench", "--workspace", "--features", "xlaunch/fail"];

/// Variables with the `xlaunch` that is tested, and with one that has fail points, as in the harness of the tests.
const BINARY_VARIABLE: &str = "XLAUNCH_TEST_BINARY";
const FAIL_BINARY_VARIABLE: &str = "XLAUNCH_TEST_FAIL_BINARY";

/// The package of the model checker's tests, which is not a part of the workspace.
const LOOM: &str = "pool/loom/Cargo.toml";
const LOOM_TARGET: &str = "target/loom";

/// Lines that are repeated of a suite that ends without a list of failures.
const LAST_LINES: usize = 40;

/// A command that runs tests.
struct Suite {
    name: String,
    command: Command,
}

/// Runs all tests but the large suites; with `--all`, those too, or only builds them. Returns whether they pass.
pub(crate) fn run(workspace: &Workspace, arguments: &[String]) -> Result<bool, Error> {
    match arguments {
        [] => {
            let passed = cargo(&workspace.root).args(TEST).status()?.success();
            println!("not run: {} (cargo xtask test --all)", workspace.large_suites.join(", "));
            Ok(passed)
        }
        [all] if all == "--all" => run_all(workspace),
        [all, no_run] if all == "--all" && no_run == "--no-run" => build(workspace).map(|_| true),
        _ => Err("usage: cargo xtask test [--all [--no-run]]".into()),
    }
}

/// Builds all tests and what they run. Returns the suites.
fn build(workspace: &Workspace) -> Result<Vec<Suite>, Error> {
    let mut others = cargo(&workspace.root);
    others.args(TEST).arg("--no-fail-fast");
    let mut loom = cargo(&workspace.root);
    loom.args(["test", "--release", "--locked", "--manifest-path", LOOM, "--target-dir", LOOM_TARGET]);
    let mut suites = Vec::new();
    for (name, command) in [(WORKSPACE, others), ("loom", loom)] {
        let mut build = cargo(&workspace.root);
        output(build.args(command.get_args()).arg("--no-run"))?;
        suites.push(Suite { name: name.into(), command });
    }
    suites.extend(build_large(workspace)?);
    // The one under test is built last, as both have the same path.
    let fail =
        std::env::var_os(FAIL_BINARY_VARIABLE).map_or_else(|| build_with_fail_points(workspace), Ok)?;
    let tested =
        std::env::var_os(BINARY_VARIABLE).map_or_else(|| build_binary(workspace, &["--release"]), Ok)?;
    for suite in &mut suites {
        suite.command.env(BINARY_VARIABLE, &tested).env(FAIL_BINARY_VARIABLE, &fail);
    }
    Ok(suites)
}

fn run_all(workspace: &Workspace) -> Result<bool, Error> {
    let mut suites = build(workspace)?;
    let rank = |suite: &Suite| FIRST.iter().position(|name| suite.name == *name);
    suites.sort_by_key(|suite| rank(suite).unwrap_or(FIRST.len()));
    let (begin, idle) = (Instant::now(), idle_seconds());
    let failed = run_concurrently(suites)?;
    // More suites at a time help only if much of this is left.
    let idle = idle_seconds() - idle;
    println!(
        "all suites: {:.0} s; the cores were idle for {idle:.0} s in total",
        begin.elapsed().as_secs_f64()
    );
    // Again, because the output of other suites may follow that of a failure.
    failed.iter().for_each(|(name, failures)| println!("failed: {name}\n{failures}"));
    Ok(failed.is_empty())
}

/// Builds the large suites.
fn build_large(workspace: &Workspace) -> Result<Vec<Suite>, Error> {
    let mut command = cargo(&workspace.root);
    command.args(TEST).args(["--no-run", "--message-format", "json-render-diagnostics"]);
    command.args(workspace.large_suites.iter().flat_map(|name| ["--test", name]));
    let text = output(&mut command)?;
    let messages = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let suites: Vec<Suite> = messages.filter_map(|message| suite(&message)).collect();
    match workspace.large_suites.iter().find(|name| suites.iter().all(|suite| suite.name != **name)) {
        Some(missing) => Err(format!("cargo has not built the suite `{missing}`").into()),
        None => Ok(suites),
    }
}

/// Builds `xlaunch` with fail points. Returns a copy.
fn build_with_fail_points(workspace: &Workspace) -> Result<OsString, Error> {
    let built = build_binary(workspace, &["--profile", "bench", "--features", "fail"])?;
    let copy = Path::new(&built).with_file_name("xlaunch-fail");
    std::fs::copy(&built, &copy)?;
    Ok(copy.into())
}

/// Builds an `xlaunch` for the suites. Otherwise a test would build it, and its deadlines would include that.
fn build_binary(workspace: &Workspace, arguments: &[&str]) -> Result<OsString, Error> {
    let mut command = cargo(&workspace.root);
    command.args(["build", "--package", "xlaunch", "--bin", "xlaunch"]).args(arguments);
    let text = output(command.args(["--message-format", "json-render-diagnostics"]))?;
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut binaries = messages.filter_map(|message| message["executable"].as_str().map(OsString::from));
    binaries.next().ok_or_else(|| "cargo has not built `xlaunch`".into())
}

/// Returns the test program that a message of cargo announces.
fn suite(message: &Value) -> Option<Suite> {
    let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
    let program = message["executable"].as_str().filter(|_| is_test)?;
    let mut command = Command::new(program);
    forget_package(&mut command);
    // As under `cargo test`.
    command.current_dir(Path::new(message["manifest_path"].as_str()?).parent()?);
    Some(Suite { name: message["target"]["name"].as_str()?.to_owned(), command })
}

/// Returns how long all cores of this machine have been idle, in total; 0 where the system does not say.
fn idle_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    // `cpu user nice system idle iowait ...`, in hundredths of a second.
    let idle = stat.split_whitespace().skip(4).take(2);
    idle.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Runs as many suites at a time as there are cores. Returns the names of those that fail, with what they say of it.
fn run_concurrently(suites: Vec<Suite>) -> Result<Vec<(String, String)>, Error> {
    let waiting = Mutex::new(VecDeque::from(suites));
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let run_some = || -> Result<Vec<(String, String)>, std::io::Error> {
        let mut failed = Vec::new();
        while let Some(mut suite) = next() {
            if let Some(failures) = run_one(&mut suite)? {
                failed.push((suite.name, failures));
            }
        }
        Ok(failed)
    };
    let mut failed = Vec::new();
    std::thread::scope(|scope| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(run_some)).collect();
        for thread in threads {
            failed.extend(thread.join().map_err(|_| "a thread of the runner panicked")??);
        }
        Ok::<_, Error>(())
    })?;
    Ok(failed)
}

/// Runs a suite and prints what it has written. Returns the part about failures if a test fails.
fn run_one(Suite { name, command }: &mut Suite) -> Result<Option<String>, std::io::Error> {
    println!("{name}: started");
    let begin = Instant::now();
    let (status, output) = run_to_file(command)?;
    std::io::stdout().write_all(&output)?;
    println!("{name}: {status}, {:.0} s", begin.elapsed().as_secs_f64());
    Ok((!status.success()).then(|| failures(&String::from_utf8_lossy(&output))))
}

/// Returns the list of failures that the harness of tests prints; the end of the output if there is none.
fn failures(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    let listed = lines.iter().position(|line| *line == "failures:");
    let first = listed.unwrap_or(lines.len().saturating_sub(LAST_LINES));
    lines[first..].join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn failing_suites_are_named_and_all_run() {
        let directory = tempfile::tempdir().unwrap();
        let suite = |name: &str, script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(directory.path());
            Suite { name: name.into(), command }
        };
        let a = "touch a; printf 'running\\nfailures:\\n\\n---- x ----\\nno file\\n'; exit 1";
        let c = "touch c; echo killed; kill -9 $$";
        let mut failed = run_concurrently(vec![suite("a", a), suite("b", "touch b"), suite("c", c)]).unwrap();
        failed.sort();
        let expected = [("a", "failures:\n\n---- x ----\nno file"), ("c", "killed")];
        assert_eq!(failed, expected.map(|(name, failures)| (name.to_owned(), failures.to_owned())));
        assert!(["a", "b", "c"].iter().all(|name| directory.path().join(name).exists()));
    }

    #[test]
    fn test_programs_are_found_in_messages_of_cargo() {
        let message = |test: bool, executable: Value| {
            let (target, profile) = (json!({ "name": "launch" }), json!({ "test": test }));
            suite(&json!({
                "reason": "compiler-artifact", "manifest_path": "/root/tests/Cargo.toml", "target": target,
                "profile": profile, "executable": executable,
            }))
        };
        let found = message(true, json!("/target/launch-1")).unwrap();
        assert_eq!((&*found.name, found.command.get_program()), ("launch", "/target/launch-1".as_ref()));
        assert_eq!(found.command.get_current_dir(), Some(Path::new("/root/tests")));
        assert!(message(false, json!("/target/launch")).is_none());
        assert!(message(true, Value::Null).is_none());
    }
}
