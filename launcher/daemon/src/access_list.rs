//! POSIX.1e access control lists, as far as the daemon needs them: they let one additional user traverse a directory.

use std::io;
use std::path::Path;

use rustix::fs::{XattrFlags, setxattr};

/// Name of the extended attribute, and the version of its format, from `linux/posix_acl_xattr.h`.
const ATTRIBUTE: &str = "system.posix_acl_access";
const FORMAT_VERSION: u32 = 2;
/// Kinds of entries, from `linux/posix_acl.h`, in the order that the kernel requires.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
/// The id field of entries without an id.
const NO_ID: u32 = u32::MAX;
const EXECUTE: u16 = 1;
const ALL: u16 = 7;

/// Grants the owner all rights to this directory, `uid` the right to traverse it, and other users none.
///
/// # Errors
/// The file system does not support access control lists, or they are turned off.
pub(super) fn allow_user(dir: &Path, uid: u32) -> io::Result<()> {
    let entries = [
        (OWNER, ALL, NO_ID),
        (USER, EXECUTE, uid),
        (GROUP, 0, NO_ID),
        (MASK, EXECUTE, NO_ID),
        (OTHER, 0, NO_ID),
    ];
    let mut bytes = FORMAT_VERSION.to_le_bytes().to_vec();
    for (kind, permissions, id) in entries {
        bytes.extend([kind.to_le_bytes(), permissions.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    Ok(setxattr(dir, ATTRIBUTE, &bytes, XattrFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn group_bits_of_the_mode_are_the_mask() {
        let dir = tempfile::tempdir().unwrap();
        match allow_user(dir.path(), 1234) {
            Ok(()) => assert_eq!(dir.path().metadata().unwrap().permissions().mode() & 0o777, 0o710),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}"),
        }
    }
}
