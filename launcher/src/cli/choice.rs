//! Options with a few named values.

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
