//! Client of the node's daemon. It finds the daemon's socket, survives restarts of the daemon, and turns failed calls
//! into messages.

use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use nix::unistd::{Gid, Group, Uid, User};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use xlaunch_proto::connect::cause;
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::{
    CancelRequest, CheckpointReply, DrainRequest, ExamineReply, ExamineRequest, GetRequest, HistoryRequest,
    Job, JobAccount, JobCheckpointRequest, JobLogsRequest, JobStacksRequest, ListRequest, LogsRequest,
    NodeJobState, NodeStatus, NodeStatusRequest, RankStacks, StacksRequest, SubmitReply, SubmitRequest,
    UpdateRequest,
};
use xlaunch_spec::exit::ExitCode;

use xlaunch_daemon::view::has_ended;
use xlaunch_spec::refusal::Refusal;

/// Socket of the node's daemon.
const SYSTEM_SOCKET: &str = "/run/xlaunch/xlaunch.sock";
/// Environment variable that names a different socket.
const SOCKET_VARIABLE: &str = "XLAUNCH_SOCKET";
/// Timeout of a call. The slowest call is a submission, which returns when the job is on disk.
const DAEMON_CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum duration of a restart or upgrade of the daemon during which a job can still be followed.
const DAEMON_RESTART_TIMEOUT: Duration = Duration::from_secs(120);
const RECONNECT_DELAY: Duration = Duration::from_millis(500);
/// Largest reply: the list of a long queue. tonic's default is 4 MiB.
const MAX_REPLY_BYTES: usize = 64 << 20;

/// The daemon to call.
#[derive(Debug, Default, Args)]
pub(crate) struct DaemonAddress {
    /// Socket of the daemon [default: $XLAUNCH_SOCKET, or that of your own daemon, or of the node's]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

impl DaemonAddress {
    /// Returns whether the command line names a daemon.
    pub(crate) fn is_given(&self) -> bool {
        self.socket.is_some()
    }

    /// Returns the sockets to try, in order.
    fn sockets(&self, variable: impl Fn(&str) -> Option<OsString>) -> Vec<Candidate> {
        let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(socket) = self.socket.clone().or_else(|| set(SOCKET_VARIABLE)) {
            return vec![Candidate { socket, any_owner: true }];
        }
        let runtime =
            set("XDG_RUNTIME_DIR").unwrap_or_else(|| format!("/run/user/{}", Uid::current()).into());
        let own = Candidate { socket: runtime.join("xlaunch.sock"), any_owner: false };
        vec![own, Candidate { socket: SYSTEM_SOCKET.into(), any_owner: true }]
    }
}

/// A socket on which a daemon may be listening.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) socket: PathBuf,
    /// False for the default socket of the user's own daemon, which another user may have created.
    pub(crate) any_owner: bool,
}

/// Refuses a default socket that another user may have created. Root has that user's `XDG_RUNTIME_DIR` after `su` or
/// `sudo -E`, and a submission contains the whole environment.
fn check_owner(socket: &Path) -> io::Result<()> {
    let trusted = [0, Uid::current().as_raw()];
    for path in socket.parent().into_iter().chain([socket]) {
        let owner = std::fs::metadata(path)?.uid();
        if !trusted.contains(&owner) {
            let message =
                format!("{} belongs to user {owner}; --socket uses it nevertheless", path.display());
            return Err(io::Error::other(message));
        }
    }
    Ok(())
}

/// Returns the maximum number of items to request in the next page; 0 without a limit.
fn missing<T>(limit: Option<u32>, items: &[T]) -> u32 {
    limit.map_or(0, |limit| limit.saturating_sub(u32::try_from(items.len()).unwrap_or(u32::MAX)))
}

/// A connection to a daemon.
#[derive(Clone, Debug)]
pub(crate) struct DaemonClient {
    socket: PathBuf,
    client: NodeClient<Channel>,
}

impl DaemonClient {
    /// Connects to the first socket on which a daemon listens.
    ///
    /// # Errors
    /// No daemon listens: the message lists the sockets tried and how to start one.
    pub(crate) async fn connect(address: &DaemonAddress) -> Result<Self, Refusal> {
        Self::connect_to_first(address.sockets(|name| std::env::var_os(name))).await
    }

    /// Connects to the first of these sockets.
    pub(crate) async fn connect_to_first(sockets: Vec<Candidate>) -> Result<Self, Refusal> {
        let mut problems = Vec::new();
        for Candidate { socket, any_owner } in sockets {
            let owner = if any_owner { Ok(()) } else { check_owner(&socket) };
            let connected = match owner {
                Ok(()) => super::connect(&socket, DAEMON_CALL_TIMEOUT).await,
                Err(error) => Err(error),
            };
            match connected {
                Ok(channel) => {
                    if let Some(what) = super::suspended(&socket).await {
                        let message = format!("the daemon at {} {what}", socket.display());
                        return Err(Refusal::new(ExitCode::Retryable, message));
                    }
                    let client = NodeClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES);
                    return Ok(Self { socket, client });
                }
                Err(error) => problems.push((socket, error)),
            }
        }
        Err(no_daemon(&problems))
    }

    /// Adds a job. If the reply is lost, the request is sent once more; its id prevents a second job.
    pub(crate) async fn submit(&mut self, request: SubmitRequest) -> Result<SubmitReply, Refusal> {
        let mut reply = self.client.submit(request.clone()).await;
        if reply.as_ref().is_err_and(is_connection_loss) {
            tokio::time::sleep(RECONNECT_DELAY).await;
            reply = self.client.submit(request).await;
            if let Err(status) = reply.as_ref()
                && is_connection_loss(status)
            {
                let mut refusal = self.refusal(status);
                refusal.message += "; the job may have been added: check `xlaunch jobs`";
                return Err(refusal);
            }
        }
        self.check(reply)
    }

    /// Fetches the newest jobs page by page: at most `limit`, or all of them.
    pub(crate) async fn list(&mut self, ended: bool, limit: Option<u32>) -> Result<Vec<Job>, Refusal> {
        let (mut jobs, mut before) = (Vec::new(), 0);
        loop {
            let reply = self.client.list(ListRequest { ended, limit: missing(limit, &jobs), before }).await;
            let page = self.check(reply)?;
            before = page.jobs.last().map_or(0, |job| job.id);
            jobs.extend(page.jobs);
            if !page.more || before == 0 || missing(limit, &jobs) == 0 && limit.is_some() {
                return Ok(jobs);
            }
        }
    }

    /// Fetches the newest jobs that have ended, oldest first: at most `limit`, or all of them.
    pub(crate) async fn history(
        &mut self,
        request: HistoryRequest,
        limit: Option<u32>,
    ) -> Result<Vec<JobAccount>, Refusal> {
        let (mut jobs, mut before) = (Vec::new(), 0);
        loop {
            let request = HistoryRequest { limit: missing(limit, &jobs), before, ..request.clone() };
            let reply = self.client.history(request).await;
            let page = self.check(reply)?;
            jobs.extend(page.jobs.into_iter().rev());
            // Offsets must decrease: a faulty daemon that repeats a page would cause an endless loop.
            let is_last = page.older == 0 || (before != 0 && page.older >= before);
            if is_last || missing(limit, &jobs) == 0 && limit.is_some() {
                jobs.reverse();
                return Ok(jobs);
            }
            before = page.older;
        }
    }

    pub(crate) async fn get(&mut self, job: u64) -> Result<Job, Refusal> {
        let reply = self.client.get(GetRequest { job }).await;
        self.check(reply)
    }

    /// Like [`get`](Self::get), but waits while the daemon restarts.
    pub(crate) async fn get_again(&mut self, job: u64) -> Result<Job, Refusal> {
        let lost_since = Instant::now();
        loop {
            match self.client.get(GetRequest { job }).await {
                Ok(reply) => return Ok(reply.into_inner()),
                Err(status) => self.wait_for_restart(lost_since, &status).await?,
            }
        }
    }

    /// Follows a job until it has ended, across restarts of the daemon. `on_change` sees every state of the job.
    pub(crate) async fn follow(&mut self, job: u64, mut on_change: impl FnMut(&Job)) -> Result<Job, Refusal> {
        let mut last_reply = Instant::now();
        loop {
            let mut changes = match self.client.watch(GetRequest { job }).await {
                Ok(changes) => changes.into_inner(),
                Err(status) => {
                    self.wait_for_restart(last_reply, &status).await?;
                    continue;
                }
            };
            let lost = loop {
                match changes.message().await {
                    Ok(Some(job)) => {
                        last_reply = Instant::now();
                        on_change(&job);
                        if has_ended(job.state()) {
                            return Ok(job);
                        }
                    }
                    Ok(None) => break Status::unavailable("it is shutting down"),
                    Err(status) => break status,
                }
            };
            self.wait_for_restart(last_reply, &lost).await?;
        }
    }

    /// Ends a job; with `force`, kills it. The reply says whether the job is stopping, was cancelled, or had ended.
    pub(crate) async fn cancel(&mut self, job: u64, force: bool) -> Result<Job, Refusal> {
        let reply = self.client.cancel(CancelRequest { job, force }).await;
        self.check(reply)
    }

    /// Saves a checkpoint of a running job; returns when it is complete.
    pub(crate) async fn checkpoint(&mut self, job: u64) -> Result<CheckpointReply, Refusal> {
        let reply = self.client.checkpoint(JobCheckpointRequest { job }).await;
        let mut replies = self.check(reply)?;
        match replies.message().await {
            Ok(Some(saved)) => Ok(saved),
            Ok(None) => Err(self.refusal(&Status::unavailable("it is shutting down"))),
            Err(status) => Err(self.refusal(&status)),
        }
    }

    /// Reports what the processes of a running job are doing.
    pub(crate) async fn stacks(
        &mut self,
        job: u64,
        stacks: StacksRequest,
    ) -> Result<Vec<RankStacks>, Refusal> {
        let reply = self.client.stacks(JobStacksRequest { job, stacks: Some(stacks) }).await;
        let (mut replies, mut all) = (self.check(reply)?, Vec::new());
        loop {
            match replies.message().await {
                Ok(Some(reply)) => all.push(reply),
                Ok(None) if all.is_empty() => {
                    return Err(self.refusal(&Status::unavailable("it is shutting down")));
                }
                Ok(None) => return Ok(xlaunch_agent::stacks::join(all)),
                Err(status) => return Err(self.refusal(&status)),
            }
        }
    }

    /// Holds or releases a queued job, or changes its priority.
    pub(crate) async fn update(&mut self, request: UpdateRequest) -> Result<Job, Refusal> {
        let reply = self.client.update(request).await;
        self.check(reply)
    }

    pub(crate) async fn drain(&mut self, request: DrainRequest) -> Result<NodeStatus, Refusal> {
        let reply = self.client.drain(request).await;
        self.check(reply)
    }

    /// Examines idle GPUs. `on_start` gets the GPUs that are examined; the result is the last message.
    pub(crate) async fn examine(
        &mut self,
        request: ExamineRequest,
        on_start: impl FnOnce(&ExamineReply),
    ) -> Result<ExamineReply, Refusal> {
        let reply = self.client.examine(request).await;
        let mut replies = self.check(reply)?;
        let mut on_start = Some(on_start);
        loop {
            match replies.message().await {
                Ok(Some(reply)) if reply.done => return Ok(reply),
                Ok(Some(reply)) => {
                    on_start.take().into_iter().for_each(|on_start| on_start(&reply));
                }
                Ok(None) => return Err(self.refusal(&Status::unavailable("it is shutting down"))),
                Err(status) => return Err(self.refusal(&status)),
            }
        }
    }

    pub(crate) async fn node(&mut self) -> Result<NodeStatus, Refusal> {
        let reply = self.client.status(NodeStatusRequest {}).await;
        self.check(reply)
    }

    /// Waits until a job has started or ended, across restarts of the daemon.
    pub(crate) async fn wait_until_started(&mut self, job: u64) -> Result<(), Refusal> {
        use NodeJobState::{Queued, Starting};
        while matches!(self.get_again(job).await?.state(), Queued | Starting) {
            tokio::time::sleep(RECONNECT_DELAY).await;
        }
        Ok(())
    }

    /// Passes the output of a rank of the job to `print`, chunk by chunk. After a restart of the daemon, a followed log
    /// continues at the same position.
    pub(crate) async fn logs<E: From<Refusal>>(
        &mut self,
        job: u64,
        mut logs: LogsRequest,
        mut print: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut lost_since = None;
        loop {
            let mut lost = match self.client.logs(JobLogsRequest { job, logs: Some(logs) }).await {
                Err(status) => Some(status),
                Ok(reply) => {
                    let mut chunks = reply.into_inner();
                    lost_since = None;
                    loop {
                        match chunks.message().await {
                            Ok(Some(chunk)) => {
                                logs.after = chunk.position.or(logs.after);
                                print(&chunk.bytes)?;
                            }
                            Ok(None) => break None,
                            Err(status) => break Some(status),
                        }
                    }
                }
            };
            // A daemon that shuts down may end the stream without an error.
            if lost.is_none() && logs.follow && !has_ended(self.get_again(job).await?.state()) {
                lost = Some(Status::unavailable("it is shutting down"));
            }
            match lost {
                None => return Ok(()),
                Some(status) if logs.follow => {
                    self.wait_for_restart(*lost_since.get_or_insert_with(Instant::now), &status).await?;
                    self.wait_until_started(job).await?;
                }
                Some(status) => return Err(self.refusal(&status).into()),
            }
        }
    }

    fn check<T>(&self, reply: Result<Response<T>, Status>) -> Result<T, Refusal> {
        reply.map(Response::into_inner).map_err(|status| self.refusal(&status))
    }

    /// Waits before another attempt to reach a daemon that has not answered since `lost_since`.
    ///
    /// # Errors
    /// The call failed for another reason, or the daemon has been unreachable for too long.
    async fn wait_for_restart(&self, lost_since: Instant, status: &Status) -> Result<(), Refusal> {
        if !is_connection_loss(status) || lost_since.elapsed() > DAEMON_RESTART_TIMEOUT {
            return Err(self.refusal(status));
        }
        tokio::time::sleep(RECONNECT_DELAY).await;
        Ok(())
    }

    /// Returns the message and exit code for a failed call.
    fn refusal(&self, status: &Status) -> Refusal {
        let socket = self.socket.display();
        let (exit, message) = match status.code() {
            _ if cause::<tonic::TimeoutExpired>(status).is_some() => (ExitCode::Retryable, self.timed_out()),
            Code::DeadlineExceeded => (ExitCode::Retryable, self.timed_out()),
            // Only the client's side attaches a source to a status: the connection broke.
            _ if std::error::Error::source(status).is_some() => {
                let message = format!(
                    "lost the connection to the daemon at {socket}: it may be restarting{}",
                    hint(&self.socket)
                );
                (ExitCode::Retryable, message)
            }
            Code::Unimplemented => {
                let message =
                    format!("the daemon at {socket} does not support this call: it is an older version");
                (ExitCode::Usage, message)
            }
            Code::Unavailable => {
                let message = format!("the daemon at {socket} refuses: {}", status.message());
                (ExitCode::Retryable, message)
            }
            Code::PermissionDenied | Code::InvalidArgument => (ExitCode::Usage, status.message().into()),
            Code::ResourceExhausted => (ExitCode::Retryable, status.message().into()),
            Code::Internal => (ExitCode::Internal, status.message().into()),
            _ => (ExitCode::WorkerFailed, status.message().into()),
        };
        Refusal::new(exit, message)
    }

    fn timed_out(&self) -> String {
        format!(
            "the daemon at {} did not answer within {} s: it may be stopped, or the machine overloaded{}",
            self.socket.display(),
            DAEMON_CALL_TIMEOUT.as_secs(),
            hint(&self.socket)
        )
    }
}

/// Returns the end of a message about a daemon that does not answer: where to look. systemd accepts connections to the
/// node's daemon even if that does not start.
fn hint(socket: &Path) -> &'static str {
    if socket == Path::new(SYSTEM_SOCKET) {
        "; `systemctl status xlaunch` shows its state, and why it does not start, such as an error in daemon.toml"
    } else {
        ""
    }
}

/// Returns whether the request or its reply was lost, so that repeating an idempotent call may succeed.
fn is_connection_loss(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded)
        || std::error::Error::source(status).is_some()
}

fn no_daemon(problems: &[(PathBuf, io::Error)]) -> Refusal {
    // If the socket exists, a daemon listens there, so errors of the other sockets do not matter. It is unknown in a
    // directory that may not be searched, such as root's `XDG_RUNTIME_DIR` after `su USER`.
    let denied = problems.iter().filter(|(_, error)| error.kind() == io::ErrorKind::PermissionDenied);
    if let Some((socket, found)) =
        denied.rev().find_map(|(socket, _)| Some((socket, socket.metadata().ok()?)))
    {
        return Refusal::new(ExitCode::Usage, permission_denied(socket, &found));
    }
    let tried: String =
        problems.iter().map(|(socket, error)| format!("\n  {}: {error}", socket.display())).collect();
    let message = format!(
        "no daemon is listening; tried:{tried}\n`systemctl start xlaunch` starts the node's daemon, `xlaunch daemon \
         --foreground` one of your own"
    );
    Refusal::new(ExitCode::WorkerFailed, message)
}

/// Returns a message that says who may open this socket, according to its owner and mode.
fn permission_denied(socket: &Path, found: &Metadata) -> String {
    let shown = socket.display();
    if found.mode() & 0o060 != 0o060 {
        let owner = User::from_uid(Uid::from_raw(found.uid())).ok().flatten();
        let owner = owner.map_or_else(|| found.uid().to_string(), |user| user.name);
        return format!(
            "permission denied: the daemon at {shown} serves user {owner} only; start your own with `xlaunch daemon \
             --foreground`"
        );
    }
    let group = Group::from_gid(Gid::from_raw(found.gid())).ok().flatten();
    let group = group.map_or_else(|| found.gid().to_string(), |group| group.name);
    let user = User::from_uid(Uid::current()).ok().flatten();
    let user = user.map_or_else(|| "USER".into(), |user| user.name);
    format!(
        "permission denied: {shown} is open to members of group {group}; add yourself with `sudo usermod -aG {group} \
         {user}`, then log in again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_comes_from_flag_then_environment_then_user_daemon_then_system_daemon() {
        let sockets = |given: Option<&str>, variables: &[(&str, &str)]| {
            let address = DaemonAddress { socket: given.map(PathBuf::from) };
            let found = address.sockets(|name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(*value))
            });
            found.iter().map(|found| found.socket.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        let variables = [("XLAUNCH_SOCKET", "/b"), ("XDG_RUNTIME_DIR", "/run/user/7")];
        assert_eq!(sockets(Some("/a"), &variables), "/a");
        assert_eq!(sockets(None, &variables), "/b");
        let own = "/run/user/7/xlaunch.sock /run/xlaunch/xlaunch.sock";
        assert_eq!(sockets(None, &variables[1..]), own);
        assert_eq!(sockets(None, &[("XLAUNCH_SOCKET", ""), variables[1]]), own);
    }

    #[tokio::test]
    async fn message_about_the_nodes_daemon_names_its_unit() {
        let message = |socket: &str| {
            let channel = tonic::transport::Endpoint::from_static("http://unused").connect_lazy();
            DaemonClient { socket: socket.into(), client: NodeClient::new(channel) }.timed_out()
        };
        let status = "; `systemctl status xlaunch` shows its state, and why it does not start";
        assert!(message(SYSTEM_SOCKET).contains(status), "{}", message(SYSTEM_SOCKET));
        assert!(!message("/a.sock").contains(status), "{}", message("/a.sock"));
    }

    #[test]
    fn unreachable_daemon_error_lists_tried_sockets_and_how_to_start_one() {
        let missing = |path: &str| (PathBuf::from(path), io::Error::from_raw_os_error(2));
        let refusal = no_daemon(&[missing("/a.sock"), missing("/b.sock")]);
        for words in
            ["/a.sock: No such file", "/b.sock", "systemctl start xlaunch", "xlaunch daemon --foreground"]
        {
            assert!(refusal.message.contains(words), "{}", refusal.message);
        }
        assert_eq!(refusal.exit, ExitCode::WorkerFailed);
        let closed = (PathBuf::from("/closed/a.sock"), io::Error::from_raw_os_error(13));
        let refusal = no_daemon(&[closed, missing("/b.sock")]);
        for words in ["no daemon is listening", "/closed/a.sock: Permission denied", "/b.sock: No such file"]
        {
            assert!(refusal.message.contains(words), "{}", refusal.message);
        }
    }

    #[test]
    fn permission_error_names_the_group_or_the_owner_of_the_socket() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        fs_err::write(&socket, "").unwrap();
        let text = |mode| {
            fs_err::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).unwrap();
            let denied = (socket.clone(), io::Error::from(io::ErrorKind::PermissionDenied));
            no_daemon(&[denied, ("/x".into(), io::Error::from(io::ErrorKind::NotFound))]).message
        };
        assert!(text(0o660).contains("members of group "), "{}", text(0o660));
        assert!(text(0o600).contains("serves user "), "{}", text(0o600));
        assert!(text(0o600).contains("start your own with `xlaunch daemon --foreground`"), "{}", text(0o600));
    }
}
