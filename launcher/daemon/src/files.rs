//! The directories of jobs, where the daemon and the agents, which are processes of other users, leave each other word.
//!
//! ```text
//! <state>/jobs/<id>/            the daemon's; others may pass through
//!     job.json                  what was submitted, with its environment: the daemon's alone
//!     order-<start>.json        the same for one start, with the GPUs: the agent's standard input
//!     agent/                    the job's user's alone
//!         ticket-<start>        whoever takes it away decides whether this start happens
//!         begun-<start>         the same, taken by the agent
//!         lock                  held by the agent as long as it runs
//!         agent.json            who the agent is
//!         agent.sock            where it listens
//!         agent.log             what it says itself
//!         status.pb             what it last said of the ranks (StatusReply)
//!         result.json           how the job has ended: written last, in one piece
//!         logs/attempt_<n>/<local rank>/
//! ```
//! A start happens once or not at all, whenever the daemon is killed: an agent takes its ticket before it does anything, and a
//! daemon that does not know takes it away itself before it starts another. What is in `agent/` belongs to a user, who may
//! have put anything there: it is read without following links, and only where it is a plain file of that user.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};
use xlaunch_proto::convert::node::Work;
use xlaunch_proto::v1::StatusReply;

use super::plain;

/// Version of the files between daemon and agent. 2: a command is a `CommandSpec`, not a command line.
pub const PROTOCOL: u32 = 2;
/// What an agent last said of the ranks.
pub const STATUS: &str = "status.pb";
/// How a job has ended.
pub const RESULT: &str = "result.json";
/// Bytes of a file of a job's user that are read.
const LIMIT: u64 = 1 << 20;

/// What an agent is to run: its standard input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "as in the message")]
pub struct Description {
    pub protocol: u32,
    pub job: u64,
    pub name: String,
    pub work_dir: PathBuf,
    /// `NAME=VALUE`, any bytes.
    pub environment: Vec<Vec<u8>>,
    pub work: Work,
    pub workers: u32,
    /// From 1; 0 as submitted.
    pub start: u32,
    /// UUIDs of the GPUs that it holds; none as submitted, and for a job on the CPU.
    pub gpus: Vec<String>,
}

/// Who an agent is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// [`PROTOCOL`] of its build.
    pub protocol: u32,
    /// Of its build.
    pub version: String,
    /// Its process, told from later ones of this number by its start.
    pub pid: u32,
    /// Clock ticks from the start of the system to its own.
    pub started: u64,
    /// The start of the system that counts.
    pub boot: String,
    /// Which start of the job it is.
    pub start: u32,
}

/// How a job has ended, as its agent knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "as in the message")]
pub struct JobResult {
    pub exit: u8,
    /// Somebody asked for it.
    pub stopped: bool,
    pub reason: String,
    pub report: String,
    /// Whose failure it was, and in which attempt.
    pub rank: Option<u32>,
    pub attempt: u32,
    /// Which start of the job it was.
    pub start: u32,
}

/// The directories of all jobs.
#[derive(Clone, Debug)]
pub struct JobDirs {
    root: PathBuf,
    /// Whether agents are processes of other users.
    switches: bool,
}

impl JobDirs {
    /// Those in this state directory.
    pub fn open(state: &Path) -> io::Result<Self> {
        let root = state.join("jobs");
        match std::fs::DirBuilder::new().mode(0o711).create(&root) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o711))?,
        }
        Ok(Self { root, switches: rustix::process::getuid().is_root() })
    }

    /// A job's directory.
    fn job(&self, job: u64) -> PathBuf {
        self.root.join(job.to_string())
    }

    /// What belongs to its user.
    pub fn agent(&self, job: u64) -> PathBuf {
        self.job(job).join("agent")
    }

    /// Where its logs are.
    pub fn logs(&self, job: u64) -> PathBuf {
        self.agent(job).join("logs")
    }

    /// Makes the directory of a job; what lies there is of one that was never answered for, and goes.
    pub fn create(&self, description: &Description, uid: u32, gid: u32) -> io::Result<()> {
        let dir = self.job(description.job);
        self.remove(description.job)?;
        std::fs::DirBuilder::new().mode(0o711).create(&dir)?;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o711))?;
        write(&dir, "job.json", &serde_json::to_vec(description)?)?;
        let agent = self.agent(description.job);
        std::fs::DirBuilder::new().mode(0o700).create(&agent)?;
        if self.switches {
            chown(&agent, Some(uid), Some(gid))?;
        }
        sync_dir(&dir)?;
        sync_dir(&self.root)
    }

    /// Prepares a start, and opens what is to be the agent's standard input.
    pub fn prepare(&self, job: u64, start: u32, gpus: &[String]) -> io::Result<File> {
        let dir = self.job(job);
        let submitted: Description = serde_json::from_slice(&fs_err::read(dir.join("job.json"))?)?;
        let order = Description { start, gpus: gpus.to_vec(), ..submitted };
        let name = format!("order-{start}.json");
        write(&dir, &name, &serde_json::to_vec(&order)?)?;
        let ticket = self.agent(job).join(ticket(start));
        // The last name may be a link that the user has put there: it is not followed.
        let _ = fs_err::remove_file(&ticket);
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&ticket)?;
        File::open(dir.join(name))
    }

    /// The path of what [`prepare`](Self::prepare) opens.
    pub fn order(&self, job: u64, start: u32) -> PathBuf {
        self.job(job).join(format!("order-{start}.json"))
    }

    /// Takes a start back, prepared or not; `false` where its agent has begun.
    pub fn revoke(&self, job: u64, start: u32) -> io::Result<bool> {
        match std::fs::remove_file(self.agent(job).join(ticket(start))) {
            Ok(()) => Ok(true),
            // It was taken, unless it was never there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(!self.has_begun(job, start)),
            Err(error) => Err(error),
        }
    }

    /// Whether a start's ticket has been taken by its agent.
    pub fn has_begun(&self, job: u64, start: u32) -> bool {
        self.agent(job).join(begun(start)).symlink_metadata().is_ok()
    }

    /// Who a job's agent is, once it says so.
    pub fn identity(&self, job: u64, uid: u32) -> Option<Identity> {
        let bytes = read(&self.agent(job), "agent.json", uid)?;
        serde_json::from_slice(&bytes).ok()
    }

    /// How a job has ended, if its agent has said so.
    pub fn result(&self, job: u64, uid: u32) -> Option<JobResult> {
        let bytes = read(&self.agent(job), RESULT, uid)?;
        serde_json::from_slice(&bytes).ok()
    }

    /// What a job's agent has last said of its ranks, if the job has ended.
    pub fn last_status(&self, job: u64, uid: u32) -> Option<StatusReply> {
        let bytes = read(&self.agent(job), STATUS, uid).filter(|bytes| !bytes.is_empty())?;
        StatusReply::decode(bytes.as_slice()).ok()
    }

    /// Whether an agent that has taken its ticket runs. Nobody else has reason to hold its lock.
    pub fn is_locked(&self, job: u64, uid: u32) -> bool {
        let lock = open(&self.agent(job), "lock", uid);
        lock.is_ok_and(|file| matches!(file.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock)))
    }

    /// Removes all that is kept of a job.
    pub fn remove(&self, job: u64) -> io::Result<()> {
        match std::fs::remove_dir_all(self.job(job)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Jobs that have a directory.
    pub fn all(&self) -> Vec<u64> {
        let entries = fs_err::read_dir(&self.root).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }
}

fn ticket(start: u32) -> String {
    format!("ticket-{start}")
}

fn begun(start: u32) -> String {
    format!("begun-{start}")
}

/// The agent's side: takes the ticket of this start in `dir`; `false` where it was taken back.
pub fn claim(dir: &Path, start: u32) -> io::Result<bool> {
    match std::fs::rename(dir.join(ticket(start)), dir.join(begun(start))) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a file in one piece: it is there whole, on disk, or not at all.
pub fn write(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = dir.join(format!(".{name}.new"));
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, dir.join(name))?;
    sync_dir(dir)
}

/// Whether a write failed for want of room, which there may be again.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A small file of a user; `None` where it is not there, or not what it should be.
fn read(dir: &Path, name: &str, uid: u32) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    open(dir, name, uid).ok()?.take(LIMIT).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Opens a plain file of this user, which is in `dir` itself and no link.
fn open(dir: &Path, name: &str, uid: u32) -> io::Result<File> {
    // The path of `dir` is the daemon's.
    let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, dir, path, Mode::empty())?;
    plain::open_below(&dir, Path::new(name), uid)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use xlaunch_proto::command::{CommandSpec, Program};

    use super::*;

    fn description(job: u64) -> Description {
        Description {
            protocol: PROTOCOL,
            job,
            name: "n".into(),
            work_dir: "/".into(),
            environment: vec![b"A=\xff".to_vec()],
            work: Work::Command(Box::new(CommandSpec::new(Program::Binary("a".into()), Vec::new()))),
            workers: 1,
            start: 0,
            gpus: Vec::new(),
        }
    }

    fn own() -> (u32, u32) {
        (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
    }

    #[test]
    fn a_start_is_the_agents_or_the_daemons_never_both() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        for (start, agent_is_first) in [(1, true), (2, false)] {
            let order = dirs.prepare(1, start, &["GPU-a".into()]).unwrap();
            let order: Description = serde_json::from_reader(order).unwrap();
            assert_eq!((order.start, order.gpus.as_slice()), (start, &["GPU-a".to_string()][..]));
            assert_eq!(order.environment, [b"A=\xff".to_vec()]);
            if agent_is_first {
                assert!(claim(&dirs.agent(1), start).unwrap());
            }
            assert_eq!(dirs.revoke(1, start).unwrap(), !agent_is_first);
            assert!(!claim(&dirs.agent(1), start).unwrap());
            assert_eq!(dirs.has_begun(1, start), agent_is_first);
        }
        // Written down, and not prepared when the daemon was killed.
        assert!(dirs.revoke(1, 3).unwrap());
    }

    #[test]
    fn only_plain_files_of_the_jobs_user_are_read() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        let (uid, gid) = own();
        dirs.create(&description(1), uid, gid).unwrap();
        let (agent, result) = (dirs.agent(1), JobResult { exit: 7, ..JobResult::default() });
        let outside = state.path().join("outside.json");
        fs_err::write(&outside, serde_json::to_vec(&result).unwrap()).unwrap();
        assert_eq!(dirs.result(1, uid), None);
        fs_err::os::unix::fs::symlink(&outside, agent.join("result.json")).unwrap();
        assert_eq!(dirs.result(1, uid), None);
        fs_err::remove_file(agent.join("result.json")).unwrap();
        let path = CString::new(agent.join("result.json").to_str().unwrap()).unwrap();
        rustix::fs::mknodat(CWD, &*path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(dirs.result(1, uid), None);
        write(&agent, "result.json", &serde_json::to_vec(&result).unwrap()).unwrap();
        assert_eq!(dirs.result(1, uid), Some(result));
        // A link to a file of somebody else, as far as the kernel lets users make any.
        assert_eq!(dirs.result(1, uid + 1), None);
    }

    #[test]
    fn an_agent_that_runs_holds_its_lock() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        assert!(!dirs.is_locked(1, own().0));
        let lock = File::create(dirs.agent(1).join("lock")).unwrap();
        lock.lock().unwrap();
        assert!(dirs.is_locked(1, own().0));
        drop(lock);
        assert!(!dirs.is_locked(1, own().0));
    }

    #[test]
    fn what_was_submitted_is_the_daemons_alone() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        drop(dirs.prepare(1, 1, &[]).unwrap());
        let mode = |path: PathBuf| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
        let dir = state.path().join("jobs/1");
        assert_eq!(
            ["job.json", "order-1.json", "agent"].map(|name| mode(dir.join(name))),
            [0o600, 0o600, 0o700]
        );
        assert_eq!((mode(dir.clone()), dirs.all()), (0o711, vec![1]));
        dirs.remove(1).unwrap();
        assert!(!dir.exists());
    }
}
