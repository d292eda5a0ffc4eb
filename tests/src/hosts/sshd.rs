//! An ssh server on each host, and a client configuration with which root can log in from any host to any other.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Hosts;
use crate::{Process, wait_for};

/// Running ssh servers. Dropping this ends the servers; sessions continue until the hosts are dropped, as with real
/// servers.
#[derive(Debug)]
pub struct Sshd {
    config: PathBuf,
    _servers: Vec<Process>,
}

impl Sshd {
    /// Starts a server on every host, on port 22 of both addresses. Generates keys.
    ///
    /// # Panics
    /// If that fails.
    pub fn start(hosts: &Hosts) -> Self {
        let dir = hosts.path().join("ssh");
        std::fs::create_dir(&dir).expect("create a directory");
        for key in ["host_key", "id"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]).arg(dir.join(key));
            assert!(keygen.status().expect("run ssh-keygen").success(), "ssh-keygen failed");
        }
        std::fs::create_dir(dir.join("home")).expect("create a directory");
        let config = dir.join("config");
        std::fs::write(&config, client_config(&dir)).expect("write the client's configuration");
        let server_config = dir.join("sshd_config");
        std::fs::write(&server_config, self::server_config(&dir)).expect("write the server's configuration");
        let path = sshd_path().expect("find sshd");
        let servers = hosts.iter().map(|host| {
            // Directory for privilege separation, which a service manager would create.
            let made = host.command("mkdir").args(["-p", "/run/sshd"]).status().expect("run mkdir");
            assert!(made.success(), "mkdir failed on {}", host.name());
            let mut sshd = host.command(&path);
            sshd.args(["-D", "-e", "-f"]).arg(&server_config);
            // A user session must not inherit variables of the test.
            sshd.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
            let server = Process::spawn_inside(&mut sshd);
            wait_for("the ssh server to listen", || {
                let listens = host.listeners().iter().any(|listener| listener.port() == 22);
                assert!(listens || crate::is_alive(server.pid()), "sshd exited: {}", server.stderr());
                listens.then_some(())
            });
            server
        });
        Self { config, _servers: servers.collect() }
    }

    /// Returns the configuration of the client: `ssh -F CONFIG h1 COMMAND`.
    pub fn config(&self) -> &Path {
        &self.config
    }
}

fn client_config(dir: &Path) -> String {
    format!(
        "Host *\n  User root\n  IdentityFile {}\n  IdentitiesOnly yes\n  BatchMode yes\n  LogLevel ERROR\n  \
        StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n",
        dir.join("id").display()
    )
}

fn server_config(dir: &Path) -> String {
    // Start files of the real home directory may print, or fail when sessions run them at once. The other variables
    // are those that a session manager would set.
    format!(
        "HostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n\
        KbdInteractiveAuthentication no\nPermitRootLogin yes\nPidFile none\nUseDNS no\n\
        SetEnv HOME={} XDG_RUNTIME_DIR=/run/user/0 TMPDIR=/run/tmp\n",
        dir.join("host_key").display(),
        dir.join("id.pub").display(),
        dir.join("home").display()
    )
}

/// Returns the path of the server, which insists on being started by its absolute path and is rarely in the `PATH` of
/// users.
pub(crate) fn sshd_path() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    dirs.map(|dir| dir.join("sshd")).find(|path| path.is_file())
}
