//! Request filter and security headers.
//!
//! A page of another site can make a browser send requests to loopback addresses and, through DNS rebinding, read the
//! responses. Such requests have the name of the other site in `Host`, so over TCP only requests with a loopback `Host`
//! are served.

use std::net::{IpAddr, Ipv6Addr};

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

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

fn names_loopback(request: &Request) -> bool {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    // An absolute URI in the request line overrides the header.
    let target = request.uri().authority().is_none_or(|authority| is_loopback(authority.as_str()));
    target && host.to_str().is_ok_and(is_loopback)
}

/// Returns whether `HOST` or `HOST:PORT` is loopback, without asking a name server.
fn is_loopback(host: &str) -> bool {
    if let Some((address, port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return is_port(port) && address.parse().is_ok_and(|address: Ipv6Addr| address.is_loopback());
    }
    let (name, port) = host.split_at(host.find(':').unwrap_or(host.len()));
    is_port(port)
        && (name.eq_ignore_ascii_case("localhost")
            || name.parse().is_ok_and(|address: IpAddr| address.is_loopback()))
}

/// Returns whether the text is empty, or a colon and a port.
fn is_port(text: &str) -> bool {
    text.is_empty() || text.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_is_loopback_by_literal_comparison_only() {
        for host in ["localhost", "LOCALHOST:9470", "127.0.0.1", "127.1.2.3:80", "[::1]", "[::1]:9470"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "localhost.",
            "127.0.0.1.evil.example",
            "127.1",
            "2130706433",
            "0.0.0.0",
            "10.0.0.1:9470",
            "[::]",
            "[::ffff:127.0.0.1]",
            "::1",
            "localhost:",
            "localhost:x",
            "localhost@evil",
            "evil@localhost",
            "[::1]evil",
            "localhost:9470:1",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
