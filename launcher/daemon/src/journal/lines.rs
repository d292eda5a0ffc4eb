//! The format of the journal: a header line, then one line per record. Each line is `<CRC-32 of the JSON, 8 hex digits>
//! <JSON>\n`. Pure.
//!
//! A line is valid if it ends with a newline and its checksum matches. An incomplete last line is a torn write: the
//! daemon or the node stopped during an append. All other invalid lines were damaged by the disk or an editor. That
//! includes a complete last line, because its record may have been acknowledged.

use std::io;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version written, which is also the newest one that can be read.
pub(crate) const VERSION: u64 = 1;
const FORMAT: &str = "xlaunch-journal";
/// Length of the hex digits and the space after them.
const CHECKSUM_BYTES: usize = 9;

#[derive(Serialize, Deserialize)]
struct Header {
    format: String,
    version: u64,
    #[serde(default)]
    writer: String,
}

/// A parsed journal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parsed<E> {
    pub(crate) records: Vec<E>,
    pub(crate) state: State,
}

/// State of the file, which determines the repair needed before records can be appended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The file is empty.
    New,
    Intact,
    /// The file must be truncated to `end` bytes to remove a torn write.
    Torn {
        end: usize,
    },
    /// The file must be rewritten without the invalid `lines`, counted from 1. If `header` is false, the header is
    /// missing or invalid, and version 1 was assumed.
    Damaged {
        lines: Vec<usize>,
        header: bool,
    },
}

/// The reason why the file cannot be read: a newer xlaunch has written it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    Newer { writer: String, version: u64 },
    Unknown { line: usize, error: String, writer: String },
}

/// Encodes records as lines.
pub(crate) fn encode<E: Serialize>(records: &[E]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for record in records {
        let json = serde_json::to_vec(record)?;
        bytes.extend_from_slice(checksum(&json).as_bytes());
        bytes.extend_from_slice(&json);
        bytes.push(b'\n');
    }
    Ok(bytes)
}

/// Prepends the header to these lines.
pub(crate) fn with_header(lines: &[u8]) -> io::Result<Vec<u8>> {
    let header = Header { format: FORMAT.into(), version: VERSION, writer: env!("CARGO_PKG_VERSION").into() };
    let mut bytes = encode(&[header])?;
    bytes.extend_from_slice(lines);
    Ok(bytes)
}

/// Parses a complete journal.
pub(crate) fn parse<E: DeserializeOwned>(bytes: &[u8]) -> Result<Parsed<E>, Unreadable> {
    let header = header(bytes);
    if let Some(Header { version, writer, .. }) = &header
        && *version > VERSION
    {
        return Err(Unreadable::Newer { writer: writer.clone(), version: *version });
    }
    // `end` is the end of the last valid line.
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
    // The end of the last complete line, valid or not.
    let complete = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let state = if bytes.is_empty() {
        State::New
    } else if header.is_none() || damaged.iter().any(|(_, start)| *start < complete) {
        let lines = damaged.into_iter().map(|(number, _)| number).collect();
        State::Damaged { lines, header: header.is_some() }
    } else if end < bytes.len() {
        State::Torn { end }
    } else {
        State::Intact
    };
    Ok(Parsed { records, state })
}

/// Returns the valid lines without the header, byte for byte.
pub(crate) fn valid_records(bytes: &[u8]) -> Vec<u8> {
    let skip = usize::from(header(bytes).is_some());
    let valid = lines(bytes).skip(skip).filter(|line| json(&bytes[line.clone()]).is_some());
    valid.flat_map(|line| bytes[line].iter().copied()).collect()
}

fn header(bytes: &[u8]) -> Option<Header> {
    let first = lines(bytes).next()?;
    let header: Header = serde_json::from_slice(json(&bytes[first])?).ok()?;
    (header.format == FORMAT).then_some(header)
}

/// Returns the range of each line with its newline. The last line may lack the newline.
fn lines(bytes: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    bytes.split_inclusive(|byte| *byte == b'\n').map(move |line| {
        let range = start..start + line.len();
        start = range.end;
        range
    })
}

/// Returns the JSON of a line, if the line is valid.
fn json(line: &[u8]) -> Option<&[u8]> {
    let (found, json) = line.strip_suffix(b"\n")?.split_at_checked(CHECKSUM_BYTES)?;
    (found == checksum(json).as_bytes()).then_some(json)
}

pub(crate) fn checksum(json: &[u8]) -> String {
    format!("{:08x} ", crc32fast::hash(json))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json as value};

    use super::*;

    fn line(value: &Value) -> Vec<u8> {
        encode(std::slice::from_ref(value)).unwrap()
    }

    fn header_line(version: u64) -> Vec<u8> {
        line(&value!({"format": FORMAT, "version": version, "writer": "9.8.7"}))
    }

    fn parsed(bytes: &[u8]) -> Parsed<Value> {
        parse(bytes).unwrap()
    }

    fn damaged(lines: &[usize], header: bool) -> State {
        State::Damaged { lines: lines.to_vec(), header }
    }

    #[test]
    fn line_is_checksum_space_json_newline() {
        assert_eq!(line(&value!(1)), b"83dcefb7 1\n");
        assert_eq!(json(b"83dcefb7 1\n"), Some(&b"1"[..]));
        for invalid in
            [&b"83dcefb7 1"[..], b"83dcefb7 2\n", b"83DCEFB7 1\n", b"83dcefb71\n", b"83dcefb7\n", b"\n", b""]
        {
            assert_eq!(json(invalid), None, "{:?}", String::from_utf8_lossy(invalid));
        }
        assert_eq!(json(b"00000000 \n"), Some(&b""[..]), "the CRC of nothing is 0");
    }

    #[test]
    fn state_depends_on_where_the_invalid_bytes_are() {
        let (header, one, two) = (header_line(VERSION), line(&value!(1)), line(&value!(2)));
        let bad = b"bad\n".to_vec();
        let whole = [&header[..], &one, &two].concat();
        for (bytes, records, state) in [
            (Vec::new(), vec![], State::New),
            (header.clone(), vec![], State::Intact),
            (whole.clone(), vec![1, 2], State::Intact),
            // An incomplete last line is torn; a complete invalid line may have been acknowledged.
            ([&whole[..], b"1"].concat(), vec![1, 2], State::Torn { end: whole.len() }),
            ([&whole[..], &bad].concat(), vec![1, 2], damaged(&[4], true)),
            ([&whole[..], &bad, b"1"].concat(), vec![1, 2], damaged(&[4, 5], true)),
            (whole[..whole.len() - 1].to_vec(), vec![1], State::Torn { end: header.len() + one.len() }),
            // A torn line after a damaged line is listed as damaged too.
            ([&header[..], &bad, &two].concat(), vec![2], damaged(&[2], true)),
            ([&header[..], &bad, &two, &bad].concat(), vec![2], damaged(&[2, 4], true)),
            // Without a valid header, the whole file counts as damaged.
            ([&one[..], &two].concat(), vec![1, 2], damaged(&[], false)),
            ([&bad[..], &one].concat(), vec![1], damaged(&[1], false)),
            (bad.clone(), vec![], damaged(&[1], false)),
        ] {
            let records = records.into_iter().map(Value::from).collect();
            assert_eq!(parsed(&bytes), Parsed { records, state }, "{}", String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn only_the_first_line_is_the_header() {
        let (header, one) = (header_line(VERSION), line(&value!(1)));
        assert_eq!(parsed(&[&header[..], &header].concat()).records.len(), 1, "a second one is a record");
        let other = line(&value!({"format": "other-journal", "version": 1}));
        assert_eq!(parsed(&[&other[..], &one].concat()).state, damaged(&[], false));
        assert_eq!(valid_records(&[&other[..], &one].concat()), [&other[..], &one].concat());
        assert_eq!(valid_records(&[&header[..], b"bad\n", &one, b"torn"].concat()), one);
    }

    #[test]
    fn newer_version_or_unknown_record_is_unreadable() {
        let newer = Unreadable::Newer { writer: "9.8.7".into(), version: VERSION + 1 };
        assert_eq!(parse::<Value>(&header_line(VERSION + 1)), Err(newer));
        let text = line(&value!("x"));
        let Err(Unreadable::Unknown { line: 3, writer, .. }) =
            parse::<u32>(&[&header_line(VERSION)[..], &line(&value!(1)), &text].concat())
        else {
            panic!("line 3 is not a number");
        };
        assert_eq!(writer, "9.8.7");
        let Err(Unreadable::Unknown { line: 1, writer, .. }) = parse::<u32>(&text) else { panic!() };
        assert_eq!(writer, "unknown");
    }

    #[test]
    fn header_names_format_and_version() {
        let bytes = with_header(b"rest").unwrap();
        let (first, rest) = bytes.split_at(bytes.len() - 4);
        assert_eq!(rest, b"rest");
        let header: Value = serde_json::from_slice(json(first).unwrap()).unwrap();
        assert_eq!(
            header,
            value!({"format": "xlaunch-journal", "version": 1, "writer": env!("CARGO_PKG_VERSION")})
        );
    }
}
