//! Origins of configuration values, so that errors can name the place.

use std::path::PathBuf;

use xlaunch_spec::job::Invalid;

use super::{ConfigError, Override, keys};

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
