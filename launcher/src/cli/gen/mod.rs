//! `xlaunch gen`: files that packages ship, generated from the same tables as `--help` and from the types of the
//! configuration.

mod config_docs;
mod man;

use std::path::PathBuf;

use clap::{Arg, Command, Subcommand, ValueHint};
use clap_complete::Shell;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;

use super::output::{QueryError, print};
use super::torchrun;
use xlaunch_spec::refusal::Refusal;

#[derive(Debug, Subcommand)]
pub(super) enum Gen {
    /// Write man pages: xlaunch.1 and one per subcommand
    Man {
        /// Output directory; created if it does not exist
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// Shell to complete for
        shell: Shell,
    },
    /// Print the JSON schema of training configurations, for editors
    Schema,
    /// Print the reference of training configurations as Markdown tables
    ConfigDocs,
}

/// Generates one kind of output. `command` is the definition of the subcommands.
pub(super) fn run(what: &Gen, command: Command) -> Result<ExitCode, QueryError> {
    let mut command = with_launch_flags(command);
    match what {
        Gen::Man { dir } => man::write(dir, command)
            .map_err(|error| Refusal::new(ExitCode::Usage, format!("failed to write man pages: {error}")))?,
        Gen::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut command, "xlaunch", &mut script);
            print(&script)?;
        }
        Gen::Schema => print(format!("{:#}\n", schema()).as_bytes())?,
        Gen::ConfigDocs => print(config_docs::tables(&schema()).as_bytes())?,
    }
    Ok(ExitCode::Done)
}

fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(JobSpec);
    schema.insert("title".into(), "xlaunch training configuration".into());
    schema.to_value()
}

/// Adds the flags of launches, which clap does not parse.
fn with_launch_flags(command: Command) -> Command {
    let target = Arg::new("target")
        .value_name("TARGET")
        .help("SCRIPT.py, MODULE, -- PROGRAM or CONFIG.toml, with its arguments")
        .num_args(0..)
        .trailing_var_arg(true)
        .value_hint(ValueHint::FilePath);
    command
        .override_usage(torchrun::usage())
        .disable_version_flag(true)
        .args(torchrun::arguments())
        .arg(target)
        .disable_help_subcommand(true)
        .subcommand_required(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_definition;

    #[test]
    fn definition_with_launch_flags_is_consistent() {
        with_launch_flags(command_definition()).debug_assert();
    }

    #[test]
    fn man_pages_list_every_flag_subcommand_and_exit_code() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        run(&Gen::Man { dir: pages.clone() }, command_definition()).unwrap();
        let page = |name: &str| fs_err::read_to_string(pages.join(name)).unwrap().replace('\\', "");
        let main = page("xlaunch.1");
        for flag in torchrun::arguments() {
            let long = format!("--{}", flag.get_long().unwrap());
            assert!(main.contains(&long), "{long} is not in {main}");
        }
        for (name, _) in crate::cli::subcommands() {
            assert!(main.contains(&format!("xlaunch-{name}(1)")), "{name} is not in {main}");
            assert!(page(&format!("xlaunch-{name}.1")).contains(&format!("xlaunch {name}")), "{name}");
        }
        for (exit, meaning) in ExitCode::TABLE {
            assert!(main.contains(&format!("fB{}fR\n{meaning}", exit.code())), "{exit:?} is not in {main}");
        }
        assert!(page("xlaunch-bench-train.1").contains("--warmup"));
        assert!(!pages.join("xlaunch-agent.1").exists(), "only xlaunch itself runs this subcommand");
    }

    #[test]
    fn completions_include_flags_and_subcommands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish] {
            let mut script = Vec::new();
            clap_complete::generate(
                shell,
                &mut with_launch_flags(command_definition()),
                "xlaunch",
                &mut script,
            );
            let script = String::from_utf8(script).unwrap();
            for word in ["nproc-per-node", "max-restarts", "submit", "priority"] {
                assert!(script.contains(word), "{word} is not in the script for {shell}");
            }
        }
    }

    #[test]
    fn schema_has_every_key_with_its_default_and_no_other() {
        let schema = schema();
        let defaults = serde_json::to_value(JobSpec::default()).unwrap();
        let named = |reference: &str| &schema["$defs"][reference.rsplit('/').next().unwrap()];
        for (section, keys) in defaults.as_object().unwrap() {
            let found = &schema["properties"][section];
            let keys_of = named(found["$ref"].as_str().unwrap());
            assert_eq!(keys_of["additionalProperties"], false, "{section}");
            for (key, default) in keys.as_object().unwrap() {
                let known = &keys_of["properties"][key];
                assert!(known.is_object(), "{section}.{key} is not in {keys_of:#}");
                assert!(known["description"].is_string(), "{section}.{key}");
                assert_eq!(&known["default"], default, "{section}.{key}");
            }
        }
        assert_eq!(schema["additionalProperties"], false);
    }
}
