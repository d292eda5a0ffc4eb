//! Configuration errors: where they are, what was expected, and the nearest valid name.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use toml::de::DeTable;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::Invalid;

use super::keys::{nearest, nearest_section};
use xlaunch_spec::refusal::Refusal;

/// A configuration that cannot be used. `Display` is one line.
#[derive(Debug)]
pub struct ConfigError {
    /// The place of the error, such as `train.toml:3:7` or `--set train.lr=x`.
    place: String,
    problem: String,
    help: String,
    /// The line of the file with the value underlined; empty if the value is not in a file.
    snippet: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.problem)?;
        if self.help.is_empty() { Ok(()) } else { write!(f, "; {}", self.help) }
    }
}

impl std::error::Error for ConfigError {}

impl ConfigError {
    /// Error for a file that cannot be read.
    pub fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        let help = match error.kind() {
            std::io::ErrorKind::NotFound => "is the path right?".into(),
            _ => String::new(),
        };
        let place = path.display().to_string();
        Self {
            place,
            problem: format!("failed to read the configuration: {error}"),
            help,
            snippet: String::new(),
        }
    }

    /// Error for a file that is not UTF-8.
    pub(super) fn not_utf8(path: &Path, error: &std::string::FromUtf8Error) -> Self {
        let text = String::from_utf8_lossy(error.as_bytes());
        let at = error.utf8_error().valid_up_to();
        let span = at..at + char::REPLACEMENT_CHARACTER.len_utf8();
        Self::at(path, &text, span, "not valid UTF-8".into(), "save the file as UTF-8".into())
    }

    /// Error for a value that did not come from the file.
    pub fn value(source: &str, problem: &str, expected: &str) -> Self {
        let help =
            if expected.starts_with("did you") { expected.into() } else { format!("expected {expected}") };
        Self { place: source.into(), problem: problem.into(), help, snippet: String::new() }
    }

    /// Error for a value of the wrong type that did not come from the file, from serde's message.
    pub(super) fn wrong_type(source: &str, message: &str) -> Self {
        let (problem, help) = describe(message);
        Self { place: source.into(), problem, help, snippet: String::new() }
    }

    /// Appends a note to the help.
    pub(super) fn and(mut self, note: &str) -> Self {
        self.help = if self.help.is_empty() { note.into() } else { format!("{}; {note}", self.help) };
        self
    }

    /// Error of the TOML parser, or a violation of the schema, which has the keys `known`.
    pub fn in_file(path: &Path, text: &str, known: &[String], error: &toml::de::Error) -> Self {
        let span = error.span().unwrap_or(0..0);
        let message = error.message().trim();
        let (problem, help) = match unknown_field(message) {
            Some(field) => unknown(text, span.start, field, known),
            None => describe(message),
        };
        Self::at(path, text, span, problem, help)
    }

    /// Error for a value that has the right type but is invalid.
    pub fn invalid(path: &Path, text: &str, invalid: &Invalid) -> Self {
        let problem = format!("{}: {}", invalid.key, invalid.problem);
        let help = format!("expected {}", invalid.expected);
        match span_of(text, invalid.key) {
            Some(span) => Self::at(path, text, span, problem, help),
            None => Self { place: path.display().to_string(), problem, help, snippet: String::new() },
        }
    }

    /// Error for a file that sets a renamed key under both names.
    pub(super) fn renamed_twice(path: &Path, text: &str, span: Range<usize>, old: &str, new: &str) -> Self {
        let problem = format!("`{old}` was renamed to `{new}`, which is also set");
        Self::at(path, text, span, problem, format!("remove `{old}`"))
    }

    pub(super) fn at(path: &Path, text: &str, span: Range<usize>, problem: String, help: String) -> Self {
        let (line, column) = position(text, span.start);
        let place = format!("{}:{line}:{column}", path.display());
        Self { place, problem, help, snippet: snippet(text, line, &span) }
    }
}

impl From<ConfigError> for Refusal {
    /// Converts the error to a usage error: the error's line, then the line of the file with the value underlined.
    fn from(error: ConfigError) -> Self {
        Self::new(ExitCode::Usage, format!("{error}\n{}", error.snippet).trim_end())
    }
}

/// Extracts the name from serde's "unknown field `name`, expected ...".
fn unknown_field(message: &str) -> Option<&str> {
    message.strip_prefix("unknown field `")?.split('`').next()
}

/// Splits a message of serde or of the TOML parser into problem and help, with TOML's type names in place of Rust's.
fn describe(message: &str) -> (String, String) {
    let message = message.trim().replace('\n', ", ");
    if message == "wanted string or table" {
        return ("invalid type".into(), "expected a string".into());
    }
    // serde's name for an integer beyond those of TOML, and the parser's message about one beyond those that are read.
    if message == "u64 value was too large" || message.ends_with("as i128, expected any valid TOML value") {
        return ("the number is out of range".into(), format!("expected a whole number up to {}", i64::MAX));
    }
    let of_serde = ["invalid type: ", "invalid value: ", "unknown variant "];
    let split = message.rsplit_once(", expected ");
    let Some((problem, expected)) = split.filter(|_| of_serde.iter().any(|it| message.starts_with(it)))
    else {
        return (message, String::new());
    };
    let out_of_range = problem.starts_with("invalid value");
    let expected = match expected {
        "u64" | "usize" if out_of_range => "a whole number of at least 0".into(),
        "u32" if out_of_range => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" | "u32" | "u16" | "u8" | "i64" | "i32" => "a whole number".into(),
        "f64" | "f32" => "a number".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        other if other.starts_with("struct ") => "a section".into(),
        other => other.into(),
    };
    let problem = match problem {
        "invalid type: sequence" => "invalid type: list".into(),
        "invalid type: map" => "invalid type: table".into(),
        other => other.replace("unknown variant", "unknown value"),
    };
    (problem, format!("expected {expected}"))
}

/// Returns problem and help for the unknown key or section at offset `at`.
fn unknown(text: &str, at: usize, field: &str, known: &[String]) -> (String, String) {
    let document = DeTable::parse(text).ok();
    let found = document.as_ref().and_then(|document| key_at(document.get_ref(), at));
    match found {
        Some((_, true)) => (format!("unknown section [{field}]"), nearest_section(field, known)),
        Some((key, false)) => (format!("unknown key `{key}`"), nearest(&key, known)),
        None => (format!("unknown key `{field}`"), nearest(field, known)),
    }
}

/// Returns the dotted path of the key at an offset, however it is written: below a header, with dots, or in an inline
/// table. Also returns whether it is a section.
fn key_at(table: &DeTable<'_>, at: usize) -> Option<(String, bool)> {
    table.iter().find_map(|(key, value)| {
        let (name, table) = (key.get_ref(), value.get_ref().as_table());
        if key.span().start == at {
            return Some((name.to_string(), table.is_some()));
        }
        let (inner, _) = key_at(table?, at)?;
        Some((format!("{name}.{inner}"), false))
    })
}

/// Refuses a list in place of a section, such as `[[train]]`: serde would read it as the values of the section's keys.
/// `known`: all keys, as `section.key`.
pub(super) fn check_sections(path: &Path, text: &str, known: &[String]) -> Result<(), ConfigError> {
    let Ok(document) = DeTable::parse(text) else { return Ok(()) };
    for (name, value) in document.get_ref() {
        let is_section = |key: &String| key.split('.').next() == Some(name.get_ref());
        if value.get_ref().is_array() && known.iter().any(is_section) {
            let help = format!("expected the section [{}]", name.get_ref());
            return Err(ConfigError::at(path, text, value.span(), "invalid type: list".into(), help));
        }
    }
    Ok(())
}

/// Returns the span of the value of `section.key` in the text.
fn span_of(text: &str, key: &str) -> Option<Range<usize>> {
    let (section, key) = key.split_once('.')?;
    let document = DeTable::parse(text).ok()?;
    let section = document.get_ref().get(section)?.get_ref().as_table()?;
    Some(section.get(key)?.span())
}

/// Returns the span of the key `section.key` itself.
pub(super) fn key_span(text: &str, key: &str) -> Option<Range<usize>> {
    let (section, name) = key.split_once('.')?;
    let document = DeTable::parse(text).ok()?;
    let section = document.get_ref().get(section)?.get_ref().as_table()?;
    section.keys().find(|key| key.get_ref() == name).map(|key| key.span())
}

/// Converts a byte offset to line and column, both counted from 1.
fn position(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..at.min(text.len())];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |rest| rest.chars().count()) + 1;
    (line, column)
}

/// Formats line `number` of the text with a span of it underlined, in the style of rustc.
fn snippet(text: &str, number: usize, span: &Range<usize>) -> String {
    let line = text.lines().nth(number - 1).unwrap_or_default();
    let begin = text[..span.start].rfind('\n').map_or(0, |newline| newline + 1);
    let end = span.end.min(begin + line.len());
    let indent: String = text[begin..span.start].chars().map(|c| if c == '\t' { c } else { ' ' }).collect();
    let underline = "^".repeat(text.get(span.start..end).map_or(0, |marked| marked.chars().count()).max(1));
    let gutter = " ".repeat(number.to_string().len());
    format!("{gutter} |\n{number} | {line}\n{gutter} | {indent}{underline}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_that_is_not_utf8_is_underlined() {
        let latin1 = String::from_utf8(b"[job]\nname = \"caf\xe9\"\n".to_vec()).unwrap_err();
        let error = ConfigError::not_utf8(Path::new("train.toml"), &latin1);
        assert_eq!(error.to_string(), "train.toml:2:12: not valid UTF-8; save the file as UTF-8");
        assert_eq!(error.snippet, "  |\n2 | name = \"caf\u{fffd}\"\n  |            ^");
    }

    #[test]
    fn offending_value_is_underlined() {
        let text = "[train]\n\tlr = \"äh\" # no\nsteps = 5";
        let shown = |span: Range<usize>| snippet(text, position(text, span.start).0, &span);
        let begin = text.find('"').unwrap();
        assert_eq!(shown(begin..begin + 5), "  |\n2 | \tlr = \"äh\" # no\n  | \t     ^^^^");
        assert_eq!(shown(0..text.len()), "  |\n1 | [train]\n  | ^^^^^^^");
        assert_eq!(shown(text.len()..text.len()), "  |\n3 | steps = 5\n  |          ^");
    }
}
