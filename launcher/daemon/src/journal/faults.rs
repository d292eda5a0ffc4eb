//! A disk with fault injection for the journal's tests: any call can fail, or be the last one before a crash.
//!
//! The files in the directory model the page cache. In addition, the state that survives a power failure is kept:
//! contents at their last sync, and names at the last sync of the directory.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fs_err::File;
use rustix::io::Errno;
use xlaunch_proto::disk::{Disk, Failure, Faults, Operation};

/// A fault to inject at one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    /// Index of the call, counted from 0.
    pub(super) at: usize,
    /// Number of bytes that a failing write still writes. Any other call still takes effect unless this is 0.
    pub(super) torn: usize,
    pub(super) kind: FaultKind,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum FaultKind {
    /// The call fails; later calls succeed.
    Error(Errno),
    /// The daemon crashes, so all later calls fail too.
    Crash,
}

/// The data that a crash of the node loses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loss {
    /// Contents that were not synced, except the first `torn` bytes of them in each file.
    pub(super) contents: bool,
    /// Directory entries that were not synced.
    pub(super) names: bool,
}

#[derive(Clone, Debug)]
pub(super) struct FaultyDisk(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    dir: PathBuf,
    calls: usize,
    fault: Option<Fault>,
    crashed: bool,
    /// Files with their synced contents, by inode. The files are kept open so that inodes are not reused.
    files: HashMap<u64, (File, Vec<u8>)>,
    /// Synced directory entries.
    names: BTreeMap<OsString, u64>,
}

impl FaultyDisk {
    /// Creates a disk on which all files in `dir` count as synced.
    pub(super) fn new(dir: &Path, fault: Option<Fault>) -> Self {
        let mut state = State {
            dir: dir.into(),
            calls: 0,
            fault,
            crashed: false,
            files: HashMap::new(),
            names: BTreeMap::new(),
        };
        state.sync_names();
        for (file, synced) in state.files.values_mut() {
            *synced = contents(file).unwrap();
        }
        Self(Arc::new(Mutex::new(state)))
    }

    pub(super) fn disk(&self) -> Disk {
        Disk::with_faults(Arc::new(self.clone()))
    }

    /// Returns whether the fault has been injected.
    pub(super) fn is_injected(&self) -> bool {
        let state = self.0.lock().unwrap();
        state.fault.is_none_or(|fault| state.calls > fault.at)
    }

    /// Starts another daemon on the same directory, without faults.
    pub(super) fn restart(&self) {
        let mut state = self.0.lock().unwrap();
        (state.crashed, state.fault) = (false, None);
    }

    /// Crashes the node: reduces the directory to the data that survives.
    pub(super) fn lose(&self, loss: Loss) {
        let mut state = self.0.lock().unwrap();
        let torn = state.fault.map_or(0, |fault| fault.torn);
        let names = if loss.names { state.names.clone() } else { state.present() };
        let mut surviving = BTreeMap::new();
        for (name, inode) in names {
            let (file, synced) = &state.files[&inode];
            let now = contents(file).unwrap();
            let mut content = if loss.contents { synced.clone() } else { now.clone() };
            if loss.contents && now.starts_with(synced) {
                content.extend(now[synced.len()..].iter().take(torn));
            }
            surviving.insert(name, content);
        }
        for name in state.present().keys() {
            std::fs::remove_file(state.dir.join(name)).unwrap();
        }
        for (name, contents) in surviving {
            std::fs::write(state.dir.join(name), contents).unwrap();
        }
    }
}

impl State {
    /// Keeps a file open, and returns its contents at the last sync.
    fn hold(&mut self, file: &File) -> &mut Vec<u8> {
        let held = || (File::from_parts(file.file().try_clone().unwrap(), file.path()), Vec::new());
        &mut self.files.entry(file.metadata().unwrap().ino()).or_insert_with(held).1
    }

    /// Returns the entries of the directory, except the lock.
    fn present(&mut self) -> BTreeMap<OsString, u64> {
        let mut present = BTreeMap::new();
        for entry in std::fs::read_dir(&self.dir).unwrap().map(Result::unwrap) {
            if entry.file_name() != "lock" {
                self.hold(&File::open(entry.path()).unwrap());
                present.insert(entry.file_name(), entry.metadata().unwrap().ino());
            }
        }
        present
    }

    fn sync_names(&mut self) {
        self.names = self.present();
    }
}

/// Reads a file that may be unlinked, and open for writing only.
fn contents(file: &File) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/self/fd/{}", file.file().as_raw_fd()))
}

impl Faults for FaultyDisk {
    fn check(&self, operation: &Operation<'_>) -> Result<(), Failure> {
        let crashed = || io::Error::other("the daemon has crashed");
        if let Operation::Reserve(_) = operation {
            // Thousands of journals would fill a disk in memory.
            return Err(Failure::Before(Errno::NOSPC.into()));
        }
        let mut state = self.0.lock().unwrap();
        if state.crashed {
            return Err(Failure::Before(crashed()));
        }
        let fault = state.fault.filter(|fault| fault.at == state.calls);
        state.calls += 1;
        let takes_effect = fault.is_none_or(|fault| fault.torn > 0);
        match (operation, fault) {
            (Operation::Sync(file), _) if takes_effect => {
                *state.hold(file) = contents(file).map_err(Failure::Before)?;
            }
            (Operation::SyncDir(_), _) if takes_effect => state.sync_names(),
            (Operation::Append { file, bytes }, Some(fault)) => {
                let mut file: &File = file;
                file.write_all(&bytes[..fault.torn.min(bytes.len())]).map_err(Failure::Before)?;
            }
            _ => {}
        }
        let Some(fault) = fault else { return Ok(()) };
        let error = match fault.kind {
            FaultKind::Error(errno) => errno.into(),
            FaultKind::Crash => {
                state.crashed = true;
                crashed()
            }
        };
        let is_append = matches!(operation, Operation::Append { .. });
        Err(if takes_effect && !is_append { Failure::After(error) } else { Failure::Before(error) })
    }
}
