//! The help text of every command, as snapshots: a change of wording is reviewed as text.

use clap::CommandFactory;

use super::Cli;
use super::torchrun::{Name, Request, Scope, parse};

/// Columns of the texts; on a terminal it is the terminal's width.
const WIDTH: usize = 100;

#[test]
fn help_of_every_command() {
    let mut command = Cli::command().term_width(WIDTH);
    command.build();
    let mut waiting: Vec<clap::Command> = vec![command];
    while let Some(mut command) = waiting.pop() {
        let is_shown = |it: &&clap::Command| !it.is_hide_set() && it.get_name() != "help";
        waiting.extend(command.get_subcommands().filter(is_shown).cloned());
        if command.get_name() == "xlaunch" {
            continue;
        }
        let name = command.get_bin_name().unwrap_or_default().replace(' ', "-");
        insta::assert_snapshot!(name, command.render_long_help().to_string());
    }
}

#[test]
fn help_of_launches() {
    for (file, name) in [("xlaunch", Name::Xlaunch), ("torchrun", Name::Torchrun)] {
        let parsed = parse(name, &["--help".into()], &|_| None, Scope::OneNode);
        let Ok(Request::Text(text)) = parsed else { panic!("--help is not a text") };
        insta::assert_snapshot!(file, text);
    }
}
