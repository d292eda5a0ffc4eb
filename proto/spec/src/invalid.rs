//! The error for a configuration value that cannot work.

/// A configuration value that cannot work, with the key that holds it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}; expected {expected}")]
pub struct Invalid {
    /// Dotted path of the key, such as `train.lr`.
    pub key: &'static str,
    /// The problem with the value.
    pub problem: String,
    /// Values that would be accepted.
    pub expected: String,
}

impl Invalid {
    /// Creates an error for `key`.
    pub fn new(key: &'static str, problem: String, expected: String) -> Self {
        Self { key, problem, expected }
    }

    /// Returns whether the error's text mentions this other key.
    pub fn names(&self, key: &str) -> bool {
        let words = |text: &str| {
            text.split(|c: char| !c.is_alphanumeric() && !"_.".contains(c)).any(|word| word == key)
        };
        words(&self.problem) || words(&self.expected)
    }
}
