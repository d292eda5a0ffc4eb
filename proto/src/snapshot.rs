//! The format of memory snapshots, which workers write to their memory files and the agent reads.
//!
//! ```text
//! | header       | parameters   | first moments | second moments | state.json |
//! 0              64 KiB         each a multiple of 64 KiB
//! ```
//! Each rank has two files. A worker writes the header, with a hash, when everything after it is complete, and erases
//! the header before it changes anything. The agent reads only the headers, after workers have died, so they may
//! contain any bytes: a header is trusted only if its own hash matches, and no size in it is used before it has been
//! compared with the reader's expectation.
//!
//! A snapshot is named by its step and the attempt that saved it. Without the attempt, ranks that were killed during a
//! save could have a snapshot of the same step from an earlier attempt, which differs if training is not deterministic.

use xxhash_rust::xxh3::xxh3_128;

use xlaunch_spec::ids::Digest;

/// Size of an encoded [`Header`] in bytes.
pub const HEADER_BYTES: usize = 128;
/// Maximum size of `state.json`. It contains the job description, which may list many files.
pub const MAX_STATE_BYTES: u64 = 64 << 20;
/// Alignment of the arenas: a multiple of the page size on any supported machine, for `mmap`.
const ALIGNMENT: u64 = 64 << 10;
const MAGIC: [u8; 8] = *b"xlsnap\0\x01";

/// The properties that a snapshot must have for a rank to resume from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Digest of the run's id.
    pub run: Digest,
    /// The rank that saved the snapshot.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
}

/// Name of a snapshot of all ranks. The newest snapshot compares as the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SnapshotId {
    /// Number of completed steps.
    pub step: u64,
    /// The attempt that saved it.
    pub attempt: u32,
}

/// The header of a complete snapshot of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Run, rank and number of ranks that the snapshot belongs to.
    pub identity: Identity,
    /// Step and attempt of the snapshot.
    pub id: SnapshotId,
    /// Digest of the model's layout in memory and of its division among ranks.
    pub layout: Digest,
    /// Number of values in each arena.
    pub values: u64,
    /// Size of `state.json` in bytes.
    pub state_bytes: u64,
    /// XXH3-128 of the hashes of the blocks of all arenas, which only workers know, and of `state.json`.
    pub hash: u128,
}

impl Header {
    /// Encodes the header for the start of a file.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let Self { identity: Identity { run, rank, world }, id, layout, values, state_bytes, hash } = self;
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(run.0);
        bytes.extend(layout.0);
        bytes.extend(rank.to_le_bytes());
        bytes.extend(world.to_le_bytes());
        bytes.extend(id.step.to_le_bytes());
        bytes.extend(id.attempt.to_le_bytes());
        bytes.extend(values.to_le_bytes());
        bytes.extend(state_bytes.to_le_bytes());
        bytes.extend(hash.to_le_bytes());
        bytes.resize(HASHED_BYTES, 0);
        let own_hash = xxh3_128(&bytes);
        bytes.extend(own_hash.to_le_bytes());
        let mut encoded = [0; HEADER_BYTES];
        encoded.copy_from_slice(&bytes);
        encoded
    }

    /// Decodes the header of a complete snapshot; `None` for any other bytes.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut fields = Fields(bytes);
        if fields.take()? != MAGIC || xxh3_128(&bytes[..HASHED_BYTES]).to_le_bytes() != bytes[HASHED_BYTES..]
        {
            return None;
        }
        let (run, layout) = (Digest(fields.take()?), Digest(fields.take()?));
        let rank = u32::from_le_bytes(fields.take()?);
        let world = u32::from_le_bytes(fields.take()?);
        let step = u64::from_le_bytes(fields.take()?);
        let attempt = u32::from_le_bytes(fields.take()?);
        Some(Self {
            identity: Identity { run, rank, world },
            id: SnapshotId { step, attempt },
            layout,
            values: u64::from_le_bytes(fields.take()?),
            state_bytes: u64::from_le_bytes(fields.take()?),
            hash: u128::from_le_bytes(fields.take()?),
        })
    }
}

/// Number of bytes of a header before its own hash.
const HASHED_BYTES: usize = HEADER_BYTES - size_of::<u128>();

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }
}

/// Returns the offset in a file of arena `index`, from 0, with `values` values each; for index 3, that of `state.json`.
/// `None` if it exceeds 64 bits.
pub fn offset(index: u64, values: u64) -> Option<u64> {
    let arena = values.checked_mul(size_of::<f32>() as u64)?.checked_next_multiple_of(ALIGNMENT)?;
    arena.checked_mul(index)?.checked_add(ALIGNMENT)
}

/// Returns the newest snapshot that every rank has. `complete` contains the ids of each rank's complete snapshots.
pub fn newest_of_all(complete: &[Vec<SnapshotId>]) -> Option<SnapshotId> {
    let (first, others) = complete.split_first()?;
    first.iter().filter(|id| others.iter().all(|rank| rank.contains(id))).max().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            identity: Identity { run: Digest::of(b"run"), rank: 2, world: 3 },
            id: SnapshotId { step: 40, attempt: 1 },
            layout: Digest::of(b"layout"),
            values: 1000,
            state_bytes: 200,
            hash: 7,
        }
    }

    #[test]
    fn header_is_read_as_it_was_written() {
        assert_eq!(Header::decode(&header().encode()), Some(header()));
    }

    #[test]
    fn erased_header_and_flip_of_any_bit_are_rejected() {
        let encoded = header().encode();
        assert_eq!(Header::decode(&[0; HEADER_BYTES]), None);
        assert_eq!(Header::decode(&[0xff; HEADER_BYTES]), None);
        for bit in 0..HEADER_BYTES * 8 {
            let mut flipped = encoded;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&flipped), None, "bit {bit}");
        }
    }

    #[test]
    fn half_written_header_is_rejected() {
        for end in 0..HEADER_BYTES {
            let mut bytes = [0; HEADER_BYTES];
            bytes[..end].copy_from_slice(&header().encode()[..end]);
            // The last bytes of a hash may be zero.
            assert!(bytes == header().encode() || Header::decode(&bytes).is_none(), "{end} bytes");
        }
    }

    #[test]
    fn arenas_are_aligned_and_do_not_overlap_and_giant_ones_are_refused() {
        for values in [0, 1, 16_384, 16_385, 1_000_000] {
            let starts: Vec<u64> = (0..4).map(|index| offset(index, values).unwrap()).collect();
            assert!(starts[0] >= HEADER_BYTES as u64);
            for pair in starts.windows(2) {
                assert!(pair[1] - pair[0] >= values * 4 && pair[0].is_multiple_of(ALIGNMENT), "{values}");
            }
        }
        assert_eq!(offset(3, u64::MAX / 4), None);
        assert_eq!(offset(1, u64::MAX), None);
    }

    #[test]
    fn newest_snapshot_of_all_ranks_needs_the_same_step_and_attempt_on_each() {
        let id = |step, attempt| SnapshotId { step, attempt };
        let newest = |complete: &[&[SnapshotId]]| {
            newest_of_all(&complete.iter().map(|rank| rank.to_vec()).collect::<Vec<_>>())
        };
        let (a, b) = (id(10, 0), id(20, 0));
        assert_eq!(newest(&[&[a, b], &[b, a], &[a, b]]), Some(b));
        // Rank 1 was killed while it copied step 20.
        assert_eq!(newest(&[&[a, b], &[a], &[a, b]]), Some(a));
        // Rank 1 has step 20 of an earlier attempt.
        assert_eq!(newest(&[&[a, id(20, 1)], &[a, b]]), Some(a));
        assert_eq!(newest(&[&[a, b], &[]]), None);
        assert_eq!(newest(&[&[a], &[b]]), None);
        assert_eq!(newest(&[]), None);
    }
}
