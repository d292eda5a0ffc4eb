//! Makes the files of a release: `cargo xtask dist`.
//!
//! Each platform gets a binary for old systems (glibc 2.28), a wheel, a Debian package, an RPM package, an archive with
//! the binary and a list of what the binary contains (SBOM). They are in `target/dist`, along with the sources and
//! `SHA256SUMS`. `--fast` packs the release build of this machine instead, and skips packages whose tool is missing.
//!
//! Nothing in the files depends on the time or the place of the build: timestamps are those of the commit, and paths in
//! the binary are replaced. Every file is checked before it is announced.

mod archive;
mod binary;
mod filter;
mod packages;
mod release;
mod sbom;
mod tools;
mod wheel;

use std::path::PathBuf;

use crate::Error;
use crate::workspace::Workspace;
use release::{Platform, Release};
use tools::Tools;

const DIST_USAGE: &str = "usage: cargo xtask dist [--fast | --target TRIPLE...]";

/// Contents of a release.
#[derive(Debug, PartialEq)]
enum Request {
    /// The release build of this machine, as cargo left it.
    Fast,
    /// Portable builds for these platforms.
    Portable(Vec<Platform>),
}

impl Request {
    fn parse(arguments: &[String]) -> Result<Self, Error> {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match arguments.as_slice() {
            [] => Ok(Self::Portable(Platform::ALL.to_vec())),
            ["--fast"] => Ok(Self::Fast),
            flags if flags.chunks(2).all(|flag| flag.len() == 2 && flag[0] == "--target") => {
                let platforms = flags.chunks(2).map(|flag| Platform::of_triple(flag[1]));
                Ok(Self::Portable(platforms.collect::<Result<_, _>>()?))
            }
            _ => Err(DIST_USAGE.into()),
        }
    }
}

/// Makes and checks the files. Returns whether they are as they should be; a problem is an error.
pub(crate) fn run(workspace: &Workspace, arguments: &[String]) -> Result<bool, Error> {
    let request = Request::parse(arguments)?;
    let release = Release::begin(workspace)?;
    let mut made = Vec::new();
    match request {
        Request::Fast => {
            let tools = Tools::installed(&release);
            let binary = binary::local(&release)?;
            made.extend(pack(&release, &tools, &binary, &binary.path)?);
        }
        Request::Portable(platforms) => {
            let tools = Tools::install(&release)?;
            // Runs on this machine, to print man pages and completions, which are the same on all platforms.
            let mut runnable = None;
            for platform in platforms {
                let binary = binary::portable(&release, &tools, platform)?;
                if runnable.is_none() && binary.runs() {
                    runnable = Some(binary.path.clone());
                }
                let runnable = match &runnable {
                    Some(path) => path.clone(),
                    None => binary::local(&release)?.path,
                };
                made.extend(pack(&release, &tools, &binary, &runnable)?);
            }
        }
    }
    made.push(archive::sources(&release)?);
    made.push(archive::checksums(&release, &made)?);
    for path in made {
        let size = std::fs::metadata(&path)?.len();
        println!(
            "{:>10.2} MB  {}",
            size as f64 / 1e6,
            path.strip_prefix(&release.root).unwrap_or(&path).display()
        );
    }
    Ok(true)
}

/// Makes all files for one binary.
fn pack(
    release: &Release,
    tools: &Tools,
    binary: &binary::Binary,
    runnable: &std::path::Path,
) -> Result<Vec<PathBuf>, Error> {
    let staged = packages::Staged::new(release, binary, runnable)?;
    let mut made = vec![archive::binary(release, &staged)?, wheel::build(release, &staged)?];
    made.extend(packages::debian(release, tools, &staged)?);
    made.extend(packages::rpm(release, tools, &staged)?);
    made.push(sbom::write(release, binary)?);
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_platforms_are_built_unless_some_are_named() {
        let parse = |words: &[&str]| {
            Request::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()).ok()
        };
        assert_eq!(parse(&[]), Some(Request::Portable(vec![Platform::X86_64, Platform::Aarch64])));
        assert_eq!(parse(&["--fast"]), Some(Request::Fast));
        let named = parse(&["--target", "aarch64-unknown-linux-gnu"]);
        assert_eq!(named, Some(Request::Portable(vec![Platform::Aarch64])));
        for wrong in
            [&["--fast", "--target"][..], &["--target"], &["--target", "riscv64gc-unknown-linux-gnu"]]
        {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
