//! Saving and reading together.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_proto::model::ModelShape;
use xlaunch_proto::v1::worker_report::Report;

use super::directory::{choose, clean, newest, recover, scan};
use super::disk::{Disk, Real, Writable};
use super::saver::{Exchange, Saver, Settings, Written};
use super::testing::*;
use super::*;
use crate::model::layout::Layout;

fn threads() -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(2).build().unwrap()
}

/// Parameters and moments by arena; NaN where nothing was read.
fn read_all(path: &Path) -> Result<([Vec<f32>; 3], State), CheckpointError> {
    let layout = Layout::new(&shape());
    let arenas = Mutex::new([const { Vec::new() }; 3].map(|_: Vec<f32>| vec![f32::NAN; layout.len]));
    let sink = |Piece { arena, at, values }: Piece| {
        arenas.lock().unwrap()[arena as usize][at..at + values.len()].copy_from_slice(&values);
        Ok(())
    };
    let everything = std::iter::once(0..layout.len).collect::<Vec<_>>();
    let state = read(path, &shape(), &layout, &everything, &threads(), &sink)?;
    Ok((arenas.into_inner().unwrap(), state))
}

/// Checks that a checkpoint has every stored value of `step`.
fn assert_complete(path: &Path, step: u64) {
    let (arenas, state) = read_all(path).unwrap();
    assert_eq!(state.step, step);
    for (arena, values) in [Arena::Params, Arena::M, Arena::V].into_iter().zip(arenas) {
        for param in Layout::new(&shape()).params {
            let expected = param.stored().map(|at| value(arena, at, step));
            assert!(values[param.stored()].iter().copied().eq(expected), "{} of {arena:?}", param.name);
        }
    }
}

/// What a rank has written.
type Answer = Result<Vec<Written>, String>;

/// The answers of several ranks, as the agent collects them.
struct Together {
    rank: usize,
    answers: Sender<Answer>,
    /// On rank 0, with the number of ranks.
    collected: Option<(usize, Receiver<Answer>)>,
}

impl Exchange for Together {
    fn written(&mut self, _step: u64, result: Result<Vec<Written>, String>) {
        self.answers.send(result).unwrap();
    }

    fn all_written(&mut self, _step: u64) -> Result<Vec<Written>, String> {
        assert_eq!(self.rank, 0);
        let (world, answers) = self.collected.as_ref().unwrap();
        let answers: Vec<_> = answers.iter().take(*world).collect();
        answers.into_iter().collect::<Result<Vec<_>, _>>().map(|files| files.concat())
    }

    fn report(&mut self, _report: Report) {}
}

/// Saves with several ranks.
fn save_together(dir: &Path, step: u64, world: usize, sharded: bool) -> PathBuf {
    let layout = Layout::new(&shape());
    let (sender, receiver) = channel();
    let mut receiver = Some((world, receiver));
    let mut savers: Vec<Saver> = (0..world)
        .map(|rank| {
            let portion = Portion::new(&sharding(&layout, rank, world, sharded), rank, world);
            let snapshot = snapshot(&portion, step);
            let settings = Settings {
                dir: dir.into(),
                layout: layout.clone(),
                portion,
                rank,
                world,
                retention: Retention::default(),
                tokenizer: None,
                source: None,
                host: xlaunch_engine::HostAllocator::default(),
                memory: None,
                memory_required: false,
            };
            let collected = (rank == 0).then(|| receiver.take().unwrap());
            let exchange = Box::new(Together { rank, answers: sender.clone(), collected });
            let mut saver = Saver::start(settings, exchange).unwrap();
            saver.wait().unwrap();
            saver.begin(snapshot, state("run", step), Instant::now());
            saver
        })
        .collect();
    savers.iter_mut().for_each(|saver| saver.wait().unwrap());
    dir.join(name(step))
}

#[test]
fn ranks_save_together_and_any_number_of_ranks_reads_it() {
    for (world, sharded) in [(1, false), (2, false), (3, false), (2, true), (4, true)] {
        let dir = tempfile::tempdir().unwrap();
        let path = save_together(dir.path(), 7, world, sharded);
        assert_complete(&path, 7);
        let files: BTreeSet<String> = fs_err::read_dir(&path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let moments = (0..world).map(|rank| format!("optimizer-{rank:05}-of-{world:05}.safetensors"));
        let others = [MODEL, STATE, MANIFEST].map(String::from);
        assert_eq!(files, moments.chain(others).collect());
        // Other programs read the parameters as well.
        let model = fs_err::read(path.join(MODEL)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&model).unwrap();
        assert_eq!(tensors.tensor("wte.weight").unwrap().shape(), [1001, 16]);
    }
}

#[test]
fn rank_of_a_sharded_optimizer_reads_only_the_files_with_its_moments() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_together(dir.path(), 7, 4, false);
    let layout = Layout::new(&shape());
    let seen = Mutex::new(BTreeSet::new());
    let sink = |Piece { arena, at, .. }: Piece| {
        seen.lock().unwrap().insert((arena, at / (layout.len / 4)));
        Ok(())
    };
    let quarter = std::iter::once(0..layout.len / 4).collect::<Vec<_>>();
    read(&path, &shape(), &layout, &quarter, &threads(), &sink).unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(seen.contains(&(Arena::M, 0)) && !seen.contains(&(Arena::V, 3)), "{seen:?}");
    assert!(seen.contains(&(Arena::Params, 3)), "every rank has all parameters");
}

#[test]
fn permissions_of_files_follow_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    fs_err::write(dir.path().join("ordinary"), "").unwrap();
    let mode = |path: &Path| fs_err::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path.join(MODEL)), mode(&dir.path().join("ordinary")));
}

#[test]
fn version_1_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name(3));
    fs_err::create_dir(&path).unwrap();
    let layout = Layout::new(&shape());
    let tensors = |arenas: &[(&str, Arena)]| {
        let mut data = Vec::new();
        for (prefix, arena) in arenas {
            for param in &layout.params {
                let bytes: Vec<u8> =
                    param.stored().flat_map(|at| value(*arena, at, 3).to_le_bytes()).collect();
                data.push((format!("{prefix}{}", param.name), param.shape.clone(), bytes));
            }
        }
        let view = |(name, shape, bytes): &(String, Vec<usize>, Vec<u8>)| {
            let dtype = safetensors::Dtype::F32;
            let view = safetensors::tensor::TensorView::new(dtype, shape.clone(), bytes.leak_copy()).unwrap();
            (name.clone(), view)
        };
        safetensors::serialize(data.iter().map(view), None).unwrap()
    };
    let mut old = serde_json::to_value(state("", 3)).unwrap();
    old["version"] = 1.into();
    let files = [
        (MODEL.to_owned(), tensors(&[("", Arena::Params)])),
        (optimizer_name(0, 1), tensors(&[("m.", Arena::M), ("v.", Arena::V)])),
        (STATE.to_owned(), serde_json::to_vec(&old).unwrap()),
    ];
    let mut entries = Vec::new();
    for (name, bytes) in &files {
        fs_err::write(path.join(name), bytes).unwrap();
        let hash = manifest::Chunk::of(0, bytes).xxh3_128;
        entries.push(serde_json::json!({"name": name, "bytes": bytes.len(), "xxh3_128": hash}));
    }
    let manifest = serde_json::json!({"version": 1, "files": entries});
    fs_err::write(path.join(MANIFEST), manifest.to_string()).unwrap();
    assert_complete(&path, 3);
    assert_eq!(newest(dir.path()), Some(path));
}

trait LeakCopy {
    fn leak_copy(&self) -> &'static [u8];
}

impl LeakCopy for Vec<u8> {
    /// A view borrows its data, for longer than a closure can.
    fn leak_copy(&self) -> &'static [u8] {
        self.clone().leak()
    }
}

#[test]
fn saving_a_step_again_replaces_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 7);
    fs_err::write(path.join(MODEL), "damaged").unwrap();
    save(dir.path(), 7);
    assert_complete(&path, 7);
    assert_eq!(fs_err::read_dir(dir.path()).unwrap().count(), 1, "nothing else remains");
}

fn flip(path: &Path, at_end: usize) {
    let mut bytes = fs_err::read(path).unwrap();
    let len = bytes.len();
    bytes[len - at_end] ^= 1;
    fs_err::write(path, bytes).unwrap();
}

#[test]
fn changed_byte_of_any_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    for (file, at_end) in [
        (MODEL, 1),
        (MODEL, 30_000),
        (&*optimizer_name(0, 1), 1),
        (&*optimizer_name(0, 1), 60_000),
        (STATE, 10),
    ] {
        let path = save(dir.path(), 2);
        flip(&path.join(file), at_end);
        let error = read_all(&path).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::Damaged { reason, .. } if reason.contains(file)),
            "{error}"
        );
    }
}

/// Changes the manifest of a checkpoint, and returns why it is rejected.
fn rejected(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&fs_err::read(path.join(MANIFEST)).unwrap()).unwrap();
    change(&mut manifest);
    fs_err::write(path.join(MANIFEST), manifest.to_string()).unwrap();
    read_all(&path).unwrap_err().to_string()
}

#[test]
fn manifest_lists_exactly_the_expected_files() {
    let file = |manifest: &serde_json::Value, name: &str| {
        let files = manifest["files"].as_array().unwrap();
        files.iter().position(|file| file["name"] == name).unwrap()
    };
    let without = |name: &str| {
        rejected(|manifest| {
            let at = file(manifest, name);
            manifest["files"].as_array_mut().unwrap().remove(at);
        })
    };
    assert!(without(MODEL).ends_with("does not contain model.safetensors"));
    assert!(without(STATE).ends_with("does not contain state.json"));
    assert!(without(&optimizer_name(0, 1)).contains("optimizer state of every rank"));
    for name in ["../model.safetensors", "..", ".model", "other", "optimizer-1-of-1.safetensors"] {
        let error = rejected(|manifest| {
            let mut entry = manifest["files"][0].clone();
            entry["name"] = name.into();
            manifest["files"].as_array_mut().unwrap().push(entry);
        });
        assert!(error.contains(&format!("contains the file name {name:?}")), "{error}");
    }
    let twice = rejected(|manifest| {
        let entry = manifest["files"][0].clone();
        manifest["files"].as_array_mut().unwrap().push(entry);
    });
    assert!(twice.ends_with("contains a file twice"), "{twice}");
    let gap = rejected(|manifest| {
        let at = file(manifest, MODEL);
        manifest["files"][at]["chunks"].as_array_mut().unwrap().remove(1);
    });
    assert!(gap.contains("do not follow each other"), "{gap}");
    let other = rejected(|manifest| manifest["version"] = 4.into());
    assert!(other.ends_with("has format version 4, but this build reads versions 1 to 3"), "{other}");
}

#[test]
fn what_is_not_a_regular_file_is_rejected_at_once() {
    let dir = tempfile::tempdir().unwrap();
    for file in [MANIFEST, MODEL, STATE] {
        let path = save(dir.path(), 1);
        let original = path.join(file);
        fs_err::rename(&original, dir.path().join("elsewhere")).unwrap();
        fs_err::os::unix::fs::symlink(dir.path().join("elsewhere"), &original).unwrap();
        assert!(read_all(&path).unwrap_err().to_string().ends_with("is not a regular file"), "{file}");
        fs_err::remove_file(&original).unwrap();
        // Opening a pipe waits for a writer.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &original,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(read_all(&path).unwrap_err().to_string().ends_with("is not a regular file"), "{file}");
        assert_eq!(newest(dir.path()), None);
        fs_err::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn checkpoint_of_another_model_is_refused_with_the_first_difference() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let other = ModelShape { ffn: 32, ..shape() };
    let error = directory::open(&path, &other).unwrap_err().to_string();
    assert!(error.contains("model.ffn is 24 in the checkpoint, 32 in this job"), "{error}");
}

fn weights(bytes: &[u8]) -> Result<Vec<f32>, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(MODEL);
    fs_err::write(&path, bytes).unwrap();
    let layout = Layout::new(&shape());
    let arena = Mutex::new(vec![f32::NAN; layout.len]);
    let sink = |Piece { at, values, .. }: Piece| {
        arena.lock().unwrap()[at..at + values.len()].copy_from_slice(&values);
        Ok(())
    };
    check_weights(&path, &layout).map_err(|error| error.to_string())?;
    read_weights(&path, &layout, &threads(), &sink).map_err(|error| error.to_string())?;
    Ok(arena.into_inner().unwrap())
}

#[test]
fn damaged_safetensors_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = fs_err::read(save(dir.path(), 1).join(MODEL)).unwrap();
    let wte = Layout::new(&shape()).wte.start;
    assert_eq!(weights(&good).unwrap()[wte], value(Arena::Params, wte, 1));
    let length = usize::try_from(u64::from_le_bytes(good[..8].try_into().unwrap())).unwrap();
    for len in [0, 7, 8, 100, 8 + length, good.len() - 1] {
        assert!(weights(&good[..len]).is_err(), "{len} bytes");
    }
    for length in [u64::MAX, good.len() as u64, 0, 1] {
        let error = weights(&[&length.to_le_bytes()[..], &good[8..]].concat()).unwrap_err();
        assert!(error.contains(MODEL), "{error}");
    }
    let header: serde_json::Value = serde_json::from_slice(&good[8..8 + length]).unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut header = header.clone();
        change(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        weights(&[&(header.len() as u64).to_le_bytes()[..], &header, &good[8 + length..]].concat())
    };
    let other_type = with(&|header| header["wte.weight"]["dtype"] = "I32".into());
    assert!(other_type.unwrap_err().contains("but the model has F32"));
    for offsets in [[0, 4], [4, 0], [u64::MAX - 64, u64::MAX], [1 << 40, (1 << 40) + 64]] {
        let changed = with(&|header| header["wte.weight"]["data_offsets"] = serde_json::json!(offsets));
        assert!(changed.is_err(), "{offsets:?}");
    }
}

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
        save_with(settings, Arc::new(Real), Alone::default(), state(run, step)).unwrap();
    };
    save_of("a", 10);
    save_of("b", 20);
    fs_err::create_dir(dir.path().join(".tmp-step-00000030")).unwrap();
    // As if the process had been killed between the renames of a replacement.
    fs_err::rename(dir.path().join(name(10)), dir.path().join(".old-step-00000010")).unwrap();
    let recovered = recover(dir.path(), "a", None, None).unwrap();
    assert_eq!(recovered.checkpoint, Some(dir.path().join(name(10))));
    assert!(recovered.notes.is_empty(), "{recovered:?}");
    assert!(!dir.path().join(".tmp-step-00000030").exists());
    let of_c = |source: Option<u64>| {
        let source = source.map(|step| dir.path().join(name(step)));
        recover(dir.path(), "c", source.as_deref(), None).unwrap().checkpoint
    };
    assert_eq!(of_c(None), None, "a run that has saved nothing starts again");
    assert_eq!(of_c(Some(10)), Some(dir.path().join(name(10))), "or from where it began");
    assert_eq!(of_c(Some(30)), Some(dir.path().join(name(20))), "or, if that is gone, from the newest");
    let empty = tempfile::tempdir().unwrap();
    let gone = recover(dir.path(), "c", Some(&empty.path().join(name(1))), None);
    assert!(matches!(gone, Err(CheckpointError::None { .. })));
    assert_complete(&dir.path().join(name(10)), 10);
}

#[test]
fn newest_memory_snapshot_is_taken_without_opening_a_checkpoint_unless_one_is_newer() {
    let dir = tempfile::tempdir().unwrap();
    let save_of = |run: &str, step| {
        let settings = settings(dir.path(), Retention::default());
        save_with(settings, Arc::new(Real), Alone::default(), state(run, step)).unwrap();
    };
    let recovered = |snapshot| recover(dir.path(), "a", None, snapshot).unwrap();
    assert!(recovered(Some(5)).from_memory, "nothing is on disk");
    assert!(!recovered(None).from_memory);
    save_of("a", 10);
    assert!(recovered(Some(10)).from_memory, "the same step");
    let newer = recovered(Some(9));
    assert_eq!((newer.from_memory, newer.checkpoint), (false, Some(dir.path().join(name(10)))));
    // By its name, so that it would be rejected and renamed if it were opened.
    flip(&dir.path().join(name(10)).join(MANIFEST), 1);
    let by_name = recovered(Some(10));
    assert!(by_name.from_memory && by_name.notes.is_empty(), "{by_name:?}");
    assert!(dir.path().join(name(10)).exists());
    // Newer by name, but damaged or of another run.
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
        save_with(settings, Arc::new(Real), Alone::default(), state).unwrap();
    };
    let steps = || -> Vec<u64> { scan(dir.path()).unwrap().iter().map(|found| found.step).collect() };
    save_of("other", 600, &[], None);
    save_of("old", 20, &[], None);
    assert_eq!(steps(), [600, 20], "the checkpoint of another run is left, and the new one kept");
    // A run that continues from step 20 keeps that until the run ends.
    let parents = [Parent { run: "old".into(), step: 20 }];
    save_of("new", 30, &parents, Some(20));
    save_of("new", 40, &parents, Some(20));
    assert_eq!(steps(), [600, 40, 20]);
    save_of("new", 50, &parents, None);
    assert_eq!(steps(), [600, 50]);
}

/// What a disk was asked to do, and which operation fails.
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

/// Records operations, and performs them unless they are to fail.
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
fn failing_operation_leaves_the_checkpoints_before_and_nothing_else() {
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
            // The new checkpoint is there, though it may be lost in a power cut or the old one not deleted.
            // The rest of the old one is removed when the job starts again.
            assert!(entries.contains("step-00000020"), "{entries:?}");
            clean(dir.path()).unwrap();
            assert!(scan(dir.path()).unwrap().iter().all(|found| found.state.is_ok()));
            assert_complete(&dir.path().join("step-00000020"), 20);
            assert!(reports.iter().any(|report| matches!(report, Report::CheckpointFailed(_))), "{at}");
        }
    }
}

/// Performs operations, but for data that was not synced by then.
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

#[test]
fn tokenizer_is_part_of_a_checkpoint_and_older_ones_have_none() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = save(dir.path(), 1);
    assert_eq!(tokenizer(&bytes).unwrap().unwrap().name(), "bytes", "the configuration says so");
    assert_eq!(open_version(&bytes), 2, "older builds read it");

    let json = xlaunch_data::Tokenizer::bytes().to_json().into_bytes();
    let settings = Settings { tokenizer: Some(json.clone()), ..settings(dir.path(), Retention::default()) };
    let mut state = state("run", 2);
    (state.version, state.spec) = (version(true), serde_json::Value::Null);
    save_with(settings, Arc::new(Real), Alone::default(), state).unwrap();
    let path = dir.path().join(name(2));
    assert_eq!((open_version(&path), fs_err::read(path.join(TOKENIZER)).unwrap()), (3, json));
    assert_eq!(tokenizer(&path).unwrap().unwrap().vocab(), 256);
    assert_complete(&path, 2);

    let mut damaged = fs_err::read(path.join(TOKENIZER)).unwrap();
    damaged[0] = b' ';
    fs_err::write(path.join(TOKENIZER), damaged).unwrap();
    let error = tokenizer(&path).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Damaged { reason, .. } if reason.contains(TOKENIZER)),
        "{error}"
    );
    fs_err::remove_file(path.join(TOKENIZER)).unwrap();
    assert!(matches!(read_all(&path), Err(CheckpointError::Damaged { .. })), "the manifest lists it");
}

/// The version in the manifest of a checkpoint.
fn open_version(path: &Path) -> u64 {
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs_err::read(path.join(MANIFEST)).unwrap()).unwrap();
    manifest["version"].as_u64().unwrap()
}
