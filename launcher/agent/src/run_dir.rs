//! The directory of one run, and its entry in the registry of running launches.
//!
//! The coordinator chooses the run id, so that all nodes of a job write to the same directory, including nodes that
//! join later. A training run is kept: `<job.output>/<job.name>/<run id>/`. A command's run keeps only logs that the
//! user asked for, in `<log dir>/<run id>/`; without them its directory is the registry entry, which is removed with
//! the run.
//!
//! Each node of a job that may have several has its logs in a directory of its own, `node_<rank>/`. Ranks change as
//! nodes join and leave, directories do not: a node whose rank belonged to another node before gets `node_<rank>-2/`.
//!
//! A run whose id was used before gets a directory with the suffix `-2`, and that is its id in files and status;
//! `TORCHELASTIC_RUN_ID` stays as the user wrote it. Nodes agree on the number through the coordinator: the directory
//! is new on all of them, whether they share it or not.

use std::path::{Path, PathBuf};

use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::JobSpec;
use xlaunch_spec::lineage::LATEST;
use xlaunch_spec::paths::create_directories;

use crate::registry::{Entry, SOCKET};
use crate::resolved_command::ResolvedCommand;
use xlaunch_host::naming::{file_name, numbered, unique};
use xlaunch_spec::refusal::Refusal;

/// Mode of kept directories, before the umask.
const KEPT_DIR_MODE: u32 = 0o777;

/// A run's directory and its socket.
#[derive(Debug)]
pub struct RunDir {
    /// Directory of the run.
    pub path: PathBuf,
    /// Directory for this node's output: `<logs>/attempt_<n>/<local rank>/`.
    pub logs: PathBuf,
    /// Socket of the agent.
    pub socket: PathBuf,
    /// Run id, as the name of a directory.
    pub id: String,
    /// Registry entry; `None` under a daemon, which knows the run itself.
    entry: Option<Entry>,
}

/// The place of a node in a job that may have several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePlace {
    pub node_rank: u32,
    /// Counts the runs with this id, from 1.
    pub run_number: u32,
}

/// Returns the number of the first run with this id that has no directory in `parent`.
pub fn free_run(parent: &Path, run_id: &str) -> u32 {
    let id = file_name(run_id);
    let is_free = |number: &u32| parent.join(numbered(&id, *number)).symlink_metadata().is_err();
    (1..).find(is_free).unwrap_or(1)
}

/// Returns the directory of one attempt's files, below [`RunDir::logs`].
pub(crate) fn attempt_dir(logs: &Path, attempt: u32) -> PathBuf {
    logs.join(format!("attempt_{attempt}"))
}

/// Returns the directory of a rank's files in one attempt.
pub fn rank_dir(logs: &Path, attempt: u32, local_rank: u32) -> PathBuf {
    attempt_dir(logs, attempt).join(local_rank.to_string())
}

impl RunDir {
    /// Creates the directory of a single-node training run, with `job.json` in it and the link `latest` beside it. Here
    /// and below, `entry` belongs to an agent that is already listening.
    pub fn create(spec: &JobSpec, run_id: &str, entry: Option<Entry>) -> Result<Self, Refusal> {
        let (path, id) = Self::training(spec, run_id)?;
        let entry = entry.map_or_else(|| Entry::create(&spec.job.name, &id), Ok)?;
        entry.link_run_dir(&path).map_err(|error| run_dir_error(spec, &error))?;
        Ok(Self { logs: path.join("logs"), socket: entry.socket(), path, id, entry: Some(entry) })
    }

    /// Same as [`create`](Self::create), for a daemon's agent, whose logs and socket are in `agent`.
    pub fn create_for_agent(spec: &JobSpec, run_id: &str, agent: &Path) -> Result<Self, Refusal> {
        let (path, id) = Self::training(spec, run_id)?;
        Ok(Self { logs: agent.join("logs"), socket: agent.join(SOCKET), path, id, entry: None })
    }

    /// Creates the directory of a training run that may have several nodes, which may share it. The node of rank 0
    /// writes `job.json` and the link `latest`.
    pub fn for_node(
        spec: &JobSpec,
        run_id: &str,
        place: NodePlace,
        entry: Option<Entry>,
    ) -> Result<Self, Refusal> {
        let NodePlace { node_rank, run_number } = place;
        let jobs = spec.runs_dir();
        let id = numbered(&file_name(run_id), run_number);
        let path = jobs.join(&id);
        let refuse = |error: std::io::Error| run_dir_error(spec, &error);
        create_directories(&path).map_err(refuse)?;
        if node_rank == 0 {
            describe(spec, &path).map_err(refuse)?;
            update_latest_link(&jobs, &id);
        }
        let entry = entry.map_or_else(|| Entry::create(&spec.job.name, &id), Ok)?;
        Self::of_node(path, id, node_rank, entry).map_err(refuse)
    }

    /// Creates this node's part of a run's directory.
    fn of_node(path: PathBuf, id: String, node_rank: u32, entry: Entry) -> std::io::Result<Self> {
        let (logs, _) = unique(&path, &format!("node_{node_rank}"), KEPT_DIR_MODE)?;
        // The run's directory links to only one agent's socket, that of rank 0.
        entry.link_run_dir(if node_rank == 0 { &path } else { &logs })?;
        Ok(Self { logs, socket: entry.socket(), path, id, entry: Some(entry) })
    }

    fn training(spec: &JobSpec, run_id: &str) -> Result<(PathBuf, String), Refusal> {
        let jobs = spec.runs_dir();
        let refuse = |error: std::io::Error| run_dir_error(spec, &error);
        create_directories(&jobs).map_err(refuse)?;
        let (path, id) = unique(&jobs, &file_name(run_id), KEPT_DIR_MODE).map_err(refuse)?;
        describe(spec, &path).map_err(refuse)?;
        update_latest_link(&jobs, &id);
        Ok((path, id))
    }

    /// Creates the directory of a command's run. `place` is given if the job may have several nodes.
    pub fn for_command(
        command: &ResolvedCommand,
        run_id: &str,
        place: Option<NodePlace>,
        entry: Option<Entry>,
    ) -> Result<Self, Refusal> {
        let id = file_name(run_id);
        let new = |id: &str| Entry::create(&command.name, id);
        let Some(logs) = command.spec.logs.kept_in() else {
            let entry = entry.map_or_else(|| new(&id), Ok)?;
            let path = entry.path().to_path_buf();
            return Ok(Self { logs: path.clone(), socket: entry.socket(), path, id, entry: Some(entry) });
        };
        let refuse = |error: std::io::Error| {
            let message = format!(
                "failed to create logs in {}: {error}; choose another directory with --log-dir",
                logs.display()
            );
            Refusal::new(ExitCode::Usage, message)
        };
        create_directories(logs).map_err(refuse)?;
        // Workers may change their working directory, so the path is absolute.
        let logs = std::path::absolute(logs).map_err(refuse)?;
        if let Some(NodePlace { node_rank, run_number }) = place {
            let id = numbered(&id, run_number);
            let path = logs.join(&id);
            create_directories(&path).map_err(refuse)?;
            let entry = entry.map_or_else(|| new(&id), Ok)?;
            return Self::of_node(path, id, node_rank, entry).map_err(refuse);
        }
        let (path, id) = unique(&logs, &id, KEPT_DIR_MODE).map_err(refuse)?;
        let entry = entry.map_or_else(|| new(&id), Ok)?;
        entry.link_run_dir(&path).map_err(refuse)?;
        Ok(Self { logs: path.clone(), socket: entry.socket(), path, id, entry: Some(entry) })
    }

    /// Same as [`for_command`](Self::for_command), for a daemon's agent: uses the agent's directory, which is kept.
    pub fn for_agent(run_id: &str, agent: &Path) -> Self {
        let id = file_name(run_id);
        Self { logs: agent.join("logs"), socket: agent.join(SOCKET), path: agent.into(), id, entry: None }
    }

    /// Links the run's directory to this agent's socket, because this node has rank 0 now: users find the agent through
    /// that directory.
    pub(crate) fn lead(&self) {
        if let Some(entry) = self.entry.as_ref().filter(|entry| entry.path() != self.path) {
            // Errors are ignored: `xlaunch status` finds the launch by its name too.
            let _ = entry.link_socket(&self.path);
        }
    }

    /// Creates the run's directories again if they were deleted while it runs, as programs that clean temporary
    /// directories do. May wait for the file system of the logs.
    ///
    /// # Errors
    /// Fails if they cannot be created.
    pub(crate) fn restore(&self) -> std::io::Result<()> {
        // The private directory comes first, because it may contain the others.
        self.restore_private()?;
        for dir in [&self.path, &self.logs] {
            fs_err::create_dir_all(dir)?;
        }
        self.entry.as_ref().map_or(Ok(()), Entry::restore_link)
    }

    /// Creates the private directory again if it was deleted. Returns whether it was missing.
    ///
    /// # Errors
    /// Fails if it cannot be created.
    pub(crate) fn restore_private(&self) -> std::io::Result<bool> {
        self.entry.as_ref().map_or(Ok(false), Entry::restore)
    }

    /// Returns a warning if a training run has no link `latest` next to it.
    pub fn without_link(&self) -> Option<String> {
        let latest = self.path.parent()?.join(LATEST);
        let problem = match fs_err::symlink_metadata(&latest) {
            Ok(found) if found.is_symlink() => return None,
            Ok(_) => "is not the link to the newest run, but a copy of a run: remove it",
            Err(_) => "cannot be made: the file system has no links",
        };
        Some(format!("{} {problem}; this run is in {}", latest.display(), self.path.display()))
    }

    /// Returns the directory that is removed with the run, regardless of how it ends.
    pub fn private(&self) -> Option<&Path> {
        self.entry.as_ref().map(Entry::path)
    }

    /// Moves a file that outlives the run out of the private directory: beside it, with the run's name in front.
    /// Returns its path.
    pub(crate) fn keep(&self, file: PathBuf) -> PathBuf {
        let kept = self.private().filter(|private| file.starts_with(private)).and_then(|private| {
            let mut kept = private.as_os_str().to_owned();
            kept.push("-");
            kept.push(file.file_name()?);
            fs_err::rename(&file, &kept).ok()?;
            Some(PathBuf::from(kept))
        });
        kept.unwrap_or(file)
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // The entry removes itself. A dangling link to its socket would mislead `xlaunch status`.
        if self.private().is_some_and(|private| private != self.path) {
            for dir in [&self.path, &self.logs] {
                let link = dir.join(SOCKET);
                // A shared directory also has links of other nodes' agents.
                if fs_err::read_link(&link).is_ok_and(|socket| socket == self.socket) {
                    let _ = fs_err::remove_file(link);
                }
            }
        }
    }
}

fn run_dir_error(spec: &JobSpec, error: &std::io::Error) -> Refusal {
    let jobs = spec.runs_dir();
    let message = format!(
        "failed to create a run in {}: {error}; choose another directory with job.output",
        jobs.display()
    );
    Refusal::new(ExitCode::Usage, message)
}

/// Writes `job.json`.
fn describe(spec: &JobSpec, path: &Path) -> std::io::Result<()> {
    fs_err::write(path.join("job.json"), serde_json::to_vec_pretty(spec).unwrap_or_default())
}

/// Points the link `latest` to this run. The link is a convenience, so the run does not depend on it:
/// [`RunDir::without_link`] says when it is missing.
fn update_latest_link(jobs: &Path, id: &str) {
    let (link, new) = (jobs.join(LATEST), jobs.join(format!(".latest-{id}")));
    if fs_err::os::unix::fs::symlink(id, &new).is_ok() && fs_err::rename(&new, &link).is_err() {
        let _ = fs_err::remove_file(&new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolved_command::tests::command;

    #[test]
    fn runs_of_one_name_get_different_directories() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = JobSpec::default();
        spec.job.output = dir.path().display().to_string();
        spec.job.name = "n".into();
        let (a, b) = (RunDir::create(&spec, "r", None).unwrap(), RunDir::create(&spec, "r", None).unwrap());
        assert_ne!(a.path, b.path);
        let latest = fs_err::canonicalize(dir.path().join("n/latest")).unwrap();
        assert_eq!(latest, fs_err::canonicalize(&b.path).unwrap());
        assert_eq!(fs_err::read_link(a.path.join(SOCKET)).unwrap(), a.socket);
        let (path, private) = (a.path.clone(), a.private().unwrap().to_path_buf());
        drop(a);
        assert!(path.join("job.json").exists() && !path.join(SOCKET).exists() && !private.exists());
    }

    #[test]
    fn directory_in_place_of_the_link_to_the_newest_run_is_reported_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = JobSpec::default();
        (spec.job.output, spec.job.name) = (dir.path().display().to_string(), "n".into());
        assert_eq!(RunDir::create(&spec, "a", None).unwrap().without_link(), None);
        let latest = dir.path().join("n/latest");
        fs_err::remove_file(&latest).unwrap();
        fs_err::create_dir(&latest).unwrap();
        let run = RunDir::create(&spec, "b", None).unwrap();
        let problem = run.without_link().unwrap();
        assert!(problem.contains("n/latest is not the link") && problem.ends_with("n/b"), "{problem}");
        let mut names: Vec<_> =
            fs_err::read_dir(dir.path().join("n")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["a", "b", "latest"]);
    }

    #[test]
    fn unwritable_output_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs_err::write(&file, "").unwrap();
        let mut spec = JobSpec::default();
        spec.job.output = file.display().to_string();
        let refusal = RunDir::create(&spec, "r", None).unwrap_err();
        assert!(refusal.exit == ExitCode::Usage && refusal.message.contains("job.output"), "{refusal:?}");
    }

    #[test]
    fn command_run_without_log_dir_leaves_nothing() {
        use std::os::unix::fs::PermissionsExt;
        let run = RunDir::for_command(&command("train"), "r", None, None).unwrap();
        assert_eq!(fs_err::metadata(&run.path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(run.socket.starts_with(&run.path) && run.private() == Some(&*run.path), "{run:?}");
        let evidence = run.logs.join("attempt_0/0/hang.txt");
        fs_err::create_dir_all(evidence.parent().unwrap()).unwrap();
        fs_err::write(&evidence, "evidence").unwrap();
        let kept = run.keep(evidence);
        let path = run.path.clone();
        drop(run);
        assert!(!path.exists());
        assert_eq!(fs_err::read_to_string(&kept).unwrap(), "evidence", "unless it is to outlive the run");
        fs_err::remove_file(kept).unwrap();
    }

    #[test]
    fn requested_logs_are_kept_and_runs_with_the_same_id_are_separate() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = command("train");
        command.spec.logs.dir = Some(dir.path().join("logs"));
        let [a, b] = [(); 2].map(|()| RunDir::for_command(&command, "../my run", None, None).unwrap());
        assert_eq!((a.id.as_str(), b.id.as_str()), ("_._my_run", "_._my_run-2"));
        let logs = dir.path().join("logs");
        assert_eq!((&a.path, &b.path), (&logs.join("_._my_run"), &logs.join("_._my_run-2")));
        let path = a.path.clone();
        drop((a, b));
        assert!(path.exists() && !path.join(SOCKET).exists());
    }

    #[test]
    fn nodes_of_a_later_run_with_the_same_id_share_another_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (mut spec, mut logged) = (JobSpec::default(), command("train"));
        (spec.job.output, spec.job.name) = (dir.path().display().to_string(), "n".into());
        logged.spec.logs.dir = Some(dir.path().join("logs"));
        for number in 1..=3 {
            for parent in ["n", "logs"] {
                assert_eq!(free_run(&dir.path().join(parent), "r/1"), number);
            }
            let id = if number == 1 { "r_1".to_owned() } else { format!("r_1-{number}") };
            for node_rank in 0..2 {
                let place = NodePlace { node_rank, run_number: number };
                let training = RunDir::for_node(&spec, "r/1", place, None).unwrap();
                let command = RunDir::for_command(&logged, "r/1", Some(place), None).unwrap();
                assert_eq!((&training.path, &training.id), (&dir.path().join("n").join(&id), &id));
                assert_eq!((&command.path, &command.id), (&dir.path().join("logs").join(&id), &id));
                assert!(command.logs.ends_with(format!("node_{node_rank}")), "{command:?}");
            }
        }
    }

    #[test]
    fn nodes_share_the_directory_of_a_run_and_never_their_logs() {
        let dir = tempfile::tempdir().unwrap();
        let (mut spec, mut logged) = (JobSpec::default(), command("train"));
        (spec.job.output, spec.job.name) = (dir.path().display().to_string(), "n".into());
        logged.spec.logs.dir = Some(dir.path().join("logs"));
        let place = |node_rank| NodePlace { node_rank, run_number: 1 };
        let training = |rank| RunDir::for_node(&spec, "r", place(rank), None).unwrap();
        let command = |rank| RunDir::for_command(&logged, "r", Some(place(rank)), None).unwrap();
        for (path, create) in [("n/r", &training as &dyn Fn(u32) -> RunDir), ("logs/r", &command)] {
            // The last node joins after the first has taken rank 0.
            let (zero, one, later) = (create(0), create(1), create(1));
            let path = dir.path().join(path);
            assert!([&zero, &one, &later].iter().all(|run| run.path == path && run.id == "r"), "{zero:?}");
            let names =
                [&zero, &one, &later].map(|run| run.logs.strip_prefix(&path).unwrap().to_str().unwrap());
            assert_eq!(names, ["node_0", "node_1", "node_1-2"]);
            assert_eq!(fs_err::read_link(path.join(SOCKET)).unwrap(), zero.socket);
            drop(zero);
            assert!(!path.join(SOCKET).is_symlink());
            one.lead();
            assert_eq!(fs_err::read_link(path.join(SOCKET)).unwrap(), one.socket);
        }
    }
}
