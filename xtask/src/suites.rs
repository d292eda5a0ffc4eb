//! Runs the tests: `cargo xtask test` those of `cargo test --workspace`, `cargo xtask test --all` the large suites too.
//!
//! A large suite takes minutes, or does more than write to temporary directories. It has `test = false` in its
//! manifest, so that cargo runs it only by name. cargo runs one test program at a time, though most wait for processes
//! most of the time; here there is one per core. The output of a program is printed when the program ends.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde_json::Value;

use crate::Error;
use crate::workspace::{Workspace, cargo, forget_package, output};

/// The longest of the large suites, by measured time. They start first, so that none is left to run alone at the end.
const LONGEST_FIRST: [&str; 7] = ["kernels", "daemon", "launch", "training", "external", "hosts", "nvrtc"];

/// A command that runs tests.
struct Suite {
    name: String,
    command: Command,
}

/// Runs the tests of `cargo test --workspace`; with `--all`, all tests. Returns whether they pass.
pub(crate) fn run(workspace: &Workspace, arguments: &[String]) -> Result<bool, Error> {
    match arguments {
        [] => {
            let passed = cargo(&workspace.root).args(["test", "--workspace"]).status()?.success();
            println!("not run: {} (cargo xtask test --all)", workspace.large_suites.join(", "));
            Ok(passed)
        }
        [all] if all == "--all" => run_all(workspace),
        _ => Err("usage: cargo xtask test [--all]".into()),
    }
}

fn run_all(workspace: &Workspace) -> Result<bool, Error> {
    output(cargo(&workspace.root).args(["test", "--workspace", "--no-run"]))?;
    let mut suites = build_large(workspace)?;
    let rank = |suite: &Suite| LONGEST_FIRST.iter().position(|name| suite.name == *name);
    suites.sort_by_key(|suite| rank(suite).unwrap_or(LONGEST_FIRST.len()));
    let mut others = cargo(&workspace.root);
    others.args(["test", "--workspace", "--no-fail-fast"]);
    suites.push(Suite { name: "cargo test --workspace".into(), command: others });
    let failed = run_concurrently(suites)?;
    failed.iter().for_each(|name| println!("failed: {name}"));
    Ok(failed.is_empty())
}

/// Builds the large suites.
fn build_large(workspace: &Workspace) -> Result<Vec<Suite>, Error> {
    let mut command = cargo(&workspace.root);
    command.args(["test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]);
    command.args(workspace.large_suites.iter().flat_map(|name| ["--test", name]));
    let text = output(&mut command)?;
    let messages = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let suites: Vec<Suite> = messages.filter_map(|message| suite(&message)).collect();
    match workspace.large_suites.iter().find(|name| suites.iter().all(|suite| suite.name != **name)) {
        Some(missing) => Err(format!("cargo has not built the suite `{missing}`").into()),
        None => Ok(suites),
    }
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

/// Runs as many suites at a time as there are cores. Returns the names of those that fail.
fn run_concurrently(suites: Vec<Suite>) -> Result<Vec<String>, Error> {
    let waiting = Mutex::new(VecDeque::from(suites));
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let run_some = || -> Result<Vec<String>, std::io::Error> {
        let mut failed = Vec::new();
        while let Some(mut suite) = next() {
            if !run_one(&mut suite)? {
                failed.push(suite.name);
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

/// Runs a suite and prints what it has written. Returns whether its tests pass.
fn run_one(Suite { name, command }: &mut Suite) -> Result<bool, std::io::Error> {
    println!("{name}: started");
    let begin = Instant::now();
    // A file, unlike a pipe, is not kept open by a process that a test has left behind.
    let written = tempfile::NamedTempFile::new()?;
    let file = written.as_file();
    let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?).status()?;
    let mut stdout = std::io::stdout().lock();
    std::io::copy(&mut File::open(written.path())?, &mut stdout)?;
    drop(stdout);
    println!("{name}: {status}, {:.0} s", begin.elapsed().as_secs_f64());
    Ok(status.success())
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
        let suites =
            vec![suite("a", "touch a; exit 1"), suite("b", "touch b"), suite("c", "touch c; kill -9 $$")];
        let mut failed = run_concurrently(suites).unwrap();
        failed.sort();
        assert_eq!(failed, ["a", "c"]);
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
