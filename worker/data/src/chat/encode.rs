//! Encodes rows of chats: their ids, and which of them count in the loss.

use std::collections::HashSet;
use std::ops::Range;

use minijinja::value::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::ASSISTANT;
use super::content::probe;
use super::json::field;
use super::preference::parse_preference;
use super::row::{CHOSEN, Chat, REJECTED, Row, THOUGHTS, TOOLS, has_role, has_thoughts, parse};
use super::spans::{self, Endings};
use super::template::{LeftOut, Marked, Template};
use super::templates::Templates;
use super::weights::is_counted;
use crate::{TOKENIZER_FILE, Tokenizer};

/// Maximum length of a rendered chat, which is encoded at once.
const MAX_CHAT_BYTES: usize = 16 << 20;
const MASK_HELP: &str = "help: use a template with `generation` blocks (--chat-template FILE), or leave such chats out \
                         with --on-error skip";

/// Texts of short chats that templates are examined with, which templates themselves do not contain.
const QUESTION: &str = "7q3";
const ANSWER: &str = "7a4";
const THOUGHT: &str = "7t5";

/// Encodes rows with one tokenizer and its templates.
#[derive(Clone, Debug)]
pub(crate) struct ChatEncoder {
    tokenizer: Tokenizer,
    /// The reason if there is none.
    default: Result<Format, String>,
    with_tools: Option<Format>,
    max_tokens: Option<usize>,
    /// True if each row has a better and a worse answer.
    preferences: bool,
    /// Tokens that may end an answer.
    endings: Vec<String>,
    /// Their ids.
    special: HashSet<u32>,
    /// Tokens that the files next to the tokenizer declare, but that have no id.
    without_id: Vec<String>,
}

/// A template, and what was found out about it.
#[derive(Clone, Debug)]
struct Format {
    template: Template,
    /// The token that is written after the last message only.
    closing: Option<String>,
    /// The token that ends an answer only if another message follows.
    separator: Option<String>,
    /// Whether the template writes the thoughts of the last answer. Many leave out those of earlier ones.
    writes_thoughts: bool,
}

/// The result of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The row holds nothing.
    Empty,
    /// It has more ids than allowed, even with only its first turn.
    Dropped,
    Document {
        document: Document,
        truncated: bool,
        /// The chat has thoughts, but the template writes none.
        loses_thoughts: bool,
    },
    /// The better answer, and the worse one.
    Pair { documents: [Document; 2], loses_thoughts: bool },
}

/// The ids of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Document {
    pub(crate) ids: Vec<u32>,
    /// True for each id whose loss counts. The first id has no loss: nothing predicts it.
    pub(crate) mask: Vec<bool>,
    /// Bytes of text.
    pub(crate) bytes: u64,
    /// Hash of the text of the whole row.
    pub(crate) hash: u64,
}

impl ChatEncoder {
    /// `preferences`: each row has a better and a worse answer.
    pub(crate) fn new(
        tokenizer: Tokenizer,
        templates: &Templates,
        max_tokens: Option<usize>,
        preferences: bool,
    ) -> Self {
        let (default, with_tools) = templates.both();
        let added = tokenizer.added_tokens().into_iter();
        let endings: Vec<String> = added.filter(|token| !token.trim().is_empty()).map(String::from).collect();
        let format = |template| Format::of(template, &endings);
        let (default, with_tools) = (default.map(format).map_err(Clone::clone), with_tools.map(format));
        let special = endings.iter().filter_map(|token| tokenizer.added_id(token)).collect();
        let mut without_id = templates.tokens.clone();
        // Every text contains the empty one, by which some configurations say that there is no such token.
        without_id.retain(|token| !token.is_empty() && tokenizer.added_id(token).is_none());
        Self { tokenizer, default, with_tools, max_tokens, preferences, endings, special, without_id }
    }

    /// Encodes a row of JSON.
    ///
    /// # Errors
    /// The reason why it cannot be used.
    pub(crate) fn encode(&self, row: &Value) -> Result<Outcome, String> {
        if self.preferences { self.pair(row) } else { self.row(parse(row)?) }
    }

    /// Encodes a row with two answers, both of which must be complete.
    fn pair(&self, row: &Value) -> Result<Outcome, String> {
        let Some([better, worse]) = parse_preference(row)? else { return Ok(Outcome::Empty) };
        let document = |row: Row, name: &str| match self.row(row) {
            Ok(Outcome::Document { document, truncated: false, loses_thoughts }) => {
                Ok(Some((document, loses_thoughts)))
            }
            Ok(_) => Ok(None),
            Err(reason) => Err(format!("`{name}`: {reason}")),
        };
        let (Some((better, lost)), Some((worse, also_lost))) =
            (document(better, CHOSEN)?, document(worse, REJECTED)?)
        else {
            return Ok(Outcome::Dropped);
        };
        // Both are in the same split.
        let worse = Document { hash: better.hash, ..worse };
        Ok(Outcome::Pair { documents: [better, worse], loses_thoughts: lost || also_lost })
    }

    fn row(&self, row: Row) -> Result<Outcome, String> {
        let document = match row {
            Row::Empty => return Ok(Outcome::Empty),
            Row::Chat(chat) => return self.chat(&chat),
            Row::Completion { prompt, completion } => self.text(&prompt, &completion)?,
            Row::Text(text) => self.text("", &text)?,
        };
        if self.fits(&document) {
            Ok(Outcome::Document { document, truncated: false, loses_thoughts: false })
        } else {
            Ok(Outcome::Dropped)
        }
    }

    /// Returns the special ids at the ends of a document's answers.
    pub(crate) fn ends<'a>(&'a self, document: &'a Document) -> impl Iterator<Item = u32> + 'a {
        let Document { ids, mask, .. } = document;
        let is_end = |index: &usize| mask[*index] && !mask.get(index + 1).copied().unwrap_or(false);
        (0..ids.len()).filter(is_end).map(|index| ids[index]).filter(|id| self.special.contains(id))
    }

    fn fits(&self, document: &Document) -> bool {
        self.max_tokens.is_none_or(|max| document.ids.len() <= max)
    }

    /// Encodes a text after a prompt that does not count for the loss, with the token that ends a text.
    fn text(&self, prompt: &str, text: &str) -> Result<Document, String> {
        let end = self.tokenizer.end_of_text().and_then(|id| self.tokenizer.added_token(id));
        let end = end.ok_or("it is not known which token ends a text\nhelp: name it with --eot TOKEN")?;
        let end = if text.ends_with(end) { "" } else { end };
        let whole = format!("{prompt}{text}{end}");
        let pieces = self.pieces(&whole, false)?;
        let span = prompt.chars().count()..whole.chars().count();
        if pieces.iter().any(|(_, start, end)| *start < span.start && span.start < *end) {
            return Err("a token spans the end of `prompt` and the start of `completion`: the model never sees such a \
                        prompt\nhelp: begin completions, rather than end prompts, with white space"
                .into());
        }
        let mut mask = mask(&pieces, &[span]);
        let mut ids: Vec<u32> = pieces.into_iter().map(|(id, ..)| id).collect();
        // Chat templates write this token themselves.
        if let Some(bos) = self.tokenizer.bos() {
            ids.insert(0, bos);
            mask.insert(0, false);
        }
        finished(ids, mask, &whole).ok_or_else(|| "the row has no token to train on".into())
    }

    /// Encodes a chat. If it is too long, leaves out turns at its end.
    fn chat(&self, chat: &Chat) -> Result<Outcome, String> {
        let with_tools = self.with_tools.as_ref().filter(|_| field(&chat.variables, TOOLS).is_some());
        let format = with_tools.map_or_else(|| self.default.as_ref().map_err(Clone::clone), Ok)?;
        let messages = format.template.adapted(&chat.messages)?;
        let loses_thoughts = !format.writes_thoughts && messages.iter().any(has_thoughts);
        let beginning = |count: usize| self.beginning(format, &messages[..count], chat);
        let whole = beginning(messages.len())?.ok_or("the chat has no token to train on")?;
        if self.fits(&whole) {
            return Ok(Outcome::Document { document: whole, truncated: false, loses_thoughts });
        }
        // A turn ends before the next message of the user.
        let is_end =
            |count: &usize| has_role(&messages[*count], "user") && has_role(&messages[*count - 1], ASSISTANT);
        let ends: Vec<usize> = (chat.prompt + 1..messages.len()).filter(is_end).collect();
        let (mut best, mut low, mut high) = (None, 0, ends.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            match beginning(ends[middle])?.filter(|document| self.fits(document)) {
                Some(document) => (best, low) = (Some(document), middle + 1),
                None => high = middle,
            }
        }
        Ok(match best {
            // Copies of a chat stay together, also where another part of it was left out.
            Some(document) => {
                let document = Document { hash: whole.hash, ..document };
                Outcome::Document { document, truncated: true, loses_thoughts }
            }
            None => Outcome::Dropped,
        })
    }

    /// Encodes the first messages of a chat; `None` if no token counts for the loss.
    fn beginning(
        &self,
        format: &Format,
        messages: &[Value],
        chat: &Chat,
    ) -> Result<Option<Document>, String> {
        let all = Value::from(messages.to_vec());
        let generation = format.template.has_generation();
        let (text, spans) = if generation {
            let Marked { text, spans } = format.template.render_marked(&all, &chat.variables)?;
            (text, counted_blocks(format, messages, chat, spans)?)
        } else {
            let text = format.template.render(&all, &chat.variables, false)?;
            let spans = self.answers(format, messages, chat, &text)?;
            (text, spans)
        };
        format.template.check_complete(messages, &chat.variables, false, &text).map_err(|left_out| {
            let advice = if left_out == LeftOut::Tools { ", or remove them" } else { "" };
            format!("{left_out}\nhelp: use a template that does (--chat-template FILE){advice}")
        })?;
        let pieces = self.pieces(&text, generation)?;
        let mut spans = in_characters(&text, &spans);
        // The rule of `transformers` for generation blocks counts each token that overlaps with one.
        if !generation {
            for at in spans.iter_mut().flat_map(|span| [&mut span.start, &mut span.end]) {
                *at = self.boundary(&text, &pieces, *at)?;
            }
        }
        let mask = mask(&pieces, &spans);
        Ok(finished(pieces.into_iter().map(|(id, ..)| id).collect(), mask, &text))
    }

    /// Returns the ranges of the answers in a chat rendered by a template without `generation` blocks.
    fn answers(
        &self,
        format: &Format,
        messages: &[Value],
        chat: &Chat,
        whole: &str,
    ) -> Result<Vec<Range<usize>>, String> {
        if let Some(token) = &format.separator {
            return Err(format!(
                "the template ends an answer with `{token}` only if another message follows: the model would not \
                 learn to end its answers\n{MASK_HELP}"
            ));
        }
        let endings = Endings { closing: format.closing.as_deref(), tokens: &self.endings };
        let render = |count: usize, prompt: bool| {
            format.template.render(&Value::from(messages[..count].to_vec()), &chat.variables, prompt)
        };
        let mut spans: Vec<Range<usize>> = Vec::new();
        let counted = |index: &usize| has_role(&messages[*index], ASSISTANT) && is_counted(&messages[*index]);
        for index in (chat.prompt..messages.len()).filter(counted) {
            let unknown = |reason: String| {
                format!(
                    "it is not known which tokens of messages[{index}] the model writes: {reason}\n{MASK_HELP}"
                )
            };
            let prompt = render(index, true).map_err(unknown)?;
            let answered = if index + 1 == messages.len() {
                whole.into()
            } else {
                render(index + 1, false).map_err(unknown)?
            };
            let span = spans::answer(whole, &prompt, &answered, &endings).map_err(unknown)?;
            if spans.last().is_some_and(|last| span.start < last.end) {
                return Err(unknown("it starts within the answer before it".into()));
            }
            spans.push(span);
        }
        Ok(spans)
    }

    /// Returns the boundary between two tokens at a character. Special tokens may include the white space after them.
    fn boundary(&self, text: &str, pieces: &[(u32, usize, usize)], at: usize) -> Result<usize, String> {
        let next = pieces.partition_point(|(_, start, _)| *start < at);
        let Some((id, _, end)) = next.checked_sub(1).map(|last| pieces[last]).filter(|(.., end)| *end > at)
        else {
            return Ok(at);
        };
        let space = text.chars().skip(at).take(end - at).all(char::is_whitespace);
        if space && self.special.contains(&id) {
            return Ok(end);
        }
        Err(format!(
            "a token spans the beginning or the end of an answer of the assistant: it would differ when the model \
             answers\n{MASK_HELP}"
        ))
    }

    fn pieces(&self, text: &str, trimmed: bool) -> Result<Vec<(u32, usize, usize)>, String> {
        if text.len() > MAX_CHAT_BYTES {
            return Err(format!("a chat of more than {} MiB", MAX_CHAT_BYTES >> 20));
        }
        if let Some(token) = self.without_id.iter().find(|token| text.contains(token.as_str())) {
            return Err(format!(
                "the tokenizer's configuration names a token `{token}`, which has no id in its {TOKENIZER_FILE}\nhelp: \
                 add it in Python with `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
            ));
        }
        self.tokenizer.encode_with_offsets(text, trimmed).map_err(|error| error.to_string())
    }
}

/// Returns the `generation` blocks of the messages that count for the loss. The blocks of a message are those that a
/// chat has more with this message at its end.
fn counted_blocks(
    format: &Format,
    messages: &[Value],
    chat: &Chat,
    blocks: Vec<Range<usize>>,
) -> Result<Vec<Range<usize>>, String> {
    let is_answer = |index: usize| messages.get(index).is_some_and(|message| has_role(message, ASSISTANT));
    let is_counted = |index: usize| index >= chat.prompt && is_counted(&messages[index]);
    if (0..messages.len()).all(|index| !is_answer(index) || is_counted(index)) {
        return Ok(blocks);
    }
    let unknown = |reason: String| {
        format!(
            "it is not known which `generation` blocks belong to messages of `prompt` or of `weight` 0: {reason}"
        )
    };
    let (mut counted, mut before) = (Vec::new(), 0);
    for index in 0..messages.len() {
        let answers = is_answer(index);
        // Between answers, one count is enough. In front of the first, a template may reject what is not a chat yet.
        if !answers && (before == 0 || !is_answer(index + 1)) {
            continue;
        }
        let count = if index + 1 == messages.len() {
            blocks.len()
        } else {
            let beginning = Value::from(messages[..=index].to_vec());
            format.template.render_marked(&beginning, &chat.variables).map_err(unknown)?.spans.len()
        };
        if count < before || (count > before) != answers {
            let number = i64::try_from(count).unwrap_or(0) - i64::try_from(before).unwrap_or(0);
            return Err(unknown(format!("messages[{index}] adds {number} of them")));
        }
        if answers && is_counted(index) {
            counted.extend_from_slice(&blocks[before..count]);
        }
        before = count;
    }
    if before == blocks.len() { Ok(counted) } else { Err(unknown("the end of the chat adds some".into())) }
}

impl Format {
    /// Renders short chats to find out what a template does.
    fn of(template: &Template, tokens: &[String]) -> Self {
        let render_all = |messages: &[Value]| {
            let messages = template.adapted(messages).ok()?;
            template.render(&Value::from(messages), &Value::from(()), false).ok()
        };
        let render = |texts: &[&str]| render_all(&probe(texts));
        let chats = render(&[QUESTION, ANSWER]).zip(render(&[QUESTION, ANSWER, "c", "d"]));
        let chats = chats.as_ref();
        let closing = template
            .token("eos_token")
            .filter(|token| chats.is_some_and(|(short, long)| spans::is_closing(short, long, token)));
        let separator =
            chats.and_then(|(short, long)| spans::separator(short, long, [QUESTION, ANSWER], tokens));
        let thoughts = THOUGHTS.map(|name| (name, THOUGHT));
        let answer = [("role", ASSISTANT), ("content", ANSWER)].into_iter().chain(thoughts);
        let thoughtful = render_all(&[probe(&[QUESTION]), vec![Value::from_pairs(answer)]].concat());
        Self {
            template: template.clone(),
            closing: closing.map(String::from),
            separator: separator.map(String::from),
            // A template that rejects the chat says so itself.
            writes_thoughts: thoughtful.is_none_or(|text| text.contains(THOUGHT)),
        }
    }
}

/// Completes a document; `None` if no token counts for the loss.
fn finished(ids: Vec<u32>, mut mask: Vec<bool>, text: &str) -> Option<Document> {
    if let Some(first) = mask.first_mut() {
        *first = false;
    }
    let document = Document { ids, bytes: text.len() as u64, hash: xxh3_64(text.as_bytes()), mask };
    document.mask.contains(&true).then_some(document)
}

/// Returns which tokens overlap with a range of characters. Both are in order.
fn mask(pieces: &[(u32, usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let mut spans = spans.iter().peekable();
    let overlaps = |(_, start, end): &(u32, usize, usize)| {
        while spans.next_if(|span| *start >= span.end).is_some() {}
        spans.peek().is_some_and(|span| *end > span.start)
    };
    pieces.iter().map(overlaps).collect()
}

/// Converts ranges of bytes, in order, to ranges of characters.
fn in_characters(text: &str, spans: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut at, mut characters) = (0, 0);
    let mut position = |byte: usize| {
        characters += text[at..byte].chars().count();
        at = byte;
        characters
    };
    spans.iter().map(|span| position(span.start)..position(span.end)).collect()
}
