//! Log files: exact copies of each worker's streams, and filtered lines of all workers.
//!
//! A full disk does not stop a worker. Bytes that cannot be written are counted in the file's [`LogRecord`], and a mark
//! with the count is written to the file as soon as possible. If the disk stays full, the mark replaces the last bytes
//! of the file. Files are opened for appending, so that a user can truncate them. A deleted file is created again,
//! because programs that clean temporary directories delete log files. After rotation, the new file begins with the
//! number of bytes that came before it.

use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fs_err::File;
use fs_err::os::unix::fs::OpenOptionsExt;

use super::lines::Lines;
use super::record::LogRecord;
use super::{PrintLine, lock};

/// A log file that is rotated to `NAME.1` before it exceeds `limit` bytes. The new file begins with a note about that.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    size: u64,
    limit: Option<u64>,
    /// Bytes of the stream written so far, to this file and to rotated ones.
    written: u64,
    /// Total size of the earlier files, including xlaunch's own notes.
    offset: u64,
    /// Length of the note at the beginning of this file.
    note: u64,
    /// Size of `NAME.1` without its note.
    rotated: u64,
    /// Bytes lost since the last successful write.
    gap: u64,
    record: Arc<LogRecord>,
    /// Prints the warning that bytes are lost, once.
    warn: PrintLine,
}

impl LogFile {
    pub(super) fn create(
        record: Arc<LogRecord>,
        path: &Path,
        limit: Option<u64>,
        warn: &PrintLine,
    ) -> io::Result<Self> {
        let file = open(path)?;
        record.begin(file.metadata()?.ino(), 0);
        Ok(Self {
            path: path.into(),
            file,
            size: 0,
            limit,
            written: 0,
            offset: 0,
            note: 0,
            rotated: 0,
            gap: 0,
            record,
            warn: warn.clone(),
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        let max_part = self.limit.and_then(|limit| usize::try_from(limit.max(1)).ok()).unwrap_or(usize::MAX);
        for part in bytes.chunks(max_part) {
            let before = self.size;
            if let Err(error) = self.write_part(part) {
                let written = self.size.saturating_sub(before);
                self.lose((part.len() as u64).saturating_sub(written), &error);
            }
        }
    }

    fn write_part(&mut self, part: &[u8]) -> io::Result<()> {
        let size = part.len() as u64;
        if self.limit.is_some_and(|limit| self.size + size > limit) {
            self.rotate()?;
        }
        if self.file.metadata().is_ok_and(|found| found.nlink() == 0) {
            self.recreate()?;
        }
        if self.gap > 0 {
            let before = self.size;
            if let Err(error) = self.append(&gap_mark(self.gap)) {
                // A partial mark would be taken for output.
                let _ = self.file.set_len(before);
                self.size = before;
                return Err(error);
            }
            self.gap = 0;
        }
        let before = self.size;
        let result = self.append(part);
        self.written += self.size - before;
        result
    }

    fn rotate(&mut self) -> io::Result<()> {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        let renamed = fs_err::rename(&self.path, old).is_ok();
        self.file = open(&self.path)?;
        // If the file could not be renamed, its bytes are gone: the size limit takes precedence.
        let own = self.size - self.note;
        self.record.rotate(if renamed { self.rotated } else { own });
        self.rotated = if renamed { own } else { self.rotated };
        self.offset += std::mem::take(&mut self.size);
        self.record.begin(self.file.metadata()?.ino(), self.offset);
        // The next part is written after the note even if both together exceed the limit.
        let noted = self.append(self.rotation_note().as_bytes());
        self.note = self.size;
        noted
    }

    /// Creates the file again after it was deleted, and counts its contents as lost.
    fn recreate(&mut self) -> io::Result<()> {
        self.file = open(&self.path)?;
        let written = std::mem::take(&mut self.size);
        let gone = written - std::mem::take(&mut self.note);
        self.record.lose(gone, "the file was deleted");
        (self.gap, self.offset) = (self.gap + gone, self.offset + written);
        self.record.begin(self.file.metadata()?.ino(), self.offset);
        Ok(())
    }

    /// The first line of a file after rotation. It stays true when that file is itself rotated.
    fn rotation_note(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let (written, limit) = (self.written, self.limit.unwrap_or(u64::MAX));
        format!(
            "[xlaunch: {written} bytes of output came before this line; only {name}.1 and {name} are kept, of at most \
             {limit} bytes each]\n"
        )
    }

    /// Writes as many bytes as possible, and adds their number to `size`.
    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            // `fs_err` is bypassed because the message already has the path.
            match self.file.file().write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.size += count as u64;
                    bytes = &bytes[count..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn lose(&mut self, bytes: u64, error: &io::Error) {
        self.gap += bytes;
        let reason = error.to_string();
        if self.record.lose(bytes, &reason) {
            let path = self.path.display();
            self.warn.print(format!("xlaunch: output is being lost: {path}: {reason}"));
        }
    }

    /// Writes the mark for bytes lost at the end of the stream. On a disk that is still full, it replaces the last
    /// bytes.
    fn finish(&mut self) {
        let mark = gap_mark(self.gap);
        if self.gap == 0 || self.append(&mark).is_ok() {
            return;
        }
        let lost = replacing_mark(self.gap, mark.len());
        // A second descriptor is needed: the file's own is in append mode and would write at the end.
        let file = std::fs::File::options().write(true).open(&self.path);
        let replaced = file.and_then(|file| {
            let at = file.metadata()?.len().checked_sub(lost.len() as u64);
            file.write_all_at(&lost, at.ok_or(io::ErrorKind::InvalidInput)?)
        });
        if replaced.is_ok() {
            self.record.lose(lost.len() as u64, "");
        }
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        self.finish();
    }
}

fn open(path: &Path) -> io::Result<File> {
    let append = rustix::fs::OFlags::APPEND.bits().cast_signed();
    fs_err::OpenOptions::new().write(true).create(true).truncate(true).custom_flags(append).open(path)
}

/// Returns a mark that also counts the bytes that it replaces. `len` is the expected length of the mark.
fn replacing_mark(gap: u64, len: usize) -> Vec<u8> {
    let mark = gap_mark(gap + len as u64);
    // The larger number may have one more digit.
    if mark.len() == len { mark } else { replacing_mark(gap, mark.len()) }
}

fn gap_mark(bytes: u64) -> Vec<u8> {
    format!("\n[xlaunch: {bytes} bytes could not be written here]\n").into_bytes()
}

/// Copies lines that contain one of the given words to a file per attempt, which all ranks share.
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

    /// Opens the filter for one stream of the attempt in this directory; `None` if there are no words.
    pub(super) fn open(
        &self,
        attempt: &Path,
        prefix: Vec<u8>,
        create: impl FnOnce(&Path, Option<u64>) -> std::io::Result<LogFile>,
    ) -> std::io::Result<Option<Filtered>> {
        if self.words.is_empty() {
            return Ok(None);
        }
        let path = attempt.join(self.name);
        let mut newest = lock(&self.file);
        let file = match newest.take() {
            Some(file) if lock(&file).path == path => file,
            _ => Arc::new(Mutex::new(create(&path, self.limit)?)),
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

    /// Copies an unfinished last line at the end of the stream.
    pub(super) fn end(&mut self) {
        let Self { words, prefix, file, lines } = self;
        lines.end(|piece| copy_if_matching(words, prefix, file, piece.bytes));
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

    fn create(path: &Path, limit: Option<u64>) -> LogFile {
        let warn = PrintLine(Arc::new(|_| {}));
        LogFile::create(Arc::new(LogRecord::new(path, Some(3))), path, limit, &warn).unwrap()
    }

    #[test]
    fn rotated_and_current_file_hold_the_end_of_the_stream_within_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout.log");
        let mut log = create(&path, Some(1000));
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
            "[xlaunch: {before} bytes of output came before this line; only stdout.log.1 and stdout.log are kept, of \
             at most 1000 bytes each]\n"
        );
        assert_eq!(note, expected);
        let rotated = log.record.loss().unwrap().rotated_bytes;
        assert_eq!(rotated, (whole.len() - both.len()) as u64);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn bytes_lost_to_a_full_disk_are_counted_and_later_output_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = create(&path, None);
        // Writes to this device fail like those to a full disk.
        let file = std::mem::replace(&mut log.file, File::options().write(true).open("/dev/full").unwrap());
        log.write(b"gone\n");
        log.file = file;
        log.write(b"kept\n");
        let text = fs_err::read_to_string(path).unwrap();
        assert_eq!(text, "\n[xlaunch: 5 bytes could not be written here]\nkept\n");
        assert_eq!(log.record.loss().unwrap().lost_bytes, 5);
    }

    #[test]
    fn file_on_a_disk_that_stays_full_ends_with_the_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = create(&path, None);
        let record = log.record.clone();
        log.write(&[b'x'; 100]);
        log.file = File::options().write(true).open("/dev/full").unwrap();
        log.write(b"gone\n");
        drop(log);
        let text = fs_err::read_to_string(path).unwrap();
        let mark = "\n[xlaunch: 52 bytes could not be written here]\n";
        assert_eq!(text, format!("{}{mark}", "x".repeat(100 - mark.len())));
        let (lost, text) = record.describe_loss().unwrap();
        assert_eq!(lost as usize, 5 + mark.len());
        assert!(
            text.starts_with("rank 3: 52 bytes are missing in ") && text.contains("No space left"),
            "{text}"
        );
    }

    #[test]
    fn truncated_file_continues_at_its_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = create(&path, None);
        log.write(b"before\n");
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        log.write(b"after\n");
        assert_eq!(fs_err::read_to_string(path).unwrap(), "after\n");
    }

    #[test]
    fn deleted_file_is_recreated_with_the_number_of_lost_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/stdout.log");
        fs_err::create_dir(dir.path().join("logs")).unwrap();
        let mut log = create(&path, None);
        log.write(b"gone\n");
        fs_err::remove_dir_all(dir.path().join("logs")).unwrap();
        log.write(b"also gone\n");
        fs_err::create_dir(dir.path().join("logs")).unwrap();
        log.write(b"kept\n");
        let text = fs_err::read_to_string(path).unwrap();
        assert_eq!(text, "\n[xlaunch: 15 bytes could not be written here]\nkept\n");
    }

    #[test]
    fn lines_with_a_filter_word_are_copied_with_their_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let filter = Filter::new(&["loss".into(), "step".into()], "filtered_stdout.log", None);
        let mut streams = [0, 1].map(|i| {
            filter
                .open(dir.path(), format!("[r{i}]:").into_bytes(), |path, limit| Ok(create(path, limit)))
                .unwrap()
                .unwrap()
        });
        streams[0].feed(b"loss 1\nnoi");
        streams[1].feed(b"st");
        streams[0].feed(b"se\nloss 2\n");
        streams[1].feed(b"ep 7");
        streams.iter_mut().for_each(Filtered::end);
        let text = fs_err::read_to_string(dir.path().join("filtered_stdout.log")).unwrap();
        assert_eq!(text, "[r0]:loss 1\n[r0]:loss 2\n[r1]:step 7\n");
    }
}
