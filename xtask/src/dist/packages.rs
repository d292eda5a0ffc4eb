//! Packages for Debian and Fedora: the binary with man pages, completions and the daemon's units. Their contents are
//! listed in `launcher/Cargo.toml`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::binary::Binary;
use super::filter::filter;
use super::release::{Platform, Release};
use super::tools::Tools;
use crate::Error;
use crate::workspace::output;

/// Files that every package must contain. Man pages may be compressed.
const REQUIRED: [&str; 9] = [
    "usr/bin/xlaunch",
    "usr/share/man/man1/xlaunch.1",
    "usr/share/man/man1/xlaunch-daemon.1",
    "usr/share/bash-completion/completions/xlaunch",
    "usr/share/fish/vendor_completions.d/xlaunch.fish",
    "etc/xlaunch/daemon.toml",
    "usr/lib/systemd/system/xlaunch.service",
    "usr/lib/systemd/system/xlaunch.socket",
    "etc/logrotate.d/xlaunch",
];
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// A binary with its man pages and completions, in a directory like cargo's target directory.
#[derive(Debug)]
pub(super) struct Staged {
    target: TempDir,
    pub(super) platform: Platform,
    pub(super) portable: bool,
}

impl Staged {
    /// Copies the binary, and writes its man pages and completions. `runnable` is a build for this machine.
    pub(super) fn new(release: &Release, binary: &Binary, runnable: &Path) -> Result<Self, Error> {
        let target = tempfile::tempdir_in(&release.target)?;
        let staged = Self { target, platform: binary.platform, portable: binary.portable };
        std::fs::create_dir_all(staged.man())?;
        if binary.portable {
            std::fs::copy(&binary.path, staged.binary())?;
        } else {
            output(Command::new("strip").arg(&binary.path).arg("-o").arg(staged.binary()))?;
        }
        output(Command::new(runnable).args(["gen", "man"]).arg(staged.man()))?;
        for shell in SHELLS {
            let text = output(Command::new(runnable).args(["gen", "completions", shell]))?;
            std::fs::write(staged.completions(shell), text)?;
        }
        Ok(staged)
    }

    /// Option of gzip for archives of the binary.
    pub(super) fn gzip_level(&self) -> &'static str {
        if self.portable { "-9" } else { "-1" }
    }

    fn release(&self) -> PathBuf {
        self.target.path().join(self.platform.triple()).join("release")
    }

    pub(super) fn binary(&self) -> PathBuf {
        self.release().join("xlaunch")
    }

    /// Directory of the man pages.
    pub(super) fn man(&self) -> PathBuf {
        self.release().join("package/man")
    }

    pub(super) fn completions(&self, shell: &str) -> PathBuf {
        self.release().join("package").join(format!("xlaunch.{shell}"))
    }
}

/// Makes the Debian package; `None` if cargo-deb is missing.
pub(super) fn debian(release: &Release, tools: &Tools, staged: &Staged) -> Result<Option<PathBuf>, Error> {
    let Some(mut build) = command(release, tools, staged, "cargo-deb")? else { return Ok(None) };
    let made = release.dist.join(format!("xlaunch_{}_{}.deb", release.version, staged.platform.debian()));
    build.args(["--quiet", "--locked", "--no-build", "--no-strip", "--package", "xlaunch"]);
    build.args(["--deb-revision", "", "--output"]).arg(&made);
    if staged.portable {
        build.args(["--variant", "portable"]);
    } else {
        build.arg("--fast");
    }
    output(&mut build)?;
    match output(Command::new("dpkg-deb").arg("--contents").arg(&made)) {
        Ok(contents) => {
            let names = contents.lines().filter_map(|line| line.split_whitespace().nth(5));
            check(&made, &names.map(|name| name.trim_start_matches("./").to_owned()).collect::<Vec<_>>())?;
        }
        Err(error) => println!("not run: contents of {}: {error}", made.display()),
    }
    Ok(Some(made))
}

/// Makes the RPM package; `None` if cargo-generate-rpm is missing.
pub(super) fn rpm(release: &Release, tools: &Tools, staged: &Staged) -> Result<Option<PathBuf>, Error> {
    let Some(mut build) = command(release, tools, staged, "cargo-generate-rpm")? else { return Ok(None) };
    let cpu = staged.platform.cpu();
    let made = release.dist.join(format!("xlaunch-{}-1.{cpu}.rpm", release.version));
    // Every version of rpm reads gzip.
    build.args(["--package", "launcher", "--arch", cpu, "--payload-compress", "gzip", "--auto-req", "no"]);
    build.arg("--target-dir").arg(staged.target.path()).arg("--output").arg(&made);
    output(&mut build)?;
    check(&made, &rpm_contents(&std::fs::read(&made)?)?)?;
    Ok(Some(made))
}

/// A tool that packs the staged files.
fn command(release: &Release, tools: &Tools, staged: &Staged, name: &str) -> Result<Option<Command>, Error> {
    if tools.find(name).is_none() {
        println!("not run: {name}: not installed (`cargo install {name}`)");
        return Ok(None);
    }
    let mut command = tools.command(name, &release.root)?;
    command.args(["--target", staged.platform.triple()]).env("CARGO_TARGET_DIR", staged.target.path());
    command.env("SOURCE_DATE_EPOCH", release.time.to_string());
    Ok(Some(command))
}

/// Checks that a package has the files that it must have.
fn check(package: &Path, names: &[String]) -> Result<(), Error> {
    let has = |file: &str| names.iter().any(|name| name == file || name.strip_suffix(".gz") == Some(file));
    match REQUIRED.iter().find(|file| !has(file)) {
        Some(missing) => Err(format!("{} lacks {missing}", package.display()).into()),
        None => Ok(()),
    }
}

/// Names of the files in an RPM package: its payload is a cpio archive, compressed by gzip, behind the headers.
fn rpm_contents(package: &[u8]) -> Result<Vec<String>, Error> {
    const GZIP: [u8; 3] = [0x1f, 0x8b, 8];
    const CPIO: &[u8] = b"070701";
    let starts = package.windows(GZIP.len()).enumerate().filter(|(_, bytes)| *bytes == GZIP);
    for (start, _) in starts {
        match filter(Command::new("gzip").arg("-dc").stderr(Stdio::null()), &package[start..]) {
            Ok(archive) if archive.starts_with(CPIO) => {
                return cpio_names(&archive).ok_or_else(|| "a damaged payload".into());
            }
            // Bytes of the headers that only look like the beginning of gzip's format.
            _ => {}
        }
    }
    Err("an RPM package without a payload".into())
}

/// Names of the files in a cpio archive. Headers are numbers of eight hexadecimal digits; name and contents are padded
/// to multiples of four bytes.
fn cpio_names(archive: &[u8]) -> Option<Vec<String>> {
    const CPIO_HEADER: usize = 110;
    let mut names = Vec::new();
    let mut at = 0;
    loop {
        let field = |index: usize| {
            let digits = archive.get(at + 6 + 8 * index..at + 14 + 8 * index)?;
            usize::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
        };
        let (size, name_size) = (field(6)?, field(11)?);
        let name = archive.get(at + CPIO_HEADER..at + CPIO_HEADER + name_size.checked_sub(1)?)?;
        let name = String::from_utf8_lossy(name).into_owned();
        if name == "TRAILER!!!" {
            return Some(names);
        }
        names.push(name.trim_start_matches("./").trim_start_matches('/').to_owned());
        at = (at + CPIO_HEADER + name_size).next_multiple_of(4) + size.next_multiple_of(4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpio(files: &[(&str, &str)]) -> Vec<u8> {
        let mut archive = Vec::new();
        for (name, contents) in files.iter().chain([&("TRAILER!!!", "")]) {
            let fields = [0, 0, 0, 0, 0, 0, contents.len(), 0, 0, 0, 0, name.len() + 1, 0];
            archive.extend(b"070701");
            archive.extend(fields.iter().flat_map(|field| format!("{field:08X}").into_bytes()));
            archive.extend(name.bytes().chain([0]));
            archive.resize(archive.len().next_multiple_of(4), 0);
            archive.extend(contents.bytes());
            archive.resize(archive.len().next_multiple_of(4), 0);
        }
        archive
    }

    #[test]
    fn files_of_an_rpm_package_are_listed() {
        let archive = cpio(&[("./usr/bin/xlaunch", "12345"), ("./etc/x", "")]);
        let payload = filter(Command::new("gzip").arg("-n"), &archive).unwrap();
        let package = [&b"headers \x1f\x8b\x08 "[..], &payload].concat();
        assert_eq!(rpm_contents(&package).unwrap(), ["usr/bin/xlaunch", "etc/x"]);
        assert!(rpm_contents(b"headers").is_err());
    }

    #[test]
    fn package_without_a_required_file_is_refused() {
        let mut names: Vec<String> = REQUIRED.map(str::to_owned).to_vec();
        names[1] += ".gz";
        let package = Path::new("x.deb");
        assert!(check(package, &names).is_ok());
        names.remove(4);
        let error = check(package, &names).unwrap_err().to_string();
        assert_eq!(error, "x.deb lacks usr/share/fish/vendor_completions.d/xlaunch.fish");
    }
}
