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
//! <state>/host                  the host that the directory belongs to; see [`crate::journal`]
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

mod durable;
mod records;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::SocketAddr;
use std::path::{Path, PathBuf};

use prost::Message;
use rustix::fs::{CWD, Mode, OFlags};
use xlaunch_agent::registry::SOCKET;
use xlaunch_host::escape::escaped;
use xlaunch_proto::disk::sync_dir;
use xlaunch_proto::env;
use xlaunch_proto::v1::StatusReply;

use super::access_list::allow_user;
use super::allowed_variables;
use super::safe_open;
use super::state::{Element, JobResult};
use super::trash::Trash;
use super::trusted_path;
pub use durable::{is_full, remove_if_present, reserve_result, write, write_result};
pub use records::{AgentRecord, Description, PROTOCOL, ProcessId, RESULT, STATUS};

const AGENT_RECORD: &str = "agent.json";
/// Limit on the bytes read from a file of a job's user.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Limit on the characters of a line that is shown.
const MAX_LINE: usize = 300;
/// Space that the files of a job need before it begins, in bytes, with room for those of others.
const MIN_SPACE: u64 = 1 << 20;

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

/// Returns the path of the socket of a job's agent, given the state directory.
pub(crate) fn agent_socket(state: &Path, job: u64) -> PathBuf {
    agent_dir(&jobs_dir(state), job).join(SOCKET)
}

fn jobs_dir(state: &Path) -> PathBuf {
    state.join("jobs")
}

fn agent_dir(jobs: &Path, job: u64) -> PathBuf {
    jobs.join(job.to_string()).join("agent")
}

/// Checks the length of the path of a unix socket. The kernel accepts one more byte, but most programs do not.
pub(crate) fn check_socket(path: &Path) -> io::Result<()> {
    SocketAddr::from_pathname(path)
        .map(drop)
        .map_err(|error| io::Error::new(error.kind(), format!("{} is too long for a socket", path.display())))
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
        let root = jobs_dir(state);
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
        agent_dir(&self.root, job)
    }

    pub(crate) fn logs(&self, job: u64) -> PathBuf {
        self.agent(job).join("logs")
    }

    /// Checks that the agent of a job can listen on a socket in its directory.
    pub(crate) fn check_socket(&self, job: u64) -> io::Result<()> {
        check_socket(&self.agent(job).join(SOCKET)).map_err(|error| {
            io::Error::new(error.kind(), format!("{error}; set daemon.state_dir to a shorter path"))
        })
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
            allowed_variables::restrict(&mut description.environment);
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

    /// Reads the facts that the job's directory shows. `None` if the directory is incomplete, unless the recorded agent
    /// runs.
    pub(crate) fn found(&self, job: u64) -> Option<FoundDir> {
        // The user owns this directory but cannot replace it, because it is in a directory of the daemon.
        let dir = fs_err::symlink_metadata(self.agent(job)).ok().filter(std::fs::Metadata::is_dir);
        let agent = self.newest_agent(job);
        let of_process = || agent.as_ref()?.process.as_ref()?.owner();
        let (uid, gid) = dir.map(|dir| (dir.uid(), dir.gid())).or_else(of_process)?;
        let description = fs_err::read(self.job(job).join("job.json")).ok();
        let description = description.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Some(FoundDir { uid, gid, description, agent })
    }

    /// Returns whether the agent of this start has received its description.
    pub(crate) fn has_begun(&self, job: u64, start: u32) -> bool {
        self.agent(job).join(begun(start)).symlink_metadata().is_ok()
    }

    /// Returns whether the files of the job's agent have been removed, so that they do not show what it did.
    pub(crate) fn are_gone(&self, job: u64) -> bool {
        self.agent(job).symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns the last line of an agent's own output, safe to print.
    pub(crate) fn last_line(&self, job: u64, uid: u32) -> Option<String> {
        let text = read(&self.agent(job), "agent.log", uid)?;
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
        Some(escaped(&line.chars().take(MAX_LINE).collect::<String>()))
    }

    /// Returns whether there is too little space for the files of a job.
    pub(crate) fn is_full(&self) -> bool {
        let disk = rustix::fs::statvfs(&self.root);
        disk.is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) < MIN_SPACE)
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
mod tests;
