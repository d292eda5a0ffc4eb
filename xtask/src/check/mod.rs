//! The repository's rules: each check is a pure function from sources to violations.

mod constants;
mod documents;
mod modules;
mod width;
mod words;

use std::collections::BTreeMap;
use std::path::Path;

use crate::syntax::{self, Module};
use crate::violation::Violation;
use crate::workspace::Workspace;
use crate::{Error, proto};

type Check = fn(&Workspace) -> Result<Vec<Violation>, Error>;

/// Names and descriptions of the checks, in the order in which they run.
const CHECKS: [(&str, &str, Check); 7] = [
    (
        "modules",
        "neither the top-level modules nor the files of a crate import each other in a circle",
        |w| crates(w, modules::check),
    ),
    ("constants", "a constant's name is defined once per crate", |w| crates(w, constants::check)),
    ("width", "lines have at most 120 columns", |w| files(w, width::check)),
    ("words", "comments and documents use the field's words", |w| files(w, words::check)),
    ("paths", "documents for developers name files that exist", paths_check),
    ("readme", "README.md has at most 1000 words", readme_check),
    ("proto", "generated gRPC code is current", proto::check),
];

/// Runs the named checks, or all of them, and prints the violations. Returns whether there are none.
pub(crate) fn run(workspace: &Workspace, names: &[String]) -> Result<bool, Error> {
    if let Some(unknown) = names.iter().find(|name| CHECKS.iter().all(|(known, ..)| known != name)) {
        let known: Vec<_> = CHECKS.iter().map(|(name, ..)| *name).collect();
        return Err(format!("no check `{unknown}`: the checks are {}", known.join(", ")).into());
    }
    let mut total = 0;
    for (name, meaning, check) in CHECKS {
        if !names.is_empty() && !names.iter().any(|selected| selected == name) {
            continue;
        }
        let violations = check(workspace)?;
        total += violations.len();
        println!("{name}: {meaning}: {}", if violations.is_empty() { "ok" } else { "VIOLATED" });
        print(workspace, violations);
    }
    println!("{total} violations");
    Ok(total == 0)
}

fn print(workspace: &Workspace, violations: Vec<Violation>) {
    let mut by_crate: BTreeMap<&str, Vec<&Violation>> = BTreeMap::new();
    for violation in &violations {
        by_crate.entry(workspace.crate_of(&violation.file)).or_default().push(violation);
    }
    for (name, violations) in by_crate {
        println!("  {name}: {}", violations.len());
        for Violation { file, line, message } in violations {
            println!("    {}:{line}: {message}", file.display());
        }
    }
}

/// Applies a check to the modules of each library, binary and build script. Everything under `tests/` is test code.
fn crates(workspace: &Workspace, check: fn(&[Module]) -> Vec<Violation>) -> Result<Vec<Violation>, Error> {
    let read = |path: &Path| workspace.read(path).ok();
    let mut violations = Vec::new();
    for package in workspace.packages.iter().filter(|package| !package.dir.starts_with("tests")) {
        for entry in &package.entries {
            violations.extend(check(&syntax::modules(entry, &read)?));
        }
    }
    Ok(violations)
}

/// Applies a check to the text of each file written by hand.
fn files(workspace: &Workspace, check: fn(&Path, &str) -> Vec<Violation>) -> Result<Vec<Violation>, Error> {
    const EXTENSIONS: [&str; 15] = [
        "rs", "cu", "cuh", "proto", "toml", "md", "py", "sh", "yml", "js", "mjs", "css", "service", "socket",
        "c",
    ];
    let mut violations = Vec::new();
    for file in workspace.files()? {
        let extension = file.extension().map_or("sh", |extension| extension.to_str().unwrap_or_default());
        if EXTENSIONS.contains(&extension) && !file.starts_with("proto/src/generated") {
            violations.extend(check(file, &workspace.read(file)?));
        }
    }
    Ok(violations)
}

fn paths_check(workspace: &Workspace) -> Result<Vec<Violation>, Error> {
    let mut violations = Vec::new();
    for document in documents::FOR_DEVELOPERS.map(Path::new) {
        let exists = |path: &str| workspace.root.join(path).exists();
        violations.extend(documents::paths(document, &workspace.read(document)?, exists));
    }
    Ok(violations)
}

fn readme_check(workspace: &Workspace) -> Result<Vec<Violation>, Error> {
    let readme = Path::new("README.md");
    Ok(documents::length(readme, &workspace.read(readme)?))
}
