//! Tests calls of several users over a real socket. A client binds its end of the connection to a path that begins with
//! a user id, which stands in for the kernel's peer credentials.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use xlaunch_host::spawn::raise_open_file_limit;
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::submit_request::Work as Wire;
use xlaunch_proto::v1::{
    Dependency, ExaminedGpu, Gpu, JobCheckpointRequest, JobStacksRequest, LogsRequest, NodeJobState,
    Scheduling,
};
use xlaunch_spec::command::{CommandSpec, Program};
use xlaunch_spec::job::JobSpec;

use super::*;
use crate::commands::{Change, Command, CommandError, JobChange, Submission};
use crate::state::Jobs;
use crate::users::Account;
use crate::view::{JobView, NodeView};

const ANN: u32 = 1001;
const BOB: u32 = 1002;
/// The first user id without an account.
const STRANGER: u32 = 1_000_000;
const ADMIN: u32 = 1003;

/// A daemon with a scripted manager, and its clients.
struct Case {
    dir: tempfile::TempDir,
    shown: watch::Sender<Arc<NodeView>>,
    end: Option<oneshot::Sender<()>>,
    served: JoinHandle<io::Result<()>>,
    connections: AtomicUsize,
}

impl Case {
    /// Creates a daemon with these jobs, each given as id, user and state. The manager answers all commands with
    /// `refuse`, or accepts them.
    fn new<const N: usize>(jobs: [(u64, u32, NodeJobState); N], refuse: Option<CommandError>) -> Self {
        let view = |(id, uid, state): (u64, u32, NodeJobState)| {
            let job = Job { id, uid, state: state.into(), started_unix_ms: 1, ..Default::default() };
            (id, Arc::new(JobView { job, ..Default::default() }))
        };
        let jobs = jobs.into_iter().map(view).collect();
        let gpus = vec![Gpu { job: 1, ..Default::default() }, Gpu { job: 2, ..Default::default() }];
        let node = NodeStatus { host: "here".into(), gpus, ..Default::default() };
        let shown = watch::Sender::new(Arc::new(NodeView { node, jobs, ..NodeView::default() }));
        let (commands, receiver) = mpsc::channel(8);
        tokio::spawn(manage(receiver, refuse));
        let dir = tempfile::tempdir().unwrap();
        let listener = listener::bind(&dir.path().join("node.sock"), None).unwrap();
        let node = NodeHandle::new(commands, shown.subscribe());
        let access = Access::with(900, |uid| Ok(uid == ADMIN), account);
        let (end, ended) = oneshot::channel();
        let accounting = Accounting::new(dir.path());
        let served = tokio::spawn(serve(listener, None, node, access, accounting, named, async {
            ended.await.unwrap_or_default();
        }));
        Self { dir, shown, end: Some(end), served, connections: AtomicUsize::new(0) }
    }

    fn connect(&self, uid: u32) -> UnixStream {
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        connect(self.dir.path(), uid, number)
    }

    async fn channel(&self, uid: u32) -> Channel {
        xlaunch_proto::connect::connect_stream(self.connect(uid), xlaunch_proto::connect::endpoint())
            .await
            .unwrap()
    }

    async fn client(&self, uid: u32) -> NodeClient<Channel> {
        NodeClient::new(self.channel(uid).await)
    }
}

fn connect(dir: &Path, uid: u32, number: usize) -> UnixStream {
    let address = |path: &Path| SocketAddrUnix::new(path).unwrap();
    let socket: OwnedFd = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &address(&dir.join(format!("{uid}-{number}")))).unwrap();
    rustix::net::connect(&socket, &address(&dir.join("node.sock"))).unwrap();
    let stream = std::os::unix::net::UnixStream::from(socket);
    stream.set_nonblocking(true).unwrap();
    UnixStream::from_std(stream).unwrap()
}

/// Returns the credentials from the path of the peer.
fn named(stream: &UnixStream) -> io::Result<Credentials> {
    let address = stream.peer_addr()?;
    let name = address.as_pathname().and_then(|path| path.file_name()?.to_str()?.split_once('-'));
    let uid = name.and_then(|(uid, _)| uid.parse().ok());
    let uid = uid.ok_or_else(|| io::Error::other("a caller without a name"))?;
    Ok(Credentials { uid, holder: uid, pid: None, exempt: false, reserved: false })
}

/// The user database of these tests.
fn account(uid: u32) -> io::Result<Option<Account>> {
    Ok((uid < STRANGER).then(|| Account { name: format!("user{uid}"), gid: 100 }))
}

async fn manage(mut commands: mpsc::Receiver<Command>, refuse: Option<CommandError>) {
    let seen = &mut BTreeMap::<String, u64>::new();
    while let Some(command) = commands.recv().await {
        match (command, &refuse) {
            (Command::Submit { reply, .. }, Some(refused)) => drop(reply.send(Err(refused.clone()))),
            (Command::Change(changes), refused) => {
                for JobChange { job, change, reply, .. } in changes {
                    let held = matches!(change, Change::Update(UpdateRequest { held: Some(true), .. }));
                    let job = Job { id: job, held, ..Default::default() };
                    drop(reply.send(refused.clone().map_or(Ok(job), Err)));
                }
            }
            (Command::Drain { reply, .. }, Some(refused)) => drop(reply.send(Err(refused.clone()))),
            (Command::Submit { caller, account, submission, reply }, None) => {
                let next = seen.len() as u64 + 1;
                let repeated = seen.contains_key(&submission.request.request_id);
                let id = *seen.entry(submission.request.request_id).or_insert(next);
                let name = format!("{:?}", submission.work);
                let job = Job { id, uid: caller.uid, user: account.name, name, ..Default::default() };
                drop(reply.send(Ok(Submission { jobs: vec![job], repeated, warnings: Vec::new() })));
            }
            (Command::Examine { reply, .. }, Some(refused)) => drop(reply.send(Err(refused.clone()))),
            (Command::Examine { caller, examine, reply }, None) => {
                let result = Jobs::default().choose(&caller, &[], &[]).map(|_| {
                    let (sender, receiver) = mpsc::channel(1);
                    let gpu = ExaminedGpu { uuid: examine.gpus.join(","), ..Default::default() };
                    let reply = ExamineReply { gpus: vec![gpu], done: true, ..Default::default() };
                    sender.try_send(reply).unwrap();
                    receiver
                });
                drop(reply.send(result));
            }
            (Command::Drain { caller, drain, reply }, None) => {
                // As in the real manager, this depends on the role that the service has determined.
                let request = DrainRequest { gpus: Vec::new(), ..drain.clone() };
                let result = Jobs::drain(&caller, &request, &[], 0).map(|_| {
                    let drained = format!("{} {} {}", drain.gpus.join(","), drain.undo, drain.reason);
                    NodeStatus { drained, ..Default::default() }
                });
                drop(reply.send(result));
            }
        }
    }
}

fn submit() -> SubmitRequest {
    SubmitRequest {
        request_id: "1".into(),
        work_dir: "/".into(),
        work: Some(Wire::CommandSpecJson(
            CommandSpec::new(Program::Script("train.py".into()), Vec::new()).to_json(),
        )),
        ..Default::default()
    }
}

fn logs(job: u64) -> JobLogsRequest {
    JobLogsRequest { job, logs: Some(LogsRequest { stream: 1, ..Default::default() }) }
}

/// Panics if the future hangs.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.unwrap_or_else(|_| panic!("{what} hangs"))
}

#[tokio::test]
async fn job_of_another_user_looks_nonexistent() {
    let case = Case::new([(1, ANN, NodeJobState::Running), (2, BOB, NodeJobState::Queued)], None);
    let (mut ann, mut bob, mut admin) =
        (case.client(ANN).await, case.client(BOB).await, case.client(ADMIN).await);
    assert_eq!(ann.get(GetRequest { job: 1 }).await.unwrap().into_inner().uid, ANN);
    assert_eq!(admin.get(GetRequest { job: 1 }).await.unwrap().into_inner().uid, ANN);
    for job in [1, 99] {
        let message = format!("there is no job {job}");
        let refusals = [
            bob.get(GetRequest { job }).await.map(drop),
            bob.watch(GetRequest { job }).await.map(drop),
            bob.logs(logs(job)).await.map(drop),
            bob.checkpoint(JobCheckpointRequest { job }).await.map(drop),
            bob.stacks(JobStacksRequest { job, stacks: None }).await.map(drop),
        ];
        for refusal in refusals {
            let refusal = refusal.unwrap_err();
            assert_eq!((refusal.code(), refusal.message()), (Code::NotFound, message.as_str()));
        }
    }
    let ids = |list: ListReply| list.jobs.iter().map(|job| job.id).collect::<Vec<_>>();
    assert_eq!(ids(bob.list(ListRequest::default()).await.unwrap().into_inner()), [2]);
    assert_eq!(ids(admin.list(ListRequest::default()).await.unwrap().into_inner()), [2, 1]);
    let status = bob.status(NodeStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.gpus.iter().map(|gpu| gpu.job).collect::<Vec<_>>(), [0, 2]);
    let checkpoint = bob.checkpoint(JobCheckpointRequest { job: 2 }).await.map(drop);
    let stacks = bob.stacks(JobStacksRequest { job: 2, stacks: None }).await.map(drop);
    for refused in [bob.logs(logs(2)).await.map(drop), checkpoint, stacks] {
        let error = refused.unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::FailedPrecondition, "job 2 has not started"));
    }
    assert_eq!(bob.drain(DrainRequest::default()).await.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(bob.examine(ExamineRequest::default()).await.unwrap_err().code(), Code::PermissionDenied);
    let examine = ExamineRequest { gpus: vec!["GPU-1".into()], ..Default::default() };
    let mut replies = admin.examine(examine).await.unwrap().into_inner();
    assert_eq!(replies.message().await.unwrap().unwrap().gpus[0].uuid, "GPU-1");
    let drain = DrainRequest { gpus: vec!["GPU-1".into()], undo: false, reason: "fan".into() };
    assert_eq!(admin.drain(drain).await.unwrap().into_inner().drained, "GPU-1 false fan");
}

#[tokio::test]
async fn invalid_requests_are_refused_in_the_words_of_users() {
    let case = Case::new([], None);
    let mut ann = case.client(ANN).await;
    let mut named = JobSpec::default();
    named.job.name = "a\nb".into();
    let named = Some(Wire::TrainerSpecJson(named.to_json()));
    let after = vec![Dependency { job: 1, ..Default::default() }];
    let scheduling = Some(Scheduling { after, ..Default::default() });
    for (request, expected) in [
        (
            SubmitRequest { work_dir: "here".into(), ..submit() },
            "the working directory is not an absolute path",
        ),
        (
            SubmitRequest { request_id: String::new(), ..submit() },
            "the id of the request is not 1 to 64 printable ASCII characters",
        ),
        (
            SubmitRequest { version: "1".repeat(65), ..submit() },
            "the version of xlaunch has 65 bytes, at most 64 are allowed",
        ),
        (SubmitRequest { work: named, ..submit() }, "job.name has control characters"),
        (
            SubmitRequest { work: None, ..submit() },
            "the work of the job is missing; expected a training job or a command",
        ),
        (SubmitRequest { scheduling, ..submit() }, "the condition of --after is missing"),
    ] {
        let error = ann.submit(request).await.unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::InvalidArgument, expected));
    }
    let stream = LogsRequest { stream: 3, ..Default::default() };
    for (logs, expected) in [
        (None, "the choice of a log is missing"),
        (Some(stream), "the stream of the log is 3, expected 1 or 2"),
    ] {
        let error = ann.logs(JobLogsRequest { job: 1, logs }).await.unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::InvalidArgument, expected));
    }
}

#[tokio::test]
async fn commands_are_validated_and_manager_errors_become_status_codes() {
    let case = Case::new([], None);
    let mut ann = case.client(ANN).await;
    for repeated in [false, true] {
        let reply = ann.submit(submit()).await.unwrap().into_inner();
        let job = reply.job.unwrap();
        assert_eq!((job.id, job.uid, reply.repeated), (1, ANN, repeated));
        assert!(job.name.starts_with("Command("), "{}", job.name);
    }
    let work = Some(Wire::TrainerSpecJson(JobSpec::default().to_json()));
    let reply = ann.submit(SubmitRequest { request_id: "2".into(), work, ..submit() }).await.unwrap();
    assert!(reply.into_inner().job.unwrap().name.starts_with("Trainer("));
    assert_eq!(ann.cancel(CancelRequest { job: 5, force: false }).await.unwrap().into_inner().id, 5);

    let refusals = [
        (CommandError::NotAllowed("no".into()), Code::PermissionDenied),
        (CommandError::Invalid("no".into()), Code::InvalidArgument),
        (CommandError::JobNotFound(5), Code::NotFound),
        (CommandError::LimitReached("no".into()), Code::ResourceExhausted),
        (CommandError::Unavailable("no".into()), Code::Unavailable),
    ];
    for (refused, code) in refusals {
        let case = Case::new([], Some(refused.clone()));
        let mut admin = case.client(ADMIN).await;
        let errors = [
            admin.submit(submit()).await.unwrap_err(),
            admin.cancel(CancelRequest { job: 5, force: false }).await.unwrap_err(),
            admin.drain(DrainRequest::default()).await.unwrap_err(),
        ];
        errors.iter().for_each(|error| {
            assert_eq!((error.code(), error.message()), (code, refused.to_string().as_str()));
        });
    }
}

#[tokio::test]
async fn health_and_reflection_answer() {
    use tonic_reflection::pb::{v1, v1alpha};
    let case = Case::new([], None);
    let channel = case.channel(ANN).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    let request = tonic_health::pb::HealthCheckRequest { service: "xlaunch.v1.Node".into() };
    assert_eq!(health.check(request).await.unwrap().into_inner().status, 1);
    macro_rules! describe {
        ($version:ident) => {{
            use $version::server_reflection_request::MessageRequest;
            let symbol = MessageRequest::FileContainingSymbol("xlaunch.v1.Node".into());
            let request =
                $version::ServerReflectionRequest { host: String::new(), message_request: Some(symbol) };
            let mut reflection =
                $version::server_reflection_client::ServerReflectionClient::new(channel.clone());
            let replies = reflection.server_reflection_info(tokio_stream::once(request)).await.unwrap();
            format!("{:?}", replies.into_inner().next().await.unwrap().unwrap())
        }};
    }
    for reply in [describe!(v1), describe!(v1alpha)] {
        assert!(reply.contains("FileDescriptorResponse"), "{reply}");
    }
}

#[tokio::test]
async fn oversized_or_malformed_requests_are_refused_and_the_connection_survives() {
    let case = Case::new([(1, ANN, NodeJobState::Running)], None);
    let mut ann = case.client(ANN).await;
    let large = SubmitRequest { environment: vec![vec![b'x'; 2 << 20]], ..submit() };
    let error = ann.submit(large).await.unwrap_err();
    assert!(matches!(error.code(), Code::OutOfRange | Code::ResourceExhausted), "{error}");

    for length in [24 << 10, 1 << 20] {
        let mut headers = Request::new(GetRequest { job: 1 });
        headers.metadata_mut().insert("x-long", MetadataValue::try_from("x".repeat(length)).unwrap());
        let mut other = case.client(ANN).await;
        soon("a call with long headers", other.get(headers)).await.unwrap_err();
    }

    let mut agent = xlaunch_proto::v1::agent_client::AgentClient::new(case.channel(ANN).await);
    let unknown = agent.stop(xlaunch_proto::v1::StopRequest {}).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);

    // A truncated field; an invalid wire type; an unterminated varint; an unknown field; a message shorter than its
    // length prefix; a compressed one of 4 GiB.
    let bodies: [&[u8]; 6] = [
        b"\0\0\0\0\x05\x0a\x7fabc",
        b"\0\0\0\0\x01\x0f",
        b"\0\0\0\0\x06\xff\xff\xff\xff\xff\xff",
        b"\0\0\0\0\x06\xfa\xff\x03\x02hi",
        b"\0\0\0\x01\0abc",
        b"\x07\xff\xff\xff\xff",
    ];
    let mut raw = Raw::new(case.connect(ANN)).await.unwrap();
    for (method, body) in METHODS.iter().flat_map(|method| bodies.map(|body| (*method, body))) {
        raw.call(method, body, END_STREAM).await;
        soon(method, raw.end_of_stream()).await;
    }
    assert_eq!(
        soon("a call of another user", ann.get(GetRequest { job: 1 })).await.unwrap().into_inner().id,
        1
    );
}

const METHODS: [&str; 8] = ["Submit", "List", "Get", "Watch", "Logs", "Cancel", "Drain", "Status"];

const DATA: u8 = 0;
const HEADERS_FRAME: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// A raw HTTP/2 client.
struct Raw {
    socket: UnixStream,
    stream: u32,
}

impl Raw {
    async fn new(mut socket: UnixStream) -> io::Result<Self> {
        socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
        let mut raw = Self { socket, stream: 0 };
        raw.frame(SETTINGS, 0, 0, b"").await?;
        Ok(raw)
    }

    async fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags];
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.socket.write_all(&frame).await
    }

    /// Sends the headers of a call on a new stream.
    async fn begin(&mut self, method: &str, flags: u8) -> io::Result<()> {
        self.stream = if self.stream == 0 { 1 } else { self.stream + 2 };
        let path = format!("/xlaunch.v1.Node/{method}");
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "node"),
            (":path", &path),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        let mut block = Vec::new();
        for (name, value) in headers {
            // HPACK: a literal field without indexing or Huffman coding.
            block.push(0);
            for text in [name, value] {
                block.push(u8::try_from(text.len()).unwrap());
                block.extend(text.as_bytes());
            }
        }
        self.frame(HEADERS_FRAME, flags, self.stream, &block).await
    }

    async fn call(&mut self, method: &str, body: &[u8], flags: u8) {
        self.begin(method, END_HEADERS).await.unwrap();
        self.frame(DATA, flags, self.stream, body).await.unwrap();
    }

    /// Waits until the server has ended the newest stream.
    async fn end_of_stream(&mut self) {
        loop {
            let mut head = [0; 9];
            self.socket.read_exact(&mut head).await.expect("the connection stays open");
            let [high, mid, low, kind, flags, stream @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, high, mid, low]) as usize];
            self.socket.read_exact(&mut payload).await.unwrap();
            assert_ne!(kind, GOAWAY, "{}", String::from_utf8_lossy(&payload));
            let ended = kind == RST_STREAM || (kind <= HEADERS_FRAME && flags & END_STREAM != 0);
            if ended && u32::from_be_bytes(stream) == self.stream {
                return;
            }
        }
    }
}

/// A hostile client of one of 8 kinds. Returns its connection if that is still open, so that it stays open.
async fn attack(case: &Case, uid: u32, kind: usize) -> Option<UnixStream> {
    // The server may close the connection at any point.
    let mut socket = case.connect(uid);
    match kind {
        0 => {}
        1 => drop(socket.write_all(&[0xa5; 300]).await),
        2 => drop(socket.write_all(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n").await),
        3 => drop(socket.write_all(b"PRI * HTTP/2.0\r\n").await),
        _ => {
            let Ok(mut raw) = Raw::new(socket).await else { return None };
            match kind {
                // An incomplete call.
                4 => drop(raw.begin("Submit", END_HEADERS).await),
                // Endless headers.
                5 => {
                    drop(raw.begin("Submit", 0).await);
                    for _ in 0..1000 {
                        if raw
                            .frame(
                                CONTINUATION,
                                0,
                                raw.stream,
                                &[b"\x00\x01a\x7f".as_slice(), &[b'x'; 127]].concat(),
                            )
                            .await
                            .is_err()
                        {
                            break;
                        }
                    }
                }
                // Rapid reset: calls that are cancelled immediately.
                6 => {
                    for _ in 0..500 {
                        let begun = raw.begin("Watch", END_HEADERS).await;
                        if begun.is_err()
                            || raw.frame(RST_STREAM, 0, raw.stream, &[0, 0, 0, 8]).await.is_err()
                        {
                            break;
                        }
                    }
                }
                // More concurrent calls than allowed.
                _ => {
                    for _ in 0..200 {
                        if raw.begin("Submit", END_HEADERS).await.is_err() {
                            break;
                        }
                    }
                }
            }
            socket = raw.socket;
        }
    }
    Some(socket).filter(|_| kind != 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_hostile_clients_do_not_disturb_others() {
    let case = Case::new([(1, ANN, NodeJobState::Running), (2, BOB, NodeJobState::Running)], None);
    let mut ann = case.client(ANN).await;
    let mut watched = ann.watch(GetRequest { job: 1 }).await.unwrap().into_inner();
    for _ in 0..7 {
        let mut open = Vec::new();
        for number in 0..160 {
            open.extend(soon("an attack", attack(&case, BOB, number % 8)).await);
            if number % 10 == 0 {
                let reply = soon("a call of another user", ann.get(GetRequest { job: 1 })).await;
                assert_eq!(reply.unwrap().into_inner().id, 1);
            }
        }
        let mut late = case.client(ANN).await;
        let reply = soon("a new caller", late.get(GetRequest { job: 1 })).await;
        assert_eq!(reply.unwrap().into_inner().id, 1);
        // The same user can still connect, and is served or gets an error about the used-up quota.
        let mut late = case.client(BOB).await;
        let reply = soon("a new caller of theirs", late.get(GetRequest { job: 2 })).await;
        reply.map_or_else(|error| assert_eq!(error.code(), Code::ResourceExhausted, "{error}"), drop);
    }
    let mut bob = case.client(BOB).await;
    soon("the end of the attacks", async {
        while bob.get(GetRequest { job: 2 }).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(watched.next().await.unwrap().unwrap().id, 1);
    case.shown.send_replace(Arc::default());
    assert_eq!(soon("the watch", watched.next()).await.unwrap().unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn rejected_connection_does_not_affect_others() {
    let case = Case::new([(1, ANN, NodeJobState::Running)], None);
    for _ in 0..3 {
        // The client is not bound to a path, so its user is unknown.
        let mut unknown = UnixStream::connect(case.dir.path().join("node.sock")).await.unwrap();
        assert_eq!(soon("its end", unknown.read(&mut [0])).await.unwrap(), 0);
    }
    soon("a call", case.client(ANN).await.get(GetRequest { job: 1 })).await.unwrap();
}

#[tokio::test]
async fn streams_are_limited_per_user() {
    let case = Case::new([(1, ANN, NodeJobState::Running), (2, BOB, NodeJobState::Running)], None);
    let mut watches = Vec::new();
    while watches.len() < STREAM_QUOTA.0 {
        let mut ann = case.client(ANN).await;
        for _ in 0..MAX_CALLS_PER_CONNECTION {
            watches.push(ann.watch(GetRequest { job: 1 }).await.unwrap());
        }
    }
    let mut ann = case.client(ANN).await;
    let error = ann.watch(GetRequest { job: 1 }).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    ann.get(GetRequest { job: 1 }).await.unwrap();
    case.client(BOB).await.watch(GetRequest { job: 2 }).await.unwrap();
    drop(watches);
    soon("the end of the others", async {
        while ann.watch(GetRequest { job: 1 }).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// A client that makes calls and reads no response.
async fn reads_nothing(case: &Case, uid: u32, method: &str, body: &[u8], calls: u32) -> Raw {
    let mut raw = Raw::new(case.connect(uid)).await.unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE: 0.
    raw.frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]).await.unwrap();
    for _ in 0..calls {
        raw.call(method, body, END_STREAM).await;
    }
    raw
}

#[tokio::test]
async fn unread_responses_count_against_their_caller_only() {
    let case = Case::new([(1, ANN, NodeJobState::Running), (2, BOB, NodeJobState::Running)], None);
    let (mut ann, mut bob) = (case.client(ANN).await, case.client(BOB).await);
    let lists = u32::try_from(LIST_QUOTA.0).unwrap();
    let unread = reads_nothing(&case, ANN, "List", b"\0\0\0\0\0", lists).await;
    let error = soon("the last list", async {
        loop {
            match ann.list(ListRequest::default()).await {
                Err(error) => return error,
                Ok(_) => tokio::task::yield_now().await,
            }
        }
    })
    .await;
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.message().contains("too many lists: 16"), "{error}");
    ann.get(GetRequest { job: 1 }).await.unwrap();
    bob.list(ListRequest::default()).await.unwrap();
    drop(unread);
    soon("the end of what was not read", async {
        while ann.list(ListRequest::default()).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;

    let mut unread = Vec::new();
    for _ in 0..CALL_QUOTA.0 / MAX_CALLS_PER_CONNECTION as usize {
        unread
            .push(reads_nothing(&case, ANN, "Get", b"\0\0\0\0\x02\x08\x01", MAX_CALLS_PER_CONNECTION).await);
    }
    soon("the last call", async {
        while ann.get(GetRequest { job: 1 }).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    bob.get(GetRequest { job: 2 }).await.unwrap();
}

#[tokio::test]
async fn health_watches_with_many_user_ids_do_not_lock_out_other_users() {
    raise_open_file_limit();
    let case = Case::new([(2, BOB, NodeJobState::Running)], None);
    let mut watches = Vec::new();
    for uid in (STRANGER..).take(600) {
        // Some connections are closed again in favour of later ones.
        if let Ok(channel) =
            xlaunch_proto::connect::connect_stream(case.connect(uid), xlaunch_proto::connect::endpoint())
                .await
        {
            watches.extend(HealthClient::new(channel).watch(HealthCheckRequest::default()).await);
        }
    }
    let answers = async |uid: u32| {
        let channel =
            xlaunch_proto::connect::connect_stream(case.connect(uid), xlaunch_proto::connect::endpoint())
                .await;
        match channel {
            Ok(channel) => NodeClient::new(channel).get(GetRequest { job: 2 }).await.is_ok(),
            Err(_) => false,
        }
    };
    soon("the lookups of these ids", async {
        while !answers(BOB).await {
            tokio::task::yield_now().await;
        }
    })
    .await;
    for _ in 0..10 {
        assert!(answers(BOB).await && answers(ADMIN).await);
    }
}

#[tokio::test]
async fn shutdown_closes_every_connection_without_waiting() {
    let mut case = Case::new([(1, ANN, NodeJobState::Running)], None);
    let mut ann = case.client(ANN).await;
    let mut watched = ann.watch(GetRequest { job: 1 }).await.unwrap().into_inner();
    assert_eq!(watched.next().await.unwrap().unwrap().id, 1);
    let mut silent = case.connect(ANN);
    case.end.take().unwrap().send(()).unwrap();
    soon("the end", &mut case.served).await.unwrap().unwrap();
    soon("the watch", watched.next()).await.unwrap().unwrap_err();
    let mut rest = Vec::new();
    // The connection may be reset rather than closed if the server has not read everything.
    drop(soon("a silent caller", silent.read_to_end(&mut rest)).await);
}
