//! Memory snapshots of a training job: decides whether they are used, creates the memory files, and finds the newest
//! snapshot in them.
//!
//! ```text
//! agent: two memory files per rank --inherited--> workers of every attempt: snapshots, with headers
//!        a worker has died: headers of all ranks --> newest snapshot that all ranks have --> the next attempt
//! ```
//! The agent neither maps nor sizes the files, and reads only their headers; `xlaunch_proto::snapshot` has the format.
//! The agent does not check snapshots for damage: a rank that finds a damaged snapshot erases it, so that the next
//! attempt resumes from the previous snapshot or from disk, whichever is newer. The memory is released when the last
//! process that has the files open is gone.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use xlaunch_proto::snapshot::{HEADER_BYTES, Header, Identity, SnapshotId, newest_of_all};
use xlaunch_spec::ids::Digest;
use xlaunch_spec::job::{JobSpec, MemorySnapshots};
use xlaunch_spec::quantities::shortage_texts;

/// Two files per rank, so that one holds a complete snapshot while the other one is overwritten.
const FILES_PER_RANK: u64 = 2;
/// `checkpoint.memory = "auto"` uses at most one part in this many of free memory.
const AUTO_PART: u64 = 4;

/// The decision about memory snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub used: bool,
    /// Tells the user why snapshots are not used although they would help.
    pub note: Option<String>,
}

/// Decides whether to use snapshots, according to `checkpoint.memory`. `state_bytes` is the size of one snapshot of all
/// ranks, `available` the memory that training leaves free, in bytes.
///
/// # Errors
/// The user requires snapshots, but they do not fit into memory.
pub fn memory_use(spec: &JobSpec, state_bytes: u64, available: Option<u64>) -> Result<MemoryUse, String> {
    let needed = state_bytes.saturating_mul(FILES_PER_RANK);
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    match (spec.checkpoint.memory, available) {
        (MemorySnapshots::Off, _) => Ok(MemoryUse::default()),
        (MemorySnapshots::On, Some(available)) if needed > available => Err(format!(
            "checkpoint.memory: the snapshots of all ranks need {}, but training leaves only {} of memory free; set it \
             to \"auto\" or \"off\"",
            shortage_texts(needed, available)[0],
            shortage_texts(needed, available)[1]
        )),
        (MemorySnapshots::On, _) => Ok(MemoryUse { used: true, note: None }),
        (MemorySnapshots::Auto, _) if !restarts_from_checkpoints(spec) => Ok(MemoryUse::default()),
        (MemorySnapshots::Auto, _) if spec.comm.experts > 1 => {
            let note =
                "restarts read checkpoints: with comm.experts above 1, there are no snapshots in memory";
            Ok(MemoryUse { used: false, note: Some(note.into()) })
        }
        (MemorySnapshots::Auto, Some(available)) if needed <= available / AUTO_PART => {
            Ok(MemoryUse { used: true, note: None })
        }
        (MemorySnapshots::Auto, available) => {
            let limit = available.map_or("free memory is not known".into(), |available| {
                format!("a quarter of free memory is {} MiB", mib(available / AUTO_PART))
            });
            let note =
                format!("restarts read checkpoints: snapshots in memory need {} MiB, {limit}", mib(needed));
            Ok(MemoryUse { used: false, note: Some(note) })
        }
    }
}

/// Message for users who want snapshots, if the job has several nodes. Such jobs use no snapshots, because the memory
/// of a lost node is lost too.
pub(super) fn note_of_nodes(spec: &JobSpec) -> Option<&'static str> {
    let is_wanted = match spec.checkpoint.memory {
        MemorySnapshots::Off => false,
        MemorySnapshots::On => true,
        MemorySnapshots::Auto => restarts_from_checkpoints(spec),
    };
    is_wanted.then_some("restarts read checkpoints: with several nodes, there are no snapshots in memory")
}

/// Returns whether a restart could use a snapshot: restarts must be allowed, and snapshots are taken only at checkpoint
/// intervals.
fn restarts_from_checkpoints(spec: &JobSpec) -> bool {
    spec.launch.max_restarts > 0 && (spec.checkpoint.every > 0 || spec.checkpoint.every_seconds > 0.0)
}

/// The memory files of a job, indexed by rank.
#[derive(Debug)]
pub(super) struct Snapshots {
    run: Digest,
    ranks: Vec<Vec<Arc<OwnedFd>>>,
}

impl Snapshots {
    /// Creates empty files for `world` ranks.
    pub(super) fn create(run_id: &str, world: u32) -> io::Result<Self> {
        let file = |_| -> io::Result<_> {
            // Close-on-exec: only the rank's own worker inherits the file. The worker seals it against truncation.
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            Ok(Arc::new(rustix::fs::memfd_create("xlaunch-snapshot", flags)?))
        };
        let rank = |_| (0..FILES_PER_RANK).map(file).collect::<io::Result<_>>();
        let ranks = (0..world).map(rank).collect::<io::Result<_>>()?;
        Ok(Self { run: Digest::of(run_id.as_bytes()), ranks })
    }

    /// Returns the files of a rank, for its worker to inherit.
    pub(super) fn of_rank(&self, rank: u32) -> &[Arc<OwnedFd>] {
        self.ranks.get(rank as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the newest snapshot that every rank has. No worker may be running.
    pub(super) fn newest(&self) -> Option<SnapshotId> {
        let world = u32::try_from(self.ranks.len()).ok()?;
        let complete = |(rank, files): (u32, &Vec<Arc<OwnedFd>>)| {
            let identity = Identity { run: self.run, rank, world };
            let headers = files.iter().filter_map(|file| header(file));
            headers.filter(|header| header.identity == identity).map(|header| header.id).collect()
        };
        newest_of_all(&(0..).zip(&self.ranks).map(complete).collect::<Vec<_>>())
    }
}

/// Returns the value of [`SNAPSHOT_FDS`](xlaunch_proto::env::SNAPSHOT_FDS). Descriptors keep their numbers in the
/// worker.
pub(super) fn descriptor_list(files: &[Arc<OwnedFd>]) -> String {
    files.iter().map(|file| file.as_raw_fd().to_string()).collect::<Vec<_>>().join(",")
}

fn header(file: &OwnedFd) -> Option<Header> {
    let mut bytes = [0; HEADER_BYTES];
    File::from(file.try_clone().ok()?).read_exact_at(&mut bytes, 0).ok()?;
    Header::decode(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn spec(memory: MemorySnapshots) -> JobSpec {
        let mut spec = JobSpec::default();
        spec.checkpoint.memory = memory;
        spec.checkpoint.every = 10;
        spec.launch.max_restarts = 3;
        spec
    }

    #[test]
    fn auto_uses_two_snapshots_that_fit_into_a_quarter_of_free_memory() {
        let auto = spec(MemorySnapshots::Auto);
        let used = |available| memory_use(&auto, GIB, available).unwrap();
        assert_eq!(used(Some(8 * GIB)), MemoryUse { used: true, note: None });
        let refused = used(Some(8 * GIB - 1));
        assert!(!refused.used);
        let note = refused.note.unwrap();
        assert!(note.contains("2048 MiB") && note.contains("a quarter of free memory is 2048 MiB"), "{note}");
        assert!(!used(None).used);
    }

    #[test]
    fn auto_is_off_where_no_restart_could_use_a_snapshot() {
        let used = |change: fn(&mut JobSpec)| {
            let mut spec = spec(MemorySnapshots::Auto);
            change(&mut spec);
            memory_use(&spec, GIB, Some(1000 * GIB)).unwrap()
        };
        assert_eq!(used(|spec| spec.launch.max_restarts = 0), MemoryUse::default());
        assert_eq!(used(|spec| spec.checkpoint.every = 0), MemoryUse::default());
        let by_clock =
            |spec: &mut JobSpec| (spec.checkpoint.every, spec.checkpoint.every_seconds) = (0, 60.0);
        assert!(used(by_clock).used);
    }

    #[test]
    fn snapshots_on_is_refused_if_memory_is_short() {
        let on = spec(MemorySnapshots::On);
        assert!(memory_use(&on, GIB, Some(2 * GIB)).unwrap().used);
        assert!(memory_use(&on, GIB, None).unwrap().used);
        let error = memory_use(&on, GIB, Some(2 * GIB - 1)).unwrap_err();
        assert!(error.contains("need 2 GiB") && error.contains("checkpoint.memory"), "{error}");
        assert_eq!(memory_use(&spec(MemorySnapshots::Off), 1, Some(GIB)).unwrap(), MemoryUse::default());
    }

    #[test]
    fn jobs_on_several_nodes_note_that_snapshots_are_unused() {
        let note = |memory, max_restarts| {
            let mut spec = spec(memory);
            spec.launch.max_restarts = max_restarts;
            note_of_nodes(&spec).is_some_and(|note| note.contains("no snapshots in memory"))
        };
        let (auto, on) = (MemorySnapshots::Auto, MemorySnapshots::On);
        assert!(note(auto, 3) && note(on, 0) && !note(auto, 0) && !note(MemorySnapshots::Off, 3));
    }

    fn write(snapshots: &Snapshots, rank: u32, file: usize, bytes: &[u8]) {
        let file = snapshots.of_rank(rank)[file].try_clone().unwrap();
        File::from(file).write_all_at(bytes, 0).unwrap();
    }

    fn complete(run: &str, rank: u32, step: u64) -> [u8; HEADER_BYTES] {
        let identity = Identity { run: Digest::of(run.as_bytes()), rank, world: 2 };
        let (id, layout) = (SnapshotId { step, attempt: 0 }, Digest::of(b""));
        Header { identity, id, layout, values: u64::MAX, state_bytes: u64::MAX, hash: 0 }.encode()
    }

    #[test]
    fn newest_snapshot_requires_matching_run_and_rank() {
        let snapshots = Snapshots::create("run", 2).unwrap();
        assert_eq!(snapshots.newest(), None, "files are empty");
        let newest = |rank, file, bytes: &[u8]| {
            write(&snapshots, rank, file, bytes);
            snapshots.newest().map(|id| id.step)
        };
        assert_eq!(newest(0, 0, &complete("run", 0, 10)), None);
        assert_eq!(newest(1, 1, &complete("run", 1, 10)), Some(10));
        assert_eq!(newest(0, 1, &complete("run", 0, 20)), Some(10));
        // Snapshots of another run, of another rank, and a truncated one.
        assert_eq!(newest(1, 0, &complete("other", 1, 20)), Some(10));
        assert_eq!(newest(1, 0, &complete("run", 0, 20)), Some(10));
        assert_eq!(newest(1, 0, &complete("run", 1, 20)[..100]), Some(10));
        assert_eq!(newest(1, 0, &complete("run", 1, 20)), Some(20));
        assert_eq!(newest(0, 1, &[0; HEADER_BYTES]), Some(10), "erased by its worker");
    }
}
