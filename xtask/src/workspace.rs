//! The repository: its root, its files and the crates of its workspace.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;

use crate::Error;

/// The repository that contains this crate.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) packages: Vec<Package>,
    /// Names of test targets with `test = false`, which `cargo test` runs only by name.
    pub(crate) large_suites: Vec<String>,
    files: OnceCell<Vec<PathBuf>>,
}

/// A crate of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Directory of its manifest, relative to the root.
    pub(crate) dir: PathBuf,
    /// Root source files of its library, binaries and build script, relative to the root. Test targets are excluded.
    pub(crate) entries: Vec<PathBuf>,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self, Error> {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no workspace above xtask/")?.to_path_buf();
        let mut metadata = cargo(&root);
        metadata.args(["metadata", "--no-deps", "--format-version", "1", "--locked"]);
        let metadata = serde_json::from_str(&output(&mut metadata)?)?;
        let (packages, large_suites) = (packages(&root, &metadata), large_suites(&metadata));
        Ok(Self { root, packages, large_suites, files: OnceCell::new() })
    }

    /// Returns the files that git tracks or would track, relative to the root, sorted. Tests do without git, which a
    /// machine with an unpacked source archive may lack.
    pub(crate) fn files(&self) -> Result<&[PathBuf], Error> {
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
        let listing = output(Command::new("git").args(listing).current_dir(&self.root))?;
        let mut files: Vec<PathBuf> = listing.split_terminator('\0').map(PathBuf::from).collect();
        // A file that is deleted but not yet staged is still listed.
        files.retain(|file| self.root.join(file).is_file());
        files.sort();
        Ok(self.files.get_or_init(|| files))
    }

    pub(crate) fn read(&self, file: &Path) -> Result<String, Error> {
        std::fs::read_to_string(self.root.join(file))
            .map_err(|error| format!("{}: {error}", file.display()).into())
    }

    /// Returns the crate that contains `file`, or `.` if the file belongs to no crate.
    pub(crate) fn crate_of(&self, file: &Path) -> &str {
        let containing = self.packages.iter().filter(|package| file.starts_with(&package.dir));
        containing.max_by_key(|package| package.dir.components().count()).map_or(".", |package| &package.name)
    }
}

fn packages(root: &Path, metadata: &Value) -> Vec<Package> {
    let relative = |path: &Value| {
        let path = Path::new(path.as_str().unwrap_or_default());
        path.strip_prefix(root).unwrap_or(path).to_path_buf()
    };
    let is_test = |target: &Value| {
        list(&target["kind"])
            .iter()
            .any(|kind| ["test", "bench", "example"].contains(&kind.as_str().unwrap_or("")))
    };
    list(&metadata["packages"])
        .iter()
        .map(|package| Package {
            name: package["name"].as_str().unwrap_or_default().to_owned(),
            dir: relative(&package["manifest_path"]).parent().unwrap_or(Path::new("")).to_path_buf(),
            entries: list(&package["targets"])
                .iter()
                .filter(|target| !is_test(target))
                .map(|target| relative(&target["src_path"]))
                .collect(),
        })
        .collect()
}

fn large_suites(metadata: &Value) -> Vec<String> {
    let targets = list(&metadata["packages"]).iter().flat_map(|package| list(&package["targets"]));
    let large = targets.filter(|target| target["kind"][0] == "test" && target["test"] == false);
    large.filter_map(|target| target["name"].as_str().map(str::to_owned)).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns cargo, to be run in the root of the repository.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    forget_package(&mut command);
    command
}

/// Removes variables that cargo sets for the package of xtask, for commands that build. If they were passed on, build
/// scripts that read such variables of their own package, like that of ring, would run again, and everything that
/// depends on them would be rebuilt.
pub(crate) fn forget_package(command: &mut Command) {
    let variables = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in variables.filter(|it| it.starts_with("CARGO_MANIFEST_") || it.starts_with("CARGO_PKG_")) {
        command.env_remove(name);
    }
}

/// Returns the standard output of a command that must succeed; its standard error is passed through.
pub(crate) fn output(command: &mut Command) -> Result<String, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("failed to run {program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program} failed: {}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs a command without input. Returns its status, and its standard output and error in the order of writing. They
/// go to a file, which, unlike a pipe, is not kept open by a process that the command has left behind.
pub(crate) fn run_to_file(command: &mut Command) -> std::io::Result<(ExitStatus, Vec<u8>)> {
    let written = tempfile::NamedTempFile::new()?;
    let file = written.as_file();
    let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?).status()?;
    Ok((status, std::fs::read(written.path())?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn large_suites_are_tests_that_cargo_runs_only_by_name() {
        let target =
            |kind: &str, name: &str, test: bool| json!({ "kind": [kind], "name": name, "test": test });
        let targets = [
            target("test", "basics", true),
            target("test", "launch", false),
            target("bin", "echo", false),
            target("bench", "alloc", false),
        ];
        let metadata = json!({ "packages": [{ "targets": targets }] });
        assert_eq!(large_suites(&metadata), ["launch"]);
    }
}
