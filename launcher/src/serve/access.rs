//! Who may send requests: the check of `Host` on loopback, and of the token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use xlaunch_cluster::net::Token;
use xlaunch_host::net::http::names_loopback;

use super::error::ApiError;

/// Path that needs no token, for load balancers.
pub(super) const HEALTH: &str = "/health";

/// Rules of access.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// True if the server listens on a loopback address, so that requests must name one as well.
    pub(crate) is_loopback: bool,
    /// Secret that clients send as their API key.
    pub(crate) token: Option<Arc<Token>>,
}

/// Middleware that refuses requests without access.
pub(super) async fn check(State(access): State<Access>, request: Request, next: Next) -> Response {
    if access.is_loopback && !names_loopback(&request) {
        let why = "the request's Host header is not localhost or a loopback address; use http://localhost or \
                   http://127.0.0.1 with the port";
        return ApiError::new(StatusCode::FORBIDDEN, why).into_response();
    }
    match &access.token {
        Some(token) if request.uri().path() != HEALTH && !has_token(request.headers(), token) => {
            let why =
                "the request has no valid API key; send this server's token as `Authorization: Bearer TOKEN`";
            let error = ApiError::new(StatusCode::UNAUTHORIZED, why);
            ApiError { code: Some("invalid_api_key"), ..error }.into_response()
        }
        _ => next.run(request).await,
    }
}

fn has_token(headers: &HeaderMap, token: &Token) -> bool {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return false };
    let Some((scheme, sent)) = value.as_bytes().split_at_checked(b"Bearer ".len()) else { return false };
    scheme.eq_ignore_ascii_case(b"Bearer ") && token.is(sent)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn token_is_a_bearer_token() {
        let token = Token::from_bytes(b"0123456789abcdef".to_vec(), "test").unwrap();
        let has = |value: &'static str| {
            has_token(
                &HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))]),
                &token,
            )
        };
        assert!(has("Bearer 0123456789abcdef") && has("bearer 0123456789abcdef"));
        for wrong in
            ["", "Bearer", "Bearer ", "0123456789abcdef", "Basic 0123456789abcdef", "Bearer 0123456789abcdeX"]
        {
            assert!(!has(wrong), "{wrong}");
        }
        assert!(!has_token(&HeaderMap::new(), &token));
    }
}
