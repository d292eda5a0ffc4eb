//! The journal's bytes: one record per line, `<CRC-32 of the JSON, 8 lowercase hex digits> <JSON>\n`, a header first.
//!
//! Pure. A line counts if it ends, and its checksum is that of its JSON; everything else is damage. Damage after the last
//! line that counts is a write that was not finished. Other damage is the disk's, or somebody's editor's.

use std::io;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the format: what the header says, and the newest that is read.
pub(super) const VERSION: u64 = 1;
/// How the header names the format.
const FORMAT: &str = "xlaunch-journal";
/// Hex digits and the space.
const CHECKSUM: usize = 9;

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u64,
    #[serde(default)]
    writer: String,
}

/// What a journal's bytes say.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Replayed<E> {
    pub(super) records: Vec<E>,
    pub(super) state: State,
}

/// What there is to be done with them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum State {
    /// There are none yet.
    New,
    /// They can be added to.
    Intact,
    /// They can be, up to `end`.
    Torn { end: usize },
    /// Not all of them count: these lines, from 1, do not. Without a header, version 1 is assumed.
    Damaged { lines: Vec<usize>, header: bool },
}

/// Bytes of a newer xlaunch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    Newer { writer: String, version: u64 },
    Unknown { line: usize, error: String, writer: String },
}

/// The lines of these records.
pub(super) fn of<E: Serialize>(records: &[E]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for record in records {
        let json = serde_json::to_vec(record)?;
        bytes.extend_from_slice(checksum(&json).as_bytes());
        bytes.extend_from_slice(&json);
        bytes.push(b'\n');
    }
    Ok(bytes)
}

/// A journal of these lines.
pub(super) fn journal(lines: &[u8]) -> io::Result<Vec<u8>> {
    let header = Header { format: FORMAT.into(), version: VERSION, writer: env!("CARGO_PKG_VERSION").into() };
    let mut bytes = of(&[header])?;
    bytes.extend_from_slice(lines);
    Ok(bytes)
}

/// Reads a journal.
pub(super) fn read<E: DeserializeOwned>(bytes: &[u8]) -> Result<Replayed<E>, Unreadable> {
    let header = header(bytes);
    if let Some(Header { version, writer, .. }) = &header
        && *version > VERSION
    {
        return Err(Unreadable::Newer { writer: writer.clone(), version: *version });
    }
    let (mut records, mut damaged, mut end) = (Vec::new(), Vec::new(), 0);
    for (number, line) in (1..).zip(lines(bytes)) {
        let Some(json) = json(&bytes[line.clone()]) else {
            damaged.push((number, line.start));
            continue;
        };
        end = line.end;
        if number == 1 && header.is_some() {
            continue;
        }
        let record = serde_json::from_slice(json).map_err(|error| Unreadable::Unknown {
            line: number,
            error: error.to_string(),
            writer: header.as_ref().map_or_else(|| "unknown".into(), |header| header.writer.clone()),
        })?;
        records.push(record);
    }
    let state = if bytes.is_empty() {
        State::New
    } else if header.is_none() || damaged.iter().any(|(_, start)| *start < end) {
        let lines = damaged.into_iter().map(|(number, _)| number).collect();
        State::Damaged { lines, header: header.is_some() }
    } else if end < bytes.len() {
        State::Torn { end }
    } else {
        State::Intact
    };
    Ok(Replayed { records, state })
}

/// The lines that count, as they are, less the header.
pub(super) fn intact_records(bytes: &[u8]) -> Vec<u8> {
    let skip = usize::from(header(bytes).is_some());
    let intact = lines(bytes).skip(skip).filter(|line| json(&bytes[line.clone()]).is_some());
    intact.flat_map(|line| bytes[line].iter().copied()).collect()
}

fn header(bytes: &[u8]) -> Option<Header> {
    let first = lines(bytes).next()?;
    let header: Header = serde_json::from_slice(json(&bytes[first])?).ok()?;
    (header.format == FORMAT).then_some(header)
}

/// Where lines lie, each with the newline that ends it; the last one may have none.
fn lines(bytes: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    bytes.split_inclusive(|byte| *byte == b'\n').map(move |line| {
        let range = start..start + line.len();
        start = range.end;
        range
    })
}

/// What a line holds, if it counts.
fn json(line: &[u8]) -> Option<&[u8]> {
    let (found, json) = line.strip_suffix(b"\n")?.split_at_checked(CHECKSUM)?;
    (found == checksum(json).as_bytes()).then_some(json)
}

fn checksum(json: &[u8]) -> String {
    format!("{:08x} ", crc32fast::hash(json))
}
