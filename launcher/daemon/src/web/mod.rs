//! The web page, its JSON API and `/metrics`.
//!
//! ```text
//! browser, Prometheus --HTTP/1.1--> listen --> net::http (64 connections at most) --> guard --> page | api | metrics
//!                                                                                                      ^
//!                                                                                      view (read-only)
//! ```
//! Invariants:
//! - the page is read-only: only GET and HEAD are served, and requests must not have bodies;
//! - it has no authentication and shows all jobs, so it listens only on loopback or a unix socket;
//! - texts of users are sent as JSON strings and label values, never as HTML.

pub(crate) mod api;
mod guard;
mod listen;
pub(crate) mod metrics;
mod page;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

pub(crate) use self::listen::{Listen, Listener};
use super::commands::NodeHandle;
use xlaunch_host::clock::unix_ms;
use xlaunch_host::net::Replaces;
use xlaunch_host::net::http::{self, HttpLimits};

/// Beyond this, a new connection replaces the oldest one, even if a request is in progress: browsers open it again.
const MAX_CONNECTIONS: usize = 64;

/// Timeout for reading the lines of a log.
const LOG_READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of log lines in a response.
const MAX_LOG_LINES: usize = 500;

/// Reads the last lines of a log. Arguments: job, rank, whether to read stderr, and number of lines. An error is the
/// reason why there are none. The implementation bounds the bytes, and reads only files that the job's user may read.
pub(crate) type LogTail = Arc<dyn Fn(u64, u32, bool, usize) -> LogLines + Send + Sync>;
pub(crate) type LogLines = Pin<Box<dyn Future<Output = Result<Vec<String>, String>> + Send>>;

/// Returns a function that refuses to show logs: the page has no authentication, and logs belong to the jobs' users.
pub(crate) fn no_logs() -> LogTail {
    let refusal = "logs are not shown here; `xlaunch logs` shows them to the job's user (web.show_logs)";
    Arc::new(move |_, _, _, _| Box::pin(async move { Err(refusal.into()) }))
}

/// Serves the page until `shutdown` resolves, then drops all connections.
pub(crate) async fn serve(
    listener: Listener,
    node: NodeHandle,
    logs: LogTail,
    shutdown: impl Future<Output = ()>,
) {
    let routes = routes(node, logs, listener.any_host());
    let limits = HttpLimits { connections: MAX_CONNECTIONS, replaces: Replaces::Own };
    http::serve(listener, limits, routes, shutdown).await;
}

/// State that request handlers share.
#[derive(Clone)]
struct AppState {
    node: NodeHandle,
    logs: LogTail,
}

fn routes(node: NodeHandle, logs: LogTail, any_host: bool) -> Router {
    Router::new()
        .route("/", get(page::index))
        .route("/assets/{name}", get(page::asset))
        .route("/api/v1/node", get(node_json))
        .route("/api/v1/jobs/{id}", get(job_json))
        .route("/api/v1/jobs/{id}/logs", get(log_json))
        .route("/metrics", get(metrics_text))
        .fallback(async || error(StatusCode::NOT_FOUND, "not found; the page is at /"))
        .layer(axum::middleware::from_fn_with_state(any_host, guard::check))
        .with_state(AppState { node, logs })
}

async fn node_json(State(state): State<AppState>) -> Json<Value> {
    Json(api::node(&state.node.view(), unix_ms()))
}

async fn job_json(State(state): State<AppState>, id: Result<Path<u64>, PathRejection>) -> Response {
    let Ok(Path(id)) = id else { return invalid_id() };
    match state.node.view().jobs.get(&id) {
        Some(job) => Json(api::job(job, unix_ms())).into_response(),
        None => job_not_found(id),
    }
}

/// The query parameters of `/logs`.
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
    State(state): State<AppState>,
    id: Result<Path<u64>, PathRejection>,
    query: Result<Query<LogQuery>, QueryRejection>,
) -> Response {
    let Ok(Path(id)) = id else { return invalid_id() };
    let Query(LogQuery { rank, stream, lines }) = match query {
        Ok(query) if (1..=MAX_LOG_LINES).contains(&query.lines) => query,
        _ => {
            let expected = format!(
                "invalid query: the parameters are rank=R, stream=stdout|stderr and lines=N (1 to {MAX_LOG_LINES})"
            );
            return error(StatusCode::BAD_REQUEST, &expected);
        }
    };
    if !state.node.view().jobs.contains_key(&id) {
        return job_not_found(id);
    }
    let lines = (state.logs)(id, rank, stream == Stream::Stderr, lines);
    match tokio::time::timeout(LOG_READ_TIMEOUT, lines).await {
        Ok(Ok(lines)) => Json(json!({ "lines": lines })).into_response(),
        Ok(Err(problem)) => error(StatusCode::NOT_FOUND, &problem),
        Err(_) => {
            let why = format!("failed to read the log: no reply within {} s", LOG_READ_TIMEOUT.as_secs());
            error(StatusCode::GATEWAY_TIMEOUT, &why)
        }
    }
}

async fn metrics_text(State(state): State<AppState>, headers: HeaderMap) -> Response {
    let accept = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = metrics::Format::accepted_by(&accept.collect::<Vec<_>>().join(","));
    match metrics::text(state.node.view(), unix_ms(), format) {
        Ok(text) => ([(header::CONTENT_TYPE, format.content_type())], text).into_response(),
        Err(problem) => error(StatusCode::INTERNAL_SERVER_ERROR, &problem.to_string()),
    }
}

fn invalid_id() -> Response {
    error(StatusCode::BAD_REQUEST, "invalid job id: ids are numbers from 1")
}

fn job_not_found(id: u64) -> Response {
    error(StatusCode::NOT_FOUND, &format!("there is no job {id}, or it has been forgotten"))
}

fn error(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({ "error": why }))).into_response()
}
