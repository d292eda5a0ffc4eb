//! The generator. It compiles the sources with protox, so that no `protoc` is needed.
//!
//! Messages that users see also implement `serde::Serialize`. How a field is written follows from its type and name, so
//! that `--json` and the daemon's page have every field. Enums have labels, which the terminal shows too.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use prost::Message;
use tonic_prost_build::{Builder, FileDescriptorSet};

use crate::Error;

/// Messages that are shown as JSON. The messages that they contain are shown too.
const SHOWN: [&str; 7] =
    ["CheckpointReply", "ExamineReply", "Job", "JobAccount", "NodeStatus", "RankStacks", "StatusReply"];
/// Messages whose JSON is written by hand, in `proto/src/json.rs`.
const BY_HAND: [&str; 2] = ["Accounting", "Finding"];
/// Messages that are also read: the daemon's journal contains them.
const STORED: [&str; 3] = ["Dependency", "Scheduling", "WarningSignal"];
/// Serde's attributes of fields that are exceptions from the rules.
const EXCEPTIONS: [(&str, &str); 12] = [
    ("Gpu.job", ZERO_IS_NULL),
    ("Job.queue_position", ZERO_IS_NULL),
    ("Job.scheduling", "flatten"),
    ("Job.status_age_seconds", ZERO_IS_NULL),
    ("ProcessStacks.dumps", r#"rename = "stacks""#),
    ("ProcessStacks.tracer_pid", ZERO_IS_NULL),
    ("RankStatus.last_step", "skip"),
    ("Scheduling.memory_bytes", r#"alias = "memory""#),
    ("Scheduling.time_limit_seconds", r#"alias = "time_limit""#),
    ("StatusReply.history", "skip"),
    ("StatusReply.last_step", "skip"),
    ("WarningSignal.seconds_before", r#"alias = "before""#),
];
const ZERO_IS_NULL: &str = r#"serialize_with = "crate::json::unless_zero""#;
/// Labels other than the name of the value in lower case.
const LABELS: [(&str, &str); 3] = [
    ("PHASE_UNSPECIFIED", "between phases"),
    ("PHASE_ALL_REDUCE", "all-reduce"),
    ("PHASE_START_UP", "start-up"),
];

/// Returns code and encoded descriptors.
pub(super) fn generate(dir: &Path) -> Result<(String, Vec<u8>), Error> {
    let files = protox::compile(
        ["xlaunch/v1/agent.proto", "xlaunch/v1/group.proto", "xlaunch/v1/node.proto"],
        [dir],
    )?;
    let descriptors = files.encode_to_vec();
    let out = tempfile::tempdir()?;
    let builder = with_json(tonic_prost_build::configure().out_dir(out.path()), &files);
    let labels = labels(&files)?;
    builder.compile_fds(files)?;
    Ok((std::fs::read_to_string(out.path().join("xlaunch.v1.rs"))? + &labels, descriptors))
}

/// Adds serde's attributes to the messages that are shown.
fn with_json(mut builder: Builder, files: &FileDescriptorSet) -> Builder {
    let messages = files.file.iter().flat_map(|file| &file.message_type);
    let messages: BTreeMap<&str, _> = messages.map(|message| (message.name(), message)).collect();
    let mut shown = SHOWN.to_vec();
    let mut done = 0;
    while let Some(name) = shown.get(done).copied() {
        done += 1;
        let stored = STORED.contains(&name);
        let derived = if stored {
            "#[derive(serde::Serialize, serde::Deserialize)] #[serde(default)]"
        } else {
            "#[derive(serde::Serialize)]"
        };
        builder = builder.type_attribute(format!(".xlaunch.v1.{name}"), derived);
        for field in &messages[name].field {
            let path = format!("{name}.{}", field.name());
            let of = field.type_name().rsplit('.').next().unwrap_or_default();
            let exception = EXCEPTIONS.iter().find(|(field, _)| *field == path);
            let rule = match field.r#type().as_str_name() {
                "TYPE_ENUM" if stored => {
                    format!(r#"serialize_with = "{of}::serialize", deserialize_with = "{of}::deserialize""#)
                }
                "TYPE_ENUM" => format!(r#"serialize_with = "{of}::serialize""#),
                "TYPE_DOUBLE" if field.proto3_optional() => {
                    r#"serialize_with = "crate::json::optional_double""#.into()
                }
                "TYPE_DOUBLE" => r#"serialize_with = "crate::json::double""#.into(),
                "TYPE_FLOAT" => r#"serialize_with = "crate::json::float""#.into(),
                _ if field.name().ends_with("unix_ms") => ZERO_IS_NULL.into(),
                _ => String::new(),
            };
            let attribute = exception.map_or(rule, |(_, attribute)| (*attribute).into());
            if !attribute.is_empty() {
                let attribute = format!("#[serde({attribute})]");
                builder = builder.field_attribute(format!(".xlaunch.v1.{path}"), attribute);
            }
            if attribute == "skip" {
                continue;
            }
            if let Some((contained, _)) = messages.get_key_value(of)
                && !shown.contains(contained)
                && !BY_HAND.contains(contained)
            {
                shown.push(contained);
            }
        }
    }
    builder
}

/// Returns code that converts the values of all enums to labels and back.
fn labels(files: &FileDescriptorSet) -> Result<String, Error> {
    let mut code = String::new();
    for values in files.file.iter().flat_map(|file| &file.enum_type) {
        let (mut to, mut from) = (String::new(), String::new());
        let mut prefix = values.value.first().map(|value| value.name()).unwrap_or_default();
        prefix = prefix.strip_suffix("UNSPECIFIED").unwrap_or_default();
        for name in values.value.iter().map(|value| value.name()) {
            let short = name.strip_prefix(prefix).unwrap_or(name).to_lowercase();
            let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
            let variant: String = short.split('_').map(capital).collect();
            let exception = LABELS.iter().find(|(value, _)| *value == name).map(|(_, label)| *label);
            let words = short.replace('_', " ");
            let label = exception.unwrap_or(if variant == "Unspecified" { "unknown" } else { &words });
            writeln!(to, "            Self::{variant} => {label:?},")?;
            if variant != "Unspecified" {
                writeln!(from, "            {label:?} => Self::{variant},")?;
            }
        }
        write!(
            code,
            "impl {} {{
    /// Returns the label of the value on the terminal, in JSON and in metrics.
    pub fn label(self) -> &'static str {{
        match self {{
{to}        }}
    }}
    /// Returns the value with this label; the unspecified one for an unknown label.
    pub fn from_label(label: &str) -> Self {{
        match label {{
{from}            _ => Self::default(),
        }}
    }}
    fn serialize<S: serde::Serializer>(value: &i32, serializer: S) -> Result<S::Ok, S::Error> {{
        serializer.serialize_str(Self::try_from(*value).unwrap_or_default().label())
    }}
    fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {{
        let label = <std::borrow::Cow<'de, str> as serde::Deserialize>::deserialize(deserializer)?;
        Ok(Self::from_label(&label).into())
    }}
}}
",
            values.name()
        )?;
    }
    Ok(code)
}
