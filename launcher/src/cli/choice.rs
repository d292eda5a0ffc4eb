//! Parsers of options: one of a few names, or a whole number.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};

/// Returns the parser of an option that takes one of these names.
pub(super) fn choice<T: Copy + Send + Sync + 'static, const N: usize>(
    choices: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(choices.map(|(name, _)| name)).try_map(move |given| {
        let found = choices.iter().find(|(name, _)| *name == given);
        found.map(|(_, value)| *value).ok_or("unknown name")
    })
}

/// Returns the parser of an option that takes a whole number in this range.
pub(super) fn whole<T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let expected = || format!("expected a whole number from {} to {}", range.start(), range.end());
        text.parse().ok().filter(|number| range.contains(number)).ok_or_else(expected)
    }
}
