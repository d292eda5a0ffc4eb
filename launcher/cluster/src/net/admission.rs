//! Decides which callers are authenticated next. Pure: time is an argument.
//!
//! ```text
//! accept --> waiting (at most MAX_WAITING) --> handshake (at most MAX_PENDING) --> member
//!               '-- the oldest is dropped         '-- displaced when it is late
//! ```
//! Authentication takes milliseconds, so a caller that has waited for long is not an agent, or its connection is broken
//! and it will call again. A new caller therefore displaces the oldest handshake that is late, and once callers wait
//! for longer than [`WAITING_GRACE`], the newest one is served first. Serving all callers in order, or refusing new
//! ones, would let callers that never complete a handshake keep agents out.
//!
//! - A handshake may take [`HELLO_GRACE`] until the caller's first message is complete (agents send it at once, in one
//!   piece) and [`HANDSHAKE_GRACE`] in total before it may be displaced.
//! - Among several source addresses, the one with the fewest handshakes is served first. A source with more than half
//!   of the handshakes can lose one at once, without any grace, to a source that has none. There is no limit per
//!   source: agents may share an address.
//! - A thousand agents that connect at once are served in order: as long as no caller waits for longer than
//!   [`WAITING_GRACE`], further ones wait in the kernel's queue and none is dropped.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum number of simultaneous handshakes.
pub(super) const MAX_PENDING: usize = 64;
/// Maximum number of accepted callers that wait for their handshake. More of them wait in the kernel.
pub(super) const MAX_WAITING: usize = 256;

/// A caller whose first message is incomplete is not displaced for this long.
const HELLO_GRACE: Duration = Duration::from_millis(200);
/// Any other caller is not displaced for this long: a busy host needs a second for a thousand agents.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(2);
/// A waiting caller is served in order, and not dropped, for this long.
const WAITING_GRACE: Duration = Duration::from_millis(600);

/// The callers that are not yet authenticated. `S` is a connection, `H` a handshake that can be aborted.
#[derive(Debug)]
pub(super) struct Admission<S, H> {
    /// Number for the next caller.
    next: u64,
    /// Waiting callers by number, so that the oldest comes first.
    waiting: BTreeMap<u64, Waiting<S>>,
    handshakes: BTreeMap<u64, Handshake<H>>,
}

#[derive(Debug)]
struct Waiting<S> {
    source: IpAddr,
    since: Instant,
    connection: S,
}

#[derive(Debug)]
struct Handshake<H> {
    source: IpAddr,
    since: Instant,
    has_greeted: Arc<AtomicBool>,
    handle: H,
}

/// A caller whose handshake starts now.
#[derive(Debug)]
pub(super) struct Start<S, H> {
    pub(super) number: u64,
    pub(super) source: IpAddr,
    pub(super) connection: S,
    /// The handshake to abort in its favour.
    pub(super) displaced: Option<H>,
}

impl<S, H> Admission<S, H> {
    pub(super) fn new() -> Self {
        Self { next: 0, waiting: BTreeMap::new(), handshakes: BTreeMap::new() }
    }

    /// Returns the earliest time at which the next connection may be accepted; `now` if that is at once.
    pub(super) fn accepts_at(&self, now: Instant) -> Instant {
        let oldest = self.waiting.values().next().filter(|_| self.waiting.len() >= MAX_WAITING);
        oldest.map_or(now, |oldest| oldest.since + WAITING_GRACE)
    }

    /// Adds an accepted connection. If too many are waiting, the oldest one is dropped.
    pub(super) fn accepted(&mut self, source: IpAddr, connection: S, now: Instant) {
        if self.waiting.len() >= MAX_WAITING {
            self.waiting.pop_first();
        }
        self.waiting.insert(self.next, Waiting { source, since: now, connection });
        self.next += 1;
    }

    /// Returns the caller whose handshake is to start now, if any. [`started`](Self::started) must follow.
    pub(super) fn start(&mut self, now: Instant) -> Option<Start<S, H>> {
        let number = self.first_to_serve(now)?;
        let displaced = if self.handshakes.len() < MAX_PENDING {
            None
        } else {
            Some(self.displaceable(self.waiting.get(&number)?.source, now)?)
        };
        let Waiting { source, connection, .. } = self.waiting.remove(&number)?;
        let displaced = displaced.and_then(|number| self.handshakes.remove(&number));
        Some(Start { number, source, connection, displaced: displaced.map(|it| it.handle) })
    }

    /// Records a running handshake. The flag is set once the caller's first message is complete.
    pub(super) fn started(
        &mut self,
        number: u64,
        source: IpAddr,
        has_greeted: Arc<AtomicBool>,
        handle: H,
        now: Instant,
    ) {
        self.handshakes.insert(number, Handshake { source, since: now, has_greeted, handle });
    }

    /// Removes handshakes that have ended.
    pub(super) fn remove_finished(&mut self, is_finished: impl Fn(&H) -> bool) {
        self.handshakes.retain(|_, handshake| !is_finished(&handshake.handle));
    }

    /// Time at which [`start`](Self::start) may return a caller although it returns none now.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let first = self.handshakes.values().map(Handshake::protected_until).min();
        first.filter(|_| !self.waiting.is_empty())
    }

    /// Number of the caller to serve next, from a source with the fewest handshakes.
    fn first_to_serve(&self, now: Instant) -> Option<u64> {
        let counts = self.counts();
        let handshakes = |source: &IpAddr| counts.get(source).copied().unwrap_or(0);
        let is_clogged = self.waiting.values().next().is_some_and(|it| now >= it.since + WAITING_GRACE);
        let order = |number: u64| if is_clogged { u64::MAX - number } else { number };
        let first = self.waiting.iter().min_by_key(|(number, it)| (handshakes(&it.source), order(**number)));
        first.map(|(number, _)| *number)
    }

    /// Number of the oldest handshake that has to make way for a caller from `source`.
    fn displaceable(&self, source: IpAddr, now: Instant) -> Option<u64> {
        let counts = self.counts();
        let is_new = !counts.contains_key(&source);
        let has_most = |source: &IpAddr| counts.get(source).is_some_and(|count| *count > MAX_PENDING / 2);
        let late = |it: &Handshake<H>| it.protected_until() <= now || (is_new && has_most(&it.source));
        self.handshakes.iter().find(|(_, handshake)| late(handshake)).map(|(number, _)| *number)
    }

    fn counts(&self) -> BTreeMap<IpAddr, usize> {
        let mut counts = BTreeMap::new();
        for handshake in self.handshakes.values() {
            *counts.entry(handshake.source).or_default() += 1;
        }
        counts
    }
}

impl<H> Handshake<H> {
    fn protected_until(&self) -> Instant {
        let has_greeted = self.has_greeted.load(Ordering::Relaxed);
        self.since + if has_greeted { HANDSHAKE_GRACE } else { HELLO_GRACE }
    }
}

#[cfg(test)]
mod tests;
