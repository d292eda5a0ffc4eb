//! What this process is doing, for heartbeats: the phase of the training thread, and a counter of what any thread gets
//! done between steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::Phase;

/// Never reset, and of the whole process: the agent looks only for changes.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

thread_local!(static TRACKER: Arc<PhaseTracker> = Arc::default());

/// Low bits of the packed word that hold the phase's number. The rest is a time in microseconds.
const PHASE_BITS: u32 = 4;

/// A thread's current phase and when it began. Both are packed into one word, so that a reader always gets a pair that
/// belongs together without a lock in the training loop.
#[derive(Debug)]
pub(crate) struct PhaseTracker {
    start: Instant,
    packed: AtomicU64,
}

impl Default for PhaseTracker {
    fn default() -> Self {
        Self { start: Instant::now(), packed: AtomicU64::new(0) }
    }
}

impl PhaseTracker {
    /// The tracker of the calling thread.
    pub(crate) fn of_this_thread() -> Arc<Self> {
        TRACKER.with(Arc::clone)
    }

    /// The current phase, and the time since it began.
    pub(crate) fn read(&self) -> (Phase, Duration) {
        let packed = self.packed.load(Ordering::Relaxed);
        let began = Duration::from_micros(packed >> PHASE_BITS);
        (unpack(packed), self.start.elapsed().saturating_sub(began))
    }
}

/// Moves the calling thread to phase `next`; returns the phase that it was in.
pub(crate) fn enter(next: Phase) -> Phase {
    TRACKER.with(|tracker| {
        let micros = u64::try_from(tracker.start.elapsed().as_micros()).unwrap_or(u64::MAX >> PHASE_BITS);
        let number = u64::try_from(i32::from(next)).unwrap_or_default();
        unpack(tracker.packed.swap(micros << PHASE_BITS | number, Ordering::Relaxed))
    })
}

/// Reports progress of long work between steps: a batch was evaluated, or a part of a checkpoint written. The
/// agent gives a worker that is stopping more time as long as this is called. Cheap; from any thread.
pub(crate) fn advance() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// The number of calls of [`advance`].
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
}
