//! Archives of the binary and of the sources, and the checksums of all files.

use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::packages::Staged;
use super::release::Release;
use crate::Error;
use crate::workspace::output;

/// Archives the sources of the commit.
pub(super) fn sources(release: &Release) -> Result<PathBuf, Error> {
    let made = release.dist.join(format!("xlaunch-{}.tar.gz", release.version));
    let mut archive = Command::new("git");
    archive.args([
        "archive",
        "--format=tar.gz",
        &format!("--prefix=xlaunch-{}/", release.version),
        "--output",
    ]);
    output(archive.arg(&made).arg("HEAD").current_dir(&release.root))?;
    Ok(made)
}

/// Archives the binary with man pages, completions, README and license.
pub(super) fn binary(release: &Release, staged: &Staged) -> Result<PathBuf, Error> {
    let name = format!("xlaunch-{}-{}", release.version, staged.platform.triple());
    let made = release.dist.join(format!("{name}.tar.gz"));
    let directory = staged.binary();
    let directory = directory.parent().ok_or("no directory of the binary")?;
    for file in ["README.md", "LICENSE", "SECURITY.md"] {
        std::fs::copy(release.root.join(file), directory.join(file))?;
    }
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=ustar"]);
    tar.args(["--mode=u+rw,go+r,go-w", &format!("--mtime=@{}", release.time)]);
    let gzip = format!("--use-compress-program=gzip -n {}", staged.gzip_level());
    tar.args([&gzip, &format!("--transform=s,^\\.,{name},"), "--file"]);
    output(tar.arg(&made).arg("--directory").arg(directory).arg("."))?;
    Ok(made)
}

/// Writes the checksums of these files, as `sha256sum --check` reads them.
pub(super) fn checksums(release: &Release, files: &[PathBuf]) -> Result<PathBuf, Error> {
    let line = |path: &PathBuf| -> Result<String, Error> {
        let hash = Sha256::digest(std::fs::read(path)?);
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("{hash}  {}\n", path.file_name().map(Path::new).ok_or("no name")?.display()))
    };
    let mut lines = files.iter().map(line).collect::<Result<Vec<_>, _>>()?;
    lines.sort_by(|a, b| a.split(' ').next_back().cmp(&b.split(' ').next_back()));
    let made = release.dist.join("SHA256SUMS");
    std::fs::write(&made, lines.concat())?;
    Ok(made)
}
