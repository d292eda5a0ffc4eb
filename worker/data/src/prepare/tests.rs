use std::collections::BTreeMap;
use std::io::Write;

use super::*;
use crate::manifest::has_replacement;
use crate::shard;

/// A directory with inputs, and the data prepared from them in `out`.
struct Prepared {
    dir: tempfile::TempDir,
    options: Options,
}

impl Prepared {
    fn new(tokenizer: Tokenizer) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            tokenizer,
            output: dir.path().join("out"),
            inputs: Vec::new(),
            documents: Documents::File,
            field: None,
            chat: None,
            on_error: OnError::Stop,
            val: 0.0,
            shard_tokens: 1 << 20,
            invalid: Invalid::Error,
            overwrite: false,
            threads: 2,
        };
        Self { dir, options }
    }

    fn with(mut self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        let path = self.dir.path().join(name);
        fs_err::write(&path, contents).unwrap();
        self.options.inputs.push(path.display().to_string());
        self
    }

    fn run(&self) -> Result<(Manifest, Vec<String>), PrepareError> {
        let mut notes = Vec::new();
        let manifest = prepare(&self.options, &mut |event| match event {
            Event::Note(note) => notes.push(note),
            Event::Progress(_) => {}
        })?;
        assert_eq!(Manifest::read(&self.options.output).unwrap(), manifest);
        Ok((manifest, notes))
    }

    fn error(&self) -> String {
        let error = self.run().unwrap_err().to_string();
        assert!(!self.options.output.join(Manifest::FILE).exists());
        error
    }

    fn ids(&self, split: &crate::Split) -> Vec<u32> {
        let mut ids = Vec::new();
        for shard in &split.shards {
            let bytes = fs_err::read(self.options.output.join(&shard.name)).unwrap();
            let layout = shard::layout(&bytes[..1024], bytes.len() as u64).unwrap().unwrap();
            assert_eq!((layout.tokens, bytes.len() as u64), (shard.tokens, shard.bytes));
            let id = |id: &[u8]| id.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
            ids.extend(bytes[1024..].chunks(layout.width).map(id));
        }
        ids
    }

    /// Returns the texts of the documents of a split that was prepared with GPT-2.
    fn texts(&self, split: &crate::Split) -> Vec<String> {
        let ids = self.ids(split);
        assert_eq!(ids.first(), Some(&50_256));
        ids[1..].split(|id| *id == 50_256).map(|ids| self.options.tokenizer.decode(ids)).collect()
    }

    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let read = |entry: std::fs::DirEntry| {
            (entry.file_name().into_string().unwrap(), fs_err::read(entry.path()).unwrap())
        };
        std::fs::read_dir(&self.options.output).unwrap().map(|entry| read(entry.unwrap())).collect()
    }
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    // As the command `zstd` does.
    encoder.include_checksum(true).unwrap();
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn documents_start_with_the_end_of_text_id() {
    let prepared = Prepared::new(Tokenizer::gpt2()).with("b", "hello world").with("a", "x<|endoftext|>y");
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!((manifest.train.documents, manifest.train.bytes), (2, 26));
    assert_eq!(prepared.texts(&manifest.train), ["hello world", "x<|endoftext|>y"]);
    let bytes = fs_err::read(prepared.options.output.join("train_000001.bin")).unwrap();
    assert_eq!(bytes[..12], [20_240_520_i32, 1, 13].map(i32::to_le_bytes).concat());
    let tokenizer = Tokenizer::from_file(&prepared.options.output.join(crate::TOKENIZER_FILE)).unwrap();
    assert_eq!((tokenizer.name(), manifest.tokenizer.as_str()), ("gpt2", "gpt2"));
}

#[test]
fn forms_of_input_give_the_same_documents() {
    let texts = ["one two", "three\tfour \u{e9}\u{1f980}", "5"];
    let lines = texts.join("\r\n") + "\n\n";
    let json: String = texts
        .iter()
        .map(|text| format!("{}\n\n", serde_json::json!({"id": {"text": [1]}, "body": text, "z": null})))
        .collect();
    let prepared = |name: &str, contents: &[u8], documents: Documents, field: Option<&str>| {
        let mut prepared = Prepared::new(Tokenizer::gpt2()).with(name, contents);
        prepared.options.documents = documents;
        prepared.options.field = field.map(Into::into);
        let (manifest, _) = prepared.run().unwrap();
        prepared.texts(&manifest.train)
    };
    assert_eq!(prepared("a.txt", lines.as_bytes(), Documents::Line, None), texts);
    let separated = texts.join("\n--\n");
    let separator = Documents::Separator("\n--\n".into());
    assert_eq!(prepared("a.txt", separated.as_bytes(), separator.clone(), None), texts);
    assert_eq!(prepared("a.jsonl", json.as_bytes(), Documents::File, Some("body")), texts);
    assert_eq!(prepared("a.gz", &gzip(json.as_bytes()), Documents::File, Some("body")), texts);
    let named = json.replace("body", "text").replace("\"id\"", "\"i\"");
    assert_eq!(prepared("a.jsonl.zst", &zstd(named.as_bytes()), Documents::File, None), texts);
    // Consecutive members and frames.
    let parts = |compress: fn(&[u8]) -> Vec<u8>| {
        let (first, second) = separated.as_bytes().split_at(9);
        [compress(first), compress(second)].concat()
    };
    assert_eq!(prepared("a", &parts(gzip), separator.clone(), None), texts);
    let padded = parts(|text| [gzip(text), vec![0; 700_000]].concat());
    assert_eq!(prepared("a", &padded, separator.clone(), None), texts);
    let garbage = Prepared::new(Tokenizer::gpt2()).with("a", [&padded[..], b"x"].concat()).error();
    assert!(garbage.contains("damaged or truncated gzip data"), "{garbage}");
    assert_eq!(prepared("a", &parts(zstd), separator.clone(), None), texts);
    // As `zstd --long=31` writes it: this byte of a frame has the logarithm of the window's size, less 10.
    let mut long = zstd(separated.as_bytes());
    long[5] = (31 - 10) << 3;
    assert_eq!(prepared("a", &long, separator.clone(), None), texts);
    // As pzstd writes it.
    let skipped = [b"\x50\x2a\x4d\x18\x04\0\0\0\x11\0\0\0", &parts(zstd)[..]].concat();
    assert_eq!(prepared("a", &skipped, separator, None), texts);
}

/// Text with short and long documents; one of them cannot be cut anywhere for megabytes.
fn mixed() -> String {
    let words: String = (0..300_000).map(|n| format!("w{n}, it's\n")).collect();
    format!("short\u{0}{words}\u{0}\u{0}{}{}end\u{0}last", "x".repeat(700_000), " ".repeat(1_500_000))
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    let mut first = None;
    for threads in [1, 2, 7] {
        let mut prepared =
            Prepared::new(Tokenizer::gpt2()).with("a", mixed()).with("b.gz", gzip(mixed().as_bytes()));
        prepared.options.documents = Documents::Separator("\u{0}".into());
        prepared.options.shard_tokens = 100_003;
        prepared.options.threads = threads;
        prepared.run().unwrap();
        let files = prepared.files();
        assert!(files.len() > 10);
        assert_eq!(first.get_or_insert_with(|| files.clone()), &files, "{threads} threads");
    }
}

#[test]
fn long_documents_have_the_ids_of_the_whole() {
    for tokenizer in [Tokenizer::gpt2(), Tokenizer::bytes()] {
        let mut prepared = Prepared::new(tokenizer.clone()).with("a", mixed());
        prepared.options.documents = Documents::Separator("\u{0}".into());
        let (manifest, _) = prepared.run().unwrap();
        let expected: Vec<u32> = mixed()
            .split('\u{0}')
            .filter(|text| !text.is_empty())
            .flat_map(|text| tokenizer.end_of_text().into_iter().chain(tokenizer.encode(text).unwrap()))
            .collect();
        assert!(prepared.ids(&manifest.train) == expected, "{}", tokenizer.name());
        assert_eq!(manifest.train.documents, 4);
        assert_eq!(manifest.train.bytes, mixed().len() as u64 - 4);
    }
}

#[test]
fn copies_of_a_document_are_on_one_side() {
    let lines: String = (0..2000).map(|n| format!("document {n}\n")).collect();
    let mut prepared = Prepared::new(Tokenizer::gpt2()).with("a", &lines).with("b", &lines);
    prepared.options.documents = Documents::Line;
    prepared.options.val = 0.1;
    let (manifest, _) = prepared.run().unwrap();
    assert!((300..500).contains(&manifest.val.documents), "{}", manifest.val.documents);
    assert_eq!(manifest.train.documents + manifest.val.documents, 4000);
    let mut counts = BTreeMap::new();
    for text in prepared.texts(&manifest.val) {
        *counts.entry(text).or_insert(0) += 1;
    }
    assert!(counts.values().all(|count| *count == 2));
}

#[test]
fn wrong_text_is_refused_with_its_place() {
    let prepared = |name: &str, contents: &[u8]| Prepared::new(Tokenizer::gpt2()).with(name, contents);
    let long = [&b"word ".repeat(200_000), b"\xe9!".as_slice()].concat();
    let error = prepared("a.txt", &long).error();
    assert!(error.contains("a.txt: not valid UTF-8 at byte 1000000"), "{error}");
    let mut replaced = prepared("a.txt", b"caf\xe9!");
    replaced.options.invalid = Invalid::Replace;
    let (manifest, _) = replaced.run().unwrap();
    assert_eq!(replaced.texts(&manifest.train), ["caf\u{fffd}!"]);
    // The byte tokenizer's texts are cut into blocks of about 512 KiB, between characters.
    let block = |end: &[u8]| {
        let text = [&vec![b'a'; (512 << 10) - 1], end].concat();
        Prepared::new(Tokenizer::bytes()).with("a.txt", text)
    };
    for character in ["\u{e9}", "\u{4e16}", "\u{1f600}"] {
        let whole = block(character.as_bytes());
        let (manifest, _) = whole.run().unwrap();
        let ids = whole.ids(&manifest.train);
        assert!(ids.ends_with(&character.bytes().map(u32::from).collect::<Vec<_>>()), "{character}");
        let error = block(&character.as_bytes()[..character.len() - 1]).error();
        assert!(error.contains("a.txt: not valid UTF-8 at byte 524287"), "{error}");
    }
    let line =
        |line: &str| prepared("a.jsonl", format!("{{\"text\": \"a\"}}\n\n{line}\n").as_bytes()).error();
    for (text, expected) in [
        ("{\"text\": \"a\"", "a.jsonl:3: not valid JSONL: EOF"),
        ("{\"text\": 5}", "a.jsonl:3: not valid JSONL: invalid type: integer `5`, expected a string"),
        ("[1]", "a.jsonl:3: not valid JSONL: invalid type: sequence, expected an object"),
        (" [{\"text\": \"a\"},", "\nhelp: if the whole file is a JSON array, name it `.json`"),
        ("{\"a\": 1}", "a.jsonl:3: the object has no field `text`"),
        ("{\"text\": \"a\"} {}", "a.jsonl:3: not valid JSONL: trailing characters"),
        (
            "{\"text\": \"a\\ud800b\"}",
            "a.jsonl:3: not valid JSONL: an escape is half of a surrogate pair\nhelp: see",
        ),
        ("{\"text\": \"a\tb\"}", "a.jsonl:3: not valid JSONL: control character"),
        ("{\"text\": \"a\", \"score\": NaN}", "at column 24\nhelp: NaN and Infinity are not JSON"),
        ("{\"text\": \"a\", \"score\": -Infinity}", "\nhelp: NaN and Infinity are not JSON"),
        ("{\"text\": \"a\", \"text\": \"b\"}", "is there twice"),
        (&"[".repeat(100_000), "expected an object"),
        (&format!("{{\"a\": {}", "[".repeat(100_000)), "EOF while parsing"),
    ] {
        let error = line(text);
        assert!(error.contains(expected), "{error}");
    }
    let error = prepared("a.csv", b"text,id\na,1\nb, c,2\n").error();
    assert!(error.contains("a.csv: row 2: the row has more fields than the header"), "{error}");
    for (end, expected) in [
        (r#"{"text": 5}]"#, "invalid type: integer `5`, expected a string at byte 9 of the element"),
        ("]", "missing element next to a comma"),
        (r#", "c"]"#, "missing element next to a comma"),
    ] {
        let mut pretty =
            prepared("a.json", format!("[\n  {{\n    \"text\": \"a\"\n  }},\n\n  {end}\n").as_bytes());
        let error = pretty.error();
        assert!(error.contains(&format!("a.json: element 2: not valid JSON: {expected}")), "{error}");
        pretty.options.on_error = OnError::Skip;
        assert_eq!(pretty.run().unwrap().0.skipped, 1);
    }
    // Bytes count from 0 in the field as in the line of other inputs, whatever its quotes and escapes.
    let error = prepared("a.csv", b"text\n\"a\"\"\n\xff\"\n").error();
    assert!(error.contains("a.csv: row 1: not valid UTF-8 at byte 3 of the field"), "{error}");
    let error = prepared("a.jsonl", b"\"a\xff\"").error();
    assert!(error.contains("a.jsonl:1: not valid UTF-8 at byte 2 of the line"), "{error}");
    // The first error in the order of the input is reported, regardless of which thread finds one first.
    let many: String =
        (0..200_000).map(|n| if n < 100_000 { "{\"text\": \"a\"}\n" } else { "x\n" }).collect();
    let error = prepared("a.jsonl", many.as_bytes()).error();
    assert!(error.contains("a.jsonl:100001: "), "{error}");
    let huge = [b"{\"text\": \"".as_slice(), &b"a".repeat(65 << 20)].concat();
    let mut huge = prepared("a.jsonl", &[&huge, b"\"}\n\"b\"\n".as_slice()].concat());
    assert!(huge.error().contains("a.jsonl:1: longer than 64 MiB"), "{}", huge.error());
    huge.options.on_error = OnError::Skip;
    let (manifest, notes) = huge.run().unwrap();
    assert_eq!((huge.texts(&manifest.train), manifest.skipped), (vec!["b".into()], 1));
    assert!(notes[1].contains("a.jsonl:1: longer than 64 MiB"), "{notes:?}");
}

#[test]
fn damaged_compression_is_refused() {
    let text: String = (0..100_000).map(|n| format!("{n} ")).collect();
    for (name, whole) in [("gzip", gzip(text.as_bytes())), ("zstd", zstd(text.as_bytes()))] {
        let cut = Prepared::new(Tokenizer::gpt2()).with("a", &whole[..whole.len() - 20]).error();
        assert!(cut.contains("damaged or truncated") && cut.contains(name), "{cut}");
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 0x55;
        let flipped = Prepared::new(Tokenizer::gpt2()).with("a", &flipped);
        assert!(matches!(flipped.run(), Err(PrepareError::Data(_))), "{name}");
        assert!(!flipped.options.output.exists(), "what was made is removed");
    }
}

#[test]
fn inputs_without_text_are_noted() {
    let (_, notes) = Prepared::new(Tokenizer::gpt2()).with("a", "").with("b", "b").run().unwrap();
    assert!(notes[0].contains("a is empty: skipped"), "{notes:?}");
    assert!(Prepared::new(Tokenizer::gpt2()).with("a", "").error().contains("no documents"));
    let mut held_out = Prepared::new(Tokenizer::gpt2()).with("a", "a");
    held_out.options.val = 0.999_999;
    assert!(held_out.error().contains("no document is left to train on"));
    held_out.options.val = 0.000_001;
    let (_, notes) = held_out.run().unwrap();
    assert!(notes[0].contains("no document was held out"), "{notes:?}");
}

#[test]
fn separator_that_does_not_occur_is_noted() {
    let notes = |separator: &str, text: &str| {
        let mut prepared = Prepared::new(Tokenizer::gpt2()).with("a.txt", "a").with("b.txt", text);
        prepared.options.documents = Documents::Separator(separator.into());
        prepared.run().unwrap().1
    };
    let windows = "b\r\n\r\nc\r\n";
    assert_eq!(notes("\r\n\r\n", windows), [] as [String; 0]);
    let missing = "the separator `\\n\\n` does not occur: each text is one document";
    let help = "; for lines that end as on Windows, use --documents '\\r\\n\\r\\n'";
    assert_eq!(notes("\n\n", windows), [format!("{missing}{help}")]);
    assert_eq!(notes("\n\n", "b\nc\n"), [missing]);
}

#[test]
fn json_without_a_name_is_read_as_text_with_a_note() {
    let mut prepared = Prepared::new(Tokenizer::gpt2()).with("63", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
    let (manifest, notes) = prepared.run().unwrap();
    assert_eq!(manifest.train.documents, 1);
    assert!(notes[0].contains("63 looks like JSON") && notes[0].contains("--field"), "{notes:?}");
    prepared.options.field = Some("text".into());
    prepared.options.overwrite = true;
    let (manifest, notes) = prepared.run().unwrap();
    assert_eq!((prepared.texts(&manifest.train), notes), (vec!["a".into(), "b".into()], Vec::new()));
}

#[test]
fn only_prepared_directories_are_replaced() {
    let mut prepared = Prepared::new(Tokenizer::bytes()).with("a", "first");
    let out = prepared.options.output.clone();
    prepared.run().unwrap();
    assert!(prepared.run().unwrap_err().to_string().contains("--overwrite"));
    prepared.options.overwrite = true;
    prepared.options.inputs = vec!["/nonexistent".into()];
    prepared.run().unwrap_err();
    assert!(Manifest::read(&out).is_ok(), "a mistyped input costs nothing");
    prepared = prepared.with("b", "second");
    prepared.options.inputs.remove(0);
    prepared = prepared.with("c", b"\xff");
    let before = prepared.files();
    assert!(prepared.run().unwrap_err().to_string().contains("UTF-8"));
    assert!(prepared.files() == before, "a preparation that fails costs nothing");
    prepared.options.inputs.pop();
    // Simulates a process killed during a replacement.
    fs_err::create_dir(out.join(".prepare.new")).unwrap();
    fs_err::write(out.join(".prepare.new/train_000001.bin"), "left").unwrap();
    fs_err::write(out.join(".prepare.lock"), "").unwrap();
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!(prepared.ids(&manifest.train), b"second".map(u32::from));
    assert!(prepared.files().into_keys().eq(["manifest.json", "tokenizer.json", "train_000001.bin"]));
    // A user's file is not removed, and no data is written next to it.
    fs_err::write(out.join("notes.txt"), "mine").unwrap();
    assert!(prepared.run().unwrap_err().to_string().contains("`notes.txt`"));
    fs_err::remove_file(out.join("notes.txt")).unwrap();
    fs_err::write(out.join("train_000002.bin"), "mine").unwrap();
    assert!(prepared.run().unwrap_err().to_string().contains("does not name `train_000002.bin`"));
    fs_err::remove_file(out.join(Manifest::FILE)).unwrap();
    assert!(prepared.run().unwrap_err().to_string().contains("no manifest"));
    assert_eq!(fs_err::read(out.join("train_000002.bin")).unwrap(), b"mine");
}

#[test]
fn interrupted_replacement_is_finished_by_the_next_preparation() {
    for done in 0.. {
        // Old data has more shards than the new.
        let mut prepared = Prepared::new(Tokenizer::bytes()).with("a", "old text").with("b", "new");
        let out = prepared.options.output.clone();
        prepared.options.shard_tokens = 2;
        let inputs = [prepared.options.inputs.remove(0), prepared.options.inputs.remove(0)];
        prepared.options.inputs = vec![inputs[0].clone()];
        prepared.run().unwrap();
        // Chats have more files.
        fs_err::write(out.join("chat_template.jinja"), "old").unwrap();
        prepared.options.inputs = vec![inputs[1].clone()];
        prepared.options.output = prepared.dir.path().join("new");
        prepared.run().unwrap();
        let new = prepared.files();
        fs_err::rename(&prepared.options.output, out.join(".prepare.new")).unwrap();
        fs_err::write(out.join(".prepare.lock"), "").unwrap();
        prepared.options.output.clone_from(&out);
        let steps = output::replacement_steps(&out).unwrap();
        if done > steps.len() {
            assert!(done > 15, "{steps:?}");
            break;
        }
        steps[..done].iter().for_each(|step| step.apply(&out).unwrap());
        if let Err(error) = Manifest::read(&out) {
            let error = error.to_string();
            assert!(error.contains("was interrupted while it replaced the data; run `xlaunch"), "{error}");
            assert!(error.ends_with("without `--overwrite` to finish that"), "{error}");
        }
        if has_replacement(&out) {
            // A mistake in the options does not matter.
            prepared.options.inputs = vec!["/nonexistent".into()];
            let (manifest, notes) = prepared.run().unwrap();
            assert!(
                notes[0].contains("finished replacing") && notes[0].contains("no input was read"),
                "{notes:?}"
            );
            assert_eq!(manifest, Manifest::read(&out).unwrap());
            assert!(prepared.files() == new, "stopped after {:?}", &steps[..done]);
        }
        prepared.options.inputs = vec![inputs[1].clone()];
        assert!(prepared.run().unwrap_err().to_string().contains("replace it with --overwrite"));
        for (name, contents) in &new {
            let found = fs_err::read(out.join(name)).unwrap();
            assert!(found == *contents, "{name}, stopped after {:?}", &steps[..done]);
        }
        prepared.options.overwrite = true;
        prepared.run().unwrap();
        assert!(prepared.files() == new);
    }
}

#[test]
fn replacement_that_fails_is_finished_by_the_next_preparation() {
    let mut prepared = Prepared::new(Tokenizer::bytes()).with("a", "old");
    let out = prepared.options.output.clone();
    prepared.run().unwrap();
    let before = prepared.files();
    prepared = prepared.with("b", "new text");
    prepared.options.shard_tokens = 4;
    prepared.options.overwrite = true;
    // A directory in the place of a new file.
    let obstacle = out.join("train_000002.bin");
    let error = prepare(&prepared.options, &mut |_| {
        let _ = fs_err::create_dir(&obstacle);
    });
    assert!(error.unwrap_err().to_string().contains("failed to write"));
    assert!(prepared.run().unwrap_err().to_string().contains("failed to write"));
    fs_err::remove_dir(&obstacle).unwrap();
    prepared.options.overwrite = false;
    prepared.run().unwrap();
    let error = prepared.run().unwrap_err().to_string();
    assert!(error.contains("replace it with --overwrite"), "{error}");
    let manifest = Manifest::read(&out).unwrap();
    assert_eq!(prepared.ids(&manifest.train), b"oldnew text".map(u32::from));
    assert!(prepared.files() != before);
}

#[test]
fn leftovers_of_an_interrupted_preparation_are_replaced() {
    let prepared = Prepared::new(Tokenizer::bytes()).with("a", "text");
    let out = &prepared.options.output;
    fs_err::create_dir(out).unwrap();
    for name in
        [".prepare.lock", "train_000001.bin", "val_000007.bin", "tokenizer.json", ".manifest.json.tmp"]
    {
        fs_err::write(out.join(name), "left").unwrap();
    }
    prepared.run().unwrap();
    let names: Vec<String> = prepared.files().into_keys().collect();
    assert_eq!(names, ["manifest.json", "tokenizer.json", "train_000001.bin"]);
    // A directory to which another process is writing is not touched.
    let other = Prepared::new(Tokenizer::bytes()).with("a", "text");
    let claim = output::Output::claim(&other.options.output, false).unwrap();
    assert!(other.run().unwrap_err().to_string().contains("another `xlaunch data prepare`"));
    claim.abandon();
    other.run().unwrap();
}

#[test]
fn output_may_be_a_symbolic_link() {
    let mut prepared = Prepared::new(Tokenizer::bytes()).with("a", "text");
    let (target, link) = (prepared.dir.path().join("target"), prepared.dir.path().join("link"));
    fs_err::create_dir(&target).unwrap();
    fs_err::os::unix::fs::symlink(&target, &link).unwrap();
    prepared.options.output = link;
    prepared.run().unwrap();
    assert!(Manifest::read(&target).is_ok());
    let dangling = prepared.dir.path().join("dangling");
    fs_err::os::unix::fs::symlink("/nonexistent/x", &dangling).unwrap();
    prepared.options.output = dangling;
    prepared.run().unwrap_err();
    prepared.options.output = prepared.dir.path().join("a");
    assert!(prepared.run().unwrap_err().to_string().contains("failed to write"));
}

/// Builds a Parquet file with a column of optional strings.
fn parquet(column: &str, rows: &[Option<&str>]) -> Vec<u8> {
    parquet_of("UTF8", column, rows)
}

fn parquet_of(kind: &str, column: &str, rows: &[Option<&str>]) -> Vec<u8> {
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    let schema = format!(
        "message schema {{ optional binary {column} ({kind}); optional int64 id; optional int32 empty (UNKNOWN); }}"
    );
    let schema = std::sync::Arc::new(parse_message_type(&schema).unwrap());
    let mut bytes = Vec::new();
    let mut file = SerializedFileWriter::new(&mut bytes, schema, std::sync::Arc::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    let present: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
    let texts: Vec<ByteArray> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
    let mut writer = group.next_column().unwrap().unwrap();
    writer.typed::<ByteArrayType>().write_batch(&texts, Some(&present), None).unwrap();
    writer.close().unwrap();
    let mut writer = group.next_column().unwrap().unwrap();
    let ids: Vec<i64> = (0..).take(rows.len()).collect();
    let all = vec![1; rows.len()];
    writer.typed::<parquet::data_type::Int64Type>().write_batch(&ids, Some(&all), None).unwrap();
    writer.close().unwrap();
    let mut writer = group.next_column().unwrap().unwrap();
    let none = vec![0; rows.len()];
    writer.typed::<parquet::data_type::Int32Type>().write_batch(&[], Some(&none), None).unwrap();
    writer.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
    bytes
}

#[test]
fn tables_have_a_document_per_row() {
    let array = r#"[{"text": "one"}, {"text": null}, "two\n"]"#;
    let prepared = Prepared::new(Tokenizer::gpt2())
        .with("a.json", array)
        .with("a2.json", r#"{"text": "2a"} {"text": "2b"}{"text": "2c"}"2d""#)
        .with("b.csv", "id,text\n1,\"three, 3\"\n2,\n3,four\n")
        .with("c.tsv.gz", gzip(b"text\tid\nfive\t1\n"))
        .with("d.bin", parquet("text", &[Some("six"), None, Some("seven")]));
    let (manifest, _) = prepared.run().unwrap();
    let texts = ["one", "two\n", "2a", "2b", "2c", "2d", "three, 3", "four", "five", "six", "seven"];
    assert_eq!((prepared.texts(&manifest.train), manifest.skipped), (texts.map(String::from).to_vec(), 0));
    let mut piped = Prepared::new(Tokenizer::gpt2());
    let pipe = piped.dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    piped.options.inputs.push(pipe.display().to_string());
    let rows = parquet("text", &[Some("one")]);
    let writer = std::thread::spawn(move || fs_err::write(pipe, rows).unwrap());
    assert!(piped.error().contains("pipe: a Parquet file cannot be read from a pipe"));
    writer.join().unwrap();
    let mut prepared = Prepared::new(Tokenizer::gpt2()).with("a.parquet", parquet("body", &[Some("one")]));
    let error = prepared.error();
    assert!(error.contains("no column `text`, only `body`, `id`") && error.contains("--column"), "{error}");
    assert!(!error.contains("damaged"), "{error}");
    prepared.options.field = Some("id".into());
    assert!(prepared.error().contains("not one of strings"));
    // A shard in which no row has a text.
    prepared.options.field = Some("empty".into());
    assert!(prepared.error().contains("the inputs contain no documents"));
    let compressed = gzip(&parquet("text", &[Some("one")]));
    let error = Prepared::new(Tokenizer::gpt2()).with("a.parquet.gz", compressed).error();
    assert!(error.contains("a Parquet file compressed with gzip cannot be read"), "{error}");
    assert!(error.contains("decompress it first") && !error.contains("damaged"), "{error}");
    let short = Prepared::new(Tokenizer::gpt2()).with("a.csv", "id,text\n1,one\n2\n").error();
    assert!(short.contains("a.csv: row 2: the object has no field `text`"), "{short}");
    // An unclosed quote would make one document of all rows after it.
    let open = Prepared::new(Tokenizer::gpt2()).with("a.csv", "text\none\n\"two\nthree\n");
    let error = open.error();
    assert!(
        error.contains("a.csv: damaged or truncated CSV data: a quote in the row that begins in line 3"),
        "{error}"
    );
    prepared.options.field = Some("body".into());
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!(prepared.texts(&manifest.train), ["one"]);
    // `datasets` writes a column whose type differs between rows as JSON.
    let rows = [Some("\"a \\\"b\\\"\""), None, Some("null")];
    let json = Prepared::new(Tokenizer::gpt2()).with("a.parquet", parquet_of("JSON", "text", &rows));
    assert_eq!(json.texts(&json.run().unwrap().0.train), ["a \"b\""]);
    let mixed = parquet_of("JSON", "text", &[Some("\"a\""), Some("1")]);
    let error = Prepared::new(Tokenizer::gpt2()).with("a.parquet", mixed).error();
    assert!(error.contains("a.parquet: row 2: "), "{error}");
    let whole = parquet("text", &[Some("some text"); 50]);
    for end in [5, 40, whole.len() - 9] {
        let error = Prepared::new(Tokenizer::gpt2()).with("a.parquet", &whole[..end]).error();
        assert!(error.contains("damaged or truncated Parquet data"), "{error}");
    }
}

#[test]
fn files_that_are_not_text_are_refused_by_what_they_are() {
    let error = Prepared::new(Tokenizer::bytes()).with("a.txt", b"PK\x03\x04rest").error();
    assert!(error.contains("a.txt: expected text, found a zip archive"), "{error}");
    let error = Prepared::new(Tokenizer::bytes()).with("a.txt", b"\xff\xfea\0").error();
    assert!(error.contains("UTF-16"), "{error}");
    assert!(!error.contains("glob"), "the file itself is an argument: {error}");
    let mut searched = Prepared::new(Tokenizer::bytes()).with("cat.png", b"\x89PNG");
    let dir = searched.dir.path().display().to_string();
    searched.options.inputs = vec![dir.clone()];
    let error = searched.error();
    assert!(
        error
            .contains(&format!("found an image; name the files to read by a glob, such as '{dir}/**/*.txt'")),
        "{error}"
    );
}

#[test]
fn broken_lines_are_skipped_and_named_if_asked_for() {
    let lines = "{\"text\": \"a\"}\n{\"text\": 3}\n{\"body\": \"b\"}\n{broken\n{\"text\": \"c\"}\n";
    let mut prepared = Prepared::new(Tokenizer::gpt2()).with("a.jsonl", lines);
    assert!(prepared.error().contains("a.jsonl:2: "));
    prepared.options.on_error = OnError::Skip;
    let (manifest, notes) = prepared.run().unwrap();
    assert_eq!((prepared.texts(&manifest.train), manifest.skipped), (vec!["a".into(), "c".into()], 3));
    let said = notes.join("\n");
    assert!(said.contains("skipped 3 rows that cannot be used:"), "{said}");
    for line in ["a.jsonl:2: ", "a.jsonl:3: the object has no field `text`", "a.jsonl:4: "] {
        assert!(said.contains(line), "{line} in {said}");
    }
}

#[test]
fn half_surrogate_pairs_marks_and_null_are_read() {
    let lines = "\u{feff}{\"text\": \"a\\ud83dz\\\\ud83d\\udd80\"}\n{\"text\": null}\n{\"text\": \"\\ud83e\\udd80\"}\n";
    let mut prepared = Prepared::new(Tokenizer::gpt2()).with("a.jsonl", lines);
    assert!(prepared.error().contains("a.jsonl:1: not valid JSONL"));
    prepared.options.invalid = Invalid::Replace;
    let (manifest, _) = prepared.run().unwrap();
    assert_eq!(prepared.texts(&manifest.train), ["a\u{fffd}z\\ud83d\u{fffd}", "\u{1f980}"]);
    let marked = Prepared::new(Tokenizer::gpt2()).with("b.txt", "\u{feff}text");
    let (manifest, _) = marked.run().unwrap();
    assert_eq!(marked.texts(&manifest.train), ["text"]);
}

#[test]
fn glued_documents_are_noted() {
    let mut prepared = Prepared::new(Tokenizer::bytes()).with("a.txt", "a\nb\n");
    prepared.options.documents = Documents::Line;
    let (_, notes) = prepared.run().unwrap();
    assert!(notes[0].contains("2 documents follow each other without a token"), "{notes:?}");
}
