//! Typed ids, so that a rank cannot be mistaken for a count.

use std::fmt;
use std::io;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u32);

        impl $name {
            /// Returns the number as an index.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// Number of a worker among all workers of the job, from 0.
    Rank
}
number! {
    /// Number of a worker among the workers of its node, from 0.
    LocalRank
}
number! {
    /// Number of workers of the job.
    WorldSize
}
number! {
    /// Number of a start of all workers: 0, and one more with each restart.
    Attempt
}

/// NCCL's unique id. Anyone who knows it can join the communicator, so it is a secret: `Debug` does not print it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId(pub [u8; 128]);

impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NcclId(secret)")
    }
}

/// Key of an attempt's ring: ranks that connect to each other prove with it that they belong to the attempt. Anyone who
/// knows it can change gradients, so it is a secret: `Debug` does not print it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RingKey(pub [u8; 32]);

impl RingKey {
    /// Creates a new random key.
    ///
    /// # Errors
    /// The kernel has no random numbers yet, or none at all.
    pub fn random() -> io::Result<Self> {
        let mut key = [0; 32];
        // Reads of up to 256 bytes are never short.
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self(key))
    }
}

impl fmt::Debug for RingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RingKey(secret)")
    }
}

/// XXH3-128 of data that all ranks must agree on. Not cryptographic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

impl Digest {
    /// Returns the digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_128(bytes).to_be_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
