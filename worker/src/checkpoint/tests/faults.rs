//! Tests of failing disk operations, and of power cuts.

use fs_err::OpenOptions;

use super::*;

/// The operations made on a disk, and which of them fails.
#[derive(Debug, Default)]
struct Log {
    operations: Vec<Made>,
    fail_at: Option<(usize, i32)>,
}

/// An operation, in a form that can be kept and repeated.
#[derive(Clone, Debug)]
enum Made {
    CreateDir(PathBuf),
    Open(PathBuf),
    Write(PathBuf, u64, Vec<u8>),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
    Exchange(PathBuf, PathBuf),
    RemoveDir(PathBuf),
    SyncDir,
}

impl From<&Operation<'_>> for Made {
    fn from(operation: &Operation<'_>) -> Self {
        match *operation {
            Operation::CreateDir(path) => Self::CreateDir(path.into()),
            Operation::Open(path) => Self::Open(path.into()),
            Operation::WriteAt { file, offset, bytes } => {
                Self::Write(file.path().into(), offset, bytes.into())
            }
            Operation::Sync(file) => Self::Sync(file.path().into()),
            Operation::Rename { from, to } => Self::Rename(from.into(), to.into()),
            Operation::Exchange(a, b) => Self::Exchange(a.into(), b.into()),
            Operation::RemoveDir(path) => Self::RemoveDir(path.into()),
            Operation::SyncDir(_) => Self::SyncDir,
            ref other => unreachable!("{other:?}"),
        }
    }
}

/// Records operations, and lets one of them fail.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Log>>);

impl Recorder {
    fn failing(at: usize, errno: i32) -> Self {
        Self(Arc::new(Mutex::new(Log { operations: Vec::new(), fail_at: Some((at, errno)) })))
    }

    fn disk(&self) -> Disk {
        Disk::with_faults(Arc::new(self.clone()))
    }

    fn operations(&self) -> Vec<Made> {
        self.0.lock().unwrap().operations.clone()
    }
}

impl Faults for Recorder {
    fn check(&self, operation: &Operation<'_>) -> Result<(), Failure> {
        let log = &mut *self.0.lock().unwrap();
        log.operations.push(operation.into());
        match log.fail_at {
            Some((at, errno)) if at + 1 == log.operations.len() => {
                Err(Failure::Before(io::Error::from_raw_os_error(errno)))
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn failing_operation_leaves_only_the_earlier_checkpoints() {
    const ERRORS: [(i32, &str); 5] = [
        (5, "Input/output error"),
        (28, "No space left on device"),
        (30, "Read-only file system"),
        (122, "Disk quota exceeded"),
        (13, "Permission denied"),
    ];
    let try_save = |recorder: &Recorder, dir: &Path| {
        let (reports, received) = channel();
        let exchange = Alone { reports: Some(reports), ..Alone::default() };
        let retention = Retention { newest: 1, ..Retention::default() };
        let result = save_with(settings(dir, retention), recorder.disk(), exchange, state("run", 20));
        (result, received.iter().collect::<Vec<_>>())
    };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 10);
    let recorder = Recorder::default();
    try_save(&recorder, dir.path()).0.unwrap();
    let total = recorder.operations().len();
    let renamed = recorder.operations().iter().position(|it| matches!(it, Made::Rename(..))).unwrap();
    assert!(total > 20 && renamed > 10, "{total}, {renamed}");

    for at in 0..total {
        let (errno, text) = ERRORS[at % ERRORS.len()];
        let dir = tempfile::tempdir().unwrap();
        let before = save(dir.path(), 10);
        let (result, reports) = try_save(&Recorder::failing(at, errno), dir.path());
        let entries: BTreeSet<String> = fs_err::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        if at <= renamed {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(&*dir.path().to_string_lossy()), "{at}: {error}");
            assert!(
                matches!(&reports[..], [Report::CheckpointFailed(failed)] if failed.reason.contains(text))
            );
            assert_eq!(entries, BTreeSet::from(["step-00000010".into()]), "operation {at}");
            assert_complete(&before, 10);
        } else {
            // The new checkpoint exists, though a power cut may lose it, or the old one was not deleted. The next start
            // of the job removes the rest of the old one.
            assert!(entries.contains("step-00000020"), "{entries:?}");
            clean(dir.path()).unwrap();
            assert!(scan(dir.path()).unwrap().iter().all(|found| found.state.is_ok()));
            assert_complete(&dir.path().join("step-00000020"), 20);
            let reported =
                |report| matches!(report, &Report::CheckpointFailed(_) | &Report::CheckpointNotDeleted(_));
            assert!(reports.iter().any(reported), "{at}");
        }
    }
}

/// Refuses to rename directories that are in its lower layer, as overlayfs does, and to exchange any.
#[derive(Debug)]
struct Overlay(PathBuf);

impl Faults for Overlay {
    fn check(&self, operation: &Operation<'_>) -> Result<(), Failure> {
        match operation {
            Operation::Rename { from, .. } if **from == *self.0 => {
                Err(Failure::Before(io::ErrorKind::CrossesDevices.into()))
            }
            Operation::Exchange(..) => Err(Failure::Before(io::ErrorKind::Unsupported.into())),
            _ => Ok(()),
        }
    }
}

#[test]
fn checkpoints_of_a_lower_layer_are_deleted_replaced_and_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let lower = save(dir.path(), 10);
    let overlay = Disk::with_faults(Arc::new(Overlay(lower.clone())));
    let retention = |newest| Retention { newest, ..Retention::default() };
    let (reports, received) = channel();
    let exchange = Alone { reports: Some(reports), ..Alone::default() };
    let settings_of = |newest| settings(dir.path(), retention(newest));
    save_with(settings_of(2), overlay.clone(), exchange, state("run", 10)).unwrap();
    assert_complete(&lower, 10);
    let (reports_of_deletion, deleted) = channel();
    let exchange = Alone { reports: Some(reports_of_deletion), ..Alone::default() };
    save_with(settings_of(1), overlay.clone(), exchange, state("run", 20)).unwrap();
    let steps: Vec<u64> = scan(dir.path()).unwrap().iter().map(|found| found.step).collect();
    assert_eq!(steps, [20]);
    let failed = |report| !matches!(report, Report::Checkpoint(_));
    assert!(!received.iter().chain(deleted).any(failed));

    let lower = save(dir.path(), 30);
    let aside = dir.path().join("step-00000030.abandoned");
    Disk::with_faults(Arc::new(Overlay(lower.clone()))).rename_dir(&lower, &aside).unwrap();
    assert!(!lower.exists());
    assert_complete(&aside, 30);
}

/// Makes operations again, except for writes that were not synced by then.
fn replay(operations: &[Made]) {
    let disk = Disk::default();
    let open = |path: &Path| disk.open(path, OpenOptions::new().write(true).create(true)).unwrap();
    let mut unsynced: Vec<(PathBuf, u64, Vec<u8>)> = Vec::new();
    for operation in operations {
        match operation {
            Made::CreateDir(path) => disk.create_dir(path).unwrap(),
            Made::Open(path) => drop(open(path)),
            Made::Write(path, offset, bytes) => unsynced.push((path.clone(), *offset, bytes.clone())),
            Made::Sync(path) => {
                for (path, offset, bytes) in unsynced.extract_if(.., |(written, ..)| written == path) {
                    disk.write_at(&open(&path), &bytes, offset).unwrap();
                }
            }
            Made::Rename(from, to) => disk.rename(from, to).unwrap(),
            Made::Exchange(a, b) => disk.exchange(a, b).unwrap(),
            Made::RemoveDir(path) => disk.remove_dir(path).unwrap(),
            Made::SyncDir => {}
        }
    }
}

#[test]
fn power_cut_after_any_operation_leaves_a_complete_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("checkpoints");
    let prepare = || {
        let _ = fs_err::remove_dir_all(&work);
        save(&work, 10);
        save(&work, 20);
    };
    // A new step, and a step that replaces its checkpoint.
    for step in [30, 20] {
        prepare();
        let recorder = Recorder::default();
        let retention = Retention { newest: 2, ..Retention::default() };
        save_with(settings(&work, retention), recorder.disk(), Alone::default(), state("run", step)).unwrap();
        let operations = recorder.operations();
        for cut in 0..=operations.len() {
            prepare();
            replay(&operations[..cut]);
            clean(&work).unwrap();
            let found = newest(&work).unwrap();
            let expected = if cut < operations.len() / 2 { 20 } else { step.max(20) };
            let state_step = read_all(&found).unwrap().1.step;
            assert!(state_step == 20 || state_step == expected, "cut {cut}: {state_step}");
            assert_complete(&found, state_step);
            assert!(scan(&work).unwrap().iter().all(|found| found.state.is_ok()), "cut {cut}");
        }
    }
}
