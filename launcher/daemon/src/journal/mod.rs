//! The journal: the daemon's durable state, as an append-only file `journal` in the state directory.
//!
//! ```text
//! append:  lines, one write, fdatasync
//! rewrite: journal.new, fdatasync, rename to journal, fsync of the directory (compaction, after a failed append)
//! open:    lock, parse, repair -> records and notes for the operator
//! ```
//! Invariants, even if the daemon or the node crashes at any time:
//! - the next [`Journal::open`] reads every record whose append returned, and any prefix of the records whose append
//!   did not return, but no other records;
//! - nothing is appended to a file after a write or sync of it has failed. The kernel drops dirty pages after a failed
//!   fsync, and a second fsync succeeds without them, so the contents on disk are unknown until [`Journal::rewrite`]
//!   has created a new file;
//! - only one daemon at a time has the directory open. It holds flock(2) locks both on the directory and on the file
//!   `lock` in it: a lock file can be deleted, and directories cannot be locked on NFS;
//! - only daemons of one host open the directory, the one that the file `host` names. On another host all running jobs
//!   would look lost, and be started a second time;
//! - nothing is opened, created or repaired in a directory that other users could have changed.
//!
//! The journal keeps no records in memory.

pub(crate) mod lines;

use std::fs::TryLockError;
use std::io::{self, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err::os::unix::fs::OpenOptionsExt;
use fs_err::{File, OpenOptions};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use lines::{State, Unreadable};

use crate::{boot_id, files, trusted_path};
use xlaunch_host::{clock, devices};
use xlaunch_proto::disk::Disk;

/// Time to wait for the lock. It can outlive its daemon until that process has exited, and until a child that it has
/// just forked calls exec, since the child shares the lock until then.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Space allocated after the end of the file, so that events can still be recorded if jobs fill the disk. Limited to
/// one part in [`RESERVED_PART_OF_DISK`] of the disk.
const RESERVED_BYTES: u64 = 1 << 20;
const RESERVED_PART_OF_DISK: u64 = 64;

/// Name of the file with the [`Host`].
const HOST: &str = "host";

/// Number of damaged lines that a note lists by number.
const MAX_LISTED_LINES: usize = 10;

/// An open journal. Its methods block on the disk.
#[derive(Debug)]
pub(crate) struct Journal<E> {
    dir: StateDir,
    file: File,
    len: u64,
    /// Space to keep allocated after the end, in bytes.
    reserve: u64,
    /// Offset up to which space was allocated.
    reserved_up_to: u64,
    /// A failure after which nothing may be appended until the next rewrite.
    broken: Option<String>,
    _locks: Locks,
    _records: PhantomData<fn(&E)>,
}

/// The contents of a journal when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Replay<E> {
    /// All valid records, oldest first.
    pub(crate) records: Vec<E>,
    /// Repairs that the operator should know about.
    pub(crate) notes: Vec<String>,
    pub(crate) integrity: Integrity,
}

/// Completeness of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Integrity {
    /// There was no journal, or an empty one.
    New,
    /// The whole journal could be read.
    Intact,
    /// All records except an incomplete last line, which was probably not acknowledged.
    Torn,
    /// Acknowledged records are lost.
    Damaged,
}

/// The reason why a journal cannot be opened, with a text for the operator. The files are unchanged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JournalError {
    /// Other users could change the directory. `problem` has the reason and advice.
    #[error("failed to use {} as the state directory: {problem}", dir.display())]
    Unsafe { dir: PathBuf, problem: io::Error },
    #[error("failed to use {} as the state directory: it is not a directory", .0.display())]
    NotADirectory(PathBuf),
    /// Another daemon has the lock. `pid` is its process id, if the lock file contains it.
    #[error("failed to lock {}: another daemon{} uses it; stop that daemon, or set daemon.state_dir to another \
        directory", dir.display(), .pid.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    InUse { dir: PathBuf, pid: Option<u32> },
    /// The directory belongs to another host, whose jobs may be running.
    #[error("failed to use {path} as the state directory: it belongs to host `{host}`, whose jobs may be running; give \
        each host its own with `--state-dir` or daemon.state_dir, such as {path}-{own}, or remove {path}/{file} if \
        host `{host}` was renamed or is gone for good", path = dir.display(), own = devices::host_name(), file = HOST)]
    OtherHost { dir: PathBuf, host: String },
    /// The file has a newer format version.
    #[error("failed to read {}: it was written by xlaunch {writer} in format {version}, and this xlaunch reads formats \
        up to {}; start that version or a newer one", path.display(), lines::VERSION)]
    Newer { path: PathBuf, writer: String, version: u64 },
    /// The file has a valid line with a record that this version does not know. `line` counts from 1; `writer` is the
    /// version that created the file.
    #[error("failed to read {}: line {line}: unknown record ({error}); the file was created by xlaunch {writer}: start \
        the version that wrote the record, or a newer one", path.display())]
    Unknown { path: PathBuf, line: usize, error: String, writer: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl<E: Serialize + DeserializeOwned> Journal<E> {
    /// Opens the journal in the state directory `dir`, and creates both if they are missing. Torn writes and damage are
    /// repaired, and reported in the notes.
    ///
    /// # Errors
    /// Other users can write to `dir`, another daemon has it open, it belongs to another host, a newer xlaunch wrote
    /// the journal, or the disk fails.
    pub(crate) fn open(dir: &Path) -> Result<(Self, Replay<E>), JournalError> {
        Self::open_on(dir, Disk::default())
    }

    fn open_on(dir: &Path, disk: Disk) -> Result<(Self, Replay<E>), JournalError> {
        let dir = StateDir { path: std::path::absolute(dir)?, disk };
        dir.check()?;
        dir.create()?;
        // Checked again, because in a sticky directory another user may have created it first.
        dir.check()?;
        dir.check_entries()?;
        // Before the lock, so that a second daemon on another host is told the name of the first one's.
        dir.check_host()?;
        let locks = dir.lock()?;
        dir.claim()?;
        let path = dir.journal();
        let bytes = match dir.disk.read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        let parsed = lines::parse(&bytes).map_err(|unreadable| match unreadable {
            Unreadable::Newer { writer, version } => JournalError::Newer { path, writer, version },
            Unreadable::Unknown { line, error, writer } => {
                JournalError::Unknown { path, line, error, writer }
            }
        })?;
        let integrity = match parsed.state {
            State::Intact => Integrity::Intact,
            State::Torn { .. } => Integrity::Torn,
            State::New => Integrity::New,
            State::Damaged { .. } => Integrity::Damaged,
        };
        let (file, len, notes) = dir.repair(&bytes, &parsed.state)?;
        let reserve = dir.reserve();
        let mut journal = Self {
            dir,
            file,
            len,
            reserve,
            reserved_up_to: 0,
            broken: None,
            _locks: locks,
            _records: PhantomData,
        };
        journal.reserve();
        Ok((journal, Replay { records: parsed.records, notes, integrity }))
    }

    /// Appends records with one write and one sync. They are on disk when this returns.
    ///
    /// # Errors
    /// The disk fails. Any prefix of the records may be read when the journal is opened again, and all appends fail
    /// until a rewrite succeeds.
    pub(crate) fn append(&mut self, records: &[E]) -> io::Result<()> {
        if let Some(problem) = &self.broken {
            let text = format!(
                "failed to append: the journal must be rewritten after an earlier failure: {problem}"
            );
            return Err(io::Error::other(text));
        }
        let bytes = lines::encode(records)?;
        let disk = &self.dir.disk;
        if let Err(error) = disk.append(&self.file, &bytes).and_then(|()| disk.sync(&self.file)) {
            self.broken = Some(error.to_string());
            return Err(error);
        }
        self.len += bytes.len() as u64;
        self.reserve();
        Ok(())
    }

    /// Allocates more space after the end once half of it is used.
    fn reserve(&mut self) {
        if self.reserve > 0 && self.len + self.reserve / 2 > self.reserved_up_to {
            self.dir.disk.reserve(&self.file, self.len, self.reserve);
            self.reserved_up_to = self.len + self.reserve;
        }
    }

    /// Returns whether a failure prevents appends until the next rewrite.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Replaces all records by these in a new file. Records can be appended to it whatever failed before.
    ///
    /// # Errors
    /// The disk fails. Either the old or the new records are on disk then.
    pub(crate) fn rewrite(&mut self, records: &[E]) -> io::Result<()> {
        let bytes = lines::with_header(&lines::encode(records)?)?;
        // A failure up to here does not change the old file, whether broken or not.
        let file = self.dir.write_new(&bytes)?;
        if let Err(error) = self.dir.publish() {
            // After a crash, either file may have the name, so nothing may be appended to either of them.
            self.broken = Some(error.to_string());
            return Err(error);
        }
        (self.file, self.len, self.broken) = (file, bytes.len() as u64, None);
        self.reserved_up_to = 0;
        self.reserve();
        Ok(())
    }

    /// Size of the file in bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.len
    }
}

/// The host that a state directory belongs to. Machine ids do not identify hosts: those installed from one image can
/// share an id, and those without a disk get a new one at each boot.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Host {
    name: String,
    /// [`boot_id`] at the last start of a daemon.
    boot: String,
}

impl Host {
    fn own() -> Self {
        Self { name: devices::host_name(), boot: boot_id() }
    }
}

/// The locks on a state directory.
#[derive(Debug)]
struct Locks {
    _dir: File,
    _file: File,
}

/// The state directory, and the disk operations for it.
#[derive(Debug)]
struct StateDir {
    path: PathBuf,
    disk: Disk,
}

impl StateDir {
    fn journal(&self) -> PathBuf {
        self.path.join("journal")
    }

    fn new_journal(&self) -> PathBuf {
        self.path.join("journal.new")
    }

    /// Returns the space to keep allocated on the disk, in bytes.
    fn reserve(&self) -> u64 {
        let disk =
            rustix::fs::statvfs(&self.path).map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize));
        RESERVED_BYTES.min(disk / RESERVED_PART_OF_DISK)
    }

    /// Durably creates the directory and its parents if they are missing.
    fn create(&self) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let missing: Vec<_> = self.path.ancestors().take_while(|dir| !dir.exists()).collect();
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.path).map_err(|error| {
            io::Error::new(error.kind(), format!("failed to create {}: {error}", self.path.display()))
        })?;
        missing.iter().filter_map(|dir| dir.parent()).try_for_each(|parent| self.disk.sync_dir(parent))
    }

    /// Checks that only this user and root can change the directory and every component of its path.
    fn check(&self) -> Result<(), JournalError> {
        let unsafe_dir = |problem| JournalError::Unsafe { dir: self.path.clone(), problem };
        trusted_path::check(&self.path).map_err(unsafe_dir)?;
        match std::fs::metadata(&self.path) {
            Ok(found) if !found.is_dir() => Err(JournalError::NotADirectory(self.path.clone())),
            _ => Ok(()),
        }
    }

    /// Checks the entries of the directory. An earlier owner may have left files there, and so may other users if they
    /// were once able to write to it.
    fn check_entries(&self) -> Result<(), JournalError> {
        let unsafe_dir = |problem| JournalError::Unsafe { dir: self.path.clone(), problem };
        trusted_path::check_entries(&self.path).map_err(unsafe_dir)?;
        let jobs = [self.path.join("jobs"), self.path.join("arrays")];
        jobs.iter()
            .filter(|dir| dir.is_dir())
            .try_for_each(|dir| trusted_path::check_entries(dir))
            .map_err(unsafe_dir)
    }

    /// Returns the host that the directory belongs to, if it is recorded.
    fn host(&self) -> io::Result<Option<Host>> {
        match fs_err::read(self.path.join(HOST)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => Ok(serde_json::from_slice(&read?).ok()),
        }
    }

    /// Returns the recorded host. Fails unless that is this host, which may have been renamed since its boot.
    fn check_host(&self) -> Result<Option<Host>, JournalError> {
        let own = Host::own();
        let is_own = |host: &Host| host.name == own.name || (host.boot == own.boot && !own.boot.is_empty());
        match self.host()? {
            Some(host) if !is_own(&host) => {
                Err(JournalError::OtherHost { dir: self.path.clone(), host: host.name })
            }
            host => Ok(host),
        }
    }

    /// Records that the directory belongs to this host.
    fn claim(&self) -> Result<(), JournalError> {
        let own = Host::own();
        if self.check_host()?.as_ref() != Some(&own) {
            match files::write(&self.path, HOST, &serde_json::to_vec(&own).map_err(io::Error::from)?) {
                // A node whose disk is full must start.
                Err(error) if !files::is_full(&error) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Locks the directory for as long as the returned files are open. They are close-on-exec, so agents do not inherit
    /// them.
    fn lock(&self) -> Result<Locks, JournalError> {
        let path = self.path.join("lock");
        let dir = File::open(&self.path)?;
        match self.try_lock(&dir) {
            // On NFS only files that are open for writing can be locked.
            Err(JournalError::Io(_)) => {}
            locked => locked?,
        }
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        self.try_lock(&file)?;
        // The process id is only for the message of a second daemon, so a full disk is not an error.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Locks { _dir: dir, _file: file })
    }

    fn try_lock(&self, file: &File) -> Result<(), JournalError> {
        let start = Instant::now();
        loop {
            match file.file().try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(LOCK_RETRY_DELAY);
                }
                Err(TryLockError::WouldBlock) => {
                    let pid = fs_err::read_to_string(self.path.join("lock")).ok();
                    let pid = pid.and_then(|text| text.trim().parse().ok());
                    return Err(JournalError::InUse { dir: self.path.clone(), pid });
                }
                Err(TryLockError::Error(error)) => {
                    let text = format!("failed to lock {}: {error}", file.path().display());
                    return Err(io::Error::new(error.kind(), text).into());
                }
            }
        }
    }

    /// Makes the file on disk equal to the parsed contents, and opens it for appending. Returns it with its length and
    /// the notes.
    fn repair(&self, bytes: &[u8], state: &State) -> io::Result<(File, u64, Vec<String>)> {
        let path = self.journal();
        let (keep, note) = match state {
            State::New => return self.replace(&lines::with_header(&[])?, Vec::new()),
            State::Damaged { lines, header } => {
                let copy = self.copy(bytes)?;
                let note = damaged_note(&path, lines, *header, &copy);
                return self.replace(&lines::with_header(&lines::valid_records(bytes))?, vec![note]);
            }
            State::Torn { end } => {
                let torn = bytes.len() - end;
                let note = format!(
                    "{}: removed the last {torn} bytes, a record whose write was interrupted",
                    path.display()
                );
                (*end, Some(note))
            }
            State::Intact => (bytes.len(), None),
        };
        let file = self.disk.open(&path, OpenOptions::new().append(true))?;
        if keep < bytes.len() {
            self.disk.truncate(&file, keep as u64)?;
        }
        // The data may have been read from the page cache only, if an earlier daemon died before its sync.
        self.disk.sync(&file)?;
        self.disk.sync_dir(&self.path)?;
        Ok((file, keep as u64, note.into_iter().collect()))
    }

    fn replace(&self, bytes: &[u8], notes: Vec<String>) -> io::Result<(File, u64, Vec<String>)> {
        let file = self.write_new(bytes)?;
        self.publish()?;
        Ok((file, bytes.len() as u64, notes))
    }

    /// Creates a file for appending. Fails if it exists.
    fn create_file(&self, path: &Path) -> io::Result<File> {
        self.disk.open(path, OpenOptions::new().append(true).create_new(true).mode(0o600))
    }

    fn write_new(&self, bytes: &[u8]) -> io::Result<File> {
        let path = self.new_journal();
        match self.disk.remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = self.create_file(&path)?;
        self.disk.append(&file, bytes)?;
        self.disk.sync(&file)?;
        Ok(file)
    }

    /// Durably renames `journal.new` to `journal`.
    fn publish(&self) -> io::Result<()> {
        self.disk.rename(&self.new_journal(), &self.journal())?;
        self.disk.sync_dir(&self.path)
    }

    /// Saves a damaged journal under an unused name.
    fn copy(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let now = clock::unix().as_secs();
        let mut number = 1;
        loop {
            let suffix = if number == 1 { String::new() } else { format!("-{number}") };
            let path = self.path.join(format!("journal.damaged-{now}{suffix}"));
            match self.create_file(&path) {
                Ok(file) => {
                    self.disk.append(&file, bytes)?;
                    self.disk.sync(&file)?;
                    self.disk.sync_dir(&self.path)?;
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
        what.push("the header is missing".to_string());
    }
    if !lines.is_empty() {
        let listed: Vec<_> = lines.iter().take(MAX_LISTED_LINES).map(usize::to_string).collect();
        let more = lines.len() - listed.len();
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let noun = if lines.len() == 1 { "line" } else { "lines" };
        what.push(format!("removed damaged {noun} {}{more}", listed.join(", ")));
    }
    format!("{}: {}; the damaged file is kept as {}", path.display(), what.join("; "), copy.display())
}

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;
