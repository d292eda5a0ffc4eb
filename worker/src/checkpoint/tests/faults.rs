//! Tests of failing disk operations, and of power cuts.

use super::*;

/// The operations of a disk, and which of them fails.
#[derive(Debug, Default)]
struct Log {
    operations: Vec<Operation>,
    fail_at: Option<(usize, i32)>,
}

#[derive(Clone, Debug)]
enum Operation {
    CreateDir(PathBuf),
    Open(PathBuf),
    Write(PathBuf, u64, Vec<u8>),
    Sync(PathBuf),
    Rename(PathBuf, PathBuf),
    Exchange(PathBuf, PathBuf),
    RemoveDir(PathBuf),
    SyncDir,
}

/// Records operations and performs them, except for the one that is to fail.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Log>>);

impl Recorder {
    fn failing(at: usize, errno: i32) -> Self {
        Self(Arc::new(Mutex::new(Log { operations: Vec::new(), fail_at: Some((at, errno)) })))
    }

    fn record(&self, operation: Operation) -> io::Result<()> {
        let log = &mut *self.0.lock().unwrap();
        log.operations.push(operation);
        match log.fail_at {
            Some((at, errno)) if at + 1 == log.operations.len() => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }

    fn operations(&self) -> Vec<Operation> {
        self.0.lock().unwrap().operations.clone()
    }
}

impl Disk for Recorder {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.record(Operation::CreateDir(path.into()))?;
        Real.create_dir(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Writable>> {
        self.record(Operation::Open(path.into()))?;
        Ok(Box::new(RecordedFile { log: self.clone(), path: path.into(), file: Real.open(path)? }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.record(Operation::Rename(from.into(), to.into()))?;
        Real.rename(from, to)
    }

    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        self.record(Operation::Exchange(a.into(), b.into()))?;
        Real.exchange(a, b)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.record(Operation::RemoveDir(path.into()))?;
        Real.remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.record(Operation::SyncDir)?;
        Real.sync_dir(path)
    }
}

struct RecordedFile {
    log: Recorder,
    path: PathBuf,
    file: Box<dyn Writable>,
}

impl Writable for RecordedFile {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.log.record(Operation::Write(self.path.clone(), offset, bytes.to_vec()))?;
        self.file.write_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.log.record(Operation::Sync(self.path.clone()))?;
        self.file.sync()
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
        let result =
            save_with(settings(dir, retention), Arc::new(recorder.clone()), exchange, state("run", 20));
        (result, received.iter().collect::<Vec<_>>())
    };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 10);
    let recorder = Recorder::default();
    try_save(&recorder, dir.path()).0.unwrap();
    let total = recorder.operations().len();
    let renamed = recorder.operations().iter().position(|it| matches!(it, Operation::Rename(..))).unwrap();
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
            assert!(reports.iter().any(|report| matches!(report, Report::CheckpointFailed(_))), "{at}");
        }
    }
}

/// Performs operations, except for data that was not synced by then.
fn replay(operations: &[Operation]) {
    let mut unsynced: Vec<(PathBuf, u64, Vec<u8>)> = Vec::new();
    for operation in operations {
        match operation {
            Operation::CreateDir(path) => Real.create_dir(path).unwrap(),
            Operation::Open(path) => drop(Real.open(path).unwrap()),
            Operation::Write(path, offset, bytes) => unsynced.push((path.clone(), *offset, bytes.clone())),
            Operation::Sync(path) => {
                for (path, offset, bytes) in unsynced.extract_if(.., |(written, ..)| written == path) {
                    Real.open(&path).unwrap().write_at(&bytes, offset).unwrap();
                }
            }
            Operation::Rename(from, to) => Real.rename(from, to).unwrap(),
            Operation::Exchange(a, b) => Real.exchange(a, b).unwrap(),
            Operation::RemoveDir(path) => Real.remove_dir(path).unwrap(),
            Operation::SyncDir => {}
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
        save_with(
            settings(&work, retention),
            Arc::new(recorder.clone()),
            Alone::default(),
            state("run", step),
        )
        .unwrap();
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
