//! Opens an input. Compression is detected from its content.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::GzDecoder;

use super::PrepareError;
use super::inputs::Input;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// A frame that is skipped, without its first byte, 0x50 to 0x5f. pzstd begins files with one.
const ZSTD_SKIPPED_MAGIC: [u8; 3] = [0x2a, 0x4d, 0x18];
/// Logarithm of the maximum window size, 2 GiB, which is that of `zstd --long=31`.
const MAX_ZSTD_WINDOW_LOG: u32 = 31;
const READ_BUFFER_BYTES: usize = 256 << 10;

/// Bytes at the start of a text from which its kind is detected.
const DETECTED_BYTES: usize = 512;

/// The text of an input while it is read, or its rows as lines of JSON.
pub(super) struct Source {
    pub(super) label: Arc<str>,
    reader: Box<dyn Read>,
    /// Format that the bytes are decoded from, for messages. If it is `None`, the bytes are not decoded, so errors are
    /// read errors.
    format: Option<&'static str>,
    /// Number of bytes read from the file.
    read: Arc<AtomicU64>,
    /// The start of the text.
    head: Vec<u8>,
}

type Buffered = BufReader<Counted>;

/// Counts the bytes read from the file, for progress.
struct Counted {
    file: Box<dyn Read + Send>,
    read: Arc<AtomicU64>,
}

impl Source {
    pub(super) fn open(input: &Input) -> Result<Self, PrepareError> {
        let (label, file): (String, Box<dyn Read + Send>) = match input {
            Input::Stdin => ("standard input".into(), Box::new(io::stdin())),
            Input::File(path) => (path.display().to_string(), Box::new(open(path)?)),
        };
        let read = Arc::new(AtomicU64::new(0));
        let counted = Counted { file, read: Arc::clone(&read) };
        let mut buffered = BufReader::with_capacity(READ_BUFFER_BYTES, counted);
        let magic = fill(&mut buffered).map_err(|error| PrepareError::read(&label, &error))?;
        let (reader, format): (Box<dyn Read>, _) = if magic.starts_with(&GZIP_MAGIC) {
            (Box::new(Gzip { member: Some(GzDecoder::new(buffered)) }), Some("gzip"))
        } else if magic == ZSTD_MAGIC || magic[0] & 0xf0 == 0x50 && magic[1..] == ZSTD_SKIPPED_MAGIC {
            (Box::new(zstd(buffered).map_err(|error| PrepareError::read(&label, &error))?), Some("zstd"))
        } else {
            (Box::new(buffered), None)
        };
        let mut source = Self { label: label.into(), reader, format, read, head: Vec::new() };
        let mut head = Vec::new();
        source.read(DETECTED_BYTES, &mut head)?;
        let text = head.strip_prefix(crate::BYTE_ORDER_MARK).unwrap_or(&head).to_vec();
        let rest = std::mem::replace(&mut source.reader, Box::new(io::empty()));
        source.reader = Box::new(io::Cursor::new(text.clone()).chain(rest));
        source.head = text;
        Ok(source)
    }

    /// The start of the text.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    /// Name of the compression that the text is decoded from.
    pub(super) fn compression(&self) -> Option<&'static str> {
        self.format
    }

    /// Switches from reading the text to reading the rows of a table.
    pub(super) fn into_rows(
        self,
        format: &'static str,
        rows: impl FnOnce(Box<dyn Read>, &Arc<AtomicU64>) -> io::Result<Box<dyn Read>>,
    ) -> Result<Self, PrepareError> {
        let Self { label, reader, read, head, .. } = self;
        let reader = rows(reader, &read).map_err(|error| match error.kind() {
            // The table is intact, but lacks the column.
            io::ErrorKind::InvalidInput => PrepareError::Data(format!("{label}: {error}")),
            _ => damaged_data(&label, format, &error),
        })?;
        Ok(Self { label, reader, format: Some(format), read, head })
    }

    /// Returns the number of bytes of the file that were read.
    pub(super) fn position(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Appends `count` bytes of text to `out`; fewer only at the end.
    pub(super) fn read(&mut self, count: usize, out: &mut Vec<u8>) -> Result<(), PrepareError> {
        let limit = u64::try_from(count).unwrap_or(u64::MAX);
        let label = &self.label;
        let failed = |error: io::Error| match self.format {
            None => PrepareError::read(label, &error),
            Some(format) => damaged_data(label, format, &error),
        };
        (&mut self.reader).take(limit).read_to_end(out).map(|_| ()).map_err(failed)
    }
}

fn damaged_data(label: &str, format: &str, error: &io::Error) -> PrepareError {
    PrepareError::Data(format!("{label}: damaged or truncated {format} data: {error}"))
}

fn open(path: &PathBuf) -> Result<File, PrepareError> {
    let file = File::open(path).map_err(|error| PrepareError::read(path.display(), &error))?;
    let metadata = file.metadata().map_err(|error| PrepareError::read(path.display(), &error))?;
    if metadata.is_dir() {
        Err(PrepareError::Usage(format!("failed to read {}: it is a directory", path.display())))
    } else {
        Ok(file)
    }
}

/// Fills the buffer: pipes may return fewer bytes than the magic number of a format has.
fn fill(reader: &mut Buffered) -> io::Result<[u8; 4]> {
    let mut head = [0; 4];
    let available = reader.fill_buf()?;
    let count = available.len().min(head.len());
    head[..count].copy_from_slice(&available[..count]);
    Ok(head)
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = loop {
            match self.file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result?,
            }
        };
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Consecutive members, each verified by its checksum. As in gzip and Python, zeros after a member are padding.
struct Gzip {
    member: Option<GzDecoder<Buffered>>,
}

impl Read for Gzip {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(member) = &mut self.member else { return Ok(0) };
            let count = member.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            self.member = self.member.take().map(GzDecoder::into_inner).map_or(Ok(None), next_member)?;
        }
    }
}

/// Skips padding. Returns a decoder of the next member; `None` at the end of the input.
fn next_member(mut input: Buffered) -> io::Result<Option<GzDecoder<Buffered>>> {
    loop {
        let available = input.fill_buf()?;
        let padding = available.iter().take_while(|byte| **byte == 0).count();
        if padding < available.len() {
            input.consume(padding);
            return Ok(Some(GzDecoder::new(input)));
        }
        if padding == 0 {
            return Ok(None);
        }
        input.consume(padding);
    }
}

/// Returns a decoder of consecutive frames, each verified by its checksum if it has one.
fn zstd(input: Buffered) -> io::Result<zstd::Decoder<'static, Buffered>> {
    let mut decoder = zstd::Decoder::with_buffer(input)?;
    decoder.window_log_max(MAX_ZSTD_WINDOW_LOG)?;
    Ok(decoder)
}
