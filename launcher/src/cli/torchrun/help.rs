//! The text of `--help`, made from the table of flags.

use super::Name;
use super::flags::{self, Flag, Takes};

/// Where the second column begins.
const COLUMN: usize = 38;

/// What xlaunch does.
pub(in crate::cli) const ABOUT: &str =
    "Starts one worker process per GPU, or share of the CPU, and looks after them.";
/// How xlaunch is called, and what for.
const USAGES: [(&str, &str); 5] = [
    ("xlaunch [FLAGS] SCRIPT.py [ARGUMENTS]", "with torchrun's flags and environment"),
    ("xlaunch [FLAGS] -m MODULE [ARGUMENTS]", ""),
    ("xlaunch [FLAGS] -- PROGRAM [ARGUMENTS]", ""),
    ("xlaunch [FLAGS] CONFIG.toml", "trains a GPT with the built-in trainer"),
    ("xlaunch SUBCOMMAND", ""),
];

/// The ways to call xlaunch, a line each.
pub(in crate::cli) fn usage() -> String {
    USAGES.map(|(usage, _)| usage).join("\n")
}

/// All flags with a line each. `subcommands` are those of xlaunch with what they do; `exit_codes` is the text's end.
pub(super) fn text(name: Name, subcommands: &[(String, String)], exit_codes: &str) -> String {
    let mut out = match name {
        Name::Torchrun => "Starts a script once per worker, as torchrun does on one node.\n\n\
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
            flags.iter().filter(|flag| name == Name::Xlaunch || !matches!(flag.name, "set" | "resume"));
        let lines: String = flags.map(|flag| row(&left(flag), flag.help)).collect();
        if !lines.is_empty() {
            out += &format!("\n{heading}:\n{lines}");
        }
    }
    out += "\nUnderscores in names and unambiguous prefixes are understood. Flags of torchrun's may be\n\
        given as variables of the environment instead, such as PET_NPROC_PER_NODE=8.\n\n";
    out + exit_codes
}

fn row(left: &str, right: &str) -> String {
    format!("{left:<width$}{right}\n", left = format!("  {left}"), width = COLUMN)
}

/// Such as `-r, --redirects STREAMS`.
fn left(flag: &Flag) -> String {
    let short = flag.short.map(|letter| format!("-{letter}, ")).unwrap_or_default();
    let value = match flag.takes {
        Takes::Nothing => String::new(),
        Takes::Value(value) => format!(" {value}"),
        Takes::Optional(value) => format!("[={value}]"),
    };
    format!("{short}--{}{value}", flag.name)
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
