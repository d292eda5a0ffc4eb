//! Requests for text, as clients send them. Pure.

use serde::Deserialize;
use serde_json::Value;
use xlaunch_data::chat;
use xlaunch_worker::generate::SamplingOverrides;

use super::error::ApiError;
use super::parameters::Parameters;

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum number of texts that a request may ask for.
const MAX_TEXTS: usize = 1024;
/// Maximum number of texts per prompt.
const MAX_TEXTS_PER_PROMPT: usize = 128;
/// Maximum number of alternatives to each token.
const MAX_TOP_LOGPROBS: usize = 20;
const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_BYTES: usize = 1000;
/// Number of tokens per text of a completion that does not say it; OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Parameter with further variables of the chat template.
const TEMPLATE_VARIABLES: &str = "chat_template_kwargs";
/// Variables of the chat template, and options of its rendering, that requests cannot set.
const SERVER_VARIABLES: [&str; 6] =
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"];

/// Which of the two endpoints a request was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Completions,
    Chat,
}

/// The beginning of a text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Input {
    Text(String),
    Ids(Vec<u32>),
    /// A list of messages, and further variables of the chat template by name.
    Chat {
        messages: chat::Value,
        variables: chat::Value,
    },
}

/// A request for text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TextRequest {
    pub(super) endpoint: Endpoint,
    /// Name of the model; `None` takes the one that is served.
    pub(super) model: Option<String>,
    pub(super) inputs: Vec<Input>,
    /// Texts per input.
    pub(super) samples: usize,
    /// `None` is limited by the context alone.
    pub(super) max_tokens: Option<usize>,
    /// True if the request says `max_tokens`, so that the text must not be shorter for lack of room.
    pub(super) is_exact: bool,
    pub(super) sampling: SamplingOverrides,
    pub(super) seed: Option<u64>,
    pub(super) stop: Vec<String>,
    /// Number of alternatives to each token; `None` if log-probabilities are not requested.
    pub(super) top_logprobs: Option<usize>,
    /// True to repeat the prompt before each text.
    pub(super) echo: bool,
    pub(super) stream: bool,
    /// True to end a stream with the numbers of tokens.
    pub(super) include_usage: bool,
}

impl TextRequest {
    /// Parses the body of a request.
    pub(super) fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Self> {
        let mut parameters = Parameters::new(body)?;
        let (inputs, top_logprobs, echo) = match endpoint {
            Endpoint::Completions => {
                let inputs = prompts(parameters.take("prompt"))?;
                let top_logprobs = parameters.count("logprobs", 0, MAX_TOP_LOGPROBS)?;
                (inputs, top_logprobs, parameters.flag("echo")?)
            }
            Endpoint::Chat => {
                let chat = chat_input(&mut parameters, body)?;
                (vec![chat], chat_logprobs(&mut parameters)?, false)
            }
        };
        let samples = parameters.count("n", 1, MAX_TEXTS_PER_PROMPT)?.unwrap_or(1);
        if inputs.len() * samples > MAX_TEXTS {
            let texts = inputs.len() * samples;
            let message =
                format!("the request asks for {texts} texts, expected at most {MAX_TEXTS}; split it");
            return Err(ApiError::parameter("prompt", message));
        }
        let mut asked = parameters.count("max_tokens", 0, usize::MAX)?;
        let mut default = Some(DEFAULT_MAX_TOKENS);
        if endpoint == Endpoint::Chat {
            asked = parameters.count("max_completion_tokens", 0, usize::MAX)?.or(asked);
            default = None;
        }
        let temperature =
            parameters.number("temperature", "a number of at least 0", |it| it.is_finite() && it >= 0.0)?;
        let top_p = parameters.number("top_p", "a number from 0 to 1", |it| (0.0..=1.0).contains(&it))?;
        let sampling = SamplingOverrides { temperature, top_k: parameters.top_k()?, top_p };
        let (stream, include_usage) = (parameters.flag("stream")?, include_usage(&mut parameters)?);
        let request = Self {
            endpoint,
            model: parameters.text("model")?,
            inputs,
            samples,
            max_tokens: asked.or(default),
            is_exact: asked.is_some(),
            sampling,
            seed: parameters.seed()?,
            stop: parameters.texts("stop", MAX_STOP_STRINGS, MAX_STOP_BYTES)?,
            top_logprobs,
            echo,
            stream,
            include_usage,
        };
        parameters.finish(samples)?;
        Ok(request)
    }
}

/// Reads `prompt`: a text or the ids of its tokens, or a list of either.
fn prompts(value: Option<Value>) -> Result<Vec<Input>> {
    let failed = |message: &str| ApiError::parameter("prompt", message);
    let expected =
        "`prompt` is not a string, a list of strings, a list of token ids, or a list of such lists";
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = |list: &[Value]| list.iter().map(id).collect::<Option<Vec<u32>>>();
    let input = |value: Value| match value {
        Value::String(text) => Some(Input::Text(text)),
        Value::Array(list) => ids(&list).map(Input::Ids),
        _ => None,
    };
    let inputs = match value {
        None => return Err(failed("`prompt` is missing")),
        Some(Value::Array(list)) if list.first().is_some_and(Value::is_number) => {
            vec![Input::Ids(ids(&list).ok_or_else(|| failed(expected))?)]
        }
        Some(Value::Array(list)) => {
            list.into_iter().map(input).collect::<Option<_>>().ok_or_else(|| failed(expected))?
        }
        Some(value) => vec![input(value).ok_or_else(|| failed(expected))?],
    };
    if inputs.is_empty() || inputs.contains(&Input::Ids(Vec::new())) {
        return Err(failed("`prompt` has an empty list; a prompt of ids needs at least one"));
    }
    Ok(inputs)
}

/// Reads `messages`, which the chat template's own code checks, and `chat_template_kwargs`.
fn chat_input(parameters: &mut Parameters, body: &[u8]) -> Result<Input> {
    /// Read from the body itself, as `Parameters` does not keep the order of keys.
    #[derive(Deserialize)]
    struct Body {
        messages: chat::Value,
        #[serde(default)]
        chat_template_kwargs: chat::Value,
    }
    let failed = |reason: &str| ApiError::parameter("messages", reason);
    template_variables(parameters.take(TEMPLATE_VARIABLES))?;
    match parameters.take("messages") {
        Some(Value::Array(list)) if list.is_empty() => Err(failed("`messages` is empty")),
        Some(Value::Array(_)) => match serde_json::from_slice(body) {
            Ok(Body { messages, chat_template_kwargs: variables }) => Ok(Input::Chat { messages, variables }),
            Err(error) => Err(failed(&format!("`messages` is not valid: {error}"))),
        },
        _ => Err(failed("`messages` is missing, or not a list")),
    }
}

/// Checks the variables of the chat template that a request sets.
fn template_variables(value: Option<Value>) -> Result<()> {
    let failed = |reason: String| ApiError::parameter(TEMPLATE_VARIABLES, reason);
    let variables = match value {
        None => return Ok(()),
        Some(Value::Object(variables)) => variables,
        Some(_) => return Err(failed(format!("`{TEMPLATE_VARIABLES}` is not an object"))),
    };
    match variables.keys().find(|name| SERVER_VARIABLES.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            Err(failed(format!("`{TEMPLATE_VARIABLES}.{name}` is set by the server; leave it out")))
        }
    }
}

fn chat_logprobs(parameters: &mut Parameters) -> Result<Option<usize>> {
    let top = parameters.count("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    match (parameters.flag("logprobs")?, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::parameter("top_logprobs", "`top_logprobs` needs `logprobs`: true")),
    }
}

fn include_usage(parameters: &mut Parameters) -> Result<bool> {
    match parameters.take("stream_options") {
        None => Ok(false),
        Some(Value::Object(options)) => {
            let mut options = Parameters::of(options);
            let include_usage = options.flag("include_usage")?;
            options.finish(1)?;
            Ok(include_usage)
        }
        Some(_) => Err(ApiError::parameter("stream_options", "`stream_options` is not an object")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn completion(body: &Value) -> Result<TextRequest> {
        TextRequest::parse(Endpoint::Completions, body.to_string().as_bytes())
    }

    fn chat(body: &Value) -> Result<TextRequest> {
        TextRequest::parse(Endpoint::Chat, body.to_string().as_bytes())
    }

    #[test]
    fn prompts_are_texts_or_ids_or_lists_of_them() {
        let inputs = |prompt: Value| completion(&json!({ "prompt": prompt })).map(|request| request.inputs);
        let text = |text: &str| Input::Text(text.into());
        assert_eq!(inputs(json!("a")).unwrap(), [text("a")]);
        assert_eq!(inputs(json!(["a", ""])).unwrap(), [text("a"), text("")]);
        assert_eq!(inputs(json!([1, 2])).unwrap(), [Input::Ids(vec![1, 2])]);
        assert_eq!(inputs(json!([[1], [2, 3]])).unwrap(), [Input::Ids(vec![1]), Input::Ids(vec![2, 3])]);
        for wrong in
            [json!([]), json!([[]]), json!([1, "a"]), json!([-1]), json!(3), json!({}), json!([[1.5]])]
        {
            assert_eq!(inputs(wrong.clone()).unwrap_err().param.as_deref(), Some("prompt"), "{wrong}");
        }
        assert!(completion(&json!({})).unwrap_err().message.contains("missing"));
        let many = completion(&json!({"prompt": vec!["a"; 100], "n": 11})).unwrap_err();
        assert!(many.message.contains("1100 texts, expected at most 1024"), "{}", many.message);
    }

    #[test]
    fn completion_has_the_defaults_of_openai() {
        let request = completion(&json!({"prompt": "a", "stop": null})).unwrap();
        assert_eq!((request.max_tokens, request.is_exact, request.samples), (Some(16), false, 1));
        assert_eq!((request.top_logprobs, request.echo, request.stream), (None, false, false));
        let request = completion(&json!({
            "prompt": "a", "max_tokens": 0, "logprobs": 1, "echo": true, "stop": "x", "seed": 3, "temperature": 0,
            "stream": true, "stream_options": {"include_usage": true, "include_obfuscation": false}, "model": "m",
            "top_p": 0, "top_k": -1,
        }));
        let request = request.unwrap();
        assert_eq!((request.max_tokens, request.is_exact, request.top_logprobs), (Some(0), true, Some(1)));
        assert_eq!((request.stop, request.seed, request.include_usage), (vec!["x".into()], Some(3), true));
        let SamplingOverrides { temperature, top_k, top_p } = request.sampling;
        assert_eq!((temperature, top_k, top_p), (Some(0.0), Some(0), Some(0.0)));
        let unknown = completion(&json!({"prompt": "a", "stream_options": {"x": 1}})).unwrap_err();
        assert_eq!(unknown.param.as_deref(), Some("x"));
        let wrong = completion(&json!({"prompt": "a", "stream_options": true})).unwrap_err();
        assert_eq!(wrong.param.as_deref(), Some("stream_options"));
    }

    #[test]
    fn chat_is_a_list_of_messages_as_they_are_sent() {
        // The order of keys is part of it.
        let messages =
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"text":"b","type":"text"}]}]"#;
        let body = format!(r#"{{"messages": {messages}, "logprobs": true, "max_completion_tokens": 3}}"#);
        let request = TextRequest::parse(Endpoint::Chat, body.as_bytes()).unwrap();
        let [Input::Chat { messages: found, .. }] = &request.inputs[..] else {
            panic!("{:?}", request.inputs)
        };
        assert_eq!(serde_json::to_string(found).unwrap(), messages);
        assert_eq!((request.top_logprobs, request.max_tokens, request.is_exact), (Some(0), Some(3), true));
        for (messages, why) in [(json!([]), "empty"), (json!("hi"), "not a list")] {
            let error = chat(&json!({ "messages": messages })).unwrap_err();
            assert!(error.message.contains(why), "{}", error.message);
        }
        let lonely = chat(&json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}));
        assert_eq!(lonely.unwrap_err().param.as_deref(), Some("top_logprobs"));
        let prompt = chat(&json!({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}));
        assert_eq!(prompt.unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn variables_of_the_template_are_an_object_of_names_that_the_server_does_not_set() {
        let asked = |variables: &Value| {
            chat(&json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": variables}))
        };
        let request = asked(&json!({"enable_thinking": false})).unwrap();
        let [Input::Chat { variables, .. }] = &request.inputs[..] else { panic!("{:?}", request.inputs) };
        assert_eq!(serde_json::to_value(variables).unwrap(), json!({"enable_thinking": false}));
        assert!(asked(&Value::Null).is_ok() && asked(&json!({})).is_ok());
        for (wrong, why) in [
            (json!({"messages": []}), "`chat_template_kwargs.messages` is set by the server"),
            (json!({"a": 1, "add_generation_prompt": false}), "add_generation_prompt` is set by the server"),
            (json!([1]), "not an object"),
        ] {
            let error = asked(&wrong).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("chat_template_kwargs"));
            assert!(error.message.contains(why), "{}", error.message);
        }
        let completion = completion(&json!({"prompt": "a", "chat_template_kwargs": {"a": 1}})).unwrap_err();
        assert_eq!(completion.param.as_deref(), Some("chat_template_kwargs"));
    }
}
