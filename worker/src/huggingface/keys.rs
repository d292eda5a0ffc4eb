//! Typed access to the keys of `config.json`. Errors name the key.

use std::path::Path;

use serde_json::{Map, Value};

use super::ModelError;

/// The keys of a table. `null` counts as a missing key.
pub(super) struct Keys<'a> {
    /// Used in messages.
    pub(super) path: &'a Path,
    pub(super) values: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn error(&self, key: &str, problem: String) -> ModelError {
        ModelError::Config { path: self.path.into(), key: key.into(), problem }
    }

    /// Returns an error for a value that is not supported.
    pub(super) fn refused(&self, key: &str, reason: &str) -> ModelError {
        // The text is JSON, so control characters are escaped.
        let value = self.values.get(key).unwrap_or(&Value::Null).to_string();
        let short: String = value.chars().take(100).collect();
        self.error(key, format!("{short} is not supported: {reason}"))
    }

    /// Refuses all values except these.
    pub(super) fn only(&self, key: &str, accepted: &[Value]) -> Result<(), ModelError> {
        if self.get(key).is_none_or(|value| accepted.contains(value)) {
            return Ok(());
        }
        let accepted: Vec<String> = accepted.iter().map(ToString::to_string).collect();
        let reason = if accepted.is_empty() {
            "weights must not be quantized".into()
        } else {
            format!("this trainer computes {key} = {}", accepted.join(" or "))
        };
        Err(self.refused(key, &reason))
    }

    pub(super) fn size(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.refused(key, "it must be a whole number"))
    }

    pub(super) fn number(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        Ok(self.optional_number(key)?.unwrap_or(default))
    }

    pub(super) fn required_number(&self, key: &str) -> Result<f64, ModelError> {
        self.optional_number(key)?.ok_or_else(|| self.refused(key, "it must be a number"))
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.refused(key, "it must be a number"))
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.refused(key, "it must be true or false"))
    }

    pub(super) fn table(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.refused(key, "it must be an object"))
    }
}
