//! HellaSwag (Zellers et al., 2019) in llm.c's format: given a context, choose the right one of four completions. The
//! model's answer is the completion with the lowest mean loss per token.
//!
//! ```text
//! header   256 little-endian i32: 20240522, 1, number of questions, bytes of the longest one, 0...
//! question u16s: 65535, its bytes, its number, label, 4, tokens of the context, the context,
//!          and four times: tokens of the completion, the completion
//! ```

use std::path::Path;

use fs_err::File;
use xlaunch_data::read_bounded;
use xlaunch_spec::exit::ExitCode;

use super::losses;
use crate::data::Batch;
use crate::error::WorkerError;
use crate::model::{BackendHandle, Model};
use xlaunch_spec::refusal::Refusal;

const MAGIC: i32 = 20_240_522;
const FILE_VERSION: i32 = 1;
const HEADER_BYTES: usize = 1024;
const START: u16 = u16::MAX;
const COMPLETIONS: usize = 4;
/// Size limit of a file of questions. HellaSwag itself has 6 MB.
const MAX_BYTES: u64 = 256 << 20;
/// Questions per batch.
const BATCH: usize = 8;
/// Batch lengths are multiples of this, so that there are few different ones.
const LENGTH_STEP: usize = 32;

/// A context and its completions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    context: Vec<u16>,
    completions: [Vec<u16>; COMPLETIONS],
    /// Index of the right completion.
    label: usize,
}

/// Number of right answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Score {
    /// Number of questions.
    pub questions: usize,
    /// Number of right answers.
    pub correct: usize,
}

impl Score {
    /// Share of right answers.
    #[expect(clippy::cast_precision_loss, reason = "a count of questions")]
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.questions.max(1) as f64
    }
}

/// Reads a file of questions.
pub fn read(path: &Path) -> Result<Vec<Question>, Refusal> {
    let failed = |reason: String| Refusal {
        exit: ExitCode::Data,
        message: format!("failed to read {}: {reason}", path.display()),
    };
    let bytes = File::open(path).and_then(|file| read_bounded(file, MAX_BYTES));
    parse(&bytes.map_err(|error| failed(error.to_string()))?).map_err(failed)
}

/// Parses a file of questions.
pub fn parse(bytes: &[u8]) -> Result<Vec<Question>, String> {
    let word = |index: usize| {
        let bytes = bytes.get(4 * index..4 * index + 4)?;
        bytes.try_into().ok().map(i32::from_le_bytes)
    };
    if word(0) != Some(MAGIC) {
        return Err(format!("it does not start with {MAGIC}, as HellaSwag files of llm.c do"));
    }
    let version = word(1).unwrap_or(0);
    if version != FILE_VERSION {
        return Err(format!("format version {version} is not supported; expected {FILE_VERSION}"));
    }
    let said = word(2).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    let mut rest = bytes.get(HEADER_BYTES..).ok_or("truncated within its header")?;
    let mut questions = Vec::new();
    while !rest.is_empty() {
        let number = questions.len();
        let (question, bytes) = question(rest, number).ok_or(format!("question {number} is damaged"))?;
        questions.push(question);
        rest = rest.get(bytes..).unwrap_or_default();
    }
    if questions.len() == said && said > 0 {
        Ok(questions)
    } else {
        Err(format!("the header says {said} questions, but the file has {}", questions.len()))
    }
}

/// Parses the question at the start of `bytes`; also returns its size.
fn question(bytes: &[u8], number: usize) -> Option<(Question, usize)> {
    let mut words = Words(bytes);
    let (start, size, index) = (words.next()?, usize::from(words.next()?), words.next()?);
    if start != START || usize::from(index) != number & 0xffff {
        return None;
    }
    let mut words = Words(bytes.get(..size)?.get(6..)?);
    let (label, completions) = (usize::from(words.next()?), usize::from(words.next()?));
    if label >= COMPLETIONS || completions != COMPLETIONS {
        return None;
    }
    let context = words.ids()?;
    let completions = [words.ids()?, words.ids()?, words.ids()?, words.ids()?];
    words.0.is_empty().then_some((Question { context, completions, label }, size))
}

/// Reader of little-endian u16s.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> Option<u16> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_le_bytes(*word))
    }

    /// Reads a length, which must not be 0, and that number of ids.
    fn ids(&mut self) -> Option<Vec<u16>> {
        let count = self.next().filter(|count| *count > 0)?;
        (0..count).map(|_| self.next()).collect()
    }
}

/// Answers all questions and counts the right answers.
pub fn score(
    backend: &BackendHandle,
    model: &Model,
    questions: &[Question],
    interrupted: &dyn Fn() -> bool,
) -> Result<Score, Refusal> {
    check(questions, model.shape.seq, model.shape.vocab)?;
    let mut correct = 0;
    for questions_of_batch in questions.chunks(BATCH) {
        if interrupted() {
            return Err(Refusal::interrupted());
        }
        let answers = answers(backend, model, questions_of_batch)?;
        correct += questions_of_batch.iter().zip(answers).filter(|(it, answer)| it.label == *answer).count();
    }
    Ok(Score { questions: questions.len(), correct })
}

/// Checks that the model can answer all questions.
fn check(questions: &[Question], seq: usize, vocab: usize) -> Result<(), Refusal> {
    for (number, question) in questions.iter().enumerate() {
        let ids = question.completions.iter().chain([&question.context]).flatten();
        let problem = match ids.max().map(|id| usize::from(*id)) {
            Some(id) if id >= vocab => format!(
                "contains token id {id}, but the model's vocabulary has {vocab} ids; these files are for GPT-2's \
                 tokenizer"
            ),
            _ if length(question) > seq => {
                format!("has {} tokens, but the model's context has {seq} (model.seq)", length(question))
            }
            _ => continue,
        };
        return Err(Refusal {
            exit: ExitCode::Data,
            message: format!("HellaSwag question {number} {problem}"),
        });
    }
    Ok(())
}

/// Returns the number of tokens of the longest row. The last token of a completion is only predicted.
fn length(question: &Question) -> usize {
    let longest = question.completions.iter().map(Vec::len).max().unwrap_or(0);
    question.context.len() + longest - 1
}

/// Returns the completion with the lowest mean loss for each question.
fn answers(backend: &BackendHandle, model: &Model, questions: &[Question]) -> Result<Vec<usize>, Refusal> {
    let longest = questions.iter().map(length).max().unwrap_or(1);
    let seq = longest.next_multiple_of(LENGTH_STEP).min(model.shape.seq);
    let batch = COMPLETIONS * questions.len();
    let (mut tokens, mut targets) = (vec![0; batch * seq], vec![0; batch * seq]);
    let completions = || questions.iter().flat_map(|it| it.completions.iter().map(move |ids| (it, ids)));
    let rows_of = tokens.chunks_exact_mut(seq).zip(targets.chunks_exact_mut(seq));
    for ((tokens, targets), (question, completion)) in rows_of.zip(completions()) {
        let ids: Vec<i32> = question.context.iter().chain(completion).map(|id| i32::from(*id)).collect();
        tokens[..ids.len() - 1].copy_from_slice(&ids[..ids.len() - 1]);
        targets[..ids.len() - 1].copy_from_slice(&ids[1..]);
    }
    let losses = losses(backend, model, [batch, seq], &Batch { tokens, targets, documents: None })
        .map_err(WorkerError::from)?;
    let means: Vec<f64> = losses
        .chunks_exact(seq)
        .zip(completions())
        .map(|(losses, (question, completion))| {
            let own = &losses[question.context.len() - 1..][..completion.len()];
            own.iter().copied().map(f64::from).sum::<f64>() / f64::from(u32::try_from(own.len()).unwrap_or(1))
        })
        .collect();
    let lowest = |means: &[f64]| (0..means.len()).min_by(|a, b| means[*a].total_cmp(&means[*b])).unwrap_or(0);
    Ok(means.chunks_exact(COMPLETIONS).map(lowest).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Label, context and completions.
    type Example<'a> = (u16, &'a [u16], [&'a [u16]; 4]);

    fn encode(questions: &[Example<'_>], count: i32) -> Vec<u8> {
        let mut header = [0_i32; 256];
        header[..4].copy_from_slice(&[MAGIC, FILE_VERSION, count, 100]);
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        for (index, (label, context, completions)) in questions.iter().enumerate() {
            let mut words = vec![START, 0, u16::try_from(index).unwrap(), *label, 4];
            for ids in std::iter::once(context).chain(completions) {
                words.push(u16::try_from(ids.len()).unwrap());
                words.extend(*ids);
            }
            words[1] = u16::try_from(2 * words.len()).unwrap();
            bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        bytes
    }

    const QUESTION: Example<'_> = (2, &[5, 6], [&[1], &[2, 3], &[4, 4, 4], &[9]]);

    #[test]
    fn questions_are_read() {
        let questions = parse(&encode(&[QUESTION, (0, &[7], [&[1], &[2], &[3], &[4]])], 2)).unwrap();
        assert_eq!((questions[0].label, &questions[0].context[..]), (2, &[5, 6][..]));
        assert_eq!(questions[0].completions[2], [4, 4, 4]);
        assert_eq!((questions[1].label, questions.len()), (0, 2));
    }

    #[test]
    fn hostile_files_are_refused() {
        let error = |bytes: &[u8]| parse(bytes).unwrap_err();
        let good = encode(&[QUESTION], 1);
        assert!(error(&[]).contains("does not start with 20240522"));
        assert!(error(&good[..500]).contains("truncated"));
        assert!(error(&good[..good.len() - 2]).contains("question 0 is damaged"));
        assert!(error(&[&good[..], &[1, 2, 3]].concat()).contains("question 1 is damaged"));
        assert!(
            error(&encode(&[QUESTION], i32::MAX)).contains("says 2147483647 questions, but the file has 1")
        );
        assert!(error(&encode(&[(4, &[5], [&[1]; 4])], 1)).contains("damaged"));
        assert!(error(&encode(&[(0, &[], [&[1]; 4])], 1)).contains("damaged"));
        for at in HEADER_BYTES..good.len() {
            // Any result is acceptable; it must not panic.
            let mut changed = good.clone();
            changed[at] = 0xff;
            let _ = parse(&changed);
        }
        let mut version = good.clone();
        version[4] = 2;
        assert!(error(&version).contains("version 2"));
    }

    #[test]
    fn questions_that_the_model_cannot_answer_are_named() {
        let questions = parse(&encode(&[QUESTION], 1)).unwrap();
        assert!(check(&questions, 4, 10).is_ok());
        assert!(check(&questions, 3, 10).unwrap_err().message.contains("has 4 tokens"));
        assert!(check(&questions, 4, 9).unwrap_err().message.contains("token id 9"));
    }
}
