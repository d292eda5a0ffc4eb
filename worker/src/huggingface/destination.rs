//! The destination of an export: a directory that either contains a whole export or does not exist.
//!
//! Files are written to a hidden sibling directory, `.NAME.exporting`, which is renamed at the end. If an export is
//! killed, the next export to the same place removes its leftovers. A lock keeps two exports apart.

use std::fs::TryLockError;
use std::io;
use std::path::{Path, PathBuf};

use fs_err::File;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::os::unix::fs::MetadataExt;
use xlaunch_proto::disk::sync_dir;

use super::writer::{PRODUCER, write_error};
use super::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use super::{INDEX, ModelError, WEIGHTS, card};
use crate::checkpoint::{has_no_locks, read_header};
use crate::inherited::{CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG};

/// Files of an export other than weights.
const FILES: [&str; 8] = [
    CONFIG,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    INDEX,
    GENERATION_CONFIG,
    card::MODEL_CARD,
    TOKENIZER_CONFIG,
    xlaunch_data::TOKENIZER_FILE,
];

/// A directory that is being written.
#[derive(Debug)]
pub(crate) struct Destination {
    target: PathBuf,
    temporary: PathBuf,
    /// The temporary directory, locked.
    _lock: File,
    /// True if an earlier export is replaced.
    replaces: bool,
    committed: bool,
}

impl Destination {
    /// Checks that an export to `output` is possible, and starts it.
    pub(crate) fn claim(output: &Path, overwrite: bool) -> Result<Self, ModelError> {
        let target = resolve(output)?;
        let replaces = check_target(&target, overwrite)?;
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let temporary = target.with_file_name(format!(".{name}.exporting"));
        let failed = |error: io::Error| write_error(&temporary, &error);
        let lock = lock(&temporary).map_err(failed)?.ok_or_else(|| ModelError::Output {
            path: target.clone(),
            reason: "another export to it is running".into(),
        })?;
        let destination = Self { target, temporary, _lock: lock, replaces, committed: false };
        destination.clear().map_err(|error| write_error(&destination.temporary, &error))?;
        Ok(destination)
    }

    /// Directory in which files are written.
    pub(crate) fn path(&self) -> &Path {
        &self.temporary
    }

    /// Moves the directory, whose files are synced, into place. Returns its final path.
    pub(crate) fn commit(mut self) -> Result<PathBuf, ModelError> {
        self.put_in_place().map_err(|error| write_error(&self.target, &error))?;
        Ok(self.target.clone())
    }

    fn put_in_place(&mut self) -> io::Result<()> {
        sync_dir(&self.temporary)?;
        if self.replaces {
            match renameat_with(CWD, &self.temporary, CWD, &self.target, RenameFlags::EXCHANGE) {
                // The earlier export now has the temporary name; `drop` removes it.
                Ok(()) => return sync_parent(&self.target),
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    fs_err::remove_dir_all(&self.target)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        // This also replaces an empty directory, and fails if files have appeared in it in the meantime.
        fs_err::rename(&self.temporary, &self.target)?;
        self.committed = true;
        sync_parent(&self.target)
    }

    /// Removes the leftovers of an export that was killed.
    fn clear(&self) -> io::Result<()> {
        for entry in fs_err::read_dir(&self.temporary)? {
            fs_err::remove_file(entry?.path())?;
        }
        Ok(())
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if !self.committed {
            // If this fails, the next export to the same place tries again.
            let _ = fs_err::remove_dir_all(&self.temporary);
        }
    }
}

/// Resolves `output` to a directory: links are followed, and its parent exists.
fn resolve(output: &Path) -> Result<PathBuf, ModelError> {
    let failed = |error: io::Error| write_error(output, &error);
    let unnamed = || ModelError::Output { path: output.into(), reason: "it has no name".into() };
    if output.symlink_metadata().is_ok() {
        let broken = |_| ModelError::Output { path: output.into(), reason: "it is a link to nothing".into() };
        let target = fs_err::canonicalize(output).map_err(broken)?;
        return target.file_name().is_some().then(|| target.clone()).ok_or_else(unnamed);
    }
    let name = output.file_name().ok_or_else(unnamed)?;
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs_err::create_dir_all(parent).map_err(failed)?;
    Ok(fs_err::canonicalize(parent).map_err(failed)?.join(name))
}

/// Returns whether an earlier export is replaced. Refuses anything else that exists, except an empty directory.
fn check_target(target: &Path, overwrite: bool) -> Result<bool, ModelError> {
    let refused = |reason: &str| ModelError::Output { path: target.into(), reason: reason.into() };
    let Ok(metadata) = target.symlink_metadata() else { return Ok(false) };
    if !metadata.is_dir() {
        return Err(refused("it is not a directory"));
    }
    let empty = fs_err::read_dir(target).map_err(|error| write_error(target, &error))?.next().is_none();
    match (empty, is_export(target), overwrite) {
        (true, ..) => Ok(false),
        (_, true, true) => Ok(true),
        (_, true, false) => {
            Err(refused("it holds an earlier export; choose another directory or pass `--overwrite`"))
        }
        (_, false, true) => Err(refused(
            "it contains files that are not part of an export; `--overwrite` does not remove them",
        )),
        (_, false, false) => Err(refused("it is not empty; choose another directory")),
    }
}

/// Returns whether a directory contains an export and nothing else.
fn is_export(dir: &Path) -> bool {
    let Ok(entries) = fs_err::read_dir(dir) else { return false };
    let (mut config, mut weights) = (false, false);
    for entry in entries {
        let Ok(entry) = entry else { return false };
        let (name, path) = (entry.file_name(), entry.path());
        let Some(name) = name.to_str().filter(|_| entry.file_type().is_ok_and(|kind| kind.is_file())) else {
            return false;
        };
        let is_config = [CONFIG, ADAPTER_CONFIG].contains(&name);
        config |= is_config;
        if is_config || FILES.contains(&name) {
            continue;
        }
        let of_weights = [WEIGHTS, ADAPTER_WEIGHTS].contains(&name)
            || (name.starts_with("model-") && name.ends_with(".safetensors"));
        if !of_weights || !has_mark(&path) {
            return false;
        }
        weights = true;
    }
    config && weights
}

fn has_mark(path: &Path) -> bool {
    let header = File::open(path).and_then(|file| read_header(&file));
    header.is_ok_and(|(header, _)| {
        let metadata = header.metadata().as_ref();
        metadata.and_then(|metadata| metadata.get(PRODUCER.0)).is_some_and(|value| value == PRODUCER.1)
    })
}

/// Creates the temporary directory and locks it, if its file system can; `None` if another process holds the lock.
fn lock(temporary: &Path) -> io::Result<Option<File>> {
    match fs_err::create_dir(temporary) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if !temporary.symlink_metadata()?.is_dir() {
        return Err(io::Error::other("it is not a directory"));
    }
    let file = File::open(temporary)?;
    match file.file().try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) if has_no_locks(&error) => return Ok(Some(file)),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    // The export that held the lock may have renamed or removed the directory in the meantime.
    let same = fs_err::metadata(temporary).is_ok_and(|now| {
        file.metadata().is_ok_and(|locked| (now.dev(), now.ino()) == (locked.dev(), locked.ino()))
    });
    Ok(same.then_some(file))
}

fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), sync_dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_must_be_new_or_empty_and_is_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let claim = |name: &str| Destination::claim(&dir.path().join(name), true);
        let refusal = |name: &str| claim(name).unwrap_err().to_string();
        fs_err::write(dir.path().join("file"), "x").unwrap();
        fs_err::create_dir_all(dir.path().join("full/sub")).unwrap();
        fs_err::create_dir(dir.path().join("empty")).unwrap();
        std::os::unix::fs::symlink("empty", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("missing", dir.path().join("dangling")).unwrap();
        assert!(refusal("file").contains("not a directory"));
        assert!(refusal("full").contains("files that are not part of an export"));
        assert!(refusal("dangling").contains("it is a link to nothing"));
        assert!(refusal("..").contains("files that are not part of an export"));

        let destination = claim("link").unwrap();
        fs_err::write(destination.path().join(CONFIG), "{}").unwrap();
        assert!(refusal("empty").contains("another export to it is running"));
        let placed = destination.commit().unwrap();
        assert_eq!(placed, fs_err::canonicalize(dir.path()).unwrap().join("empty"));
        assert!(placed.join(CONFIG).exists() && dir.path().join("link").is_symlink());

        let destination = claim("new/deep").unwrap();
        let left = destination.path().to_path_buf();
        drop(destination);
        assert!(!left.exists() && !dir.path().join("new/deep").exists());
        let name = |entry: io::Result<fs_err::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        assert!(fs_err::read_dir(dir.path()).unwrap().map(name).all(|name| !name.contains("exporting")));
    }

    #[test]
    fn remains_of_a_killed_export_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir(dir.path().join(".out.exporting")).unwrap();
        fs_err::write(dir.path().join(".out.exporting/model.safetensors"), "half").unwrap();
        let placed = Destination::claim(&dir.path().join("out"), false).unwrap().commit().unwrap();
        assert!(fs_err::read_dir(placed).unwrap().next().is_none());
    }
}
