//! Values of `daemon.toml` that are written as a number with a unit.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use xlaunch_spec::quantities::{parse_bytes, parse_span};

/// A duration, written with the units `s`, `m`, `h` and `d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Span(pub(crate) Duration);

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let span = parse_span(&text).map(Self);
        span.ok_or_else(|| format!("\"{text}\" is not a duration; expected one such as \"120s\" or \"5m\""))
    }
}

impl From<Span> for String {
    fn from(span: Span) -> Self {
        format!("{}s", span.0.as_secs())
    }
}

/// A size in bytes, written as, for example, `16M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Size(pub(crate) u64);

impl TryFrom<String> for Size {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse_bytes(&text).map(Self)
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size_text(size.0)
    }
}

/// A part of the node's memory, written as a percentage or a size such as `64G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum MemoryLimit {
    Percent(u64),
    Bytes(u64),
}

impl MemoryLimit {
    /// Returns the limit on a node with this much memory, both in bytes.
    pub(crate) fn of(self, memory: u64) -> u64 {
        match self {
            Self::Percent(percent) => {
                u64::try_from(u128::from(memory) * u128::from(percent) / 100).unwrap_or(u64::MAX)
            }
            Self::Bytes(bytes) => bytes.min(memory),
        }
    }
}

impl TryFrom<String> for MemoryLimit {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let percent = |text: &str| text.trim_end().parse().ok().filter(|percent| (1..=100).contains(percent));
        let limit = match text.strip_suffix('%') {
            Some(text) => percent(text).map(Self::Percent),
            None => parse_bytes(&text).ok().map(Self::Bytes),
        };
        limit.ok_or_else(|| {
            format!("\"{text}\" is not an amount of memory; expected 1% to 100%, or a size such as \"64G\"")
        })
    }
}

impl From<MemoryLimit> for String {
    fn from(limit: MemoryLimit) -> Self {
        match limit {
            MemoryLimit::Percent(percent) => format!("{percent}%"),
            MemoryLimit::Bytes(bytes) => size_text(bytes),
        }
    }
}

/// Formats a size so that it can be parsed again. Parsed sizes are multiples of 1 KiB.
fn size_text(bytes: u64) -> String {
    format!("{}K", bytes >> 10)
}

#[cfg(test)]
mod tests {
    use super::super::{JobsSection, parse};
    use super::*;
    use std::path::Path;

    #[test]
    fn span_of_time_has_a_unit() {
        let grace = |text: &str| {
            let config = parse(Path::new("f"), &format!("[jobs]\nmax_grace = {text}"));
            config.map(|config| config.jobs.max_grace.0)
        };
        assert_eq!(grace("\"5m\"").unwrap(), Duration::from_secs(300));
        assert_eq!(grace("\"90 s\"").unwrap(), Duration::from_secs(90));
        assert_eq!(grace("\"2d\"").unwrap(), Duration::from_secs(172_800));
        for text in ["\"5\"", "\"-1s\"", "\"1.5h\"", "\"\"", "5"] {
            let error = grace(text).unwrap_err().to_string();
            assert!(error.contains("f:2:"), "{text}: {error}");
        }
    }

    #[test]
    fn limit_of_memory_is_a_percentage_or_a_size() {
        let limit = |text: &str| {
            let config = parse(Path::new("f"), &format!("[jobs]\nmax_memory_per_user = \"{text}\""));
            config.map(|config| config.jobs.max_memory_per_user.unwrap().of(64 << 30)).unwrap()
        };
        assert_eq!(["25%", "100%", "8G", "1T"].map(limit), [16 << 30, 64 << 30, 8 << 30, 64 << 30]);
        assert_eq!(MemoryLimit::Percent(100).of(u64::MAX), u64::MAX, "unknown memory");
        let default = JobsSection::default();
        let text = toml::to_string(&default).unwrap();
        assert_eq!(toml::from_str::<JobsSection>(&text).unwrap(), default);
    }
}
