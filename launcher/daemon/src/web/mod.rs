//! The page for people, its JSON, and `/metrics`: what the node looks like to whoever may reach the address.
//!
//! ```text
//! browser, Prometheus --HTTP/1.1--> listen --> connections (64 at most) --> guard --> page | api | metrics
//!                                                                                            ^
//!                                          the manager's view, which is read and never changed
//! ```
//! - Nothing can be ordered here: the methods are GET and HEAD, and requests have no bodies.
//! - It hides nothing of any job from whoever reaches it; so it listens on loopback or on a unix socket alone.
//! - Texts of users go out as JSON strings and as label values, never as HTML.

mod api;
mod connections;
mod guard;
mod listen;
mod metrics;
mod page;
#[cfg(test)]
mod tests;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

pub use self::listen::Listen;
use self::listen::Listener;
use super::orders::Node;
use xlaunch_agent::clock::unix_ms;

/// Longest wait for the lines of a log.
const LOG_TIMEOUT: Duration = Duration::from_secs(10);
/// Most lines of a log in an answer.
const MOST_LINES: usize = 500;

/// The last lines of a rank's log, or why there are none: asked with the job, the rank, whether stderr is meant, and how many
/// lines. Whoever answers bounds the bytes that are read, and reads with the rights of the job's user.
pub type LogTail = Arc<dyn Fn(u64, u32, bool, usize) -> Lines + Send + Sync>;
/// Lines to come.
pub type Lines = Pin<Box<dyn Future<Output = Result<Vec<String>, String>> + Send>>;

/// Serves the node's page until `ended` is. Whoever is being answered then is cut off.
///
/// # Errors
/// Where `listen` cannot be listened on; the text names it.
pub async fn serve(
    listen: Listen,
    node: Node,
    logs: LogTail,
    ended: impl Future<Output = ()>,
) -> io::Result<()> {
    let listener = Listener::bind(&listen).await?;
    serve_on(listener, node, logs, ended).await;
    Ok(())
}

async fn serve_on(listener: Listener, node: Node, logs: LogTail, ended: impl Future<Output = ()>) {
    let routes = routes(node, logs, listener.any_host());
    connections::serve(listener, routes, ended).await;
}

#[derive(Clone)]
struct Shown {
    node: Node,
    logs: LogTail,
}

fn routes(node: Node, logs: LogTail, any_host: bool) -> Router {
    Router::new()
        .route("/", get(page::index))
        .route("/assets/{name}", get(page::asset))
        .route("/api/v1/node", get(node_json))
        .route("/api/v1/jobs/{id}", get(job_json))
        .route("/api/v1/jobs/{id}/logs", get(log_json))
        .route("/metrics", get(metrics_text))
        .fallback(async || refusal(StatusCode::NOT_FOUND, "there is nothing here; the page is at /"))
        .layer(axum::middleware::from_fn_with_state(any_host, guard::check))
        .with_state(Shown { node, logs })
}

async fn node_json(State(shown): State<Shown>) -> Json<Value> {
    Json(api::node(&shown.node.view(), unix_ms()))
}

async fn job_json(State(shown): State<Shown>, id: Result<Path<u64>, PathRejection>) -> Response {
    let Ok(Path(id)) = id else { return no_number() };
    match shown.node.view().jobs.get(&id) {
        Some(job) => Json(api::job(job, unix_ms())).into_response(),
        None => no_job(id),
    }
}

/// What `/logs` takes after the question mark.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LogQuery {
    rank: u32,
    stream: Stream,
    lines: usize,
}

impl Default for LogQuery {
    fn default() -> Self {
        Self { rank: 0, stream: Stream::Stdout, lines: 100 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Stream {
    Stdout,
    Stderr,
}

async fn log_json(
    State(shown): State<Shown>,
    id: Result<Path<u64>, PathRejection>,
    query: Result<Query<LogQuery>, QueryRejection>,
) -> Response {
    let Ok(Path(id)) = id else { return no_number() };
    let Query(LogQuery { rank, stream, lines }) = match query {
        Ok(query) if (1..=MOST_LINES).contains(&query.lines) => query,
        _ => {
            let usage =
                format!("it takes rank=R, stream=stdout or stderr, and lines=N, 1 to {MOST_LINES} of them");
            return refusal(StatusCode::BAD_REQUEST, &usage);
        }
    };
    if !shown.node.view().jobs.contains_key(&id) {
        return no_job(id);
    }
    let lines = (shown.logs)(id, rank, stream == Stream::Stderr, lines);
    match tokio::time::timeout(LOG_TIMEOUT, lines).await {
        Ok(Ok(lines)) => Json(json!({ "lines": lines })).into_response(),
        Ok(Err(problem)) => refusal(StatusCode::NOT_FOUND, &problem),
        Err(_) => refusal(StatusCode::GATEWAY_TIMEOUT, "the log cannot be read: its disk does not answer"),
    }
}

async fn metrics_text(State(shown): State<Shown>) -> Response {
    match metrics::text(shown.node.view(), unix_ms()) {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

fn no_number() -> Response {
    refusal(StatusCode::BAD_REQUEST, "jobs have numbers, counted from 1")
}

fn no_job(id: u64) -> Response {
    refusal(StatusCode::NOT_FOUND, &format!("there is no job {id}, or it has been forgotten"))
}

fn refusal(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({ "error": why }))).into_response()
}
