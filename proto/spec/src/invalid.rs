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

/// Checks that a value is positive and finite.
pub(crate) fn positive(key: &'static str, value: f64) -> Result<(), Invalid> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value} is not a positive number"), "a finite number above 0".into()))
}

/// Checks that a value is positive and finite, also after rounding to fp32, in which the optimizer computes.
pub(crate) fn positive_in_fp32(key: &'static str, value: f64) -> Result<(), Invalid> {
    positive(key, value)?;
    if (f32::MIN_POSITIVE.into()..=f32::MAX.into()).contains(&value) {
        return Ok(());
    }
    Err(Invalid::new(key, format!("{value:e} is out of the range of fp32"), "1.2e-38 to 3.4e38".into()))
}

/// Checks that a value is at least `low` and at most `high`; `f64::MAX` is no limit.
pub(crate) fn within(key: &'static str, value: f64, low: f64, high: f64) -> Result<(), Invalid> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let expected = if high == f64::MAX { format!("at least {low}") } else { format!("{low} to {high}") };
    Err(Invalid::new(key, format!("{value} is out of range"), expected))
}
