//! A Python script that comes through a pipe: `xlaunch - < train.py`, `xlaunch /dev/stdin`, `xlaunch <(generate)`.
//!
//! torchrun passes the path on to Python in every rank. All ranks then read the same pipe, so it works with one rank
//! only, and not after a restart. xlaunch reads the script once, before anything starts, and keeps it in a memory file
//! that every worker opens through the `/proc` directory of this process. As with `python -`, modules are imported from
//! the working directory.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, memfd_create};
use xlaunch_spec::command::{CommandSpec, Program};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

/// Paths of standard input.
const STDIN: [&str; 4] = ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"];
/// Maximum size of a script, so that endless input does not fill the memory.
const MAX_SCRIPT_BYTES: u64 = 16 << 20;

/// A script in memory. Workers can start for as long as it exists.
#[derive(Debug)]
pub(super) struct PipedScript {
    _file: File,
    /// Name of the job.
    pub(super) name: &'static str,
}

/// Returns whether this path is standard input or a pipe, which cannot be read by every rank.
pub(super) fn is_piped(script: &Path) -> bool {
    is_stdin(script) || fs_err::metadata(script).is_ok_and(|found| found.file_type().is_fifo())
}

fn is_stdin(script: &Path) -> bool {
    STDIN.iter().any(|path| script == Path::new(path))
}

/// Returns whether the script of this program is standard input or a pipe.
pub(super) fn is_used_by(program: &Program) -> bool {
    script(program).is_some_and(is_piped)
}

fn script(program: &Program) -> Option<&Path> {
    match program {
        Program::Script(script) | Program::RunPath(script) => Some(Path::new(script)),
        Program::Module(_) | Program::Binary(_) => None,
    }
}

/// Reads a script that comes through a pipe, and replaces it in `spec` by the path of the copy.
pub(super) fn read(spec: &mut CommandSpec) -> Result<Option<PipedScript>, Refusal> {
    let Some(path) = script(&spec.program).filter(|path| is_piped(path)) else { return Ok(None) };
    let refuse = |why: &str| Refusal::new(ExitCode::Usage, format!("{}: {why}", path.display()));
    let failed = |error: io::Error| refuse(&format!("failed to read the script: {error}"));
    let stdin = is_stdin(path);
    if stdin && io::stdin().is_terminal() {
        return Err(refuse("the script is read from standard input, which is a terminal: add `< SCRIPT`"));
    }
    let text = if stdin { contents(io::stdin().lock()) } else { fs_err::File::open(path).and_then(contents) };
    let text = text.map_err(failed)?;
    if text.is_empty() {
        return Err(refuse("the script is empty"));
    }
    if text.len() as u64 > MAX_SCRIPT_BYTES {
        return Err(refuse("the script is longer than 16 MiB: save it to a file"));
    }
    let mut file = memfd_create("xlaunch-script", MemfdFlags::CLOEXEC)
        .map(File::from)
        .map_err(|error| failed(error.into()))?;
    file.write_all(&text).map_err(failed)?;
    spec.program = Program::RunPath(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into());
    Ok(Some(PipedScript { _file: file, name: if stdin { "stdin" } else { "pipe" } }))
}

fn contents(from: impl Read) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    from.take(MAX_SCRIPT_BYTES + 1).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipe_is_read_once_and_its_copy_can_be_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        let piped = |text: &'static str| {
            let to = pipe.clone();
            let writer = std::thread::spawn(move || fs_err::write(to, text).unwrap());
            let mut spec = CommandSpec::new(Program::Script(pipe.clone().into()), Vec::new());
            let script = read(&mut spec);
            writer.join().unwrap();
            script.map(|script| (script.unwrap(), spec.program))
        };
        let (script, program) = piped("print(1)\n").unwrap();
        assert_eq!(script.name, "pipe");
        assert!(!is_used_by(&program), "{program:?}");
        for _ in 0..2 {
            assert_eq!(fs_err::read_to_string(program.target()).unwrap(), "print(1)\n");
        }
        assert!(piped("").unwrap_err().message.ends_with("pipe: the script is empty"));
    }

    #[test]
    fn standard_input_is_known_by_its_names_and_files_are_left_alone() {
        for path in STDIN {
            assert!(is_used_by(&Program::Script(path.into())), "{path}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let program = Program::Script(file.path().into());
        let mut spec = CommandSpec::new(program.clone(), Vec::new());
        assert!(read(&mut spec).unwrap().is_none());
        assert_eq!(spec.program, program);
        assert!(!is_used_by(&Program::Binary("-".into())) && !is_used_by(&Program::Module("-".into())));
    }
}
