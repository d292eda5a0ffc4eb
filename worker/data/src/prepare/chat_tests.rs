use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{BoolType, ByteArray, ByteArrayType};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

use super::*;
use crate::manifest::Split;
use crate::{Run, inspect};

const TEMPLATE: &str = "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}";

/// A directory with inputs, and the chats prepared from them in `out`, as bytes.
struct Prepared {
    dir: tempfile::TempDir,
    options: Options,
}

impl Prepared {
    fn new(name: &str, contents: impl AsRef<[u8]>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let template = dir.path().join("template");
        fs_err::write(&template, TEMPLATE).unwrap();
        let templates = Templates::find("bytes", Some(&template)).unwrap();
        let input = dir.path().join(name);
        fs_err::write(&input, contents).unwrap();
        let options = Options {
            tokenizer: Tokenizer::bytes(),
            output: dir.path().join("out"),
            inputs: vec![input.display().to_string()],
            documents: Documents::File,
            field: None,
            chat: Some(ChatOptions { templates, max_tokens: None, preferences: false }),
            on_error: OnError::Stop,
            val: 0.0,
            shard_tokens: 1 << 20,
            invalid: Invalid::Error,
            overwrite: false,
            threads: 2,
        };
        Self { dir, options }
    }

    fn out(&self) -> &Path {
        &self.options.output
    }

    fn run(&self) -> Result<(Manifest, Vec<String>), PrepareError> {
        let mut notes = Vec::new();
        let manifest = prepare(&self.options, &mut |event| match event {
            Event::Note(note) => notes.push(note),
            Event::Progress(_) => {}
        })?;
        assert_eq!(Manifest::read(self.out()).unwrap(), manifest);
        Ok((manifest, notes))
    }

    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let read = |entry: std::fs::DirEntry| {
            (entry.file_name().into_string().unwrap(), fs_err::read(entry.path()).unwrap())
        };
        std::fs::read_dir(self.out()).unwrap().map(|entry| read(entry.unwrap())).collect()
    }

    /// Returns the documents of a split; ids whose loss counts are in upper case.
    fn texts(&self, split: &Split) -> Vec<String> {
        let files = self.files();
        let mut text = Vec::new();
        for shard in &split.shards {
            let ids = files[&shard.name][1024..].chunks(2).map(|id| id[0]);
            let mask = &files[&shard.mask.as_ref().unwrap().name];
            let bit = |at: usize| mask[at / 8] >> (at % 8) & 1 == 1;
            text.extend(ids.enumerate().map(|(at, id)| if bit(at) { id.to_ascii_uppercase() } else { id }));
        }
        let starts = files[&split.starts.as_ref().unwrap().name].chunks(8);
        let mut starts: Vec<usize> = starts
            .map(|start| usize::try_from(u64::from_le_bytes(start.try_into().unwrap())).unwrap())
            .collect();
        starts.push(text.len());
        starts.windows(2).map(|ends| String::from_utf8(text[ends[0]..ends[1]].to_vec()).unwrap()).collect()
    }
}

fn chat(question: &str, answer: &str) -> String {
    let messages = serde_json::json!([
        {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    ]);
    serde_json::json!({ "messages": messages }).to_string() + "\n"
}

#[test]
fn template_that_was_edited_after_the_preparation_is_refused() {
    let prepared = Prepared::new("a.jsonl", chat("a", "bc"));
    let (manifest, _) = prepared.run().unwrap();
    let dir = &prepared.options.output;
    manifest.check_template(dir).unwrap();
    let file = dir.join("chat_template.jinja");
    fs_err::write(&file, format!("{TEMPLATE}edited")).unwrap();
    let error = manifest.check_template(dir).unwrap_err().to_string();
    let expected = format!("{} is damaged: the data was prepared with another chat template", file.display());
    assert_eq!(error, expected);
    assert!(inspect(dir).unwrap_err().to_string().contains(&expected));
    fs_err::remove_file(&file).unwrap();
    manifest.check_template(dir).unwrap();
}

#[test]
fn chats_have_masks_and_starts() {
    let prepared = Prepared::new("a.jsonl", format!("{}\n{}null\n", chat("a", "bc"), chat("d", "e")));
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!((manifest.version, manifest.skipped), (2, 0));
    let train = &manifest.train;
    assert_eq!((train.documents, train.supervised), (2, Some(5)));
    assert_eq!(prepared.texts(train), ["user:a\nassistant:BC\n", "user:d\nassistant:E\n"]);
    assert_eq!((manifest.val.supervised, &manifest.val.starts), (Some(0), &None));
    let files = prepared.files();
    assert_eq!(files["chat_template.jinja"], TEMPLATE.as_bytes());
    assert_eq!(manifest.chat.unwrap().template_xxh3_128, crate::hash(TEMPLATE.as_bytes()));
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected = [
        "chat_template.jinja",
        "manifest.json",
        "tokenizer.json",
        "train_000001.bin",
        "train_000001.mask",
        "train_starts.bin",
    ];
    assert_eq!(names, expected);
}

#[test]
fn half_surrogate_pairs_in_chats_are_refused_or_replaced() {
    let escaped = chat("a", "b*").replace('*', "\\ud83d");
    let mut prepared = Prepared::new("a.jsonl", escaped);
    let error = prepared.run().unwrap_err().to_string();
    assert!(error.contains("a.jsonl:1: not valid JSONL: an escape is half of a surrogate pair"), "{error}");
    prepared.options.invalid = Invalid::Replace;
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!(prepared.texts(&manifest.train), ["user:a\nassistant:B\u{fffd}\n"]);
}

#[test]
fn any_number_of_threads_and_any_input_gives_the_same_chats() {
    let row = |number: usize| (format!("{number}"), "answer ".repeat(number % 50));
    let rows: Vec<(String, String)> = (0..4000).map(row).filter(|(_, answer)| !answer.is_empty()).collect();
    let lines: String = rows.iter().map(|(question, answer)| chat(question, answer)).collect();
    let array = format!("[{}]", lines.trim_end().replace('\n', ","));
    let mut first = None;
    for (name, contents, threads) in [("a.jsonl", &lines, 1), ("a.jsonl", &lines, 5), ("a.json", &array, 3)] {
        let mut prepared = Prepared::new(name, contents);
        (prepared.options.threads, prepared.options.val) = (threads, 0.1);
        prepared.options.shard_tokens = 100_001;
        let (manifest, _) = prepared.run().unwrap();
        assert!(manifest.val.documents > 0 && manifest.train.shards.len() > 3);
        let expected = |split: &Split| {
            let starts: Vec<String> = prepared.texts(split);
            starts.iter().all(|text| text.starts_with("user:") && text.contains("\nassistant:ANSWER"))
        };
        assert!(expected(&manifest.train) && expected(&manifest.val));
        let report = inspect(prepared.out()).unwrap();
        assert_eq!(report.parts[0].supervised, manifest.train.supervised);
        let files = prepared.files();
        assert_eq!(first.get_or_insert_with(|| files.clone()), &files);
    }
}

#[test]
fn texts_need_no_template_and_chats_do() {
    let rows = "{\"prompt\": \"a\", \"completion\": \" b\"}\n{\"text\": \"c\"}\n";
    let mut prepared = Prepared::new("a.jsonl", rows);
    prepared.options.tokenizer = Tokenizer::gpt2();
    prepared.options.chat.as_mut().unwrap().templates = Templates::find("gpt2", None).unwrap();
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!((manifest.train.documents, manifest.train.supervised), (2, Some(3)));
    assert!(!prepared.files().contains_key("chat_template.jinja"));
    manifest.check_template(prepared.out()).unwrap();
    let mut chats = Prepared::new("a.jsonl", chat("a", "b"));
    chats.options.chat = prepared.options.chat.clone();
    let error = chats.run().unwrap_err().to_string();
    assert!(error.contains("a.jsonl:1: the tokenizer gpt2 has no chat template"), "{error}");
}

#[test]
fn fields_of_a_table_are_those_of_a_chat() {
    let messages = r#"[{"role": "user", "content": "a, 'b'"}, {"role": "assistant", "content": "c\nd"}]"#;
    let rows = format!("id,messages,tools\n1,\"{}\",\n2,,\n", messages.replace('"', "\"\""));
    let mut prepared = Prepared::new("a.csv", &rows);
    let error = prepared.run().unwrap_err().to_string();
    assert!(error.contains("a.csv: row 2: the row has none of"), "{error}");
    prepared.options.on_error = OnError::Skip;
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!(prepared.texts(&manifest.train), ["user:a, 'b'\nassistant:C\nD\n"]);
    let python = Prepared::new("a.csv", "messages\n[{'role': 'user'}]\n").run().unwrap_err().to_string();
    assert!(python.contains("a.csv: row 1: `messages` is not JSON: "), "{python}");
    let twice = Prepared::new("a.csv", "messages,messages\na,b\n").run().unwrap_err().to_string();
    assert!(twice.contains("there is more than one column `messages`"), "{twice}");
}

#[test]
fn chat_that_cannot_be_used_is_named_and_leaves_nothing() {
    let bad = r#"{"messages": [{"role": "user", "content": 7}]}"#;
    let lines = format!("{}{bad}\n{}", chat("a", "b"), chat("c", "d"));
    let mut prepared = Prepared::new("a.jsonl", &lines);
    let error = prepared.run().unwrap_err();
    let place = format!("{}:2: `messages[0].content` is a number", prepared.options.inputs[0]);
    assert!(matches!(&error, PrepareError::Data(reason) if reason.starts_with(&place)), "{error}");
    assert!(!prepared.out().exists());
    prepared.options.on_error = OnError::Skip;
    let (manifest, notes) = prepared.run().unwrap();
    assert_eq!((manifest.skipped, manifest.train.documents), (1, 2));
    assert!(notes[1].contains(":2: `messages[0].content`"), "{notes:?}");
    let broken = Prepared::new("a.jsonl", "{\"messages\": [}\n");
    assert!(broken.run().unwrap_err().to_string().contains(":1: not valid JSONL"));
}

#[test]
fn chats_whose_thoughts_the_template_does_not_write_are_counted() {
    let thinking = r#"{"messages": [{"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "because"}]}"#;
    let lines = format!("{}\n{}", thinking.replace('\n', ""), chat("a", "x"));
    let mut prepared = Prepared::new("a.jsonl", lines);
    let (_, notes) = prepared.run().unwrap();
    assert!(notes[0].starts_with("1 chats have thoughts (`reasoning_content`)"), "{notes:?}");
    let template = prepared.dir.path().join("template");
    fs_err::write(&template, TEMPLATE.replace("m.content", "(m.reasoning_content or '') + m.content"))
        .unwrap();
    prepared.options.chat.as_mut().unwrap().templates = Templates::find("bytes", Some(&template)).unwrap();
    prepared.options.overwrite = true;
    let (manifest, notes) = prepared.run().unwrap();
    assert_eq!(notes, [""; 0]);
    assert_eq!(prepared.texts(&manifest.train)[0], "user:a\nassistant:BECAUSEB\n");
}

#[test]
fn left_out_turns_and_chats_are_counted() {
    let two = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#;
    let lines = format!("{}\n{}{}", two.replace('\n', ""), chat("a", "x"), chat("a", &"y".repeat(40)));
    let mut prepared = Prepared::new("a.jsonl", lines);
    prepared.options.chat.as_mut().unwrap().max_tokens = Some(30);
    let (manifest, notes) = prepared.run().unwrap();
    let chat = manifest.chat.unwrap();
    assert_eq!((chat.truncated, chat.dropped, manifest.train.documents), (1, 1, 2));
    assert_eq!(prepared.texts(&manifest.train)[0], "user:a\nassistant:B\n");
    assert!(notes[0].contains("at the end of 1 chats") && notes[1].contains("left out 1 chats"), "{notes:?}");
    prepared.options.chat.as_mut().unwrap().max_tokens = Some(3);
    prepared.options.overwrite = true;
    assert!(prepared.run().unwrap_err().to_string().contains("all 3 are longer than --max-tokens"));
    assert_eq!(prepared.texts(&manifest.train).len(), 2);
}

/// Models that were trained without chats do not know these ids as ends.
#[test]
fn special_ids_at_the_ends_of_answers_are_in_the_manifest() {
    let mut prepared = Prepared::new("a.jsonl", chat("a", "b"));
    let ends = |prepared: &Prepared| prepared.run().unwrap().0.chat.unwrap().ends;
    assert_eq!(ends(&prepared), [] as [u32; 0], "a line feed is not special");
    let template = prepared.dir.path().join("template");
    fs_err::write(&template, TEMPLATE.replace("\\n", "<|endoftext|>\\n")).unwrap();
    prepared.options.tokenizer = Tokenizer::gpt2();
    prepared.options.chat.as_mut().unwrap().templates = Templates::find("gpt2", Some(&template)).unwrap();
    prepared.options.overwrite = true;
    assert_eq!(ends(&prepared), [50256]);
}

#[test]
fn chats_and_text_replace_each_other() {
    let mut prepared = Prepared::new("a.jsonl", chat("a", "b"));
    prepared.run().unwrap();
    let error = prepared.run().unwrap_err().to_string();
    assert!(error.contains("--overwrite"), "{error}");
    prepared.options.overwrite = true;
    let chats = prepared.options.chat.take();
    prepared.options.field = Some("messages".into());
    fs_err::write(prepared.dir.path().join("a.jsonl"), "{\"messages\": \"text\"}\n").unwrap();
    assert_eq!(prepared.run().unwrap().0.version, 1);
    assert_eq!(prepared.files().len(), 3);
    prepared.options.chat = chats;
    fs_err::write(prepared.dir.path().join("a.jsonl"), chat("c", "d")).unwrap();
    assert_eq!(prepared.run().unwrap().0.version, 2);
    assert_eq!(prepared.files().len(), 6);
}

#[test]
fn damage_of_masks_and_starts_is_found() {
    let prepared = Prepared::new("a.jsonl", chat("a", "bc") + &chat("d", "e"));
    prepared.run().unwrap();
    let report = inspect(prepared.out()).unwrap();
    let train = &report.parts[0];
    let runs: Vec<(bool, &str)> =
        train.chats[1].iter().map(|run| (run.supervised, run.text.as_str())).collect();
    assert_eq!(runs, [(false, "user:d\nassistant:"), (true, "e\n")]);
    assert_eq!((train.documents, train.lengths.map(|lengths| lengths.max)), (Some(2), Some(20)));
    let damaged = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = prepared.out().join(name);
        let whole = fs_err::read(&path).unwrap();
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs_err::write(&path, &bytes).unwrap();
        let error = inspect(prepared.out()).unwrap_err().to_string();
        fs_err::write(&path, &whole).unwrap();
        error
    };
    let mask = |change: &dyn Fn(&mut Vec<u8>)| damaged("train_000001.mask", change);
    assert!(mask(&|bytes| bytes[0] ^= 2).contains("train_000001.mask: damaged: its contents do not match"));
    assert!(mask(&|bytes| *bytes.last_mut().unwrap() |= 0x80).contains("bits after the last id are set"));
    assert!(mask(&|bytes| bytes.truncate(1)).contains("its size differs"));
    let starts = |change: &dyn Fn(&mut Vec<u8>)| damaged("train_starts.bin", change);
    assert!(starts(&|bytes| bytes[0] = 1).contains("does not start at 0"));
    assert!(starts(&|bytes| bytes[8] = 0).contains("are not ascending"));
    assert!(starts(&|bytes| bytes[8] = 99).contains("after the last id"));
    assert!(starts(&|bytes| bytes[8] -= 1).contains("do not match the hash"));
    assert!(
        damaged("manifest.json", &|bytes| {
            *bytes = String::from_utf8(bytes.clone())
                .unwrap()
                .replace("\"supervised\": 5", "\"supervised\": 6")
                .into();
        })
        .contains("have 5 ids whose loss counts")
    );
    std::fs::remove_file(prepared.out().join("train_starts.bin")).unwrap();
    assert!(inspect(prepared.out()).unwrap_err().to_string().contains("train_starts.bin is missing"));
}

/// Writes a table whose column `messages` is a list of objects, as Hugging Face's `datasets` does.
fn parquet(rows: &[&[(&str, Option<&str>)]]) -> Vec<u8> {
    let schema = "message schema {
        optional int64 id;
        optional group messages (LIST) { repeated group list { optional group element {
            optional binary role (UTF8); optional binary content (UTF8);
        } } }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let ids: Vec<i64> = (0..).take(rows.len()).collect();
    column
        .typed::<parquet::data_type::Int64Type>()
        .write_batch(&ids, Some(&vec![1; ids.len()]), None)
        .unwrap();
    column.close().unwrap();
    for role in [true, false] {
        let (mut values, mut definitions, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            for (index, (name, content)) in row.iter().enumerate() {
                let value = if role { Some(*name) } else { *content };
                values.extend(value.map(ByteArray::from));
                definitions.push(if value.is_some() { 4 } else { 3 });
                repetitions.push(i16::from(index > 0));
            }
        }
        let mut column = group.next_column().unwrap().unwrap();
        let typed = column.typed::<ByteArrayType>();
        typed.write_batch(&values, Some(&definitions), Some(&repetitions)).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
    out
}

#[test]
fn rows_of_parquet_files_are_chats() {
    let (question, answer) = (("user", Some("a\"\n")), ("assistant", Some("b")));
    let mut prepared =
        Prepared::new("a.parquet", parquet(&[&[question, answer], &[question, answer, question, answer]]));
    let (manifest, _) = prepared.run().unwrap();
    let turn = "user:a\"\n\nassistant:B\n";
    assert_eq!(prepared.texts(&manifest.train), [turn.to_owned(), turn.repeat(2)]);
    // A column that the template reads.
    let template = prepared.dir.path().join("template");
    fs_err::write(&template, format!("{{{{ id }}}};{TEMPLATE}")).unwrap();
    let templates = Templates::find("bytes", Some(&template)).unwrap();
    prepared.options.chat = Some(ChatOptions { templates, max_tokens: None, preferences: false });
    prepared.options.overwrite = true;
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!(prepared.texts(&manifest.train), [format!("0;{turn}"), format!("1;{}", turn.repeat(2))]);
    let incomplete =
        Prepared::new("a.parquet", parquet(&[&[question, answer], &[question, ("assistant", None)]]));
    let error = incomplete.run().unwrap_err().to_string();
    assert!(error.contains("a.parquet: row 2: `messages[1]` has no `content`"), "{error}");
}

/// `datasets` writes fields whose type differs between rows as JSON.
#[test]
fn json_in_parquet_files_is_read_as_what_it_is() {
    let schema = "message schema {
        optional group messages (LIST) { repeated group list { optional binary element (JSON); } }
        optional group tools (LIST) { repeated group list { optional group element {
            optional binary name (UTF8); optional binary parameters (JSON); optional binary broken (JSON);
        } } }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let messages = [
        "{\"role\": \"user\",\n \"content\": \"a\"}",
        r#"{"role": "assistant", "content": [{"type": "text", "text": "b"}]}"#,
    ];
    let columns: [(&[&str], i16); 4] =
        [(&messages, 3), (&["f"], 4), (&[r#"{"z": 1, "a": [null]}"#], 4), (&["{"], 4)];
    for (values, depth) in columns {
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = values.iter().map(|value| ByteArray::from(*value)).collect();
        let repetitions: Vec<i16> = (0..values.len()).map(|index| i16::from(index > 0)).collect();
        let typed = column.typed::<ByteArrayType>();
        typed.write_batch(&values, Some(&vec![depth; values.len()]), Some(&repetitions)).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
    let mut prepared = Prepared::new("a.parquet", out);
    let template = prepared.dir.path().join("template");
    fs_err::write(&template, format!("{{{{ tools }}}}{TEMPLATE}")).unwrap();
    let templates = Templates::find("bytes", Some(&template)).unwrap();
    prepared.options.chat = Some(ChatOptions { templates, max_tokens: None, preferences: false });
    let (manifest, _) = prepared.run().unwrap();
    let tools = "[{'name': 'f', 'parameters': {'z': 1, 'a': [None]}, 'broken': '{'}]";
    assert_eq!(prepared.texts(&manifest.train), [format!("{tools}user:a\nassistant:B\n")]);
}

/// A file with one group of rows, which `write` writes.
fn parquet_file(
    schema: &str,
    write: impl FnOnce(&mut SerializedRowGroupWriter<'_, &mut Vec<u8>>),
) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    write(&mut group);
    group.close().unwrap();
    writer.close().unwrap();
    out
}

#[test]
fn images_beside_chats_in_parquet_files_are_refused() {
    let schema = "message schema { optional binary prompt (UTF8); optional binary completion (UTF8);
        optional binary image; }";
    let file = parquet_file(schema, |group| {
        for values in [&[&b"a"[..], b"c"][..], &[b" b", b" d"], &[b"\xff\xd8"]] {
            let mut column = group.next_column().unwrap().unwrap();
            let bytes: Vec<ByteArray> = values.iter().map(|value| value.to_vec().into()).collect();
            let definitions: Vec<i16> = (0..2).map(|row| i16::from(row + values.len() >= 2)).collect();
            column.typed::<ByteArrayType>().write_batch(&bytes, Some(&definitions), None).unwrap();
            column.close().unwrap();
        }
    });
    let mut prepared = Prepared::new("a.parquet", file);
    prepared.options.tokenizer = Tokenizer::gpt2();
    let error = prepared.run().unwrap_err().to_string();
    assert!(error.contains("a.parquet: row 2: `image` is not read"), "{error}");
    prepared.options.on_error = OnError::Skip;
    assert_eq!(prepared.run().unwrap().0.skipped, 1);
}

#[test]
fn weights_of_rows_in_parquet_files_are_refused() {
    let schema = "message schema { required binary text (UTF8); optional boolean train; }";
    let file = parquet_file(schema, |group| {
        let mut column = group.next_column().unwrap().unwrap();
        let texts = ["a", "b"].map(ByteArray::from);
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<BoolType>().write_batch(&[false], Some(&[0, 1]), None).unwrap();
        column.close().unwrap();
    });
    let mut prepared = Prepared::new("a.parquet", file);
    prepared.options.tokenizer = Tokenizer::gpt2();
    let error = prepared.run().unwrap_err().to_string();
    assert!(error.contains("a.parquet: row 2: `train` of the row is False"), "{error}");
}

#[test]
fn pairs_stay_together_and_older_programs_refuse_them() {
    let message = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
    let row = |n: usize| {
        let question = message("user", &format!("q{n}"));
        let answer = |text: &str| message("assistant", &format!("{text}{n}"));
        let (better, worse) = (answer("yes"), answer("no"));
        format!(r#"{{"prompt": [{question}], "chosen": [{better}], "rejected": [{worse}]}}"#) + "\n"
    };
    let mut prepared = Prepared::new("pairs.jsonl", (0..40).map(row).collect::<String>());
    prepared.options.val = 0.3;
    prepared.options.chat.as_mut().unwrap().preferences = true;
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!((manifest.version, manifest.train.documents + manifest.val.documents), (3, 80));
    assert!(manifest.val.documents > 0);
    for split in [&manifest.train, &manifest.val] {
        for pair in prepared.texts(split).chunks(2) {
            let number = pair[0].trim().rsplit_once("YES").unwrap().1;
            assert_eq!(
                pair,
                ["YES", "NO"].map(|answer| format!("user:q{number}\nassistant:{answer}{number}\n"))
            );
        }
    }
    let report = inspect(prepared.out()).unwrap();
    assert!(report.preferences && report.parts[0].documents == Some(manifest.train.documents));
    let shown = |chat: &Vec<Run>| chat.iter().map(|run| run.text.to_uppercase()).collect::<String>();
    let texts: Vec<String> = prepared.texts(&manifest.train).iter().map(|text| text.to_uppercase()).collect();
    assert_eq!(report.parts[0].chats.iter().map(shown).collect::<Vec<_>>(), texts[..2]);
    // Half of a pair is missing.
    let path = prepared.out().join(Manifest::FILE);
    let mut value = serde_json::to_value(&manifest).unwrap();
    value["train"]["documents"] = (manifest.train.documents - 1).into();
    let error = Manifest::parse(&path, value.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("an odd number of documents"), "{error}");
    value["version"] = 2.into();
    let error = Manifest::parse(&path, value.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("version 2 does not match"), "{error}");
}
