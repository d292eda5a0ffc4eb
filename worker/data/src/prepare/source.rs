//! Opens an input. Compression is recognised by content.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::PrepareError;
use super::inputs::Input;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// What `zstd --long` uses.
const MAX_ZSTD_WINDOW_BYTES: u64 = 128 << 20;
const READ_BUFFER_BYTES: usize = 256 << 10;

/// The text of an input as it is read.
pub(super) struct Source {
    pub(super) label: Arc<str>,
    reader: Reader,
    /// Bytes that were read from the file.
    read: Arc<AtomicU64>,
}

enum Reader {
    Plain(Buffered),
    Gzip(Box<MultiGzDecoder<Buffered>>),
    Zstd(Box<Zstd>),
}

type Buffered = BufReader<Counted>;

/// Counts what is read from the file, for progress.
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
        let head = fill(&mut buffered).map_err(|error| PrepareError::read(&label, &error))?;
        let reader = if head.starts_with(&GZIP_MAGIC) {
            Reader::Gzip(Box::new(MultiGzDecoder::new(buffered)))
        } else if head.starts_with(&ZSTD_MAGIC) {
            Reader::Zstd(Box::new(Zstd::new(buffered)))
        } else {
            Reader::Plain(buffered)
        };
        Ok(Self { label: label.into(), reader, read })
    }

    /// Bytes of the file that were read.
    pub(super) fn position(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Appends up to `count` bytes of text to `out`. Fewer only at the end.
    pub(super) fn read(&mut self, count: usize, out: &mut Vec<u8>) -> Result<(), PrepareError> {
        let limit = u64::try_from(count).unwrap_or(u64::MAX);
        let label = &self.label;
        let damaged = |kind: &str, error: &io::Error| {
            PrepareError::Data(format!("{label}: damaged or truncated {kind} data: {error}"))
        };
        match &mut self.reader {
            Reader::Plain(reader) => {
                reader.take(limit).read_to_end(out).map_err(|error| PrepareError::read(label, &error))
            }
            Reader::Gzip(reader) => {
                reader.take(limit).read_to_end(out).map_err(|error| damaged("gzip", &error))
            }
            Reader::Zstd(reader) => {
                reader.take(limit).read_to_end(out).map_err(|error| damaged("zstd", &error))
            }
        }
        .map(|_| ())
    }
}

fn open(path: &PathBuf) -> Result<File, PrepareError> {
    let file = File::open(path).map_err(|error| PrepareError::read(path.display(), &error))?;
    let metadata = file.metadata().map_err(|error| PrepareError::read(path.display(), &error))?;
    match metadata.is_dir() {
        true => Err(PrepareError::Usage(format!("failed to read {}: it is a directory", path.display()))),
        false => Ok(file),
    }
}

/// Pipes may return less than the magic of a format.
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

/// Frames one after the other, each verified by its checksum if it has one.
struct Zstd {
    input: Buffered,
    frame: FrameDecoder,
    /// Whether a frame was started that is not finished.
    open: bool,
}

impl Zstd {
    fn new(input: Buffered) -> Self {
        let mut frame = FrameDecoder::new();
        frame.set_max_window_size(MAX_ZSTD_WINDOW_BYTES);
        Self { input, frame, open: false }
    }

    /// Starts the next frame. Returns false at the end of the input.
    fn start(&mut self) -> io::Result<bool> {
        while !self.open && !self.input.fill_buf()?.is_empty() {
            match self.frame.reset(&mut self.input) {
                Ok(()) => self.open = true,
                // Such as pzstd writes.
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = io::copy(&mut (&mut self.input).take(length.into()), &mut io::sink())?;
                    if skipped < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(damaged(&error)),
            }
        }
        Ok(self.open)
    }

    fn end(&mut self) -> io::Result<()> {
        let (expected, found) = (self.frame.get_checksum_from_data(), self.frame.get_calculated_checksum());
        if expected.is_some() && expected != found {
            return Err(damaged(&"the checksum does not match"));
        }
        self.open = false;
        Ok(())
    }
}

impl Read for Zstd {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.start()? {
                return Ok(0);
            }
            if self.frame.can_collect() > 0 {
                return self.frame.read(buffer);
            }
            if self.frame.is_finished() {
                self.end()?;
            } else {
                let some = BlockDecodingStrategy::UptoBytes(READ_BUFFER_BYTES);
                self.frame.decode_blocks(&mut self.input, some).map_err(|error| damaged(&error))?;
            }
        }
    }
}

fn damaged(error: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}
