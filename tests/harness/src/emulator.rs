//! The emulator of a GPU (`tests/kernels`), which is built with the host's C++ compiler and used through the loader's
//! path.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Requirement;

/// Variable with the directory of the emulator's libraries, set in a process that uses them.
const DIRECTORY: &str = "EMULATOR_DIRECTORY";

/// Variable with a seed for the order of threads, which differs in each launch. With 0, threads run in order of number.
const SEED: &str = "EMULATOR_SEED";

/// First version with `tsan-distinguish-volatile`.
const OLDEST_GCC: u32 = 11;
const OLDEST_CLANG: u32 = 14;

/// Name of each library, its sources, and its optimization; -O3 for code that every load and store of a kernel calls.
const LIBRARIES: [(&str, &[&str], &str); 4] = [
    (
        "libcuda.so",
        &[
            "driver.cpp",
            "launch.cpp",
            "access.cpp",
            "warp.cpp",
            "mbarrier.cpp",
            "wgmma.cpp",
            "fiber.cpp",
            "memory.cpp",
        ],
        "-O3",
    ),
    ("libnvrtc.so", &["nvrtc.cpp"], "-O1"),
    ("libcublasLt.so", &["cublaslt.cpp"], "-O2"),
    ("libnccl.so.2", &["nccl.cpp"], "-O2"),
];

/// Variables that select a library, and the files that they name. There is no cuDNN.
const SELECTED: [(&str, &str); 4] = [
    ("XLAUNCH_NVRTC", "libnvrtc.so"),
    ("XLAUNCH_CUBLASLT", "libcublasLt.so"),
    ("XLAUNCH_NCCL", "libnccl.so.2"),
    ("XLAUNCH_CUDNN", "no-cudnn"),
];

/// Builds the emulator in `to`: libraries that replace the CUDA driver, NVRTC, cuBLASLt and NCCL.
///
/// # Errors
/// The output of the compiler, or that there is none.
pub fn build(to: &Path) -> Result<(), String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let sources = sources.canonicalize().map_err(|error| format!("tests/kernels: {error}"))?;
    std::fs::create_dir_all(to).map_err(|error| format!("{}: {error}", to.display()))?;
    let compiler = compiler();
    for (library, files, level) in LIBRARIES {
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", level, "-fPIC", "-shared", "-pthread", "-o"]).arg(to.join(library));
        command.arg(format!("-DINCLUDE=\"{}\"", sources.display()));
        command.arg(format!("-DLIBRARIES=\"{}\"", to.display()));
        command.arg(format!("-Wl,-soname,{library}")).args(files.iter().map(|file| sources.join(file)));
        if library != "libcuda.so" {
            command.arg("-L").arg(to).args(["-lcuda", "-Wl,-rpath,$ORIGIN"]);
        }
        let output = command.output().map_err(|error| format!("no C++ compiler: {compiler}: {error}"))?;
        if !output.status.success() {
            return Err(format!("{compiler} fails:\n{}", String::from_utf8_lossy(&output.stderr)));
        }
    }
    Ok(())
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".into())
}

/// Requirement of tests that call [`build`].
///
/// # Errors
/// If the compiler is missing, or neither a supported GCC nor a supported Clang.
pub fn find_compiler() -> Requirement {
    let compiler = compiler();
    let ask = |option| {
        let output = Command::new(&compiler).arg(option).output();
        let output = output.map_err(|error| format!("no C++ compiler: {compiler}: {error}"))?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let (name, version) = (ask("--version")?, ask("-dumpversion")?);
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    let oldest = if name.contains("clang") { OLDEST_CLANG } else { OLDEST_GCC };
    match major {
        Some(major) if major >= oldest => Ok(()),
        _ => Err(format!("{compiler} {version} is not GCC {OLDEST_GCC} or Clang {OLDEST_CLANG}, or later")),
    }
}

/// Returns whether [`find_compiler`] has found Clang.
pub fn is_clang() -> bool {
    let output = Command::new(compiler()).arg("--version").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("clang"))
}

/// Makes a command use the emulator in `directory`, in which compiled kernels are cached as well.
pub fn use_in(command: &mut Command, directory: &Path) {
    command.env("LD_LIBRARY_PATH", directory).env("XLAUNCH_CACHE", directory.join("cache"));
    // Otherwise real libraries of the host would be selected.
    for (variable, file) in SELECTED {
        command.env(variable, directory.join(file));
    }
    command.env(DIRECTORY, directory);
    if std::env::var_os(SEED).is_none() {
        command.env(SEED, "1");
    }
}

/// Returns the directory of the emulator that this process uses.
pub fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(PathBuf::from)
}

/// Requirement of suites that run with the emulator: their `main` begins with it. The first call builds the emulator in
/// `to` and starts this program again, because the loader's path is read at the start. A suite ends with [`leave`].
///
/// # Errors
/// If there is no compiler.
///
/// # Panics
/// If the emulator does not compile.
pub fn enter(to: &Path) -> Requirement {
    if directory().is_some() {
        return Ok(());
    }
    find_compiler()?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let directory = to.join(std::process::id().to_string());
    build(&directory).unwrap_or_else(|error| panic!("{error}"));
    let mut command = Command::new(program);
    use_in(&mut command, &directory);
    Err(command.args(std::env::args_os().skip(1)).exec().to_string())
}

/// Removes the emulator that [`enter`] has built.
pub fn leave() {
    if let Some(directory) = directory() {
        // Anything that remains is in the build directory.
        let _ = std::fs::remove_dir_all(directory);
    }
}
