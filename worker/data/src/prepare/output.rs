//! The output directory: which process may write to it, and when it is complete.
//!
//! ```text
//! empty or new --claim--> lock file --> shards, tokenizer.json ... --complete--> manifest.json, no lock file
//! ```
//! - A directory with a manifest is complete. It is replaced only on request, and only when all of the new data,
//!   including its manifest, has been written to a subdirectory. See [`Step`] for the replacement.
//! - A subdirectory with a manifest holds new data that is complete, apart from files that have been moved to the
//!   directory already. If the process that wrote it is gone, the next preparation first finishes the replacement.
//! - Any other directory with a lock file and no manifest was interrupted, or is being written by the process that
//!   holds the lock.
//! - A directory with anything else is not touched, and only files with these names are ever deleted.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::PrepareError;
use crate::TOKENIZER_FILE;
use crate::chat::{CONFIG_FILE, TEMPLATE_FILE};
use crate::manifest::{
    Manifest, REPLACEMENT, Split, TRAIN_PREFIX, VAL_PREFIX, has_replacement, is_shard_name, is_side_name,
};
use crate::prepare::Options;

const LOCK_FILE: &str = ".prepare.lock";
const UNFINISHED_MANIFEST: &str = ".manifest.json.tmp";

/// A directory to which only this process writes.
#[derive(Debug)]
pub(super) struct Output {
    dir: PathBuf,
    /// True if the directory contains complete data.
    replaces: bool,
    /// True if this process made the directory.
    created: bool,
    /// Locked until the process ends.
    _lock: File,
}

impl Output {
    /// Creates the directory and removes leftovers of an interrupted preparation, but no complete data.
    pub(super) fn claim(dir: &Path, overwrite: bool) -> Result<Self, PrepareError> {
        let failed = |error: io::Error| PrepareError::write(dir, &error);
        let created = !dir.exists();
        std::fs::create_dir_all(dir).map_err(failed)?;
        // Symbolic links are resolved only once, here.
        let dir = dir.canonicalize().map_err(failed)?;
        let interrupted = dir.join(LOCK_FILE).exists();
        let before = survey(&dir, interrupted, overwrite)?;
        let lock = lock(&dir)?;
        // Another process may have been faster.
        let present = survey(&dir, true, overwrite)?;
        if has_replacement(&dir) || before.is_empty() && !present.is_empty() && !interrupted {
            return Err(in_use(&dir));
        }
        let replacement = dir.join(REPLACEMENT);
        if replacement.exists() {
            std::fs::remove_dir_all(&replacement).map_err(failed)?;
        }
        let replaces = present.iter().any(|name| name == Manifest::FILE);
        if replaces {
            std::fs::create_dir(&replacement).map_err(failed)?;
        } else {
            present.iter().try_for_each(|name| remove(&dir, name))?;
        }
        Ok(Self { dir, replaces, created, _lock: lock })
    }

    /// Returns the directory for the new data.
    pub(super) fn dir(&self) -> PathBuf {
        if self.replaces { self.dir.join(REPLACEMENT) } else { self.dir.clone() }
    }

    /// Makes the written data valid: the manifest appears last.
    pub(super) fn complete(&self, manifest: &Manifest, options: &Options) -> Result<(), PrepareError> {
        let (dir, written) = (&self.dir, self.dir());
        write_synced(&written.join(TOKENIZER_FILE), options.tokenizer.to_json().as_bytes())?;
        for (name, contents) in options.chat.iter().flat_map(|chat| &chat.templates.copies) {
            write_synced(&written.join(name), contents.as_bytes())?;
        }
        sync(&written)?;
        let json = serde_json::to_string_pretty(manifest)
            .map_err(|error| PrepareError::Internal(error.to_string()))?;
        let unfinished = written.join(UNFINISHED_MANIFEST);
        write_synced(&unfinished, format!("{json}\n").as_bytes())?;
        let path = written.join(Manifest::FILE);
        std::fs::rename(unfinished, &path).map_err(|error| PrepareError::write(&path, &error))?;
        sync(&written)?;
        if self.replaces {
            replace(dir)?;
        }
        remove(dir, LOCK_FILE)
    }

    /// Removes the files that this process has written, unless they have begun to replace others. A file that cannot
    /// be removed is harmless: without a manifest the data is not accepted.
    pub(super) fn abandon(&self) {
        let manifest = self.dir.join(Manifest::FILE);
        if self.replaces {
            // Without the manifest of the old data, its other files may be gone as well: the next preparation finishes
            // the replacement.
            if manifest.exists() {
                self.discard_replacement();
                let _ = std::fs::remove_file(self.dir.join(LOCK_FILE));
            }
            return;
        }
        let _ = std::fs::remove_file(manifest);
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| is_ours(name) && name != LOCK_FILE) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        let _ = std::fs::remove_file(self.dir.join(LOCK_FILE));
        if self.created {
            let _ = std::fs::remove_dir(&self.dir);
        }
    }

    /// Removes the new data, starting with its manifest: an incomplete replacement must never be finished.
    fn discard_replacement(&self) {
        let replacement = self.dir.join(REPLACEMENT);
        let _ = std::fs::remove_file(replacement.join(Manifest::FILE));
        if !has_replacement(&self.dir) {
            let _ = std::fs::remove_dir_all(replacement);
        }
    }
}

/// Finishes a replacement that was interrupted. Returns whether there was one.
pub(super) fn finish_replacement(dir: &Path) -> Result<bool, PrepareError> {
    if !has_replacement(dir) {
        return Ok(false);
    }
    let _lock = lock(dir)?;
    // Another process may have been faster.
    let interrupted = has_replacement(dir);
    if interrupted {
        replace(dir)?;
    }
    remove(dir, LOCK_FILE)?;
    Ok(interrupted)
}

/// Replaces the data in `dir` with the complete data in its subdirectory.
fn replace(dir: &Path) -> Result<(), PrepareError> {
    replacement_steps(dir)?.iter().try_for_each(|step| step.apply(dir))
}

/// A step of replacing the data in a directory with the complete data in its subdirectory.
///
/// A replacement can stop before any step and be finished later, because the files show how far it got:
/// ```text
/// remove the old manifest, then all other old files --> move tokenizer.json, then all other new files
///     --> move the new manifest --> remove the subdirectory
/// ```
/// All data has a `tokenizer.json`. While that of the new data is in the subdirectory, the files in the directory are
/// old; after that they are new.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Remove a file of the old data.
    Remove(String),
    /// Make all steps so far durable.
    Sync,
    /// Move a file of the new data to the directory.
    Move(String),
    /// Remove the empty subdirectory.
    RemoveSubdirectory,
}

impl Step {
    pub(super) fn apply(&self, dir: &Path) -> Result<(), PrepareError> {
        let written = dir.join(REPLACEMENT);
        let failed = |error: io::Error| PrepareError::write(dir, &error);
        match self {
            Self::Remove(name) => remove(dir, name),
            Self::Sync => sync(dir),
            Self::Move(name) => std::fs::rename(written.join(name), dir.join(name)).map_err(failed),
            Self::RemoveSubdirectory => std::fs::remove_dir(written).map_err(failed),
        }
    }
}

/// Returns the steps that are left to replace the data in `dir`.
pub(super) fn replacement_steps(dir: &Path) -> Result<Vec<Step>, PrepareError> {
    let present = names(dir)?.into_iter().filter(|name| is_ours(name) && name != LOCK_FILE).collect();
    Ok(steps(present, names(&dir.join(REPLACEMENT))?))
}

/// Orders the steps that replace the data. `present` and `new` are the names of the files in the directory and in its
/// subdirectory.
fn steps(present: Vec<String>, new: Vec<String>) -> Vec<Step> {
    let old = if new.iter().any(|name| name == TOKENIZER_FILE) { present } else { Vec::new() };
    let (old_manifest, old): (Vec<_>, Vec<_>) = old.into_iter().partition(|name| name == Manifest::FILE);
    let (new_manifest, mut new): (Vec<_>, Vec<_>) = new.into_iter().partition(|name| name == Manifest::FILE);
    new.sort_by_key(|name| name != TOKENIZER_FILE);
    let remove = |names: Vec<String>| names.into_iter().map(Step::Remove).chain([Step::Sync]);
    let moved = |names: Vec<String>| names.into_iter().map(Step::Move).chain([Step::Sync]);
    let steps = [Step::Sync].into_iter().chain(remove(old_manifest)).chain(remove(old));
    steps.chain(moved(new)).chain(moved(new_manifest)).chain([Step::RemoveSubdirectory]).collect()
}

/// Returns the names of the files in a directory.
fn names(dir: &Path) -> Result<Vec<String>, PrepareError> {
    let failed = |error: io::Error| PrepareError::read(dir.display(), &error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_file() {
            names.extend(entry.file_name().into_string());
        }
    }
    Ok(names)
}

/// Resolves a directory that is named by a symbolic link.
pub(super) fn resolved(dir: &Path) -> PathBuf {
    dir.canonicalize().or_else(|_| std::path::absolute(dir)).unwrap_or_else(|_| dir.into())
}

/// Returns the files that may be removed. Fails if the directory must not be written to.
fn survey(dir: &Path, interrupted: bool, overwrite: bool) -> Result<Vec<String>, PrepareError> {
    let failed = |error: io::Error| PrepareError::read(dir.display(), &error);
    let refused = |reason: String| Err(PrepareError::Usage(format!("--output {}: {reason}", dir.display())));
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let kind = entry.file_type().map_err(failed)?;
        if name.to_str() == Some(REPLACEMENT) && kind.is_dir() {
            continue;
        }
        let is_file = kind.is_file();
        match name.to_str().filter(|name| is_file && is_ours(name)) {
            Some(LOCK_FILE) => {}
            Some(name) => names.push(name.to_owned()),
            None => {
                return refused(format!(
                    "the directory contains `{}`, which no preparation writes\nhelp: name a new or empty directory",
                    name.to_string_lossy().escape_debug()
                ));
            }
        }
    }
    if names.iter().any(|name| name == Manifest::FILE) {
        let Ok(manifest) = Manifest::read(dir) else {
            return refused(
                "its manifest.json does not describe prepared data\nhelp: name another directory".into(),
            );
        };
        return match (overwrite, names.iter().find(|name| !is_listed(&manifest, name))) {
            (false, _) => refused("it is prepared data already\nhelp: replace it with --overwrite".into()),
            (true, Some(name)) if !interrupted => refused(format!("its manifest does not name `{name}`")),
            (true, _) => Ok(names),
        };
    }
    match names.first().filter(|_| !interrupted) {
        Some(name) => {
            refused(format!("the directory contains `{name}`, but no manifest\nhelp: name another directory"))
        }
        None => Ok(names),
    }
}

/// Returns whether a file belongs to the data that a manifest describes.
fn is_listed(manifest: &Manifest, name: &str) -> bool {
    let is_one_of = |split: &Split| {
        split.starts.as_ref().is_some_and(|starts| starts.name == name)
            || split
                .shards
                .iter()
                .any(|shard| shard.name == name || shard.mask.as_ref().is_some_and(|mask| mask.name == name))
    };
    match name {
        CONFIG_FILE | TEMPLATE_FILE => manifest.chat.is_some(),
        _ if [TRAIN_PREFIX, VAL_PREFIX].iter().any(|prefix| name.starts_with(prefix)) => {
            is_one_of(&manifest.train) || is_one_of(&manifest.val)
        }
        _ => true,
    }
}

fn is_ours(name: &str) -> bool {
    [LOCK_FILE, UNFINISHED_MANIFEST, Manifest::FILE, TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE]
        .contains(&name)
        || [TRAIN_PREFIX, VAL_PREFIX]
            .iter()
            .any(|prefix| is_shard_name(name, prefix) || is_side_name(name, prefix))
}

fn lock(dir: &Path) -> Result<File, PrepareError> {
    let path = dir.join(LOCK_FILE);
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(|error| PrepareError::write(&path, &error))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // Some file systems have no locks, such as Lustre that is mounted without `flock`.
        Ok(()) | Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(in_use(dir)),
        Err(error) => Err(PrepareError::write(&path, &error.into())),
    }
}

fn in_use(dir: &Path) -> PrepareError {
    PrepareError::Usage(format!(
        "--output {}: another `xlaunch data prepare` is writing there",
        dir.display()
    ))
}

fn write_synced(path: &Path, contents: &[u8]) -> Result<(), PrepareError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(contents)?;
        file.sync_all()
    };
    write().map_err(|error| PrepareError::write(path, &error))
}

fn remove(dir: &Path, name: &str) -> Result<(), PrepareError> {
    let path = dir.join(name);
    std::fs::remove_file(&path)
        .map_err(|error| PrepareError::Usage(format!("failed to remove {}: {error}", path.display())))
}

fn sync(dir: &Path) -> Result<(), PrepareError> {
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        // The file system has no such operation for directories.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced.map_err(|error| PrepareError::write(dir, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_cannot_be_synced_is_no_error() {
        sync(Path::new("/proc")).unwrap();
        assert!(sync(Path::new("/nonexistent")).is_err());
    }
}
