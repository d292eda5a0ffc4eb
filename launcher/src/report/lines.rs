//! Reads `metrics.jsonl` line by line: a file of any size takes the memory of its longest line, up to a limit.
//!
//! A line that is not a JSON object with a step in `_step` is broken; the reader skips and counts it. The last line of
//! a run that is being written may be incomplete, which is not an error. Unknown keys are ignored.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use fs_err::File;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use xlaunch_proto::metrics::{EXPERT_LOADS, METRICS};

/// Maximum length of a line in bytes; longer lines are skipped.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// The values of a line, which is a step or an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) step: u64,
    /// The value of each metric: NaN if it is not finite, `None` if it is absent.
    pub(crate) values: [Option<f64>; METRICS.len()],
}

impl Point {
    /// Returns whether the point is a training step rather than an evaluation after one.
    pub(crate) fn is_step(&self) -> bool {
        self.value("train/loss").is_some()
    }

    /// Returns the value of the metric with this key.
    pub(crate) fn value(&self, key: &str) -> Option<f64> {
        self.values[index(key)?]
    }
}

/// The lines of a file.
#[derive(Debug)]
pub(crate) struct Lines {
    reader: io::Take<BufReader<File>>,
    line: Vec<u8>,
    /// Number of bytes read.
    pub(crate) read: u64,
    /// Number of lines longer than the limit.
    pub(crate) too_long: u64,
}

impl Lines {
    /// Opens a file to read at most its first `limit` bytes. The file may be growing.
    pub(crate) fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let reader = BufReader::with_capacity(1 << 16, open(path)?).take(limit);
        Ok(Self { reader, line: Vec::new(), read: 0, too_long: 0 })
    }

    /// Returns the next line that is not empty, and whether it is an incomplete last line, without a line feed.
    pub(crate) fn next(&mut self) -> io::Result<Option<(&[u8], bool)>> {
        loop {
            self.line.clear();
            let bytes = self.reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut self.line)?;
            self.read += bytes as u64;
            if bytes == 0 {
                return Ok(None);
            }
            let ended = self.line.last() == Some(&b'\n');
            if !ended && bytes as u64 == MAX_LINE_BYTES {
                self.read += self.reader.skip_until(b'\n')? as u64;
                self.too_long += 1;
            } else if !self.line.trim_ascii().is_empty() {
                return Ok(Some((&self.line, !ended)));
            }
        }
    }
}

/// Opens a regular file. Errors name it.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    xlaunch_data::open_regular(path).map(|file| File::from_parts(file, path)).map_err(named)
}

/// Parses a line; `None` if it is broken.
pub(crate) fn parse(line: &[u8]) -> Option<Point> {
    serde_json::from_slice(line).ok()
}

/// Parses the loads of experts; `None` if the line has none.
pub(crate) fn expert_loads(line: &[u8]) -> Option<BTreeMap<u32, Vec<f64>>> {
    let mut values: BTreeMap<String, Value> = serde_json::from_slice(line).ok()?;
    serde_json::from_value(values.remove(EXPERT_LOADS)?).ok()
}

impl<'de> Deserialize<'de> for Point {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PointVisitor)
    }
}

struct PointVisitor;

impl<'de> Visitor<'de> for PointVisitor {
    type Value = Point;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `_step`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Point, A::Error> {
        let (mut step, mut values) = (None, [None; METRICS.len()]);
        while let Some(Name(name)) = map.next_key()? {
            if name == "_step" {
                step = number(&map.next_value()?);
            } else if let Some(index) = index(&name) {
                values[index] = number(&map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        let step = step.and_then(whole).ok_or_else(|| serde::de::Error::missing_field("_step"))?;
        Ok(Point { step, values })
    }
}

/// Converts a step that JSON represents as a float; `None` if it is not a whole number.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in the range of exact integers")]
fn whole(value: f64) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    ((0.0..=EXACT).contains(&value) && value.fract() == 0.0).then_some(value as u64)
}

/// Returns the index of the metric with this key.
pub(super) fn index(key: &str) -> Option<usize> {
    METRICS.iter().position(|metric| metric.key == key)
}

/// A key, borrowed if it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// Returns a number. It is NaN for null and for the names that JSON writers use for numbers that are not finite, and
/// `None` for anything else.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::Null => Some(f64::NAN),
        Value::String(name) => ["NaN", "Infinity", "-Infinity"].contains(&name.as_str()).then_some(f64::NAN),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_ignored_and_odd_values_are_no_values() {
        let point = parse(
            br#"{"x": {"y": [1]}, "_step": 3, "train/loss": 0.1, "val/loss": null, "train/lr": "NaN",
                "train/grad_norm": "high", "perf/mfu": [1, {"a": 2}], "perf/step_seconds": {"a": 1}, "\u0041": 1}"#,
        );
        let point = point.unwrap();
        let value = |key| point.value(key).map(|value| value.to_string());
        let keys = ["train/loss", "val/loss", "train/lr"];
        assert_eq!(keys.map(|key| value(key).unwrap()), ["0.1", "NaN", "NaN"]);
        assert_eq!(point.values.iter().flatten().count(), 3);
        for broken in
            ["{}", "[1]", "3", "{\"_step\": -1}", "{\"_step\": 1.5}", "{\"_step\": \"1\"}", "{\"_step\": 1"]
        {
            assert_eq!(parse(broken.as_bytes()), None, "{broken}");
        }
    }

    #[test]
    fn loads_of_experts_are_lists_by_block() {
        let loads =
            |text: &str| expert_loads(format!("{{\"_step\": 3, \"experts/load\": {text}}}").as_bytes());
        assert_eq!(
            loads(r#"{"1": [0.25, 0.75], "0": []}"#).unwrap(),
            [(0, vec![]), (1, vec![0.25, 0.75])].into()
        );
        for broken in ["[1]", r#"{"a": [1]}"#, r#"{"-1": [1]}"#, r#"{"1": [null]}"#, r#"{"1": 2}"#] {
            assert_eq!(loads(broken), None, "{broken}");
        }
        assert_eq!(expert_loads(b"{\"_step\": 3}"), None);
    }

    #[test]
    fn long_lines_are_skipped_and_the_end_of_a_growing_file_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let long = "x".repeat(3 << 20);
        fs_err::write(&path, format!("a\n\n{long}\nb\n  \nc")).unwrap();
        let mut lines = Lines::open(&path, u64::MAX).unwrap();
        let mut found = Vec::new();
        while let Some((line, cut)) = lines.next().unwrap() {
            found.push((String::from_utf8_lossy(line).trim().to_owned(), cut));
        }
        assert_eq!(found, [("a".into(), false), ("b".into(), false), ("c".into(), true)]);
        assert_eq!((lines.too_long, lines.read), (1, fs_err::metadata(&path).unwrap().len()));
        let mut lines = Lines::open(&path, 2).unwrap();
        assert!(lines.next().unwrap().is_some() && lines.next().unwrap().is_none());
    }
}
