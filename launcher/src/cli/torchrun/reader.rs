//! Looks up values of flags: on the command line, otherwise in the environment.

use std::ffi::{OsStr, OsString};

use super::super::engine::Sourced;
use super::flags::{self, Flag};
use super::line::Line;

/// A process's environment.
pub(super) type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Flags whose empty value counts as unset, as an empty variable does: scripts pass on variables that may not be set.
/// torchrun does the same with most of them.
const UNSET_IF_EMPTY: [&str; 4] = ["rdzv-endpoint", "rdzv-id", "master-addr", "local-addr"];

/// Parses values and names their source in errors.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) line: &'a Line,
    pub(super) environment: Environment<'a>,
}

impl Reader<'_> {
    /// Returns whether a flag without a value is given. In the environment, 1 and 0 are accepted.
    pub(super) fn is_set(&self, name: &str) -> Result<bool, String> {
        if self.line.last(name).is_some() {
            return Ok(true);
        }
        match self.in_environment(name) {
            Some((value, source)) => match value.to_str().and_then(|text| text.trim().parse::<i64>().ok()) {
                Some(number) => Ok(number != 0),
                None => Err(format!("{source}: expected 0 or 1")),
            },
            None => Ok(false),
        }
    }

    /// Returns the value of a flag, not parsed.
    pub(super) fn raw(&self, name: &str) -> Option<OsString> {
        self.written(name).map(|(value, _)| value)
    }

    /// Returns the value of a flag, parsed.
    pub(super) fn parsed<T>(
        &self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        Ok(self.sourced(name, parse)?.map(|found| found.value))
    }

    /// Returns the value of a flag, parsed, with its source for messages.
    pub(super) fn sourced<T>(
        &self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<Sourced<T>>, String> {
        let Some((value, source)) = self.written(name) else { return Ok(None) };
        let value = parse_value(&value, &source, parse)?;
        Ok(Some(Sourced { value, source }))
    }

    /// Returns the value of an environment variable that does not belong to a flag, parsed.
    pub(super) fn variable<T>(
        &self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let value = (self.environment)(name).filter(|value| !value.is_empty());
        value.map(|value| parse_value(&value, &format!("{name}={}", value.display()), parse)).transpose()
    }

    /// Returns a value and its source for error messages.
    fn written(&self, name: &str) -> Option<(OsString, String)> {
        let Some(given) = self.line.last(name) else { return self.in_environment(name) };
        let value = given.value.clone()?;
        if value.is_empty() && UNSET_IF_EMPTY.contains(&name) {
            return None;
        }
        let source = format!("{} {}", given.written, value.display());
        Some((value, source))
    }

    /// Looks up the variable of a flag. An empty one counts as unset, because containers cannot always unset a
    /// variable.
    fn in_environment(&self, name: &str) -> Option<(OsString, String)> {
        let variable = flags::all().find(|flag| flag.name == name).and_then(Flag::variable)?;
        let value = (self.environment)(&variable).filter(|value| !value.is_empty())?;
        let source = format!("{variable}={}", value.display());
        Some((value, source))
    }

    /// Returns all values of a flag that may be repeated.
    pub(super) fn repeated<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Option<&'a OsStr>> {
        self.line
            .given
            .iter()
            .filter(move |given| given.flag.name == name)
            .map(|given| given.value.as_deref())
    }
}

fn parse_value<T>(
    value: &OsStr,
    source: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, String> {
    let text = value.to_str().ok_or_else(|| format!("{source}: expected UTF-8"))?;
    parse(text).map_err(|expected| format!("{source}: {expected}"))
}
