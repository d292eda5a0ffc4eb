//! The threads of a preparation: one reads, several encode, and the caller's thread writes.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::blocks::{Block, Blocks, Form};
use super::encode::{Encoded, Encoder};
use super::inputs::Input;
use super::kind::{self, Kind};
use super::rows::Columns;
use super::source::Source;
use super::write::Writer;
use super::{ChatOptions, Documents, Event, OnError, Options, PrepareError, Progress, parquet_rows, rows};
use crate::chat::{ALPACA_COLUMNS, CHAT_COLUMNS, ChatEncoder, MEDIA, is_loss_key, is_question};

/// Maximum bytes of blocks that are read but not yet written. Together with their ids, which take up to 4 times as
/// much, this bounds the memory of a preparation.
const MAX_BYTES_IN_FLIGHT: usize = 64 << 20;

/// Number of skipped lines to show.
const SKIPPED_SHOWN: usize = 5;

/// Findings about all inputs.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// Lines and rows that were left out.
    pub(super) skipped: u64,
    /// See [`Chat`](crate::manifest::Chat).
    pub(super) ends: BTreeSet<u32>,
    pub(super) truncated: u64,
    pub(super) dropped: u64,
    /// Chats whose thoughts the template does not write.
    lost_thoughts: u64,
}

impl Found {
    /// Returns notes about chats, or about pairs of answers, for the user.
    fn notes(&self, pairs: bool) -> Vec<String> {
        let Self { truncated, dropped, lost_thoughts, .. } = self;
        let what = if pairs { "pairs of which an answer" } else { "chats whose first turn" };
        let notes = [
            (*truncated, format!("left out turns at the end of {truncated} chats to fit --max-tokens")),
            (*dropped, format!("left out {dropped} {what} is longer than --max-tokens")),
            (
                *lost_thoughts,
                format!(
                    "{lost_thoughts} chats have thoughts (`reasoning_content`), of which the template writes nothing; \
                     another one can be named with --chat-template"
                ),
            ),
        ];
        notes.into_iter().filter(|(count, _)| *count > 0).map(|(_, note)| note).collect()
    }
}

/// Reads, encodes and writes all inputs.
pub(super) fn run(
    options: &Options,
    inputs: Vec<Input>,
    writer: &mut Writer<'_>,
    report: &mut dyn FnMut(Event),
) -> Result<Found, PrepareError> {
    let size = size(&inputs);
    let encoder = Encoder {
        tokenizer: options.tokenizer.clone(),
        field: options.column().into(),
        invalid: options.invalid,
        skip: options.on_error == OnError::Skip,
        chats: options.chat.as_ref().map(|ChatOptions { templates, max_tokens, preferences }| {
            ChatEncoder::new(options.tokenizer.clone(), templates, *max_tokens, *preferences)
        }),
    };
    let budget = Budget { used: Mutex::new(Some(0)), changed: Condvar::new() };
    let (work, waiting) = sync_channel(options.threads);
    let (done, results) = channel();
    let waiting = Mutex::new(waiting);
    let found = thread::scope(|scope| {
        let (budget, waiting, encoder) = (&budget, &waiting, &encoder);
        let separators = Separators::default();
        let reader = Reader { options, budget, work, done: done.clone(), separators };
        let thread = |name: &str| thread::Builder::new().name(name.into());
        for number in 0..options.threads {
            let done = done.clone();
            let encode = move || encode_blocks(encoder, budget, waiting, &done);
            match thread("encoder").spawn_scoped(scope, encode) {
                // Fewer threads than requested are fine.
                Err(error) if number == 0 => return Err(PrepareError::no_thread(&error)),
                _ => {}
            }
        }
        drop(done);
        let reading = thread("reader").spawn_scoped(scope, move || reader.run(inputs));
        reading.map_err(|error| PrepareError::no_thread(&error))?;
        let result = write(&results, writer, budget, size, report);
        // This ends the other threads.
        budget.close();
        drop(results);
        result
    })?;
    let pairs = options.chat.as_ref().is_some_and(|chat| chat.preferences);
    found.notes(pairs).into_iter().for_each(|note| report(Event::Note(note)));
    Ok(found)
}

/// The result of a block, or a message, with the block's number.
enum Done {
    Block { encoded: Encoded, bytes: usize },
    Note(String),
}

type Numbered = (u64, Result<Done, PrepareError>);

struct Reader<'a> {
    options: &'a Options,
    budget: &'a Budget,
    work: SyncSender<(u64, Block)>,
    done: Sender<Numbered>,
    separators: Separators,
}

/// Findings about the separator of documents in inputs of text.
#[derive(Default)]
struct Separators {
    has_text: bool,
    found: bool,
    has_windows_lines: bool,
}

impl Separators {
    fn search(&mut self, block: &Block) {
        let Form::Text { delimiter } = &*block.form else { return };
        self.has_text = true;
        let has = |text: &[u8]| memchr::memmem::find(&block.bytes, text).is_some();
        self.found = self.found || has(delimiter);
        self.has_windows_lines |= !self.found && has(b"\r\n");
    }

    /// Returns a note about a separator that does not occur.
    fn note(&self, documents: &Documents) -> Option<String> {
        let Documents::Separator(text) = documents else { return None };
        if self.found || !self.has_text {
            return None;
        }
        let windows = text.replace('\r', "").replace('\n', "\r\n");
        let help = if self.has_windows_lines && windows != *text {
            format!("; for lines that end as on Windows, use --documents '{}'", windows.escape_debug())
        } else {
            String::new()
        };
        Some(format!(
            "the separator `{}` does not occur: each text is one document{help}",
            text.escape_debug()
        ))
    }
}

impl Reader<'_> {
    fn run(mut self, inputs: Vec<Input>) {
        let mut number = 0;
        for input in inputs {
            match self.read(&input, &mut number) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    let _ = self.done.send((number, Err(error)));
                    return;
                }
            }
        }
        if let Some(note) = self.separators.note(&self.options.documents) {
            let _ = self.done.send((number, Ok(Done::Note(note))));
        }
    }

    /// Reads an input. Returns false if no more blocks are wanted.
    fn read(&mut self, input: &Input, number: &mut u64) -> Result<bool, PrepareError> {
        let (source, form) = self.open(input)?;
        let label = source.label.clone();
        if matches!(form, Form::Text { .. }) && kind::may_be_json(input, source.head()) {
            let note = format!(
                "{label} looks like JSON, but is read as text; for the text in its rows, name their field with --field"
            );
            if self.done.send((*number, Ok(Done::Note(note)))).is_err() {
                return Ok(false);
            }
            *number += 1;
        }
        let mut blocks = Blocks::new(source, form, self.options.tokenizer.cuts());
        let mut empty = true;
        while let Some(block) = blocks.next()? {
            empty = false;
            self.separators.search(&block);
            if !self.budget.take(block.bytes.len()) || self.work.send((*number, block)).is_err() {
                return Ok(false);
            }
            *number += 1;
        }
        if empty {
            let note = Done::Note(format!("{label} is empty: skipped"));
            *number += 1;
            return Ok(self.done.send((*number - 1, Ok(note))).is_ok());
        }
        Ok(true)
    }

    /// Returns what to do about a file that was found in a directory, and is not text.
    fn hint(&self, input: &Input) -> String {
        let Input::File(path) = input else { return String::new() };
        let is_searched = |argument: &&String| Path::new(argument).is_dir() && path.starts_with(argument);
        match self.options.inputs.iter().find(is_searched) {
            Some(dir) => {
                let glob = Path::new(dir).join("**/*.txt");
                format!("; name the files to read by a glob, such as '{}'", glob.display())
            }
            None => String::new(),
        }
    }

    /// Opens an input according to its kind.
    fn open(&self, input: &Input) -> Result<(Source, Form), PrepareError> {
        let source = Source::open(input)?;
        let column = self.options.column();
        let chats = self.options.chat.is_some();
        let kind = kind::of(input, source.head(), chats || self.options.field.is_some()).map_err(|what| {
            let hint = self.hint(input);
            PrepareError::Data(format!("{}: expected text, found {what}{hint}", source.label))
        })?;
        if let (Kind::Parquet, Some(compression)) = (kind, source.compression()) {
            return Err(PrepareError::Data(format!(
                "{}: a Parquet file compressed with {compression} cannot be read, as its index is at its end; \
                 decompress it first",
                source.label
            )));
        }
        let source = match (kind, input) {
            (Kind::Text | Kind::JsonLines, _) => source,
            (Kind::Json, _) => source.into_rows("JSON", |text, _| Ok(rows::json(text)))?,
            (Kind::Separated { delimiter }, _) => {
                let columns = if chats { Columns::All } else { Columns::One(column) };
                source.into_rows("CSV", |text, _| rows::separated(text, delimiter, columns))?
            }
            (Kind::Parquet, Input::File(path)) if path.is_file() && chats => {
                let chat = self.options.chat.as_ref();
                let is_more = |name: &str| {
                    let in_chat = |chat: &ChatOptions| {
                        chat.templates.may_read(name) || chat.preferences && is_question(name)
                    };
                    is_loss_key(name) || chat.is_some_and(in_chat)
                };
                let columns = [CHAT_COLUMNS, &ALPACA_COLUMNS].concat();
                let rows = |_, read: &_| parquet_rows::objects(path, &columns, MEDIA, &is_more, read);
                source.into_rows("Parquet", rows)?
            }
            (Kind::Parquet, Input::File(path)) if path.is_file() => {
                source.into_rows("Parquet", |_, read| parquet_rows::column(path, column, read))?
            }
            (Kind::Parquet, _) => {
                let reason = format!(
                    "{}: a Parquet file cannot be read from a pipe, as its index is at its end; name the file",
                    source.label
                );
                return Err(PrepareError::Usage(reason));
            }
        };
        let form = match &self.options.documents {
            _ if matches!(kind, Kind::Separated { .. } | Kind::Parquet) => Form::Table,
            _ if kind == Kind::Json => Form::Elements,
            _ if kind == Kind::JsonLines => Form::Json,
            Documents::File => Form::Text { delimiter: Vec::new() },
            Documents::Line => Form::Text { delimiter: b"\n".into() },
            Documents::Separator(text) => Form::Text { delimiter: text.clone().into_bytes() },
        };
        Ok((source, form))
    }
}

/// Takes blocks until the reader ends. After an error it drops them, so that the reader never waits for it.
fn encode_blocks(
    encoder: &Encoder,
    budget: &Budget,
    waiting: &Mutex<Receiver<(u64, Block)>>,
    done: &Sender<Numbered>,
) {
    loop {
        let Ok((number, block)) = lock(waiting).recv() else { return };
        if budget.is_closed() {
            continue;
        }
        let result = catch_unwind(AssertUnwindSafe(|| encoder.encode(&block))).unwrap_or_else(|_| {
            Err(PrepareError::Internal(format!("{}: encoding failed at byte {}", block.label, block.offset)))
        });
        let result = result.map(|encoded| Done::Block { encoded, bytes: block.bytes.len() });
        // Fails only after the budget is closed.
        let _ = done.send((number, result));
    }
}

/// Writes blocks in order.
fn write(
    results: &Receiver<Numbered>,
    writer: &mut Writer<'_>,
    budget: &Budget,
    size: Option<u64>,
    report: &mut dyn FnMut(Event),
) -> Result<Found, PrepareError> {
    let (mut early, mut next) = (BTreeMap::new(), 0);
    let mut progress = Progress { size, ..Progress::default() };
    let (mut skipped, mut found) = (Skipped::default(), Found::default());
    for (number, result) in results {
        early.insert(number, result);
        while let Some(result) = early.remove(&next) {
            next += 1;
            match result? {
                Done::Note(note) => report(Event::Note(note)),
                Done::Block { encoded, bytes } => {
                    writer.write(&encoded)?;
                    skipped.add(encoded.skipped);
                    found.ends.extend(encoded.ends);
                    found.truncated += encoded.truncated;
                    found.dropped += encoded.dropped;
                    found.lost_thoughts += encoded.lost_thoughts;
                    budget.give_back(bytes);
                    progress.read += encoded.read;
                    (progress.documents, progress.tokens) = writer.written();
                    report(Event::Progress(progress));
                }
            }
        }
    }
    skipped.notes().into_iter().for_each(|note| report(Event::Note(note)));
    found.skipped = skipped.count;
    Ok(found)
}

/// Lines and rows that were left out.
#[derive(Default)]
struct Skipped {
    count: u64,
    first: Vec<String>,
}

impl Skipped {
    fn add(&mut self, reasons: Vec<String>) {
        self.count += reasons.len() as u64;
        let room = SKIPPED_SHOWN.saturating_sub(self.first.len());
        self.first.extend(reasons.into_iter().take(room));
    }

    /// Returns notes about them for the user.
    fn notes(&self) -> Vec<String> {
        if self.count == 0 {
            return Vec::new();
        }
        let which = if self.count > self.first.len() as u64 { "; the first of them:" } else { ":" };
        let rows = if self.count == 1 { "row" } else { "rows" };
        let mut notes = vec![format!("skipped {} {rows} that cannot be used{which}", self.count)];
        notes.extend(self.first.iter().map(|reason| format!("  {reason}")));
        notes
    }
}

/// Returns the size of all inputs. `None` if standard input, whose size is unknown, is one of them.
fn size(inputs: &[Input]) -> Option<u64> {
    let sizes = inputs.iter().map(|input| match input {
        Input::Stdin => None,
        Input::File(path) => {
            path.metadata().ok().filter(std::fs::Metadata::is_file).map(|metadata| metadata.len())
        }
    });
    sizes.sum()
}

/// Limits the bytes of blocks in flight.
struct Budget {
    /// `None` once closed.
    used: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Budget {
    /// Waits until there is room. A block larger than the whole budget waits for all others. Returns false if closed.
    fn take(&self, bytes: usize) -> bool {
        let mut used = lock(&self.used);
        loop {
            let Some(taken) = *used else { return false };
            if taken == 0 || taken + bytes <= MAX_BYTES_IN_FLIGHT {
                *used = Some(taken + bytes);
                return true;
            }
            used = self.changed.wait(used).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_back(&self, bytes: usize) {
        let mut used = lock(&self.used);
        *used = used.map(|used| used.saturating_sub(bytes));
        self.changed.notify_one();
    }

    fn is_closed(&self) -> bool {
        lock(&self.used).is_none()
    }

    fn close(&self) {
        *lock(&self.used) = None;
        self.changed.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
