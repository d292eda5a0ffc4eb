//! The text of `--help`, and the arguments of man pages and completions, generated from the table of flags.

use clap::{Arg, ArgAction, ValueHint};

use super::Name;
use super::flags::{self, Flag, Takes};

/// Column at which descriptions start.
const DESCRIPTION_COLUMN: usize = 38;

pub(in crate::cli) const ABOUT: &str =
    "Launches and supervises one worker process per GPU, or per share of the CPU cores.";
/// Forms of the command line, each with a description.
const USAGES: [(&str, &str); 5] = [
    ("xlaunch [FLAGS] SCRIPT.py [ARGUMENTS]", "a Python script, as with torchrun"),
    ("xlaunch [FLAGS] -m MODULE [ARGUMENTS]", "a Python module"),
    ("xlaunch [FLAGS] -- PROGRAM [ARGUMENTS]", "any other program"),
    ("xlaunch [FLAGS] CONFIG.toml", "the built-in GPT trainer"),
    ("xlaunch SUBCOMMAND", "see below"),
];

/// Returns the forms of the command line, one per line.
pub(in crate::cli) fn usage() -> String {
    USAGES.map(|(usage, _)| usage).join("\n")
}

/// Returns the whole text. `subcommands` are names and descriptions.
pub(super) fn text(name: Name, subcommands: &[(String, String)], exit_codes: &str) -> String {
    let mut out = match name {
        Name::Torchrun => "Launches a script once per worker, as torchrun does.\n\n\
            Usage:\n  torchrun [FLAGS] SCRIPT [ARGUMENTS]\n  torchrun [FLAGS] -m MODULE [ARGUMENTS]\n"
            .to_owned(),
        Name::Xlaunch => {
            let line = |(usage, what)| format!("  {:<42}{what}", usage).trim_end().to_owned() + "\n";
            let usages: String = USAGES.map(line).concat();
            format!("{ABOUT}\n\nUsage:\n{usages}")
        }
    };
    if name == Name::Xlaunch {
        out += "\nSubcommands:\n";
        out.extend(subcommands.iter().map(|(name, about)| row(name, about)));
    }
    for (heading, flags) in flags::GROUPS {
        let flags =
            flags.iter().filter(|flag| name == Name::Xlaunch || !flags::TRAINING.contains(&flag.name));
        let lines: String = flags.map(|flag| row(&left(flag), flag.help)).collect();
        if !lines.is_empty() {
            out += &format!("\n{heading}:\n{lines}");
        }
    }
    out += "\nNames may be abbreviated and spelled with underscores. torchrun's flags can also be set by\n\
        environment variables, such as PET_NPROC_PER_NODE=8.\n\n";
    out + exit_codes
}

fn row(left: &str, right: &str) -> String {
    format!("{left:<width$}{right}\n", left = format!("  {left}"), width = DESCRIPTION_COLUMN)
}

/// Returns the left column of a flag, such as `-r, --redirects STREAMS`.
fn left(flag: &Flag) -> String {
    let short = flag.short.map(|letter| format!("-{letter}, ")).unwrap_or_default();
    let value = match flag.takes {
        Takes::Nothing => String::new(),
        Takes::Value(value) => format!(" {value}"),
        Takes::Optional(value) => format!("[={value}]"),
    };
    format!("{short}--{}{value}", flag.name)
}

/// Returns the flags as clap arguments, from which man pages and completions are generated. Nothing is parsed with
/// them. `--help` is missing, because clap adds it itself.
pub(in crate::cli) fn arguments() -> Vec<Arg> {
    let mut all = Vec::new();
    for (heading, flags) in flags::GROUPS {
        let accepted = flags.iter().filter(|flag| flag.refused.is_none() && flag.name != "help");
        all.extend(accepted.map(|flag| argument(flag).help_heading(*heading)));
    }
    all
}

fn argument(flag: &Flag) -> Arg {
    let argument = Arg::new(flag.name).long(flag.name).help(flag.help);
    let argument = match flag.short {
        Some(letter) => argument.short(letter),
        None => argument,
    };
    let valued = |name: &'static str| {
        let hint = match name {
            "DIR" => ValueHint::DirPath,
            "PATH" => ValueHint::AnyPath,
            "HOST" => ValueHint::Hostname,
            _ => ValueHint::Other,
        };
        argument.clone().action(ArgAction::Append).value_name(name).value_hint(hint)
    };
    match flag.takes {
        Takes::Nothing => argument.action(ArgAction::SetTrue),
        Takes::Value(name) => valued(name),
        Takes::Optional(name) => valued(name).num_args(0..=1).require_equals(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_has_one_line_of_at_most_100_columns() {
        for name in [Name::Xlaunch, Name::Torchrun] {
            let help = text(name, &[("status".into(), "Show it.".into())], "Exit codes:\n");
            assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
            for flag in flags::all().filter(|flag| flag.of_torchrun) {
                let lines =
                    help.lines().filter(|line| line.contains(&left(flag)) && line.contains(flag.help));
                assert_eq!(lines.count(), 1, "{}", flag.name);
            }
        }
    }
}
