//! Finds the Python interpreter of this node, and builds the command lines that run programs with it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use xlaunch_spec::command::Program;

/// Looks up a variable of a process's environment.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Directories in which the C library looks for programs without `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Executes a script with runpy, as torchrun's `--run-path` does.
const RUN_PATH: &str =
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')";

/// Builds the program and arguments of a worker. Python's output is unbuffered, because a killed worker would otherwise
/// lose its last lines.
pub(crate) fn argv(
    program: &Program,
    arguments: &[OsString],
    environment: Environment<'_>,
) -> Result<Vec<OsString>, String> {
    let (how, target): (&[&str], _) = match program {
        Program::Binary(binary) => return Ok([std::slice::from_ref(binary), arguments].concat()),
        Program::Script(script) => (&[], script),
        Program::Module(module) => (&["-m"], module),
        Program::RunPath(script) => (&["-c", RUN_PATH], script),
    };
    let mut argv = vec![find(environment)?, "-u".into()];
    argv.extend(how.iter().map(OsString::from));
    argv.push(target.clone());
    argv.extend_from_slice(arguments);
    Ok(argv)
}

/// Returns whether a preloading process can run a command line that [`argv`] built: it must run a script in source
/// form, a module or `-c` text. Standard input, compiled files and other options need Python's own start-up.
pub(crate) fn is_preloadable(argv: &[OsString]) -> bool {
    argv.get(2).is_some_and(|target| {
        let target = target.as_bytes();
        let is_option = target.starts_with(b"-");
        if is_option { argv.len() > 3 && matches!(target, b"-m" | b"-c") } else { is_source(target) }
    })
}

/// Returns whether a script is in source form rather than compiled, an archive or a directory.
fn is_source(script: &[u8]) -> bool {
    !script.ends_with(b".pyc") && !script.ends_with(b".pyz") && !Path::new(OsStr::from_bytes(script)).is_dir()
}

/// Finds the interpreter for a launch by this process.
///
/// # Errors
/// There is none.
pub fn find(environment: Environment<'_>) -> Result<OsString, String> {
    interpreter(environment, &own_dirs(environment))
}

/// Finds the interpreter, in this order: `PYTHON_EXEC`; the Python of the environment that xlaunch was called from, the
/// first of the directories `own`; that of the active environment; that of the environment that a link to xlaunch leads
/// to, as those of pipx do; the first Python in `PATH`. xlaunch's environment precedes `PATH`, like torchrun's does,
/// because cron, systemd and containers set a `PATH` of their own.
fn interpreter(environment: Environment<'_>, own: &[PathBuf]) -> Result<OsString, String> {
    if let Some(chosen) = environment("PYTHON_EXEC").filter(|chosen| !chosen.is_empty()) {
        return Ok(chosen);
    }
    let path = search_path(environment);
    let candidates = |dir: PathBuf| ["python3", "python"].map(|name| dir.join(name));
    let (called, installed) = own.split_at(own.len().min(1));
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(environment);
    let active = active.map(|root| Path::new(&root).join("bin"));
    let environments = called.iter().cloned().chain(active).chain(installed.iter().cloned());
    let environments = environments.filter(|dir| is_in_python_environment(dir));
    let dirs = environments.chain(std::env::split_paths(&path));
    let found = dirs.flat_map(candidates).find(|file| is_executable(file));
    let missing =
        "there is no python3 or python in PATH; set PYTHON_EXEC, or use -- PROGRAM to run without Python";
    found.map(PathBuf::into_os_string).ok_or_else(|| missing.into())
}

/// Returns whether this directory of programs belongs to a virtual environment or a conda environment.
fn is_in_python_environment(dir: &Path) -> bool {
    dir.parent().is_some_and(|root| root.join("pyvenv.cfg").is_file() || root.join("conda-meta").is_dir())
}

/// Returns the directories in which programs are looked up, as in `PATH`.
fn search_path(environment: Environment<'_>) -> OsString {
    environment("PATH").unwrap_or_else(|| DEFAULT_PATH.into())
}

/// Returns the directories of the running program: the one that it was called from, where it may be a link, and that of
/// the executable file itself.
fn own_dirs(environment: Environment<'_>) -> Vec<PathBuf> {
    let name = PathBuf::from(std::env::args_os().next().unwrap_or_default());
    let called = if name.components().count() > 1 {
        std::path::absolute(&name).ok()
    } else {
        let path = search_path(environment);
        std::env::split_paths(&path).map(|dir| dir.join(&name)).find(|file| is_executable(file))
    };
    let files = called.into_iter().chain(std::env::current_exe().ok());
    files.filter_map(|file| file.parent().map(Path::to_path_buf)).collect()
}

fn is_executable(file: &Path) -> bool {
    fs_err::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_python_in_path_runs_scripts_unless_python_exec_is_set() {
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
        let script = || Program::Script("train.py".into());
        assert_eq!(
            argv(&script(), &["--lr=3".into()], &only_path).unwrap(),
            [venv, "-u".into(), "train.py".into(), "--lr=3".into()]
        );
        let chosen = |name: &str| (name == "PYTHON_EXEC").then(|| "/opt/python".into());
        let module = argv(&Program::Module("pkg".into()), &[], &chosen).unwrap();
        assert_eq!(module, ["/opt/python", "-u", "-m", "pkg"]);
        let own = [dirs.path().join("own/bin"), dirs.path().join("conda/bin")];
        let (venv_of_xlaunch, conda) =
            (program("own/bin/python3", 0o755), program("conda/bin/python", 0o755));
        let found = |environment: Environment<'_>| interpreter(environment, &own).unwrap();
        assert_eq!(found(&only_path), argv(&script(), &[], &only_path).unwrap()[0], "not an environment");
        fs_err::create_dir(dirs.path().join("conda/conda-meta")).unwrap();
        assert_eq!(found(&only_path), conda);
        // xlaunch is a link into an environment of its own, and another one is active.
        let active = dirs.path().join("active");
        let python = program("active/bin/python3", 0o755);
        fs_err::write(active.join("pyvenv.cfg"), "").unwrap();
        let with_active = |name: &str| match name {
            "VIRTUAL_ENV" => Some(active.clone().into_os_string()),
            _ => only_path(name),
        };
        assert_eq!(found(&with_active), python);
        fs_err::write(dirs.path().join("own/pyvenv.cfg"), "").unwrap();
        assert_eq!(found(&only_path), venv_of_xlaunch);
        assert_eq!(found(&with_active), venv_of_xlaunch);
        assert_eq!(found(&chosen), "/opt/python");
        let nowhere = |name: &str| (name == "PATH").then(|| dirs.path().join("notes").into_os_string());
        let refusal = argv(&script(), &[], &nowhere).unwrap_err();
        assert!(refusal.contains("PYTHON_EXEC"), "{refusal}");
        // Not all hosts have a Python there.
        if DEFAULT_PATH.split(':').any(|dir| Path::new(dir).join("python3").exists()) {
            assert!(argv(&script(), &[], &|_| None).is_ok(), "as after `env -i`");
        }
        for (program, preloadable) in [
            (script(), true),
            (Program::Module("pkg".into()), true),
            (Program::RunPath("a.py".into()), true),
            (Program::Script("-".into()), false),
            (Program::Script("-c".into()), false),
            (Program::Script("a.pyc".into()), false),
            (Program::Script("a.pyz".into()), false),
            (Program::Script(dirs.path().into()), false),
        ] {
            let argv = argv(&program, &[], &chosen).unwrap();
            assert_eq!(is_preloadable(&argv), preloadable, "{argv:?}");
        }
        assert_eq!(argv(&Program::Binary("a".into()), &["b".into()], &|_| None).unwrap(), ["a", "b"]);
    }
}
