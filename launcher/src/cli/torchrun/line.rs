//! From arguments to flags and what is to be started. Values are not looked into here.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::Name;
use super::flags::{self, Flag, Takes};

/// A command line, taken apart.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// In the order of the command line.
    pub(super) given: Vec<Given>,
    /// What is to be started.
    pub(super) target: Option<Target>,
}

/// A flag and its value.
#[derive(Debug)]
pub(super) struct Given {
    pub(super) flag: &'static Flag,
    pub(super) value: Option<OsString>,
}

/// What is to be started.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// What Python is to run, and its arguments.
    Script(Vec<OsString>),
    /// A program and its arguments, behind `--`.
    Program(Vec<OsString>),
    /// The built-in trainer, with this configuration.
    Trainer(OsString),
}

impl Line {
    /// Reads flags up to the first argument that is none; everything behind it belongs to the script. Behind a training
    /// configuration, which takes no arguments, there may be more flags. `--help` and `--version` end the line.
    pub(super) fn read(name: Name, arguments: &[OsString]) -> Result<Self, String> {
        let mut line = Self::default();
        let mut rest = arguments;
        while let [first, behind @ ..] = rest {
            rest = behind;
            let bytes = first.as_bytes();
            if let Some(Target::Trainer(config)) = &line.target
                && (bytes == b"--" || !bytes.starts_with(b"-"))
            {
                let (config, first) = (config.to_string_lossy(), first.to_string_lossy());
                return Err(format!(
                    "{config} is a training configuration and takes no arguments, but there is {first}"
                ));
            }
            if bytes == b"--" {
                let command = rest.to_vec();
                let target = if name == Name::Torchrun { Target::Script } else { Target::Program };
                line.target = (!command.is_empty()).then(|| target(command));
                break;
            }
            if bytes == b"-" || !bytes.starts_with(b"-") {
                if name == Name::Torchrun || !bytes.ends_with(b".toml") {
                    line.target = Some(Target::Script([std::slice::from_ref(first), rest].concat()));
                    break;
                }
                line.target = Some(Target::Trainer(first.clone()));
                continue;
            }
            let (flag, attached) = split(bytes)?;
            let value = match (flag.takes, attached) {
                (Takes::Nothing, None) | (Takes::Optional(_), None) => None,
                (Takes::Nothing, Some(_)) => return Err(format!("--{} takes no value", flag.name)),
                (_, Some(value)) => Some(OsStr::from_bytes(value).to_owned()),
                (Takes::Value(_), None) => {
                    let (value, behind) = follows(flag, rest)?;
                    rest = behind;
                    Some(value)
                }
            };
            if let Some(why) = flag.refused {
                return Err(format!("--{} is not supported: {why}", flag.name));
            }
            line.given.push(Given { flag, value });
            if matches!(flag.name, "help" | "version") {
                break;
            }
        }
        Ok(line)
    }

    /// The last of this name.
    pub(super) fn last(&self, name: &str) -> Option<&Given> {
        debug_assert!(flags::all().any(|flag| flag.name == name), "{name} is not in the table");
        self.given.iter().rfind(|given| given.flag.name == name)
    }
}

/// The flag that an argument names, and the value attached to it: `--flag=value`, `-r3` or `-r=3`.
fn split(argument: &[u8]) -> Result<(&'static Flag, Option<&[u8]>), String> {
    if let Some(long) = argument.strip_prefix(b"--") {
        let mut parts = long.splitn(2, |byte| *byte == b'=');
        let name = String::from_utf8_lossy(parts.next().unwrap_or_default());
        return Ok((flags::find(&name)?, parts.next()));
    }
    let [letter, attached @ ..] = argument.get(1..).unwrap_or_default() else {
        return Err("- is no flag".into());
    };
    let Some(flag) = flags::all().find(|flag| flag.short == Some(char::from(*letter))) else {
        return Err(format!("unknown flag {}; --help lists all", String::from_utf8_lossy(argument)));
    };
    let attached = attached.strip_prefix(b"=").unwrap_or(attached);
    Ok((flag, (argument.len() > 2).then_some(attached)))
}

/// The value in the next argument, which is none where it looks like a flag.
fn follows<'a>(flag: &Flag, rest: &'a [OsString]) -> Result<(OsString, &'a [OsString]), String> {
    let is_flag = |next: &OsString| {
        next.as_bytes().starts_with(b"-") && next.to_str().is_none_or(|text| text.parse::<f64>().is_err())
    };
    match rest {
        [next, behind @ ..] if next == "-" || !is_flag(next) => Ok((next.clone(), behind)),
        [next, ..] => Err(format!(
            "--{} needs a value, but {} follows; a value that begins with a dash is written --{0}=VALUE",
            flag.name,
            next.to_string_lossy()
        )),
        [] => Err(format!("--{} needs a value", flag.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    /// `flag=value flag ...`, and the target.
    fn read(name: Name, line: &str) -> (String, Option<Target>) {
        let read = Line::read(name, &arguments(line)).unwrap();
        let shown = read.given.iter().map(|given| match &given.value {
            Some(value) => format!("{}={}", given.flag.name, value.display()),
            None => given.flag.name.to_owned(),
        });
        (shown.collect::<Vec<_>>().join(" "), read.target)
    }

    #[test]
    fn every_way_to_write_a_flag_is_understood() {
        for (line, flags) in [
            ("--nproc-per-node 2", "nproc-per-node=2"),
            ("--nproc_per_node=2", "nproc-per-node=2"),
            ("--nproc 2 --nproc=3", "nproc-per-node=2 nproc-per-node=3"),
            ("-r 3 -t=1 -t2 -m", "redirects=3 tee=1 tee=2 module"),
            ("--role=a=b --role=-x --role= --node-rank -1", "role=a=b role=-x role= node-rank=-1"),
            ("--resume --resume=x", "resume resume=x"),
        ] {
            assert_eq!(read(Name::Xlaunch, line), (flags.into(), None), "{line}");
        }
    }

    #[test]
    fn everything_behind_what_is_started_belongs_to_it() {
        let script = |line| Some(Target::Script(arguments(line)));
        let program = |line| Some(Target::Program(arguments(line)));
        for (name, line, flags, target) in [
            (Name::Xlaunch, "-m x.y --nproc 3 -- -h", "module", script("x.y --nproc 3 -- -h")),
            (Name::Xlaunch, "--nproc 2 -- ./a.out -h", "nproc-per-node=2", program("./a.out -h")),
            (Name::Torchrun, "-- a.toml --d", "", script("a.toml --d")),
            (Name::Torchrun, "--tee 3 a.toml --d", "tee=3", script("a.toml --d")),
            (
                Name::Xlaunch,
                "--nproc 2 a.toml --set b.c=d",
                "nproc-per-node=2 set=b.c=d",
                Some(Target::Trainer("a.toml".into())),
            ),
            (Name::Xlaunch, "--help --nonsense", "help", None),
            (Name::Xlaunch, "--", "", None),
        ] {
            assert_eq!(read(name, line), (flags.into(), target), "{line}");
        }
    }

    #[test]
    fn what_cannot_be_a_flag_is_refused() {
        for (line, words) in [
            ("--nproc", "--nproc-per-node needs a value"),
            (
                "--role --standalone x.py",
                "--role needs a value, but --standalone follows; a value that begins with a dash is written --role=VALUE",
            ),
            ("--standalone=1", "--standalone takes no value"),
            ("-mx", "--module takes no value"),
            ("-x", "unknown flag -x; --help lists all"),
            (
                "--print-completion bash",
                "--print-completion is not supported: `xlaunch gen completions` prints a script",
            ),
            ("a.toml b", "a.toml is a training configuration and takes no arguments, but there is b"),
        ] {
            assert_eq!(Line::read(Name::Xlaunch, &arguments(line)).unwrap_err(), words, "{line}");
        }
    }
}
