//! `xlaunch remote`: see [`crate::ssh::remote`].

use std::ffi::OsString;

use clap::Args;
use xlaunch_spec::exit::ExitCode;

use super::output::print_note;
use super::torchrun::Name;
use crate::ssh::remote;

/// Arguments of `xlaunch remote`. They are a complete command line, which [`run`] reads itself.
#[derive(Debug, Args)]
pub(super) struct Remote {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs the arguments with `launch`, or replaces this process by the launch described on stdin if there are none.
pub(super) fn run(arguments: &[OsString], launch: impl FnOnce(Name, &[OsString]) -> ExitCode) -> ExitCode {
    let Some((name, arguments)) = arguments.split_first() else {
        let Err(refusal) = remote::become_launch();
        print_note(&format!("error: {}", refusal.message));
        return refusal.exit;
    };
    match remote::obey_launcher() {
        Ok(()) => launch(Name::of(name), arguments),
        Err(error) => {
            print_note(&format!("error: failed to read from the launching process: {error}"));
            ExitCode::Internal
        }
    }
}
