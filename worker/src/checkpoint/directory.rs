//! Contents of a directory of checkpoints, and the treatment of entries that are not used.
//!
//! ```text
//! step-00000020             a checkpoint
//! step-00000010.keep        a checkpoint that is never deleted
//! step-00000040.damaged     a rejected checkpoint
//! step-00000050.abandoned   a checkpoint of a run that was continued from an earlier step
//! .tmp-*                    being written or deleted, or left over from a job that was killed
//! .old-step-00000030        replaced by another checkpoint of the same step
//! ```

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use xlaunch_proto::disk::Disk;
use xlaunch_spec::lineage::Recovered;
use xlaunch_spec::model::ModelShape;
use xlaunch_spec::quantities::shortage_texts;

use super::manifest::{self, Checked};
use super::write::{REPLACED, TEMPORARY};
use super::{CheckpointError, MANIFEST, State, lock, name, parse_optimizer_name, read, runs};

/// Name of a run's subdirectory for checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// Maximum number of runs that a message names.
const MAX_NAMED_RUNS: usize = 3;
/// Suffix of checkpoints that are never deleted.
const PINNED: &str = ".keep";
/// Suffix of checkpoints that were rejected.
const DAMAGED: &str = ".damaged";
/// Maximum number of checkpoints of one name that can be set aside.
const MAX_SET_ASIDE: u32 = 10_000;
/// Suffix of checkpoints that no longer belong to the run.
const ABANDONED: &str = ".abandoned";
/// Maximum number of scans of a directory from which a running job deletes checkpoints.
const MAX_SCANS: usize = 10;

/// A directory that has the name of a checkpoint.
#[derive(Debug)]
pub struct Found {
    /// Path of the directory.
    pub path: PathBuf,
    /// Completed steps, according to the name.
    pub step: u64,
    /// True if the checkpoint is exempt from deletion.
    pub pinned: bool,
    /// State of the checkpoint, or the reason why it is rejected.
    pub state: Result<State, CheckpointError>,
}

/// Returns all checkpoints of a directory, newest first; none if the directory does not exist.
pub fn scan(dir: &Path) -> Result<Vec<Found>, CheckpointError> {
    let mut found = scan_once(dir)?;
    // A running job may have deleted a checkpoint after the directory was listed, and saved a newer one.
    let is_gone = |found: &Found| found.state.is_err() && found.path.symlink_metadata().is_err();
    for _ in 1..MAX_SCANS {
        if !found.iter().any(is_gone) {
            break;
        }
        found = scan_once(dir)?;
    }
    Ok(found)
}

fn scan_once(dir: &Path) -> Result<Vec<Found>, CheckpointError> {
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
        // A marker next to the checkpoint pins it, too.
        let pinned = pinned || names.contains(&format!("{name}{PINNED}"));
        if name.ends_with(PINNED) && !path.is_dir() {
            return None;
        }
        let state = manifest::check(&path).and_then(|Checked { state, .. }| {
            if state.step == step {
                Ok(state)
            } else {
                Err(CheckpointError::Damaged {
                    path: path.clone(),
                    reason: format!("its state is of step {}", state.step),
                })
            }
        });
        Some(Found { path, step, pinned, state })
    };
    let mut checkpoints: Vec<Found> = names.iter().filter_map(found).collect();
    checkpoints.sort_by(|a, b| (b.step, &b.path).cmp(&(a.step, &a.path)));
    Ok(checkpoints)
}

/// Parses the name of a checkpoint: the step, and whether the checkpoint is pinned.
fn parse(entry: &str) -> Option<(u64, bool)> {
    let (base, pinned) = entry.strip_suffix(PINNED).map_or((entry, false), |base| (base, true));
    let step = base.strip_prefix("step-")?.parse().ok()?;
    (name(step) == base).then_some((step, pinned))
}

/// Returns the newest valid checkpoint of a directory; `None` if there is none, for any reason.
pub fn newest(dir: &Path) -> Option<PathBuf> {
    scan(dir).ok()?.into_iter().find(|found| found.state.is_ok()).map(|found| found.path)
}

/// A checkpoint to resume from.
#[derive(Debug)]
pub struct Choice {
    /// Path of the checkpoint.
    pub path: PathBuf,
    /// State of the checkpoint.
    pub state: State,
    /// Newer checkpoints that were rejected or never completed, with the reasons.
    pub rejected: Vec<(PathBuf, CheckpointError)>,
}

impl Choice {
    /// Returns the path and the rejected checkpoints.
    pub fn into_parts(self) -> (PathBuf, Vec<(PathBuf, CheckpointError)>) {
        (self.path, self.rejected)
    }
}

/// Returns the newest valid checkpoint of a directory, or `None` if it contains no checkpoint.
///
/// # Errors
/// If there are checkpoints but none is valid, or the directory cannot be read.
pub fn choose(dir: &Path) -> Result<Option<Choice>, CheckpointError> {
    choose_except(dir, &mut Vec::new())
}

/// Chooses a checkpoint like [`choose`]. Moves those of this directory that are in `known`, which were rejected before,
/// to the rejected ones of the choice.
fn choose_except(
    dir: &Path,
    known: &mut Vec<(PathBuf, CheckpointError)>,
) -> Result<Option<Choice>, CheckpointError> {
    let mut rejected = Vec::new();
    for Found { path, state, .. } in scan(dir)? {
        let before = known.iter().position(|(other, _)| *other == path);
        match before.map_or(state, |index| Err(known.swap_remove(index).1)) {
            Ok(state) => {
                // A job that runs is about to complete its save.
                let unfinished = if lock::is_held(dir) { Vec::new() } else { unfinished(dir) };
                let newer = unfinished.into_iter().filter(|(step, _)| *step > state.step);
                rejected.extend(newer.map(|(_, error)| (dir.to_owned(), error)));
                return Ok(Some(Choice { path, state, rejected }));
            }
            Err(error) => rejected.push((path, error)),
        }
    }
    if rejected.is_empty() {
        Ok(None)
    } else {
        Err(CheckpointError::NoneValid {
            path: dir.into(),
            reasons: rejected.into_iter().map(|(_, error)| error.to_string()).collect(),
        })
    }
}

/// Returns the end of a message about a directory without a checkpoint: it names the newest run of a job's directory,
/// or of each job below it, or says that the directory does not exist.
pub(crate) fn newest_run(dir: &Path) -> String {
    if let Some(newest) = runs::newest_of_job(dir) {
        return format!("; its newest run is {}", newest.display());
    }
    let runs = newest_runs_below(dir);
    if !runs.is_empty() {
        let names: Vec<String> =
            runs.iter().take(MAX_NAMED_RUNS).map(|run| run.display().to_string()).collect();
        let more = if runs.len() > names.len() { ", ..." } else { "" };
        format!("; the newest runs of its jobs are {}{more}", names.join(", "))
    } else if dir.exists() {
        String::new()
    } else {
        ": it does not exist".into()
    }
}

/// Returns the newest run of each job whose directory is in `dir`, which then is the `job.output` of these jobs.
fn newest_runs_below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    let mut runs: Vec<PathBuf> = entries.filter_map(|job| runs::newest_of_job(&job.path())).collect();
    runs.sort();
    runs
}

/// Resolves a path given by a user: it may be a checkpoint, a directory of checkpoints, or a run. For the latter two,
/// this is the newest valid checkpoint. Also returns the rejected ones.
pub fn locate(path: &Path) -> Result<(PathBuf, Vec<(PathBuf, CheckpointError)>), CheckpointError> {
    locate_except(path, Vec::new())
}

/// Resolves a path like [`locate`], without the checkpoints in `known`, which were rejected before.
pub fn locate_except(
    path: &Path,
    mut known: Vec<(PathBuf, CheckpointError)>,
) -> Result<(PathBuf, Vec<(PathBuf, CheckpointError)>), CheckpointError> {
    // The name of a run may begin like that, such as `step-by-step`.
    let has_name = |name: &OsStr| parse(name.to_str()?.split('.').next()?);
    if path.join(MANIFEST).exists() || path.file_name().and_then(has_name).is_some() {
        return Ok((path.into(), Vec::new()));
    }
    let choice = match choose_except(path, &mut known)? {
        Some(choice) => Some(choice),
        None => choose_except(&path.join(CHECKPOINTS), &mut known)?,
    };
    choice.map(Choice::into_parts).ok_or_else(|| CheckpointError::None { path: path.into() })
}

/// Reads the state of the checkpoint `path`.
pub fn state(path: &Path) -> Result<State, CheckpointError> {
    manifest::check(path).map(|checked| checked.state)
}

/// Reads the state of the checkpoint `path` and requires that it belongs to this model.
pub fn open(path: &Path, shape: &ModelShape) -> Result<State, CheckpointError> {
    let Checked { state, .. } = manifest::check(path)?;
    read::check_model(path, &state, shape)?;
    Ok(state)
}

/// Renames a rejected checkpoint, so that it is neither tried nor counted again. Returns the new path.
pub fn mark_damaged(path: &Path) -> io::Result<PathBuf> {
    set_aside(path, DAMAGED)
}

/// Returns the latest name that [`mark_damaged`] gave to this checkpoint, perhaps in another process.
pub fn marked_damaged(path: &Path) -> Option<PathBuf> {
    set_aside_names(path, DAMAGED).take_while(|name| name.symlink_metadata().is_ok()).last()
}

/// Renames the checkpoints of `dir` after `step`, from which the run continues: it will write new ones under the same
/// names. Returns the new paths.
pub fn abandon_after(dir: &Path, step: Option<u64>) -> io::Result<Vec<PathBuf>> {
    let found = scan(dir).map_err(io::Error::other)?;
    let later = found.into_iter().filter(|found| step.is_none_or(|step| found.step > step));
    later.map(|found| set_aside(&found.path, ABANDONED)).collect()
}

fn set_aside(path: &Path, suffix: &str) -> io::Result<PathBuf> {
    let Some(free) = set_aside_names(path, suffix).find(|name| name.symlink_metadata().is_err()) else {
        return Err(io::Error::other(format!("too many entries like {}{suffix}", path.display())));
    };
    Disk::default().rename_dir(path, &free)?;
    Ok(free)
}

/// Candidate names for a checkpoint to set aside, in order of use.
fn set_aside_names(path: &Path, suffix: &str) -> impl Iterator<Item = PathBuf> {
    (1..=MAX_SET_ASIDE).map(move |number| {
        let number = if number == 1 { String::new() } else { format!("-{number}") };
        let mut renamed = path.as_os_str().to_owned();
        renamed.push(format!("{suffix}{number}"));
        PathBuf::from(renamed)
    })
}

/// Returns the saves in a directory that were started but never completed, newest first.
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

/// Describes how far a save got.
fn what_is_missing(path: &Path) -> String {
    if path.join(MANIFEST).exists() {
        return "it was not renamed to its final name".into();
    }
    let entries = fs_err::read_dir(path).into_iter().flatten().flatten();
    let parts: Vec<_> =
        entries.filter_map(|entry| parse_optimizer_name(entry.file_name().to_str()?)).collect();
    match parts.first() {
        Some((_, world)) => format!("it has no manifest, and files of {} of {world} ranks", parts.len()),
        None => "it has no manifest".into(),
    }
}

/// Removes the leftovers of a job that was killed, and restores a checkpoint that it was about to replace. Only the
/// holder of the directory's lock may call this, while no worker runs. Returns the saves that were never completed.
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
            if dir.join(replaced).exists() {
                fs_err::remove_dir_all(entry.path())?
            } else {
                fs_err::rename(entry.path(), dir.join(replaced))?
            }
        } else if entry_name.starts_with(TEMPORARY) {
            if entry.file_type()?.is_dir() {
                fs_err::remove_dir_all(entry.path())?
            } else {
                fs_err::remove_file(entry.path())?
            }
        }
    }
    Ok(unfinished.into_iter().map(|(_, error)| error).collect())
}

/// Checks that checkpoints of `bytes` bytes can be written to this existing directory.
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
        // If this fails as well, the next start removes the probe.
        let _ = fs_err::remove_dir_all(&probe);
        return Err(failed(error.to_string()));
    }
    check_room(dir, bytes)
}

/// Checks that the file system of `dir`, or of its nearest existing parent, has room for `bytes` bytes.
pub fn check_room(dir: &Path, bytes: u64) -> Result<(), CheckpointError> {
    let Some(free) = free(dir).filter(|free| *free < bytes) else { return Ok(()) };
    let [needed, free] = shortage_texts(bytes, free);
    let reason = format!("a checkpoint takes {needed}, but only {free} are free");
    Err(CheckpointError::Write { path: dir.into(), reason })
}

/// Returns a warning if `dir` has no room for as many checkpoints of `bytes` bytes as it is to hold at a time.
pub fn room_warning(dir: &Path, bytes: u64, most: u64) -> Option<String> {
    let present = scan(dir).map_or(0, |found| found.len() as u64);
    let needed = bytes.saturating_mul(most.saturating_sub(present));
    let [needed, free] = shortage_texts(needed, free(dir).filter(|free| *free < needed)?);
    Some(format!(
        "checkpoints: only {free} are free in {}, but it has to hold up to {most} at a time, which takes {needed} \
         more: later ones will not be saved; see checkpoint.keep",
        dir.display()
    ))
}

/// Returns the free space of the file system of `dir`, or of its nearest existing parent; `None` if the file system
/// does not report it.
fn free(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir.ancestors().find(|ancestor| ancestor.exists())?).ok()?;
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Finds the newest checkpoint that `run` itself has saved in `dir`. Without one, returns `source`, the checkpoint that
/// the run began with, or the newest one next to it if `source` was renamed because it is damaged.
///
/// `snapshot` is the step of the newest memory snapshot of the run. It is used if no checkpoint is newer. Files are
/// opened only if the name of a checkpoint is newer: that checkpoint may be damaged, or belong to another run.
///
/// # Errors
/// If no checkpoint is left although the run began with one, or those in `dir` are damaged.
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
    let (mut own, mut failure) = (None, None);
    for Found { path, state, .. } in found {
        match state {
            Ok(state) if state.run == run => {
                own = Some((state.step, path));
                break;
            }
            Ok(_) => {}
            Err(error) => {
                notes.push(reject(&path, &error));
                failure = failure.or(Some(error));
            }
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
            // Rejected checkpoints next to the source may belong to another run, which has to set them aside itself, so
            // they are only reported. Those of this directory are in the notes already.
            let rejected = choice.rejected.iter().map(|(_, error)| error.to_string());
            let rejected: Vec<String> = rejected.filter(|note| !notes.contains(note)).collect();
            notes.extend(rejected);
            Some(choice.path)
        }
        Some(source) => Some(source.into()),
        None => match failure {
            Some(error) => return Err(error),
            None => {
                notes.push("no checkpoint of this run: starting at step 1".into());
                None
            }
        },
    };
    Ok(Recovered { checkpoint, notes, ..Recovered::default() })
}

/// Decides whether to resume from a memory snapshot, given the step of the newest checkpoint. Equal steps have equal
/// states, and memory is faster.
fn memory_is_newest(snapshot: Option<u64>, checkpoint: Option<u64>) -> bool {
    snapshot.is_some_and(|snapshot| checkpoint.is_none_or(|checkpoint| snapshot >= checkpoint))
}

/// Returns the highest step in the names of checkpoints, regardless of their contents.
fn newest_name(dir: &Path) -> Option<u64> {
    let entries = fs_err::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| parse(entry.file_name().to_str()?)).map(|(step, _)| step).max()
}

/// Renames a damaged checkpoint and describes it. A checkpoint that is unreadable for now, or unreadable by this
/// version, keeps its name.
pub fn reject(path: &Path, error: &CheckpointError) -> String {
    if !matches!(error, CheckpointError::Damaged { .. }) {
        return error.to_string();
    }
    match mark_damaged(path) {
        Ok(renamed) => format!("{error}; renamed to {}", renamed.display()),
        Err(failed) => format!("{error}; {failed}"),
    }
}
