//! Job directories: the files through which the daemon and the agents, processes of other users, communicate.
//!
//! ```text
//! <state>/jobs/<id>/            owned by the daemon; other users can traverse it
//!     job.json                  the submission with its environment; readable by the daemon only; until the job ends
//!     start-<start>.json        the same for one start, with its GPUs; the agent's standard input
//!     agent/                    owned by the job's user, mode 0700
//!         ticket-<start>        exists until this start is claimed by its agent or revoked by the daemon
//!         begun-<start>         the ticket after the agent has claimed it
//!         lock                  locked by the agent as long as it runs
//!         agent.json            Identity: the agent's process
//!         agent.sock            the agent's gRPC socket
//!         agent.log             the agent's own output
//!         status.pb             the last StatusReply
//!         result.json           JobResult; written last, atomically
//!         logs/attempt_<n>/<local rank>/
//! <state>/arrays/<id>.json      the submission of an array, by its first job, in place of `job.json` of each of its jobs
//! <state>/trash/                directories of forgotten jobs, until they are removed
//! ```
//! Invariants, even if the daemon is killed at any point:
//! - A start happens at most once. The agent claims its ticket, by renaming it, before it does anything else; a daemon
//!   that does not know whether an agent was started revokes the ticket, by removing it, before it starts another. One
//!   of the two system calls fails.
//! - Nothing in `agent/` is trusted: it is read without following links, only from regular files of the job's user, and
//!   at most 1 MiB.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};
use xlaunch_proto::convert::node::Work;
use xlaunch_proto::env;
use xlaunch_proto::v1::StatusReply;

use super::safe_open;
use super::state::Element;
use super::trash::Trash;

/// Version of the files between daemon and agent. 2: a command is a `CommandSpec`, not a command line.
pub const PROTOCOL: u32 = 2;
/// Name of the file with the agent's last `StatusReply`.
pub const STATUS: &str = "status.pb";
/// Name of the file with the [`JobResult`].
pub const RESULT: &str = "result.json";
/// Bytes of a file of a job's user that are read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What an agent runs. It reads this from standard input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    pub protocol: u32,
    pub job: u64,
    pub name: String,
    pub work_dir: PathBuf,
    /// `NAME=VALUE`, not necessarily UTF-8.
    pub environment: Vec<Vec<u8>>,
    pub work: Work,
    pub workers: u32,
    /// Counts from 1; 0 in `job.json`.
    pub start: u32,
    /// UUIDs of the GPUs that the job holds; empty for a CPU job and in `job.json`.
    pub gpus: Vec<String>,
    /// An earlier start was lost: training continues from its newest checkpoint.
    #[serde(default)]
    pub requeued: bool,
}

/// What a start adds to the submission.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StartOptions {
    pub(crate) gpus: Vec<String>,
    pub(crate) requeued: bool,
    /// The job's place in its array.
    pub(crate) element: Option<Element>,
    /// The owner of an array's job, whose directory is created at its first start.
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The process of an agent. `pid` and `started` together identify it, since process ids are reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// [`PROTOCOL`] of its build.
    pub protocol: u32,
    /// The xlaunch version of its build.
    pub version: String,
    pub pid: u32,
    /// Start time of the process in clock ticks since boot.
    pub started: u64,
    /// [`boot_id`](crate::boot_id) when it started.
    pub boot: String,
    /// The job's start that it claimed.
    pub start: u32,
}

/// How a job ended, as reported by its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobResult {
    pub exit: u8,
    /// It was stopped on request.
    pub stopped: bool,
    pub reason: String,
    pub report: String,
    /// The rank that failed first, if one did.
    pub rank: Option<u32>,
    pub attempt: u32,
    pub start: u32,
}

/// The directories of all jobs.
#[derive(Clone, Debug)]
pub(crate) struct JobDirs {
    root: PathBuf,
    arrays: PathBuf,
    trash: Trash,
    /// The daemon is root, so agents run as other users.
    is_root: bool,
}

impl JobDirs {
    /// Opens or creates `jobs` and `trash` in the state directory.
    pub(crate) fn open(state: &Path) -> io::Result<Self> {
        let root = state.join("jobs");
        open_or_create(&root, 0o711)?;
        let arrays = state.join("arrays");
        open_or_create(&arrays, 0o700)?;
        let trash = state.join("trash");
        open_or_create(&trash, 0o700)?;
        Ok(Self { root, arrays, trash: Trash::open(trash)?, is_root: rustix::process::getuid().is_root() })
    }

    fn job(&self, job: u64) -> PathBuf {
        self.root.join(job.to_string())
    }

    /// The part of the job's directory that its user owns.
    pub(crate) fn agent(&self, job: u64) -> PathBuf {
        self.job(job).join("agent")
    }

    pub(crate) fn logs(&self, job: u64) -> PathBuf {
        self.agent(job).join("logs")
    }

    /// Creates the directory of a job. An existing one is left over from a submission that was never acknowledged.
    pub(crate) fn create(&self, description: &Description, uid: u32, gid: u32) -> io::Result<()> {
        self.remove(description.job)?;
        self.create_dir(description.job, uid, gid, Some(description))
    }

    /// Creates the submission of an array. The directories of its jobs are created when they start.
    pub(crate) fn create_array(&self, description: &Description) -> io::Result<()> {
        write(&self.arrays, &array_file(description.job), &serde_json::to_vec(description)?)
    }

    fn create_dir(&self, job: u64, uid: u32, gid: u32, description: Option<&Description>) -> io::Result<()> {
        let dir = self.job(job);
        std::fs::DirBuilder::new().mode(0o711).create(&dir)?;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o711))?;
        if let Some(description) = description {
            write(&dir, "job.json", &serde_json::to_vec(description)?)?;
        }
        let agent = self.agent(job);
        std::fs::DirBuilder::new().mode(0o700).create(&agent)?;
        if self.is_root {
            chown(&agent, Some(uid), Some(gid))?;
        }
        sync_dir(&dir)?;
        sync_dir(&self.root)
    }

    /// Prepares a start: writes its description and ticket. Returns the agent's standard input.
    pub(crate) fn prepare(&self, job: u64, start: u32, options: &StartOptions) -> io::Result<File> {
        let dir = self.job(job);
        let mut description = self.submission(job, options)?;
        (description.start, description.requeued) = (start, options.requeued);
        description.gpus.clone_from(&options.gpus);
        write(&dir, &start_file(start), &serde_json::to_vec(&description)?)?;
        let ticket = self.agent(job).join(ticket(start));
        // The user may have put a link there; neither unlink(2) nor O_EXCL follows it.
        let _ = fs_err::remove_file(&ticket);
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&ticket)?;
        File::open(dir.join(start_file(start)))
    }

    /// The submission of a job: its own or, with its place in the environment, that of its array.
    fn submission(&self, job: u64, options: &StartOptions) -> io::Result<Description> {
        let Some(element) = options.element else {
            return Ok(serde_json::from_slice(&fs_err::read(self.job(job).join("job.json"))?)?);
        };
        let array = fs_err::read(self.arrays.join(array_file(element.first)))?;
        let mut description: Description = serde_json::from_slice(&array)?;
        description.job = job;
        let place = [(env::ARRAY_JOB, element.first), (env::ARRAY_INDEX, element.index.into())];
        for (name, value) in place {
            let prefix = format!("{name}=");
            description.environment.retain(|variable| !variable.starts_with(prefix.as_bytes()));
            description.environment.push(format!("{prefix}{value}").into_bytes());
        }
        if !self.agent(job).is_dir() {
            // Left over from a start that was interrupted between its two directories.
            self.remove(job)?;
            self.create_dir(job, options.uid, options.gid, None)?;
        }
        Ok(description)
    }

    /// The path of the file that [`prepare`](Self::prepare) returns.
    pub(crate) fn start_file(&self, job: u64, start: u32) -> PathBuf {
        self.job(job).join(start_file(start))
    }

    /// Revokes a start, prepared or not. Returns `false` if its agent has claimed it.
    pub(crate) fn revoke(&self, job: u64, start: u32) -> io::Result<bool> {
        match std::fs::remove_file(self.agent(job).join(ticket(start))) {
            Ok(()) => Ok(true),
            // Claimed, or never prepared.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(!self.has_begun(job, start)),
            // The user may have put a directory there.
            Err(_) => {
                self.trash.remove(&self.agent(job).join(ticket(start))).map(|()| !self.has_begun(job, start))
            }
        }
    }

    /// Whether an agent has claimed this start.
    pub(crate) fn has_begun(&self, job: u64, start: u32) -> bool {
        self.agent(job).join(begun(start)).symlink_metadata().is_ok()
    }

    /// The job's agent, once it has introduced itself.
    pub(crate) fn identity(&self, job: u64, uid: u32) -> Option<Identity> {
        let bytes = read(&self.agent(job), "agent.json", uid)?;
        serde_json::from_slice(&bytes).ok()
    }

    /// The result of a job, once its agent has written it.
    pub(crate) fn result(&self, job: u64, uid: u32) -> Option<JobResult> {
        let bytes = read(&self.agent(job), RESULT, uid)?;
        serde_json::from_slice(&bytes).ok()
    }

    /// The last status of an ended job.
    pub(crate) fn last_status(&self, job: u64, uid: u32) -> Option<StatusReply> {
        let bytes = read(&self.agent(job), STATUS, uid).filter(|bytes| !bytes.is_empty())?;
        StatusReply::decode(bytes.as_slice()).ok()
    }

    /// Whether an agent of the job runs and holds its lock.
    pub(crate) fn is_locked(&self, job: u64, uid: u32) -> bool {
        let lock = open(&self.agent(job), "lock", uid);
        lock.is_ok_and(|file| matches!(file.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock)))
    }

    /// Removes the submission with its environment, which may hold secrets, once the job has ended.
    pub(crate) fn remove_submission(&self, job: u64) -> io::Result<()> {
        let entries = match std::fs::read_dir(self.job(job)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes the submission of an array once its last job has ended.
    pub(crate) fn remove_array(&self, first: u64) -> io::Result<()> {
        match std::fs::remove_file(self.arrays.join(array_file(first))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The first jobs of arrays that have a submission.
    pub(crate) fn arrays(&self) -> Vec<u64> {
        let entries = fs_err::read_dir(&self.arrays).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok()).collect()
    }

    /// Removes the job's directory, and what is in it in the background.
    pub(crate) fn remove(&self, job: u64) -> io::Result<()> {
        self.trash.remove(&self.job(job))
    }

    /// The ids of jobs that have a directory.
    pub(crate) fn all(&self) -> Vec<u64> {
        let entries = fs_err::read_dir(&self.root).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }
}

/// Creates a directory with exactly this mode, whatever the umask, or gives it to an existing one.
fn open_or_create(dir: &Path, mode: u32) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(mode).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)),
    }
}

fn start_file(start: u32) -> String {
    format!("start-{start}.json")
}

fn array_file(first: u64) -> String {
    format!("{first}.json")
}

fn ticket(start: u32) -> String {
    format!("ticket-{start}")
}

fn begun(start: u32) -> String {
    format!("begun-{start}")
}

/// For the agent: claims this start in its directory. Returns `false` if it was revoked.
pub fn claim(dir: &Path, start: u32) -> io::Result<bool> {
    match std::fs::rename(dir.join(ticket(start)), dir.join(begun(start))) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a file atomically and durably.
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

/// Whether a write failed because the disk or the quota is full, so that it may succeed later.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Reads a small file of the job's user; `None` if it is missing or cannot be trusted.
fn read(dir: &Path, name: &str, uid: u32) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    open(dir, name, uid).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn open(dir: &Path, name: &str, uid: u32) -> io::Result<File> {
    // The parents of `dir` are the daemon's, so only `dir` itself must not be a link.
    let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, dir, path, Mode::empty())?;
    safe_open::open_below(&dir, Path::new(name), uid)
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
            requeued: false,
        }
    }

    fn on_gpu() -> StartOptions {
        StartOptions { gpus: vec!["GPU-a".into()], ..StartOptions::default() }
    }

    fn own() -> (u32, u32) {
        (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
    }

    #[test]
    fn start_is_either_claimed_or_revoked() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        for (start, agent_is_first) in [(1, true), (2, false)] {
            let input = dirs.prepare(1, start, &on_gpu()).unwrap();
            let description: Description = serde_json::from_reader(input).unwrap();
            assert_eq!((description.start, description.gpus), (start, vec!["GPU-a".to_string()]));
            assert_eq!(description.environment, [b"A=\xff".to_vec()]);
            if agent_is_first {
                assert!(claim(&dirs.agent(1), start).unwrap());
            }
            assert_eq!(dirs.revoke(1, start).unwrap(), !agent_is_first);
            assert!(!claim(&dirs.agent(1), start).unwrap());
            assert_eq!(dirs.has_begun(1, start), agent_is_first);
        }
        fs_err::create_dir_all(dirs.agent(1).join("ticket-4/below")).unwrap();
        assert!(dirs.revoke(1, 4).unwrap());
        // In the journal, but not yet prepared when the daemon was killed.
        assert!(dirs.revoke(1, 3).unwrap());
    }

    #[test]
    fn jobs_of_an_array_share_one_submission_and_know_their_place() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        let mut submission = description(5);
        submission.environment.push(b"XLAUNCH_ARRAY_INDEX=stale".to_vec());
        dirs.create_array(&submission).unwrap();
        assert!(dirs.all().is_empty(), "directories are created at the start");
        let (uid, gid) = own();
        for (job, index) in [(5, 3), (6, 9)] {
            let element = Some(Element { first: 5, index, parallel: 0 });
            let options = StartOptions { element, uid, gid, requeued: job == 6, ..StartOptions::default() };
            for start in [1, 2] {
                let input = dirs.prepare(job, start, &options).unwrap();
                let description: Description = serde_json::from_reader(input).unwrap();
                let place = ["XLAUNCH_ARRAY_JOB=5".to_string(), format!("XLAUNCH_ARRAY_INDEX={index}")];
                let expected = [b"A=\xff".to_vec(), place[0].clone().into(), place[1].clone().into()];
                assert_eq!(description.environment, expected);
                assert_eq!((description.job, description.requeued), (job, job == 6));
                assert!(claim(&dirs.agent(job), start).unwrap());
            }
        }
        assert_eq!(dirs.arrays(), [5]);
        dirs.remove_array(5).unwrap();
        dirs.remove_array(5).unwrap();
        assert!(dirs.arrays().is_empty() && dirs.agent(6).exists());
    }

    #[test]
    fn only_regular_files_of_the_jobs_user_are_read() {
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
        // A file of another user, as by a hard link where the kernel allows one.
        assert_eq!(dirs.result(1, uid + 1), None);
    }

    #[test]
    fn agent_runs_while_its_lock_is_held() {
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
    fn submission_is_readable_by_the_daemon_only() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        drop(dirs.prepare(1, 1, &StartOptions::default()).unwrap());
        let mode = |path: PathBuf| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
        let dir = state.path().join("jobs/1");
        assert_eq!(
            ["job.json", "start-1.json", "agent"].map(|name| mode(dir.join(name))),
            [0o600, 0o600, 0o700]
        );
        assert_eq!((mode(dir.clone()), dirs.all()), (0o711, vec![1]));
        dirs.remove_submission(1).unwrap();
        assert_eq!(
            ["job.json", "start-1.json", "agent"].map(|name| dir.join(name).exists()),
            [false, false, true]
        );
        dirs.remove(1).unwrap();
        assert!(!dir.exists());
    }

    /// Files written by the first release, whose agents may still run after an upgrade of the daemon.
    #[test]
    fn files_of_first_release_are_read() {
        // A queued command was a command line then, which this release does not parse: its job fails with the reason.
        let text = r#"{"protocol":1,"job":7,"name":"n","work_dir":"/w","environment":[[65,61,255]],
            "work":{"command":[[116]]},"workers":2,"start":1,"gpus":["GPU-a"]}"#;
        assert!(serde_json::from_str::<Description>(text).is_err());
        let text = r#"{"protocol":1,"version":"0.1.0","pid":5,"started":6,"boot":"b","start":1}"#;
        let read: Identity = serde_json::from_str(text).unwrap();
        let (version, boot) = ("0.1.0".into(), "b".into());
        assert_eq!(read, Identity { protocol: 1, version, pid: 5, started: 6, boot, start: 1 });
        let text = r#"{"exit":1,"stopped":true,"reason":"r","report":"t","rank":2,"attempt":3,"start":1}"#;
        let read: JobResult = serde_json::from_str(text).unwrap();
        let (reason, report) = ("r".into(), "t".into());
        let expected =
            JobResult { exit: 1, stopped: true, reason, report, rank: Some(2), attempt: 3, start: 1 };
        assert_eq!(read, expected);
    }
}
