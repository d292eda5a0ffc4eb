//! Hosts on one machine: network, PID, mount, host-name and IPC namespaces, connected by a switch that can fail.
//!
//! ```text
//!   h0: eth0 10.77.0.10, fd77::10 ---- p0 |        |
//!   h1: eth0 10.77.0.11, fd77::11 ---- p1 | bridge | rules of `nft`: cuts, one-way cuts, loss
//!   h2: ...                                |        |
//! ```
//! A [`Hosts`] is not connected to anything outside: each test has its own with the same addresses, and tests run in
//! parallel. Programs on a host see all files of the machine, but have their own `/run`, `/dev/shm` and `/etc/hosts`,
//! and their own directories after [`Host::make_private`]. Variables with which programs start point into the host's
//! `/run`.
//!
//! Invariants:
//! - no process, interface, mount or file remains after a drop, a panic, or a SIGKILL of the test (after SIGKILL, files
//!   remain);
//! - a power cut is silent: other hosts see no packet that the host's kernel sends when it ends.
//!
//! Requires root, and the programs `ip`, `nft`, `nsenter`, `unshare`: see [`crate::requirements::hosts`].

mod faults;
mod host;
mod inspect;
mod namespaces;
mod network;
mod sshd;

pub use host::Host;
pub use inspect::ProcessInfo;
pub use sshd::Sshd;
pub(crate) use sshd::sshd_path;

use std::fs::Permissions;
use std::ops::Index;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use network::Network;

/// Hosts of one network, by index. The order of the fields is the order in which they are dropped.
#[derive(Debug)]
pub struct Hosts {
    hosts: Vec<Host>,
    network: Arc<Network>,
    dir: TempDir,
}

impl Hosts {
    /// Starts hosts that know each other's names.
    ///
    /// # Panics
    /// If a host does not start; see [`crate::requirements::hosts`].
    pub fn new(count: usize) -> Self {
        Self::try_new(count).unwrap_or_else(|error| panic!("cannot start hosts: {error}"))
    }

    /// Same as [`Self::new`], without a panic.
    ///
    /// # Errors
    /// A description of the failure.
    pub fn try_new(count: usize) -> Result<Self, String> {
        let dir = TempDir::new().map_err(|error| error.to_string())?;
        let network = Arc::new(Network::new()?);
        let mut hosts = Self { hosts: Vec::new(), network, dir };
        let open = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
        // Ordinary users have their files in the shared directory.
        let prepared = open(hosts.path(), 0o755)
            .and_then(|()| std::fs::create_dir(hosts.shared()))
            .and_then(|()| open(&hosts.shared(), 0o1777));
        prepared.map_err(|error| error.to_string())?;
        for index in 0..count {
            hosts.hosts.push(Host::start(index, hosts.dir.path(), hosts.network.clone())?);
        }
        let names = hosts.names();
        hosts.iter().for_each(|host| host.set_names(&names));
        Ok(hosts)
    }

    /// Returns a directory for files of the test, which all hosts see.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a directory that all hosts see and all users may write to.
    pub fn shared(&self) -> PathBuf {
        self.path().join("shared")
    }

    /// Iterates over all hosts, by index.
    pub fn iter(&self) -> std::slice::Iter<'_, Host> {
        self.hosts.iter()
    }

    /// Returns lines of `/etc/hosts` for all hosts: `h0` with both addresses, `h0-v4` and `h0-v6` with one.
    pub fn names(&self) -> String {
        let lines = self.iter().map(|host| {
            let (name, v4, v6) = (host.name(), host.address(), host.address6());
            format!("{v4} {name} {name}-v4\n{v6} {name} {name}-v6\n")
        });
        lines.collect()
    }

    /// Drops all frames from one host to another.
    pub fn cut_one_way(&self, from: usize, to: usize) {
        self.network.change(|faults| _ = faults.one_way.insert((from, to)));
    }
}

impl Index<usize> for Hosts {
    type Output = Host;

    fn index(&self, index: usize) -> &Host {
        &self.hosts[index]
    }
}
