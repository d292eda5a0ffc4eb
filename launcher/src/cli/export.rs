//! `xlaunch export`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::json;
use xlaunch_spec::exit::ExitCode;

use super::output::{QueryError, print, print_note};
use crate::render::text::escape;
use xlaunch_spec::refusal::Refusal;
use xlaunch_worker::export::{self, Content, ExportDtype, Exported};

/// Options of `xlaunch export`.
#[derive(Debug, Args)]
pub(super) struct Export {
    /// A checkpoint, or a directory of checkpoints or of a run (uses the newest valid checkpoint)
    checkpoint: PathBuf,
    /// Directory to write; must be empty or not exist
    #[arg(long, short)]
    output: PathBuf,
    /// Layout of the directory
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Element type of the weights
    #[arg(long, value_enum, default_value_t)]
    dtype: Dtype,
    /// Tokenizer to use instead of the checkpoint's: bytes, gpt2 or the path of a tokenizer.json
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,
    /// Export the adapters (LoRA) of the checkpoint, in PEFT's layout
    #[arg(long, conflicts_with = "merge")]
    adapter: bool,
    /// Add the adapters (LoRA) of the checkpoint to the weights, and export the whole model
    #[arg(long)]
    merge: bool,
    /// Replace an earlier export
    #[arg(long)]
    overwrite: bool,
    /// Print directory, checkpoint, step, bytes and tokenizer as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// Hugging Face: config.json, model.safetensors, tokenizer
    #[default]
    Hf,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Dtype {
    /// Unchanged from the checkpoint
    #[default]
    Fp32,
    /// Rounded; half the size
    Bf16,
}

/// Exports a checkpoint, and prints the directory.
pub(super) fn run(options: Export) -> Result<ExitCode, QueryError> {
    let Export { checkpoint, output, format: Format::Hf, dtype, tokenizer, overwrite, adapter, merge, json } =
        options;
    let content = match (adapter, merge) {
        (true, _) => Content::Adapter,
        (false, true) => Content::Merged,
        (false, false) => Content::Model,
    };
    let dtype = match dtype {
        Dtype::Fp32 => ExportDtype::Fp32,
        Dtype::Bf16 => ExportDtype::Bf16,
    };
    let exported =
        export::export(&export::Export { checkpoint, output, dtype, tokenizer, overwrite, content })
            .map_err(|error| Refusal::new(error.exit(), error.to_string()))?;
    exported.notes.iter().for_each(|note| print_note(&format!("warning: {note}")));
    if exported.tokenizer.is_none() && content != Content::Adapter {
        print_note(
            "warning: no tokenizer files were written, because the tokenizer of the data is not known; name it with \
             `--tokenizer gpt2|bytes|FILE.json`",
        );
    }
    print(text(&exported, json).as_bytes())?;
    Ok(ExitCode::Done)
}

fn text(exported: &Exported, as_json: bool) -> String {
    let Exported { checkpoint, step, output, bytes, tokenizer, .. } = exported;
    let path = |path: &PathBuf| path.to_string_lossy().into_owned();
    if !as_json {
        return format!("{}\n", escape(&path(output)));
    }
    let value = json!({
        "output": path(output),
        "checkpoint": path(checkpoint),
        "step": step,
        "weights_bytes": bytes,
        "tokenizer": tokenizer,
    });
    format!("{value:#}\n")
}
