//! The texts of a request as they grow, and a reply as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, channel};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use xlaunch_worker::serve::{Output, Service};

use super::error::ApiError;
use super::plan::Plan;
use super::reply::{Envelope, Piece};

/// Number of events that wait for a slow client. Its texts are computed regardless.
const WAITING_EVENTS: usize = 16;

/// The outputs of a request's texts. Dropping it cancels them.
pub(super) struct Outputs {
    pub(super) receiver: UnboundedReceiver<(usize, Output)>,
    pub(super) plan: Plan,
    pub(super) envelope: Envelope,
    pub(super) service: Arc<Service>,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl Outputs {
    /// Waits for the next piece of any of the texts; also returns the number of the text.
    ///
    /// # Errors
    /// If the model cannot continue it.
    pub(super) async fn next(&mut self) -> Result<(usize, Piece), ApiError> {
        let failed = |why: &str| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why);
        let Some((index, output)) = self.receiver.recv().await else {
            return Err(failed("the server is stopping, or its device has failed"));
        };
        let piece = Piece::of(output, &self.plan, index).ok_or_else(|| {
            failed("the logits are not finite: the weights are damaged or the model has diverged")
        });
        Ok((index, piece?))
    }
}

/// Returns a response that sends pieces of the texts as events.
pub(super) fn events(outputs: Outputs, include_usage: bool) -> Response {
    let (sender, receiver) = channel(WAITING_EVENTS);
    tokio::spawn(async move {
        let closed = sender.clone();
        tokio::select! {
            // The client has gone away.
            () = closed.closed() => {}
            sent = send_all(outputs, include_usage, &sender) => {
                if let Err(error) = sent {
                    send(&sender, &error.json()).await;
                }
            }
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receiver).map(Ok::<String, Infallible>));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, body).into_response()
}

async fn send_all(
    mut outputs: Outputs,
    include_usage: bool,
    sender: &Sender<String>,
) -> Result<(), ApiError> {
    let texts = outputs.plan.texts();
    for index in 0..texts {
        let beginning = Piece::beginning(&outputs.plan, index);
        send(sender, &outputs.envelope.part(index, &beginning, true, &outputs.service)).await;
    }
    let (mut unfinished, mut generated) = (texts, 0);
    while unfinished > 0 {
        let (index, piece) = outputs.next().await?;
        generated += piece.generated;
        unfinished -= usize::from(piece.finish.is_some());
        if !piece.is_empty(&outputs.envelope) {
            send(sender, &outputs.envelope.part(index, &piece, false, &outputs.service)).await;
        }
    }
    if include_usage {
        send(sender, &outputs.envelope.usage_part(outputs.plan.prompt_tokens(), generated)).await;
    }
    // An error means that the client has gone away.
    let _ = sender.send("data: [DONE]\n\n".into()).await;
    Ok(())
}

async fn send(sender: &Sender<String>, value: &Value) {
    // As above.
    let _ = sender.send(format!("data: {value}\n\n")).await;
}
