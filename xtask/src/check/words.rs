//! Wording of comments and documents: words that obscure the field's own terms.

use std::path::Path;

use crate::violation::Violation;

/// Words to avoid, each with a replacement. Words quoted in backticks are names, and allowed.
const AVOIDED: [(&str, &str); 18] = [
    ("anybody", "`any user` or `any process`"),
    ("breath", "`retry delay`"),
    ("deeds", "`effects`"),
    ("farewell", "`drain timeout`"),
    ("nobody", "`no user` or `no process`"),
    ("patience", "`timeout`"),
    ("somebody", "`a user` or `a process`"),
    ("square sum", "`squared norm`"),
    ("stranger", "`foreign process`"),
    ("strangers", "`foreign processes`"),
    ("the books", "`the counters`"),
    ("what is left of", "`the rest of`"),
    ("whoever", "`any process that` or `the user who`"),
    ("whomever", "`the user who`"),
    ("whose name is", "`named`"),
    ("without a word", "`without reporting`"),
    ("nothing is left of", "`is removed`"),
    ("so many of", "`the number of`"),
];

/// Comment syntax of a language.
enum Language {
    /// `//` and `/* */`.
    C,
    /// `#`.
    Shell,
    /// All text except code blocks.
    Markdown,
}

pub(super) fn check(file: &Path, text: &str) -> Vec<Violation> {
    // This table quotes every avoided word.
    if file.ends_with("check/words.rs") {
        return Vec::new();
    }
    let language = match file.extension().and_then(|extension| extension.to_str()) {
        Some("rs" | "cu" | "cuh" | "proto" | "js" | "mjs" | "css" | "c") => Language::C,
        Some("md") => Language::Markdown,
        _ => Language::Shell,
    };
    let mut violations = Vec::new();
    for (number, line) in (1..).zip(prose(&language, text)) {
        let line = without_code(&line).to_lowercase();
        for (word, better) in AVOIDED.iter().filter(|(word, _)| contains_word(&line, word)) {
            violations.push(Violation::new(file, number, format!("`{word}`: use {better}")));
        }
    }
    violations
}

/// Returns the prose of each line.
fn prose(language: &Language, text: &str) -> Vec<String> {
    match language {
        Language::C => c_comments(text),
        Language::Shell => text.lines().map(shell_comment).collect(),
        Language::Markdown => {
            let mut in_code = false;
            let lines = text.lines().map(|line| {
                in_code ^= line.trim_start().starts_with("```");
                if in_code { String::new() } else { line.to_owned() }
            });
            lines.collect()
        }
    }
}

fn shell_comment(line: &str) -> String {
    let starts = |at: &usize| *at == 0 || line[..*at].ends_with(char::is_whitespace);
    let comment = line.match_indices('#').map(|(at, _)| at).find(starts);
    comment.map_or(String::new(), |at| line[at..].to_owned())
}

/// Returns the comments, line by line. Skips strings, because they may contain `//`.
fn c_comments(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (skipped, is_comment) = match first {
            '/' if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), true),
            '/' if rest.starts_with("/*") => (rest.find("*/").map_or(rest.len(), |end| end + 2), true),
            'r' if rest.starts_with("r\"") || rest.starts_with("r#") => (raw_string(rest), false),
            '"' => (string(rest), false),
            // A quoted quote, which must not begin a string.
            '\'' if rest.starts_with("'\"'") => (3, false),
            '\'' if rest.starts_with("'\\\"'") => (4, false),
            _ => (first.len_utf8(), false),
        };
        for (index, line) in rest[..skipped].split('\n').enumerate() {
            if index > 0 {
                lines.push(String::new());
            }
            if let Some(last) = lines.last_mut().filter(|_| is_comment) {
                last.push_str(line);
            }
        }
        rest = &rest[skipped..];
    }
    lines
}

/// Returns the length of the string literal at the start of `text`.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, char) in text.char_indices().skip(1) {
        match char {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length of the raw string literal at the start of `text`; 1 if it is a raw identifier.
fn raw_string(text: &str) -> usize {
    let hashes = text[1..].chars().take_while(|char| *char == '#').count();
    if !text[1 + hashes..].starts_with('"') {
        return 1;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let body = 2 + hashes;
    text[body..].find(&end).map_or(text.len(), |at| body + at + end.len())
}

/// Returns the line without the parts in backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

fn contains_word(line: &str, word: &str) -> bool {
    let is_letter = |char: Option<char>| char.is_some_and(char::is_alphanumeric);
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (line[..at].chars().next_back(), line[at + word.len()..].chars().next());
        !is_letter(before) && !is_letter(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(file: &str, text: &str) -> Vec<usize> {
        check(Path::new(file), text).into_iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn avoided_words_in_comments_are_reported() {
        let text = "let a = \"nobody // nobody\"; // fine\n/// Whoever asks.\n/* a\n stranger */ \
                    let r = r#\"\" nobody\"#;\n";
        assert_eq!(lines("a.rs", text), [2, 4]);
        assert_eq!(lines("a.rs", "let quote = '\"'; // somebody\n"), [1]);
        assert_eq!(lines("a.sh", "echo nobody\necho ${#nobody} # nobody\n"), [2]);
        assert_eq!(lines("a.md", "Ask nobody.\n```\nnobody\n```\nUser `nobody`, anybodys.\n"), [1]);
    }

    #[test]
    fn the_message_says_what_to_write() {
        let found = check(Path::new("a.rs"), "// Strangers.");
        assert_eq!(found, [Violation::new(Path::new("a.rs"), 1, "`strangers`: use `foreign processes`")]);
    }
}
