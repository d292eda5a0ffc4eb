//! The server of `xlaunch serve`: an API like OpenAI's for one model.
//!
//! ```text
//! client --HTTP/1.1--> access --> body --request--> TextRequest --plan--> jobs --> thread of the model (worker crate)
//!                                                                                             |
//! client <--JSON, or server-sent events-- reply <-------------------- outputs per text -------'
//! ```
//! - [`access`]: who may send requests; `body`: reads a request within limits of size and time;
//! - `parameters`, `request`: what the client asks for; `plan`: what the model is asked (all pure);
//! - `reply`: texts in OpenAI's form (pure); `stream`: sends them as they grow; `error`: errors in OpenAI's form.
//!
//! Invariants: a parameter that would change the result is applied or refused, never ignored; a client that goes away
//! drops its receiver of outputs, which cancels its texts.

mod access;
mod body;
mod error;
mod parameters;
mod plan;
mod reply;
mod request;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use xlaunch_host::clock;
use xlaunch_host::net::Replaces;
use xlaunch_host::net::http::{self, HttpLimits};
use xlaunch_worker::serve::{Job, Service};

pub(crate) use access::Access;
use error::ApiError;
use plan::Plan;
use reply::{Envelope, Piece};
use request::{Endpoint, TextRequest};
use stream::Outputs;

/// Maximum number of connections. Requests in progress are not interrupted for new ones.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of texts that are computed or wait for it.
const MAX_PENDING_TEXTS: usize = 4096;
/// Number of requests whose prompts are encoded at the same time.
const ENCODERS: usize = 2;

/// A model that is served.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) service: Arc<Service>,
    /// Name of the model for clients.
    pub(crate) name: String,
    /// Takes requests to the thread of the model.
    pub(crate) jobs: Sender<Job>,
    pub(crate) access: Access,
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: TcpListener, served: Served) {
    let access = served.access.clone();
    let state = Arc::new(App {
        created: clock::unix().as_secs(),
        texts: Arc::new(Semaphore::new(MAX_PENDING_TEXTS)),
        encoders: Arc::new(Semaphore::new(ENCODERS)),
        next: AtomicU64::new(1),
        served,
    });
    let routes = Router::new()
        .route(access::HEALTH, get(async || Json(json!({ "status": "ok" }))))
        .route("/v1/models", get(models))
        // Names may be paths, with slashes as they are or encoded.
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .fallback(async || {
            let known = "not found; there are /v1/models, /v1/completions, /v1/chat/completions and /health";
            ApiError::new(StatusCode::NOT_FOUND, known)
        })
        .method_not_allowed_fallback(async || {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not allow the method of the request",
            )
        })
        .layer(axum::middleware::from_fn_with_state(access, access::check))
        .with_state(state);
    let limits = HttpLimits { connections: MAX_CONNECTIONS, replaces: Replaces::OwnYielding };
    http::serve(listener, limits, routes, std::future::pending()).await;
}

/// State that request handlers share.
struct App {
    served: Served,
    /// Seconds since 1970 at the start.
    created: u64,
    texts: Arc<Semaphore>,
    encoders: Arc<Semaphore>,
    /// Number of the next reply.
    next: AtomicU64,
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [app.model()] }))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    plan::check_model(Some(&name), &app.served.name)?;
    Ok(Json(app.model()))
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    app.answer(Endpoint::Completions, request).await
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    app.answer(Endpoint::Chat, request).await
}

impl App {
    fn model(&self) -> Value {
        json!({
            "id": self.served.name, "object": "model", "created": self.created, "owned_by": "xlaunch",
            "max_model_len": self.served.service.context,
        })
    }

    async fn answer(&self, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
        let body = body::read(request).await?;
        let (request, plan) = self.plan(endpoint, body).await?;
        let permit = self.admit(plan.texts())?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let envelope = Envelope {
            endpoint,
            id: format!("{prefix}-{:x}-{number}", self.created),
            created: clock::unix().as_secs(),
            model: self.served.name.clone(),
            logprobs: request.top_logprobs.is_some(),
        };
        let (sender, receiver) = unbounded_channel();
        for job in plan.jobs(&sender) {
            // An error means that the model's thread has ended; the receiver reports it.
            let _ = self.served.jobs.send(job);
        }
        drop(sender);
        let service = self.served.service.clone();
        let outputs = Outputs { receiver, plan, envelope, service, _permit: permit };
        if request.stream {
            return Ok(stream::events(outputs, request.include_usage));
        }
        Ok(Json(whole(outputs).await?).into_response())
    }

    /// Parses a request, and encodes its prompts.
    async fn plan(&self, endpoint: Endpoint, body: Vec<u8>) -> Result<(TextRequest, Plan), ApiError> {
        let (service, name) = (self.served.service.clone(), self.served.name.clone());
        let seed = rand_seed();
        // Long prompts take a while, in which the threads of the runtime serve other clients.
        let encoder = self.encoders.clone().acquire_owned().await;
        let planned = tokio::task::spawn_blocking(move || {
            let _encoder = encoder;
            let request = TextRequest::parse(endpoint, &body)?;
            plan::check_model(request.model.as_deref(), &name)?;
            let plan = Plan::new(&request, &service, seed)?;
            Ok((request, plan))
        });
        let failed = |error| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("failed to read the request: {error}"))
        };
        planned.await.map_err(failed)?
    }

    /// Reserves places for texts.
    fn admit(&self, texts: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let count = u32::try_from(texts).unwrap_or(u32::MAX);
        self.texts.clone().try_acquire_many_owned(count).map_err(|_| {
            let waiting = MAX_PENDING_TEXTS - self.texts.available_permits();
            let why = format!(
                "the server is busy: {waiting} texts are in progress or waiting, and at most {MAX_PENDING_TEXTS} can be"
            );
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why)
        })
    }
}

/// Returns the reply once all texts are complete.
async fn whole(mut outputs: Outputs) -> Result<Value, ApiError> {
    let mut texts: Vec<Piece> =
        (0..outputs.plan.texts()).map(|index| Piece::beginning(&outputs.plan, index)).collect();
    while texts.iter().any(|text| text.finish.is_none()) {
        let (index, piece) = outputs.next().await?;
        if let Some(text) = texts.get_mut(index) {
            text.append(piece);
        }
    }
    let Outputs { plan, envelope, service, .. } = &outputs;
    Ok(envelope.whole(&texts, plan.prompt_tokens(), service))
}

/// Returns a seed for a request that has none.
fn rand_seed() -> u64 {
    let mut seed = [0; 8];
    // Without random numbers of the system, texts are the same each time.
    let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(seed)
}
