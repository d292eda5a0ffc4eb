//! Times how long each part of a restart takes.

use std::time::Instant;

/// The moments between a failure and the first step of the next attempt, in this order. Moments that a kind of job does
/// not have are `None`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RestartTimes {
    pub(super) failed: Option<Instant>,
    /// The last process of the failed attempt is gone.
    pub(super) stopped: Option<Instant>,
    /// The next attempt begins, after a delay or at once.
    pub(super) start: Option<Instant>,
    /// All processes of the attempt have been started.
    pub(super) spawned: Option<Instant>,
    pub(super) joined: Option<Instant>,
    /// The model is initialised, or read from a checkpoint.
    pub(super) train_started: Option<Instant>,
    pub(super) first_step: Option<Instant>,
    /// End of the restart: the first step, or for a command the start of its processes.
    pub(super) end: Option<Instant>,
}

impl RestartTimes {
    /// Returns a line such as `restarted in 3.4 s: stop 0.4, start 0.2, join 1.1, first step 1.7`; `None` before the
    /// end of the restart, and for an attempt that follows no failure. The parts add up to the total.
    pub(super) fn text(&self) -> Option<String> {
        let (failed, end) = (self.failed?, self.end?);
        let parts = [
            ("stop", self.stopped),
            ("delay", self.start),
            ("start", self.spawned),
            ("join", self.joined),
            ("resume", self.train_started),
            ("first step", self.first_step),
        ];
        let mut before = failed;
        let mut texts = Vec::new();
        for (name, at) in parts {
            let Some(at) = at else { continue };
            let seconds = at.saturating_duration_since(before).as_secs_f64();
            before = before.max(at);
            // Most restarts have no delay.
            if name != "delay" || seconds >= 0.05 {
                texts.push(format!("{name} {seconds:.1}"));
            }
        }
        let whole = end.saturating_duration_since(failed).as_secs_f64();
        Some(format!("restarted in {whole:.1} s: {}", texts.join(", ")))
    }
}
