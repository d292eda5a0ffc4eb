use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use rustix::fs::MemfdFlags;
use xlaunch_proto::v1::worker_report::Report;

use super::super::Retention;
use super::super::saver::{Buffers, Exchange, Saver, Settings, Written};
use super::super::testing::{self, sharding, state, value};
use super::*;
use crate::model::layout::Layout;

/// The memory files of rank 1 of 2. They belong to the agent; the rank uses them in several attempts.
struct Files(Vec<OwnedFd>);

impl Files {
    fn new() -> Self {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Self((0..2).map(|_| rustix::fs::memfd_create("test", flags).unwrap()).collect())
    }

    /// Opens the files as rank 1 does in an attempt.
    fn open(&self, attempt: u32, resume: Option<(u64, u32)>) -> Memory {
        self.open_as("run", 1, attempt, resume)
    }

    fn open_as(&self, run: &str, rank: u32, attempt: u32, resume: Option<(u64, u32)>) -> Memory {
        let fds: Vec<u32> = self.0.iter().map(|fd| fd.as_raw_fd().try_into().unwrap()).collect();
        let identity = Identity { run: Digest::of(run.as_bytes()), rank, world: 2 };
        let resume = resume.map(|(step, attempt)| SnapshotId { step, attempt });
        Memory::open(&fds, identity, b"layout", portion(true), attempt, resume).unwrap()
    }

    /// Returns the complete snapshot that the agent finds in each file.
    fn complete(&self) -> Vec<Option<(u64, u32)>> {
        let id = |file: &Arc<File>| header(file).map(|header| (header.id.step, header.id.attempt));
        self.open(9, None).files.iter().map(id).collect()
    }
}

/// Returns the portion that rank 1 of 2 saves.
fn portion(sharded: bool) -> Portion {
    let layout = Layout::new(&testing::shape());
    Portion::new(&layout, &sharding(&layout, 1, 2, sharded), 1, 2)
}

/// Copies the portion of a rank after a step.
fn fill(buffers: &mut Snapshot, portion: &Portion, step: u64) {
    let values = testing::snapshot(portion, step);
    buffers.params.copy_from_slice(&values.params);
    buffers.m.copy_from_slice(&values.m);
    buffers.v.copy_from_slice(&values.v);
}

/// Saves a step with these buffers.
fn save(buffers: &mut Snapshot, step: u64) {
    buffers.erase().unwrap();
    fill(buffers, &portion(true), step);
    buffers.complete(&state("run", step)).unwrap();
}

/// Saves steps in an attempt that resumes from `resume`.
fn attempt(files: &Files, attempt: u32, resume: Option<(u64, u32)>, steps: &[u64]) {
    let mut buffers = files.open(attempt, resume).allocate(&HostAllocator::default()).unwrap();
    for (index, step) in steps.iter().enumerate() {
        save(&mut buffers[index % 2], *step);
    }
}

/// Arena, index and value.
type Value = (Arena, usize, f32);

/// Reads all values and the state.
fn read(memory: &Memory) -> Result<(Vec<Value>, State), String> {
    let found = Mutex::new(Vec::new());
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let state = memory.read(&threads, &|Piece { arena, at, values }| {
        found.lock().unwrap().extend(values.iter().zip(at..).map(|(value, at)| (arena, at, *value)));
        Ok(())
    });
    Ok((found.into_inner().unwrap(), state.map_err(|error| error.to_string())?.unwrap()))
}

#[test]
fn later_attempt_reads_the_portion_and_state_that_were_saved() {
    for sharded in [true, false] {
        let (files, portion) = (Files::new(), portion(sharded));
        let open = |attempt, resume| Memory { portion: portion.clone(), ..files.open(attempt, resume) };
        let mut buffers = open(0, None).allocate(&HostAllocator::default()).unwrap().remove(0);
        fill(&mut buffers, &portion, 10);
        buffers.complete(&state("run", 10)).unwrap();
        drop(buffers);

        let (found, read_state) = read(&open(1, Some((10, 0)))).unwrap();
        assert_eq!(read_state, state("run", 10));
        assert_eq!(found.len(), 3 * portion.len());
        assert!(found.iter().all(|(arena, at, found)| *found == value(*arena, *at, 10)), "{sharded}");
    }
}

#[test]
fn two_files_take_turns_and_the_resumed_snapshot_is_overwritten_last() {
    let files = Files::new();
    attempt(&files, 0, None, &[10, 20]);
    assert_eq!(files.complete(), [Some((10, 0)), Some((20, 0))]);
    attempt(&files, 1, Some((10, 0)), &[]);
    assert_eq!(files.complete(), [Some((10, 0)), Some((20, 0))], "mapping changes nothing");
    attempt(&files, 1, Some((10, 0)), &[20]);
    assert_eq!(files.complete(), [Some((10, 0)), Some((20, 1))]);
    attempt(&files, 2, Some((20, 1)), &[30]);
    assert_eq!(files.complete(), [Some((30, 2)), Some((20, 1))]);
}

/// Records the number of complete snapshots while the save waits for the agent, and after each written part.
struct Watch {
    files: Vec<Arc<File>>,
    alone: testing::Alone,
    found: Sender<(&'static str, usize)>,
}

impl Watch {
    fn note(&self, what: &'static str) {
        self.found.send((what, self.files.iter().filter(|file| header(file).is_some()).count())).unwrap();
    }
}

impl Exchange for Watch {
    fn written(&mut self, step: u64, result: Result<Vec<Written>, String>) {
        self.note("written");
        self.alone.written(step, result);
    }

    fn all_written(&mut self, step: u64) -> Result<Vec<Written>, String> {
        self.alone.all_written(step)
    }

    fn flush(&mut self) {
        self.note("flush");
    }

    fn report(&mut self, _: Report) {}
}

#[test]
fn snapshot_is_not_complete_before_the_agent_has_all_reports() {
    let (dir, files) = (tempfile::tempdir().unwrap(), Files::new());
    let settings = testing::settings(dir.path(), Retention::default());
    let memory = Memory { portion: settings.portion.clone(), ..files.open_as("run", 0, 0, None) };
    let (found, notes) = channel();
    let watch = Watch { files: memory.files.clone(), alone: testing::Alone::default(), found };
    let portion = settings.portion.clone();
    let mut saver = Saver::start(
        Settings { buffers: Buffers::Files { memory, required: false }, ..settings },
        Box::new(watch),
    )
    .unwrap();
    saver.wait().unwrap();
    let mut snapshot = saver.take_buffers().unwrap();
    fill(&mut snapshot, &portion, 10);
    saver.begin(snapshot, state("run", 10), Instant::now());
    saver.wait().unwrap();
    drop(saver);
    assert_eq!(notes.iter().collect::<Vec<_>>(), [("flush", 0), ("written", 1)]);
}

#[test]
fn snapshot_is_not_complete_while_it_is_overwritten() {
    let files = Files::new();
    attempt(&files, 0, None, &[10, 20]);
    let buffers = files.open(1, Some((20, 0))).allocate(&HostAllocator::default()).unwrap();
    buffers[0].erase().unwrap();
    assert_eq!(files.complete(), [None, Some((20, 0))]);
    assert!(read(&files.open(2, Some((20, 0)))).is_ok());
}

/// Changes the file of step 20 at an offset, then reads it. Expects the snapshot to be refused and erased; returns the
/// reason.
fn refused(offset: u64, bytes: &[u8]) -> String {
    let files = Files::new();
    attempt(&files, 0, None, &[10, 20]);
    let memory = files.open(1, Some((20, 0)));
    memory.files[1].file().write_all_at(bytes, offset).unwrap();
    let reason = read(&memory).unwrap_err();
    assert!(reason.contains("step 20 is damaged on rank 1"), "{reason}");
    assert_eq!(files.complete(), [Some((10, 0)), None], "{reason}");
    assert!(read(&files.open(2, Some((10, 0)))).is_ok(), "the one before is as it was");
    reason
}

/// Reads step 20 after a change of its header.
fn with_header(change: impl FnOnce(&mut Header)) -> String {
    let files = Files::new();
    attempt(&files, 0, None, &[10, 20]);
    let mut changed = header(&files.open(0, None).files[1]).unwrap();
    change(&mut changed);
    refused(0, &changed.encode())
}

#[test]
fn flipped_bit_of_any_arena_and_of_the_state_is_found() {
    let values = portion(true).len() as u64;
    for part in 0..3 {
        let start = offset(part, values).unwrap();
        for at in [start, start + values * 2, start + values * 4 - 1] {
            let files = Files::new();
            attempt(&files, 0, None, &[10, 20]);
            let mut byte = [0];
            files.open(0, None).files[1].file().read_exact_at(&mut byte, at).unwrap();
            assert!(refused(at, &[byte[0] ^ 0x10]).contains("does not match its hash"), "{part}, {at}");
        }
    }
    // The opening brace of the state.
    assert!(refused(offset(3, values).unwrap(), b"[").contains("does not match its hash"));
}

#[test]
fn snapshot_of_another_run_rank_or_layout_is_refused() {
    assert!(with_header(|header| header.identity.run = Digest::of(b"other")).contains("another run"));
    assert!(with_header(|header| header.identity.rank = 0).contains("another run or rank"));
    assert!(with_header(|header| header.identity.world = 3).contains("another run or rank"));
    assert!(with_header(|header| header.layout = Digest::of(b"other")).contains("another model"));
}

#[test]
fn claims_of_giant_sizes_are_refused_without_allocating_them() {
    assert!(with_header(|header| header.values = u64::MAX).contains("another model"));
    assert!(with_header(|header| header.values += 1).contains("another model"));
    assert!(with_header(|header| header.state_bytes = u64::MAX).contains("size of its state"));
    // This is past the end of the file.
    assert!(with_header(|header| header.state_bytes += 1).contains("damaged"));
    assert!(with_header(|header| header.hash ^= 1).contains("does not match its hash"));
}

#[test]
fn erased_snapshot_is_refused() {
    assert!(refused(0, &[0; HEADER_BYTES]).contains("no longer exists"));
    assert!(refused(20, &[1]).contains("no longer exists"), "a changed header is no header");
}

#[test]
fn reader_that_gives_up_does_not_erase_the_snapshot() {
    let files = Files::new();
    attempt(&files, 0, None, &[10, 20]);
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let read = files.open(1, Some((20, 0))).read(&threads, &|_| Err(Abandoned));
    assert!(matches!(read, Ok(None)));
    assert_eq!(files.complete(), [Some((10, 0)), Some((20, 0))]);
}
