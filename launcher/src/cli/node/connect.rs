//! From what the user says, or does not, to a connection with a daemon.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use nix::unistd::{Gid, Group, Uid, User};
use tonic::transport::Channel;
use tonic::{Code, Status};
use xlaunch_proto::exit::ExitCode;
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::{GetRequest, Job, SubmitReply, SubmitRequest};

use xlaunch_agent::Refusal;
use xlaunch_proto::net::connect::cause;

/// The node's daemon listens here.
const NODE: &str = "/run/xlaunch/xlaunch.sock";
/// Names another socket.
const VARIABLE: &str = "XLAUNCH_SOCKET";
/// Time for an answer; the longest comes when a job is on disk.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for a daemon to come back: it may be restarted or upgraded at any time.
const RESTART: Duration = Duration::from_secs(120);
/// Pause before a daemon that is lost is asked again.
const PAUSE: Duration = Duration::from_millis(500);
/// Bytes of an answer: jobs of a long queue.
const ANSWER: usize = 64 << 20;

/// Where the daemon is.
#[derive(Debug, Default, Args)]
pub(in crate::cli) struct At {
    /// The daemon's socket. Default: XLAUNCH_SOCKET, else that of your own daemon, else that of the node's.
    #[arg(long, value_name = "PATH")]
    pub(in crate::cli) socket: Option<PathBuf>,
}

impl At {
    /// Whether the command line names a daemon.
    pub(in crate::cli) fn is_given(&self) -> bool {
        self.socket.is_some()
    }

    /// Where it may listen, the first choice first.
    fn sockets(&self, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
        let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(socket) = self.socket.clone().or_else(|| set(VARIABLE)) {
            return vec![socket];
        }
        let runtime =
            set("XDG_RUNTIME_DIR").unwrap_or_else(|| format!("/run/user/{}", Uid::current()).into());
        vec![runtime.join("xlaunch.sock"), NODE.into()]
    }
}

/// A daemon that has answered.
#[derive(Clone, Debug)]
pub(in crate::cli) struct Daemon {
    socket: PathBuf,
    pub(super) client: NodeClient<Channel>,
}

impl Daemon {
    /// Connects to the first that listens.
    ///
    /// # Errors
    /// None does: where one was looked for, and what to do.
    pub(in crate::cli) async fn connect(at: &At) -> Result<Self, Refusal> {
        let mut problems = Vec::new();
        for socket in at.sockets(|name| std::env::var_os(name)) {
            match crate::client::connect(&socket, PATIENCE).await {
                Ok(channel) => {
                    let client = NodeClient::new(channel).max_decoding_message_size(ANSWER);
                    return Ok(Self { socket, client });
                }
                Err(error) => problems.push((socket, error)),
            }
        }
        Err(unreachable_daemon(&problems))
    }

    /// Adds a job. A request whose answer is lost is made once more, which adds no second job.
    pub(super) async fn submit(&mut self, request: SubmitRequest) -> Result<SubmitReply, Refusal> {
        let mut answer = self.client.submit(request.clone()).await;
        if answer.as_ref().is_err_and(is_lost) {
            tokio::time::sleep(PAUSE).await;
            answer = self.client.submit(request).await;
            if let Err(status) = answer.as_ref()
                && is_lost(status)
            {
                let mut refusal = self.refusal(status);
                refusal.message += "; the job may have been added: `xlaunch jobs` shows it";
                return Err(refusal);
            }
        }
        answer.map(tonic::Response::into_inner).map_err(|status| self.refusal(&status))
    }

    /// A job as it is now.
    pub(super) async fn get(&mut self, job: u64) -> Result<Job, Refusal> {
        let found = self.client.get(GetRequest { job }).await;
        found.map(tonic::Response::into_inner).map_err(|status| self.refusal(&status))
    }

    /// The same, also while the daemon is restarted.
    pub(super) async fn get_again(&mut self, job: u64) -> Result<Job, Refusal> {
        let since = Instant::now();
        loop {
            match self.client.get(GetRequest { job }).await {
                Ok(found) => return Ok(found.into_inner()),
                Err(status) => self.outlast(since, &status).await?,
            }
        }
    }

    /// Follows a job to its end, also through restarts of the daemon; `seen` is shown every change.
    pub(super) async fn follow(&mut self, job: u64, mut seen: impl FnMut(&Job)) -> Result<Job, Refusal> {
        let mut since = Instant::now();
        loop {
            let mut changes = match self.client.watch(GetRequest { job }).await {
                Ok(changes) => changes.into_inner(),
                Err(status) => {
                    self.outlast(since, &status).await?;
                    continue;
                }
            };
            loop {
                match changes.message().await {
                    Ok(Some(job)) => {
                        since = Instant::now();
                        seen(&job);
                        if xlaunch_daemon::view::has_ended(job.state()) {
                            return Ok(job);
                        }
                    }
                    Ok(None) => break self.outlast(since, &Status::unavailable("it is ending")).await?,
                    Err(status) => break self.outlast(since, &status).await?,
                }
            }
        }
    }

    /// Waits a moment for a daemon that was there at `since`, unless it has been away for too long.
    async fn outlast(&self, since: Instant, status: &Status) -> Result<(), Refusal> {
        if !is_lost(status) || since.elapsed() > RESTART {
            return Err(self.refusal(status));
        }
        tokio::time::sleep(PAUSE).await;
        Ok(())
    }

    /// What a failed call means.
    pub(super) fn refusal(&self, status: &Status) -> Refusal {
        let socket = self.socket.display();
        if cause::<tonic::TimeoutExpired>(status).is_some() || status.code() == Code::DeadlineExceeded {
            let seconds = PATIENCE.as_secs();
            let message = format!(
                "the daemon at {socket} has not answered for {seconds} s: is it stopped, or the machine overloaded?"
            );
            return Refusal::new(ExitCode::Retryable, message);
        }
        let exit = match status.code() {
            // Not the daemon's words: the connection broke.
            _ if std::error::Error::source(status).is_some() => {
                let message =
                    format!("the connection to the daemon at {socket} broke: is it being restarted?");
                return Refusal::new(ExitCode::Retryable, message);
            }
            Code::Unimplemented => {
                let message =
                    format!("the daemon at {socket} does not know this call: it is of an older version");
                return Refusal::new(ExitCode::Usage, message);
            }
            Code::Unavailable => {
                let message = format!("the daemon at {socket} takes no calls: {}", status.message());
                return Refusal::new(ExitCode::Retryable, message);
            }
            Code::PermissionDenied | Code::InvalidArgument => ExitCode::Usage,
            Code::ResourceExhausted => ExitCode::Retryable,
            Code::Internal => ExitCode::Internal,
            _ => ExitCode::WorkerFailed,
        };
        Refusal::new(exit, status.message())
    }
}

/// Whether the daemon may not have heard the call, or its answer was lost: asked again, it may answer.
fn is_lost(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded)
        || std::error::Error::source(status).is_some()
}

fn unreachable_daemon(problems: &[(PathBuf, io::Error)]) -> Refusal {
    // Somebody listens there.
    let closed = problems.iter().rfind(|(_, error)| error.kind() == io::ErrorKind::PermissionDenied);
    if let Some((socket, _)) = closed {
        return Refusal::new(ExitCode::Usage, not_for_you(socket));
    }
    let tried: String =
        problems.iter().map(|(socket, error)| format!("\n  {}: {error}", socket.display())).collect();
    let message = format!(
        "no daemon answers; tried:{tried}\n`systemctl start xlaunch` starts the node's, `xlaunch daemon --foreground` \
         one of your own"
    );
    Refusal::new(ExitCode::WorkerFailed, message)
}

/// Who may open this socket, as far as that can be told.
fn not_for_you(socket: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let shown = socket.display();
    let Ok(found) = socket.metadata() else {
        return format!("permission denied: {shown}");
    };
    if found.mode() & 0o060 != 0o060 {
        let owner = User::from_uid(Uid::from_raw(found.uid())).ok().flatten();
        let owner = owner.map_or_else(|| found.uid().to_string(), |user| user.name);
        return format!("permission denied: the daemon at {shown} is for user {owner} alone");
    }
    let group = Group::from_gid(Gid::from_raw(found.gid())).ok().flatten();
    let group = group.map_or_else(|| found.gid().to_string(), |group| group.name);
    let user = User::from_uid(Uid::current()).ok().flatten();
    let user = user.map_or_else(|| "USER".into(), |user| user.name);
    format!(
        "permission denied: {shown} is for members of the group {group}; `sudo usermod -aG {group} {user}` adds you to \
         it, from your next login on"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_wins_over_the_environment_and_the_users_daemon_over_the_nodes() {
        let sockets = |given: Option<&str>, variables: &[(&str, &str)]| {
            let at = At { socket: given.map(PathBuf::from) };
            let found = at.sockets(|name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(*value))
            });
            found.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        let variables = [("XLAUNCH_SOCKET", "/b"), ("XDG_RUNTIME_DIR", "/run/user/7")];
        assert_eq!(sockets(Some("/a"), &variables), "/a");
        assert_eq!(sockets(None, &variables), "/b");
        let own = "/run/user/7/xlaunch.sock /run/xlaunch/xlaunch.sock";
        assert_eq!(sockets(None, &variables[1..]), own);
        assert_eq!(sockets(None, &[("XLAUNCH_SOCKET", ""), variables[1]]), own);
    }

    #[test]
    fn an_error_says_where_a_daemon_was_looked_for_and_how_to_start_one() {
        let missing = |path: &str| (PathBuf::from(path), io::Error::from_raw_os_error(2));
        let refusal = unreachable_daemon(&[missing("/a.sock"), missing("/b.sock")]);
        for words in
            ["/a.sock: No such file", "/b.sock", "systemctl start xlaunch", "xlaunch daemon --foreground"]
        {
            assert!(refusal.message.contains(words), "{}", refusal.message);
        }
        assert_eq!(refusal.exit, ExitCode::WorkerFailed);
    }

    #[test]
    fn a_socket_of_others_is_said_to_be_a_groups_or_a_users() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        fs_err::write(&socket, "").unwrap();
        let text = |mode| {
            fs_err::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).unwrap();
            let denied = (socket.clone(), io::Error::from(io::ErrorKind::PermissionDenied));
            unreachable_daemon(&[denied, ("/x".into(), io::Error::from(io::ErrorKind::NotFound))]).message
        };
        assert!(text(0o660).contains("members of the group "), "{}", text(0o660));
        assert!(text(0o600).contains("for user "), "{}", text(0o600));
    }
}
