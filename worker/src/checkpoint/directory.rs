//! What a directory of checkpoints contains, and what happens to the entries that are not used.
//!
//! ```text
//! step-00000020             a checkpoint
//! step-00000010.keep        one that is never deleted
//! step-00000040.damaged     rejected
//! step-00000050.abandoned   of a run that was continued from an earlier step
//! .tmp-*                    being written or deleted, or left by a job that was killed
//! .old-step-00000030        replaced by another one of the same step
//! ```

use std::io;
use std::path::{Path, PathBuf};

use xlaunch_proto::model::ModelShape;
use xlaunch_proto::quantities::shortage_texts;

use super::manifest::{self, Checked};
use super::write::{REPLACED, TEMPORARY};
use super::{CheckpointError, MANIFEST, State, name, parse_optimizer_name, read};

/// Where a run has its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// Suffix of checkpoints that are never deleted.
const PINNED: &str = ".keep";
/// Suffix of checkpoints that were rejected.
const DAMAGED: &str = ".damaged";
/// Checkpoints of one name that can be set aside.
const MAX_SET_ASIDE: u32 = 10_000;
/// Suffix of checkpoints that do not belong to the run any more.
const ABANDONED: &str = ".abandoned";

/// A directory that has the name of a checkpoint.
#[derive(Debug)]
pub struct Found {
    /// Its path.
    pub path: PathBuf,
    /// Steps completed, by its name.
    pub step: u64,
    /// It is never deleted.
    pub pinned: bool,
    /// Its state, or why it is rejected.
    pub state: Result<State, CheckpointError>,
}

/// All checkpoints of a directory, newest first. None if the directory does not exist.
pub fn scan(dir: &Path) -> Result<Vec<Found>, CheckpointError> {
    let read = |error: io::Error| CheckpointError::Read { path: dir.into(), reason: error.to_string() };
    let entries = match fs_err::read_dir(dir) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>().map_err(read)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(read(error)),
    };
    let names: Vec<String> =
        entries.iter().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let found = |name: &String| {
        let (step, pinned) = parse(name)?;
        let path = dir.join(name);
        // A marker beside the checkpoint pins it, too.
        let pinned = pinned || names.contains(&format!("{name}{PINNED}"));
        if name.ends_with(PINNED) && !path.is_dir() {
            return None;
        }
        let state = manifest::check(&path).and_then(|Checked { state, .. }| match state.step == step {
            true => Ok(state),
            false => Err(CheckpointError::Damaged {
                path: path.clone(),
                reason: format!("its state is of step {}", state.step),
            }),
        });
        Some(Found { path, step, pinned, state })
    };
    let mut checkpoints: Vec<Found> = names.iter().filter_map(found).collect();
    checkpoints.sort_by(|a, b| (b.step, &b.path).cmp(&(a.step, &a.path)));
    Ok(checkpoints)
}

/// The step in the name of a checkpoint, and whether it is pinned.
fn parse(entry: &str) -> Option<(u64, bool)> {
    let (base, pinned) = entry.strip_suffix(PINNED).map_or((entry, false), |base| (base, true));
    let step = base.strip_prefix("step-")?.parse().ok()?;
    (name(step) == base).then_some((step, pinned))
}

/// The newest valid checkpoint of a directory; `None` if there is none, for whatever reason.
pub fn newest(dir: &Path) -> Option<PathBuf> {
    scan(dir).ok()?.into_iter().find(|found| found.state.is_ok()).map(|found| found.path)
}

/// A checkpoint to resume from.
#[derive(Debug)]
pub struct Choice {
    /// Its path.
    pub path: PathBuf,
    /// Its state.
    pub state: State,
    /// Newer ones that were rejected or never completed, and why.
    pub rejected: Vec<(PathBuf, CheckpointError)>,
}

impl Choice {
    /// Path, and the rejected ones.
    pub fn into_parts(self) -> (PathBuf, Vec<(PathBuf, CheckpointError)>) {
        (self.path, self.rejected)
    }
}

/// The newest valid checkpoint of a directory. `None` if it contains no checkpoint.
///
/// # Errors
/// If there are checkpoints and none is valid, or the directory cannot be read.
pub fn choose(dir: &Path) -> Result<Option<Choice>, CheckpointError> {
    let mut rejected = Vec::new();
    for Found { path, state, .. } in scan(dir)? {
        match state {
            Ok(state) => {
                let newer = unfinished(dir).into_iter().filter(|(step, _)| *step > state.step);
                rejected.extend(newer.map(|(_, error)| (dir.to_owned(), error)));
                return Ok(Some(Choice { path, state, rejected }));
            }
            Err(error) => rejected.push((path, error)),
        }
    }
    match rejected.is_empty() {
        true => Ok(None),
        false => Err(CheckpointError::NoneValid {
            path: dir.into(),
            reasons: rejected.into_iter().map(|(_, error)| error.to_string()).collect(),
        }),
    }
}

/// The checkpoint that a user means by a path: that of a checkpoint, of a directory of checkpoints, or of a run, of
/// which it is the newest valid one. Returns rejected ones, too.
pub fn locate(path: &Path) -> Result<(PathBuf, Vec<(PathBuf, CheckpointError)>), CheckpointError> {
    let is_checkpoint = path.join(MANIFEST).exists()
        || path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    if is_checkpoint {
        return Ok((path.into(), Vec::new()));
    }
    let choice = match choose(path)? {
        Some(choice) => Some(choice),
        None => choose(&path.join(CHECKPOINTS))?,
    };
    choice.map(Choice::into_parts).ok_or_else(|| CheckpointError::None { path: path.into() })
}

/// The state of the checkpoint `path`.
pub fn state(path: &Path) -> Result<State, CheckpointError> {
    manifest::check(path).map(|checked| checked.state)
}

/// The state of the checkpoint `path`, which must be of this model.
pub fn open(path: &Path, shape: &ModelShape) -> Result<State, CheckpointError> {
    let Checked { state, .. } = manifest::check(path)?;
    read::check_model(path, &state, shape)?;
    Ok(state)
}

/// Renames a rejected checkpoint, so that it is neither tried nor counted again. Returns its new path.
pub fn mark_damaged(path: &Path) -> io::Result<PathBuf> {
    set_aside(path, DAMAGED)
}

/// The name that [`mark_damaged`] has given to this checkpoint last, perhaps in another process.
pub fn marked_damaged(path: &Path) -> Option<PathBuf> {
    set_aside_names(path, DAMAGED).take_while(|name| name.symlink_metadata().is_ok()).last()
}

/// Renames the checkpoints of `dir` after `step`: a run continues from there, and writes others of the same names.
/// Returns their new paths.
pub fn abandon_after(dir: &Path, step: Option<u64>) -> io::Result<Vec<PathBuf>> {
    let found = scan(dir).map_err(io::Error::other)?;
    let later = found.into_iter().filter(|found| step.is_none_or(|step| found.step > step));
    later.map(|found| set_aside(&found.path, ABANDONED)).collect()
}

fn set_aside(path: &Path, suffix: &str) -> io::Result<PathBuf> {
    let Some(free) = set_aside_names(path, suffix).find(|name| name.symlink_metadata().is_err()) else {
        return Err(io::Error::other(format!("too many entries like {}{suffix}", path.display())));
    };
    fs_err::rename(path, &free)?;
    Ok(free)
}

/// Names for a checkpoint that is set aside, in the order in which they are used.
fn set_aside_names(path: &Path, suffix: &str) -> impl Iterator<Item = PathBuf> {
    (1..=MAX_SET_ASIDE).map(move |number| {
        let number = if number == 1 { String::new() } else { format!("-{number}") };
        let mut renamed = path.as_os_str().to_owned();
        renamed.push(format!("{suffix}{number}"));
        PathBuf::from(renamed)
    })
}

/// The saves of a directory that were begun and never completed, newest first.
pub fn unfinished(dir: &Path) -> Vec<(u64, CheckpointError)> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let (step, _) = parse(entry.file_name().to_str()?.strip_prefix(TEMPORARY)?)?;
            let path = entry.path();
            Some((step, CheckpointError::Unfinished { step, reason: what_is_missing(&path), path }))
        })
        .collect();
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    found
}

/// How far a save has come.
fn what_is_missing(path: &Path) -> String {
    if path.join(MANIFEST).exists() {
        return "it was not put in place".into();
    }
    let entries = fs_err::read_dir(path).into_iter().flatten().flatten();
    let parts: Vec<_> =
        entries.filter_map(|entry| parse_optimizer_name(entry.file_name().to_str()?)).collect();
    match parts.first() {
        Some((_, world)) => format!("it has no manifest, and files of {} of {world} ranks", parts.len()),
        None => "it has no manifest".into(),
    }
}

/// Removes what a job that was killed has left, and puts a checkpoint back that it was about to replace. Only for the
/// holder of the directory's lock, while no worker runs. Returns the saves that were never completed.
pub fn clean(dir: &Path) -> io::Result<Vec<CheckpointError>> {
    let entries = match fs_err::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let unfinished = unfinished(dir);
    for entry in entries {
        let entry = entry?;
        let entry_name = entry.file_name();
        let Some(entry_name) = entry_name.to_str() else { continue };
        if let Some(replaced) = entry_name.strip_prefix(REPLACED) {
            match dir.join(replaced).exists() {
                true => fs_err::remove_dir_all(entry.path())?,
                false => fs_err::rename(entry.path(), dir.join(replaced))?,
            }
        } else if entry_name.starts_with(TEMPORARY) {
            match entry.file_type()?.is_dir() {
                true => fs_err::remove_dir_all(entry.path())?,
                false => fs_err::remove_file(entry.path())?,
            }
        }
    }
    Ok(unfinished.into_iter().map(|(_, error)| error).collect())
}

/// Checks that checkpoints of `bytes` bytes can be written to this directory, which exists.
pub fn check_writable(dir: &Path, bytes: u64) -> Result<(), CheckpointError> {
    let failed = |reason: String| CheckpointError::Write { path: dir.into(), reason };
    let probe = dir.join(format!("{TEMPORARY}probe-{}", std::process::id()));
    let result = (|| {
        fs_err::read_dir(dir)?.next().transpose()?;
        fs_err::create_dir(&probe)?;
        let file = fs_err::File::create(probe.join("file"))?;
        file.sync_all()?;
        fs_err::remove_dir_all(&probe)
    })();
    if let Err(error) = result {
        // The probe is removed by the next start if that fails, too.
        let _ = fs_err::remove_dir_all(&probe);
        return Err(failed(error.to_string()));
    }
    check_room(dir, bytes)
}

/// Checks that the file system of `dir`, or of its nearest parent that exists, has room for `bytes` bytes.
pub fn check_room(dir: &Path, bytes: u64) -> Result<(), CheckpointError> {
    let Some(existing) = dir.ancestors().find(|ancestor| ancestor.exists()) else { return Ok(()) };
    // A file system that does not tell is given the benefit of the doubt.
    let Ok(stat) = rustix::fs::statvfs(existing) else { return Ok(()) };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if stat.f_blocks == 0 || free >= bytes {
        return Ok(());
    }
    let [needed, free] = shortage_texts(bytes, free);
    let reason = format!("a checkpoint takes {needed}, but only {free} are free");
    Err(CheckpointError::Write { path: dir.into(), reason })
}

/// What the next attempt of a run resumes from, after cleaning up behind workers that were killed.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The checkpoint; `None` if the run starts again from its beginning, or from memory.
    pub checkpoint: Option<PathBuf>,
    /// The newest memory snapshot is at least as new as any checkpoint.
    pub from_memory: bool,
    /// There is a checkpoint of the memory snapshot's step, too.
    pub on_disk: bool,
    /// Checkpoints that were rejected, for the user.
    pub notes: Vec<String>,
}

/// Finds the newest checkpoint that `run` itself has saved in `dir`. Without one, it is `source`, which the run began
/// with, or the newest one beside it if that was renamed because it is damaged.
///
/// `snapshot` is the step of the newest memory snapshot of the run. It is taken if no checkpoint is newer. No file is
/// opened to find that out unless the name of a checkpoint is newer: that may be damaged, or of another run.
///
/// # Errors
/// If there is none any more, although the run began with one.
pub fn recover(
    dir: &Path,
    run: &str,
    source: Option<&Path>,
    snapshot: Option<u64>,
) -> Result<Recovered, CheckpointError> {
    let mut notes = Vec::new();
    match clean(dir) {
        Ok(unfinished) => notes.extend(unfinished.iter().map(ToString::to_string)),
        Err(error) => notes.push(format!("failed to remove what the last attempt left: {error}")),
    }
    let newest = newest_name(dir);
    if memory_is_newest(snapshot, newest) {
        return Ok(Recovered { checkpoint: None, from_memory: true, on_disk: newest == snapshot, notes });
    }
    let found = scan(dir).unwrap_or_else(|error| {
        notes.push(error.to_string());
        Vec::new()
    });
    let mut own = None;
    for Found { path, state, .. } in found {
        match state {
            Ok(state) if state.run == run => {
                own = Some((state.step, path));
                break;
            }
            Ok(_) => {}
            Err(error) => notes.push(reject(&path, &error)),
        }
    }
    let newest = own.as_ref().map(|(step, _)| *step);
    if memory_is_newest(snapshot, newest) {
        return Ok(Recovered { checkpoint: None, from_memory: true, on_disk: newest == snapshot, notes });
    }
    if let Some((_, path)) = own {
        return Ok(Recovered { checkpoint: Some(path), notes, ..Recovered::default() });
    }
    let checkpoint = match source {
        Some(source) if !source.exists() => {
            let beside = source.parent().unwrap_or(source);
            let choice = choose(beside)?;
            let choice = choice.ok_or_else(|| CheckpointError::None { path: beside.into() })?;
            // They may belong to another run, which has to set them aside. Those of this directory are known already.
            let rejected = choice.rejected.iter().map(|(_, error)| error.to_string());
            let rejected: Vec<String> = rejected.filter(|note| !notes.contains(note)).collect();
            notes.extend(rejected);
            Some(choice.path)
        }
        source => source.map(PathBuf::from),
    };
    Ok(Recovered { checkpoint, notes, ..Recovered::default() })
}

/// Whether to resume from a memory snapshot, given the step of the newest checkpoint. The same step is the same state,
/// and memory is faster.
fn memory_is_newest(snapshot: Option<u64>, checkpoint: Option<u64>) -> bool {
    snapshot.is_some_and(|snapshot| checkpoint.is_none_or(|checkpoint| snapshot >= checkpoint))
}

/// The highest step in the names of checkpoints, whatever they contain.
fn newest_name(dir: &Path) -> Option<u64> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| parse(entry.file_name().to_str()?)).map(|(step, _)| step).max()
}

/// Renames a damaged checkpoint, and describes that. One that cannot be read now, or not by this version, is left.
pub fn reject(path: &Path, error: &CheckpointError) -> String {
    if !matches!(error, CheckpointError::Damaged { .. }) {
        return error.to_string();
    }
    match mark_damaged(path) {
        Ok(renamed) => format!("{error}; renamed to {}", renamed.display()),
        Err(failed) => format!("{error}; {failed}"),
    }
}
