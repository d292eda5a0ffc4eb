//! Job directories: the files through which the daemon communicates with agents, which are processes of other users.
//!
//! ```text
//! <state>/jobs/<id>/            owned by the daemon; the job's user can traverse it
//!     job.json                  the submission with its environment; readable by the daemon only; until the job ends
//!     agent.json                AgentRecord of the newest start
//!     agent/                    owned by the job's user, mode 0700
//!         begun-<start>         written by the agent of this start once it has received its description
//!         agent.sock            the agent's gRPC socket
//!         agent.log             the agent's own output
//!         status.pb             the last StatusReply
//!         result.json           JobResult; written last, atomically
//!         logs/attempt_<n>/<local rank>/
//! <state>/ids                   the job ids that may have been assigned; see [`crate::ids`]
//! <state>/arrays/<id>.json      the submission of an array, named after its first job: the `job.json` of all its jobs
//! <state>/trash/                directories of forgotten jobs, until they are removed
//! ```
//! Invariants, even if the daemon is killed at any point:
//! - A start happens at most once, and every agent that can act is recorded: an agent does nothing before it has read a
//!   complete [`Description`] from its standard input, which the daemon sends after it has written `agent.json`.
//! - Whether an agent runs is never read from `agent/`. An agent's report (whether it had begun, and how it ended)
//!   counts only once the agent is known to have exited, and only for its own job.
//! - Nothing in `agent/` is trusted: only regular files of the job's user are read, without following links, and at
//!   most 1 MiB of each.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use xlaunch_proto::convert::node::Work;
use xlaunch_proto::env;
use xlaunch_proto::v1::StatusReply;

use super::access_list::allow_user;
use super::environment;
use super::safe_open;
use super::state::Element;
use super::trash::Trash;
use super::trusted_path;
use super::usage::Usage;

/// Version of the files that daemon and agent exchange. Since 2, a command is a `CommandSpec` instead of a command
/// line. Since 3, the agent waits for its description and does not run in the job's environment.
pub const PROTOCOL: u32 = 3;
/// Name of the file with the agent's last `StatusReply`.
pub const STATUS: &str = "status.pb";
/// Name of the file with the [`JobResult`].
pub const RESULT: &str = "result.json";
const AGENT_RECORD: &str = "agent.json";
/// Space allocated in advance for a result, whose texts are at most 4 KiB each.
const RESERVED_RESULT_BYTES: u64 = 16 << 10;
/// Limit on the bytes read from a file of a job's user.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Describes a job to its agent, which reads this from standard input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    pub protocol: u32,
    pub job: u64,
    pub name: String,
    pub work_dir: PathBuf,
    /// Variables as `NAME=VALUE`, not necessarily UTF-8.
    pub environment: Vec<Vec<u8>>,
    pub work: Work,
    pub workers: u32,
    /// Number of the start, counted from 1; 0 in `job.json`.
    pub start: u32,
    /// UUIDs of the GPUs that the job holds; empty for a CPU job and in `job.json`.
    pub gpus: Vec<String>,
    /// True if an earlier start was lost, so that training continues from its newest checkpoint.
    #[serde(default)]
    pub requeued: bool,
    /// Maximum output kept of each stream of each worker of a command, in bytes. `None` for the agent's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output: Option<u64>,
}

/// The values that a start adds to the submission.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StartOptions {
    /// UUIDs of the GPUs that the job holds.
    pub(crate) gpus: Vec<String>,
    pub(crate) requeued: bool,
    /// The job's place in its array, if it belongs to one.
    pub(crate) element: Option<Element>,
    /// True if the node accepts only training jobs, whose environment is restricted.
    pub(crate) only_training: bool,
    /// Maximum output kept of each stream of each worker of a command, in bytes.
    pub(crate) max_output: Option<u64>,
    /// Owner of the job's directory. The directory of an array's job is created at its first start.
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Record of a start's agent, written by the daemon that started it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRecord {
    /// Number of the start, counted from 1.
    pub start: u32,
    /// `None` if the agent runs in a systemd unit.
    pub process: Option<ProcessId>,
    /// Name of the job's user.
    #[serde(default)]
    pub user: String,
    /// UUIDs of the GPUs that the job holds.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// [`boot_id`](crate::boot_id) at the start; empty in records of version 0.2.
    #[serde(default)]
    pub boot: String,
    /// Start time, in milliseconds on the node's clock.
    #[serde(default)]
    pub at: u64,
}

/// Facts about a job that is missing in the journal, as far as its directory shows them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FoundDir {
    /// Owner of the part of the directory that the job's user can write.
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The submission, unless the job has ended or belongs to an array.
    pub(crate) description: Option<Description>,
    /// The agent of the newest start.
    pub(crate) agent: Option<AgentRecord>,
}

/// Identifies a process. A process id alone is not enough, as it may be reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub started: u64,
    /// [`boot_id`](crate::boot_id) at the start of the process.
    pub boot: String,
}

/// Outcome of a job, as reported by its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobResult {
    pub exit: u8,
    /// True if the job was stopped on request.
    pub stopped: bool,
    pub reason: String,
    pub report: String,
    /// The rank that failed first, if one did.
    pub rank: Option<u32>,
    pub attempt: u32,
    pub start: u32,
    /// Resources that the workers have used.
    pub usage: Option<Usage>,
}

/// The directories of all jobs.
#[derive(Clone, Debug)]
pub(crate) struct JobDirs {
    root: PathBuf,
    arrays: PathBuf,
    trash: Trash,
    /// True if the daemon runs as root, so that agents run as other users.
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

    /// Returns the part of the job's directory that its user owns.
    pub(crate) fn agent(&self, job: u64) -> PathBuf {
        self.job(job).join("agent")
    }

    pub(crate) fn logs(&self, job: u64) -> PathBuf {
        self.agent(job).join("logs")
    }

    /// Creates the directory of a job. An existing directory is left over from a submission that was never
    /// acknowledged, and is removed.
    pub(crate) fn create(&self, description: &Description, uid: u32, gid: u32) -> io::Result<()> {
        self.remove(description.job)?;
        self.create_dir(description.job, uid, gid, Some(description))
    }

    /// Stores the submission of an array. The directories of its jobs are created when they start.
    pub(crate) fn create_array(&self, description: &Description) -> io::Result<()> {
        write(&self.arrays, &array_file(description.job), &serde_json::to_vec(description)?)
    }

    fn create_dir(&self, job: u64, uid: u32, gid: u32, description: Option<&Description>) -> io::Result<()> {
        let dir = self.job(job);
        std::fs::DirBuilder::new().mode(0o711).create(&dir)?;
        // Other users must not see whose job it is and when its files change. On a file system without access control
        // lists, other users can traverse the directory too.
        let mode = if self.is_root && allow_user(&dir, uid).is_ok() { 0o710 } else { 0o711 };
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode))?;
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

    /// Returns the description of one start of a job, as sent to its agent.
    pub(crate) fn description(&self, job: u64, start: u32, options: &StartOptions) -> io::Result<Vec<u8>> {
        let mut description = self.submission(job, options)?;
        (description.start, description.requeued) = (start, options.requeued);
        description.gpus.clone_from(&options.gpus);
        description.max_output = options.max_output;
        // Restricted here and not at the submission, because the operator may have changed the setting since.
        if options.only_training {
            environment::restrict(&mut description.environment);
        }
        Ok(serde_json::to_vec(&description)?)
    }

    /// Reads the submission of a job: its own, or that of its array with the job's place added to the environment.
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
            // A remaining directory is from a start that was interrupted after creating the first of its two
            // directories.
            self.remove(job)?;
            self.create_dir(job, options.uid, options.gid, None)?;
        }
        Ok(description)
    }

    /// Records the agent of a start.
    pub(crate) fn record_agent(&self, job: u64, record: &AgentRecord) -> io::Result<()> {
        write(&self.job(job), AGENT_RECORD, &serde_json::to_vec(record)?)
    }

    /// Returns the agent of this start, if it was recorded.
    pub(crate) fn agent_record(&self, job: u64, start: u32) -> Option<AgentRecord> {
        self.newest_agent(job).filter(|record| record.start == start)
    }

    /// Returns the agent of the newest start, if it was recorded.
    pub(crate) fn newest_agent(&self, job: u64) -> Option<AgentRecord> {
        let bytes = fs_err::read(self.job(job).join(AGENT_RECORD)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Reads the facts that the job's directory shows; `None` if the directory is incomplete.
    pub(crate) fn found(&self, job: u64) -> Option<FoundDir> {
        // The user owns this directory but cannot replace it, because it is in a directory of the daemon.
        let agent = fs_err::symlink_metadata(self.agent(job)).ok().filter(std::fs::Metadata::is_dir)?;
        let description = fs_err::read(self.job(job).join("job.json")).ok();
        Some(FoundDir {
            uid: agent.uid(),
            gid: agent.gid(),
            description: description.and_then(|bytes| serde_json::from_slice(&bytes).ok()),
            agent: self.newest_agent(job),
        })
    }

    /// Returns whether the agent of this start has received its description.
    pub(crate) fn has_begun(&self, job: u64, start: u32) -> bool {
        self.agent(job).join(begun(start)).symlink_metadata().is_ok()
    }

    /// Reads the result of a job, if its agent has written one.
    pub(crate) fn result(&self, job: u64, uid: u32) -> Option<JobResult> {
        let bytes = read(&self.agent(job), RESULT, uid)?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Reads the last status of an ended job.
    pub(crate) fn last_status(&self, job: u64, uid: u32) -> Option<StatusReply> {
        let bytes = read(&self.agent(job), STATUS, uid).filter(|bytes| !bytes.is_empty())?;
        StatusReply::decode(bytes.as_slice()).ok()
    }

    /// Removes the submission of an ended job, because its environment may contain secrets.
    pub(crate) fn remove_submission(&self, job: u64) -> io::Result<()> {
        remove_if_present(&self.job(job).join("job.json"))
    }

    /// Removes the submission of an array whose last job has ended.
    pub(crate) fn remove_array(&self, first: u64) -> io::Result<()> {
        remove_if_present(&self.arrays.join(array_file(first)))
    }

    /// Returns the first jobs of all arrays that have a submission.
    pub(crate) fn arrays(&self) -> Vec<u64> {
        let entries = fs_err::read_dir(&self.arrays).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok()).collect()
    }

    /// Removes the job's directory. Its contents are removed in the background.
    pub(crate) fn remove(&self, job: u64) -> io::Result<()> {
        self.trash.remove(&self.job(job))
    }

    /// Returns the ids of all jobs that have a directory.
    pub(crate) fn all(&self) -> Vec<u64> {
        let entries = fs_err::read_dir(&self.root).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }
}

/// Creates a directory with exactly this mode, whatever the umask, or sets the mode of an existing directory.
fn open_or_create(dir: &Path, mode: u32) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(mode).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => {
            trusted_path::check(dir)?;
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode))
        }
    }
}

fn array_file(first: u64) -> String {
    format!("{first}.json")
}

fn begun(start: u32) -> String {
    format!("begun-{start}")
}

/// Records that the agent of this start has received its description. From then on the start has happened.
pub fn begin(agent: &Path, start: u32) -> io::Result<()> {
    write(agent, &begun(start), b"")
}

/// Writes a file atomically and durably.
pub fn write(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = new_file(dir, name);
    remove_if_present(&new)?;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    finish(file, bytes, &new, &dir.join(name))
}

/// Allocates space for the [`JobResult`], so that it can be written even if the disk is full.
pub fn reserve_result(dir: &Path) -> io::Result<()> {
    let new = new_file(dir, RESULT);
    remove_if_present(&new)?;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(new)?;
    match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, RESERVED_RESULT_BYTES) {
        // Not all file systems support that.
        Err(Errno::OPNOTSUPP) => Ok(()),
        allocated => Ok(allocated?),
    }
}

/// Writes the [`JobResult`] into the space that was allocated for it, atomically and durably.
pub fn write_result(dir: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = new_file(dir, RESULT);
    // The job may have replaced the file by a link or a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let Ok(file) = std::fs::OpenOptions::new().write(true).custom_flags(flags).open(&new) else {
        return write(dir, RESULT, bytes);
    };
    finish(file, bytes, &new, &dir.join(RESULT))
}

/// Writes a new file and renames it to its final path.
fn finish(mut file: File, bytes: &[u8], new: &Path, path: &Path) -> io::Result<()> {
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()?;
    std::fs::rename(new, path)?;
    path.parent().map_or(Ok(()), sync_dir)
}

fn new_file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!(".{name}.new"))
}

/// Removes a file if it exists.
pub fn remove_if_present(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether a write failed because the disk or the quota is full, in which case it may succeed later.
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
    // The parents of `dir` belong to the daemon, so only `dir` itself could be a link.
    let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(CWD, dir, path, Mode::empty())?;
    safe_open::open_below(&dir, Path::new(name), uid)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use xlaunch_spec::command::{CommandSpec, Program};

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
            max_output: None,
        }
    }

    fn on_gpu() -> StartOptions {
        StartOptions { gpus: vec!["GPU-a".into()], ..StartOptions::default() }
    }

    fn own() -> (u32, u32) {
        (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
    }

    #[test]
    fn agent_record_and_begun_file_belong_to_one_start() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        assert_eq!(dirs.agent_record(1, 1), None);
        let process = Some(ProcessId { pid: 5, started: 6, boot: "b".into() });
        let record = AgentRecord {
            start: 1,
            process,
            user: "anna".into(),
            gpus: vec!["GPU-a".into()],
            boot: "b".into(),
            at: 7,
        };
        dirs.record_agent(1, &record).unwrap();
        assert_eq!((dirs.agent_record(1, 1), dirs.agent_record(1, 2)), (Some(record), None));
        assert!(!dirs.has_begun(1, 1));
        begin(&dirs.agent(1), 1).unwrap();
        assert!(dirs.has_begun(1, 1) && !dirs.has_begun(1, 2));
        let sent = dirs.description(1, 2, &on_gpu()).unwrap();
        let sent: Description = serde_json::from_slice(&sent).unwrap();
        assert_eq!((sent.start, sent.gpus), (2, vec!["GPU-a".to_string()]));
        assert_eq!(sent.environment, [b"A=\xff".to_vec()]);
    }

    #[test]
    fn directory_describes_a_job_missing_in_the_journal() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        assert_eq!(dirs.found(1), None);
        let (uid, gid) = own();
        dirs.create(&description(1), uid, gid).unwrap();
        let found = dirs.found(1).unwrap();
        assert_eq!(found, FoundDir { uid, gid, description: Some(description(1)), agent: None });
        // A record that version 0.2 has written.
        write(&state.path().join("jobs/1"), AGENT_RECORD, br#"{"start":3,"process":null}"#).unwrap();
        assert_eq!(
            dirs.found(1).unwrap().agent.map(|agent| (agent.start, agent.boot)),
            Some((3, String::new()))
        );
        dirs.remove_submission(1).unwrap();
        assert_eq!(dirs.found(1).unwrap().description, None);
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
                let sent = dirs.description(job, start, &options).unwrap();
                let description: Description = serde_json::from_slice(&sent).unwrap();
                let place = ["XLAUNCH_ARRAY_JOB=5".to_string(), format!("XLAUNCH_ARRAY_INDEX={index}")];
                let expected = [b"A=\xff".to_vec(), place[0].clone().into(), place[1].clone().into()];
                assert_eq!(description.environment, expected);
                assert_eq!((description.job, description.requeued), (job, job == 6));
                begin(&dirs.agent(job), start).unwrap();
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
        // The file of another user, which a hard link can refer to if the kernel allows that.
        assert_eq!(dirs.result(1, uid + 1), None);
    }

    #[test]
    fn submission_is_readable_by_the_daemon_only() {
        let state = tempfile::tempdir().unwrap();
        let dirs = JobDirs::open(state.path()).unwrap();
        dirs.create(&description(1), own().0, own().1).unwrap();
        let (user, gpus, boot) = (String::new(), Vec::new(), String::new());
        dirs.record_agent(1, &AgentRecord { start: 1, process: None, user, gpus, boot, at: 0 }).unwrap();
        let mode = |path: PathBuf| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
        let dir = state.path().join("jobs/1");
        let names = ["job.json", "agent.json", "agent"];
        assert_eq!(names.map(|name| mode(dir.join(name))), [0o600, 0o600, 0o700]);
        assert!([0o710, 0o711].contains(&mode(dir.clone())), "{:o}", mode(dir.clone()));
        assert_eq!(dirs.all(), [1]);
        dirs.remove_submission(1).unwrap();
        assert_eq!(names.map(|name| dir.join(name).exists()), [false, true, true]);
        dirs.remove(1).unwrap();
        assert!(!dir.exists());
    }

    /// Tests files written by the first release, whose agents may still run after an upgrade of the daemon.
    #[test]
    fn files_of_first_release_are_read() {
        // In the first release, a queued command was a command line. This release does not parse it: the job fails with
        // that reason.
        let text = r#"{"protocol":1,"job":7,"name":"n","work_dir":"/w","environment":[[65,61,255]],
            "work":{"command":[[116]]},"workers":2,"start":1,"gpus":["GPU-a"]}"#;
        assert!(serde_json::from_str::<Description>(text).is_err());
        let text = r#"{"exit":1,"stopped":true,"reason":"r","report":"t","rank":2,"attempt":3,"start":1}"#;
        let read: JobResult = serde_json::from_str(text).unwrap();
        let (reason, report) = ("r".into(), "t".into());
        let expected = JobResult {
            exit: 1,
            stopped: true,
            reason,
            report,
            rank: Some(2),
            attempt: 3,
            start: 1,
            usage: None,
        };
        assert_eq!(read, expected);
    }
}
