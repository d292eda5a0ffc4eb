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
pub(super) fn run(what: &Gen, command: &Command) -> Result<ExitCode, QueryError> {
    match what {
        Gen::Man { dir } => man::write(dir, with_launch_flags(command).arg(target()))
            .map_err(|error| Refusal::new(ExitCode::Usage, format!("failed to write man pages: {error}")))?,
        Gen::Completions { shell } => print(completions(*shell, command).as_bytes())?,
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

/// Returns the subcommands that users run, and the flags of launches, which clap does not parse.
fn with_launch_flags(command: &Command) -> Command {
    // clap cannot remove subcommands from a definition.
    Command::new("xlaunch")
        .about(torchrun::ABOUT)
        .version(env!("CARGO_PKG_VERSION"))
        .override_usage(torchrun::usage())
        .disable_version_flag(true)
        .args(torchrun::arguments())
        .disable_help_subcommand(true)
        .subcommands(command.get_subcommands().filter(|it| !it.is_hide_set()).cloned())
}

fn target() -> Arg {
    Arg::new("target")
        .value_name("TARGET")
        .help("SCRIPT.py, MODULE, -- PROGRAM or CONFIG.toml, with its arguments")
        .num_args(0..)
        .trailing_var_arg(true)
        .value_hint(ValueHint::FilePath)
}

fn completions(shell: Shell, command: &Command) -> String {
    let launches = with_launch_flags(command);
    let script = |mut command: Command| {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, "xlaunch", &mut script);
        String::from_utf8_lossy(&script).into_owned()
    };
    match shell {
        Shell::Bash => with_attached_values(&script(launches.arg(target()))),
        // zsh would take a subcommand for an optional target before it.
        Shell::Zsh => with_targets(&script(launches)),
        Shell::Fish => script(launches.clone().arg(target())) + &without_files(&launches),
        _ => script(launches.arg(target())),
    }
}

/// Makes bash complete the value in `--option=VALUE`, which it splits into three words.
fn with_attached_values(script: &str) -> String {
    let previous = "    prev=\"$3\"\n";
    let attached = "    [[ \"${prev}\" == \"=\" ]] && prev=\"${COMP_WORDS[COMP_CWORD-2]}\"\n";
    script.replacen(previous, &format!("{previous}{attached}"), 1)
}

/// Keeps fish from completing files where a subcommand takes none.
fn without_files(command: &Command) -> String {
    let takes_no_path = |command: &&Command| {
        let mut values = command.get_positionals().peekable();
        values.peek().is_some() && values.all(|value| value.get_value_hint() == ValueHint::Other)
    };
    let commands = command.get_subcommands().filter(takes_no_path).map(Command::get_name);
    let line = |name| format!("complete -c xlaunch -n \"__fish_xlaunch_using_subcommand {name}\" -f\n");
    commands.map(line).collect()
}

/// Makes zsh complete files beside subcommands, and flags and files after a word that is not a subcommand.
fn with_targets(script: &str) -> String {
    // With two colons, zsh would forget the words before these values, and complete the first one as a command. With an
    // empty action, it would not insert the flag that a word begins.
    let script: Vec<String> = script
        .lines()
        .map(|line| match line.strip_prefix("'*::") {
            Some(values) => format!("'*:{}", values.replace(":' \\", ":( )' \\")),
            None => line.into(),
        })
        .collect();
    let script = script.join("\n") + "\n";
    let (arguments, subcommands) =
        ("_arguments \"${_arguments_options[@]}\" : \\\n", "\":: :_xlaunch_commands\"");
    let last = "        esac\n    ;;\nesac\n}\n";
    let flags = script.split_once(arguments).and_then(|(_, rest)| rest.split_once(subcommands));
    let flags = flags.map_or("", |(flags, _)| flags);
    let other = format!("(*)\n{arguments}{flags}'*:target:_files' \\\n&& ret=0\n;;\n{last}");
    script.replacen(subcommands, "\"1: :{_xlaunch_commands; _files}\"", 1).replacen(last, &other, 1)
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;
    use crate::cli::command_definition;

    #[test]
    fn definition_with_launch_flags_is_consistent() {
        with_launch_flags(&command_definition()).arg(target()).debug_assert();
    }

    #[test]
    fn man_pages_list_every_flag_subcommand_and_exit_code() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        run(&Gen::Man { dir: pages.clone() }, &command_definition()).unwrap();
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
            let script = completions(shell, &command_definition());
            for word in ["nproc-per-node", "max-restarts", "submit", "priority"] {
                assert!(script.contains(word), "{word} is not in the script for {shell}");
            }
            assert!(!script.contains("Run one job of a node's daemon"), "a hidden subcommand, {shell}");
        }
    }

    #[test]
    fn zsh_gets_targets_beside_subcommands() {
        let script = completions(Shell::Zsh, &command_definition());
        assert!(script.contains("{_xlaunch_commands; _files}") && script.contains("'*:target:_files'"));
        assert!(!script.contains("$line[2]"), "a word before the subcommand");
    }

    #[test]
    fn bash_completes_attached_values() {
        let script = completions(Shell::Bash, &command_definition());
        let line = "COMP_WORDS=(xlaunch serve --device = c) COMP_CWORD=4
            _xlaunch xlaunch c =; echo ${COMPREPLY[@]}";
        let output =
            process::Command::new("bash").args(["-c", &format!("{script}\n{line}")]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "cuda cpu\n", "{output:?}");
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
