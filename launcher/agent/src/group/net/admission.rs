//! Decides which callers may wait to be authenticated. Pure: time is an argument.
//!
//! Authentication takes milliseconds, so a caller that has waited for long is not an agent, or its connection is broken
//! and it will call again. If [`MAX_PENDING`] callers wait, a new one therefore displaces the oldest. Refusing the new
//! one instead would let callers that never send anything keep agents out for [`super::listener::HANDSHAKE_TIMEOUT`].
//!
//! Callers are safe from displacement for a time that any agent's handshake takes: [`SILENT_GRACE`] until the first
//! bytes arrive (agents send at once), then [`HANDSHAKE_GRACE`] in all. While all are safe, none is accepted: a
//! thousand agents that connect at once wait in the kernel's queue. There are no limits per address: agents may share
//! one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::listener::MAX_PENDING;

/// A caller that has sent nothing is not displaced for this long.
const SILENT_GRACE: Duration = Duration::from_millis(200);
/// A caller that has sent something is not displaced for this long: a thousand agents on one busy host need a second.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(2);

/// The callers that wait to be authenticated.
#[derive(Debug)]
pub(super) struct Pending<T> {
    /// Number of the next caller.
    next: u64,
    /// By number, so that the oldest is first.
    callers: BTreeMap<u64, Caller<T>>,
}

#[derive(Debug)]
struct Caller<T> {
    since: Instant,
    has_sent: Arc<AtomicBool>,
    handle: T,
}

/// Whether one more caller can be accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Room {
    Free,
    /// Yes, if the caller with this number is displaced.
    Displace(u64),
    /// Not before this time.
    After(Instant),
}

impl<T> Pending<T> {
    pub(super) fn new() -> Self {
        Self { next: 0, callers: BTreeMap::new() }
    }

    /// Adds a caller; `start` gets the flag to set when it has sent something.
    pub(super) fn add(&mut self, now: Instant, start: impl FnOnce(Arc<AtomicBool>) -> T) {
        let has_sent = Arc::<AtomicBool>::default();
        let handle = start(has_sent.clone());
        self.callers.insert(self.next, Caller { since: now, has_sent, handle });
        self.next += 1;
    }

    /// Removes a caller.
    pub(super) fn remove(&mut self, number: u64) -> Option<T> {
        self.callers.remove(&number).map(|caller| caller.handle)
    }

    /// Removes callers that wait no more.
    pub(super) fn remove_finished(&mut self, is_finished: impl Fn(&T) -> bool) {
        self.callers.retain(|_, caller| !is_finished(&caller.handle));
    }

    pub(super) fn room(&self, now: Instant) -> Room {
        if self.callers.len() < MAX_PENDING {
            return Room::Free;
        }
        let until = |caller: &Caller<T>| {
            let has_sent = caller.has_sent.load(Ordering::Relaxed);
            caller.since + if has_sent { HANDSHAKE_GRACE } else { SILENT_GRACE }
        };
        let displaceable = self.callers.iter().find(|(_, caller)| until(caller) <= now);
        match displaceable {
            Some((number, _)) => Room::Displace(*number),
            None => Room::After(self.callers.values().map(until).min().unwrap_or(now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(start: Instant) -> (Pending<()>, Vec<Arc<AtomicBool>>) {
        let mut pending = Pending::new();
        let mut flags = Vec::new();
        for _ in 0..MAX_PENDING {
            assert_eq!(pending.room(start), Room::Free);
            pending.add(start, |has_sent| flags.push(has_sent));
        }
        (pending, flags)
    }

    #[test]
    fn silent_callers_are_displaced_before_those_that_send() {
        let start = Instant::now();
        let (pending, flags) = full(start);
        assert_eq!(pending.room(start), Room::After(start + SILENT_GRACE));
        flags[0].store(true, Ordering::Relaxed);
        assert_eq!(pending.room(start + SILENT_GRACE), Room::Displace(1));
        for flag in &flags {
            flag.store(true, Ordering::Relaxed);
        }
        assert_eq!(pending.room(start + SILENT_GRACE), Room::After(start + HANDSHAKE_GRACE));
        assert_eq!(pending.room(start + HANDSHAKE_GRACE), Room::Displace(0));
    }

    #[test]
    fn authenticated_and_displaced_callers_make_room() {
        let start = Instant::now();
        let (mut pending, _) = full(start);
        pending.remove_finished(|()| false);
        assert_ne!(pending.room(start), Room::Free);
        assert!(pending.remove(5).is_some() && pending.remove(5).is_none());
        assert_eq!(pending.room(start), Room::Free);
        pending.remove_finished(|()| true);
        assert!(pending.callers.is_empty());
    }
}
