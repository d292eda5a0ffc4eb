//! The files of the page, embedded in the binary.

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};

const HTML: &str = include_str!("assets/index.html");

/// Assets of the page: name under `/assets/`, content type and contents.
const ASSETS: [(&str, &str, &str); 4] = [
    ("page.css", "text/css; charset=utf-8", include_str!("assets/page.css")),
    ("page.js", "text/javascript; charset=utf-8", include_str!("assets/page.js")),
    ("chart.js", "text/javascript; charset=utf-8", include_str!("assets/chart.js")),
    ("icon.svg", "image/svg+xml", include_str!("assets/icon.svg")),
];

pub(super) async fn index() -> Html<&'static str> {
    Html(HTML)
}

pub(super) async fn asset(Path(name): Path<String>) -> Response {
    match ASSETS.iter().find(|(asset, ..)| *asset == name) {
        Some((_, kind, text)) => ([(header::CONTENT_TYPE, *kind)], *text).into_response(),
        None => super::error(StatusCode::NOT_FOUND, "not found"),
    }
}
