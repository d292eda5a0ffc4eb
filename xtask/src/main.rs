//! Developer commands for this repository, run as `cargo xtask COMMAND`.
//!
//! `check` enforces rules that neither the compiler nor clippy checks; `proto` writes generated files, which `check`
//! compares with the committed ones; `test` runs the tests; `docs` runs the commands shown in the documentation;
//! `lines` counts the product; `dist` makes the files of a release.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool")]

mod check;
mod dist;
mod docs;
mod lines;
mod proto;
mod suites;
mod syntax;
mod violation;
mod workspace;

use std::process::ExitCode;

use workspace::Workspace;

type Error = Box<dyn std::error::Error>;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  check [NAME...]   report violations of the repository's rules, per crate; NAMEs select checks
  proto             generate proto/src/generated/ from proto/xlaunch/v1/*.proto
  test [--all]      run the tests, except the large suites; with --all, those too; with --all --no-run, build all
  docs [FILE...]    run the ```sh run blocks of the documentation, or of FILEs, on target/release/xlaunch
  lines             print the lines of the product, by crate
  dist [--fast | --target TRIPLE...]
                    make the files of a release in target/dist, for all platforms or these; with --fast, from the
                    release build of this machine";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs a command. Returns whether it found nothing wrong.
fn run(arguments: &[String]) -> Result<bool, Error> {
    let Some((command, rest)) = arguments.split_first() else { return Err(USAGE.into()) };
    let workspace = Workspace::find()?;
    match command.as_str() {
        "check" => check::run(&workspace, rest),
        "proto" => proto::write(&workspace).map(|()| true),
        "test" => suites::run(&workspace, rest),
        "docs" => docs::run(&workspace, rest),
        "dist" => dist::run(&workspace, rest),
        "lines" => lines::print(&workspace).map(|()| true),
        _ => Err(USAGE.into()),
    }
}
