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
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether a value has no effect: null, false, or empty.
    pub(super) fn is_unset(&self, key: &str) -> bool {
        match self.get(key) {
            None | Some(Value::Bool(false)) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(table)) => table.is_empty(),
            Some(Value::String(text)) => text.is_empty(),
            Some(Value::Number(_) | Value::Bool(true)) => false,
            Some(Value::Null) => true,
        }
    }

    pub(super) fn error(&self, key: &str, problem: String) -> ModelError {
        // A key that is not known may have control characters.
        ModelError::Config { path: self.path.into(), key: key.escape_debug().to_string(), problem }
    }

    /// Returns an error for a value that is not supported.
    pub(super) fn refused(&self, key: &str, reason: &str) -> ModelError {
        // The text is JSON, so control characters are escaped.
        let value = self.values.get(key).unwrap_or(&Value::Null).to_string();
        let short: String = value.chars().take(100).collect();
        self.error(key, format!("{short} is not supported: {reason}"))
    }

    /// Refuses all values except these, which are JSON.
    pub(super) fn only(&self, key: &str, accepted: &[&str]) -> Result<(), ModelError> {
        let equals = |value: &Value, text: &&str| match serde_json::from_str::<Value>(text) {
            Ok(accepted) => {
                accepted == *value || accepted.as_f64().is_some_and(|it| value.as_f64() == Some(it))
            }
            Err(_) => false,
        };
        if self.get(key).is_none_or(|value| accepted.iter().any(|text| equals(value, text))) {
            return Ok(());
        }
        Err(self.refused(key, &format!("this trainer computes {key} = {}", accepted.join(" or "))))
    }

    pub(super) fn size(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.refused(key, "it must be a whole number"))
    }

    pub(super) fn number(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        Ok(self.optional_number(key)?.unwrap_or(default))
    }

    /// Returns a number above 0.
    pub(super) fn positive(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        let number = self.number(key, default)?;
        if number > 0.0 { Ok(number) } else { Err(self.refused(key, "it must be above 0")) }
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

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.refused(key, "it must be a string"))
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_array().map(|list| Some(&**list)).ok_or_else(|| self.refused(key, "it must be a list"))
    }

    pub(super) fn table(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.refused(key, "it must be an object"))
    }
}

/// Prepends the name of a table to the key of an error.
pub(super) fn nested(table: &str) -> impl Fn(ModelError) -> ModelError {
    move |error| match error {
        ModelError::Config { path, key, problem } => {
            ModelError::Config { path, key: format!("{table}.{key}"), problem }
        }
        other => other,
    }
}
