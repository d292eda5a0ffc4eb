//! Compresses the debug information of the binary, which is three quarters of it: backtraces can read it as it is. And
//! tells the binary the commit that it is built from, for `environment.json`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Some(commit) = commit() {
        println!("cargo::rustc-env=XLAUNCH_COMMIT={commit}");
    }
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-link-arg-bins=-Wl,--compress-debug-sections=zlib");
    }
}

/// The commit of the checkout; `None` outside of one, or without git.
fn commit() -> Option<String> {
    // Not that of another repository around these sources.
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != workspace.canonicalize().ok()? {
        return None;
    }
    // Every commit and checkout appends to this file.
    let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
