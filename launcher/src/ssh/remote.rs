//! `xlaunch remote`: the part of an ssh launch that runs on each host.
//!
//! ```text
//! xlaunch remote                 greets, reads a description, goes to its directory, waits for GO,
//!   |                            and becomes, with the description's environment:
//!   v exec
//! xlaunch remote NAME ARGUMENTS  the launch that `NAME ARGUMENTS` is, while a thread reads standard input
//! ```
//! Because the process is replaced, the launch has its environment from the first instruction on, and there is no
//! process between sshd and the launch.
//!
//! A killed ssh client leaves its remote command running, but closes its standard input. The launch then kills itself,
//! and its reaper kills the workers and removes its files, as for any launch that is killed.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Signal, getpid, kill_process};
use rustix::stdio;
use xlaunch_proto::env;
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::wire::{self, Description, GO, GREETING, NO_INPUT, READY};

/// Turns this process into the launch that standard input describes.
///
/// # Errors
/// The reason, for the user of the launching process.
pub(crate) fn become_launch() -> Result<Infallible, Refusal> {
    let lost = |error: io::Error| {
        let text = if error.kind() == io::ErrorKind::UnexpectedEof {
            // Or the launching process was killed, and the message has no reader.
            NO_INPUT.to_owned()
        } else {
            format!("lost the launching process before the start: {error}")
        };
        Refusal::new(ExitCode::Rendezvous, text)
    };
    say(&(GREETING.to_owned() + &wire::build())).map_err(lost)?;
    let mut input = own_stdin().map_err(lost)?;
    let description = Description::read(&mut input).map_err(lost)?;
    let directory = Path::new(&description.directory);
    std::env::set_current_dir(directory).map_err(|error| {
        Refusal::new(ExitCode::Usage, format!("directory `{}`: {error}", directory.display()))
    })?;
    say(READY).map_err(lost)?;
    let mut go = [0];
    input.read_exact(&mut go).map_err(lost)?;
    if go != [GO] {
        return Err(Refusal::new(ExitCode::Internal, "the launching process sent no start".to_owned()));
    }
    let error = launch(description).map_or_else(|error| error, |mut command| command.exec());
    Err(Refusal::new(ExitCode::Internal, format!("failed to start the launch: {error}")))
}

/// Sends a line to the launching process.
fn say(line: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Returns standard input without a buffer, because the launch reads the bytes that follow.
fn own_stdin() -> io::Result<File> {
    Ok(File::from(stdio::stdin().try_clone_to_owned()?))
}

fn launch(description: Description) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0("xlaunch").arg("remote").arg(description.called_as).args(description.arguments);
    command.envs(description.environment).env_remove(env::TOKEN);
    if let Some(token) = description.token {
        command.env(env::TOKEN, token.0);
    }
    Ok(command)
}

/// Starts a thread that delivers the bytes on standard input to this process as signals, and kills it when standard
/// input ends. The workers read from `/dev/null`.
pub(crate) fn obey_launcher() -> io::Result<()> {
    let input = own_stdin()?;
    stdio::dup2_stdin(File::open("/dev/null")?)?;
    std::thread::Builder::new().name("ssh-input".into()).spawn(move || obey(input))?;
    Ok(())
}

fn obey(mut input: File) {
    let mut byte = [0];
    loop {
        let signal = match input.read(&mut byte) {
            Ok(0) => Some(Signal::KILL),
            Ok(_) => wire::signal_of(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => None,
            Err(_) => Some(Signal::KILL),
        };
        if let Some(signal) = signal {
            // Cannot fail, as this process exists.
            let _ = kill_process(getpid(), signal);
        }
    }
}
