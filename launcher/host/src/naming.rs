//! Names derived from user input: names of files and directories, and suggestions for misspelled names.

use std::path::{Path, PathBuf};

/// Below the limit of 255 bytes of most file systems, so that a number can follow.
const MAX_NAME_BYTES: usize = 200;

/// `name`, `name-2`, `name-3`, ...
pub fn numbered(name: &str, number: u32) -> String {
    if number > 1 { format!("{name}-{number}") } else { name.to_owned() }
}

/// Creates `dir/name`, or the first of `name-2`, `name-3`, ... that does not exist.
pub fn unique(dir: &Path, name: &str, mode: u32) -> std::io::Result<(PathBuf, String)> {
    use std::os::unix::fs::DirBuilderExt;
    for attempt in 1.. {
        let id = numbered(name, attempt);
        let path = dir.join(&id);
        match std::fs::DirBuilder::new().mode(mode).create(&path) {
            Ok(()) => return Ok((path, id)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    unreachable!("the loop is infinite")
}

/// Converts text to a printable path component of letters, digits, `.`, `_` and `-`, without a leading dot. A long text
/// is cut off.
pub fn file_name(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = text.chars().map(plain).take(MAX_NAME_BYTES).collect();
    match name.strip_prefix('.') {
        Some(rest) => format!("_{rest}"),
        None if name.is_empty() => "_".into(),
        None => name,
    }
}

/// Returns the known name that is most similar to `name`, with the Jaro-Winkler similarity from 0 to 1.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<(&'a str, f64)> {
    let similar = known.into_iter().map(|known| (known, strsim::jaro_winkler(known, name)));
    similar.max_by(|one, other| one.1.total_cmp(&other.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_printable_and_short_enough_for_a_file() {
        for (text, expected) in [("a b/ä", "a_b__"), (".hidden", "_hidden"), ("", "_"), ("v1.2-x", "v1.2-x")]
        {
            assert_eq!(file_name(text), expected);
        }
        let dir = tempfile::tempdir().unwrap();
        let (_, name) = unique(dir.path(), &file_name(&"n".repeat(1000)), 0o700).unwrap();
        let (_, second) = unique(dir.path(), &name, 0o700).unwrap();
        assert_eq!(second, format!("{name}-2"));
    }
}
