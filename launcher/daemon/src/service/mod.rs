//! The daemon's gRPC services on its unix socket: its own, health (`grpc.health.v1`) and reflection (`grpc.reflection.v1`).
//!
//! ```text
//! connection --listener: whose? is there room?--> call --access: may they? their share?--> handler
//!     Submit, Cancel, Drain: an order to the manager, and its answer
//!     Status, List, Get, Watch: answers, from the view
//!     Logs: logs
//! ```
//! A job that a caller may not see does not exist for them. Whatever a user does, others are served: everything that one can
//! hold, connections, calls, streams, memory, has a limit.

pub mod access;
mod answers;
mod calls;
pub mod listener;
mod logs;
mod tail;

use std::io;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tower::layer::layer_fn;
use xlaunch_proto::convert::node::{Drain, JobLogs, Submit};
use xlaunch_proto::net::{self, Connections, Credentials};
use xlaunch_proto::v1::node_server::{Node as NodeCalls, NodeServer};
use xlaunch_proto::v1::{
    CancelRequest, DrainRequest, GetRequest, Job, JobLogsRequest, ListReply, ListRequest, LogsReply,
    NodeStatus, NodeStatusRequest, SubmitReply, SubmitRequest,
};

pub use tail::log_tail;

use self::access::{Access, Quota};
use self::answers::refused;
use self::calls::Call;
use super::orders::Node;
use super::view::Caller;

/// Bytes of a request: the largest is an environment with a command line.
const REQUEST: usize = 1 << 20;
/// Headers of a request.
const HEADERS: u32 = 16 << 10;
/// Bytes that a caller may send ahead, on a call and on a connection.
const WINDOWS: (u32, u32) = (64 << 10, 256 << 10);
/// Calls at a time on one connection.
const CALLS: u32 = 32;
/// Calls of a user at a time, each until its answer is sent, and of all: streams of both kinds, and a few besides.
const USER_CALLS: (usize, usize) = (320, 4096);
/// Streams of logs of a user at a time, and of all; as many of jobs.
const STREAMS: (usize, usize) = (128, 512);
/// Lists of a user at a time that they have not read, and of all: the longest take most of a megabyte each.
const LISTS: (usize, usize) = (16, 128);
/// Readers of files of one owner at a time, and of all: below the number of threads that may wait for files.
const OWNERS: (usize, usize) = (32, 128);
/// Time for a request to arrive and be answered.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between questions whether a caller is alive, and time for the answer.
const ALIVE: Duration = Duration::from_secs(20);
/// Time for callers to take the last of what they asked for when the daemon ends.
const FAREWELL: Duration = Duration::from_millis(500);

/// Serves on `listener` until `ended`.
///
/// # Errors
/// Where the services cannot be set up.
pub async fn serve(
    listener: UnixListener,
    node: Node,
    access: Access,
    ended: impl Future<Output = ()>,
) -> io::Result<()> {
    serve_peers(listener, node, access, net::peer_credentials, ended).await
}

fn quota((each, all): (usize, usize)) -> Quota {
    Quota::new(each, all)
}

async fn serve_peers(
    listener: UnixListener,
    node: Node,
    access: Access,
    credentials: fn(&UnixStream) -> io::Result<Credentials>,
    ended: impl Future<Output = ()>,
) -> io::Result<()> {
    let open = Connections::new(listener::LIMITS);
    let incoming = net::accept(listener, open.clone(), move |stream| credentials(stream).map(Some));
    let (lists, logs, watches, owners) = (quota(LISTS), quota(STREAMS), quota(STREAMS), quota(OWNERS));
    let service = NodeServer::new(Service { node, access, lists, logs, watches, owners });
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<NodeServer<Service>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(xlaunch_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(io::Error::other)?;
    let quota = quota(USER_CALLS);
    let (end, ends) = oneshot::channel::<()>();
    let server = Server::builder()
        .max_concurrent_streams(CALLS)
        .http2_max_header_list_size(HEADERS)
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
        .http2_keepalive_interval(Some(ALIVE))
        .http2_keepalive_timeout(Some(ALIVE))
        .timeout(PATIENCE)
        .layer(InterceptorLayer::new(move |request| calls::begin(&quota, request)))
        .layer(layer_fn(calls::UntilSent))
        .add_service(service.max_decoding_message_size(REQUEST))
        .add_service(health_service.max_decoding_message_size(REQUEST))
        .add_service(reflection.max_decoding_message_size(REQUEST))
        .serve_with_incoming_shutdown(incoming, async {
            // Dropped, it means the end as well.
            let _ = ends.await;
        });
    tokio::pin!(server);
    tokio::select! {
        result = &mut server => return result.map_err(io::Error::other),
        () = ended => {}
    }
    health.set_not_serving::<NodeServer<Service>>().await;
    // The server waits for this.
    let _ = end.send(());
    let _ = tokio::time::timeout(FAREWELL, server).await;
    open.close_all();
    Ok(())
}

fn busy(count: usize, what: &str) -> Status {
    Status::resource_exhausted(format!("{count} {what} are in progress: end some of them, or ask again"))
}

#[derive(Debug)]
struct Service {
    node: Node,
    access: Access,
    lists: Quota,
    logs: Quota,
    watches: Quota,
    owners: Quota,
}

impl Service {
    /// The call and who makes it.
    async fn caller<T>(&self, request: &Request<T>) -> Result<(Call, Caller), Status> {
        let call = request.extensions().get::<Call>().cloned();
        let call = call.ok_or_else(|| Status::internal("the call has not begun"))?;
        let caller = self.access.caller(call.peer.uid).await;
        Ok((call, caller))
    }
}

#[tonic::async_trait]
impl NodeCalls for Service {
    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<SubmitReply>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let submission: Submit = checked(request.into_inner())?;
        let request_id = submission.request_id.clone();
        let answer = self.node.submit(caller, submission).await.map_err(refused);
        let job = answer.as_ref().map(|(job, _)| job.id);
        tracing::info!(uid = caller.uid, pid = call.peer.pid, request_id, "submit: {}", outcome(&job));
        let (job, repeated) = answer?;
        Ok(Response::new(SubmitReply { job: Some(job), repeated }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let (_, caller) = self.caller(&request).await?;
        let held = self.lists.take(caller.uid).map_err(|count| busy(count, "lists"))?;
        let list = answers::list(&self.node.view(), caller, request.get_ref());
        Ok(calls::until_sent(Response::new(list), held))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Job>, Status> {
        let (_, caller) = self.caller(&request).await?;
        let job = answers::job(&self.node.view(), caller, request.get_ref().job)?;
        Ok(Response::new(job.answer(true)))
    }

    type WatchStream = ReceiverStream<Result<Job, Status>>;

    async fn watch(&self, request: Request<GetRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (_, caller) = self.caller(&request).await?;
        let id = request.get_ref().job;
        answers::job(&self.node.view(), caller, id)?;
        let held = self.watches.take(caller.uid).map_err(|count| busy(count, "watches"))?;
        let (jobs, stream) = mpsc::channel(1);
        let view = self.node.watch();
        tokio::spawn(async move {
            tokio::select! {
                () = answers::watch(view, id, &jobs) => {}
                () = jobs.closed() => {}
            }
            drop(held);
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type LogsStream = ReceiverStream<Result<LogsReply, Status>>;

    async fn logs(&self, request: Request<JobLogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let (_, caller) = self.caller(&request).await?;
        let JobLogs { job, logs } = checked(request.into_inner())?;
        let job = answers::job(&self.node.view(), caller, job)?;
        let held = self.logs.take(caller.uid).map_err(|count| busy(count, "streams of logs"))?;
        let source = logs::Source { view: self.node.watch(), job, logs, owners: self.owners.clone() };
        Ok(Response::new(ReceiverStream::new(logs::stream(source, held)?)))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<Job>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let job = request.get_ref().job;
        let answer = self.node.cancel(caller, job).await.map_err(refused);
        tracing::info!(
            uid = caller.uid,
            pid = call.peer.pid,
            "cancel of job {job}: {}",
            outcome(&answer.as_ref().map(|job| job.id))
        );
        answer.map(Response::new)
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<NodeStatus>, Status> {
        let (call, caller) = self.caller(&request).await?;
        let Drain { gpus, undo, reason } = checked(request.into_inner())?;
        let (uid, pid) = (caller.uid, call.peer.pid);
        if !caller.admin {
            tracing::info!(uid, pid, undo, "drain: refused");
            let message =
                "GPUs are taken out of service by root and the members of the administrators' group";
            return Err(Status::permission_denied(message));
        }
        tracing::info!(
            uid,
            pid,
            undo,
            reason,
            "drain of {}",
            if gpus.is_empty() { "all".into() } else { gpus.join(" ") }
        );
        let node = self.node.drain(caller, gpus, undo, reason).await.map_err(refused)?;
        Ok(Response::new(node))
    }

    async fn status(&self, request: Request<NodeStatusRequest>) -> Result<Response<NodeStatus>, Status> {
        let (_, caller) = self.caller(&request).await?;
        Ok(Response::new(answers::status(&self.node.view(), caller)))
    }
}

/// For the log of what callers have had done.
fn outcome(job: &Result<u64, &Status>) -> String {
    job.as_ref().map_or_else(|status| format!("refused, {}", status.message()), |job| format!("job {job}"))
}

fn checked<W, T: TryFrom<W, Error: std::fmt::Display>>(wire: W) -> Result<T, Status> {
    T::try_from(wire).map_err(|error| Status::invalid_argument(error.to_string()))
}

#[cfg(test)]
mod tests;
