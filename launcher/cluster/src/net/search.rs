//! Decides which addresses of the coordinator are tried, and when. Pure: `dialer` resolves, connects, and reports the
//! results.
//!
//! ```text
//! endpoint: host --resolve--> addresses x ports = candidates, the one that worked last first
//! candidate: due --Try--> TCP --> handshake --> connected (remembered, and all others end)
//!              ^------- pause ------'------------ failed
//! ```
//! Candidates are tried in parallel (RFC 8305): the next one starts when the previous one has failed, or has not
//! answered for a while. Neither a filtered address family nor a foreign process on the first of several ports then
//! delays the others. Names are resolved at the same time, so a slow or dead resolver does not delay an address that is
//! known.
//!
//! While workers are alive, the address that worked last is tried again even if attempts to reach it are still in
//! progress: on a slow network the older ones succeed; after an outage, when TCP would wait for its next
//! retransmission, the newest one does.
//!
//! Invariants:
//! - at most one lookup of the name runs at a time;
//! - the user is told the most specific failure, whichever candidate it concerns and whenever it happened.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use xlaunch_spec::command::Endpoint;

use super::connect::{ConnectError, Reason, unresolved};

/// Delay before the next candidate is tried while one has not answered (RFC 8305).
const NEXT_CANDIDATE_DELAY: Duration = Duration::from_millis(250);
/// Same, while one has a TCP connection: its handshake takes three round trips, and work by a busy coordinator.
const NEXT_CANDIDATE_DELAY_IN_HANDSHAKE: Duration = Duration::from_secs(2);
/// Delay before the address that worked last is tried once more, while workers are alive.
const OVERLAP_DELAY: Duration = Duration::from_secs(1);
/// Pause after a candidate has failed; doubled up to [`MAX_RETRY_DELAY`] unless workers are alive.
const CANDIDATE_RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Pause between lookups of the name: addresses may appear late, or change.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(1);
const RESOLVE_RETRY_DELAY: Duration = Duration::from_millis(500);
/// A lookup that takes longer than this is reported as a failure, but continues.
const RESOLVE_REPORT_AFTER: Duration = Duration::from_secs(3);
/// Maximum number of addresses that are tried for one name.
const MAX_ADDRESSES: usize = 16;

/// Number of an attempt.
pub(super) type AttemptId = u64;

/// An action for `dialer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Resolve,
    Try(AttemptId, SocketAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// The agent has no workers.
    Joining,
    /// Workers are alive, and are ended when the lease expires.
    Working,
}

/// The search for one coordinator.
#[derive(Debug)]
pub(super) struct Search {
    endpoint: Endpoint,
    /// Candidates, in order of preference.
    candidates: Vec<Candidate>,
    /// The address that worked last.
    known: Option<SocketAddr>,
    lookup: Lookup,
    lookup_error: Option<io::Error>,
    /// Earliest time at which the next candidate may start while attempts are in progress.
    next_start: Instant,
    next_id: AttemptId,
}

#[derive(Debug)]
enum Lookup {
    Due(Instant),
    RunningSince(Instant),
}

#[derive(Debug)]
struct Candidate {
    address: SocketAddr,
    attempts: Vec<Attempt>,
    /// Time at which it became a candidate, or last failed.
    since: Instant,
    failures: u32,
    failure: Option<Reason>,
}

#[derive(Debug)]
struct Attempt {
    id: AttemptId,
    since: Instant,
    in_handshake: bool,
}

impl Search {
    pub(super) fn new(endpoint: Endpoint, now: Instant) -> Self {
        Self {
            endpoint,
            candidates: Vec::new(),
            known: None,
            lookup: Lookup::Due(now),
            lookup_error: None,
            next_start: now,
            next_id: 0,
        }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the actions that are due.
    pub(super) fn poll(&mut self, urgency: Urgency, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        if matches!(self.lookup, Lookup::Due(at) if now >= at) {
            self.lookup = Lookup::RunningSince(now);
            actions.push(Action::Resolve);
        }
        while now >= self.next_start || !self.is_trying() {
            let known = self.known;
            let due = self.candidates.iter_mut().filter_map(|it| Some((it.due(known, urgency)?, it)));
            // Takes the one that has waited longest, so that one that fails at once does not delay the others.
            let Some((_, candidate)) = due.filter(|(at, _)| now >= *at).min_by_key(|(at, _)| *at) else {
                break;
            };
            self.next_id += 1;
            candidate.attempts.push(Attempt { id: self.next_id, since: now, in_handshake: false });
            self.next_start = now + NEXT_CANDIDATE_DELAY;
            actions.push(Action::Try(self.next_id, candidate.address));
        }
        actions
    }

    /// Time at which [`poll`](Self::poll) is due.
    pub(super) fn deadline(&self, urgency: Urgency) -> Option<Instant> {
        let lookup = match self.lookup {
            Lookup::Due(at) => Some(at),
            Lookup::RunningSince(_) => None,
        };
        let earliest = if self.is_trying() { Some(self.next_start) } else { None };
        let candidates = self.candidates.iter().filter_map(|it| it.due(self.known, urgency));
        let next = candidates.min().map(|due| earliest.map_or(due, |earliest| due.max(earliest)));
        lookup.into_iter().chain(next).min()
    }

    /// Handles the result of the lookup. The ports of the addresses are ignored.
    pub(super) fn resolved(&mut self, found: io::Result<Vec<SocketAddr>>, now: Instant) {
        let found =
            found.and_then(|all| if all.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(all) });
        match found {
            Ok(addresses) => {
                (self.lookup, self.lookup_error) = (Lookup::Due(now + RESOLVE_INTERVAL), None);
                self.set_addresses(addresses, now);
            }
            // Addresses found earlier are still tried.
            Err(error) => {
                (self.lookup, self.lookup_error) = (Lookup::Due(now + RESOLVE_RETRY_DELAY), Some(error));
            }
        }
    }

    fn set_addresses(&mut self, mut addresses: Vec<SocketAddr>, now: Instant) {
        addresses.truncate(MAX_ADDRESSES);
        let addresses = alternate_families(addresses);
        let wanted = self
            .endpoint
            .ports
            .iter()
            .flat_map(|port| addresses.iter().map(|address| with_port(*address, *port)));
        let order: Vec<SocketAddr> = self.known.into_iter().chain(wanted).collect();
        let mut old = std::mem::take(&mut self.candidates);
        for address in order {
            if self.candidates.iter().any(|it| it.address == address) {
                continue;
            }
            let found = old.iter().position(|it| it.address == address);
            self.candidates
                .push(found.map_or_else(|| Candidate::new(address, now), |at| old.swap_remove(at)));
        }
        // An attempt in progress at an address that is gone may still succeed, but no new one is started there.
        old.retain(|it| !it.attempts.is_empty() && self.known.is_none());
        self.candidates.extend(old);
    }

    /// An attempt has opened a TCP connection.
    pub(super) fn reached(&mut self, id: AttemptId, now: Instant) {
        if let Some(attempt) =
            self.candidates.iter_mut().flat_map(|it| &mut it.attempts).find(|it| it.id == id)
        {
            attempt.in_handshake = true;
            self.next_start = self.next_start.max(now + NEXT_CANDIDATE_DELAY_IN_HANDSHAKE);
        }
    }

    pub(super) fn failed(&mut self, id: AttemptId, reason: Reason, now: Instant) {
        let Some(candidate) = self.candidate(id) else { return };
        candidate.attempts.retain(|attempt| attempt.id != id);
        candidate.failures = candidate.failures.saturating_add(1);
        (candidate.since, candidate.failure) = (now, Some(reason));
        self.next_start = now;
    }

    /// An attempt has connected. The caller ends the others.
    pub(super) fn connected(&mut self, id: AttemptId, now: Instant) {
        self.known = self.candidate(id).map(|candidate| candidate.address).or(self.known);
        for candidate in &mut self.candidates {
            *candidate = Candidate::new(candidate.address, now);
        }
        let known = self.known;
        self.candidates.sort_by_key(|candidate| known != Some(candidate.address));
    }

    /// Starts the search again, at the address that worked, because the connection was lost or was of no use.
    pub(super) fn restart(&mut self, now: Instant) {
        self.next_start = now;
        for candidate in &mut self.candidates {
            // A pause is due even here, in case the coordinator closes every connection at once.
            (candidate.since, candidate.failures) = (now, 1);
        }
        if matches!(self.lookup, Lookup::Due(_)) {
            self.lookup = Lookup::Due(now);
        }
    }

    /// Returns whether the coordinator's process is gone: its address refuses connections, or a different process has
    /// it.
    pub(super) fn is_gone(&self) -> bool {
        let known = self.candidates.iter().find(|candidate| Some(candidate.address) == self.known);
        known.and_then(|candidate| candidate.failure.as_ref()).is_some_and(Reason::is_another_process)
    }

    /// Takes a failure that no later attempt can mend without a change of this node's configuration.
    pub(super) fn take_final_error(&mut self) -> Option<ConnectError> {
        // Other jobs may occupy the first of several ports.
        let only_port = self.endpoint.ports.len() == 1;
        let is_final = |reason: &Reason| !reason.is_transient() && (only_port || reason.is_of_this_job());
        let candidate =
            self.candidates.iter_mut().find(|candidate| candidate.failure.as_ref().is_some_and(is_final))?;
        let reason = candidate.failure.take()?;
        Some(ConnectError { coordinator: at(&self.endpoint.host, candidate.address.port()), reason })
    }

    /// Describes in one line why there is no connection yet.
    pub(super) fn problem(&self, now: Instant) -> String {
        let failures = self.candidates.iter().filter_map(|it| Some((it.address, it.failure.as_ref()?)));
        // Among equals, the first one counts.
        let most = failures.rev().max_by_key(|(_, reason)| reason.specificity());
        let (port, reason) = match (most, &self.lookup_error, &self.lookup) {
            (Some((address, reason @ Reason::Refused)), ..) if address.ip().is_loopback() => {
                let own =
                    "the address is this host's own; if the coordinator is on another host, give its name";
                (Some(address.port()), format!("{reason}; {own}"))
            }
            (Some((address, reason)), ..) => (Some(address.port()), reason.to_string()),
            (None, Some(error), _) => (None, unresolved(error)),
            (None, None, Lookup::RunningSince(since)) if now >= *since + RESOLVE_REPORT_AFTER => {
                let seconds = now.saturating_duration_since(*since).as_secs();
                (None, unresolved(&format_args!("no answer for {seconds} s")))
            }
            _ => (None, "no answer yet".to_owned()),
        };
        let endpoint = port.map_or_else(|| self.endpoint.to_string(), |port| at(&self.endpoint.host, port));
        format!("failed to connect to the coordinator at {endpoint}: {reason}")
    }

    /// Returns whether every candidate has failed at least once.
    #[cfg(test)]
    pub(super) fn is_exhausted(&self) -> bool {
        let all = self.candidates.iter().all(|candidate| candidate.failure.is_some());
        all && (!self.candidates.is_empty() || self.lookup_error.is_some())
    }

    fn is_trying(&self) -> bool {
        self.candidates.iter().any(|candidate| !candidate.attempts.is_empty())
    }

    fn candidate(&mut self, id: AttemptId) -> Option<&mut Candidate> {
        self.candidates.iter_mut().find(|it| it.attempts.iter().any(|attempt| attempt.id == id))
    }
}

impl Candidate {
    fn new(address: SocketAddr, now: Instant) -> Self {
        Self { address, attempts: Vec::new(), since: now, failures: 0, failure: None }
    }

    /// Earliest time at which the candidate may be tried; `None` while the attempts in progress are enough.
    fn due(&self, known: Option<SocketAddr>, urgency: Urgency) -> Option<Instant> {
        let is_known = known == Some(self.address);
        if let Some(last) = self.attempts.last() {
            let overlap = if last.in_handshake { NEXT_CANDIDATE_DELAY_IN_HANDSHAKE } else { OVERLAP_DELAY };
            return (is_known && urgency == Urgency::Working).then(|| last.since + overlap);
        }
        let doubled = CANDIDATE_RETRY_DELAY * 2_u32.pow(self.failures.saturating_sub(1).min(4));
        let pause = match urgency {
            _ if self.failures == 0 => Duration::ZERO,
            Urgency::Working => CANDIDATE_RETRY_DELAY,
            Urgency::Joining => doubled.min(MAX_RETRY_DELAY),
        };
        Some(self.since + pause)
    }
}

/// Keeps the resolver's order, but alternates between address families: one of them may not work.
fn alternate_families(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_is_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first_is_v6);
    let mut second = second.into_iter();
    let mut order = Vec::new();
    for address in first {
        order.push(address);
        order.extend(second.next());
    }
    order.extend(second);
    order
}

/// Sets the port. Keeps the scope of a link-local address.
fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// Formats `HOST:PORT`, with brackets around an IPv6 address.
fn at(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests;
