//! Tests requests to the page of a sample node over real sockets.

mod metrics;
mod sample_node;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use xlaunch_proto::v1::{NodeJobState, Progress};

use super::*;
use crate::view::NodeView;
use sample_node::{HOSTILE, job, sample_node};
use xlaunch_host::clock::unix_ms;
use xlaunch_host::spawn::raise_open_file_limit;

const HANG_TIMEOUT: Duration = Duration::from_secs(60);
/// The page of the sample node. Dropping this shuts it down.
struct Served {
    address: String,
    view: watch::Sender<Arc<NodeView>>,
    _commands: mpsc::Receiver<crate::commands::Command>,
    _shutdown: oneshot::Sender<()>,
}

impl Served {
    async fn new() -> Self {
        Self::on(Listen::Tcp(([127, 0, 0, 1], 0).into())).await
    }

    async fn on(listen: Listen) -> Self {
        let listener = Listener::bind(&listen).await.unwrap();
        let address = match (&listener, &listen) {
            (Listener::Tcp(listener), _) => listener.local_addr().unwrap().to_string(),
            (_, Listen::Unix(path)) => path.to_str().unwrap().to_string(),
            _ => unreachable!(),
        };
        let (commands, receiver) = mpsc::channel(1);
        let (view, seen) = watch::channel(Arc::new(sample_node(unix_ms(), 800)));
        let (shutdown, shutting_down) = oneshot::channel::<()>();
        let logs: LogTail = Arc::new(|job, rank, stderr, lines| {
            Box::pin(async move {
                if rank == 13 {
                    return Err("rank 13 has no log".into());
                }
                let stream = if stderr { "stderr" } else { "stdout" };
                Ok((1..=lines)
                    .map(|line| format!("{stream} of job {job}, rank {rank}: line {line} <b>"))
                    .collect())
            })
        });
        tokio::spawn(serve(listener, NodeHandle::new(commands, seen), logs, async {
            let _ = shutting_down.await;
        }));
        Self { address, view, _commands: receiver, _shutdown: shutdown }
    }

    async fn connect(&self) -> Box<dyn listen::Stream> {
        if self.address.starts_with('/') {
            Box::new(UnixStream::connect(&self.address).await.unwrap())
        } else {
            Box::new(TcpStream::connect(&self.address).await.unwrap())
        }
    }

    /// Sends these bytes, which must request to close the connection, and returns the response.
    async fn send(&self, request: &str) -> HttpResponse {
        let exchange = async {
            let mut stream = self.connect().await;
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut response = Vec::new();
            stream.read_to_end(&mut response).await.unwrap();
            String::from_utf8(response).unwrap()
        };
        let text = tokio::time::timeout(HANG_TIMEOUT, exchange).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?} to {request:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        HttpResponse { status, head: head.to_lowercase(), body: body.into() }
    }

    async fn get(&self, path: &str) -> HttpResponse {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).await
    }

    async fn json(&self, path: &str) -> Value {
        let response = self.get(path).await;
        assert_eq!(response.status, 200, "{path}: {}", response.body);
        serde_json::from_str(&response.body).unwrap()
    }
}

struct HttpResponse {
    status: u16,
    head: String,
    body: String,
}

#[tokio::test]
async fn api_serves_node_and_jobs_as_json() {
    let served = Served::new().await;
    let node = served.json("/api/v1/node").await;
    assert_eq!(node["node"]["host"], "node-17");
    let gpus = &node["node"]["gpus"];
    assert_eq!(gpus[6]["state"], "sick");
    assert_eq!((&gpus[0]["job"], &gpus[4]["job"]), (&json!(7), &Value::Null));
    // Running jobs, then queued ones by position, then ended ones.
    let ids: Vec<_> =
        node["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, [7, 8, 9, 6, 5, 4, 3]);
    assert_eq!((&node["jobs"][0]["step"], &node["jobs"][0]["restarts"]), (&json!(800), &json!(1)));
    assert_eq!((&node["jobs"][1]["step"], &node["jobs"][1]["started_unix_ms"]), (&Value::Null, &Value::Null));
    assert_eq!((&node["jobs"][2]["name"], &node["jobs"][3]["loss"]), (&json!(HOSTILE), &json!("NaN")));

    assert_eq!((&node["jobs"][0]["mfu"], &node["jobs"][1]["mfu"]), (&json!(0.41), &Value::Null));

    let job = served.json("/api/v1/jobs/7").await;
    assert_eq!(job["mfu"], 0.41);
    assert_eq!(job["history"].as_array().unwrap().len(), 400);
    assert_eq!(job["history"][399]["step"], 800);
    assert_eq!(job["status"]["ranks"][3]["hint"], "no output for 312 s, no CPU time");
    assert_eq!(job["status"]["past_restarts"][0]["rank"], 2);
    assert_eq!(job["loss"], job["history"][399]["loss"]);
    let failed = served.json("/api/v1/jobs/6").await;
    assert!(failed["report"].as_str().unwrap().contains("rank 2 of 4"), "{failed}");
}

/// Returns what the API serves for a path, without times of the test.
async fn reviewed(served: &Served, path: &str) -> String {
    let mut value = served.json(path).await;
    for key in ["unix_ms", "status_age_seconds"] {
        if let Some(time) = value.get_mut(key) {
            *time = json!("[time]");
        }
    }
    serde_json::to_string_pretty(&value).unwrap()
}

#[tokio::test]
async fn api_serves_these_keys() {
    let served = Served::new().await;
    let mut view = sample_node(1_795_000_000_000, 800);
    view.jobs.retain(|job, _| [7, 8, 6].contains(job));
    let training = Arc::get_mut(view.jobs.get_mut(&7).unwrap()).unwrap();
    training.job.command_line = "xlaunch train.toml".into();
    let point = Progress { unix_ms: 1_794_999_999_000, step: 800, loss: 2.5, tokens_per_second: 4.25e6 };
    training.history = [point].into();
    let (status, _) = training.status.as_mut().unwrap();
    let status = Arc::get_mut(status).unwrap();
    (status.loss, status.tokens_per_second) = (point.loss, point.tokens_per_second);
    served.view.send_replace(Arc::new(view));
    insta::assert_snapshot!("node", reviewed(&served, "/api/v1/node").await);
    insta::assert_snapshot!("job", reviewed(&served, "/api/v1/jobs/7").await);
}

#[tokio::test]
async fn long_job_list_keeps_running_jobs() {
    let served = Served::new().await;
    let mut view = sample_node(unix_ms(), 10);
    for id in 100..700 {
        view.jobs.insert(id, Arc::new(job(id, "old", NodeJobState::Done)));
    }
    served.view.send_replace(Arc::new(view));
    let node = served.json("/api/v1/node").await;
    assert_eq!((&node["jobs"][0]["id"], &node["jobs"][3]["id"]), (&json!(7), &json!(699)));
    assert_eq!(node["jobs_left_out"], json!(607 - node["jobs"].as_array().unwrap().len()));
    assert!(node["jobs_left_out"].as_u64().unwrap() > 0);
}

#[tokio::test]
async fn api_serves_the_tail_of_a_log() {
    let served = Served::new().await;
    let log = served.json("/api/v1/jobs/7/logs?rank=2&stream=stderr&lines=3").await;
    assert_eq!(log["lines"].as_array().unwrap().len(), 3);
    assert_eq!(log["lines"][2], "stderr of job 7, rank 2: line 3 <b>");
    assert_eq!(served.json("/api/v1/jobs/7/logs").await["lines"][0], "stdout of job 7, rank 0: line 1 <b>");
    for (path, status, why) in [
        ("7/logs?rank=13", 404, "rank 13 has no log"),
        ("7/logs?lines=501", 400, "1 to 500"),
        ("7/logs?lines=0", 400, "1 to 500"),
        ("7/logs?stream=both", 400, "stdout|stderr"),
        ("7/logs?rank=-1", 400, "rank=R"),
        ("7/logs?path=/etc/passwd", 400, "parameters are"),
        ("70/logs", 404, "no job 70"),
        ("seven/logs", 400, "numbers"),
        ("seven", 400, "numbers"),
        ("70", 404, "no job 70"),
    ] {
        let response = served.get(&format!("/api/v1/jobs/{path}")).await;
        assert_eq!(response.status, status, "{path}");
        let error: Value = serde_json::from_str(&response.body).unwrap();
        assert!(error["error"].as_str().unwrap().contains(why), "{path}: {error}");
    }
}

#[tokio::test]
async fn page_and_assets_are_served_with_security_headers() {
    let served = Served::new().await;
    let page = served.get("/").await;
    for file in ["page.css", "page.js", "icon.svg"] {
        assert!(page.body.contains(&format!("\"/assets/{file}\"")), "{file}");
    }
    for (path, kind) in [
        ("/", "text/html"),
        ("/assets/page.css", "text/css"),
        ("/assets/page.js", "text/javascript"),
        ("/assets/chart.js", "text/javascript"),
        ("/assets/icon.svg", "image/svg+xml"),
        ("/api/v1/node", "application/json"),
        ("/metrics", "text/plain; version=0.0.4"),
    ] {
        let response = served.get(path).await;
        assert_eq!(response.status, 200, "{path}");
        for line in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "x-frame-options: deny",
            "cache-control: no-store",
        ] {
            assert!(response.head.contains(line), "{path} lacks {line:?}: {}", response.head);
        }
        assert!(!response.head.contains("access-control"), "{path}");
    }
    // The content security policy blocks inline styles and scripts.
    assert!(
        !page.body.contains("<style") && !page.body.contains(" style=") && !page.body.contains("onclick")
    );
    assert_eq!(served.get("/assets/mod.rs").await.status, 404);
    assert_eq!(served.get("/favicon.ico").await.status, 404);
}

#[tokio::test]
async fn metrics_have_the_format_that_the_scraper_accepts() {
    let served = Served::new().await;
    for (accept, kind) in [
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=0.0.4;q=0.3,*/*;q=0.2", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "application/openmetrics-text; version=1",
        ),
    ] {
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
        );
        let response = served.send(&request).await;
        assert!(response.head.contains(&format!("content-type: {kind}")), "{accept}: {}", response.head);
    }
}

#[tokio::test]
async fn only_get_and_head_without_body_are_served() {
    let served = Served::new().await;
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NEW"] {
        let request =
            format!("{method} /api/v1/jobs/7 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let response = served.send(&request).await;
        assert_eq!(response.status, 405, "{method}");
        assert!(response.head.contains("allow: get, head"), "{method}: {}", response.head);
    }
    let head = served.send("HEAD /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    let body = "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
    assert_eq!(served.send(body).await.status, 413);
}

#[tokio::test]
async fn tcp_request_must_name_a_loopback_host() {
    let served = Served::new().await;
    for (status, host) in [
        (200, "Host: localhost:9470\r\n"),
        (200, "Host: 127.0.0.1\r\n"),
        (200, "Host: [::1]:9470\r\n"),
        (403, "Host: evil.example:9470\r\n"),
        (403, "Host: localhost\r\nHost: evil.example\r\n"),
        (403, ""),
    ] {
        let response =
            served.send(&format!("GET /api/v1/node HTTP/1.1\r\n{host}Connection: close\r\n\r\n")).await;
        assert_eq!(response.status, status, "{host:?}");
        assert_eq!(response.body.contains("node-17"), status == 200, "{host:?}");
        assert!(status == 200 || response.body.contains("http://localhost"), "{}", response.body);
    }
    let proxied = "GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(served.send(proxied).await.status, 403);

    let dir = tempfile::tempdir().unwrap();
    let served = Served::on(Listen::Unix(dir.path().join("web.sock"))).await;
    let proxied = "GET / HTTP/1.1\r\nHost: node-17.example\r\nConnection: close\r\n\r\n";
    assert_eq!(served.send(proxied).await.status, 200);
}

#[tokio::test]
async fn unfinished_requests_keep_no_client_out() {
    raise_open_file_limit();
    let served = Served::new().await;
    let many = async {
        let mut slow = Vec::new();
        for number in 0..1000 {
            let mut stream = TcpStream::connect(&served.address).await.unwrap();
            // Some clients send nothing, some an incomplete request.
            if number % 2 == 0 {
                let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: loc").await;
            }
            slow.push(stream);
        }
        slow
    };
    // No new connection has to wait until an older one times out.
    let mut slow = tokio::time::timeout(HANG_TIMEOUT, many).await.expect("a new connection has to wait");
    for path in ["/metrics", "/"] {
        assert_eq!(served.get(path).await.status, 200);
    }
    // The first connection was closed; the last one can still complete its request.
    let mut rest = Vec::new();
    let end = tokio::time::timeout(HANG_TIMEOUT, slow[0].read_to_end(&mut rest))
        .await
        .expect("the connection is still open");
    assert!(end.is_err() || rest.is_empty(), "{rest:?}");
    let last = &mut slow[998];
    last.write_all(b"alhost\r\nConnection: close\r\n\r\n").await.unwrap();
    tokio::time::timeout(HANG_TIMEOUT, last.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&rest));
}

#[tokio::test]
async fn idle_connection_is_closed() {
    let served = Served::new().await;
    let mut stream = TcpStream::connect(&served.address).await.unwrap();
    stream.write_all(b"GET /assets/icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT").await.unwrap();
    let mut responses = Vec::new();
    tokio::time::timeout(HANG_TIMEOUT, stream.read_to_end(&mut responses))
        .await
        .expect("the connection is still open")
        .unwrap();
    let responses = String::from_utf8(responses).unwrap();
    assert!(responses.starts_with("HTTP/1.1 200"), "{responses}");
    assert!(!responses.contains("<!doctype html>"), "{responses}");
}

#[tokio::test]
async fn shutdown_closes_connections_and_listener() {
    let served = Served::new().await;
    let (mut stream, address) = (served.connect().await, served.address.clone());
    drop(served);
    let mut rest = Vec::new();
    let end = tokio::time::timeout(HANG_TIMEOUT, stream.read_to_end(&mut rest))
        .await
        .expect("the connection is still open");
    assert!(end.is_err() || rest.is_empty());
    assert!(TcpStream::connect(&address).await.is_err(), "it still listens");
}
