//! Recognises files and directories that Python can run, so that they can be launched without a flag. torchrun passes
//! every target to Python; xlaunch also has subcommands and runs programs, so it inspects the target.

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Extensions of Python's own files: source, compiled, and zip archives with a `__main__.py`.
const EXTENSIONS: [&str; 4] = ["py", "pyw", "pyc", "pyz"];
/// Number of bytes at the start of a file that are inspected.
const HEAD_BYTES: u64 = 4096;

/// Returns whether Python runs this path: a file with one of Python's extensions, a directory or archive with a
/// `__main__.py`, or a text file without an extension that is not executable or names Python or xlaunch in its first
/// line.
pub(super) fn is_python(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
        return true;
    }
    let Ok(found) = fs_err::metadata(path) else { return false };
    if found.is_dir() {
        return path.join("__main__.py").is_file();
    }
    if !found.is_file() || extension.is_some_and(|extension| extension != "zip") {
        return false;
    }
    head(path).is_some_and(|head| is_python_text(&head, found.permissions().mode() & 0o111 != 0))
}

/// Returns the first line of a program that makes the system start it with xlaunch. Such a program cannot be launched
/// as a program: it would start itself again and again.
pub(super) fn launching_line(path: &Path) -> Option<String> {
    // Names without a slash are looked up in PATH.
    if !path.as_os_str().as_bytes().contains(&b'/') || !path.is_file() {
        return None;
    }
    let head = head(path)?;
    let interpreter = interpreter(&head).filter(|interpreter| launches(interpreter))?;
    Some(format!("#!{}", String::from_utf8_lossy(interpreter)))
}

fn head(path: &Path) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    fs_err::File::open(path).ok()?.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    Some(head)
}

/// Returns the first line after `#!`.
fn interpreter(head: &[u8]) -> Option<&[u8]> {
    head.split(|byte| *byte == b'\n').next()?.strip_prefix(b"#!")
}

fn launches(interpreter: &[u8]) -> bool {
    interpreter.split(|byte| b" /\t".contains(byte)).any(|word| word == b"xlaunch")
}

fn is_python_text(head: &[u8], executable: bool) -> bool {
    if head.starts_with(b"PK\x03\x04") {
        return true;
    }
    match interpreter(head) {
        // A script that xlaunch itself interprets is one of Python's.
        Some(interpreter) => interpreter.windows(6).any(|word| word == b"python") || launches(interpreter),
        // The head may end within a character, but must otherwise be valid UTF-8.
        None => !executable && !head.is_empty() && !head.contains(&0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_archives_and_packages_are_for_python_and_programs_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, contents: &[u8], mode: u32| {
            let path = dir.path().join(name);
            fs_err::write(&path, contents).unwrap();
            fs_err::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let package = dir.path().join("package");
        fs_err::create_dir(&package).unwrap();
        assert!(!is_python(&package));
        fs_err::write(package.join("__main__.py"), "").unwrap();
        assert!(is_python(&package));
        for name in ["a.py", "a.pyz", "a.pyc"] {
            assert!(is_python(Path::new(name)), "{name}");
        }
        for (name, contents, mode, expected) in [
            ("train", &b"import torch\n"[..], 0o644, true),
            ("script", b"#!/usr/bin/env python3\n", 0o755, true),
            ("launched", b"#!/usr/bin/env -S xlaunch --nproc 2\n", 0o755, true),
            ("archive", b"PK\x03\x04\0\0", 0o644, true),
            ("app.zip", b"PK\x03\x04\0\0", 0o644, true),
            ("shell", b"#!/bin/sh\n", 0o755, false),
            ("program", b"\x7fELF\0\0", 0o755, false),
            ("data", b"\x00\x01", 0o644, false),
            ("notes.txt", b"text", 0o644, false),
            ("run.sh", b"echo\n", 0o644, false),
        ] {
            assert_eq!(is_python(&file(name, contents, mode)), expected, "{name}");
        }
        assert!(!is_python(&dir.path().join("nosuch")));
        for (line, expected) in [
            ("#!/usr/bin/env -S xlaunch --nproc 2 --", true),
            ("#!/opt/bin/xlaunch --", true),
            ("#!/bin/sh xlaunch.sh", false),
            ("xlaunch", false),
        ] {
            let path = file("program", format!("{line}\n").as_bytes(), 0o755);
            assert_eq!(launching_line(&path), expected.then(|| line.into()));
        }
    }
}
