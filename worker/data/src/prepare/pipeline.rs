//! The threads of a preparation: one reads, several encode, the caller's writes.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::blocks::{Block, Blocks, Form};
use super::encode::{Encoded, Encoder};
use super::inputs::Input;
use super::source::Source;
use super::write::Writer;
use super::{Documents, Event, Options, PrepareError, Progress};

/// Bytes of blocks that are read and not yet written. With their ids, which take up to 4 times as much, this bounds the
/// memory of a preparation.
const MAX_BYTES_IN_FLIGHT: usize = 64 << 20;
const DEFAULT_FIELD: &str = "text";

/// Reads, encodes and writes all inputs.
pub(super) fn run(
    options: &Options,
    inputs: Vec<Input>,
    writer: &mut Writer<'_>,
    report: &mut dyn FnMut(Event),
) -> Result<(), PrepareError> {
    let size = size(&inputs);
    let encoder = Encoder {
        tokenizer: options.tokenizer.clone(),
        field: options.field.clone().unwrap_or_else(|| DEFAULT_FIELD.into()),
        invalid: options.invalid,
    };
    let budget = Budget { used: Mutex::new(Some(0)), changed: Condvar::new() };
    let (work, waiting) = sync_channel(options.threads);
    let (done, results) = channel();
    let waiting = Mutex::new(waiting);
    thread::scope(|scope| {
        let (budget, waiting, encoder) = (&budget, &waiting, &encoder);
        let reader = Reader { options, budget, work, done: done.clone() };
        let thread = |name: &str| thread::Builder::new().name(name.into());
        for number in 0..options.threads {
            let done = done.clone();
            let encode = move || encode_blocks(encoder, budget, waiting, &done);
            match thread("encoder").spawn_scoped(scope, encode) {
                // Fewer threads than wanted do as well.
                Err(error) if number == 0 => return Err(PrepareError::no_thread(&error)),
                _ => {}
            }
        }
        drop(done);
        let reading = thread("reader").spawn_scoped(scope, move || reader.run(inputs));
        reading.map_err(|error| PrepareError::no_thread(&error))?;
        let result = write(&results, writer, budget, size, report);
        // Ends the other threads.
        budget.close();
        drop(results);
        result
    })
}

/// The result of a block, or something to tell, by the block's number.
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
}

impl Reader<'_> {
    fn run(self, inputs: Vec<Input>) {
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
    }

    /// Returns false if nothing more is wanted.
    fn read(&self, input: &Input, number: &mut u64) -> Result<bool, PrepareError> {
        let source = Source::open(input)?;
        let label = source.label.clone();
        let mut blocks = Blocks::new(source, self.form(input), self.options.tokenizer.cuts());
        let mut empty = true;
        while let Some(block) = blocks.next()? {
            empty = false;
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

    fn form(&self, input: &Input) -> Form {
        let named = match input {
            Input::Stdin => false,
            Input::File(path) => is_jsonl(path),
        };
        match &self.options.documents {
            _ if named || self.options.field.is_some() => Form::Json,
            Documents::File => Form::Text { delimiter: Vec::new() },
            Documents::Line => Form::Text { delimiter: b"\n".into() },
            Documents::Separator(text) => Form::Text { delimiter: text.clone().into_bytes() },
        }
    }
}

/// Whether the name of a file says that it is JSONL, perhaps compressed.
fn is_jsonl(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let name = [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    name.ends_with(".jsonl") || name.ends_with(".ndjson")
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
        // Fails only once the budget is closed.
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
) -> Result<(), PrepareError> {
    let (mut early, mut next) = (BTreeMap::new(), 0);
    let mut progress = Progress { size, ..Progress::default() };
    for (number, result) in results {
        early.insert(number, result);
        while let Some(result) = early.remove(&next) {
            next += 1;
            match result? {
                Done::Note(note) => report(Event::Note(note)),
                Done::Block { encoded, bytes } => {
                    writer.write(&encoded)?;
                    budget.give_back(bytes);
                    progress.read += encoded.read;
                    (progress.documents, progress.tokens) = writer.written();
                    report(Event::Progress(progress));
                }
            }
        }
    }
    Ok(())
}

/// Size of all inputs. `None` with standard input, whose size is unknown.
fn size(inputs: &[Input]) -> Option<u64> {
    let sizes = inputs.iter().map(|input| match input {
        Input::Stdin => None,
        Input::File(path) => {
            path.metadata().ok().filter(std::fs::Metadata::is_file).map(|metadata| metadata.len())
        }
    });
    sizes.sum()
}

/// Bounds the bytes of blocks in flight.
struct Budget {
    /// `None` once closed.
    used: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Budget {
    /// Waits until there is room. A block larger than all of it waits for all others. Returns false once closed.
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
