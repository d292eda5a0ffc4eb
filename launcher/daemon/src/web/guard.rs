//! Request filter and security headers.
//!
//! Over TCP only requests with a loopback `Host` are served: see [`xlaunch_host::net::http::loopback`].

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use xlaunch_host::net::http::names_loopback;

/// Content security policy: scripts, styles and data only from the daemon, and no framing of the page.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Middleware that refuses unwanted requests and adds security headers. `any_host` turns off the check of `Host`.
pub(super) async fn check(State(any_host): State<bool>, request: Request, next: Next) -> Response {
    let mut response = match refusal(any_host, &request) {
        Some((status, why)) => (status, why).into_response(),
        None => next.run(request).await,
    };
    let status = response.status();
    let headers = response.headers_mut();
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        // The state changes all the time, and an upgraded daemon may have other assets.
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    response
}

fn refusal(any_host: bool, request: &Request) -> Option<(StatusCode, &'static str)> {
    if !any_host && !names_loopback(request) {
        let why = "request refused: its Host header is not localhost or a loopback address; use http://localhost or \
                   http://127.0.0.1 with the port, and let a proxy set the Host header to that\n";
        return Some((StatusCode::FORBIDDEN, why));
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let why = "request refused: the page is read-only; use xlaunch to submit and cancel jobs\n";
        return Some((StatusCode::METHOD_NOT_ALLOWED, why));
    }
    if !request.body().is_end_stream() {
        return Some((StatusCode::PAYLOAD_TOO_LARGE, "request refused: it has a body\n"));
    }
    None
}
