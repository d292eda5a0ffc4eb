//! Plans the texts of a request: encodes its prompts, and checks that each text fits the model's context. Pure.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::mpsc::UnboundedSender;
use xlaunch_worker::serve::{Job, Options, Output, Request, Service};

use super::error::ApiError;
use super::request::{Endpoint, Input, TextRequest};

/// The texts of a request. The texts of a prompt are next to each other.
#[derive(Debug)]
pub(super) struct Plan {
    prompts: Vec<Prompt>,
    samples: usize,
}

/// A prompt that fits the model's context, with its settings.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Arc<[u32]>,
    /// The part that each text repeats; `None` if texts repeat nothing.
    pub(super) echo: Option<Echo>,
    options: Arc<Options>,
}

/// A prompt as text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Echo {
    /// Ends before a character that the prompt does not complete: generated text begins with that.
    pub(super) text: String,
    /// Number of characters before each token.
    pub(super) starts: Vec<usize>,
}

impl Plan {
    /// Plans the texts of a request. If it has no seed, prompts have seeds from `seed` on, so that equal ones differ.
    pub(super) fn new(request: &TextRequest, service: &Service, seed: u64) -> Result<Self, ApiError> {
        let TextRequest { endpoint, inputs, samples, .. } = request;
        let several = inputs.len() > 1;
        let parameter = match endpoint {
            Endpoint::Completions => "prompt",
            Endpoint::Chat => "messages",
        };
        let prompt = |(index, input): (usize, &Input)| {
            let failed = |reason: String| {
                let name = if several { format!("prompt {}", index + 1) } else { "the prompt".into() };
                ApiError::parameter(parameter, format!("{name} {reason}"))
            };
            let tokens = match input {
                Input::Text(text) => service.text_prompt(text.clone()),
                Input::Chat { messages, variables } => {
                    service.chat_prompt(messages.clone(), variables.clone())
                }
                Input::Ids(ids) => Ok(ids.clone()),
            };
            // A tokenizer may have added tokens that its model does not know.
            let tokens = tokens.and_then(|tokens| known(&tokens, service.vocab).map(|()| tokens));
            let tokens = tokens.map_err(|reason| failed(format!("cannot be used: {reason}")))?;
            let room = room(tokens.len(), request, service.context)
                .map_err(|reason| ApiError { code: Some("context_length_exceeded"), ..failed(reason) })?;
            let options = Options {
                max_tokens: room,
                sampling: service.sampling(request.sampling),
                seed: request.seed.unwrap_or(seed.wrapping_add(index as u64)),
                stop: request.stop.clone(),
                scores: request.top_logprobs,
                echo: request.echo,
            };
            let sent = if let Input::Text(text) = input { Some(text.as_str()) } else { None };
            let echo = request.echo.then(|| service.echo(&tokens, sent));
            let echo = echo.map(|(text, starts)| Echo { text, starts });
            Ok(Prompt { tokens: tokens.into(), echo, options: Arc::new(options) })
        };
        let prompts = inputs.iter().enumerate().map(prompt).collect::<Result<_, ApiError>>()?;
        Ok(Self { prompts, samples: *samples })
    }

    /// Number of texts.
    pub(super) fn texts(&self) -> usize {
        self.prompts.len() * self.samples
    }

    /// Number of tokens of all prompts.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }

    /// Returns the prompt of a text.
    pub(super) fn prompt(&self, text: usize) -> Option<&Prompt> {
        self.prompts.get(text / self.samples)
    }

    /// Returns a job for each text.
    pub(super) fn jobs(
        &self,
        outputs: &UnboundedSender<(usize, Output)>,
    ) -> impl Iterator<Item = Job> + use<'_> {
        let outputs = outputs.clone();
        (0..self.texts()).filter_map(move |index| {
            let Prompt { tokens, options, .. } = self.prompt(index)?;
            let sample = index % self.samples;
            let request = Request { tokens: tokens.clone(), sample, options: options.clone() };
            Some(Job { request, index, outputs: outputs.clone() })
        })
    }
}

/// Checks that the model knows all ids.
fn known(ids: &[u32], vocab: usize) -> Result<(), String> {
    match ids.iter().find(|id| usize::try_from(**id).is_ok_and(|id| id >= vocab)) {
        Some(id) => Err(format!("token id {id} is not below {vocab}, the size of the model's vocabulary")),
        None => Ok(()),
    }
}

/// Returns the maximum number of new tokens. The last one is not read by the model, so it may be one more than the
/// context has room for.
fn room(tokens: usize, request: &TextRequest, context: usize) -> Result<usize, String> {
    if tokens > context {
        return Err(format!("has {tokens} tokens, but the model's context has {context}; shorten it"));
    }
    let room = context + 1 - tokens;
    match request.max_tokens {
        Some(asked) if request.is_exact && asked > room => Err(format!(
            "has {tokens} tokens and asks for {asked} more, but the model's context has {context}, which leaves room \
             for {room}; shorten it or lower `max_tokens`"
        )),
        asked => Ok(asked.unwrap_or(room).min(room)),
    }
}

/// The error of a request for another model. A slash at the end of the name makes no difference.
pub(super) fn check_model(model: Option<&str>, served: &str) -> Result<(), ApiError> {
    match model {
        Some(model) if model.trim_end_matches('/') != served => Err(ApiError {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..ApiError::new(
                StatusCode::NOT_FOUND,
                format!("the model `{model}` does not exist; this server has `{served}`"),
            )
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: &str) -> TextRequest {
        TextRequest::parse(Endpoint::Completions, body.as_bytes()).unwrap()
    }

    #[test]
    fn texts_that_do_not_fit_the_context_are_refused_with_numbers() {
        let asked = request(r#"{"prompt": "a", "max_tokens": 5}"#);
        assert_eq!(room(28, &asked, 32), Ok(5));
        let error = room(29, &asked, 32).unwrap_err();
        assert!(
            error.starts_with("has 29 tokens and asks for 5 more, but the model's context has 32"),
            "{error}"
        );
        assert!(error.contains("room for 4"), "{error}");
        assert!(room(33, &asked, 32).unwrap_err().starts_with("has 33 tokens, but"));
        // A prompt that fills the context can be scored, and continued by one token.
        assert_eq!(room(32, &request(r#"{"prompt": "a", "max_tokens": 1}"#), 32), Ok(1));
        assert_eq!(room(32, &request(r#"{"prompt": "a", "max_tokens": 0}"#), 32), Ok(0));
        // The default is a limit, not a request.
        assert_eq!(room(30, &request(r#"{"prompt": "a"}"#), 32), Ok(3));
        assert_eq!(room(1, &request(r#"{"prompt": "a"}"#), 32), Ok(16));
    }

    #[test]
    fn another_model_is_not_found() {
        let served = |body: &str| check_model(request(body).model.as_deref(), "runs/a");
        assert_eq!(served(r#"{"prompt": "a"}"#), Ok(()));
        assert_eq!(served(r#"{"prompt": "a", "model": "runs/a"}"#), Ok(()));
        assert_eq!(served(r#"{"prompt": "a", "model": "runs/a/"}"#), Ok(()));
        let error = served(r#"{"prompt": "a", "model": "gpt-4"}"#).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (404, Some("model_not_found")));
        assert!(error.message.contains("`gpt-4`") && error.message.contains("`runs/a`"));
    }

    #[test]
    fn unknown_ids_are_named() {
        assert_eq!(known(&[0, 255], 256), Ok(()));
        assert!(known(&[3, 256], 256).unwrap_err().contains("token id 256 is not below 256"));
    }
}
