//! The emulator of a GPU (`tests/kernels`), which is built with the host's C++ compiler and used through the loader's
//! path.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Requirement;

/// Variable with the directory of what the product caches, set in a process that uses the emulator.
const CACHE: &str = "EMULATOR_CACHE";

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

/// Returns the directory of the emulator: libraries that replace the CUDA driver, NVRTC, cuBLASLt and NCCL, and the
/// kernels that they have compiled. It is in `to`, a directory for all suites, and is named for the sources and the
/// compiler: the first process that needs it builds it, and all others share it.
///
/// # Errors
/// The output of the compiler, or that there is none.
pub fn build(to: &Path) -> Result<PathBuf, String> {
    let describe = |error: std::io::Error| format!("{}: {error}", to.display());
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let sources = sources.canonicalize().map_err(|error| format!("tests/kernels: {error}"))?;
    let name = format!("emulator-{:016x}", identity(&sources).map_err(describe)?);
    let directory = to.join(&name);
    std::fs::create_dir_all(to).map_err(describe)?;
    let lock = File::create(to.join(format!("{name}.lock"))).map_err(describe)?;
    lock.lock().map_err(describe)?;
    if !directory.exists() {
        let new = to.join(format!("{name}.new"));
        std::fs::create_dir_all(&new).map_err(describe)?;
        build_libraries(&sources, &new, &directory)?;
        std::fs::rename(&new, &directory).map_err(describe)?;
    }
    Ok(directory)
}

/// Returns a hash of everything that decides what the libraries and the kernels compiled by them are.
fn identity(sources: &Path) -> std::io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    (sources, compiler(), LIBRARIES).hash(&mut hasher);
    Command::new(compiler()).arg("--version").output().map(|output| output.stdout).ok().hash(&mut hasher);
    let files = std::fs::read_dir(sources)?.map(|entry| Ok(entry?.path()));
    let mut files = files.collect::<std::io::Result<Vec<PathBuf>>>()?;
    files.sort();
    for file in files {
        (&file, std::fs::read(&file)?).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Builds the libraries in `new`, for use in `directory`.
fn build_libraries(sources: &Path, new: &Path, directory: &Path) -> Result<(), String> {
    let compiler = compiler();
    for (library, files, level) in LIBRARIES {
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", level, "-fPIC", "-shared", "-pthread", "-o"]).arg(new.join(library));
        command.arg(format!("-DINCLUDE=\"{}\"", sources.display()));
        command.arg(format!("-DLIBRARIES=\"{}\"", directory.display()));
        command.arg(format!("-Wl,-soname,{library}")).args(files.iter().map(|file| sources.join(file)));
        if library != "libcuda.so" {
            command.arg("-L").arg(new).args(["-lcuda", "-Wl,-rpath,$ORIGIN"]);
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

/// Makes a command use the emulator in `directory`, and keep what the product caches in `cache`.
pub fn use_in(command: &mut Command, directory: &Path, cache: &Path) {
    command.env("LD_LIBRARY_PATH", directory).env("XLAUNCH_CACHE", cache);
    // Otherwise real libraries of the host would be selected.
    for (variable, file) in SELECTED {
        command.env(variable, directory.join(file));
    }
    command.env(CACHE, cache);
    if std::env::var_os(SEED).is_none() {
        command.env(SEED, "1");
    }
}

/// Returns the directory of what the product caches, if this process uses the emulator.
pub fn cache() -> Option<PathBuf> {
    std::env::var_os(CACHE).map(PathBuf::from)
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
    if cache().is_some() {
        return Ok(());
    }
    find_compiler()?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let directory = build(to).unwrap_or_else(|error| panic!("{error}"));
    let cache = to.join(format!("cache-{}", std::process::id()));
    // That of an earlier process with this number, which was killed.
    let _ = std::fs::remove_dir_all(&cache);
    let mut command = Command::new(program);
    use_in(&mut command, &directory, &cache);
    Err(command.args(std::env::args_os().skip(1)).exec().to_string())
}

/// Removes what the product has cached since [`enter`].
pub fn leave() {
    if let Some(cache) = cache() {
        // Anything that remains is in the build directory.
        let _ = std::fs::remove_dir_all(cache);
    }
}
