//! The directory of one run: `<job.output>/<job.name>/<UTC time>/`.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::spec::JobSpec;

use crate::Refusal;

/// Name of the agent's socket in a run's directory.
pub const SOCKET: &str = "agent.sock";
/// Longest path that a unix socket can have.
const MAX_SOCKET_PATH: usize = 100;

/// A run's directory and its socket.
#[derive(Clone, Debug)]
pub struct RunDir {
    /// The directory.
    pub path: PathBuf,
    /// Where the agent listens: in the directory, or in a private one where the path would be too long.
    pub socket: PathBuf,
    /// Name of the run, unique among the job's.
    pub id: String,
}

/// The directory of a job's runs.
pub fn job_dir(spec: &JobSpec) -> PathBuf {
    Path::new(&spec.job.output).join(&spec.job.name)
}

impl RunDir {
    /// Creates the directory of a run that starts now, with the job description in it and `latest` beside it.
    pub fn create(spec: &JobSpec) -> Result<Self, Refusal> {
        let jobs = job_dir(spec);
        let refuse = |error: std::io::Error| {
            let message =
                format!("failed to create a run in {}: {error}; job.output says where", jobs.display());
            Refusal::new(ExitCode::Usage, message)
        };
        fs_err::create_dir_all(&jobs).map_err(refuse)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (path, id) = Self::unique(&jobs, &timestamp(now)).map_err(refuse)?;
        let description = serde_json::to_vec_pretty(spec).unwrap_or_default();
        fs_err::write(path.join("job.json"), description).map_err(refuse)?;
        point_latest(&jobs, &id);
        let socket = path.join(SOCKET);
        let socket = if socket.as_os_str().len() <= MAX_SOCKET_PATH {
            socket
        } else {
            private_socket(&path, &id).map_err(refuse)?
        };
        Ok(Self { path, socket, id })
    }

    fn unique(jobs: &Path, name: &str) -> std::io::Result<(PathBuf, String)> {
        for attempt in 1.. {
            let id = if attempt == 1 { name.to_string() } else { format!("{name}-{attempt}") };
            match fs_err::create_dir(jobs.join(&id)) {
                Ok(()) => return Ok((jobs.join(&id), id)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("the loop has no end")
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // Left behind, the socket would make `xlaunch status` ask nobody. One that is gone needs no removal.
        let _ = fs_err::remove_file(&self.socket);
        let _ = fs_err::remove_file(self.path.join(SOCKET));
        if self.socket.parent() != Some(&self.path) {
            let _ = self.socket.parent().map(fs_err::remove_dir);
        }
    }
}

/// A socket in a directory of its own below the temporary one, with a link from the run's directory.
fn private_socket(run: &Path, id: &str) -> std::io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let dir = std::env::temp_dir().join(format!("xlaunch-{id}-{}", std::process::id()));
    std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
    let socket = dir.join(SOCKET);
    fs_err::os::unix::fs::symlink(&socket, run.join(SOCKET))?;
    Ok(socket)
}

/// A convenience: a run works without it.
fn point_latest(jobs: &Path, id: &str) {
    let (link, new) = (jobs.join("latest"), jobs.join(format!(".latest-{id}")));
    if fs_err::os::unix::fs::symlink(id, &new).is_ok() {
        let _ = fs_err::rename(&new, &link);
    }
}

/// `20261121-045035` in UTC, by the civil calendar (Hinnant's days-to-date algorithm).
pub fn timestamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_follow_the_calendar() {
        assert_eq!(timestamp(0), "19700101-000000");
        assert_eq!(timestamp(951_827_696), "20000229-123456");
        assert_eq!(timestamp(1_795_236_635), "20261121-045035");
    }

    #[test]
    fn runs_of_one_second_do_not_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = JobSpec::default();
        spec.job.output = dir.path().display().to_string();
        spec.job.name = "n".into();
        let (a, b) = (RunDir::create(&spec).unwrap(), RunDir::create(&spec).unwrap());
        assert_ne!(a.path, b.path);
        let latest = fs_err::canonicalize(dir.path().join("n/latest")).unwrap();
        assert_eq!(latest, fs_err::canonicalize(&b.path).unwrap());
    }

    #[test]
    fn an_output_that_cannot_be_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs_err::write(&file, "").unwrap();
        let mut spec = JobSpec::default();
        spec.job.output = file.display().to_string();
        let refusal = RunDir::create(&spec).unwrap_err();
        assert!(refusal.exit == ExitCode::Usage && refusal.message.contains("job.output"), "{refusal:?}");
    }
}
