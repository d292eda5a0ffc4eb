//! Paths in documents for developers: they name files that exist.

use std::path::Path;

use crate::violation::Violation;

/// Documents that are checked.
pub(super) const DOCUMENTS: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];
/// Directories below which a word between backticks is a path.
const FOLDERS: [&str; 9] =
    ["deploy", "docs", "examples", "launcher", "pool", "proto", "tests", "worker", "xtask"];

pub(super) fn check(file: &Path, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Violation> {
    let lines = (1..).zip(text.lines());
    let words =
        lines.flat_map(|(number, line)| line.split('`').skip(1).step_by(2).map(move |word| (number, word)));
    let missing = words.filter(|(_, word)| is_path(word) && !exists(word));
    missing.map(|(number, word)| Violation::new(file, number, format!("{word} does not exist"))).collect()
}

fn is_path(word: &str) -> bool {
    let in_folder = word.split_once('/').is_some_and(|(folder, _)| FOLDERS.contains(&folder));
    in_folder && word.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_a_file_that_does_not_exist_is_reported_with_its_line() {
        let text = "`a/b` and `worker/src/lib.rs`\n`pool/gone.rs`, `docs/*.md`, `worker` and pool/gone.rs";
        let found = check(Path::new("A.md"), text, |path| path == "worker/src/lib.rs");
        assert_eq!(found, [Violation::new(Path::new("A.md"), 2, "pool/gone.rs does not exist")]);
    }
}
