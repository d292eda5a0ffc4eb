//! `xlaunch gen`: what packages ship beside the binary, made from the same tables as `--help`.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Arg, Command, Subcommand, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;

use super::console::{End, put};
use super::torchrun;
use xlaunch_agent::Refusal;

#[derive(Debug, Subcommand)]
pub(super) enum Gen {
    /// Write man pages, xlaunch.1 and one per subcommand.
    Man {
        /// Where to; it is made if it does not exist.
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },
    /// Print a shell's completion script.
    Completions {
        /// Whose.
        shell: Shell,
    },
    /// Print the JSON schema of training configurations, for editors.
    Schema,
}

/// Generates; `command` has the subcommands.
pub(super) fn run(what: &Gen, command: Command) -> Result<(), End> {
    let mut command = whole(command);
    match what {
        Gen::Man { dir } => man(dir, command).map_err(|error| {
            let message = format!("failed to write man pages: {error}");
            Refusal::new(ExitCode::Usage, message).into()
        }),
        Gen::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut command, "xlaunch", &mut script);
            put(&script)
        }
        Gen::Schema => put(format!("{:#}\n", schema()).as_bytes()),
    }
}

fn schema() -> serde_json::Value {
    let mut schema = schemars::schema_for!(JobSpec);
    schema.insert("title".into(), "xlaunch training configuration".into());
    schema.to_value()
}

/// The command with the flags of launches, which clap does not parse.
fn whole(command: Command) -> Command {
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

fn man(dir: &Path, mut command: Command) -> io::Result<()> {
    fs_err::create_dir_all(dir)?;
    command.build();
    for subcommand in command.get_subcommands() {
        clap_mangen::generate_to(subcommand.clone(), dir)?;
    }
    fs_err::write(dir.join("xlaunch.1"), main_page(command)?)
}

/// The page of launches, with what clap does not know.
fn main_page(command: Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let man = Man::new(command);
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    man.render_subcommands_section(&mut page)?;
    exit_status().to_writer(&mut page)?;
    environment().to_writer(&mut page)?;
    man.render_version_section(&mut page)?;
    Ok(page)
}

fn exit_status() -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["EXIT STATUS"]);
    for (exit, meaning) in ExitCode::TABLE {
        entry(&mut roff, &exit.code().to_string(), meaning);
    }
    entry(&mut roff, "128+n", "a command's launch was ended by signal n");
    roff
}

fn environment() -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["ENVIRONMENT"]);
    for (name, meaning) in [
        ("PET_FLAG", "the value of a flag of torchrun's, such as PET_NPROC_PER_NODE=8"),
        (
            "XLAUNCH_SECTION_KEY",
            "the value of a key of a training configuration, such as XLAUNCH_TRAIN_LR=3e-4",
        ),
        ("XLAUNCH_SOCKET", "where the daemon of the node is asked"),
        ("PYTHON_EXEC", "the interpreter of scripts"),
        ("XDG_RUNTIME_DIR", "where launches of the user are found, and a daemon of the user's own"),
    ] {
        entry(&mut roff, name, meaning);
    }
    roff
}

fn entry(roff: &mut Roff, term: &str, meaning: &str) {
    roff.control("TP", []);
    roff.text([bold(term)]);
    roff.text([roman(meaning)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_command_is_consistent() {
        whole(crate::cli::command()).debug_assert();
    }

    #[test]
    fn man_pages_know_every_flag_subcommand_and_exit_code() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        run(&Gen::Man { dir: pages.clone() }, crate::cli::command()).unwrap();
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
    }

    #[test]
    fn completions_know_flags_and_subcommands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut whole(crate::cli::command()), "xlaunch", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["nproc-per-node", "max-restarts", "submit", "priority"] {
                assert!(script.contains(word), "{shell} does not know {word}");
            }
        }
    }

    #[test]
    fn the_schema_knows_every_key_with_its_default_and_no_other() {
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
