//! Tests of saving and reading together.

mod faults;
mod reading;
mod selection;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use xlaunch_proto::disk::{Disk, Failure, Faults, Operation};
use xlaunch_proto::v1::worker_report::Report;
use xlaunch_spec::model::ModelShape;

use super::directory::{choose, clean, newest, recover, scan};
use super::saver::{Buffers, Exchange, Saver, Settings, Written};
use super::tensors::Arena;
use super::testing::*;
use super::write::Values;
use super::*;
use crate::model::layout::Layout;

fn threads() -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(2).build().unwrap()
}

/// Reads parameters and moments by arena; NaN marks values that were not read.
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

/// Checks that a checkpoint has every stored value of step `step`.
fn assert_complete(path: &Path, step: u64) {
    let (arenas, state) = read_all(path).unwrap();
    assert_eq!(state.step, step);
    for (arena, values) in [Arena::Params, Arena::M, Arena::V].into_iter().zip(arenas) {
        for param in &Layout::new(&shape()).params {
            let expected = param.stored().map(|at| value(arena, at, step));
            assert!(values[param.stored()].iter().copied().eq(expected), "{} of {arena:?}", param.name);
        }
    }
}

/// The parts that a rank has written.
type Answer = Result<Vec<Written>, String>;

/// The answers of several ranks, as the agent collects them.
struct Together {
    rank: usize,
    answers: Sender<Answer>,
    /// Only on rank 0; also the number of ranks.
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

    fn flush(&mut self) {}

    fn report(&mut self, _report: Report) {}
}

/// Saves with several ranks.
fn save_together(dir: &Path, step: u64, world: usize, sharded: bool) -> PathBuf {
    try_to_save_together(&Buffers::Own, &vec![dir; world], step, sharded).unwrap();
    dir.join(name(step))
}

/// Saves with ranks that have these directories. Returns the result of rank 0.
fn try_to_save_together(
    buffers: &Buffers,
    dirs: &[&Path],
    step: u64,
    sharded: bool,
) -> Result<(), CheckpointError> {
    let world = dirs.len();
    let layout = Layout::new(&shape());
    let (sender, receiver) = channel();
    let mut receiver = Some((world, receiver));
    let mut savers: Vec<Saver> = (0..world)
        .map(|rank| {
            let portion = Portion::new(&layout, &sharding(&layout, rank, world, sharded), rank, world);
            let snapshot = snapshot(&portion, step);
            let settings = Settings {
                dir: dirs[rank].into(),
                layout: layout.trained().clone(),
                portion,
                rank,
                writers: world,
                retention: Retention::default(),
                tokenizer: None,
                source: None,
                host: xlaunch_engine::HostAllocator::default(),
                buffers: buffers.clone(),
            };
            let collected = (rank == 0).then(|| receiver.take().unwrap());
            let exchange = Box::new(Together { rank, answers: sender.clone(), collected });
            let mut saver = Saver::start(settings, exchange).unwrap();
            saver.wait().unwrap();
            if saver.has_no_buffers() {
                saver.save_in_pieces(state("run", step), Instant::now(), read_from(&snapshot)).unwrap();
            } else {
                saver.begin(snapshot, state("run", step), Instant::now());
            }
            saver
        })
        .collect();
    let mut ends: Vec<_> = savers.iter_mut().map(Saver::wait).collect();
    assert!(ends[1..].iter().all(Result::is_ok), "{ends:?}");
    ends.swap_remove(0)
}

#[test]
fn checkpoint_is_refused_if_a_rank_has_written_to_another_directory() {
    for stale in [false, true] {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        if stale {
            // The same files exist already, with the contents of an earlier save.
            save_together(dir.path(), 6, 2, false);
            fs_err::rename(dir.path().join(name(6)), dir.path().join(".tmp-step-00000007")).unwrap();
        }
        let error = try_to_save_together(&Buffers::Own, &[dir.path(), other.path()], 7, false)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("failed to write checkpoint") && error.contains("safetensors"), "{error}");
        assert!(scan(dir.path()).unwrap().is_empty(), "{error}");
    }
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

/// Serves the training thread's reads from a copy.
fn read_from(snapshot: &Snapshot) -> impl FnMut(Arena, Range<usize>, &mut [f32]) -> Result<(), Infallible> {
    move |arena, range, values| {
        let mut source = snapshot;
        values.copy_from_slice(source.get(arena, range).unwrap());
        Ok(())
    }
}

#[test]
fn state_saved_in_pieces_has_the_same_bytes_as_a_copy() {
    for (world, sharded) in [(1, false), (3, false), (2, true)] {
        let (whole, pieces) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let whole = save_together(whole.path(), 7, world, sharded);
        try_to_save_together(&Buffers::Pieces, &vec![pieces.path(); world], 7, sharded).unwrap();
        let pieces = pieces.path().join(name(7));
        let files = |path: &Path| -> BTreeMap<OsString, Vec<u8>> {
            let entries = fs_err::read_dir(path).unwrap().map(Result::unwrap);
            entries.map(|entry| (entry.file_name(), fs_err::read(entry.path()).unwrap())).collect()
        };
        assert_eq!(files(&whole), files(&pieces), "{world} ranks");
    }
}

#[test]
fn save_in_pieces_whose_state_cannot_be_read_fails_and_the_next_one_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings { buffers: Buffers::Pieces, ..settings(dir.path(), Retention::default()) };
    let snapshot = snapshot(&settings.portion, 8);
    let mut saver = Saver::start(settings, Box::new(testing::Alone::default())).unwrap();
    saver.wait().unwrap();
    let mut left = 3;
    let failed = saver.save_in_pieces(state("run", 7), Instant::now(), |arena, range, values| {
        left -= 1;
        if left == 0 {
            Err("the device is lost")
        } else {
            read_from(&snapshot)(arena, range, values).map_err(|_| "")
        }
    });
    assert_eq!(failed, Err("the device is lost"));
    assert!(matches!(saver.wait(), Err(CheckpointError::Write { .. })));
    saver.save_in_pieces(state("run", 8), Instant::now(), read_from(&snapshot)).unwrap();
    saver.wait().unwrap();
    assert_complete(&dir.path().join(name(8)), 8);
    assert!(!dir.path().join(name(7)).exists());
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
