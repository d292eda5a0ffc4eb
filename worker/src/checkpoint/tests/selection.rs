//! Tests of which checkpoint of a directory is chosen, recovered, set aside or deleted.

use super::*;

#[test]
fn newest_valid_checkpoint_is_chosen_and_the_rejected_ones_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(choose(dir.path()).unwrap().is_none());
    assert!(choose(&dir.path().join("nowhere")).unwrap().is_none());
    let older = save(dir.path(), 1);
    let damaged = save(dir.path(), 2);
    fs_err::remove_file(damaged.join(MANIFEST)).unwrap();
    let choice = choose(dir.path()).unwrap().unwrap();
    assert_eq!((choice.path, choice.state.step), (older.clone(), 1));
    let (path, error) = &choice.rejected[0];
    assert!(*path == damaged && error.to_string().contains("manifest.json"), "{error}");
    let note = directory::reject(path, error);
    assert!(note.ends_with("step-00000002.damaged") && !damaged.exists(), "{note}");

    fs_err::write(older.join(STATE), "").unwrap();
    let error = choose(dir.path()).unwrap_err().to_string();
    assert!(error.starts_with("no valid checkpoint in") && error.contains(STATE), "{error}");
}

#[test]
fn run_whose_name_begins_like_that_of_a_checkpoint_is_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("step-by-step");
    let checkpoint = save(&run.join(directory::CHECKPOINTS), 10);
    assert_eq!(directory::locate(&run).unwrap().0, checkpoint);
    // Not a directory of checkpoints, even if it has lost its manifest.
    let damaged = dir.path().join("step-00000010.damaged-2");
    assert_eq!(directory::locate(&damaged).unwrap().0, damaged);
}

#[test]
fn newer_saves_that_were_never_completed_are_named_with_their_contents() {
    let dir = tempfile::tempdir().unwrap();
    let unfinished = |step, files: &[&str]| {
        let path = dir.path().join(format!(".tmp-step-{step:08}"));
        fs_err::create_dir(&path).unwrap();
        files.iter().for_each(|file| fs_err::write(path.join(file), "").unwrap());
    };
    unfinished(5, &[]);
    save(dir.path(), 10);
    unfinished(20, &[MODEL, "optimizer-00001-of-00003.safetensors", "optimizer-00002-of-00003.safetensors"]);
    unfinished(30, &[MANIFEST]);
    let rejected = choose(dir.path()).unwrap().unwrap().rejected;
    let rejected: Vec<String> = rejected.iter().map(|(path, error)| directory::reject(path, error)).collect();
    let expected = [
        "the checkpoint of step 30 is not complete: it was not renamed to its final name: ",
        "the checkpoint of step 20 is not complete: it has no manifest, and files of 2 of 3 ranks: ",
    ];
    assert_eq!(rejected.len(), 2, "{rejected:?}");
    assert!(rejected.iter().zip(expected).all(|(text, start)| text.starts_with(start)), "{rejected:?}");
    assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 4, "a running job may still write there");
    let running = Lock::acquire(dir.path(), "job").unwrap();
    assert!(choose(dir.path()).unwrap().unwrap().rejected.is_empty(), "these are being saved");
    drop(running);
    assert_eq!(choose(dir.path()).unwrap().unwrap().rejected.len(), 2);
}

#[test]
fn names_sort_by_step_and_pinned_ones_are_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 7);
    let pinned = dir.path().join("step-00000007.keep");
    fs_err::rename(dir.path().join("step-00000007"), &pinned).unwrap();
    for other in
        ["step-8", "step-00000009.damaged", "step-00000009.abandoned", "latest", ".tmp-step-00000010"]
    {
        fs_err::create_dir(dir.path().join(other)).unwrap();
    }
    fs_err::create_dir(dir.path().join("step-100000000")).unwrap();
    fs_err::create_dir(dir.path().join("step-99999999")).unwrap();
    let found: Vec<_> =
        scan(dir.path()).unwrap().into_iter().map(|found| (found.step, found.pinned)).collect();
    assert_eq!(found, [(100_000_000, false), (99_999_999, false), (7, true)]);
    assert_eq!(newest(dir.path()), Some(pinned));
}

#[test]
fn recovery_finds_checkpoints_of_this_run_only_and_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let save_of = |run: &str, step| {
        let settings = settings(dir.path(), Retention::default());
        save_with(settings, Disk::default(), Alone::default(), state(run, step)).unwrap();
    };
    save_of("a", 10);
    save_of("b", 20);
    fs_err::create_dir(dir.path().join(".tmp-step-00000030")).unwrap();
    // Simulates a kill of the process between the two renames of a replacement.
    fs_err::rename(dir.path().join(name(10)), dir.path().join(".old-step-00000010")).unwrap();
    let recovered = recover(dir.path(), "a", None, None).unwrap();
    assert_eq!(recovered.checkpoint, Some(dir.path().join(name(10))));
    let [note] = &recovered.notes[..] else { panic!("{recovered:?}") };
    assert!(note.starts_with("the checkpoint of step 30 is not complete: it has no manifest"), "{note}");
    assert!(!dir.path().join(".tmp-step-00000030").exists());
    let of_c = |source: Option<u64>| {
        let source = source.map(|step| dir.path().join(name(step)));
        recover(dir.path(), "c", source.as_deref(), None).unwrap().checkpoint
    };
    assert_eq!(of_c(None), None, "a run that has saved nothing starts again");
    assert_eq!(of_c(Some(10)), Some(dir.path().join(name(10))), "or from where it began");
    assert_eq!(of_c(Some(30)), Some(dir.path().join(name(20))), "or, if that is gone, from the newest");
    let empty = tempfile::tempdir().unwrap();
    let elsewhere = |source: u64| {
        let source = dir.path().join(name(source));
        recover(empty.path(), "c", Some(&source), None).unwrap()
    };
    assert!(elsewhere(30).notes.is_empty());
    fs_err::remove_file(dir.path().join(name(20)).join(MANIFEST)).unwrap();
    let recovered = elsewhere(30);
    assert_eq!(recovered.checkpoint, Some(dir.path().join(name(10))));
    assert!(matches!(&recovered.notes[..], [note] if note.contains(&name(20))), "{recovered:?}");
    let gone = recover(dir.path(), "c", Some(&empty.path().join(name(1))), None);
    assert!(matches!(gone, Err(CheckpointError::None { .. })));
    assert_complete(&dir.path().join(name(10)), 10);
    let only = tempfile::tempdir().unwrap();
    let path = save(only.path(), 10);
    flip(&path.join(MANIFEST), 1);
    let damaged = recover(only.path(), "c", None, None);
    assert!(matches!(damaged, Err(CheckpointError::Damaged { .. })), "{damaged:?}");
    assert_eq!(
        recover(only.path(), "c", None, None).unwrap().notes,
        ["no checkpoint of this run: starting at step 1"]
    );
}

#[test]
fn directory_without_a_checkpoint_is_named_with_its_newest_run() {
    let job = tempfile::tempdir().unwrap();
    let error = |path: &Path| directory::locate(path).unwrap_err().to_string();
    assert!(error(&job.path().join("missing")).ends_with("missing: it does not exist"));
    assert!(!error(job.path()).contains("its newest run"));
    fs_err::create_dir(job.path().join("20260101-000000")).unwrap();
    std::os::unix::fs::symlink("20260101-000000", job.path().join("latest")).unwrap();
    assert!(error(job.path()).ends_with("/latest"), "{}", error(job.path()));
    // A copy without links has an older copy of a run in the place of the link.
    fs_err::remove_file(job.path().join("latest")).unwrap();
    for run in ["20260101-000000", "latest"] {
        fs_err::create_dir_all(job.path().join(run)).unwrap();
        fs_err::write(job.path().join(run).join("job.json"), "{}").unwrap();
    }
    fs_err::write(job.path().join("latest/environment.json"), r#"{"started_unix_seconds": 0}"#).unwrap();
    assert!(error(job.path()).ends_with("/20260101-000000"), "{}", error(job.path()));

    // The directory of several jobs.
    let output = tempfile::tempdir().unwrap();
    let named = |job: &str| format!("{}/{job}/latest", output.path().display());
    for job in ["b", "a", "d", "c"] {
        fs_err::create_dir_all(output.path().join(job).join("a")).unwrap();
        std::os::unix::fs::symlink("a", output.path().join(job).join("latest")).unwrap();
    }
    let expected =
        format!("the newest runs of its jobs are {}, {}, {}, ...", named("a"), named("b"), named("c"));
    assert!(error(output.path()).ends_with(&expected), "{}", error(output.path()));
}

#[test]
fn newest_memory_snapshot_is_taken_without_opening_a_checkpoint_unless_one_is_newer() {
    let dir = tempfile::tempdir().unwrap();
    let save_of = |run: &str, step| {
        let settings = settings(dir.path(), Retention::default());
        save_with(settings, Disk::default(), Alone::default(), state(run, step)).unwrap();
    };
    let recovered = |snapshot| recover(dir.path(), "a", None, snapshot).unwrap();
    assert!(recovered(Some(5)).from_memory, "nothing is on disk");
    assert!(!recovered(None).from_memory);
    save_of("a", 10);
    assert!(recovered(Some(10)).from_memory, "the same step");
    let newer = recovered(Some(9));
    assert_eq!((newer.from_memory, newer.checkpoint), (false, Some(dir.path().join(name(10)))));
    // Recovery goes by the name alone: opening the file would get it rejected and renamed.
    flip(&dir.path().join(name(10)).join(MANIFEST), 1);
    let by_name = recovered(Some(10));
    assert!(by_name.from_memory && by_name.notes.is_empty(), "{by_name:?}");
    assert!(dir.path().join(name(10)).exists());
    // The name is newer, but the checkpoint is damaged or belongs to another run.
    save_of("b", 20);
    let damaged = recovered(Some(9));
    assert!(damaged.from_memory && damaged.notes[0].contains("step-00000010.damaged"), "{damaged:?}");
}

#[test]
fn retention_deletes_own_and_continued_checkpoints_but_not_others() {
    let dir = tempfile::tempdir().unwrap();
    let save_of = |run: &str, step, parents: &[Parent], source: Option<u64>| {
        let retention = Retention { newest: 1, ..Retention::default() };
        let source = source.map(|step| dir.path().join(name(step)));
        let settings = Settings { source, ..settings(dir.path(), retention) };
        let state = State { parents: parents.to_vec(), ..state(run, step) };
        save_with(settings, Disk::default(), Alone::default(), state).unwrap();
    };
    let steps = || -> Vec<u64> { scan(dir.path()).unwrap().iter().map(|found| found.step).collect() };
    save_of("other", 600, &[], None);
    save_of("old", 20, &[], None);
    assert_eq!(steps(), [600, 20], "the checkpoint of another run is left, and the new one kept");
    // A run that continues from step 20 keeps that checkpoint until it ends.
    let parents = [Parent { run: "old".into(), step: 20 }];
    save_of("new", 30, &parents, Some(20));
    save_of("new", 40, &parents, Some(20));
    assert_eq!(steps(), [600, 40, 20]);
    // The directory may be reached through a link, the path to resume from never is.
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let source = Some(dir.path().canonicalize().unwrap().join(name(20)));
    let retention = Retention { newest: 1, ..Retention::default() };
    let settings = Settings { source, ..settings(&link, retention) };
    let state = State { parents: parents.to_vec(), ..state("new", 45) };
    save_with(settings, Disk::default(), Alone::default(), state).unwrap();
    assert_eq!(steps(), [600, 45, 20]);
    save_of("new", 50, &parents, None);
    assert_eq!(steps(), [600, 50]);
}
