//! Decides which callers are authenticated next. Pure: time is an argument. [`Admission`] decides which handshake makes
//! way for another.
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
//! - Among several source addresses, the one with the fewest handshakes is served first. A source can lose one at
//!   once, without any grace, to a source that has fewer by more than half of [`MAX_PENDING`]. There is no limit per
//!   source: agents may share an address.
//! - A thousand agents that connect at once are served in order: as long as no caller waits for longer than
//!   [`WAITING_GRACE`], further ones wait in the kernel's queue and none is dropped.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use xlaunch_host::net::admission::{Admission, Decision, Entry, Limits, Replaces};

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

const HANDSHAKES: Limits = Limits {
    per_holder: MAX_PENDING,
    total: MAX_PENDING,
    margin: MAX_PENDING / 2,
    replaces: Replaces::Yielding,
};

/// The callers that are not yet authenticated. `S` is a connection, `H` a handshake that can be aborted.
#[derive(Debug)]
pub(super) struct Callers<S, H> {
    /// Waiting callers by arrival, the oldest first.
    waiting: VecDeque<Waiting<S>>,
    handshakes: Admission<IpAddr, Handshake<H>>,
}

#[derive(Debug)]
struct Waiting<S> {
    source: IpAddr,
    since: Instant,
    connection: S,
}

#[derive(Debug)]
struct Handshake<H> {
    since: Instant,
    has_greeted: Arc<AtomicBool>,
    handle: H,
}

/// A caller whose handshake starts now.
#[derive(Debug)]
pub(super) struct Start<S, H> {
    pub(super) source: IpAddr,
    pub(super) connection: S,
    /// The handshake to abort in its favour.
    pub(super) displaced: Option<H>,
}

impl<S, H> Callers<S, H> {
    pub(super) fn new() -> Self {
        Self { waiting: VecDeque::new(), handshakes: Admission::new(HANDSHAKES) }
    }

    /// Returns the earliest time at which the next connection may be accepted; `now` if that is at once.
    pub(super) fn accepts_at(&self, now: Instant) -> Instant {
        let oldest = self.waiting.front().filter(|_| self.waiting.len() >= MAX_WAITING);
        oldest.map_or(now, |oldest| oldest.since + WAITING_GRACE)
    }

    /// Adds an accepted connection. If too many are waiting, the oldest one is dropped.
    pub(super) fn accepted(&mut self, source: IpAddr, connection: S, now: Instant) {
        if self.waiting.len() >= MAX_WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(Waiting { source, since: now, connection });
    }

    /// Returns the caller whose handshake is to start now, if any. [`started`](Self::started) must follow.
    pub(super) fn start(&mut self, now: Instant) -> Option<Start<S, H>> {
        let first = self.first_to_serve(now)?;
        let displaced = match self.handshakes.decide(self.waiting.get(first)?.source, now) {
            Decision::Admit => None,
            Decision::Evict(number) => self.handshakes.remove(number),
            Decision::Refuse => return None,
        };
        let Waiting { source, connection, .. } = self.waiting.remove(first)?;
        Some(Start { source, connection, displaced: displaced.map(|it| it.handle) })
    }

    /// Records a running handshake. The flag is set once the caller's first message is complete.
    pub(super) fn started(&mut self, source: IpAddr, has_greeted: Arc<AtomicBool>, handle: H, now: Instant) {
        self.handshakes.insert(source, Handshake { since: now, has_greeted, handle });
    }

    /// Removes handshakes that have ended.
    pub(super) fn remove_finished(&mut self, is_finished: impl Fn(&H) -> bool) {
        self.handshakes.retain(|handshake| !is_finished(&handshake.handle));
    }

    /// Time at which [`start`](Self::start) may return a caller although it returns none now.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let first = self.handshakes.iter().map(|(.., handshake)| handshake.protected_until()).min();
        first.filter(|_| !self.waiting.is_empty())
    }

    /// Place of the caller to serve next, from a source with the fewest handshakes.
    fn first_to_serve(&self, now: Instant) -> Option<usize> {
        let counts = self.handshakes.counts();
        let handshakes = |source: &IpAddr| counts.get(source).copied().unwrap_or(0);
        let is_clogged = self.waiting.front().is_some_and(|it| now >= it.since + WAITING_GRACE);
        let order = |place: usize| if is_clogged { usize::MAX - place } else { place };
        let first =
            self.waiting.iter().enumerate().min_by_key(|(place, it)| (handshakes(&it.source), order(*place)));
        first.map(|(place, _)| place)
    }
}

impl<H> Handshake<H> {
    fn protected_until(&self) -> Instant {
        let has_greeted = self.has_greeted.load(Ordering::Relaxed);
        self.since + if has_greeted { HANDSHAKE_GRACE } else { HELLO_GRACE }
    }
}

impl<H> Entry for Handshake<H> {
    fn yields(&self, now: Instant) -> bool {
        self.protected_until() <= now
    }
}

#[cfg(test)]
mod tests;
