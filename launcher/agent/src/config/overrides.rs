//! Values that override the configuration file, and the origins of all values, so that errors can name the place.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use xlaunch_proto::env;
use xlaunch_spec::job::Invalid;

use super::{ConfigError, keys};

/// A configuration layer that overrides the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Variables `XLAUNCH_<SECTION>_<KEY>`.
    Environment,
    /// `--set` and other flags.
    Flags,
}

/// A value from `--set`, another flag or the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// `section.key`, such as `train.lr`.
    pub key: String,
    /// The value as the user wrote it, such as `3e-4`.
    pub value: String,
    /// The origin of the value for messages, such as `--set train.lr=3e-4`.
    pub source: String,
    pub layer: Layer,
}

impl Override {
    /// Parses the argument of `--set`.
    pub fn from_flag(argument: &str) -> Result<Self, ConfigError> {
        let source = format!("--set {argument}");
        match argument.split_once('=') {
            Some((key, value)) => {
                let (key, value) = (key.trim().into(), value.trim().into());
                Ok(Self { key, value, source, layer: Layer::Flags })
            }
            None => Err(ConfigError::value(&source, "`=` is missing", "section.key=value")),
        }
    }

    /// Extracts the overrides from these variables, sorted by name. Variables with the name of a section and an unknown
    /// key are included, so that [`load`](super::load) rejects them.
    ///
    /// # Errors
    /// The value of a key is not UTF-8. Other variables may contain any bytes.
    pub fn from_environment(
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Vec<Self>, ConfigError> {
        let renamed = keys::RENAMED_KEYS.iter().map(|(old, _)| (*old).to_owned());
        let known: Vec<String> = keys::all().into_iter().chain(renamed).collect();
        // The name of a key is UTF-8.
        let variables: Vec<(String, OsString)> =
            variables.filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect();
        let mut found = Vec::new();
        for (name, value) in &variables {
            if is_of_others(name, value, &variables) {
                continue;
            }
            let Some(key) = keys::of_variable(name, &known) else { continue };
            let source = format!("environment variable {name}");
            let Some(text) = value.to_str() else {
                let problem = format!("`{}` is not text", value.display());
                return Err(ConfigError::value(&source, &problem, "UTF-8"));
            };
            found.push(Self { key, value: text.to_owned(), source, layer: Layer::Environment });
        }
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// The name of the flag or variable, without the value.
    fn origin(&self) -> &str {
        match self.layer {
            Layer::Environment => &self.source,
            Layer::Flags => self.source.split([' ', '=']).next().unwrap_or_default(),
        }
    }
}

/// Returns whether a variable that is named like a configuration key belongs to something else.
fn is_of_others(name: &str, value: &OsStr, all: &[(String, OsString)]) -> bool {
    // The daemon passes each variable about a job to its hooks under two names.
    let in_hook = || {
        let rest = name.strip_prefix("XLAUNCH_JOB_")?;
        let hook = format!("XLAUNCH_HOOK_JOB_{rest}");
        Some(all.iter().any(|(name, of_hook)| *name == hook && of_hook == value))
    };
    // Agents set the job id for their workers, which may start another launch.
    name == env::JOB_ID || is_service_link(name, &value.to_string_lossy()) || in_hook() == Some(true)
}

/// Returns whether the variable looks like a service link, judged by its name and value. Kubernetes sets those in each
/// container for every service of its namespace: the variables of a service called `xlaunch-train` begin with
/// `XLAUNCH_TRAIN_`, like those that set keys of `[train]`.
fn is_service_link(name: &str, value: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || name.ends_with("_PORT") && is_url(value)
        || name.match_indices("_PORT_").any(|(at, word)| is_port(&name[at + word.len()..]))
}

/// Returns whether the value is a URL such as `tcp://10.96.0.7:29400`.
fn is_url(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme))
}

/// Returns whether `rest` can follow `_PORT_` in the name of a service link, such as `29400_TCP` or `29400_TCP_ADDR`.
fn is_port(rest: &str) -> bool {
    let mut words = rest.split('_');
    let number = words.next().is_some_and(|word| word.parse::<u16>().is_ok());
    let protocol = words.next().is_some_and(|word| ["TCP", "UDP", "SCTP"].contains(&word));
    let what = words.next().is_none_or(|word| ["PROTO", "PORT", "ADDR"].contains(&word));
    number && protocol && what && words.next().is_none()
}

/// The file and the values that override it.
#[derive(Clone, Debug)]
pub struct Sources {
    pub(super) path: PathBuf,
    /// Text of the file, in which renamed keys have their current names.
    pub(super) text: String,
    /// Overrides under current names, in order of increasing precedence.
    pub(super) overrides: Vec<Override>,
}

impl Sources {
    /// Builds the error about an invalid value. It names the origin of the value: file, line and column, or the flag or
    /// variable.
    pub fn error(&self, invalid: &Invalid) -> ConfigError {
        let last = |key: &str| self.overrides.iter().rev().find(|change| change.key == key);
        let error = match last(invalid.key) {
            Some(change) => ConfigError::value(&change.source, &invalid.problem, &invalid.expected),
            None => ConfigError::invalid(&self.path, &self.text, invalid),
        };
        // The error has the place of one key, but the mistake may be the value of another key that it names.
        let others = keys::all().into_iter().filter(|key| key != invalid.key && invalid.names(key));
        others.filter_map(|key| last(&key)).fold(error, |error, change| {
            error.and(&format!("{} = {} comes from {}", change.key, change.value, change.origin()))
        })
    }
}
