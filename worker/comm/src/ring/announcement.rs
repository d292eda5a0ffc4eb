//! Announcements that neighbours exchange before the data of a collective.

use std::fmt;

/// Size of an announcement in bytes: number, kind, size.
pub(super) const BYTES: usize = 8 + 8 + 8;

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Kind {
    AllReduce = 1,
    ReduceScatter,
    AllGather,
    Broadcast,
    Barrier,
}

impl Kind {
    fn name(number: u64) -> &'static str {
        const KINDS: [(Kind, &str); 5] = [
            (Kind::AllReduce, "an all-reduce"),
            (Kind::ReduceScatter, "a reduce-scatter"),
            (Kind::AllGather, "an all-gather"),
            (Kind::Broadcast, "a broadcast"),
            (Kind::Barrier, "the end"),
        ];
        KINDS.iter().find(|(kind, _)| *kind as u64 == number).map_or("something unknown", |(_, name)| name)
    }
}

/// A collective of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    /// Number of the collective among all of the ring, from 1.
    number: u64,
    kind: u64,
    /// Size of the whole buffer.
    bytes: u64,
}

impl Announcement {
    pub(super) fn new(number: u64, kind: Kind, bytes: usize) -> Self {
        Self { number, kind: kind as u64, bytes: bytes as u64 }
    }

    pub(super) fn to_bytes(self) -> [u8; BYTES] {
        let mut all = [0; BYTES];
        for (part, value) in all.chunks_exact_mut(8).zip([self.number, self.kind, self.bytes]) {
            part.copy_from_slice(&value.to_le_bytes());
        }
        all
    }

    pub(super) fn from_bytes(all: [u8; BYTES]) -> Self {
        let value = |at: usize| {
            let mut part = [0; 8];
            part.copy_from_slice(&all[at..at + 8]);
            u64::from_le_bytes(part)
        };
        Self { number: value(0), kind: value(8), bytes: value(16) }
    }
}

impl fmt::Display for Announcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "number {}, {} of {} bytes", self.number, Kind::name(self.kind), self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcement_survives_the_wire_and_reads_well() {
        let sent = Announcement::new(7, Kind::Broadcast, 1 << 40);
        assert_eq!(Announcement::from_bytes(sent.to_bytes()), sent);
        assert_eq!(sent.to_string(), "number 7, a broadcast of 1099511627776 bytes");
        assert_eq!(Announcement::from_bytes([255; BYTES]).to_string().split(',').count(), 2);
    }
}
