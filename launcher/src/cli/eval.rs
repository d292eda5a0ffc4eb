//! `xlaunch eval`: loss, perplexity, bits per byte and HellaSwag accuracy of a trained model.

use std::fmt::Write;
use std::path::PathBuf;

use clap::{ArgGroup, Args};
use serde_json::{Value, json};
use xlaunch_spec::exit::ExitCode;

use super::choice::whole;
use super::generate::{AdapterOption, DeviceOptions, only, until_interrupted};
use super::output::{QueryError, print, print_note};
use xlaunch_worker::evaluate::{self, Command, Results};

/// Options of `xlaunch eval`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("task").required(true).multiple(true))]
pub(super) struct Eval {
    /// A checkpoint, a model in Hugging Face's layout, or a directory of checkpoints or of a run (uses the newest valid
    /// checkpoint)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    #[command(flatten)]
    adapter: AdapterOption,
    /// Directory of prepared data (uses its validation split), or a glob of files: text for a byte-level model,
    /// otherwise token files
    #[arg(long, value_name = "DIR|GLOB", group = "task")]
    data: Vec<String>,
    /// Evaluate only the first N tokens of the data, rounded up to whole windows
    #[arg(long, value_name = "N", requires = "data", value_parser = whole(1..=u64::MAX))]
    tokens: Option<u64>,
    /// Tokens per window of the data; default: as many as the model's context has
    #[arg(long, value_name = "T", requires = "data", value_parser = whole(1..=u32::MAX))]
    seq: Option<u32>,
    /// File with HellaSwag questions in llm.c's format
    #[arg(long, value_name = "FILE", group = "task")]
    hellaswag: Vec<PathBuf>,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(options: Eval) -> Result<ExitCode, QueryError> {
    let command = Command {
        model: options.model,
        adapter: options.adapter.path()?,
        data: only("--data", options.data)?,
        tokens: options.tokens,
        seq: options.seq.map(|seq| seq as usize),
        hellaswag: only("--hellaswag", options.hellaswag)?,
        target: options.device.target(),
    };
    let json = options.json;
    until_interrupted(move |interrupted| {
        let found = evaluate::run(&command, &mut print_note, &interrupted)?;
        let text = if json { format!("{:#}\n", as_json(&found)) } else { table(&found) };
        print(text.as_bytes())
    })
    .await
}

fn table(found: &Results) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{name:<16}{value}");
    };
    if let Some(loss) = &found.loss {
        line("loss", format!("{:.4} nats per token", loss.loss));
        line("perplexity", format!("{:.3}", loss.loss.exp()));
        if let Some(bits) = loss.bits_per_byte {
            line("bits per byte", format!("{bits:.4}"));
        }
        line("tokens", loss.tokens.to_string());
    }
    if let Some(score) = &found.hellaswag {
        let (correct, questions) = (score.correct, score.questions);
        line("HellaSwag", format!("{:.2} % ({correct} of {questions} questions)", 100.0 * score.accuracy()));
    }
    out
}

fn as_json(found: &Results) -> Value {
    let loss = found.loss.as_ref().map(|loss| {
        json!({
            "loss": loss.loss, "perplexity": loss.loss.exp(), "bits_per_byte": loss.bits_per_byte,
            "tokens": loss.tokens,
        })
    });
    let hellaswag = found.hellaswag.as_ref().map(|score| {
        json!({ "accuracy": score.accuracy(), "correct": score.correct, "questions": score.questions })
    });
    json!({ "data": loss, "hellaswag": hellaswag })
}
