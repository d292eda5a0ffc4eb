//! Errors in a configuration: the place, what was expected, and the nearest valid name.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, SourceCode};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::Invalid;

use super::keys::{nearest, nearest_section};
use crate::Refusal;

/// A configuration that cannot be used. `Display` is one line; miette shows the place in the file.
#[derive(Debug)]
pub struct ConfigError {
    /// `train.toml:3:7`, or another source of the value.
    place: String,
    problem: String,
    help: String,
    source: Option<Box<(NamedSource<String>, Range<usize>)>>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.problem)?;
        if self.help.is_empty() { Ok(()) } else { write!(f, "; {}", self.help) }
    }
}

impl std::error::Error for ConfigError {}

impl Diagnostic for ConfigError {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        None
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.source.as_deref().map(|(source, _)| source as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let (_, span) = self.source.as_deref()?;
        Some(Box::new(std::iter::once(LabeledSpan::new(None, span.start, span.len().max(1)))))
    }
}

impl ConfigError {
    /// The file cannot be read.
    pub fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        let help = match error.kind() {
            std::io::ErrorKind::NotFound => "is the path right?".into(),
            _ => String::new(),
        };
        let place = path.display().to_string();
        Self { place, problem: format!("failed to read the configuration: {error}"), help, source: None }
    }

    /// A value that did not come from the file.
    pub fn value(source: &str, problem: &str, expected: &str) -> Self {
        let help =
            if expected.starts_with("did you") { expected.into() } else { format!("expected {expected}") };
        Self { place: source.into(), problem: problem.into(), help, source: None }
    }

    /// An error of the TOML parser, or of the schema with these keys.
    pub fn in_file(path: &Path, text: &str, known: &[String], error: &toml::de::Error) -> Self {
        let span = error.span().unwrap_or(0..0);
        let message = error.message().trim();
        let (problem, help) = match unknown_field(message) {
            Some(field) => unknown(text, span.start, field, known),
            None => (message.replace('\n', ", "), String::new()),
        };
        Self::at(path, text, span, problem, help)
    }

    /// A value of the right type that is invalid.
    pub fn invalid(path: &Path, text: &str, invalid: &Invalid) -> Self {
        let problem = format!("{}: {}", invalid.key, invalid.problem);
        let help = format!("expected {}", invalid.expected);
        match span_of(text, invalid.key) {
            Some(span) => Self::at(path, text, span, problem, help),
            None => Self { place: path.display().to_string(), problem, help, source: None },
        }
    }

    /// The file sets a renamed key under both names.
    pub(super) fn renamed_twice(path: &Path, text: &str, span: Range<usize>, old: &str, new: &str) -> Self {
        let problem = format!("`{old}` was renamed to `{new}`, which is set, too");
        Self::at(path, text, span, problem, format!("remove `{old}`"))
    }

    fn at(path: &Path, text: &str, span: Range<usize>, problem: String, help: String) -> Self {
        let (line, column) = position(text, span.start);
        let name = path.display().to_string();
        let place = format!("{name}:{line}:{column}");
        let source = Some(Box::new((NamedSource::new(name, text.to_string()), span)));
        Self { place, problem, help, source }
    }
}

impl From<ConfigError> for Refusal {
    /// The message is followed by an excerpt of the file.
    fn from(error: ConfigError) -> Self {
        let mut text = String::new();
        let mut theme = GraphicalTheme::default();
        // The command line prints "error:" itself.
        theme.characters.error = String::new();
        let handler = GraphicalReportHandler::new_themed(theme).with_links(false);
        if handler.render_report(&mut text, &error).is_err() {
            text = error.to_string();
        }
        Self::new(ExitCode::Usage, text)
    }
}

/// The name in serde's "unknown field `name`, expected ...".
fn unknown_field(message: &str) -> Option<&str> {
    message.strip_prefix("unknown field `")?.split('`').next()
}

/// Problem and help for an unknown key of the section at `at`, or for an unknown section.
fn unknown(text: &str, at: usize, field: &str, known: &[String]) -> (String, String) {
    let line = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let is_header = text[line..].trim_start().starts_with('[');
    let section = text[..line]
        .lines()
        .rev()
        .find_map(|line| line.trim().strip_prefix('[').and_then(|line| line.split(']').next()));
    match section {
        Some(section) if !is_header => {
            let key = format!("{section}.{field}");
            (format!("unknown key `{key}`"), nearest(&key, known))
        }
        _ => (format!("unknown section [{field}]"), nearest_section(field, known)),
    }
}

/// The span of the value of `section.key` in the text.
fn span_of(text: &str, key: &str) -> Option<Range<usize>> {
    let (section, key) = key.split_once('.')?;
    let document = toml::de::DeTable::parse(text).ok()?;
    let section = document.get_ref().get(section)?.get_ref().as_table()?;
    Some(section.get(key)?.span())
}

/// The span of the key `section.key` itself.
pub(super) fn key_span(text: &str, key: &str) -> Option<Range<usize>> {
    let (section, name) = key.split_once('.')?;
    let document = toml::de::DeTable::parse(text).ok()?;
    let section = document.get_ref().get(section)?.get_ref().as_table()?;
    section.keys().find(|key| key.get_ref() == name).map(|key| key.span())
}

/// Line and column, counted from 1, of a byte offset.
fn position(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..at.min(text.len())];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |rest| rest.chars().count()) + 1;
    (line, column)
}
