//! A disk with fault injection for the journal's tests: any call can fail, or be the last one before a crash.
//!
//! The files in the directory model the page cache. In addition, the state that survives a power failure is kept:
//! contents at their last sync, and names at the last sync of the directory. Nothing is ever synced to the real disk.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fs_err::File;
use rustix::io::Errno;

use super::disk::{Disk, RealDisk};

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
        for (name, inode) in state.names.clone() {
            state.hold(&File::open(dir.join(&name)).unwrap());
            state.files.get_mut(&inode).unwrap().1 = std::fs::read(dir.join(name)).unwrap();
        }
        Self(Arc::new(Mutex::new(state)))
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
        let state = self.0.lock().unwrap();
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

    /// Makes a call, completely or as far as the fault permits.
    fn call<T>(&self, effect: impl FnOnce(&mut State, usize) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.0.lock().unwrap();
        let crashed = || io::Error::other("the daemon has crashed");
        if state.crashed {
            return Err(crashed());
        }
        let fault = state.fault.filter(|fault| fault.at == state.calls);
        state.calls += 1;
        let Some(Fault { torn, kind, .. }) = fault else { return effect(&mut state, usize::MAX) };
        if torn > 0 {
            let _ = effect(&mut state, torn);
        }
        match kind {
            FaultKind::Error(errno) => Err(errno.into()),
            FaultKind::Crash => {
                state.crashed = true;
                Err(crashed())
            }
        }
    }
}

impl State {
    fn hold(&mut self, file: &File) {
        let held = File::from_parts(file.file().try_clone().unwrap(), file.path());
        self.files.entry(file.metadata().unwrap().ino()).or_insert((held, Vec::new()));
    }

    /// Returns the entries of the directory, except the lock.
    fn present(&self) -> BTreeMap<OsString, u64> {
        let entries = std::fs::read_dir(&self.dir).unwrap().map(Result::unwrap);
        let named = entries.map(|entry| (entry.file_name(), entry.metadata().unwrap().ino()));
        named.filter(|(name, _)| name != "lock").collect()
    }

    fn sync_names(&mut self) {
        self.names = self.present();
    }
}

/// Reads a file that may be unlinked, and open for writing only.
fn contents(file: &File) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/self/fd/{}", file.file().as_raw_fd()))
}

impl Disk for FaultyDisk {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.call(|_, _| RealDisk.read(path))
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        self.call(|state, _| {
            let file = RealDisk.open(path)?;
            state.hold(&file);
            Ok(file)
        })
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        self.call(|state, _| {
            let file = RealDisk.create(path)?;
            state.hold(&file);
            Ok(file)
        })
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        self.call(|_, torn| file.write_all(&bytes[..torn.min(bytes.len())]))
    }

    fn truncate(&self, file: &File, len: u64) -> io::Result<()> {
        self.call(|_, _| RealDisk.truncate(file, len))
    }

    fn reserve(&self, _: &File, _: u64, _: u64) {}

    fn sync(&self, file: &File) -> io::Result<()> {
        self.call(|state, _| {
            let now = contents(file)?;
            state.files.get_mut(&file.metadata()?.ino()).unwrap().1 = now;
            Ok(())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(|_, _| RealDisk.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.call(|_, _| RealDisk.remove(path))
    }

    fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        self.call(|state, _| {
            state.sync_names();
            Ok(())
        })
    }
}
