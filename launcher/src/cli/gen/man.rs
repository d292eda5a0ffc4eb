//! Man pages.

use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use xlaunch_spec::exit::ExitCode;

/// Writes `xlaunch.1` and a page per subcommand.
pub(super) fn write(dir: &Path, mut command: Command) -> io::Result<()> {
    fs_err::create_dir_all(dir)?;
    command.build();
    for subcommand in command.get_subcommands() {
        clap_mangen::generate_to(subcommand.clone(), dir)?;
    }
    fs_err::write(dir.join("xlaunch.1"), main_page(command)?)
}

/// The page of launches, with the sections that clap_mangen does not generate.
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
    entry(&mut roff, "128+n", "terminated by signal n");
    roff
}

fn environment() -> Roff {
    let mut roff = Roff::default();
    roff.control("SH", ["ENVIRONMENT"]);
    for (name, meaning) in [
        ("PET_FLAG", "value of one of torchrun's flags, such as PET_NPROC_PER_NODE=8"),
        (
            "XLAUNCH_SECTION_KEY",
            "value of a key of the training configuration, such as XLAUNCH_TRAIN_LR=3e-4",
        ),
        ("XLAUNCH_SOCKET", "socket of the daemon"),
        ("PYTHON_EXEC", "Python interpreter that runs scripts"),
        (
            "XDG_RUNTIME_DIR",
            "directory of the user's running launches, and of the socket of a daemon of the user's own",
        ),
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
