//! Recognises files and directories that Python can run, so that they can be launched without a flag. torchrun passes
//! every target to Python; xlaunch also has subcommands and runs programs, so it inspects the target.

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Extensions of Python's own files: source, compiled, and zip archives with a `__main__.py`.
const EXTENSIONS: [&str; 4] = ["py", "pyw", "pyc", "pyz"];
/// Number of bytes at the start of a file that are inspected.
const HEAD_BYTES: u64 = 4096;

/// Returns whether Python runs this path: a file with one of Python's extensions, a directory or archive with a
/// `__main__.py`, or a text file without an extension that names Python in its first line or is not executable.
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
    let mut head = Vec::new();
    let read = fs_err::File::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head));
    read.is_ok() && is_python_text(&head, found.permissions().mode() & 0o111 != 0)
}

fn is_python_text(head: &[u8], executable: bool) -> bool {
    if head.starts_with(b"PK\x03\x04") {
        return true;
    }
    let first = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    match first.strip_prefix(b"#!") {
        Some(interpreter) => interpreter.windows(6).any(|word| word == b"python"),
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
    }
}
