//! Activity of a rank: the phase and the collectives of the training thread, and a counter of the progress that any
//! thread makes between steps.
//!
//! ```text
//! training thread --enter, begin_collective--> tracker --> heartbeats
//!                                         '--> record in the agent's memory, which outlives this process
//! ```

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use xlaunch_engine::Marks;
use xlaunch_proto::activity::Activity;
use xlaunch_proto::v1::Phase;

/// Counter of the whole process, as threads of all kinds make progress. Never reset: the agent only looks for changes.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static TRACKER: Arc<PhaseTracker> = Arc::default();
    // Set only in the training thread, and only if an agent reads it.
    static RECORD: RefCell<Option<Record>> = const { RefCell::new(None) };
    // Time that this thread has spent waiting for collectives.
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Low bits of the packed word, which hold the phase's number. The rest is a time in microseconds.
const PHASE_BITS: u32 = 4;

/// A thread's current phase and its start time. Both are packed into one word, so that a reader always gets a matching
/// pair without a lock in the training loop.
#[derive(Debug)]
pub(crate) struct PhaseTracker {
    start: Instant,
    packed: AtomicU64,
    /// Number of collectives that the thread has started. Never reset.
    collectives: AtomicU64,
    /// Marks of its device, once the device is open.
    marks: OnceLock<Marks>,
}

impl Default for PhaseTracker {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            packed: AtomicU64::new(0),
            collectives: AtomicU64::new(0),
            marks: OnceLock::new(),
        }
    }
}

impl PhaseTracker {
    /// Returns the tracker of the calling thread.
    pub(crate) fn of_this_thread() -> Arc<Self> {
        TRACKER.with(Arc::clone)
    }

    /// Returns the current phase, and the time since it began.
    pub(crate) fn read(&self) -> (Phase, Duration) {
        let packed = self.packed.load(Ordering::Relaxed);
        let began = Duration::from_micros(packed >> PHASE_BITS);
        (unpack(packed), self.start.elapsed().saturating_sub(began))
    }

    /// Returns the number of collectives that the thread has started.
    pub(crate) fn collectives(&self) -> u64 {
        self.collectives.load(Ordering::Relaxed)
    }

    /// Returns the number of marks that the device has passed; 0 on devices without marks.
    pub(crate) fn marks(&self) -> u64 {
        self.marks.get().map_or(0, Marks::passed)
    }
}

/// The record of the training thread, which the agent reads.
#[derive(Debug)]
struct Record {
    file: File,
    activity: Activity,
}

impl Record {
    fn write(&mut self) {
        self.activity.since = Activity::now();
        // This writes to memory. If it fails, training continues: the record is only for diagnosis.
        let _ = self.file.write_all_at(&self.activity.encode(), 0);
    }
}

/// Changes the record. If `change` returns true, writes it now, otherwise with a later change: a write costs about half
/// a microsecond.
fn record(change: impl FnOnce(&mut Activity) -> bool) {
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record
            && change(&mut record.activity)
        {
            record.write();
        }
    });
}

/// Records the activity of the calling thread in the file that this process has inherited under this descriptor. If
/// there is none, or it cannot be opened, nothing is recorded.
pub(crate) fn record_to(fd: Option<u32>) {
    let file = fd.and_then(|fd| File::options().write(true).open(format!("/proc/self/fd/{fd}")).ok());
    RECORD.set(file.map(|file| Record { file, activity: Activity::default() }));
}

/// Records that the calling thread starts to work on this step, from 1.
pub(crate) fn begin_step(step: u64) {
    record(|activity| {
        activity.step = step;
        false
    });
}

/// Records that the training thread is about to start a collective.
pub(crate) fn begin_collective() {
    let started = count_collectives(1);
    record(|activity| {
        (activity.collectives, activity.starting) = (started, true);
        activity.bucket += 1;
        true
    });
}

/// Records that the collective has started.
pub(crate) fn collective_started() {
    record(|activity| {
        activity.starting = false;
        true
    });
}

/// Records that the training thread waits for all collectives that it has started.
pub(crate) fn wait_for_collectives<T>(wait: impl FnOnce() -> T) -> T {
    let (outer, start) = (enter(Phase::AllReduce), Instant::now());
    let result = wait();
    WAITED.set(WAITED.get() + start.elapsed());
    record(|activity| {
        activity.bucket = 0;
        false
    });
    enter(outer);
    result
}

/// Counts collectives that were started without [`begin_collective`], by a graph that contains them.
pub(crate) fn add_collectives(count: u64) {
    let started = count_collectives(count);
    record(|activity| {
        activity.collectives = started;
        true
    });
}

/// Adds to the count of collectives of the calling thread. Returns the new count.
fn count_collectives(count: u64) -> u64 {
    count + TRACKER.with(|tracker| tracker.collectives.fetch_add(count, Ordering::Relaxed))
}

/// Returns the number of collectives that the calling thread has started.
pub(crate) fn collectives() -> u64 {
    TRACKER.with(|tracker| tracker.collectives())
}

/// Makes heartbeats report the marks that the device of the calling thread passes.
pub(crate) fn show_marks(marks: Marks) {
    // A rank opens one device.
    let _ = TRACKER.with(|tracker| tracker.marks.set(marks));
}

/// Returns the time that the calling thread has waited for collectives since the last call.
pub(crate) fn take_waited() -> Duration {
    WAITED.take()
}

/// Moves the calling thread to phase `next`; returns the phase that it was in.
pub(crate) fn enter(next: Phase) -> Phase {
    let outer = TRACKER.with(|tracker| {
        let micros = u64::try_from(tracker.start.elapsed().as_micros()).unwrap_or(u64::MAX >> PHASE_BITS);
        let number = u64::try_from(i32::from(next)).unwrap_or_default();
        unpack(tracker.packed.swap(micros << PHASE_BITS | number, Ordering::Relaxed))
    });
    // The time between phases is short; during it the record still shows the previous phase.
    record(|activity| std::mem::replace(&mut activity.phase, next) != next && next != Phase::Unspecified);
    outer
}

/// Reports progress of long work between steps: a batch was evaluated, or a part of a checkpoint was written. The agent
/// gives a worker that is stopping more time while this is called. Cheap; may be called from any thread.
pub(crate) fn advance() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of calls to [`advance`].
pub(crate) fn progress() -> u64 {
    PROGRESS.load(Ordering::Relaxed)
}

fn unpack(packed: u64) -> Phase {
    let number = i32::try_from(packed & ((1 << PHASE_BITS) - 1)).unwrap_or_default();
    Phase::try_from(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_and_its_duration_are_readable_from_another_thread() {
        let tracker = PhaseTracker::of_this_thread();
        assert_eq!(tracker.read().0, Phase::Unspecified);
        assert_eq!(enter(Phase::Sample), Phase::Unspecified);
        std::thread::sleep(Duration::from_millis(20));
        let (phase, duration) = std::thread::spawn(move || tracker.read()).join().unwrap();
        assert!(phase == Phase::Sample && duration >= Duration::from_millis(20), "{phase:?} {duration:?}");
        assert_eq!(enter(Phase::Forward), Phase::Sample);
        assert!(PhaseTracker::of_this_thread().read().1 < duration);
    }

    fn read(file: &File) -> Activity {
        let mut bytes = [0; xlaunch_proto::activity::BYTES];
        file.read_exact_at(&mut bytes, 0).unwrap();
        Activity::decode(&bytes).unwrap()
    }

    #[test]
    fn record_shows_step_phase_and_the_collective_that_is_being_started() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().unwrap();
        record_to(u32::try_from(file.as_raw_fd()).ok());
        begin_step(7);
        let outer = enter(Phase::Backward);
        let before = collectives();
        begin_collective();
        collective_started();
        begin_collective();
        let seen = read(&file);
        assert_eq!((seen.step, seen.phase, seen.bucket, seen.starting), (7, Phase::Backward, 2, true));
        assert_eq!(seen.collectives, before + 2);
        collective_started();
        let waiting = wait_for_collectives(|| read(&file));
        assert_eq!((waiting.phase, waiting.bucket, waiting.starting), (Phase::AllReduce, 2, false));
        assert_eq!((read(&file).phase, read(&file).bucket), (Phase::Backward, 0));
        add_collectives(5);
        assert_eq!(read(&file).collectives, before + 7);
        // Other threads, which may belong to other ranks, do not change the record or the counter.
        let other = std::thread::spawn(|| {
            begin_collective();
            enter(Phase::Sample)
        });
        other.join().unwrap();
        assert_eq!((read(&file).phase, collectives()), (Phase::Backward, before + 7));
        enter(outer);
    }
}
