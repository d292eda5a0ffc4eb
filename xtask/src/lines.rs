//! Counts the lines of the product, by crate: Rust without tests, kernels, messages and scripts that are compiled in.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::workspace::{Package, Workspace};
use crate::{Error, syntax};

/// Extensions of other sources that are part of the product.
const OTHER_SOURCES: [&str; 6] = ["cu", "cuh", "proto", "py", "js", "html"];

/// Prints a row per crate: files, lines, and lines that are neither blank nor comments.
pub(crate) fn print(workspace: &Workspace) -> Result<(), Error> {
    println!("{:<18} {:>6} {:>7} {:>7}", "crate", "files", "lines", "code");
    let mut total = (0, 0, 0);
    for package in workspace.packages.iter().filter(|package| is_product(package)) {
        let mut row = (0, 0, 0);
        for file in sources(workspace, package)? {
            let text = workspace.read(&file)?;
            let kept = without_tests(&text);
            let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
            row = (row.0 + 1, row.1 + kept.len(), row.2 + kept.iter().filter(is_code).count());
        }
        println!("{:<18} {:>6} {:>7} {:>7}", package.name, row.0, row.1, row.2);
        total = (total.0 + row.0, total.1 + row.1, total.2 + row.2);
    }
    println!("{:<18} {:>6} {:>7} {:>7}", "all", total.0, total.1, total.2);
    Ok(())
}

fn is_product(package: &Package) -> bool {
    !package.dir.starts_with("tests") && package.name != "xtask"
}

/// Returns the files of a crate that are compiled into the product.
fn sources(workspace: &Workspace, package: &Package) -> Result<BTreeSet<PathBuf>, Error> {
    let read = |path: &Path| workspace.read(path).ok();
    let mut files = BTreeSet::new();
    for entry in &package.entries {
        files.extend(syntax::modules(entry, &read)?.into_iter().map(|module| module.file));
    }
    files.extend(workspace.files()?.iter().filter(|file| is_other_source(workspace, package, file)).cloned());
    Ok(files)
}

fn is_other_source(workspace: &Workspace, package: &Package, file: &Path) -> bool {
    let extension = file.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let is_test = file.components().any(|part| part.as_os_str() == "tests");
    OTHER_SOURCES.contains(&extension) && !is_test && workspace.crate_of(file) == package.name
}

/// Returns the lines before the module of unit tests, which is the last item of a file.
fn without_tests(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod "));
    let end = tests.filter(|start| lines[start + 1].ends_with('{')).unwrap_or(lines.len());
    lines[..end].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_tests_do_not_count_and_declarations_of_test_files_do() {
        assert_eq!(without_tests("fn f() {}\n\n#[cfg(test)]\nmod tests {\n}\n"), ["fn f() {}", ""]);
        assert_eq!(without_tests("#[cfg(test)]\nmod tests;\nfn f() {}").len(), 3);
    }
}
