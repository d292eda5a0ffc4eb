//! Where the values of a configuration come from, so that errors name the place.

use std::path::PathBuf;

use xlaunch_proto::spec::Invalid;

use super::{ConfigError, Override, keys};

/// The file and what overrides it.
#[derive(Clone, Debug)]
pub struct Sources {
    pub(super) path: PathBuf,
    /// With the current names of renamed keys.
    pub(super) text: String,
    /// The same, in order of increasing precedence.
    pub(super) overrides: Vec<Override>,
}

impl Sources {
    /// The error about a value of the configuration: with the file, line and column, the flag or the variable that the
    /// value comes from.
    pub fn error(&self, invalid: &Invalid) -> ConfigError {
        let last = |key: &str| self.overrides.iter().rev().find(|change| change.key == key);
        let error = match last(invalid.key) {
            Some(change) => ConfigError::value(&change.source, &invalid.problem, &invalid.expected),
            None => ConfigError::invalid(&self.path, &self.text, invalid),
        };
        // The place is that of one key, but the value of another one may be the mistake.
        let others = keys::all().into_iter().filter(|key| key != invalid.key && invalid.names(key));
        others.filter_map(|key| last(&key)).fold(error, |error, change| {
            error.and(&format!("{} = {} comes from {}", change.key, change.value, change.origin()))
        })
    }
}
