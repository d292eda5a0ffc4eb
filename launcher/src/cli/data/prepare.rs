//! `xlaunch data prepare`: options, progress and result.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use xlaunch_data::chat::Templates;
use xlaunch_data::{
    Bos, ChatOptions, Documents, Event, Invalid, Manifest, OnError, Options, Progress, Split, Tokenizer,
};
use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::super::choice::choice;
use super::super::output::{QueryError, print, print_note};
use super::refusal;
use crate::render::text::{bytes, columns, escape};

/// Time between lines of progress where stderr is not a terminal.
const PROGRESS_LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Options of `xlaunch data prepare`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("rows").args(["chat", "preferences"]))]
pub(in crate::cli) struct Prepare {
    /// Files, directories, globs, or `-` for standard input: text, JSON, JSONL, CSV or Parquet, also compressed with
    /// gzip or zstd
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<String>,
    /// Tokenizer: bytes, gpt2, a tokenizer.json, or the directory of a model that contains one
    #[arg(long, value_name = "bytes|gpt2|FILE.json|DIR")]
    tokenizer: String,
    /// Directory to write; must be new, empty, or left by an interrupted preparation
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Where documents end in text files: at the end of the file, of each line, or at a separator (may contain \n,
    /// \r and \t)
    #[arg(long, value_name = "file|line|SEPARATOR", default_value = "file")]
    documents: String,
    /// Field or column with the text in JSON, CSV and Parquet; if given, inputs of unknown type are read as JSONL
    /// [default: text]
    #[arg(long, visible_alias = "column", value_name = "NAME")]
    field: Option<String>,
    /// Read rows as chats, written with the template of the tokenizer: `messages`, `prompt` and `completion`,
    /// `instruction` and `output`, or `text`. The loss counts for what the assistant writes
    #[arg(long, conflicts_with_all = ["documents", "field", "bos"])]
    chat: bool,
    /// Read rows as pairs of a better and a worse answer, `chosen` and `rejected`, with or without `prompt`, to train
    /// on preferences (DPO)
    #[arg(long, conflicts_with_all = ["documents", "field", "bos"])]
    preferences: bool,
    /// Chat template, in place of that of the tokenizer
    #[arg(long, value_name = "FILE", requires = "rows")]
    chat_template: Option<PathBuf>,
    /// Maximum token ids of a chat: turns are left out at its end until it fits; of an answer with its prompt: longer
    /// pairs are left out
    #[arg(long, value_name = "N", requires = "rows")]
    max_tokens: Option<NonZeroUsize>,
    /// End-of-text token, written at the start of each document, or `none` [default: from the tokenizer's files]
    #[arg(long, value_name = "TOKEN")]
    eot: Option<String>,
    /// Whether documents start with the beginning-of-sequence token: as in the tokenizer's template, always, or never
    #[arg(long, value_name = "auto|always|never", default_value = "auto")]
    #[arg(value_parser = choice([("auto", Bos::Auto), ("always", Bos::Always), ("never", Bos::Never)]))]
    bos: Bos,
    /// Share of documents to hold out for validation
    #[arg(long, value_name = "SHARE", default_value_t = 0.005)]
    val: f64,
    /// Token ids per file, such as 500K or 100M
    #[arg(long, value_name = "N", default_value = "100M", value_parser = tokens)]
    shard_tokens: u64,
    /// Action for text that is not UTF-8
    #[arg(long, value_name = "error|replace", default_value = "error")]
    #[arg(value_parser = choice([("error", Invalid::Error), ("replace", Invalid::Replace)]))]
    invalid: Invalid,
    /// Action for lines and rows that are broken or have no text
    #[arg(long, value_name = "stop|skip", default_value = "stop")]
    #[arg(value_parser = choice([("stop", OnError::Stop), ("skip", OnError::Skip)]))]
    on_error: OnError,
    /// Replace prepared data in the output directory
    #[arg(long)]
    overwrite: bool,
    /// Number of encoding threads; the result does not depend on it [default: one per CPU]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print the manifest as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: Prepare) -> Result<ExitCode, QueryError> {
    let json = options.json;
    let options = resolve(options)?;
    let mut display = Display::new(!ProgressDrawTarget::stderr().is_hidden());
    let prepared = xlaunch_data::prepare(&options, &mut |event| display.show(event));
    display.finish();
    let manifest = prepared.map_err(refusal)?;
    let text =
        if json { format!("{:#}\n", serde_json::json!(manifest)) } else { table(&options.output, &manifest) };
    print(text.as_bytes())?;
    Ok(ExitCode::Done)
}

fn resolve(options: Prepare) -> Result<Options, QueryError> {
    let usage = |reason: String| Refusal::new(ExitCode::Usage, reason);
    let tokenizer = Tokenizer::open(&options.tokenizer).map_err(|error| {
        let help = "help: expected bytes, gpt2, a tokenizer.json or its directory";
        usage(format!("--tokenizer: {error}\n{help}"))
    })?;
    tokenizer.loading_warnings().iter().for_each(|warning| print_note(warning));
    let chat = if options.chat || options.preferences {
        let templates =
            Templates::find(&options.tokenizer, options.chat_template.as_deref()).map_err(usage)?;
        let max_tokens = options.max_tokens.map(NonZeroUsize::get);
        Some(ChatOptions { templates, max_tokens, preferences: options.preferences })
    } else {
        None
    };
    // A chat template writes the tokens that end texts.
    let tokenizer = if chat.is_some() && options.eot.is_none() {
        tokenizer
    } else {
        xlaunch_data::frame(tokenizer, options.eot.as_deref(), options.bos).map_err(usage)?
    };
    let available =
        || std::thread::available_parallelism().map_or(1, usize::from).min(xlaunch_data::MAX_THREADS);
    Ok(Options {
        tokenizer,
        output: options.output,
        inputs: options.inputs,
        documents: match options.documents.as_str() {
            "file" => Documents::File,
            "line" => Documents::Line,
            separator => {
                let escapes = [("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")];
                let written = |text: String, (escape, character)| text.replace(escape, character);
                Documents::Separator(escapes.into_iter().fold(separator.to_owned(), written))
            }
        },
        field: options.field,
        chat,
        val: options.val,
        shard_tokens: options.shard_tokens,
        invalid: options.invalid,
        on_error: options.on_error,
        overwrite: options.overwrite,
        threads: options.threads.unwrap_or_else(available),
    })
}

fn tokens(text: &str) -> Result<u64, String> {
    let units = [("K", 1000), ("M", 1_000_000), ("G", 1_000_000_000)];
    let unit = units.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let (digits, factor) = unit.unwrap_or((text, 1));
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    number.filter(|tokens| *tokens > 0).ok_or_else(|| "expected a number such as 500K or 100M".into())
}

fn table(output: &Path, manifest: &Manifest) -> String {
    let row = |name: &str, split: &Split| {
        let count = |number: u64| number.to_string();
        let shards = split.shards.len().to_string();
        let mut row = vec![name.into(), count(split.documents), count(split.bytes), count(split.tokens)];
        row.extend(split.supervised.map(count));
        row.push(shards);
        row
    };
    let mut head = vec!["split", "documents", "bytes", "tokens", "shards"];
    if manifest.chat.is_some() {
        head.insert(4, "supervised");
    }
    let rows = [row("train", &manifest.train), row("val", &manifest.val)];
    let (output, tokenizer) = (output.display().to_string(), escape(&manifest.tokenizer));
    format!("{}: tokenizer {tokenizer}, {} ids\n{}", escape(&output), manifest.vocab, columns(&head, &rows))
}

/// Progress on stderr: a bar on a terminal that can redraw lines, lines otherwise.
struct Display {
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl Display {
    fn new(shows_bars: bool) -> Self {
        let bar = shows_bars.then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()));
        Self { bar, last_line: Instant::now() }
    }

    fn show(&mut self, event: Event) {
        match (event, &self.bar) {
            (Event::Note(note), Some(bar)) => bar.suspend(|| print_note(&note)),
            (Event::Note(note), None) => print_note(&note),
            (Event::Progress(progress), Some(bar)) => draw(bar, progress),
            (Event::Progress(progress), None) => {
                if self.last_line.elapsed() >= PROGRESS_LINE_INTERVAL {
                    self.last_line = Instant::now();
                    let size = progress.size.map_or_else(String::new, |size| format!(" of {}", bytes(size)));
                    print_note(&format!("read {}{size} bytes: {}", bytes(progress.read), written(progress)));
                }
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn draw(bar: &ProgressBar, progress: Progress) {
    if bar.position() == 0 {
        let template = match progress.size {
            Some(_) => "{bar:12.cyan/blue} {bytes}/{total_bytes} {bytes_per_sec} {eta} {wide_msg}",
            None => "{spinner} {bytes} {bytes_per_sec} {wide_msg}",
        };
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        if let Some(size) = progress.size {
            bar.set_length(size);
        }
    }
    bar.set_position(progress.read);
    bar.set_message(written(progress));
}

fn written(progress: Progress) -> String {
    format!("{} documents, {} tokens", bytes(progress.documents), bytes(progress.tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_units_are_powers_of_1000() {
        assert_eq!(["8", "500K", "100M"].map(|text| tokens(text).ok()), [8, 500_000, 100_000_000].map(Some));
        assert!(["", "0", "-1", "1T", "99999999999999G"].iter().all(|text| tokens(text).is_err()));
    }
}
