//! The repository: its root, its files and the crates of its workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::Error;

/// The repository that contains this crate.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    /// Files that git tracks or would track, relative to the root, sorted.
    pub(crate) files: Vec<PathBuf>,
    pub(crate) packages: Vec<Package>,
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
        let listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
        let listing = output(Command::new("git").args(listing).current_dir(&root))?;
        let mut files: Vec<PathBuf> = listing.split_terminator('\0').map(PathBuf::from).collect();
        // A file that is deleted but not yet staged is still listed.
        files.retain(|file| root.join(file).is_file());
        files.sort();
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["metadata", "--no-deps", "--format-version", "1", "--locked"]).current_dir(&root);
        let packages = packages(&root, &serde_json::from_str(&output(&mut cargo)?)?);
        Ok(Self { root, files, packages })
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
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
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

/// Returns the standard output of a command that must succeed; its standard error is passed through.
pub(crate) fn output(command: &mut Command) -> Result<String, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stderr(std::process::Stdio::inherit()).output();
    let output = output.map_err(|error| format!("failed to run {program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program} failed: {}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
