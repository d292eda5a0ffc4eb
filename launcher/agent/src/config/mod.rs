//! From `train.toml`, the environment and flags to a checked [`JobSpec`].
//!
//! Layers, each over the one before: defaults, the file, `XLAUNCH_<SECTION>_<KEY>`, flags (`--nproc`, `--set`). Relative
//! paths of data are against the file's directory, all others against the working directory.

mod diagnostics;
pub mod keys;

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};
use xlaunch_proto::spec::JobSpec;

pub use diagnostics::ConfigError;

/// What `--set` and the environment change: dotted key, value as written, where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Such as `train.lr`.
    pub key: String,
    /// Such as `3e-4`.
    pub value: String,
    /// Such as `--set train.lr=3e-4`, for error messages.
    pub source: String,
}

impl Override {
    /// Parses the argument of `--set`.
    pub fn from_flag(argument: &str) -> Result<Self, ConfigError> {
        let source = format!("--set {argument}");
        match argument.split_once('=') {
            Some((key, value)) => Ok(Self { key: key.trim().into(), value: value.trim().into(), source }),
            None => Err(ConfigError::value(&source, "there is no `=`", "section.key=value")),
        }
    }

    /// The overrides among these variables, by name.
    pub fn from_environment(variables: impl Iterator<Item = (String, String)>) -> Vec<Self> {
        let mut found: Vec<Self> = variables
            .filter_map(|(name, value)| {
                let key = keys::all().into_iter().find(|key| keys::variable(key) == name)?;
                Some(Self { key, value, source: format!("environment variable {name}") })
            })
            .collect();
        found.sort_by(|a, b| a.key.cmp(&b.key));
        found
    }
}

/// Reads and checks a configuration. `overrides` come in rising precedence.
pub fn load(path: &Path, overrides: &[Override]) -> Result<JobSpec, ConfigError> {
    let text = fs_err::read_to_string(path).map_err(|error| ConfigError::unreadable(path, &error))?;
    let spec = parse(path, &text, overrides)?;
    let here = std::env::current_dir().map_err(|error| ConfigError::unreadable(Path::new("."), &error))?;
    Ok(resolve(spec, path, &here))
}

/// [`load`] without the file system.
fn parse(path: &Path, text: &str, overrides: &[Override]) -> Result<JobSpec, ConfigError> {
    let in_file = |error| ConfigError::in_file(path, text, &keys::all(), &error);
    // The file by itself first: its errors have a place.
    toml::from_str::<JobSpec>(text).map_err(in_file)?;
    let mut table: Table = toml::from_str(text).map_err(in_file)?;
    for change in overrides {
        apply(&mut table, change)?;
        JobSpec::deserialize(table.clone()).map_err(|error| {
            ConfigError::value(&change.source, error.message().trim(), "a value of the key's type")
        })?;
    }
    let spec = JobSpec::deserialize(table).map_err(in_file)?;
    spec.check().map_err(|invalid| {
        match overrides.iter().rev().find(|change| change.key == invalid.key) {
            Some(change) => ConfigError::value(&change.source, &invalid.problem, &invalid.expected),
            None => ConfigError::invalid(path, text, &invalid),
        }
    })?;
    Ok(spec)
}

fn apply(table: &mut Table, change: &Override) -> Result<(), ConfigError> {
    let known = keys::all();
    let Some((section, key)) = change.key.split_once('.').filter(|_| known.contains(&change.key)) else {
        let help = keys::nearest(&change.key, &known);
        return Err(ConfigError::value(&change.source, &format!("there is no key `{}`", change.key), &help));
    };
    let section = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
    if let Value::Table(section) = section {
        section.insert(key.into(), value(&change.value));
    }
    Ok(())
}

/// A TOML value; what is none is a string, so that `--set model.arch=gpt2` needs no quotes.
fn value(text: &str) -> Value {
    let parsed = toml::from_str::<Table>(&format!("value = {text}"));
    parsed.ok().and_then(|mut table| table.remove("value")).unwrap_or_else(|| Value::String(text.into()))
}

/// Makes paths absolute and names the job.
fn resolve(mut spec: JobSpec, path: &Path, here: &Path) -> JobSpec {
    let config_dir = here.join(path).parent().map_or_else(|| here.to_path_buf(), Path::to_path_buf);
    let absolute = |base: &Path, path: &str| clean(&base.join(path)).to_string_lossy().into_owned();
    for pattern in spec.data.train.iter_mut().chain(&mut spec.data.val) {
        *pattern = absolute(&config_dir, pattern);
    }
    spec.job.output = absolute(here, &spec.job.output);
    for path in spec.checkpoint.dir.iter_mut().chain(&mut spec.checkpoint.init) {
        *path = absolute(here, path);
    }
    if spec.checkpoint.resume != "off" && spec.checkpoint.resume != "auto" {
        spec.checkpoint.resume = absolute(here, &spec.checkpoint.resume);
    }
    if spec.job.name.is_empty() {
        spec.job.name =
            path.file_stem().map_or_else(|| "job".into(), |stem| stem.to_string_lossy().into_owned());
    }
    spec
}

/// The path without `.` and `..`.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(Path::new("train.toml"), text, &[]).unwrap_err().to_string()
    }

    #[test]
    fn an_unknown_key_is_shown_in_place_with_the_nearest_known_one() {
        let text = error("[train]\nsteps = 10\nlearning_rat = 1\nlrr = 3e-4\n");
        assert!(text.contains("train.toml:3:1"), "{text}");
        let text = error("[train]\nlrr = 3e-4\n");
        assert!(text.contains("train.toml:2:1") && text.contains("`train.lr`"), "{text}");
        let text = error("[trian]\nlr = 3e-4\n");
        assert!(text.contains("train.toml:1:") && text.contains("[train]"), "{text}");
    }

    #[test]
    fn wrong_types_and_syntax_are_shown_in_place() {
        let text = error("[train]\nsteps = \"many\"\n");
        assert!(text.contains("train.toml:2:9") && text.contains("u64"), "{text}");
        let text = error("[model]\narch = \"bert\"\n");
        assert!(text.contains("train.toml:2:8") && text.contains("gpt2"), "{text}");
        let text = error("[train]\nsteps = = 3\n");
        assert!(text.contains("train.toml:2:"), "{text}");
    }

    #[test]
    fn impossible_values_are_shown_in_place_with_what_was_expected() {
        let text = error("[train]\nlr = -1.0\n");
        assert!(text.contains("train.toml:2:6") && text.contains("above 0"), "{text}");
        // The culprit is a default of the preset: the message still names the key.
        let text = error("[model]\nheads = 3\n");
        assert!(text.contains("model.dim"), "{text}");
    }

    #[test]
    fn flags_win_over_the_environment_and_both_over_the_file() {
        let variables =
            [("XLAUNCH_TRAIN_LR".into(), "0.5".into()), ("XLAUNCH_TRAIN_STEPS".into(), "7".into())];
        let mut overrides = Override::from_environment(variables.into_iter());
        overrides.push(Override::from_flag("train.lr=0.25").unwrap());
        overrides.push(Override::from_flag("model.arch=gpt2").unwrap());
        let spec =
            parse(Path::new("a.toml"), "[train]\nlr = 1.0\nsteps = 1\nbatch = 3\n", &overrides).unwrap();
        assert_eq!((spec.train.lr, spec.train.steps, spec.train.batch), (0.25, 7, 3));
        assert_eq!(spec.model.arch, Some(xlaunch_proto::model::Arch::Gpt2));
    }

    #[test]
    fn a_bad_override_is_named() {
        let error = |argument: &str| {
            let change = Override::from_flag(argument).unwrap();
            parse(Path::new("a.toml"), "", &[change]).unwrap_err().to_string()
        };
        assert!(error("train.stepz=3").contains("train.steps"));
        assert!(error("train.steps=x").contains("--set train.steps=x"));
        assert!(error("train.lr=0").contains("--set train.lr=0"));
    }

    #[test]
    fn paths_are_absolute_and_the_job_is_named_after_the_file() {
        let text = "[data]\ntrain = [\"../**/*.rs\", \"/x/y.txt\"]\n[checkpoint]\ndir = \"ck\"\n";
        let path = Path::new("deploy/tiny.toml");
        let spec = resolve(parse(path, text, &[]).unwrap(), path, Path::new("/home/me"));
        assert_eq!(spec.data.train, ["/home/me/**/*.rs", "/x/y.txt"]);
        assert_eq!((spec.job.output.as_str(), spec.job.name.as_str()), ("/home/me/runs", "tiny"));
        assert_eq!(spec.checkpoint.dir.as_deref(), Some("/home/me/ck"));
    }
}
