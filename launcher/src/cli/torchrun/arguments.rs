//! The flags as clap arguments, from which man pages and completions are generated. Nothing is parsed with them.

use clap::{Arg, ArgAction, ValueHint};

use super::flags::{self, Flag, Takes};

/// Every supported flag except `--help`, which clap adds itself.
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
