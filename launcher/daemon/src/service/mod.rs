//! The daemon's gRPC services on its unix socket: its own, health (`grpc.health.v1`) and reflection
//! (`grpc.reflection.v1` and `v1alpha`).
//!
//! ```text
//! connection --listener: user, connection limits--> call --access: role, quotas--> handler
//!     Submit, Cancel, Update, Drain, Examine: a command to the manager
//!     Status, List, Get, Watch: queries of the view
//!     Logs: logs; Checkpoint, Stacks: relay
//! ```
//! Invariants:
//! - to a caller, a job that it may not see does not exist;
//! - no user can keep others from being served: connections, calls, streams and memory are limited per user and in
//!   total.

pub mod access;
mod calls;
mod holders;
pub mod listener;
mod logs;
mod queries;
mod relay;
mod tail;

use std::io;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tower::layer::layer_fn;
use xlaunch_host::net::{Connections, Credentials};
use xlaunch_proto::convert::WireError;
use xlaunch_proto::convert::node::{JobLogs, Submit};
use xlaunch_proto::v1::node_server::{Node, NodeServer};
use xlaunch_proto::v1::{
    CancelRequest, CheckpointReply, DrainRequest, ExamineReply, ExamineRequest, GetRequest, HistoryReply,
    HistoryRequest, Job, JobCheckpointRequest, JobLogsRequest, JobStacksRequest, ListReply, ListRequest,
    LogsReply, NodeStatus, NodeStatusRequest, StacksReply, SubmitReply, SubmitRequest, UpdateRequest,
};

pub(crate) use tail::log_tail;

use self::access::{Access, Quota};
use self::calls::Call;
use self::queries::to_status;
use super::accounting::Accounting;
use super::commands::{NodeHandle, Submission};
use super::view::Caller;

/// Maximum size of a request. The largest ones contain an environment and a command line.
const MAX_REQUEST_BYTES: usize = 1 << 20;
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// HTTP/2 flow-control windows of a stream and of a connection.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
/// Maximum number of calls at a time on a connection. Before the settings of the connection have reached a client, the
/// daemon refuses those beyond.
pub const MAX_CALLS_PER_CONNECTION: u32 = 32;
/// Quota of calls, per user and in total, as for all quotas below. A call counts until its response is sent. The quota
/// leaves room for both kinds of streams and some more calls.
const CALL_QUOTA: (usize, usize) = (320, 4096);
/// Quota of log streams. Job watches together with checkpoint requests have a separate quota of the same size.
const STREAM_QUOTA: (usize, usize) = (128, 512);
/// Quota of lists that clients have not read yet. The largest lists take almost a megabyte each.
const LIST_QUOTA: (usize, usize) = (16, 128);
/// Quota of readers of the accounting file.
const HISTORY_QUOTA: (usize, usize) = (2, 8);
/// Quota of readers of log files, which count against the owner of the files. The total is below the number of tokio's
/// blocking threads.
const FILE_READER_QUOTA: (usize, usize) = (32, 128);
/// Time for a request to arrive and be handled.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval and timeout of HTTP/2 keepalive pings.
const CLIENT_KEEPALIVE: Duration = Duration::from_secs(20);
/// Time for clients to read their last responses at shutdown.
const CLIENT_DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// Serves on `listener`, to which the members of `group` can connect, until `shutdown` resolves. `credentials`
/// determines the user of a connection.
///
/// # Errors
/// The services cannot be set up.
pub async fn serve(
    listener: UnixListener,
    group: Option<String>,
    node: NodeHandle,
    access: Access,
    accounting: Accounting,
    credentials: fn(&UnixStream) -> io::Result<Credentials>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let open = Connections::new(listener::LIMITS, listener::FIRST_CALL_TIMEOUT);
    let (known, counted) = (access.clone(), open.clone());
    let incoming = listener::accept(listener, group, open.clone(), move |stream| {
        let peer = credentials(stream)?;
        let holder = known.holder(peer.uid, &counted);
        Ok(Some(Credentials { holder, reserved: known.is_known_admin(peer.uid), ..peer }))
    });
    let service = NodeServer::new(Service {
        node,
        access,
        accounting,
        histories: Quota::new("histories", HISTORY_QUOTA),
        lists: Quota::new("lists", LIST_QUOTA),
        logs: Quota::new("log streams", STREAM_QUOTA),
        watches: Quota::new("watches", STREAM_QUOTA),
        file_readers: file_readers(),
    });
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<NodeServer<Service>>().await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(xlaunch_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let reflection_v1 = reflection().build_v1().map_err(io::Error::other)?;
    // Many clients, such as older releases of grpcurl, know only this version of the protocol.
    let reflection_v1alpha = reflection().build_v1alpha().map_err(io::Error::other)?;
    let quota = Quota::new("calls", CALL_QUOTA);
    let (drain, draining) = oneshot::channel::<()>();
    let server = Server::builder()
        .max_concurrent_streams(MAX_CALLS_PER_CONNECTION)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keepalive_interval(Some(CLIENT_KEEPALIVE))
        .http2_keepalive_timeout(Some(CLIENT_KEEPALIVE))
        .timeout(REQUEST_TIMEOUT)
        .layer(InterceptorLayer::new(move |request| calls::begin(&quota, request)))
        .layer(layer_fn(calls::UntilSent))
        .add_service(service.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(health_service.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(reflection_v1.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(reflection_v1alpha.max_decoding_message_size(MAX_REQUEST_BYTES))
        .serve_with_incoming_shutdown(incoming, async {
            // An error means that the sender was dropped, which is a shutdown too.
            let _ = draining.await;
        });
    tokio::pin!(server);
    tokio::select! {
        result = &mut server => return result.map_err(io::Error::other),
        () = shutdown => {}
    }
    health.set_not_serving::<NodeServer<Service>>().await;
    // Cannot fail: the server holds the receiver.
    let _ = drain.send(());
    let _ = tokio::time::timeout(CLIENT_DRAIN_TIMEOUT, server).await;
    open.close_all();
    Ok(())
}

fn file_readers() -> Quota {
    Quota::new("readers of log files", FILE_READER_QUOTA)
}

#[derive(Debug)]
struct Service {
    node: NodeHandle,
    access: Access,
    accounting: Accounting,
    histories: Quota,
    lists: Quota,
    logs: Quota,
    watches: Quota,
    file_readers: Quota,
}

impl Service {
    /// Returns the call and its caller.
    async fn caller<T>(&self, request: &Request<T>) -> Result<(Call, Caller), Status> {
        let call = request.extensions().get::<Call>().cloned();
        let call = call.ok_or_else(|| Status::internal("the call is not accounted for"))?;
        let caller = self.access.caller(call.peer.uid).await.map_err(to_status)?;
        Ok((call, caller))
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<SubmitReply>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let submission = Submit::try_from(request.into_inner()).map_err(invalid)?;
        let request_id = submission.request.request_id.clone();
        let result = async {
            let account = self.access.account(caller.uid).await?;
            self.node.submit(caller.clone(), account, submission).await
        };
        let result = result.await.map_err(to_status);
        let job = result.as_ref().ok().and_then(|added| added.jobs.first()).map(|job| job.id);
        tracing::info!(
            uid = caller.uid,
            pid = call.peer.pid,
            request_id,
            job,
            refusal = refusal(&result),
            "submit"
        );
        let Submission { jobs, repeated, warnings } = result?;
        let job = jobs.first().cloned();
        let is_array = job.as_ref().is_some_and(|job| job.array_job.is_some());
        let array = if is_array { jobs } else { Vec::new() };
        Ok(Response::new(SubmitReply { job, repeated, array, warnings }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let guard = self.lists.acquire(call.peer.holder, caller.admin)?;
        let list = queries::list(&self.node.view(), &caller, request.get_ref());
        Ok(calls::until_sent(Response::new(list), guard))
    }

    async fn history(&self, request: Request<HistoryRequest>) -> Result<Response<HistoryReply>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let guard = self.histories.acquire(call.peer.holder, caller.admin)?;
        let query = queries::history(&caller, request.into_inner())?;
        let accounting = self.accounting.clone();
        let read = tokio::task::spawn_blocking(move || accounting.query(&query));
        let page =
            read.await.map_err(io::Error::other).flatten().map_err(|error| {
                Status::unavailable(format!("failed to read the accounting file: {error}"))
            })?;
        Ok(calls::until_sent(
            Response::new(HistoryReply { jobs: page.accounts, older: page.older.unwrap_or(0) }),
            guard,
        ))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Job>, Status> {
        let (_, caller) = self.caller(&request).await?;
        let view = self.node.view();
        let job = queries::job(&view, &caller, request.get_ref().job)?;
        Ok(Response::new(job.to_message_for(&caller, &view, true)))
    }

    type WatchStream = ReceiverStream<Result<Job, Status>>;

    async fn watch(&self, request: Request<GetRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let id = request.get_ref().job;
        queries::job(&self.node.view(), &caller, id)?;
        let guard = self.watches.acquire(call.peer.holder, caller.admin)?;
        let view = self.node.watch();
        let stream = calls::stream(1, guard, |jobs| async move {
            queries::watch(view, caller, id, &jobs).await;
            Ok(())
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type LogsStream = ReceiverStream<Result<LogsReply, Status>>;

    async fn logs(&self, request: Request<JobLogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let JobLogs { job, logs } = request.into_inner().try_into().map_err(invalid)?;
        let job = queries::job(&self.node.view(), &caller, job)?;
        let guard = self.logs.acquire(call.peer.holder, caller.admin)?;
        let source =
            logs::Source { view: self.node.watch(), job, logs, file_readers: self.file_readers.clone() };
        Ok(Response::new(ReceiverStream::new(logs::stream(source, guard)?)))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Job>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let CancelRequest { job, force } = *request.get_ref();
        let result = self.node.cancel(caller.clone(), job, force).await.map_err(to_status);
        tracing::info!(
            uid = caller.uid,
            pid = call.peer.pid,
            job,
            force,
            refusal = refusal(&result),
            "cancel"
        );
        result.map(Response::new)
    }

    type CheckpointStream = ReceiverStream<Result<CheckpointReply, Status>>;

    async fn checkpoint(
        &self,
        request: Request<JobCheckpointRequest>,
    ) -> Result<Response<Self::CheckpointStream>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let id = request.get_ref().job;
        let result = queries::job(&self.node.view(), &caller, id)
            .and_then(|job| relay::checkpoint(job, self.watches.acquire(call.peer.holder, caller.admin)?));
        tracing::info!(
            uid = caller.uid,
            pid = call.peer.pid,
            job = id,
            refusal = refusal(&result),
            "checkpoint"
        );
        Ok(Response::new(ReceiverStream::new(result?)))
    }

    type StacksStream = ReceiverStream<Result<StacksReply, Status>>;

    async fn stacks(
        &self,
        request: Request<JobStacksRequest>,
    ) -> Result<Response<Self::StacksStream>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let JobStacksRequest { job, stacks } = request.into_inner();
        let job = queries::job(&self.node.view(), &caller, job)?;
        let guard = self.watches.acquire(call.peer.holder, caller.admin)?;
        Ok(Response::new(ReceiverStream::new(relay::stacks(job, stacks.unwrap_or_default(), guard)?)))
    }

    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<Job>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let update = request.into_inner();
        update.check().map_err(invalid)?;
        let UpdateRequest { job, held, priority } = update;
        let result = self.node.update(caller.clone(), update).await.map_err(to_status);
        tracing::info!(
            uid = caller.uid,
            pid = call.peer.pid,
            job,
            held,
            priority,
            refusal = refusal(&result),
            "update"
        );
        result.map(Response::new)
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<NodeStatus>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let drain = request.into_inner();
        drain.check().map_err(invalid)?;
        let (uid, pid) = (caller.uid, call.peer.pid);
        let (named, undo) = (format!("{:?}", drain.gpus), drain.undo);
        let result = self.node.drain(caller.clone(), drain).await.map_err(to_status);
        tracing::info!(uid, pid, gpus = named, undo, refusal = refusal(&result), "drain");
        result.map(Response::new)
    }

    type ExamineStream = Pin<Box<dyn Stream<Item = Result<ExamineReply, Status>> + Send>>;

    async fn examine(
        &self,
        request: Request<ExamineRequest>,
    ) -> Result<Response<Self::ExamineStream>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let examine = request.into_inner();
        examine.check().map_err(invalid)?;
        let (uid, pid, named) = (caller.uid, call.peer.pid, format!("{:?}", examine.gpus));
        let result = self.node.examine(caller.clone(), examine).await.map_err(to_status);
        tracing::info!(uid, pid, gpus = named, refusal = refusal(&result), "examine");
        Ok(Response::new(Box::pin(ReceiverStream::new(result?).map(Ok))))
    }

    async fn status(&self, request: Request<NodeStatusRequest>) -> Result<Response<NodeStatus>, Status> {
        let (_, caller) = self.caller(&request).await?;
        Ok(Response::new(queries::status(&self.node.view(), &caller)))
    }
}

/// Returns the reason why a command was refused, for the daemon's log. It may contain text of the caller, so it must be
/// logged as a field: fields are escaped and cannot be mistaken for other messages.
fn refusal<T>(result: &Result<T, Status>) -> Option<&str> {
    result.as_ref().err().map(Status::message)
}

fn invalid(error: WireError) -> Status {
    Status::invalid_argument(in_users_words(&error.to_string()))
}

/// Replaces the name of the field in a problem of a request by the command line option, as users do not know the
/// fields.
fn in_users_words(problem: &str) -> String {
    let named = problem.strip_prefix("field ").and_then(|rest| rest.split_once(' '));
    let Some((field, what)) = named else { return problem.into() };
    let option = match field {
        "after" => "--after",
        "after.condition" => "the condition of --after",
        "array_indices" => "--array",
        "command_spec_json" => "the command",
        "cpus" => "--cpus",
        "environment" => "the environment",
        "gpus" => "the number or list of GPUs",
        "job.name" => "job.name",
        "logs" => "the choice of a log",
        "memory_bytes" => "--mem",
        "name" => "--name",
        "priority" => "--priority",
        "reason" => "--reason",
        "request_id" => "the id of the request",
        "stream" => "the stream of the log",
        "warning.signal" | "warning.seconds_before" => "--signal",
        "time_limit_seconds" => "--time",
        "timeout_seconds" => "--timeout",
        "trainer_spec_json" => "the training configuration",
        "version" => "the version of xlaunch",
        "work" => "the work of the job",
        "work_dir" => "the working directory",
        _ => return problem.into(),
    };
    format!("{option} {what}")
}

/// Locks a mutex and ignores poisoning: each critical section makes a single change, so a panic cannot leave it half
/// done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
