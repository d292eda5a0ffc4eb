//! The wheel: a zip archive with the binary, man pages and completions. pip copies them to the environment's `bin` and
//! `share`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use toml::Value;

use super::filter::filter;
use super::packages::Staged;
use super::release::Release;
use crate::Error;
use crate::workspace::output;

/// Where pip puts the completions of each shell, below the environment.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/xlaunch"),
    ("zsh", "share/zsh/site-functions/_xlaunch"),
    ("fish", "share/fish/vendor_completions.d/xlaunch.fish"),
];

/// A file of the archive.
struct Entry {
    name: String,
    executable: bool,
    contents: Vec<u8>,
}

/// Makes the wheel, and installs it in an empty directory if this machine can run the binary.
pub(super) fn build(release: &Release, staged: &Staged) -> Result<PathBuf, Error> {
    let system = if staged.portable { "manylinux_2_28" } else { "linux" };
    let tag = format!("py3-none-{system}_{}", staged.platform.cpu());
    let made = release.dist.join(format!("xlaunch-{}-{tag}.whl", release.version));
    std::fs::write(&made, archive(entries(release, staged, &tag)?, staged.gzip_level())?)?;
    if staged.platform.is_host() {
        check(&made, &release.version)?;
    }
    Ok(made)
}

fn entries(release: &Release, staged: &Staged, tag: &str) -> Result<Vec<Entry>, Error> {
    let prefix = format!("xlaunch-{}", release.version);
    let mut entries = Vec::new();
    let mut add = |name: String, executable: bool, contents: Vec<u8>| {
        entries.push(Entry { name, executable, contents });
    };
    add(format!("{prefix}.data/scripts/xlaunch"), true, std::fs::read(staged.binary())?);
    let mut pages = std::fs::read_dir(staged.man())?.collect::<Result<Vec<_>, _>>()?;
    pages.sort_by_key(std::fs::DirEntry::file_name);
    for page in pages {
        let name = page.file_name().to_string_lossy().into_owned();
        add(format!("{prefix}.data/data/share/man/man1/{name}"), false, std::fs::read(page.path())?);
    }
    for (shell, path) in COMPLETIONS {
        add(format!("{prefix}.data/data/{path}"), false, std::fs::read(staged.completions(shell))?);
    }
    let info = format!("{prefix}.dist-info");
    add(format!("{info}/licenses/LICENSE"), false, std::fs::read(release.root.join("LICENSE"))?);
    add(format!("{info}/METADATA"), false, metadata(release)?.into_bytes());
    let wheel = format!("Wheel-Version: 1.0\nGenerator: xtask\nRoot-Is-Purelib: false\nTag: {tag}\n");
    add(format!("{info}/WHEEL"), false, wheel.into_bytes());
    let record = format!("{info}/RECORD");
    let mut lines = String::new();
    for Entry { name, contents, .. } in &entries {
        let hash = URL_SAFE_NO_PAD.encode(Sha256::digest(contents));
        let _ = writeln!(lines, "{name},sha256={hash},{}", contents.len());
    }
    lines += &format!("{record},,\n");
    entries.push(Entry { name: record, executable: false, contents: lines.into_bytes() });
    Ok(entries)
}

/// The description of the package, from `pyproject.toml` and the README.
fn metadata(release: &Release) -> Result<String, Error> {
    let read = |name: &str| std::fs::read_to_string(release.root.join(name));
    let project: toml::Table = read("pyproject.toml")?.parse()?;
    let project = project.get("project").and_then(Value::as_table).ok_or("pyproject.toml: no [project]")?;
    let text = |key: &str| {
        let text = project.get(key).and_then(Value::as_str);
        text.ok_or_else(|| format!("pyproject.toml: no project.{key}"))
    };
    let list = |key: &str| {
        let list = project.get(key).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        list.iter().filter_map(Value::as_str).collect::<Vec<_>>()
    };
    let mut out = format!("Metadata-Version: 2.4\nName: {}\nVersion: {}\n", text("name")?, release.version);
    let _ = writeln!(out, "Summary: {}", text("description")?);
    let _ = writeln!(out, "License-Expression: {}\nLicense-File: LICENSE", text("license")?);
    let _ = writeln!(out, "Requires-Python: {}", text("requires-python")?);
    let _ = writeln!(out, "Keywords: {}", list("keywords").join(","));
    list("classifiers").iter().for_each(|classifier| out += &format!("Classifier: {classifier}\n"));
    let _ = write!(out, "Description-Content-Type: text/markdown\n\n{}", read(text("readme")?)?);
    Ok(out)
}

/// Returns a zip archive. All files have the first date that zip knows.
fn archive(entries: Vec<Entry>, gzip_level: &str) -> Result<Vec<u8>, Error> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    let count = u16::try_from(entries.len())?;
    for Entry { name, executable, contents } in entries {
        let Deflated { crc, packed } = deflate(&contents, gzip_level)?;
        let mut common = Vec::new();
        // Version 2.0, names in UTF-8, deflate, 00:00 on 1980-01-01.
        [20_u16, 1 << 11, 8, 0, 1 << 5 | 1].iter().for_each(|field| common.extend(field.to_le_bytes()));
        let sizes = [crc, u32::try_from(packed.len())?, u32::try_from(contents.len())?];
        sizes.iter().for_each(|field| common.extend(field.to_le_bytes()));
        common.extend(u16::try_from(name.len())?.to_le_bytes());
        common.extend(0_u16.to_le_bytes());
        let mode: u32 = if executable { 0o100_755 } else { 0o100_644 };
        directory.extend(b"PK\x01\x02\x14\x03");
        directory.extend(&common);
        directory.extend([0; 6]);
        directory.extend((mode << 16).to_le_bytes());
        directory.extend(u32::try_from(out.len())?.to_le_bytes());
        directory.extend(name.as_bytes());
        out.extend(b"PK\x03\x04");
        out.extend(common);
        out.extend(name.as_bytes());
        out.extend(packed);
    }
    let (size, start) = (u32::try_from(directory.len())?, u32::try_from(out.len())?);
    out.extend(directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    [count, count].iter().for_each(|field| out.extend(field.to_le_bytes()));
    [size, start].iter().for_each(|field| out.extend(field.to_le_bytes()));
    out.extend([0; 2]);
    Ok(out)
}

/// Contents of a file as zip stores them.
struct Deflated {
    crc: u32,
    packed: Vec<u8>,
}

/// Compresses with gzip, whose format has the same parts: a header of ten bytes without a name, the compressed data,
/// and eight bytes that begin with the checksum. A development build of a compressor would take a minute.
fn deflate(contents: &[u8], level: &str) -> Result<Deflated, Error> {
    const GZIP_HEADER: usize = 10;
    let gzip = filter(Command::new("gzip").args(["-n", level]), contents)?;
    let parts = gzip.split_at_checked(GZIP_HEADER).and_then(|(_, rest)| rest.split_last_chunk::<8>());
    let (packed, [crc @ .., _, _, _, _]) = parts.ok_or("gzip has written too little")?;
    Ok(Deflated { crc: u32::from_le_bytes(*crc), packed: packed.to_vec() })
}

/// Installs the wheel with pip, without a network, and runs what is installed.
fn check(wheel: &Path, version: &str) -> Result<(), Error> {
    let directory = tempfile::tempdir()?;
    let venv = directory.path().join("venv");
    let mut python = Command::new("python3");
    if !matches!(python.args(["-m", "venv"]).arg(&venv).output(), Ok(output) if output.status.success()) {
        println!("not run: pip install {}: needs Python 3 with `venv`", wheel.display());
        return Ok(());
    }
    let mut pip = Command::new(venv.join("bin/pip"));
    pip.args(["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]);
    output(pip.arg(wheel))?;
    let printed = output(Command::new(venv.join("bin/xlaunch")).arg("--version"))?;
    if !printed.contains(version) {
        return Err(format!("{}: `xlaunch --version` prints `{}`", wheel.display(), printed.trim()).into());
    }
    if !venv.join("share/man/man1/xlaunch.1").is_file() {
        return Err(format!("{} lacks the man page", wheel.display()).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, executable: bool, contents: &str) -> Entry {
        Entry { name: name.into(), executable, contents: contents.into() }
    }

    #[test]
    fn archive_is_read_by_python_with_modes() {
        let script = "import sys, zipfile\n\
            archive = zipfile.ZipFile(sys.argv[1])\n\
            assert archive.testzip() is None\n\
            for info in archive.infolist():\n    \
                print(info.filename, oct(info.external_attr >> 16), archive.read(info).decode(), info.date_time[0])\n";
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.whl");
        let entries = || vec![entry("a/x", true, &"x".repeat(20)), entry("ü", false, "y")];
        std::fs::write(&path, archive(entries(), "-9").unwrap()).unwrap();
        assert_eq!(
            archive(entries(), "-9").unwrap(),
            std::fs::read(&path).unwrap(),
            "the same bytes each time"
        );
        let Ok(read) = Command::new("python3").args(["-c", script]).arg(&path).output() else { return };
        let text = String::from_utf8_lossy(&read.stdout).into_owned();
        let expected = format!("a/x 0o100755 {} 1980\nü 0o100644 y 1980\n", "x".repeat(20));
        assert_eq!(text, expected, "{}", String::from_utf8_lossy(&read.stderr));
    }
}
