//! What a thread is doing, as another may read at any time: the trainer's phase, for its heartbeats.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use xlaunch_proto::v1::Phase;

thread_local!(static HERE: Arc<Doing> = Arc::default());

/// Bits of a phase's number; above them are microseconds, enough for half a million years.
const BITS: u32 = 4;

/// A thread's phase, and since when. One word holds both, so that they belong together.
#[derive(Debug)]
pub(crate) struct Doing {
    start: Instant,
    now: AtomicU64,
}

impl Default for Doing {
    fn default() -> Self {
        Self { start: Instant::now(), now: AtomicU64::new(0) }
    }
}

impl Doing {
    /// That of the calling thread.
    pub(crate) fn here() -> Arc<Self> {
        HERE.with(Arc::clone)
    }

    /// The phase, and for how long.
    pub(crate) fn read(&self) -> (Phase, Duration) {
        let word = self.now.load(Ordering::Relaxed);
        let since = Duration::from_micros(word >> BITS);
        (phase(word), self.start.elapsed().saturating_sub(since))
    }
}

/// The calling thread enters a phase; the one that it was in.
pub(crate) fn enter(next: Phase) -> Phase {
    HERE.with(|here| {
        let micros = u64::try_from(here.start.elapsed().as_micros()).unwrap_or(u64::MAX >> BITS);
        let number = u64::try_from(i32::from(next)).unwrap_or_default();
        phase(here.now.swap(micros << BITS | number, Ordering::Relaxed))
    })
}

fn phase(word: u64) -> Phase {
    let number = i32::try_from(word & ((1 << BITS) - 1)).unwrap_or_default();
    Phase::try_from(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_thread_reads_the_phase_and_how_long_it_lasts() {
        let here = Doing::here();
        assert_eq!(here.read().0, Phase::Unspecified);
        assert_eq!(enter(Phase::Sample), Phase::Unspecified);
        std::thread::sleep(Duration::from_millis(20));
        let (phase, lasts) = std::thread::spawn(move || here.read()).join().unwrap();
        assert!(phase == Phase::Sample && lasts >= Duration::from_millis(20), "{phase:?} {lasts:?}");
        assert_eq!(enter(Phase::Forward), Phase::Sample);
        assert!(Doing::here().read().1 < lasts);
    }
}
