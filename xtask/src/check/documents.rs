//! Documents: the README is short, as details belong under `docs/`, and paths in documents for developers name files
//! that exist.

use std::path::Path;

use crate::violation::Violation;

const MAX_WORDS: usize = 1000;
/// Documents for developers.
pub(super) const FOR_DEVELOPERS: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];
/// Directories below which a word between backticks is a path.
const FOLDERS: [&str; 9] =
    ["deploy", "docs", "examples", "launcher", "pool", "proto", "tests", "worker", "xtask"];

/// Checks the length of the README.
pub(super) fn length(file: &Path, text: &str) -> Vec<Violation> {
    let mut in_code = false;
    let prose = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !in_code && !fence
    });
    let is_word = |word: &&str| word.contains(char::is_alphanumeric);
    let words = prose.flat_map(str::split_whitespace).filter(is_word).count();
    if words > MAX_WORDS { vec![Violation::new(file, 0, format!("{words} words"))] } else { Vec::new() }
}

/// Checks that paths name files that exist.
pub(super) fn paths(file: &Path, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Violation> {
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
    fn words_outside_of_code_are_counted() {
        let path = Path::new("README.md");
        let code = format!("```sh\n{}\n```\n", "word ".repeat(500));
        assert!(length(path, &format!("{code}{}", "word - | ".repeat(1000))).is_empty());
        assert_eq!(length(path, &format!("{code}{}", "word ".repeat(1001)))[0].message, "1001 words");
    }

    #[test]
    fn path_of_a_file_that_does_not_exist_is_reported_with_its_line() {
        let text = "`a/b` and `worker/src/lib.rs`\n`pool/gone.rs`, `docs/*.md`, `worker` and pool/gone.rs";
        let found = paths(Path::new("A.md"), text, |path| path == "worker/src/lib.rs");
        assert_eq!(found, [Violation::new(Path::new("A.md"), 2, "pool/gone.rs does not exist")]);
    }
}
