//! The journal: what the daemon must not forget, one record after the other, in `journal` in the state directory.
//!
//! ```text
//! manager --append--> one line, one write, fdatasync --> journal
//!         --rewrite-> journal.new, fdatasync, rename, fsync of the directory: compaction
//! start <--records, notes-- replay of what is there
//! ```
//! - A record that was appended is on disk, and none comes back that was not written, whenever the daemon or the node ends.
//!   The one that was being written may be there or not; of several appended at once, the first ones may be.
//! - After a write or sync that failed nobody knows what of the file is on disk, and a second sync does not tell: nothing
//!   more is appended to that file. [`Journal::rewrite`] makes another.
//! - No record is kept in memory. One daemon at a time has the directory, by a lock (flock) on `lock` in it.

mod disk;
mod lines;

use std::fs::TryLockError;
use std::io::{self, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err::File;
use serde::Serialize;
use serde::de::DeserializeOwned;

use disk::{Disk, RealDisk};
use lines::{State, Unreadable};
use xlaunch_agent::clock;

/// How long a lock may outlast its daemon: while that one dies, or while a child it has forked is not the other program yet.
const LEAVING: Duration = Duration::from_secs(2);
/// How often it is tried within that.
const LOOK: Duration = Duration::from_millis(10);

/// Damaged lines that a note names.
const NAMED: usize = 10;

/// The journal of a daemon. Its calls wait for the disk.
#[derive(Debug)]
pub struct Journal<E> {
    place: Place,
    file: File,
    len: u64,
    /// What failed; until the next rewrite nothing is appended.
    broken: Option<String>,
    _lock: File,
    _records: PhantomData<fn(&E)>,
}

/// What a journal holds when it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay<E> {
    /// Oldest first.
    pub records: Vec<E>,
    /// What the operator should know.
    pub notes: Vec<String>,
}

/// Why a journal cannot be opened. The texts are for the operator. Records are as they were.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Somebody else could change what is in there.
    #[error("{} cannot hold the daemon's state: {problem}", dir.display())]
    Unsafe {
        /// The state directory.
        dir: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// Another daemon has it.
    #[error("another daemon{} uses {}: stop it, or name another directory as daemon.state_dir",
        .pid.map(|pid| format!(", process {pid},")).unwrap_or_default(), dir.display())]
    InUse {
        /// The state directory.
        dir: PathBuf,
        /// The other's process, where it has said so.
        pid: Option<u32>,
    },
    /// In a format that is newer than this build.
    #[error("{} was written by xlaunch {writer} (version {version}); this one reads up to {}: start that version or newer",
        path.display(), lines::VERSION)]
    Newer {
        /// The journal.
        path: PathBuf,
        /// Version of the xlaunch that wrote it.
        writer: String,
        /// Version of its format.
        version: u64,
    },
    /// An undamaged record that this build does not know.
    #[error("{}, line {line}: this xlaunch does not know this record ({error}); the file was begun by xlaunch {writer}: \
        start the version that wrote the record or newer", path.display())]
    Unknown {
        /// The journal.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What the JSON parser says.
        error: String,
        /// Version of the xlaunch that made the file.
        writer: String,
    },
    /// The disk fails, is full, or is not to be written to.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl<E: Serialize + DeserializeOwned> Journal<E> {
    /// Opens the journal in the state directory `dir`, and makes both where they are missing. What a crash or damage left
    /// is repaired, and told in the notes.
    ///
    /// # Errors
    /// Where `dir` is not this user's alone to write to, or another daemon has it; where a newer xlaunch wrote the journal;
    /// where the disk fails.
    pub fn open(dir: &Path) -> Result<(Self, Replay<E>), JournalError> {
        Self::open_on(dir, Box::new(RealDisk))
    }

    fn open_on(dir: &Path, disk: Box<dyn Disk>) -> Result<(Self, Replay<E>), JournalError> {
        let place = Place { dir: std::path::absolute(dir)?, disk };
        place.make()?;
        place.trust()?;
        let lock = place.lock()?;
        let bytes = match place.disk.read(&place.journal()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        let path = place.journal();
        let replayed = lines::read(&bytes).map_err(|unreadable| match unreadable {
            Unreadable::Newer { writer, version } => JournalError::Newer { path, writer, version },
            Unreadable::Unknown { line, error, writer } => {
                JournalError::Unknown { path, line, error, writer }
            }
        })?;
        let (file, len, notes) = place.repair(&bytes, &replayed.state)?;
        let journal = Self { place, file, len, broken: None, _lock: lock, _records: PhantomData };
        Ok((journal, Replay { records: replayed.records, notes }))
    }

    /// Adds a record; it is on disk when this returns.
    ///
    /// # Errors
    /// What the disk says; the record may be there or not when the journal is opened again. From then on all appends fail,
    /// until a rewrite succeeds.
    pub fn append(&mut self, record: &E) -> io::Result<()> {
        self.append_all(std::slice::from_ref(record))
    }

    /// Adds several records in one go: faster than one by one.
    ///
    /// # Errors
    /// As [`append`](Self::append); any number of the first ones may be there.
    pub fn append_all(&mut self, records: &[E]) -> io::Result<()> {
        if let Some(problem) = &self.broken {
            let text =
                format!("nothing is added to the journal after a failure, until it is rewritten: {problem}");
            return Err(io::Error::other(text));
        }
        if records.is_empty() {
            return Ok(());
        }
        let bytes = lines::of(records)?;
        let disk = &self.place.disk;
        if let Err(error) = disk.write(&mut self.file, &bytes).and_then(|()| disk.sync(&self.file)) {
            self.broken = Some(error.to_string());
            return Err(error);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Replaces all records by these, in a new file; a journal in which something failed is sound again.
    ///
    /// # Errors
    /// What the disk says. The records on disk are then the old ones or the new ones.
    pub fn rewrite(&mut self, records: &[E]) -> io::Result<()> {
        let bytes = lines::journal(&lines::of(records)?)?;
        // A failure so far leaves the journal what it was, sound or not.
        let file = self.place.write_new(&bytes)?;
        if let Err(error) = self.place.publish() {
            // Which of the two files has the name after a crash is open: neither may be added to.
            self.broken = Some(error.to_string());
            return Err(error);
        }
        (self.file, self.len, self.broken) = (file, bytes.len() as u64, None);
        Ok(())
    }

    /// Bytes of the file.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }
}

/// The state directory, and the disk it is on.
#[derive(Debug)]
struct Place {
    dir: PathBuf,
    disk: Box<dyn Disk>,
}

impl Place {
    fn journal(&self) -> PathBuf {
        self.dir.join("journal")
    }

    fn new_journal(&self) -> PathBuf {
        self.dir.join("journal.new")
    }

    /// Makes the directory where it is missing, so that a crash does not take it back.
    fn make(&self) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let missing: Vec<_> = self.dir.ancestors().take_while(|dir| !dir.exists()).collect();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).map_err(|error| {
            io::Error::new(error.kind(), format!("failed to make {}: {error}", self.dir.display()))
        })?;
        missing.iter().filter_map(|dir| dir.parent()).try_for_each(|parent| self.disk.sync_dir(parent))
    }

    /// Whether nobody but this user, and root, can change what is in the directory.
    fn trust(&self) -> Result<(), JournalError> {
        use std::os::unix::fs::MetadataExt;
        let found = fs_err::metadata(&self.dir)?;
        let user = rustix::process::geteuid().as_raw();
        let problem = if !found.is_dir() {
            "it is not a directory".into()
        } else if found.uid() != user {
            format!("it belongs to user {}, and the daemon runs as user {user}", found.uid())
        } else if found.mode() & 0o022 != 0 {
            "others can write to it; `chmod go-w` takes that from them".into()
        } else {
            return Ok(());
        };
        Err(JournalError::Unsafe { dir: self.dir.clone(), problem })
    }

    /// Makes the directory this daemon's, as long as the file is open. Programs that it starts do not inherit it.
    fn lock(&self) -> Result<File, JournalError> {
        use fs_err::os::unix::fs::OpenOptionsExt;
        let path = self.dir.join("lock");
        let mut options = fs_err::OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let began = Instant::now();
        loop {
            match file.file().try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if began.elapsed() < LEAVING => std::thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => {
                    let pid = fs_err::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
                    return Err(JournalError::InUse { dir: self.dir.clone(), pid });
                }
                Err(TryLockError::Error(error)) => {
                    let text = format!("failed to lock {}: {error}", path.display());
                    return Err(io::Error::new(error.kind(), text).into());
                }
            }
        }
        // For the other's message alone: a full disk does not keep a daemon from its journal.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(file)
    }

    /// The sound journal, on disk as it was read, with its length and what there is to say about it.
    fn repair(&self, bytes: &[u8], state: &State) -> io::Result<(File, u64, Vec<String>)> {
        let path = self.journal();
        let (keep, note) = match state {
            State::New => return self.begin(&lines::journal(&[])?, Vec::new()),
            State::Damaged { lines, header } => {
                let copy = self.copy(bytes)?;
                let note = damaged_note(&path, lines, *header, &copy);
                return self.begin(&lines::journal(&lines::intact_records(bytes))?, vec![note]);
            }
            State::Torn { end } => {
                let cut = bytes.len() - end;
                let note = format!(
                    "{}: the last {cut} bytes, a record that was not written to its end, have been cut off",
                    path.display()
                );
                (*end, Some(note))
            }
            State::Intact => (bytes.len(), None),
        };
        let file = self.disk.open(&path)?;
        if keep < bytes.len() {
            self.disk.truncate(&file, keep as u64)?;
        }
        // What was read may be in memory only, from a daemon that ended before its sync, or between rename and sync.
        self.disk.sync(&file)?;
        self.disk.sync_dir(&self.dir)?;
        Ok((file, keep as u64, note.into_iter().collect()))
    }

    fn begin(&self, bytes: &[u8], notes: Vec<String>) -> io::Result<(File, u64, Vec<String>)> {
        let file = self.write_new(bytes)?;
        self.publish()?;
        Ok((file, bytes.len() as u64, notes))
    }

    /// Writes `journal.new`, to the disk.
    fn write_new(&self, bytes: &[u8]) -> io::Result<File> {
        let path = self.new_journal();
        match self.disk.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = self.disk.create(&path)?;
        self.disk.write(&mut file, bytes)?;
        self.disk.sync(&file)?;
        Ok(file)
    }

    /// Puts `journal.new` in the journal's place.
    fn publish(&self) -> io::Result<()> {
        self.disk.rename(&self.new_journal(), &self.journal())?;
        self.disk.sync_dir(&self.dir)
    }

    /// Keeps a damaged journal as it is, under a name that is free.
    fn copy(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let now = clock::unix().as_secs();
        let mut number = 1;
        loop {
            let suffix = if number == 1 { String::new() } else { format!("-{number}") };
            let path = self.dir.join(format!("journal.damaged-{now}{suffix}"));
            match self.disk.create(&path) {
                Ok(mut file) => {
                    self.disk.write(&mut file, bytes)?;
                    self.disk.sync(&file)?;
                    self.disk.sync_dir(&self.dir)?;
                    return Ok(path);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        }
    }
}

fn damaged_note(path: &Path, lines: &[usize], header: bool, copy: &Path) -> String {
    let mut what = Vec::new();
    if !header {
        what.push("the first line, which names the format, is missing".to_string());
    }
    if !lines.is_empty() {
        let named: Vec<_> = lines.iter().take(NAMED).map(usize::to_string).collect();
        let more = lines.len() - named.len();
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        what.push(format!("damaged lines are left out: {}{more}", named.join(", ")));
    }
    format!("{}: {}; the file as it was is kept as {}", path.display(), what.join("; "), copy.display())
}

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;
