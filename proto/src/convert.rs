//! Conversion of wire messages to checked values. All validation of wire data is here: messages of the agent in this
//! file, messages of the daemon in [`node`].

pub mod node;

use crate::v1;
use xlaunch_spec::ids::{Attempt, Digest, NcclId, Rank, RingKey, WorldSize};

/// Why a message is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WireError {
    /// A field of fixed length has a different length.
    #[error("field {field} has {got} bytes, expected {expected}")]
    Length {
        /// Name in the proto file.
        field: &'static str,
        /// Bytes received.
        got: usize,
        /// Bytes expected.
        expected: &'static str,
    },
    /// A field is too long.
    #[error("field {field} has {got} {unit}, at most {limit} are allowed")]
    TooLong {
        /// Name in the proto file.
        field: &'static str,
        /// Length received.
        got: usize,
        /// Unit of the length, such as `bytes`.
        unit: &'static str,
        /// Maximum length.
        limit: usize,
    },
    /// A number is outside its range.
    #[error("field {field} is {got}, expected {expected}")]
    Range {
        /// Name in the proto file.
        field: &'static str,
        /// Number received.
        got: u64,
        /// The valid range.
        expected: String,
    },
    /// The content of a field is invalid.
    #[error("field {field} {problem}")]
    Content {
        /// Name in the proto file.
        field: &'static str,
        /// The problem, as the end of a sentence that starts with the field's name.
        problem: String,
    },
}

/// Maximum length of text fields.
const MAX_TEXT_BYTES: usize = 4096;

/// A checked [`v1::JoinRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Join {
    pub rank: Rank,
    pub attempt: Attempt,
    pub version: String,
    pub config_hash: Digest,
    pub layout_hash: Digest,
    pub device_uuid: String,
    pub nccl_id: Option<NcclId>,
    pub ring_address: String,
    pub pid: u32,
}

impl TryFrom<v1::JoinRequest> for Join {
    type Error = WireError;

    fn try_from(wire: v1::JoinRequest) -> Result<Self, WireError> {
        Ok(Self {
            rank: Rank(wire.rank),
            attempt: Attempt(wire.attempt),
            version: text("version", wire.version)?,
            config_hash: digest("config_hash", &wire.config_hash)?,
            layout_hash: digest("layout_hash", &wire.layout_hash)?,
            device_uuid: text("device_uuid", wire.device_uuid)?,
            nccl_id: nccl_id(&wire.nccl_id)?,
            ring_address: text("ring_address", wire.ring_address)?,
            pid: wire.pid,
        })
    }
}

impl From<Join> for v1::JoinRequest {
    fn from(join: Join) -> Self {
        Self {
            rank: join.rank.0,
            attempt: join.attempt.0,
            version: join.version,
            config_hash: join.config_hash.0.to_vec(),
            layout_hash: join.layout_hash.0.to_vec(),
            device_uuid: join.device_uuid,
            nccl_id: join.nccl_id.map(|id| id.0.to_vec()).unwrap_or_default(),
            ring_address: join.ring_address,
            pid: join.pid,
        }
    }
}

/// A checked [`v1::JoinReply`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Joined {
    pub world_size: WorldSize,
    pub attempt: Attempt,
    pub nccl_id: Option<NcclId>,
    /// The next rank of the ring; `None` with NCCL.
    pub ring: Option<RingNeighbour>,
}

/// The next rank of a ring, as needed to connect to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingNeighbour {
    /// Address on which the next rank listens.
    pub address: String,
    /// Key of the attempt.
    pub key: RingKey,
}

impl TryFrom<v1::JoinReply> for Joined {
    type Error = WireError;

    fn try_from(wire: v1::JoinReply) -> Result<Self, WireError> {
        if wire.world_size == 0 {
            return Err(WireError::Range { field: "world_size", got: 0, expected: "at least 1".into() });
        }
        let ring = match text("next_ring_address", wire.next_ring_address)? {
            address if address.is_empty() => None,
            address => Some(RingNeighbour { address, key: ring_key(&wire.ring_key)? }),
        };
        Ok(Self {
            world_size: WorldSize(wire.world_size),
            attempt: Attempt(wire.attempt),
            nccl_id: nccl_id(&wire.nccl_id)?,
            ring,
        })
    }
}

impl From<Joined> for v1::JoinReply {
    fn from(joined: Joined) -> Self {
        let (address, key) = joined.ring.map(|ring| (ring.address, ring.key.0.to_vec())).unwrap_or_default();
        Self {
            world_size: joined.world_size.0,
            attempt: joined.attempt.0,
            nccl_id: joined.nccl_id.map(|id| id.0.to_vec()).unwrap_or_default(),
            next_ring_address: address,
            ring_key: key,
        }
    }
}

/// A checked [`v1::LogsRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the message")]
pub struct Logs {
    pub rank: Rank,
    pub stderr: bool,
    pub follow: bool,
    pub tail_lines: Option<u64>,
    pub after: Option<v1::LogPosition>,
}

impl TryFrom<v1::LogsRequest> for Logs {
    type Error = WireError;

    fn try_from(wire: v1::LogsRequest) -> Result<Self, WireError> {
        let stderr = match wire.stream() {
            v1::LogStream::Stdout => false,
            v1::LogStream::Stderr => true,
            v1::LogStream::Unspecified => {
                let got = u64::from(wire.stream.unsigned_abs());
                return Err(WireError::Range { field: "stream", got, expected: "1 or 2".into() });
            }
        };
        let v1::LogsRequest { rank, follow, tail_lines, after, .. } = wire;
        Ok(Self { rank: Rank(rank), stderr, follow, tail_lines, after })
    }
}

/// Returns the encoded size of a message in bytes.
pub fn encoded_size(message: &impl prost::Message) -> usize {
    message.encoded_len()
}

fn text(field: &'static str, value: String) -> Result<String, WireError> {
    if value.len() > MAX_TEXT_BYTES {
        return Err(WireError::TooLong { field, got: value.len(), unit: "bytes", limit: MAX_TEXT_BYTES });
    }
    Ok(value)
}

fn digest(field: &'static str, bytes: &[u8]) -> Result<Digest, WireError> {
    bytes.try_into().map(Digest).map_err(|_| WireError::Length { field, got: bytes.len(), expected: "16" })
}

fn nccl_id(bytes: &[u8]) -> Result<Option<NcclId>, WireError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    bytes.try_into().map(|id| Some(NcclId(id))).map_err(|_| WireError::Length {
        field: "nccl_id",
        got: bytes.len(),
        expected: "0 or 128",
    })
}

fn ring_key(bytes: &[u8]) -> Result<RingKey, WireError> {
    let wrong = |_| WireError::Length { field: "ring_key", got: bytes.len(), expected: "32" };
    bytes.try_into().map(RingKey).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join() -> Join {
        Join {
            rank: Rank(1),
            attempt: Attempt(0),
            version: "0.1.0".into(),
            config_hash: Digest::of(b"config"),
            layout_hash: Digest::of(b"layout"),
            device_uuid: "cpu".into(),
            nccl_id: Some(NcclId([7; 128])),
            ring_address: String::new(),
            pid: 42,
        }
    }

    #[test]
    fn join_round_trips() {
        assert_eq!(Join::try_from(v1::JoinRequest::from(join())), Ok(join()));
    }

    #[test]
    fn ids_and_hashes_of_wrong_length_are_refused_with_the_field_name() {
        let wire = v1::JoinRequest { nccl_id: vec![1; 127], ..join().into() };
        let error = Join::try_from(wire).unwrap_err().to_string();
        assert!(error.contains("nccl_id") && error.contains("127"), "{error}");
        let wire = v1::JoinRequest { config_hash: vec![], ..join().into() };
        assert!(Join::try_from(wire).unwrap_err().to_string().contains("config_hash"));
    }

    #[test]
    fn join_reply_without_a_world_or_a_ring_key_is_refused() {
        let wire = v1::JoinReply { world_size: 0, ..Default::default() };
        assert!(Joined::try_from(wire).is_err());
        let wire = v1::JoinReply { world_size: 3, next_ring_address: "a".into(), ..Default::default() };
        let error = Joined::try_from(wire).unwrap_err().to_string();
        assert!(error.contains("ring_key") && error.contains("expected 32"), "{error}");
    }

    #[test]
    fn join_reply_round_trips_in_a_size_that_does_not_depend_on_the_world() {
        let joined = |world| Joined {
            world_size: WorldSize(world),
            attempt: Attempt(1),
            nccl_id: None,
            ring: Some(RingNeighbour { address: "tcp:10.0.0.1:4000".into(), key: RingKey([7; 32]) }),
        };
        assert_eq!(Joined::try_from(v1::JoinReply::from(joined(4))), Ok(joined(4)));
        assert!(encoded_size(&v1::JoinReply::from(joined(10_000))) < 100);
    }

    #[test]
    fn logs_request_with_unknown_stream_is_refused() {
        let wire = v1::LogsRequest { stream: 2, ..Default::default() };
        assert!(Logs::try_from(wire).unwrap().stderr);
        for stream in [0, 3] {
            let wire = v1::LogsRequest { stream, ..Default::default() };
            assert!(Logs::try_from(wire).unwrap_err().to_string().contains("stream"));
        }
    }

    #[test]
    fn debug_output_hides_secrets() {
        assert!(!format!("{:?}", join()).contains("7, 7"));
        assert_eq!(format!("{:?}", RingKey([7; 32])), "RingKey(secret)");
    }
}
