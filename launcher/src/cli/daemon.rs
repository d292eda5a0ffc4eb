//! `xlaunch daemon`: the command that `xlaunch.service` runs.

use std::path::{Path, PathBuf};

use clap::Args;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use xlaunch_spec::exit::ExitCode;

use xlaunch_daemon::run::{self, Options};

use super::launch;
use super::output::{answer, print_note};
use crate::render::text::escape;

/// Options of `xlaunch daemon`.
#[derive(Debug, Args)]
pub(super) struct Daemon {
    /// Configuration file [default: /etc/xlaunch/daemon.toml, or ~/.config/xlaunch/daemon.toml if not root]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check FILE, or the file that the daemon would read, print errors and warnings, and exit
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        conflicts_with_all = ["foreground", "state_dir", "socket"]
    )]
    check: Option<Option<PathBuf>>,
    /// Run without systemd: detached processes instead of units, log to stderr
    #[arg(long)]
    foreground: bool,
    /// Directory of the queue and the jobs; overrides daemon.state_dir
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Socket to listen on; overrides daemon.socket
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

pub(super) async fn run(options: Daemon) -> ExitCode {
    let Daemon { config, check, foreground, state_dir, socket } = options;
    if let Some(file) = check {
        return check_config(file.or(config).as_deref());
    }
    log(foreground);
    match run::run(&Options { config, foreground, state_dir, socket }).await {
        Ok(()) => ExitCode::Done,
        Err(refusal) => launch::refuse(&refusal),
    }
}

/// Prints errors and warnings of the configuration to stderr; a valid configuration is reported on stdout.
fn check_config(file: Option<&Path>) -> ExitCode {
    let (errors, warnings) = run::check_config(file);
    for warning in &warnings {
        print_note(&format!("warning: {warning}"));
    }
    for error in &errors {
        print_note(&format!("error: {}", error.trim()));
    }
    if !errors.is_empty() {
        return ExitCode::Usage;
    }
    let file = file.map(Path::to_path_buf).or_else(run::default_config_file);
    answer(&format!("{}\n", escape(&verdict(file.as_deref()))), ExitCode::Done)
}

/// Describes a configuration without errors. Only the default file may be missing.
fn verdict(file: Option<&Path>) -> String {
    match file {
        Some(file) if file.exists() => format!("{}: valid", file.display()),
        Some(file) => format!("{} does not exist; the defaults apply", file.display()),
        None => "the default configuration: valid".into(),
    }
}

/// Sets up logging. Under systemd, events go to the journal with their fields, otherwise to stderr as lines of text.
fn log(foreground: bool) {
    let filter = || {
        let asked = std::env::var("XLAUNCH_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
        let targets = ["xlaunch", "xlaunch_agent", "xlaunch_daemon"].map(|name| (name, LevelFilter::INFO));
        asked.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN).with_targets(targets))
    };
    let under_journald = std::env::var_os("JOURNAL_STREAM").is_some() && !foreground;
    if under_journald && let Ok(journal) = tracing_journald::layer() {
        tracing_subscriber::registry().with(filter()).with(journal.with_field_prefix(None)).init();
        return;
    }
    let lines =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_target(false);
    tracing_subscriber::registry().with(filter()).with(lines).init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_default_file_is_not_called_valid() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("daemon.toml");
        assert_eq!(verdict(Some(&file)), format!("{} does not exist; the defaults apply", file.display()));
        fs_err::write(&file, "").unwrap();
        assert_eq!(verdict(Some(&file)), format!("{}: valid", file.display()));
    }
}
