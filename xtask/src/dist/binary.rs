//! Builds the binary and checks that old systems can run it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::release::{Platform, Release};
use super::tools::Tools;
use crate::Error;
use crate::workspace::{cargo, output};

/// The newest glibc that a portable binary may need: that of RHEL 8, Debian 10 and Ubuntu 18.10.
pub(super) const GLIBC: Version = (2, 28);
/// Largest size of a portable binary, in bytes.
const MAX_SIZE: u64 = 30_000_000;
/// Libraries of glibc. A portable binary is linked with no others; it loads CUDA and NCCL when it needs them.
const GLIBC_LIBRARIES: [&str; 7] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
    "ld-linux-x86-64.so.2",
];

type Version = (u32, u32);

/// A binary to pack.
#[derive(Debug)]
pub(super) struct Binary {
    pub(super) path: PathBuf,
    pub(super) platform: Platform,
    /// Whether it runs on all systems with [`GLIBC`], not only on systems like this one.
    pub(super) portable: bool,
}

impl Binary {
    /// Returns whether this machine can run the binary: an emulator may run one for another processor.
    pub(super) fn runs(&self) -> bool {
        Command::new(&self.path).arg("--version").output().is_ok_and(|output| output.status.success())
    }
}

/// The release build of this machine, which is built if it is outdated.
pub(super) fn local(release: &Release) -> Result<Binary, Error> {
    let path = release.target.join("release/xlaunch");
    let mut build = cargo(&release.root);
    output(build.args(["build", "--release", "--locked", "--package", "xlaunch", "--bin", "xlaunch"]))?;
    Ok(Binary { path, platform: Platform::host()?, portable: false })
}

/// Builds a portable binary.
pub(super) fn portable(release: &Release, tools: &Tools, platform: Platform) -> Result<Binary, Error> {
    let triple = platform.triple();
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo"))).unwrap_or_default();
    let prefixes = prefixes(&[(&release.root, "xlaunch"), (&home, "cargo"), (&release.target, "target")]);
    let rust = prefixes.iter().map(|prefix| format!("--remap-path-prefix={prefix}")).collect::<Vec<_>>();
    let c = prefixes.iter().map(|prefix| format!("-ffile-prefix-map={prefix}")).collect::<Vec<_>>();
    let mut build = tools.command("cargo-zigbuild", &release.root)?;
    build.args(["zigbuild", "--locked", "--profile", "portable", "--package", "xlaunch", "--bin", "xlaunch"]);
    build.args(["--target", &format!("{triple}.{}.{}", GLIBC.0, GLIBC.1)]);
    build.env("CARGO_TARGET_DIR", &release.target).env("CARGO_INCREMENTAL", "0");
    build.env("CARGO_ENCODED_RUSTFLAGS", rust.join("\x1f"));
    build.env(format!("CFLAGS_{}", triple.replace('-', "_")), c.join(" "));
    output(build.env("SOURCE_DATE_EPOCH", release.time.to_string()))?;
    let path = release.target.join(triple).join("portable/xlaunch");
    check(&path)?;
    Ok(Binary { path, platform, portable: true })
}

/// Replacements of paths that differ between machines. Of several that match, compilers use the last.
fn prefixes(directories: &[(&Path, &str)]) -> Vec<String> {
    directories.iter().map(|(path, name)| format!("{}=/usr/src/{name}", path.display())).collect()
}

/// Checks what a portable binary needs, and its size.
fn check(path: &Path) -> Result<(), Error> {
    let size = std::fs::metadata(path)?.len();
    if size > MAX_SIZE {
        return Err(format!("{}: {size} bytes, more than {MAX_SIZE}", path.display()).into());
    }
    let read = |what: &str| output(Command::new("readelf").args(["--wide", what]).arg(path));
    let (needed, versions) = (read("--dynamic")?, read("--version-info")?);
    if let Some(library) = foreign_library(&needed) {
        return Err(format!("{}: is linked with `{library}`", path.display()).into());
    }
    let newest =
        newest_glibc(&versions).ok_or_else(|| format!("{}: no versions of glibc", path.display()))?;
    if newest > GLIBC {
        let ((major, minor), most) = (newest, format!("{}.{}", GLIBC.0, GLIBC.1));
        return Err(format!("{}: needs glibc {major}.{minor}, newer than {most}", path.display()).into());
    }
    println!("{}: {size} bytes, glibc {}.{} or newer", path.display(), newest.0, newest.1);
    Ok(())
}

/// A library that `readelf --dynamic` lists and that is not part of glibc.
fn foreign_library(dynamic: &str) -> Option<&str> {
    let needed = dynamic.lines().filter(|line| line.contains("(NEEDED)"));
    let names = needed.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0));
    names.into_iter().find(|name| !GLIBC_LIBRARIES.contains(name) && *name != "ld-linux-aarch64.so.1")
}

/// The newest version of glibc that `readelf --version-info` lists.
fn newest_glibc(versions: &str) -> Option<Version> {
    let names = versions.split("GLIBC_").skip(1);
    let version = |name: &str| {
        let name = name.split(|char: char| char != '.' && !char.is_ascii_digit()).next()?;
        let mut parts = name.split('.');
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    };
    names.filter_map(version).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_version_of_glibc_is_found_by_number() {
        let versions = "\
 000000: Version: 1  File: libc.so.6  Cnt: 3
  0x0010:   Name: GLIBC_2.9  Flags: none  Version: 4
  0x0020:   Name: GLIBC_2.28  Flags: none  Version: 3
  0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 2
  0x0040:   Name: GLIBC_PRIVATE  Flags: none  Version: 2";
        assert_eq!(newest_glibc(versions), Some((2, 28)));
        assert_eq!(newest_glibc("No version information found in this file."), None);
    }

    #[test]
    fn libraries_outside_of_glibc_are_found() {
        let dynamic = |library: &str| {
            format!(
                " 0x0001 (NEEDED)  Shared library: [libc.so.6]\n 0x0001 (NEEDED)  Shared library: [{library}]\n \
                 0x001e (FLAGS)  [x]\n"
            )
        };
        assert_eq!(foreign_library(&dynamic("libm.so.6")), None);
        assert_eq!(foreign_library(&dynamic("libgcc_s.so.1")), Some("libgcc_s.so.1"));
    }

    #[test]
    fn narrower_prefixes_come_last() {
        let root = Path::new("/home/a/x");
        let target = root.join("target");
        let expected = ["/home/a/x=/usr/src/xlaunch", "/home/a/x/target=/usr/src/target"];
        assert_eq!(prefixes(&[(root, "xlaunch"), (&target, "target")]), expected);
    }
}
