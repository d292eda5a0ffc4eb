//! Cuts the text of an input into blocks, each of which is the work of one encoder. The positions of the cuts depend on
//! the text alone.
//!
//! A block is cut after a delimiter, so that it holds whole documents. A document that is longer than a block is cut
//! where the tokenizer allows it, and continues in the next block. A block starts where the previous one ended, so cuts
//! within a document depend only on that document.

use std::sync::Arc;

use memchr::memmem::Finder;

use super::PrepareError;
use super::rows::REFUSED;
use super::source::Source;
use crate::tokenizer::cuts::{Cuts, LONGEST_PIECE, character_start};

/// Approximate size of a block.
const BLOCK_BYTES: usize = 512 << 10;
/// Bytes at the start of a document that decide whether it goes to train or val. Within a document, a block never ends
/// before them.
pub(super) const HASHED_BYTES: usize = 64 << 10;
/// Maximum length of a line of JSONL, which is parsed as a whole.
const MAX_JSON_LINE_BYTES: usize = 64 << 20;
/// Maximum length of a separator of documents.
pub(super) const MAX_DELIMITER_BYTES: usize = 1 << 10;

/// Format in which an input is read.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// Each line is a JSON object.
    Json,
    /// The same, converted from the elements of arrays, whose numbers are not those of lines in the file.
    Elements,
    /// The same, converted from the rows of a table.
    Table,
    /// Documents end with this delimiter; if it is empty, the input is a single document.
    Text { delimiter: Vec<u8> },
}

impl Form {
    /// Returns what the user knows a line as.
    pub(super) fn unit(&self) -> &'static str {
        match self {
            Self::Elements => "element",
            Self::Table => "row",
            Self::Json | Self::Text { .. } => "line",
        }
    }

    /// Returns the place of a line of an input, for messages.
    pub(super) fn place(&self, label: &str, line: u64) -> String {
        match self {
            Self::Elements | Self::Table => format!("{label}: {} {line}", self.unit()),
            Self::Json | Self::Text { .. } => format!("{label}:{line}"),
        }
    }
}

/// A part of an input.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) label: Arc<str>,
    pub(super) form: Arc<Form>,
    pub(super) bytes: Vec<u8>,
    /// True if the block starts within a document.
    pub(super) continues: bool,
    /// Offset in the input's text.
    pub(super) offset: u64,
    /// Number of its first line, starting at 1.
    pub(super) line: u64,
    /// Bytes of the input's file that were read since the previous block.
    pub(super) read: u64,
}

/// Yields the blocks of an input.
pub(super) struct Blocks {
    source: Source,
    form: Arc<Form>,
    cuts: Cuts,
    delimiter: Option<Finder<'static>>,
    buffer: Vec<u8>,
    continues: bool,
    /// True if the source is within a line that is too long.
    skips_line: bool,
    offset: u64,
    line: u64,
    read: u64,
}

impl Blocks {
    pub(super) fn new(source: Source, form: Form, cuts: Cuts) -> Self {
        let delimiter = match &form {
            Form::Text { delimiter } => delimiter,
            Form::Json | Form::Elements | Form::Table => b"\n".as_slice(),
        };
        let delimiter = (!delimiter.is_empty()).then(|| Finder::new(delimiter).into_owned());
        let form = Arc::new(form);
        Self {
            source,
            form,
            cuts,
            delimiter,
            buffer: Vec::new(),
            continues: false,
            skips_line: false,
            offset: 0,
            line: 1,
            read: 0,
        }
    }

    /// Returns the next block; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Block>, PrepareError> {
        if self.skips_line {
            self.skip()?;
            // Between parts of a long line, the reader finds out whether more blocks are wanted.
            return Ok(Some(self.take(0, false)));
        }
        let (mut limit, mut min) = (BLOCK_BYTES, if self.continues { 0 } else { HASHED_BYTES });
        loop {
            self.source.read(limit.saturating_sub(self.buffer.len()), &mut self.buffer)?;
            let at_end = self.buffer.len() < limit;
            if let Some(end) = self.last_delimiter() {
                return Ok(Some(self.take(end, false)));
            }
            if at_end {
                let rest = self.buffer.len();
                return Ok((rest > 0).then(|| self.take(rest, false)));
            }
            // A delimiter may begin at the end of the buffer.
            let partial = self.delimiter.as_ref().map_or(0, |delimiter| delimiter.needle().len() - 1);
            let text = &self.buffer[..self.buffer.len() - partial];
            if !matches!(*self.form, Form::Text { .. }) {
                if limit >= MAX_JSON_LINE_BYTES {
                    // The reason takes the place of the line.
                    let reason = format!("{REFUSED}longer than {} MiB\n", MAX_JSON_LINE_BYTES >> 20);
                    (self.buffer, self.skips_line) = (reason.into_bytes(), true);
                    return Ok(Some(self.take(self.buffer.len(), false)));
                }
                limit *= 2;
                continue;
            }
            if let Some(cut) = self.cuts.last(text, min) {
                return Ok(Some(self.take(cut, true)));
            }
            if text.len() > LONGEST_PIECE {
                let cut = character_start(text, LONGEST_PIECE);
                return Ok(Some(self.take(cut, true)));
            }
            min = text.len() - 1;
            limit = (limit * 2).min(LONGEST_PIECE + 1 + partial);
        }
    }

    /// Skips a part of a line that is too long. Keeps what follows the line.
    fn skip(&mut self) -> Result<(), PrepareError> {
        self.buffer.clear();
        self.source.read(BLOCK_BYTES, &mut self.buffer)?;
        let end = memchr::memchr(b'\n', &self.buffer).map(|at| at + 1);
        self.skips_line = end.is_none() && !self.buffer.is_empty();
        self.buffer.drain(..end.unwrap_or(self.buffer.len()));
        Ok(())
    }

    /// Returns the end of the last delimiter in the buffer. Delimiters do not overlap: they are searched from the
    /// start.
    fn last_delimiter(&self) -> Option<usize> {
        let delimiter = self.delimiter.as_ref()?;
        let length = delimiter.needle().len();
        if length == 1 {
            return memchr::memrchr(delimiter.needle()[0], &self.buffer).map(|start| start + 1);
        }
        delimiter.find_iter(&self.buffer).last().map(|start| start + length)
    }

    fn take(&mut self, end: usize, continued: bool) -> Block {
        let rest = self.buffer.split_off(end);
        let bytes = std::mem::replace(&mut self.buffer, rest);
        let position = self.source.position();
        let block = Block {
            label: Arc::clone(&self.source.label),
            form: Arc::clone(&self.form),
            continues: std::mem::replace(&mut self.continues, continued),
            offset: self.offset,
            line: self.line,
            read: position - std::mem::replace(&mut self.read, position),
            bytes,
        };
        self.offset += block.bytes.len() as u64;
        if !matches!(*self.form, Form::Text { .. }) {
            self.line += memchr::memchr_iter(b'\n', &block.bytes).count() as u64;
        }
        block
    }
}
