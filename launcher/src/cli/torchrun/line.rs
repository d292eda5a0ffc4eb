//! Splits arguments into flags and target. Values of flags are not parsed here.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::Name;
use super::flags::{self, Flag, Takes};
use xlaunch_agent::config::keys;
use xlaunch_spec::command::quote_line;
use xlaunch_spec::job::JobSpec;

/// A command line, split but not yet interpreted.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Flags in the order of the command line.
    pub(super) given: Vec<Given>,
    pub(super) target: Option<Target>,
    /// Old and new name of each flag that was given by its former name.
    pub(super) renamed: Vec<(String, &'static str)>,
}

/// A flag and its value.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) flag: &'static Flag,
    /// The flag as written on the command line, with dashes and without the value: `--nproc`, `-r`.
    pub(super) written: String,
    pub(super) value: Option<OsString>,
}

/// The target of a launch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A script or module for Python, and its arguments.
    Script(Vec<OsString>),
    /// A program and its arguments, given after `--`.
    Program(Vec<OsString>),
    /// The built-in trainer, with this configuration.
    Trainer(OsString),
}

impl Line {
    /// Reads flags up to the target. All arguments after a script or program belong to it; a training configuration
    /// takes no arguments, so flags may follow it. `--help` and `--version` end the line.
    pub(super) fn read(name: Name, arguments: &[OsString]) -> Result<Self, String> {
        let mut line = Self::default();
        let mut rest = arguments;
        while let [first, after @ ..] = rest {
            rest = after;
            let bytes = first.as_bytes();
            let is_flag = bytes.starts_with(b"-") && bytes != b"-" && bytes != b"--";
            if is_flag {
                rest = line.read_flag(bytes, rest)?;
                if line.given.last().is_some_and(|given| matches!(given.flag.name, "help" | "version")) {
                    break;
                }
            } else if let Some(Target::Trainer(config)) = &line.target {
                let problem = format!(
                    "{} is a training configuration and takes no arguments, but there is {}",
                    config.display(),
                    first.display()
                );
                return Err(line.with_resume_hint(problem, std::slice::from_ref(first)));
            } else if bytes == b"--" {
                let command = rest.to_vec();
                let target = if name == Name::Torchrun { Target::Script } else { Target::Program };
                line.target = (!command.is_empty()).then(|| target(command));
                break;
            } else if name == Name::Xlaunch && bytes.ends_with(b".toml") {
                line.target = Some(Target::Trainer(first.clone()));
            } else {
                // torchrun's parser drops a `--` between a script and its arguments.
                let arguments = rest.strip_prefix(&[OsString::from("--")]).unwrap_or(rest);
                line.target = Some(Target::Script([std::slice::from_ref(first), arguments].concat()));
                break;
            }
        }
        Ok(line)
    }

    /// Adds the flag in `argument`, whose value may be the first element of `rest`. Returns the remaining arguments.
    fn read_flag<'a>(&mut self, argument: &[u8], mut rest: &'a [OsString]) -> Result<&'a [OsString], String> {
        let (flag, attached) = split(argument).map_err(|error| self.explain(error, argument, rest))?;
        let written = written(argument);
        if let (Takes::Nothing, Some(more)) = (flag.takes, attached)
            && has_more_letters(argument, more)
        {
            // Letters may share a dash, as in `-mr3`.
            self.given.push(Given { flag, written, value: None });
            return self.read_flag(&[b"-", more].concat(), rest);
        }
        let value = match (flag.takes, attached) {
            (Takes::Nothing | Takes::Optional(_), None) => None,
            (Takes::Nothing, Some(_)) => return Err(format!("{written} takes no value")),
            (_, Some(value)) => Some(OsStr::from_bytes(value).to_owned()),
            (Takes::Value(_), None) => {
                let (value, after) = following_value(&written, rest)?;
                rest = after;
                Some(value)
            }
        };
        if let Some(why) = flag.refused {
            return Err(format!("{written} is not supported: {why}"));
        }
        let name = long_name(argument).unwrap_or_default();
        self.renamed.extend(flags::renamed(&name).map(|new| (name.into_owned(), new)));
        self.given.push(Given { flag, written, value });
        Ok(rest)
    }

    /// Extends the error about an unknown flag after a training configuration with the way to set a training key.
    fn explain(&self, error: String, argument: &[u8], rest: &[OsString]) -> String {
        let Some(name) = long_name(argument).filter(|_| matches!(self.target, Some(Target::Trainer(_))))
        else {
            return error;
        };
        let attached =
            argument.iter().position(|byte| *byte == b'=').map(|at| OsStr::from_bytes(&argument[at + 1..]));
        let following =
            rest.first().filter(|next| !next.as_bytes().starts_with(b"--")).map(OsString::as_os_str);
        let value = attached.or(following).unwrap_or(OsStr::new("VALUE"));
        let setting = format!("{}={}", training_key(&name.replace('-', "_")), value.display());
        format!("{error}; a training key is set with `--set {}`", quote_line([OsStr::new(&setting)]))
    }

    /// Returns the last flag of this name, which overrides earlier ones.
    pub(super) fn last(&self, name: &str) -> Option<&Given> {
        assert!(flags::all().any(|flag| flag.name == name), "{name} is not in the table");
        self.given.iter().rfind(|given| given.flag.name == name)
    }

    /// Adds advice to a problem with surplus arguments that follow `--resume`, whose value is always attached.
    pub(super) fn with_resume_hint(&self, problem: String, arguments: &[OsString]) -> String {
        match (self.given.last(), arguments) {
            (Some(Given { flag, value: None, .. }), [path, ..]) if flag.name == "resume" => {
                format!("{problem}; to resume from it, write `--resume={}`", path.display())
            }
            _ => problem,
        }
    }
}

/// Returns the flag that an argument names, and the value attached to it: `--flag=value`, `-r3` or `-r=3`.
fn split(argument: &[u8]) -> Result<(&'static Flag, Option<&[u8]>), String> {
    if let Some(name) = long_name(argument) {
        let value = argument.iter().position(|byte| *byte == b'=').map(|at| &argument[at + 1..]);
        return Ok((flags::find(&name)?, value));
    }
    let [letter, attached @ ..] = argument.get(1..).unwrap_or_default() else {
        return Err("- is not a flag".into());
    };
    let Some(flag) = flags::all().find(|flag| flag.short == Some(char::from(*letter))) else {
        return Err(flags::unknown_letters(&String::from_utf8_lossy(argument)));
    };
    let attached = attached.strip_prefix(b"=").unwrap_or(attached);
    Ok((flag, (argument.len() > 2).then_some(attached)))
}

/// Returns whether the rest of an argument is further flags of one letter.
fn has_more_letters(argument: &[u8], rest: &[u8]) -> bool {
    let is_letter = |letter: &u8| flags::all().any(|flag| flag.short == Some(char::from(*letter)));
    long_name(argument).is_none() && argument.get(2) != Some(&b'=') && rest.first().is_some_and(is_letter)
}

/// Returns `SECTION.KEY` of the training key called `name`, or the placeholder `SECTION.name` unless exactly one key
/// has this name.
fn training_key(name: &str) -> String {
    let known = keys::of(&JobSpec::default());
    let is_meant = |key: &&String| *key == name || key.split_once('.').is_some_and(|(_, key)| key == name);
    let found: Vec<&String> = known.iter().filter(is_meant).collect();
    match &found[..] {
        [key] => (*key).clone(),
        // `lr` is that of `[train]`, although other sections have one.
        several => match several.iter().find(|key| key.starts_with("train.")) {
            Some(key) => (**key).clone(),
            None => format!("SECTION.{name}"),
        },
    }
}

/// Returns a flag without its value: `--nproc` for `--nproc=2`, `-r` for `-r3`.
fn written(argument: &[u8]) -> String {
    match long_name(argument) {
        Some(name) => format!("--{name}"),
        None => argument.iter().take(2).map(|byte| char::from(*byte)).collect(),
    }
}

/// Returns `name` for `--name` and `--name=value`.
fn long_name(argument: &[u8]) -> Option<Cow<'_, str>> {
    let name = argument.strip_prefix(b"--")?.split(|byte| *byte == b'=').next();
    Some(String::from_utf8_lossy(name.unwrap_or_default()))
}

/// Takes the value from the next argument. An argument that looks like a flag is not a value; a negative number is.
fn following_value<'a>(written: &str, rest: &'a [OsString]) -> Result<(OsString, &'a [OsString]), String> {
    let is_flag = |next: &OsString| {
        next.as_bytes().starts_with(b"-") && next.to_str().is_none_or(|text| text.parse::<f64>().is_err())
    };
    match rest {
        [next, after @ ..] if next == "-" || !is_flag(next) => Ok((next.clone(), after)),
        [next, ..] => Err(format!(
            "{written} needs a value, but {} follows; write a value that starts with a dash as {written}=VALUE",
            next.to_string_lossy()
        )),
        [] => Err(format!("{written} needs a value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    /// Returns `flag=value flag ...`, and the target.
    fn read(name: Name, line: &str) -> (String, Option<Target>) {
        let read = Line::read(name, &arguments(line)).unwrap();
        let shown = read.given.iter().map(|given| match &given.value {
            Some(value) => format!("{}={}", given.flag.name, value.display()),
            None => given.flag.name.to_owned(),
        });
        (shown.collect::<Vec<_>>().join(" "), read.target)
    }

    #[test]
    fn every_spelling_of_a_flag_is_accepted() {
        for (line, flags) in [
            ("--nproc-per-node 2", "nproc-per-node=2"),
            ("--nproc_per_node=2", "nproc-per-node=2"),
            ("--nproc 2 --nproc=3", "nproc-per-node=2 nproc-per-node=3"),
            ("-r 3 -t=1 -t2 -m", "redirects=3 tee=1 tee=2 module"),
            ("-mr3 -mt 1 -mh", "module redirects=3 module tee=1 module help"),
            ("--role=a=b --role=-x --role= --node-rank -1", "role=a=b role=-x role= node-rank=-1"),
            ("--resume --resume=x", "resume resume=x"),
        ] {
            assert_eq!(read(Name::Xlaunch, line), (flags.into(), None), "{line}");
        }
    }

    #[test]
    fn arguments_after_the_target_belong_to_it() {
        let script = |line| Some(Target::Script(arguments(line)));
        let program = |line| Some(Target::Program(arguments(line)));
        for (name, line, flags, target) in [
            (Name::Xlaunch, "-m x.y --nproc 3 -- -h", "module", script("x.y --nproc 3 -- -h")),
            (Name::Xlaunch, "--nproc 2 -- ./a.out -h", "nproc-per-node=2", program("./a.out -h")),
            (Name::Torchrun, "-- a.toml --d", "", script("a.toml --d")),
            (Name::Torchrun, "-- a.py -- b", "", script("a.py -- b")),
            (Name::Xlaunch, "a.py -- -- b", "", script("a.py -- b")),
            (Name::Xlaunch, "a.py b -- c", "", script("a.py b -- c")),
            (Name::Torchrun, "--tee 3 a.toml --d", "tee=3", script("a.toml --d")),
            (
                Name::Xlaunch,
                "--nproc 2 a.toml --set b.c=d",
                "nproc-per-node=2 set=b.c=d",
                Some(Target::Trainer("a.toml".into())),
            ),
            (Name::Xlaunch, "--help --nonsense", "help", None),
            (Name::Xlaunch, "-V", "version", None),
            (Name::Xlaunch, "--", "", None),
        ] {
            assert_eq!(read(name, line), (flags.into(), target), "{line}");
        }
    }

    #[test]
    fn invalid_flags_are_refused() {
        for (line, words) in [
            ("--nproc", "--nproc needs a value"),
            (
                "-r --tee 3 x.py",
                "-r needs a value, but --tee follows; write a value that starts with a dash as -r=VALUE",
            ),
            (
                "--role --standalone x.py",
                "--role needs a value, but --standalone follows; write a value that starts with a dash as --role=VALUE",
            ),
            ("--standalone=1", "--standalone takes no value"),
            ("-mx", "-m takes no value"),
            ("-m=r3", "-m takes no value"),
            ("-x", "unknown flag -x; see --help"),
            ("-np 2 x.py", "unknown flag -np; did you mean --nproc-per-node?"),
            (
                "--print-completion bash",
                "--print-completion is not supported: `xlaunch gen completions` prints a script",
            ),
            ("--lr 3 a.py", "unknown flag --lr; see --help"),
            ("a.toml --lr 3", "unknown flag --lr; see --help; a training key is set with `--set train.lr=3`"),
            (
                "a.toml --min-lr-ratio=0.5",
                "unknown flag --min-lr-ratio; see --help; a training key is set with `--set train.min_lr_ratio=0.5`",
            ),
            (
                "a.toml --wrong -1",
                "unknown flag --wrong; see --help; a training key is set with `--set SECTION.wrong=-1`",
            ),
            ("a.toml b", "a.toml is a training configuration and takes no arguments, but there is b"),
            (
                "a.toml --resume b",
                "a.toml is a training configuration and takes no arguments, but there is b; to resume from it, write \
                 `--resume=b`",
            ),
        ] {
            assert_eq!(Line::read(Name::Xlaunch, &arguments(line)).unwrap_err(), words, "{line}");
        }
    }

    #[test]
    fn former_name_of_a_flag_is_noted() {
        let line =
            Line::read(Name::Xlaunch, &arguments("--silence=5 --stall_timeout 6 a.py --silence 7")).unwrap();
        assert_eq!(line.renamed, [("silence".to_owned(), "stall-timeout")]);
        let given: Vec<_> = line.given.iter().map(|given| given.flag.name).collect();
        assert_eq!(given, ["stall-timeout", "stall-timeout"]);
    }
}
