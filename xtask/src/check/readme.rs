//! Length of the README: details belong under `docs/`.

use std::path::Path;

use crate::violation::Violation;

const MAX_WORDS: usize = 1000;

pub(super) fn check(file: &Path, text: &str) -> Vec<Violation> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_outside_of_code_are_counted() {
        let path = Path::new("README.md");
        let code = format!("```sh\n{}\n```\n", "word ".repeat(500));
        assert!(check(path, &format!("{code}{}", "word - | ".repeat(1000))).is_empty());
        assert_eq!(check(path, &format!("{code}{}", "word ".repeat(1001)))[0].message, "1001 words");
    }
}
