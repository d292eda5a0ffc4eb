//! Converts arrays of JSON, CSV and TSV to lines of JSON, one per row, so that all inputs are read alike.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::rc::Rc;

use csv::{ByteRecord, ReaderBuilder};
use serde::de::IgnoredAny;

const ROW_READ_BYTES: usize = 256 << 10;
/// Begins a line that has, in place of JSON, the reason why its row is refused.
pub(super) const REFUSED: char = '\x1f';
/// Columns of a table with lists of messages.
const LISTS: [&str; 2] = ["messages", "conversations"];
const OPEN_ARRAY: &str = "the array has no end: the file may be cut off";
const NO_ELEMENT: &str = "not valid JSON: missing element next to a comma";

/// Lines, each of which is the result of one step.
struct Lines<F> {
    next: F,
    line: VecDeque<u8>,
}

impl<F: FnMut(&mut Vec<u8>) -> io::Result<bool>> Read for Lines<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.line.is_empty() {
            let mut line = Vec::new();
            if !(self.next)(&mut line)? {
                return Ok(0);
            }
            line.push(b'\n');
            self.line = line.into();
        }
        self.line.read(buffer)
    }
}

pub(super) fn lines(next: impl FnMut(&mut Vec<u8>) -> io::Result<bool> + 'static) -> Box<dyn Read> {
    Box::new(Lines { next, line: VecDeque::new() })
}

/// Returns the elements of arrays, and values outside arrays, one per line. Invalid JSON stays invalid.
pub(super) fn json(mut text: Box<dyn Read>) -> Box<dyn Read> {
    let (mut splitter, mut input) = (Splitter::default(), vec![0; ROW_READ_BYTES]);
    let mut out = VecDeque::new();
    let read = move |buffer: &mut [u8]| loop {
        if !out.is_empty() {
            return out.read(buffer);
        }
        let count = text.read(&mut input)?;
        if count == 0 {
            // Elements after the place where the file was cut off are missing.
            return if std::mem::take(&mut splitter.in_array) {
                Err(io::Error::other(OPEN_ARRAY))
            } else {
                Ok(0)
            };
        }
        input[..count].iter().for_each(|byte| splitter.next(*byte, &mut out));
    };
    struct From<F>(F);
    impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Read for From<F> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            (self.0)(buffer)
        }
    }
    Box::new(From(read))
}

/// Writes each element and each value outside of arrays as exactly one line, so that the numbers of lines count them.
#[derive(Default)]
struct Splitter {
    /// Number of open brackets, not counting the array whose elements become lines.
    depth: usize,
    in_array: bool,
    /// True after a comma of the array, which must be followed by an element.
    after_comma: bool,
    /// True if the current line is not empty.
    in_value: bool,
    in_string: bool,
    escaped: bool,
}

impl Splitter {
    fn next(&mut self, byte: u8, out: &mut VecDeque<u8>) {
        if self.in_string {
            (self.in_string, self.escaped) = match byte {
                _ if self.escaped => (true, false),
                b'\\' => (true, true),
                b'"' => (false, false),
                _ => (true, false),
            };
            // A line feed is not allowed in strings. Keep it an error of this line instead of splitting the line.
            out.push_back(if byte == b'\n' { b'\r' } else { byte });
            if !self.in_string {
                self.end_outside_array(out);
            }
            return;
        }
        match (byte, self.depth) {
            (b',' | b']', 0) if self.in_array => {
                let is_empty_array = byte == b']' && !self.after_comma;
                if !self.in_value && !is_empty_array {
                    out.extend(format!("{REFUSED}{NO_ELEMENT}").bytes());
                    self.in_value = true;
                }
                self.end(out);
                (self.in_array, self.after_comma) = (byte == b',', byte == b',');
                return;
            }
            // A line feed is white space in JSON, so any other white space can replace it.
            (b' ' | b'\t' | b'\n' | b'\r', _) => {
                if self.in_value {
                    out.push_back(b' ');
                    // A number or a word ends here.
                    self.end_outside_array(out);
                }
                return;
            }
            // A number or a word ends before another value.
            (b'"' | b'[' | b'{', _) => self.end_outside_array(out),
            _ => {}
        }
        if byte == b'[' && self.depth == 0 && !self.in_array {
            self.in_array = true;
            return;
        }
        self.in_value = true;
        out.push_back(byte);
        match byte {
            b'"' => self.in_string = true,
            b'[' | b'{' => self.depth += 1,
            b']' | b'}' => {
                self.depth = self.depth.saturating_sub(1);
                self.end_outside_array(out);
            }
            _ => {}
        }
    }

    /// Ends the line of a value outside of arrays, unless the value has open brackets.
    fn end_outside_array(&mut self, out: &mut VecDeque<u8>) {
        if self.depth == 0 && !self.in_array {
            self.end(out);
        }
    }

    fn end(&mut self, out: &mut VecDeque<u8>) {
        if std::mem::take(&mut self.in_value) {
            out.push_back(b'\n');
        }
    }
}

/// A row after the last one. The reader does not say whether the text ends within quotes: if it does, they contain this
/// row.
const END_ROW: &[u8] = b"\n\0";

/// A text that tells when it has been read to its end.
struct Ending<R> {
    text: R,
    ended: Rc<Cell<bool>>,
}

impl<R: Read> Read for Ending<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.text.read(buffer)?;
        self.ended.set(count == 0 && !buffer.is_empty());
        Ok(count)
    }
}

/// The part of a table's row that becomes a line.
#[derive(Clone, Copy, Debug)]
pub(super) enum Columns<'a> {
    /// The string in the column of this name.
    One(&'a str),
    /// An object with all fields that are not empty.
    All,
}

/// Returns the rows of a table with a header.
pub(super) fn separated(
    text: Box<dyn Read>,
    delimiter: u8,
    columns: Columns<'_>,
) -> io::Result<Box<dyn Read>> {
    let ended = Rc::new(Cell::new(false));
    let text = Ending { text: text.chain(END_ROW), ended: Rc::clone(&ended) };
    let mut reader =
        ReaderBuilder::new().delimiter(delimiter).flexible(true).has_headers(false).from_reader(text);
    let mut record = ByteRecord::new();
    let mut next = move |record: &mut ByteRecord| {
        if !reader.read_byte_record(record).map_err(io::Error::other)? {
            return Ok(false);
        }
        // Only the last row needs the end of the text to be complete.
        if !ended.get() {
            return Ok(true);
        }
        if record.len() == 1 && record[0] == END_ROW[1..] {
            return Ok(false);
        }
        let line = record.position().map_or(0, csv::Position::line);
        Err(io::Error::other(format!("a quote in the row that begins in line {line} is not closed")))
    };
    if !next(&mut record)? {
        return Ok(Box::new(io::empty()));
    }
    let names: Vec<String> =
        record.iter().map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect();
    let index = match columns {
        Columns::One(column) => Some(column_index(column, &names)?),
        Columns::All => {
            names.iter().try_for_each(|name| column_index(name, &names).map(drop))?;
            None
        }
    };
    Ok(lines(move |line| {
        if !next(&mut record)? {
            return Ok(false);
        }
        match index.map(|index| record.get(index)) {
            // The text may have ended at a delimiter that should have been quoted.
            _ if record.iter().skip(names.len()).any(|field| !field.is_empty()) => {
                let reason = "the row has more fields than the header: a text that contains the delimiter needs quotes";
                line.extend_from_slice(format!("{REFUSED}{reason}").as_bytes());
            }
            Some(Some(text)) => quote(text, line),
            // An object without the field, so it causes an error for this line.
            Some(None) => line.extend_from_slice(b"{}"),
            None => match lists_are_json(&names, &record) {
                Ok(()) => object(&names, &record, line),
                Err(reason) => line.extend_from_slice(format!("{REFUSED}{reason}").as_bytes()),
            },
        }
        Ok(true)
    }))
}

/// Requires that lists of messages are JSON. Python's `str` of a list, for example, is not.
fn lists_are_json(names: &[String], record: &ByteRecord) -> Result<(), String> {
    let lists = names.iter().zip(record).filter(|(name, _)| LISTS.contains(&name.as_str()));
    for (name, text) in lists.filter(|(_, text)| !text.is_empty()) {
        serde_json::from_slice::<IgnoredAny>(text).map_err(|error| {
            format!("`{name}` is not JSON: {error}; Python writes rows with lists to JSONL or Parquet")
        })?;
    }
    Ok(())
}

/// Encodes the fields of a row that are not empty as a JSON object. Lists of messages are JSON themselves.
fn object(names: &[String], record: &ByteRecord, out: &mut Vec<u8>) {
    out.push(b'{');
    for (name, text) in names.iter().zip(record).filter(|(_, text)| !text.is_empty()) {
        if out.len() > 1 {
            out.push(b',');
        }
        quote(name.as_bytes(), out);
        out.push(b':');
        if LISTS.contains(&name.as_str()) {
            // Line feeds are only between values of valid JSON.
            out.extend(text.iter().map(|byte| if *byte == b'\n' { b' ' } else { *byte }));
        } else {
            quote(text, out);
        }
    }
    out.push(b'}');
}

/// Returns the index of the only column with this name.
pub(super) fn column_index(column: &str, names: &[String]) -> io::Result<usize> {
    let mut found = names.iter().enumerate().filter(|(_, name)| *name == column).map(|(index, _)| index);
    match (found.next(), found.next()) {
        (Some(index), None) => Ok(index),
        (None, _) => Err(no_column(column, names)),
        (Some(_), Some(_)) => {
            let twice = format!("there is more than one column `{}`", column.escape_debug());
            Err(io::Error::new(io::ErrorKind::InvalidInput, twice))
        }
    }
}

fn no_column(column: &str, names: &[String]) -> io::Error {
    let names: Vec<String> = names.iter().take(20).map(|name| format!("`{}`", name.escape_debug())).collect();
    let missing = format!(
        "there is no column `{}`, only {}; name the one that holds the text with --column",
        column.escape_debug(),
        names.join(", ")
    );
    io::Error::new(io::ErrorKind::InvalidInput, missing)
}

/// Encodes bytes as a JSON string. Invalid UTF-8 stays, and is handled like in any other line.
pub(super) fn quote(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in text {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', *byte]),
            0..=0x1f => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(*byte),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mut lines: Box<dyn Read>) -> String {
        let mut out = String::new();
        lines.read_to_string(&mut out).unwrap();
        out
    }

    fn values(text: &'static str) -> Vec<serde_json::Value> {
        let out = read(json(Box::new(text.as_bytes())));
        let lines = out.lines().filter(|line| !line.trim().is_empty());
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn elements_of_arrays_and_values_one_after_another_are_lines() {
        use serde_json::json;
        let expected = [json!({"text": "a,]\n\"[", "x": [1, {"y": []}]}), json!("b"), json!(null)];
        let array = r#" [ {"text": "a,]\n\"[", "x": [1,
            {"y": []}]}, "b" ,null]"#;
        assert_eq!(values(array), expected);
        assert_eq!(values("{\"a\":\n 1}\n{\"a\": 2}\n"), [json!({"a": 1}), json!({"a": 2})]);
        for one_line in [r#"{"a":1}  {"a": 2}"#, r#"{"a":1}{"a":2}"#, r#" [{"a":1}][ ] {"a":2}"#] {
            assert_eq!(values(one_line), [json!({"a": 1}), json!({"a": 2})], "{one_line}");
        }
        assert_eq!(
            values(r#""a""b"null 1.5[2]"#),
            [json!("a"), json!("b"), json!(null), json!(1.5), json!(2)]
        );
        assert_eq!(values("[]"), [] as [serde_json::Value; 0]);
    }

    #[test]
    fn array_with_a_missing_element_has_a_refused_line() {
        for (text, line) in [("[,1]", 0), ("[1,,2]", 1), ("[1,\n]", 1)] {
            let out = read(json(Box::new(text.as_bytes())));
            let refused = out.lines().position(|line| line.starts_with(REFUSED));
            assert_eq!(refused, Some(line), "{text}: {out}");
        }
    }

    #[test]
    fn array_that_is_cut_off_is_an_error() {
        for text in ["[{\"text\": \"a\"},\n", "[", "[1] [\"b\""] {
            let mut lines = json(Box::new(text.as_bytes()));
            let error = lines.read_to_string(&mut String::new()).unwrap_err().to_string();
            assert_eq!(error, "the array has no end: the file may be cut off", "{text}");
        }
    }

    #[test]
    fn column_of_a_table_is_a_line_for_each_row() {
        let rows = |text: &'static str| separated(Box::new(text.as_bytes()), b',', Columns::One("text"));
        let out = read(rows("id,text\n1,\"a \"\"b\"\",\nc\"\n2,\u{e9},\n3\n4,a, b\n").unwrap());
        assert_eq!(
            out,
            "\"a \\\"b\\\",\\u000ac\"\n\"\u{e9}\"\n{}\n\x1fthe row has more fields than the header: a text that \
                         contains the delimiter needs quotes\n"
        );
        assert_eq!(read(rows("text\n\0\n\"\n\0\"").unwrap()), "\"\\u0000\"\n\"\\u000a\\u0000\"\n");
        assert_eq!(read(rows("").unwrap()) + &read(rows("text\r\n\r\n").unwrap()), "");
        let error = rows("id,body\n").err().unwrap().to_string();
        assert!(error.contains("no column `text`, only `id`, `body`"), "{error}");
        let error = rows("text,id,text\n").err().unwrap().to_string();
        assert!(error.contains("more than one column `text`"), "{error}");
    }

    #[test]
    fn quote_that_is_not_closed_is_an_error_with_its_line() {
        for text in ["text\na\n\"b,\nc\nd\n", "text\na\n\"", "text\na\n\"b\n\0"] {
            let mut rows = separated(Box::new(text.as_bytes()), b',', Columns::One("text")).unwrap();
            let error = rows.read_to_string(&mut String::new()).unwrap_err().to_string();
            assert!(error.contains("is not closed"), "{text:?}: {error}");
        }
        let rows = separated(Box::new(&b"text\na\n\"b,\nc\nd\n"[..]), b',', Columns::One("text"));
        let error = rows.unwrap().read_to_string(&mut String::new()).unwrap_err().to_string();
        assert!(error.contains("the row that begins in line 3 "), "{error}");
    }
}
