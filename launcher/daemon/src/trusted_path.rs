//! Checks that only root and the daemon's user can change the file or directory at a path: the state directory, the
//! configuration, programs that the daemon runs.
//!
//! Every component is checked, starting at `/` and following links, before anything is opened, created or repaired: a
//! repair would hide that others could write there before. In a sticky directory such as `/tmp` other users can add
//! entries but not replace existing ones, so a sticky directory is accepted on the way to an entry, but not as the last
//! component.
//!
//! A path that passes the check stays safe, because everyone who can change one of its components is trusted.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::users;

/// Maximum number of links followed, which is the kernel's limit.
const MAX_LINKS: u32 = 40;
const STICKY: u32 = 0o1000;
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// The user and group that are trusted in addition to root.
#[derive(Clone, Copy, Debug)]
struct Trusted {
    uid: u32,
    gid: u32,
}

/// Checks all existing components of a path. Only a trusted user can create the missing ones.
///
/// # Errors
/// `PermissionDenied`, with a text that names the component and the problem.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    Trusted::own().walk(&std::path::absolute(path)?).map(drop)
}

/// Checks the directory of a file that is about to be created, as [`check`] does.
pub(crate) fn check_parent(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    // The added components make a sticky parent directory acceptable, because it is not the last component then.
    let Some(parent) = path.parent() else { return Ok(()) };
    Trusted::own().walk(&parent.join(".missing/file")).map(drop)
}

/// Checks the entries of a trusted directory.
pub(crate) fn check_entries(dir: &Path) -> io::Result<()> {
    let trusted = Trusted::own();
    for entry in fs_err::read_dir(dir)? {
        let path = entry?.path();
        let Some(found) = trusted.walk(&path)? else { continue };
        // A hard link has the owner of its file, so another user may have linked a file of root here.
        if found.is_file() && found.nlink() > 1 {
            return Err(refused(&path, "has another hard link"));
        }
    }
    Ok(())
}

impl Trusted {
    fn own() -> Self {
        Self { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
    }

    /// Checks each component of an absolute path. Returns the metadata of the last one, if it exists.
    fn walk(self, path: &Path) -> io::Result<Option<Metadata>> {
        let mut pending: VecDeque<OsString> = names(path);
        let (mut at, mut links) = (PathBuf::from("/"), 0);
        let mut found = std::fs::symlink_metadata(&at)?;
        self.check(&at, &found, pending.is_empty())?;
        while let Some(name) = pending.pop_front() {
            if name == ".." {
                at.pop();
                continue;
            }
            let next = at.join(&name);
            found = match std::fs::symlink_metadata(&next) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => {
                    return Err(io::Error::new(error.kind(), format!("{}: {error}", next.display())));
                }
                Ok(found) => found,
            };
            if !found.is_symlink() {
                self.check(&next, &found, pending.is_empty())?;
                at = next;
                continue;
            }
            self.check_owner(&next, &found)?;
            links += 1;
            if links > MAX_LINKS {
                return Err(refused(&next, "has too many links"));
            }
            let target = std::fs::read_link(&next)?;
            if target.is_absolute() {
                at = "/".into();
            }
            let mut names = names(&target);
            names.append(&mut pending);
            pending = names;
        }
        Ok(Some(found))
    }

    fn check_owner(self, path: &Path, found: &Metadata) -> io::Result<()> {
        if found.uid() == 0 || found.uid() == self.uid {
            return Ok(());
        }
        let (owner, own) = (users::label(found.uid()), users::label(self.uid));
        Err(refused(path, &format!("belongs to user {owner}, but the daemon runs as user {own}")))
    }

    fn check(self, path: &Path, found: &Metadata, is_last: bool) -> io::Result<()> {
        self.check_owner(path, found)?;
        // The mode of a socket controls who may connect, not who may replace it.
        if !found.is_dir() && !found.is_file() {
            return Ok(());
        }
        // The daemon's own group is often its user's private group, and root's group has no members.
        let group_is_trusted = if is_last {
            self.uid != 0 && found.gid() == self.gid
        } else {
            [0, self.gid].contains(&found.gid())
        };
        let writes = if group_is_trusted { OTHERS_WRITE } else { OTHERS_WRITE | GROUP_WRITES };
        let is_sticky = found.is_dir() && found.mode() & STICKY != 0 && !is_last;
        if found.mode() & writes == 0 || is_sticky {
            return Ok(());
        }
        Err(refused(
            path,
            "can be changed by other users; check what they have put there, then run `chmod go-w` on it",
        ))
    }
}

/// Returns the components of a path after the root.
fn names(path: &Path) -> VecDeque<OsString> {
    let is_name =
        |component: &Component<'_>| matches!(component, Component::Normal(_) | Component::ParentDir);
    path.components().filter(is_name).map(|component| component.as_os_str().to_owned()).collect()
}

fn refused(path: &Path, problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{} {problem}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    /// A user other than root and the daemon's user.
    const OTHER: u32 = 65_534;

    fn mode(path: &Path, mode: u32) {
        fs_err::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn problem(path: &Path) -> String {
        check(path).unwrap_err().to_string()
    }

    #[test]
    fn path_is_refused_if_any_component_can_be_changed_by_others() {
        let dir = tempfile::tempdir().unwrap();
        let (parent, leaf) = (dir.path().join("parent"), dir.path().join("parent/leaf"));
        fs_err::create_dir_all(&leaf).unwrap();
        for (parent_mode, leaf_mode, refused) in [
            (0o755, 0o755, None),
            (0o777, 0o755, Some(&parent)),
            (0o1777, 0o755, None),
            (0o755, 0o777, Some(&leaf)),
            (0o755, 0o1777, Some(&leaf)),
        ] {
            mode(&parent, parent_mode);
            mode(&leaf, leaf_mode);
            let found = check(&leaf).err().map(|error| error.to_string());
            let expected = refused.map(|path| format!("{} can be changed by other users", path.display()));
            assert_eq!(found.is_some(), expected.is_some(), "{parent_mode:o} {leaf_mode:o} {found:?}");
            assert!(found.unwrap_or_default().starts_with(&expected.unwrap_or_default()));
        }
        mode(&leaf, 0o755);
        check(&leaf.join("missing/too")).unwrap();
        mode(&leaf, 0o1777);
        check_parent(&leaf.join("socket")).unwrap();
        mode(&leaf, 0o777);
        check_parent(&leaf.join("socket")).unwrap_err();
    }

    #[test]
    fn path_is_refused_if_another_user_owns_a_component_or_a_link() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (leaf, link) = (dir.path().join("parent/leaf"), dir.path().join("link"));
        fs_err::create_dir_all(&leaf).unwrap();
        symlink("parent/./leaf", &link).unwrap();
        check(&link).unwrap();
        rustix::fs::chownat(
            rustix::fs::CWD,
            &link,
            Some(rustix::fs::Uid::from_raw(OTHER)),
            None,
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
        assert!(
            problem(&link).starts_with(&format!("{} belongs to user ", link.display())),
            "{}",
            problem(&link)
        );
        chown(dir.path().join("parent"), Some(OTHER), None).unwrap();
        assert!(problem(&leaf).contains("parent belongs to user"), "{}", problem(&leaf));
    }

    #[test]
    fn links_are_followed_and_loops_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("open");
        fs_err::create_dir(&open).unwrap();
        mode(&open, 0o777);
        let link = dir.path().join("link");
        symlink(&open, &link).unwrap();
        assert!(problem(&link.join("x")).contains("open can be changed"), "{}", problem(&link.join("x")));
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        symlink(&one, &other).unwrap();
        symlink(&other, &one).unwrap();
        assert!(problem(&one).contains("too many links"));
    }

    #[test]
    fn entry_with_a_second_hard_link_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("journal"), "").unwrap();
        check_entries(dir.path()).unwrap();
        fs_err::hard_link(dir.path().join("journal"), dir.path().join("other")).unwrap();
        assert!(check_entries(dir.path()).unwrap_err().to_string().contains("another hard link"));
    }
}
