//! The agents of jobs: processes that outlive the daemon. How they are started, and how they are followed.
//!
//! An agent is this program again, `xlaunch agent DIR`, as the job's user. Under systemd each is a transient unit of its own,
//! so that neither the daemon's end nor its limits are theirs; elsewhere it is a process in a session of its own.

pub(super) mod connect;
pub mod follow;
mod process;
mod unit;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{Command, Stdio};

use nix::unistd;

use xlaunch_agent::spawn::sys;

/// How agents are started.
#[derive(Clone, Debug)]
pub enum Starter {
    /// As processes of their own; of other users where the daemon is root.
    Detached,
    /// By the system's systemd.
    Systemd(zbus::Connection),
}

/// What is started.
#[derive(Debug)]
#[expect(missing_docs, reason = "as in the records")]
pub struct Start {
    pub job: u64,
    pub name: String,
    pub uid: u32,
    /// The directory of the job that is its user's.
    pub dir: PathBuf,
    /// What is to be its standard input.
    pub order: PathBuf,
    /// The same, open.
    pub input: File,
    /// Seconds that its workers get to end.
    pub patience: f64,
}

/// Ends when the process that was started is surely gone.
pub type Gone = Pin<Box<dyn Future<Output = String> + Send>>;

impl Starter {
    /// Starts an agent.
    ///
    /// # Errors
    /// The system's, or systemd's: then there is no agent.
    pub async fn start(&self, start: Start) -> io::Result<Gone> {
        match self {
            Self::Detached => detached(start),
            Self::Systemd(bus) => unit::start(bus, start).await.map_err(io::Error::other),
        }
    }

    /// Ends what an agent has left behind, or what is left of it.
    pub async fn kill(&self, job: u64) {
        if let Self::Systemd(bus) = self {
            unit::kill(bus, job).await;
        }
    }
}

fn detached(start: Start) -> io::Result<Gone> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xlaunch").arg("agent").arg(&start.dir).env_clear().current_dir("/");
    // The job's own comes with its order.
    command.env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command.stdin(start.input).stdout(Stdio::null());
    sys::start_in_session(&mut command, identity(start.uid)?);
    let mut child = tokio::process::Command::from(command).spawn()?;
    Ok(Box::pin(async move {
        let ended = child.wait().await;
        ended.map_or_else(|error| error.to_string(), |status| status.to_string())
    }))
}

/// Whose rights the agent gets; nobody else's where this daemon is an ordinary user.
fn identity(uid: u32) -> io::Result<Option<sys::User>> {
    if !rustix::process::getuid().is_root() {
        return Ok(None);
    }
    let (gid, groups) = match unistd::User::from_uid(uid.into())? {
        Some(user) => {
            let name = std::ffi::CString::new(OsString::from(user.name).into_vec())?;
            let groups = unistd::getgrouplist(&name, user.gid)?;
            (user.gid.as_raw(), groups.into_iter().map(unistd::Gid::as_raw).collect())
        }
        // A number without a name has a group of the same number, and no other.
        None => (uid, vec![uid]),
    };
    Ok(Some(sys::User { uid, gid, groups }))
}
