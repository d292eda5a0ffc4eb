//! The interpreter for scripts, and how it is called.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::reader::Environment;

/// What `--run-path` asks Python for.
const RUN_PATH: &str =
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// How the target is to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum As {
    /// A file with a program in Python.
    Script,
    /// A module's name.
    Module,
    /// The same as a script, by way of runpy.
    RunPath,
}

/// The command that runs it. Output is unbuffered, or the last words of a worker that is killed would be lost.
pub(super) fn command(
    target: &[OsString],
    how: As,
    environment: Environment<'_>,
) -> Result<Vec<OsString>, String> {
    let mut argv = vec![interpreter(environment)?, "-u".into()];
    match how {
        As::Script => {}
        As::Module => argv.push("-m".into()),
        As::RunPath => argv.extend(["-c".into(), RUN_PATH.into()]),
    }
    argv.extend_from_slice(target);
    Ok(argv)
}

/// `PYTHON_EXEC`, or the first Python in `PATH`, where an active virtual environment stands in front.
fn interpreter(environment: Environment<'_>) -> Result<OsString, String> {
    if let Some(chosen) = environment("PYTHON_EXEC").filter(|chosen| !chosen.is_empty()) {
        return Ok(chosen);
    }
    let path = environment("PATH").unwrap_or_default();
    let candidates = |dir: PathBuf| ["python3", "python"].map(|name| dir.join(name));
    let found = std::env::split_paths(&path).flat_map(candidates).find(|file| is_program(file));
    let missing =
        "there is no python3 or python in PATH; PYTHON_EXEC can name one, and -- PROGRAM needs none";
    found.map(PathBuf::into_os_string).ok_or_else(|| missing.into())
}

fn is_program(file: &Path) -> bool {
    fs_err::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Name of a launch: the target's file name without extension, or all of a module's name.
pub(super) fn name(target: &OsStr, is_module: bool) -> String {
    let stem = if is_module { Some(target) } else { Path::new(target).file_stem() };
    stem.map_or_else(|| "command".into(), |stem| stem.to_string_lossy().replace('/', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_python_in_path_runs_scripts_unless_another_is_chosen() {
        let dirs = tempfile::tempdir().unwrap();
        let program = |name: &str, mode: u32| {
            let file = dirs.path().join(name);
            fs_err::create_dir_all(file.parent().unwrap()).unwrap();
            fs_err::write(&file, "").unwrap();
            fs_err::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            file.into_os_string()
        };
        program("notes/python3", 0o644);
        let (venv, _system) = (program("venv/python", 0o755), program("usr/python3", 0o755));
        let path = std::env::join_paths(["notes", "venv", "usr"].map(|dir| dirs.path().join(dir))).unwrap();
        let only_path = |name: &str| (name == "PATH").then(|| path.clone());
        let target = ["train.py".into(), "--lr=3".into()];
        assert_eq!(
            command(&target, As::Script, &only_path).unwrap(),
            [venv, "-u".into(), "train.py".into(), "--lr=3".into()]
        );
        let chosen = |name: &str| (name == "PYTHON_EXEC").then(|| "/opt/python".into());
        assert_eq!(command(&target, As::Module, &chosen).unwrap()[..3], ["/opt/python", "-u", "-m"]);
        let refusal = command(&target, As::Script, &|_| None).unwrap_err();
        assert!(refusal.contains("PYTHON_EXEC"), "{refusal}");
    }

    #[test]
    fn launches_are_named_by_what_they_start() {
        assert_eq!(name("dir/train.py".as_ref(), false), "train");
        assert_eq!(name("pkg.train".as_ref(), true), "pkg.train");
        assert_eq!(name("..".as_ref(), false), "command");
    }
}
