//! One host: its files, programs and connection, and its shutdown.

use std::fs::Permissions;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::inspect::{self, ProcessInfo};
use super::namespaces::Namespaces;
use super::network::{self, Network};
use crate::NOBODY;
use crate::launch::without_launcher_variables;

/// Resets all TCP connections of a host in both directions. Reset packets themselves must pass.
const RESETS: &str = r#"table inet resets {
    chain in { type filter hook input priority 0; iifname "eth0" tcp flags & rst == 0 reject with tcp reset; }
    chain out { type filter hook output priority 0; oifname "eth0" tcp flags & rst == 0 reject with tcp reset; }
}
"#;

/// A host with its own processes, name, addresses, `/run`, `/dev/shm` and `/etc/hosts`. All other files are those of
/// the machine.
#[derive(Debug)]
pub struct Host {
    index: usize,
    dir: PathBuf,
    network: Arc<Network>,
    /// `None` while it is down.
    namespaces: Mutex<Option<Namespaces>>,
}

impl Host {
    /// Creates and starts a host whose files are in `parent`.
    pub(super) fn start(index: usize, parent: &Path, network: Arc<Network>) -> Result<Self, String> {
        let host =
            Self { index, dir: parent.join(format!("h{index}")), network, namespaces: Mutex::default() };
        std::fs::create_dir(&host.dir).map_err(|error| error.to_string())?;
        host.set_names("");
        *host.lock() = Some(host.new_namespaces()?);
        Ok(host)
    }

    fn new_namespaces(&self) -> Result<Namespaces, String> {
        // As on a real host, user sessions find their own runtime directory.
        let setup = format!(
            "echo {name} > /proc/sys/kernel/hostname\n\
            mount -t tmpfs tmpfs /dev/shm\n\
            mount -t tmpfs -o mode=755 tmpfs /run\n\
            mkdir -m 1777 /run/tmp\n\
            mkdir -m 755 /run/user\n\
            mkdir -m 700 /run/user/0 /run/user/{NOBODY}\n\
            chown {NOBODY}:{NOBODY} /run/user/{NOBODY}\n\
            mount --bind {names} /etc/hosts",
            name = self.name(),
            names = self.names_file().display(),
        );
        let namespaces = Namespaces::of_host(&setup)?;
        self.network.attach(self.index, &namespaces)?;
        Ok(namespaces)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Namespaces>> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, act: impl FnOnce(&Namespaces) -> T) -> T {
        act(self.lock().as_ref().unwrap_or_else(|| panic!("{} is down", self.name())))
    }

    /// Returns the host name: `h0`, `h1` and so on.
    pub fn name(&self) -> String {
        format!("h{}", self.index)
    }

    /// Returns the IPv4 address on `eth0`.
    pub fn address(&self) -> Ipv4Addr {
        network::address(self.index)
    }

    /// Returns the IPv6 address on `eth0`.
    pub fn address6(&self) -> Ipv6Addr {
        network::address6(self.index)
    }

    /// Returns a directory for files of this host, where its programs start. Other hosts see it too, unless it is made
    /// private.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Writes a file in the host's directory.
    ///
    /// # Panics
    /// Here and below: if the operation fails, or the host is down.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.join(name);
        std::fs::write(&path, contents).expect("write a file");
        path
    }

    /// Replaces the lines of `/etc/hosts` after `localhost`; see [`super::Hosts::names`].
    pub fn set_names(&self, names: &str) {
        // Written in place, because the file is mounted.
        let text = format!("127.0.0.1 localhost\n::1 localhost\n{names}");
        std::fs::write(self.names_file(), text).expect("write the file of names");
    }

    fn names_file(&self) -> PathBuf {
        self.dir.with_extension("names")
    }

    /// Replaces a directory by one that only this host sees, as without a shared file system. Returns the path at which
    /// the host's files are visible from outside.
    pub fn make_private(&self, dir: &Path) -> PathBuf {
        let name = dir.file_name().expect("a directory with a name").to_string_lossy().into_owned();
        let own = self.dir.join(format!("private-{name}"));
        std::fs::create_dir(&own).expect("create a directory");
        std::fs::set_permissions(&own, Permissions::from_mode(0o1777)).expect("set permissions");
        let [from, to] = [&own, dir].map(|path| path.display().to_string());
        self.with(|namespaces| namespaces.run(&["mount", "--bind", &from, &to], ""))
            .expect("mount a directory");
        own
    }

    /// Returns a command that runs on this host, in its directory and in its own session, without variables of another
    /// launch. Start it with [`crate::Process::spawn_inside`], so that signals reach the program.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.command_in(&self.dir, program)
    }

    /// Same, in another directory.
    pub fn command_in(&self, dir: &Path, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.with(Namespaces::enter);
        command.arg(format!("--wdns={}", dir.display())).arg("setsid").arg(program);
        without_launcher_variables(&mut command);
        command
            .env("XDG_RUNTIME_DIR", "/run/user/0")
            .env("TMPDIR", "/run/tmp")
            .env("CUDA_VISIBLE_DEVICES", "");
        command
    }

    /// Returns the processes on this host except PID 1.
    pub fn processes(&self) -> Vec<ProcessInfo> {
        self.lock()
            .as_ref()
            .map(|namespaces| inspect::processes(&namespaces.file("pid_for_children")))
            .unwrap_or_default()
    }

    /// Returns the addresses on which programs of this host accept TCP connections.
    pub fn listeners(&self) -> Vec<SocketAddr> {
        self.lock().as_ref().map(|namespaces| inspect::listeners(namespaces.pid())).unwrap_or_default()
    }

    /// Cuts the host off: other hosts and the host itself see silence.
    pub fn cut(&self) {
        self.network.change(|faults| _ = faults.cut.insert(self.index));
    }

    /// Drops this percentage of packets at random, in each direction.
    pub fn loss(&self, percent: u8) {
        self.network.change(|faults| _ = faults.loss.insert(self.index, percent));
    }

    /// Removes all faults of this host's connection.
    pub fn heal(&self) {
        self.network.change(|faults| faults.heal(self.index));
    }

    /// Resets, for `time`, every TCP connection of the host that sends data, and refuses new connections. Then returns.
    pub fn reset_connections(&self, time: Duration) {
        self.with(|namespaces| namespaces.run(&["nft", "-f", "-"], RESETS)).expect("add rules");
        std::thread::sleep(time);
        self.with(|namespaces| namespaces.run(&["nft", "delete", "table", "inet", "resets"], ""))
            .expect("remove rules");
    }

    /// Simulates a power cut: the host falls silent, then all its processes disappear.
    pub fn kill(&self) {
        // This order matters: otherwise its kernel would close the connections.
        self.cut();
        drop(self.lock().take());
        self.network.detach(self.index);
    }

    /// Starts a killed host, with the same addresses and files.
    pub fn boot(&self) {
        let mut namespaces = self.lock();
        assert!(namespaces.is_none(), "{} is running", self.name());
        *namespaces = Some(self.new_namespaces().unwrap_or_else(|error| panic!("{}: {error}", self.name())));
        self.network.change(|faults| faults.heal(self.index));
    }

    /// Returns the process id of the host's PID 1 as seen from outside. The host's files are below `/proc/PID/root`.
    pub fn init(&self) -> u32 {
        self.with(Namespaces::init)
    }
}
