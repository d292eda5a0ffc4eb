//! Clients of a daemon: well-behaved ones with a fixed rate or at full speed, and hostile ones.

use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::transport::Channel;
use xlaunch_proto::v1::node_client::NodeClient;
use xlaunch_proto::v1::{GetRequest, JobLogsRequest, ListRequest, LogsRequest, NodeStatusRequest};

use crate::connect;

/// Number of connections over which queries are sent at a fixed rate.
const QUERY_CONNECTIONS: usize = 16;
const FOLLOWERS_PER_CONNECTION: usize = 25;

/// Clients that query the node at a fixed rate, and followers of a job's logs. They run until this is dropped.
pub(crate) struct Clients {
    _tasks: JoinSet<()>,
    replies: Arc<AtomicUsize>,
    start: Instant,
}

impl Clients {
    pub(crate) async fn start(socket: &Path, job: u64, rate: usize, followers: usize) -> Self {
        let mut tasks = JoinSet::new();
        let mut shared = None;
        for number in 0..followers {
            if number % FOLLOWERS_PER_CONNECTION == 0 {
                shared = Some(connect(socket).await);
            }
            let mut client = shared.clone().unwrap();
            let logs = LogsRequest { stream: 2, follow: true, ..Default::default() };
            tasks.spawn(async move {
                let request = JobLogsRequest { job, logs: Some(logs) };
                let mut pieces = client.logs(request).await.unwrap().into_inner();
                while let Ok(Some(_)) = pieces.message().await {}
            });
        }
        let (replies, start) = (Arc::new(AtomicUsize::new(0)), Instant::now());
        for _ in 0..if rate > 0 { QUERY_CONNECTIONS } else { 0 } {
            let (mut client, replies) = (connect(socket).await, replies.clone());
            tasks.spawn(async move {
                loop {
                    let due = (start.elapsed().as_secs_f64() * rate as f64) as usize;
                    if replies.load(Ordering::Relaxed) >= due {
                        sleep(Duration::from_millis(1)).await;
                        continue;
                    }
                    client.status(NodeStatusRequest {}).await.unwrap();
                    replies.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self { _tasks: tasks, replies, start }
    }

    pub(crate) fn replies_per_second(&self) -> f64 {
        self.replies.load(Ordering::Relaxed) as f64 / self.start.elapsed().as_secs_f64()
    }
}

/// Queries the node and its jobs 1 to `jobs` in turn, or without `jobs` the list of all jobs, as fast as the daemon
/// replies. Returns the sorted latencies in milliseconds.
pub(crate) async fn query(
    socket: &Path,
    connections: usize,
    pipelined: usize,
    time: Duration,
    jobs: Option<u64>,
) -> Vec<f64> {
    let deadline = Instant::now() + time;
    let mut tasks = JoinSet::new();
    for _ in 0..connections {
        let client = connect(socket).await;
        for _ in 0..pipelined {
            let client = client.clone();
            tasks.spawn(async move {
                match jobs {
                    Some(jobs) => query_until(client, deadline, jobs).await,
                    None => list_until(client, deadline).await,
                }
            });
        }
    }
    let mut latencies = tasks.join_all().await.concat();
    latencies.sort_by(f64::total_cmp);
    latencies
}

async fn query_until(mut client: NodeClient<Channel>, deadline: Instant, jobs: u64) -> Vec<f64> {
    let mut latencies = Vec::new();
    let mut job = 0;
    loop {
        let sent = Instant::now();
        client.status(NodeStatusRequest {}).await.unwrap();
        latencies.push(sent.elapsed().as_secs_f64() * 1e3);
        let sent = Instant::now();
        job = job % jobs + 1;
        client.get(GetRequest { job }).await.unwrap();
        latencies.push(sent.elapsed().as_secs_f64() * 1e3);
        if Instant::now() >= deadline {
            return latencies;
        }
    }
}

async fn list_until(mut client: NodeClient<Channel>, deadline: Instant) -> Vec<f64> {
    let mut latencies = Vec::new();
    while latencies.is_empty() || Instant::now() < deadline {
        let sent = Instant::now();
        client.list(ListRequest { ended: true, ..ListRequest::default() }).await.unwrap();
        latencies.push(sent.elapsed().as_secs_f64() * 1e3);
    }
    latencies
}

/// Opens connections that are silent, send garbage, or never finish the HTTP/2 handshake or a request. Reports them on
/// stderr and holds them. With `churn`, replaces the oldest one every millisecond.
pub(crate) fn hold_hostile_connections(socket: &Path, count: usize, churn: bool) -> ! {
    let mut open = VecDeque::new();
    for kind in 0..count {
        open.push_back(open_hostile_connection(socket, kind));
    }
    eprintln!("holding {count} connections");
    let mut kind = count;
    loop {
        std::thread::sleep(Duration::from_millis(1));
        if churn {
            open.pop_front();
            open.push_back(open_hostile_connection(socket, kind));
            kind += 1;
        }
    }
}

fn open_hostile_connection(socket: &Path, kind: usize) -> UnixStream {
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    loop {
        let Ok(mut stream) = UnixStream::connect(socket) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        // The server may have closed the connection already.
        let _ = match kind % 4 {
            0 => Ok(()),
            1 => stream.write_all(&[0xa5; 300]),
            2 => stream.write_all(&preface[..16]),
            _ => stream.write_all(preface),
        };
        return stream;
    }
}
