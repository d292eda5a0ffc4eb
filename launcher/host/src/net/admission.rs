//! Decides who gets in when a server has more callers than room. Pure: time is an argument.
//!
//! ```text
//! caller --decide(holder, now)--> Admit | Evict(another) | Refuse
//! ```
//! Entries are kept in order of arrival, and each counts against a holder: a user, or an address. While there is room,
//! every caller is admitted. Otherwise the holder with the most entries loses one to a holder with clearly fewer; else
//! the caller replaces the oldest entry that [yields](Entry::yields).

use std::collections::BTreeMap;
use std::time::Instant;

/// The room of a server, and who makes way when it is full.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of entries per holder.
    pub per_holder: usize,
    /// Maximum number of entries of all holders together.
    pub total: usize,
    /// A holder loses an entry, even one that does not yield, to a holder that has fewer by more than this.
    pub margin: usize,
    /// Entries of which a caller otherwise replaces the oldest.
    pub replaces: Replaces,
}

/// Entries that a caller may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaces {
    /// Those of its holder that yield.
    OwnYielding,
    /// Those of its holder that yield or, if none does, all of them.
    Own,
    /// Those of any holder that yield.
    Yielding,
}

/// Something that takes room: a connection, a handshake.
pub trait Entry {
    /// Returns whether another caller may take its place.
    fn yields(&self, now: Instant) -> bool;
}

/// Decision about a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The caller gets a free place.
    Admit,
    /// There is room once the entry with this number is gone.
    Evict(u64),
    /// All places stay with their holders.
    Refuse,
}

/// The entries of a server.
#[derive(Debug)]
pub struct Admission<H, E> {
    limits: Limits,
    /// Number of the next entry.
    next: u64,
    /// Entries by number, so that the oldest comes first.
    entries: BTreeMap<u64, (H, E)>,
}

impl<H: Ord + Copy, E: Entry> Admission<H, E> {
    pub fn new(limits: Limits) -> Self {
        Self { limits, next: 0, entries: BTreeMap::new() }
    }

    /// Decides about a caller that would be counted to `holder`.
    pub fn decide(&self, holder: H, now: Instant) -> Decision {
        let counts = self.counts();
        let own = counts.get(&holder).copied().unwrap_or(0);
        if own < self.limits.per_holder {
            if self.entries.len() < self.limits.total {
                return Decision::Admit;
            }
            let greediest = counts.into_iter().max_by_key(|(_, count)| *count);
            if let Some((greediest, _)) = greediest.filter(|(_, most)| *most > own + self.limits.margin) {
                return self.evict(|it| it == greediest, true, now);
            }
        }
        match self.limits.replaces {
            Replaces::OwnYielding => self.evict(|it| it == holder, false, now),
            Replaces::Own => self.evict(|it| it == holder, true, now),
            Replaces::Yielding => self.evict(|_| true, false, now),
        }
    }

    /// Returns the oldest entry that yields or, if `all` is set and none does, the oldest one.
    fn evict(&self, of: impl Fn(H) -> bool, all: bool, now: Instant) -> Decision {
        let mut candidates = self.entries.iter().filter(|(_, (holder, _))| of(*holder));
        let oldest = candidates.clone().next().filter(|_| all);
        let yielding = candidates.find(|(_, (_, entry))| entry.yields(now));
        yielding.or(oldest).map_or(Decision::Refuse, |(number, _)| Decision::Evict(*number))
    }

    /// Adds an entry, whatever [`decide`](Self::decide) says, and returns its number.
    pub fn insert(&mut self, holder: H, entry: E) -> u64 {
        let number = self.next;
        self.next += 1;
        self.entries.insert(number, (holder, entry));
        number
    }

    pub fn remove(&mut self, number: u64) -> Option<E> {
        self.entries.remove(&number).map(|(_, entry)| entry)
    }

    /// Removes the entries for which `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(&E) -> bool) {
        self.entries.retain(|_, (_, entry)| keep(entry));
    }

    /// Counts the entries of one holder to another from now on.
    pub fn recount(&mut self, from: H, to: H) {
        self.entries.values_mut().filter(|(holder, _)| *holder == from).for_each(|(holder, _)| *holder = to);
    }

    /// Returns the number of entries of each holder.
    pub fn counts(&self) -> BTreeMap<H, usize> {
        let mut counts = BTreeMap::new();
        for (holder, _) in self.entries.values() {
            *counts.entry(*holder).or_default() += 1;
        }
        counts
    }

    /// Returns the entries with their numbers and holders, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, H, &E)> {
        self.entries.iter().map(|(number, (holder, entry))| (*number, *holder, entry))
    }
}
