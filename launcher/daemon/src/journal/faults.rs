//! A disk that fails, stops or loses power at any call, for the journal's tests.
//!
//! It keeps real files, as a kernel keeps them in memory, and beside them what a loss of power would leave: contents as of
//! their last sync, names as of the directory's. It never waits for the real disk.

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

/// What happens at one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    /// Calls before it.
    pub(super) at: usize,
    /// Bytes of a write that get through; of a call that is none, whether it has its effect: not if 0.
    pub(super) torn: usize,
    pub(super) then: Then,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    /// The call fails; the next ones work.
    Error(Errno),
    /// The daemon is gone.
    Gone,
}

/// What a node's end takes along.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loss {
    /// Contents that were not synced, but for the fault's `torn` first bytes of each file.
    pub(super) contents: bool,
    /// Names that were not synced.
    pub(super) names: bool,
}

#[derive(Clone, Debug)]
pub(super) struct FaultyDisk(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    dir: PathBuf,
    calls: usize,
    fault: Option<Fault>,
    gone: bool,
    /// By inode, with the synced contents. They are held open, so that no inode is used twice.
    files: HashMap<u64, (File, Vec<u8>)>,
    /// Synced names.
    names: BTreeMap<OsString, u64>,
}

impl FaultyDisk {
    /// All that is in `dir` now is on disk.
    pub(super) fn new(dir: &Path, fault: Option<Fault>) -> Self {
        let mut state = State {
            dir: dir.into(),
            calls: 0,
            fault,
            gone: false,
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

    /// Whether the fault has happened.
    pub(super) fn has_struck(&self) -> bool {
        let state = self.0.lock().unwrap();
        state.fault.is_none_or(|fault| state.calls > fault.at)
    }

    /// Another daemon starts, and nothing more happens to it.
    pub(super) fn restart(&self) {
        let mut state = self.0.lock().unwrap();
        (state.gone, state.fault) = (false, None);
    }

    /// Leaves in the directory what the end of the node does.
    pub(super) fn lose(&self, loss: Loss) {
        let state = self.0.lock().unwrap();
        let torn = state.fault.map_or(0, |fault| fault.torn);
        let names = if loss.names { state.names.clone() } else { state.present() };
        let mut left = BTreeMap::new();
        for (name, inode) in names {
            let (file, synced) = &state.files[&inode];
            let now = contents(file).unwrap();
            let mut left_of_it = if loss.contents { synced.clone() } else { now.clone() };
            if loss.contents && now.starts_with(synced) {
                left_of_it.extend(now[synced.len()..].iter().take(torn));
            }
            left.insert(name, left_of_it);
        }
        for name in state.present().keys() {
            std::fs::remove_file(state.dir.join(name)).unwrap();
        }
        for (name, contents) in left {
            std::fs::write(state.dir.join(name), contents).unwrap();
        }
    }

    /// Makes one call: all of it, or what the fault lets through.
    fn call<T>(&self, effect: impl FnOnce(&mut State, usize) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.0.lock().unwrap();
        let off = || io::Error::other("the daemon is gone");
        if state.gone {
            return Err(off());
        }
        let fault = state.fault.filter(|fault| fault.at == state.calls);
        state.calls += 1;
        let Some(Fault { torn, then, .. }) = fault else { return effect(&mut state, usize::MAX) };
        if torn > 0 {
            let _ = effect(&mut state, torn);
        }
        match then {
            Then::Error(errno) => Err(errno.into()),
            Then::Gone => {
                state.gone = true;
                Err(off())
            }
        }
    }
}

impl State {
    fn hold(&mut self, file: &File) {
        let held = File::from_parts(file.file().try_clone().unwrap(), file.path());
        self.files.entry(file.metadata().unwrap().ino()).or_insert((held, Vec::new()));
    }

    /// Names in the directory, less the lock's.
    fn present(&self) -> BTreeMap<OsString, u64> {
        let entries = std::fs::read_dir(&self.dir).unwrap().map(Result::unwrap);
        let named = entries.map(|entry| (entry.file_name(), entry.metadata().unwrap().ino()));
        named.filter(|(name, _)| name != "lock").collect()
    }

    fn sync_names(&mut self) {
        self.names = self.present();
    }
}

/// What is in a file, although it may have no name any more and be open for writing alone.
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
