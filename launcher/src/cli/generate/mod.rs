//! `xlaunch generate`: text from a trained model.
//!
//! ```text
//! --prompt or a file --> prompts --> worker crate, on a thread of its own --> updates --output--> stdout
//!                             SIGINT --> flag, asked between steps --^
//! ```

mod output;
mod prompts;

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{ArgGroup, Args};
use fs_err::File;
use serde_json::Value;
use xlaunch_data::chat;
use xlaunch_host::memory::{self, Available};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::job::Precision;
use xlaunch_spec::refusal::Refusal;

use super::choice::{choice, whole};
use super::output::{QueryError, print_note};
use output::{Form, Output};
use prompts::Prompt;
use xlaunch_spec::quantities::bytes_text;
use xlaunch_worker::generate::{self, Command, SamplingOverrides, Update};
use xlaunch_worker::pretrained::{Device, Target};

/// Maximum size of a file of prompts.
const MAX_PROMPTS_BYTES: u64 = 256 << 20;

/// Options of `xlaunch generate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true))]
pub(super) struct Generate {
    /// A checkpoint, a model in Hugging Face's layout, or a directory of checkpoints or of a run (uses the newest valid
    /// checkpoint)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    adapter: AdapterOption,
    /// Text to continue; empty starts a new document; may be repeated
    #[arg(long, value_name = "TEXT", group = "input")]
    prompt: Vec<String>,
    /// File with one JSON object per line: `prompt`, or `messages` with `--chat`, and optionally `id`; `-` is stdin
    #[arg(long, value_name = "FILE.jsonl", group = "input")]
    prompts: Vec<PathBuf>,
    /// Treat prompts as messages of a user, and apply the model's chat template
    #[arg(long, conflicts_with = "raw")]
    chat: bool,
    /// Treat prompts as plain text: no token before them, no special tokens, no sampling defaults from the model
    #[arg(long)]
    raw: bool,
    /// Maximum number of tokens per text [default: from generation_config.json, or 128]
    #[arg(long, value_name = "N", value_parser = positive, allow_negative_numbers = true)]
    max_tokens: Option<usize>,
    /// Softmax temperature; 0 takes the most likely token (greedy) [default: 1 for checkpoints and with `--raw`;
    /// otherwise from generation_config.json, or 0]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens only
    #[arg(long, value_name = "K", value_parser = positive, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Sample only from the smallest set of tokens with this total probability
    #[arg(long, value_name = "P", value_parser = share, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Random seed
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true)]
    #[arg(value_parser = whole(0..=u64::MAX))]
    seed: u64,
    /// End a text before this string; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Number of texts per prompt
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive, allow_negative_numbers = true)]
    samples: usize,
    /// Tokenizer to use instead of the model's own: `bytes`, `gpt2` or a tokenizer.json
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: Option<String>,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print one JSON object per text
    #[arg(long)]
    json: bool,
}

/// Adapter of the model.
#[derive(Clone, Debug, Args)]
pub(super) struct AdapterOption {
    /// Adapter to add to the model: a directory in PEFT's layout, or a checkpoint of a LoRA run
    #[arg(long, value_name = "DIR")]
    adapter: Vec<PathBuf>,
}

impl AdapterOption {
    /// Returns the path of the adapter.
    ///
    /// # Errors
    /// If there are several: it would not be clear whether the last one is used, or all of them.
    pub(super) fn path(self) -> Result<Option<PathBuf>, Refusal> {
        only("--adapter", self.adapter).map_err(|refusal| Refusal {
            message: format!(
                "{}\nhelp: merge the others into the model first, with PEFT's `merge_and_unload` or `xlaunch export \
                 --merge`",
                refusal.message
            ),
            ..refusal
        })
    }
}

/// Returns the value of an option that can be given once.
///
/// # Errors
/// If there are several: it would not be clear whether the last one is used, or all of them.
pub(super) fn only<T>(option: &str, values: Vec<T>) -> Result<Option<T>, Refusal> {
    match <[T; 1]>::try_from(values) {
        Ok([value]) => Ok(Some(value)),
        Err(none) if none.is_empty() => Ok(None),
        Err(_) => Err(Refusal::new(
            ExitCode::Usage,
            format!("{option} was given several times: only one can be used"),
        )),
    }
}

/// Device and precision of the computation.
#[derive(Clone, Debug, Args)]
pub(super) struct DeviceOptions {
    /// Device to use; `auto` is the first GPU, or the CPU without one
    #[arg(long, default_value = "auto")]
    #[arg(value_parser = choice([("auto", Device::Auto), ("cuda", Device::Cuda), ("cpu", Device::Cpu)]))]
    device: Device,
    /// Precision on a GPU; the CPU computes in fp32
    #[arg(long, default_value = "bf16")]
    #[arg(value_parser = choice([
        ("fp32", Precision::Fp32), ("tf32", Precision::Tf32), ("bf16", Precision::Bf16),
    ]))]
    precision: Precision,
}

impl DeviceOptions {
    pub(super) fn target(&self) -> Target {
        let host_memory = memory::available().map(Available::with_swap);
        Target { device: self.device, precision: self.precision, host_memory }
    }
}

pub(super) async fn run(options: Generate) -> Result<ExitCode, QueryError> {
    let prompts = read_prompts(&options)?;
    let command = Command {
        model: options.model,
        adapter: options.adapter.path()?,
        tokenizer: options.tokenizer,
        prompts: prompts.iter().map(|prompt| input(prompt, options.chat)).collect(),
        samples: options.samples,
        raw: options.raw,
        max_tokens: options.max_tokens,
        sampling: SamplingOverrides {
            temperature: options.temperature,
            top_k: options.top_k,
            top_p: options.top_p,
        },
        seed: options.seed,
        stop: options.stop,
        target: options.device.target(),
    };
    let form = match (options.json, prompts.len(), options.samples) {
        (true, ..) => Form::Json,
        (false, 1, 1) => Form::Stream { is_terminal: std::io::stdout().is_terminal() },
        _ => Form::Texts { is_terminal: std::io::stdout().is_terminal() },
    };
    until_interrupted(move |interrupted| {
        let mut output = Output::new(form, prompts, command.samples);
        let failed = OnceLock::new();
        let stop = || interrupted() || failed.get().is_some();
        let mut sink = |prompt: usize, sample: usize, update: Update<'_>| {
            if let Err(error) = output.update(prompt, sample, update) {
                // The first error counts.
                let _ = failed.set(error);
            }
        };
        let result = generate::run(&command, &stop, &mut print_note, &mut sink);
        let ended = output.end();
        match failed.into_inner() {
            Some(error) => Err(error),
            None => result.map_err(QueryError::Refused).and(ended),
        }
    })
    .await
}

/// Runs `work` on its own thread, because it is CPU-bound. After the first SIGINT, `work` ends when it next asks
/// whether it was interrupted; a second SIGINT does not wait for it.
pub(super) async fn until_interrupted<T: Send + 'static>(
    work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, QueryError> + Send + 'static,
) -> Result<ExitCode, QueryError> {
    static INTERRUPTED: AtomicBool = AtomicBool::new(false);
    let mut work = tokio::task::spawn_blocking(move || work(&|| INTERRUPTED.load(Ordering::Relaxed)));
    for first in [true, false] {
        tokio::select! {
            result = &mut work => return match result {
                _ if INTERRUPTED.load(Ordering::Relaxed) => Ok(ExitCode::Signal(2)),
                Ok(result) => result.map(|_| ExitCode::Done),
                Err(error) => {
                    Err(Refusal::new(ExitCode::Internal, format!("the computation failed: {error}")).into())
                }
            },
            signal = tokio::signal::ctrl_c() => {
                if signal.is_err() && first {
                    break;
                }
                INTERRUPTED.store(true, Ordering::Relaxed);
            }
        }
    }
    Ok(ExitCode::Signal(2))
}

/// The prompt for the model: a chat if it has messages or `--chat` is given.
fn input(prompt: &Prompt, is_chat: bool) -> generate::Prompt {
    let chat = |messages| generate::Prompt::Chat { messages, variables: chat::Value::default() };
    match (&prompt.messages, is_chat) {
        (Some(messages), _) => chat(messages.clone()),
        (None, true) => {
            let message = chat::Value::from_pairs([("role", "user"), ("content", prompt.prompt.as_str())]);
            chat(vec![message].into())
        }
        (None, false) => generate::Prompt::Text(prompt.prompt.clone()),
    }
}

fn read_prompts(options: &Generate) -> Result<Vec<Prompt>, Refusal> {
    let Some(path) = only("--prompts", options.prompts.iter().collect())? else {
        let prompts = options.prompt.iter().cloned();
        return Ok(prompts.map(|prompt| Prompt { prompt, messages: None, id: None }).collect());
    };
    let (name, text) = if path.as_path() == Path::new("-") {
        ("stdin".into(), read_capped(std::io::stdin().lock()))
    } else {
        let text = File::open(path).and_then(read_capped);
        (path.display().to_string(), text)
    };
    let failed = |reason: String| Refusal::new(ExitCode::Data, reason);
    let text = text.map_err(|error| failed(format!("failed to read prompts: {name}: {error}")))?;
    if text.len() as u64 > MAX_PROMPTS_BYTES {
        return Err(failed(format!("{name}: larger than {}; split it", bytes_text(MAX_PROMPTS_BYTES))));
    }
    prompts::parse(&name, &text, options.chat).map_err(failed)
}

fn read_capped(file: impl Read) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(MAX_PROMPTS_BYTES + 1).read_to_end(&mut text)?;
    Ok(text)
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| "expected a whole number of at least 1".into())
}

fn temperature(text: &str) -> Result<f64, String> {
    let valid = |number: &f64| number.is_finite() && *number >= 0.0;
    text.parse().ok().filter(valid).ok_or_else(|| "expected a number of at least 0".into())
}

fn share(text: &str) -> Result<f64, String> {
    let valid = |number: &f64| *number > 0.0 && *number <= 1.0;
    text.parse().ok().filter(valid).ok_or_else(|| "expected a number above 0, at most 1".into())
}

/// Returns the `id` of a prompt, or its number from 1.
fn label(prompt: &Prompt, index: usize) -> String {
    match &prompt.id {
        None => (index + 1).to_string(),
        Some(Value::String(id)) => id.clone(),
        Some(id) => id.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        generate: Generate,
    }

    fn parse(options: &[&str]) -> Result<Generate, clap::Error> {
        let line = ["generate", "model"].iter().chain(options);
        Line::try_parse_from(line).map(|line| line.generate)
    }

    #[test]
    fn prompt_may_be_repeated() {
        let options = parse(&["--prompt", "a", "--prompt", ""]).unwrap();
        let prompts = read_prompts(&options).unwrap();
        assert_eq!(prompts.iter().map(|prompt| prompt.prompt.as_str()).collect::<Vec<_>>(), ["a", ""]);
        parse(&["--prompt", "a", "--prompts", "file"]).unwrap_err();
        parse(&[]).unwrap_err();
    }

    #[test]
    fn several_adapters_or_files_of_prompts_are_refused() {
        let path = |options: &[&str]| {
            let options = [&["--prompt", "a"], options].concat();
            parse(&options).unwrap().adapter.path().map_err(|refusal| refusal.message)
        };
        assert_eq!(path(&[]), Ok(None));
        assert_eq!(path(&["--adapter", "a"]), Ok(Some("a".into())));
        let error = path(&["--adapter", "a", "--adapter", "b"]).unwrap_err();
        assert!(error.contains("--adapter was given several times"), "{error}");
        let refusal = read_prompts(&parse(&["--prompts", "a", "--prompts", "b"]).unwrap()).unwrap_err();
        assert_eq!(refusal.message, "--prompts was given several times: only one can be used");
    }

    #[test]
    fn negative_numbers_are_values_of_options() {
        for (option, expected) in [
            ("--temperature", "expected a number of at least 0"),
            ("--top-p", "expected a number above 0"),
            ("--top-k", "expected a whole number of at least 1"),
            ("--samples", "expected a whole number of at least 1"),
            ("--max-tokens", "expected a whole number of at least 1"),
            ("--seed", "expected a whole number from 0 to 18446744073709551615"),
        ] {
            let error = parse(&["--prompt", "a", option, "-1"]).unwrap_err().to_string();
            assert!(error.contains(expected), "{option}: {error}");
        }
    }
}
