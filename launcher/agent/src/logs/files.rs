//! Log files: a worker's streams byte by byte, and filtered lines of all workers.
//!
//! A full disk stops no worker: bytes that cannot be written are counted, and the file mentions the count as soon as it
//! can be written again. A file that was started again begins with how much of the stream came before it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fs_err::File;

use super::lines::Lines;
use super::lock;

/// A file that is renamed to `NAME.1` before it exceeds `limit` bytes, and started again with a line that says so.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    size: u64,
    limit: Option<u64>,
    lost: u64,
    /// Bytes of the stream that were written, here and to files that were renamed.
    written: u64,
}

impl LogFile {
    pub(super) fn create(path: &Path, limit: Option<u64>) -> std::io::Result<Self> {
        Ok(Self { path: path.into(), file: File::create(path)?, size: 0, limit, lost: 0, written: 0 })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        let max_part = self.limit.and_then(|limit| usize::try_from(limit.max(1)).ok()).unwrap_or(usize::MAX);
        for part in bytes.chunks(max_part) {
            if self.write_part(part).is_err() {
                self.lost += part.len() as u64;
            }
        }
    }

    fn write_part(&mut self, part: &[u8]) -> std::io::Result<()> {
        let size = part.len() as u64;
        if self.limit.is_some_and(|limit| self.size + size > limit) {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            // If this fails, the old bytes are lost: the size limit holds.
            let _ = fs_err::rename(&self.path, old);
            self.file = File::create(&self.path)?;
            self.size = 0;
            let note = self.rotation_note();
            self.file.write_all(note.as_bytes())?;
            // A part that is almost as long as the limit follows all the same.
            self.size = note.len() as u64;
        }
        if self.lost > 0 {
            writeln!(self.file, "\n[xlaunch: {} bytes could not be written here]", self.lost)?;
            self.lost = 0;
        }
        self.file.write_all(part)?;
        self.size += size;
        self.written += size;
        Ok(())
    }

    /// The first line of a file that was started again. It stays true when the file is renamed.
    fn rotation_note(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let (written, limit) = (self.written, self.limit.unwrap_or(u64::MAX));
        format!(
            "[xlaunch: {written} bytes of output came before this line; only {name}.1 and {name} are kept, of at most \
             {limit} bytes each]\n"
        )
    }
}

/// Copies lines that contain one of the given words to one file per attempt, shared by all ranks.
#[derive(Debug)]
pub(super) struct Filter {
    words: Vec<String>,
    name: &'static str,
    limit: Option<u64>,
    /// The file of the newest attempt.
    file: Mutex<Option<Arc<Mutex<LogFile>>>>,
}

impl Filter {
    pub(super) fn new(words: &[String], name: &'static str, limit: Option<u64>) -> Self {
        Self { words: words.to_vec(), name, limit, file: Mutex::default() }
    }

    /// The filter for one stream of the attempt in this directory; `None` without words.
    pub(super) fn open(&self, attempt: &Path, prefix: Vec<u8>) -> std::io::Result<Option<Filtered>> {
        if self.words.is_empty() {
            return Ok(None);
        }
        let path = attempt.join(self.name);
        let mut newest = lock(&self.file);
        let file = match newest.take() {
            Some(file) if lock(&file).path == path => file,
            _ => Arc::new(Mutex::new(LogFile::create(&path, self.limit)?)),
        };
        *newest = Some(file.clone());
        Ok(Some(Filtered { words: self.words.clone(), prefix, file, lines: Lines::default() }))
    }
}

/// One stream that passes through a [`Filter`].
#[derive(Debug)]
pub(super) struct Filtered {
    words: Vec<String>,
    prefix: Vec<u8>,
    file: Arc<Mutex<LogFile>>,
    lines: Lines,
}

impl Filtered {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        let Self { words, prefix, file, lines } = self;
        lines.feed(bytes, |piece| copy_if_matching(words, prefix, file, piece.bytes));
    }

    /// The stream has ended, perhaps with an unfinished line.
    pub(super) fn end(&mut self) {
        let Self { words, prefix, file, lines } = self;
        lines.flush(|piece| copy_if_matching(words, prefix, file, piece.bytes));
    }
}

fn copy_if_matching(words: &[String], prefix: &[u8], file: &Mutex<LogFile>, line: &[u8]) {
    let contains =
        |word: &String| word.is_empty() || line.windows(word.len()).any(|window| window == word.as_bytes());
    if words.iter().any(contains) {
        let newline: &[u8] = if line.ends_with(b"\n") { b"" } else { b"\n" };
        lock(file).write(&[prefix, line, newline].concat());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_and_current_file_hold_the_end_of_the_stream_within_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout.log");
        let mut log = LogFile::create(&path, Some(1000)).unwrap();
        let stream: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).take(12_345).collect();
        stream.chunks(77).for_each(|part| log.write(part));
        log.write(&stream[..2500]);
        let (old, new) =
            (fs_err::read(dir.path().join("stdout.log.1")).unwrap(), fs_err::read(&path).unwrap());
        let whole = [stream.clone(), stream[..2500].to_vec()].concat();
        let [(_, old), (note, new)] = [old, new].map(|file| {
            let end = file.iter().position(|byte| *byte == b'\n').unwrap();
            let (note, part) = file.split_at(end + 1);
            assert!(part.len() <= 1000 && !part.is_empty());
            (String::from_utf8(note.to_vec()).unwrap(), part.to_vec())
        });
        let both = [old.clone(), new].concat();
        assert!(whole.ends_with(&both));
        let before = whole.len() - (both.len() - old.len());
        let expected = format!(
            "[xlaunch: {before} bytes of output came before this line; only stdout.log.1 and stdout.log are kept, of at \
             most 1000 bytes each]\n"
        );
        assert_eq!(note, expected);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn bytes_lost_to_a_full_disk_are_counted_and_later_output_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = LogFile::create(&path, None).unwrap();
        // Writes to this device fail as those to a full disk do.
        let file = std::mem::replace(&mut log.file, File::options().write(true).open("/dev/full").unwrap());
        log.write(b"gone\n");
        log.file = file;
        log.write(b"kept\n");
        let text = fs_err::read_to_string(path).unwrap();
        assert_eq!(text, "\n[xlaunch: 5 bytes could not be written here]\nkept\n");
    }

    #[test]
    fn lines_with_a_filter_word_are_copied_with_their_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let filter = Filter::new(&["loss".into(), "step".into()], "filtered_stdout.log", None);
        let mut streams =
            [0, 1].map(|i| filter.open(dir.path(), format!("[r{i}]:").into_bytes()).unwrap().unwrap());
        streams[0].feed(b"loss 1\nnoi");
        streams[1].feed(b"st");
        streams[0].feed(b"se\nloss 2\n");
        streams[1].feed(b"ep 7");
        streams.iter_mut().for_each(Filtered::end);
        let text = fs_err::read_to_string(dir.path().join("filtered_stdout.log")).unwrap();
        assert_eq!(text, "[r0]:loss 1\n[r0]:loss 2\n[r1]:step 7\n");
    }
}
