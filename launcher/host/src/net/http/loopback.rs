//! The host that a request names.
//!
//! A page of another site can make a browser send requests to loopback addresses and, through DNS rebinding, read the
//! responses. Such requests have the name of the other site in `Host`, so a server on a loopback address answers only
//! requests with a loopback `Host`.

use std::net::{IpAddr, Ipv6Addr};

use axum::extract::Request;
use axum::http::header;

/// Returns whether a request names `localhost` or a loopback address, and nothing else.
pub fn names_loopback(request: &Request) -> bool {
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
