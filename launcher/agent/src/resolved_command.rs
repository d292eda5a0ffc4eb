//! The command that the agent runs: the [`CommandSpec`] of the command line, resolved on this node.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use xlaunch_spec::exit::ExitCode;

use crate::interpreter;
use xlaunch_host::devices::Node;
use xlaunch_spec::refusal::Refusal;

pub use crate::interpreter::{Environment, find as find_interpreter};
pub use xlaunch_spec::command::{
    Binding, CommandSpec, LogOptions, Nproc, PerRank, Program, Signal, Streams, quote_line,
};

/// A command with the values that depend on this node.
#[derive(Clone, Debug)]
pub struct ResolvedCommand {
    /// The command as the user described it.
    pub spec: CommandSpec,
    /// Name of the job's runs, in directories and in `xlaunch status`.
    pub name: String,
    /// Program and arguments of every worker.
    pub argv: Vec<OsString>,
    /// Workers on this node.
    pub nproc: u32,
}

impl ResolvedCommand {
    /// Returns whether `argv` is a command line of Python.
    pub(crate) fn is_python(&self) -> bool {
        !matches!(self.spec.program, Program::Binary(_))
    }

    /// Inherited descriptors that the arguments name, such as `/dev/fd/63` from a shell's `<(...)`. Workers inherit
    /// these and no others.
    pub(crate) fn descriptors(&self) -> Vec<i32> {
        const DIRECTORIES: [&str; 2] = ["/dev/fd/", "/proc/self/fd/"];
        let texts = self.argv.iter().map(|argument| argument.to_string_lossy());
        let after = |text: &str| {
            let found = DIRECTORIES.iter().filter_map(|directory| text.split_once(directory));
            found.map(|(_, rest)| rest.to_owned()).collect::<Vec<_>>()
        };
        let number = |rest: String| {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            rest[..digits].parse().ok()
        };
        texts.flat_map(|text| after(&text)).filter_map(number).collect()
    }
}

/// Resolves a command in this environment. `node` is called only if the number of workers depends on it, because
/// counting GPUs takes a while.
///
/// # Errors
/// A usage error if the script does not exist, no Python interpreter is found, or there are too few GPUs.
pub fn resolve(
    spec: CommandSpec,
    environment: Environment<'_>,
    node: &dyn Fn() -> Node,
) -> Result<ResolvedCommand, Refusal> {
    let usage = |message: String| Refusal::new(ExitCode::Usage, message);
    check_script(&spec.program, environment)?;
    let name = spec.name();
    let chosen = spec.interpreter.clone().map(PathBuf::into_os_string);
    let lookup = |name: &str| chosen.clone().filter(|_| name == "PYTHON_EXEC").or_else(|| environment(name));
    let argv = interpreter::argv(&spec.program, &spec.arguments, &lookup).map_err(usage)?;
    let nproc = match spec.nproc {
        Nproc::Count(count) => count,
        counted => {
            let node = node();
            let cores = u32::try_from(node.cores).unwrap_or(u32::MAX);
            counted.resolve(&node.gpus, cores).map_err(usage)?
        }
    };
    if spec.virtual_local_rank {
        check_visible_gpus(nproc, environment).map_err(usage)?;
    }
    Ok(ResolvedCommand { spec, name, argv, nproc })
}

/// Checks that a Python script exists, relative to the working directory. The check is skipped if Python may open
/// another file: `PYTHON_EXEC` may be a wrapper that runs in a container, `$local_rank` and `$$` are replaced later,
/// and a script that starts with a dash is an option of Python or its standard input.
///
/// # Errors
/// A usage error if the script does not exist.
pub fn check_script(program: &Program, environment: Environment<'_>) -> Result<(), Refusal> {
    let (Program::Script(script) | Program::RunPath(script)) = program else { return Ok(()) };
    let text = script.to_string_lossy();
    let wrapped = environment("PYTHON_EXEC").is_some_and(|chosen| !chosen.is_empty());
    let is_replaced =
        ["$local_rank", "${local_rank}", "$$"].iter().any(|placeholder| text.contains(placeholder));
    if wrapped || text.starts_with('-') || is_replaced {
        return Ok(());
    }
    match fs_err::metadata(script) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Refusal::new(ExitCode::Usage, format!("{text}: no such file")))
        }
        _ => Ok(()),
    }
}

/// Checks that `CUDA_VISIBLE_DEVICES` has an entry for each worker, as `--virtual-local-rank` requires.
fn check_visible_gpus(nproc: u32, environment: Environment<'_>) -> Result<(), String> {
    let Some(visible) = environment("CUDA_VISIBLE_DEVICES") else { return Ok(()) };
    let visible = visible.to_string_lossy();
    let gpus = visible.split(',').filter(|gpu| !gpu.trim().is_empty()).count();
    if gpus < nproc as usize {
        return Err(format!(
            "--virtual-local-rank: {nproc} workers need a GPU each, but CUDA_VISIBLE_DEVICES={visible} has {gpus}"
        ));
    }
    Ok(())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A launch of a single `true`, for tests that need any launch.
    pub fn command(name: &str) -> ResolvedCommand {
        let spec = CommandSpec::new(Program::Binary("true".into()), Vec::new());
        let resolved = resolve(spec, &|_| None, &|| unreachable!("one worker depends on no node")).unwrap();
        ResolvedCommand { name: name.into(), ..resolved }
    }

    #[test]
    fn workers_are_counted_on_the_node_only_if_needed() {
        let resolved = |nproc, node: &dyn Fn() -> Node| {
            let spec = CommandSpec { nproc, ..CommandSpec::new(Program::Binary("a".into()), Vec::new()) };
            resolve(spec, &|_| None, node).map(|resolved| resolved.nproc).map_err(|refusal| refusal.message)
        };
        let node = |gpus: Result<u32, String>| move || Node { gpus: gpus.clone(), cores: 12 };
        assert_eq!(resolved(Nproc::Count(3), &|| unreachable!()), Ok(3));
        assert_eq!(resolved(Nproc::Auto, &node(Ok(4))), Ok(4));
        assert_eq!(resolved(Nproc::Cpu, &node(Ok(4))), Ok(12));
        let refusal = resolved(Nproc::Gpu, &node(Err("no NVML".into()))).unwrap_err();
        assert_eq!(refusal, "--nproc-per-node gpu: no GPU was found: no NVML");
    }

    #[test]
    fn descriptors_that_arguments_name_are_found() {
        let argv = ["sh", "/dev/fd/63", "--config=/proc/self/fd/7", "/dev/fd/", "x/dev/fd/8.txt", "9"];
        let command = ResolvedCommand { argv: argv.map(Into::into).into(), ..command("sh") };
        assert_eq!(command.descriptors(), [63, 7, 8]);
    }

    #[test]
    fn missing_script_is_refused_before_anything_starts() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("a.py"), "").unwrap();
        let script = |name: &str| dir.path().join(name).into_os_string();
        let path = |name: &str| (name == "PATH").then(|| OsString::from("/none"));
        let refused = |program, environment: Environment<'_>| {
            let spec = CommandSpec::new(program, Vec::new());
            resolve(spec, environment, &|| unreachable!()).map(drop).map_err(|refusal| refusal.message)
        };
        let no_python = refused(Program::Script(script("a.py")), &path).unwrap_err();
        assert!(no_python.contains("no python3"), "{no_python}");
        for program in [Program::Script(script("nosuch.py")), Program::RunPath(script("nosuch.py"))] {
            let message = format!("{}: no such file", script("nosuch.py").display());
            assert_eq!(refused(program, &path), Err(message));
        }
        let mut submitted = CommandSpec::new(Program::Script(script("a.py")), Vec::new());
        submitted.interpreter = Some("/venv/bin/python3".into());
        let resolved = resolve(submitted, &path, &|| unreachable!()).unwrap();
        assert_eq!(resolved.argv[0], "/venv/bin/python3", "that of the client precedes PATH");
        // Python may find these elsewhere, or they are not files at all.
        let wrapper = |name: &str| (name == "PYTHON_EXEC").then(|| OsString::from("in-container"));
        assert_eq!(refused(Program::Script(script("nosuch.py")), &wrapper), Ok(()));
        assert_eq!(refused(Program::Binary("nosuch".into()), &path), Ok(()));
        for program in [
            Program::Script(script("${local_rank}.py")),
            Program::Script("-".into()),
            Program::Script("-c".into()),
            Program::Module("nosuch".into()),
        ] {
            assert!(check_script(&program, &path).is_ok(), "{program:?}");
        }
    }

    #[test]
    fn virtual_local_rank_needs_one_visible_gpu_per_worker() {
        let resolved = |visible: Option<&str>| {
            let mut spec = CommandSpec::new(Program::Binary("a".into()), Vec::new());
            (spec.virtual_local_rank, spec.nproc) = (true, Nproc::Count(2));
            let find = |name: &str| visible.filter(|_| name == "CUDA_VISIBLE_DEVICES").map(OsString::from);
            resolve(spec, &find, &|| unreachable!()).map(|_| ()).map_err(|refusal| refusal.message)
        };
        assert!([None, Some("3,1"), Some("0,1,2")].into_iter().all(|visible| resolved(visible).is_ok()));
        let refusal = "--virtual-local-rank: 2 workers need a GPU each, but CUDA_VISIBLE_DEVICES=1, has 1";
        assert_eq!(resolved(Some("1,")), Err(refusal.into()));
    }
}
