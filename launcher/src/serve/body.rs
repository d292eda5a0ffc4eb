//! Reads the body of a request, within limits of size and time.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use tokio_stream::StreamExt;
use xlaunch_spec::quantities::bytes_text;

use super::error::ApiError;

/// Maximum size of a body: more than a thousand prompts of 1024 tokens as ids.
const MAX_BODY_BYTES: usize = 8 << 20;
/// Maximum size of a body that is read to its end, so that its client sees the refusal rather than a closed connection.
const MAX_DISCARDED_BYTES: usize = 64 << 20;
/// Time in which a client has to send the body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Reads a body of JSON.
pub(super) async fn read(request: Request) -> Result<Vec<u8>, ApiError> {
    // A page of another site can send forms and plain text to this server, but no JSON.
    if !is_json(request.headers()) {
        let why = "the request's Content-Type is not application/json";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    if let Some(encoding) = encoding(request.headers()) {
        let why = format!("the request's Content-Encoding `{encoding}` is not supported; send plain JSON");
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    match tokio::time::timeout(BODY_TIMEOUT, collect(request.into_body())).await {
        Ok(body) => body,
        Err(_) => {
            let why = format!("the body of the request was not sent within {} s", BODY_TIMEOUT.as_secs());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, why))
        }
    }
}

async fn collect(body: Body) -> Result<Vec<u8>, ApiError> {
    let mut pieces = body.into_data_stream();
    let (mut bytes, mut length) = (Vec::new(), 0);
    while let Some(piece) = pieces.next().await {
        let failed =
            |error| ApiError::new(StatusCode::BAD_REQUEST, format!("failed to read the request: {error}"));
        let piece = piece.map_err(failed)?;
        length += piece.len();
        if length <= MAX_BODY_BYTES {
            bytes.extend_from_slice(&piece);
        } else if length > MAX_DISCARDED_BYTES {
            break;
        }
    }
    if length > MAX_BODY_BYTES {
        let most = bytes_text(MAX_BODY_BYTES as u64);
        let why = format!("the body of the request is larger than {most}; split it into several requests");
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why));
    }
    Ok(bytes)
}

/// Returns the encoding of a body that is not sent as it is.
fn encoding(headers: &HeaderMap) -> Option<String> {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut texts = values.map(|value| String::from_utf8_lossy(value.as_bytes()).trim().to_owned());
    texts.find(|text| !text.is_empty() && !text.eq_ignore_ascii_case("identity"))
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}
