use super::*;

#[test]
fn gpt2_ids_are_those_of_the_reference() {
    let gpt2 = Tokenizer::gpt2();
    assert_eq!((gpt2.name(), gpt2.vocab(), gpt2.end_of_text()), ("gpt2", 50_257, Some(50_256)));
    // From tiktoken, https://github.com/openai/tiktoken.
    assert_eq!(gpt2.encode("hello world"), [31373, 995]);
    assert_eq!(gpt2.encode("<|endoftext|>"), [27, 91, 437, 1659, 5239, 91, 29]);
    assert_eq!(gpt2.decode(&[15496, 11, 995, 50256]), "Hello, world<|endoftext|>");
    assert_eq!((gpt2.bytes_of(995), gpt2.bytes_of(50_256)), (Some(b" world".as_slice()), None));
    assert_eq!(gpt2.bytes_of(50_257), None);
}

#[test]
fn bytes_are_ids() {
    let bytes = Tokenizer::bytes();
    assert_eq!((bytes.name(), bytes.vocab(), bytes.end_of_text()), ("bytes", 256, None));
    assert_eq!(bytes.encode("a\u{e9}"), [97, 0xc3, 0xa9]);
    assert_eq!(bytes.decode(&[97, 0xc3, 0xa9, 0xff]), "a\u{e9}\u{fffd}");
    assert_eq!(bytes.bytes_of(0xc3), Some([0xc3].as_slice()));
}

#[test]
fn tokenizers_come_back_from_their_files() {
    for tokenizer in [Tokenizer::bytes(), Tokenizer::gpt2()] {
        let json = tokenizer.to_json();
        assert_eq!(Tokenizer::from_json(json.as_bytes()).unwrap().name(), tokenizer.name());
        // Formatted by another program, it is a file like any other.
        let other = Tokenizer::from_json(json.replacen('{', "{ ", 1).as_bytes()).unwrap();
        assert_eq!((other.name(), other.vocab()), ("tokenizer.json", tokenizer.vocab()));
        assert_eq!(other.end_of_text(), tokenizer.end_of_text());
        let text = "It's 12345 \u{e9}\u{4e16}\u{754c}\u{1f980}\t\n\n  x<|endoftext|>";
        assert_eq!(other.encode(text), tokenizer.encode(text), "{}", tokenizer.name());
        assert_eq!(other.decode(&other.encode(text)), text);
    }
}

#[test]
fn long_texts_have_the_ids_of_the_whole() {
    let gpt2 = Tokenizer::gpt2();
    let words: String = (0..40_000).map(|n| format!("{n} it's  \u{4e16},\n")).collect();
    let whole = |text: &str| {
        let mut ids = Vec::new();
        encode(&gpt2.inner.bpe.as_ref().unwrap().start, text, &mut ids);
        ids
    };
    assert!(words.len() > 4 * PIECE);
    assert_eq!(gpt2.encode(&words), whole(&words));
    let spaces = format!("a{}x y", " ".repeat(4 << 20));
    assert_eq!(gpt2.encode(&spaces), whole(&spaces));
    let unbroken = "ab".repeat(LONGEST_PIECE);
    assert_eq!(gpt2.decode(&gpt2.encode(&unbroken)), unbroken);
}

#[test]
fn prefix_is_written_before_the_text_alone() {
    let normalizer = r#"{"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}"#;
    let model = r#"{"type": "BPE", "vocab": {"a": 0, "\u2581": 1, "\u2581a": 2}, "merges": ["\u2581 a"]}"#;
    let json = format!(r#"{{"normalizer": {normalizer}, "model": {model}}}"#);
    let tokenizer = Tokenizer::from_json(json.as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("a a"), [2, 2]);
    let long = "a ".repeat(PIECE);
    assert_eq!(tokenizer.encode(&long), [&[2].repeat(PIECE)[..], &[1]].concat());
}

#[test]
fn decoder_returns_whole_characters() {
    let text = "a\u{e9}\u{4e16}\u{1f980}!";
    for tokenizer in [Tokenizer::bytes(), Tokenizer::gpt2()] {
        let mut decoder = tokenizer.decoder();
        let parts: Vec<String> = tokenizer.encode(text).into_iter().map(|id| decoder.push(id)).collect();
        assert_eq!(parts.concat() + &decoder.finish(), text);
    }
    let mut decoder = Tokenizer::bytes().decoder();
    assert_eq!([0xf0, 0x9f, b'a'.into(), 0xff].map(|id| decoder.push(id)), ["", "", "\u{fffd}a", "\u{fffd}"]);
    assert_eq!(decoder.push(0xf0), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
}

#[test]
fn hostile_files_are_refused() {
    let refusal = |json: &str| Tokenizer::from_json(json.as_bytes()).unwrap_err().to_string();
    let model = |vocab: &str, merges: &str| {
        refusal(&format!(r#"{{"model": {{"type": "BPE", "vocab": {vocab}, "merges": {merges}}}}}"#))
    };
    assert!(refusal("").contains("not valid JSON"));
    assert!(refusal(&"[".repeat(100_000)).contains("recursion limit"));
    assert!(refusal(&format!("[{}1]", "1,".repeat(MAX_FILE_BYTES as usize / 4))).contains("values"));
    assert!(refusal("[]").contains("not a JSON object"));
    assert!(refusal("{}").contains("no `model`"));
    assert!(refusal(r#"{"model": {"type": "Unigram"}}"#).contains("`Unigram` is not supported"));
    assert!(model("{}", "[]").contains("0 tokens"));
    assert!(model(r#"{"a": 4294967295}"#, "[]").contains("no gaps"));
    assert!(model(r#"{"a": 0, "b": 2}"#, "[]").contains("no gaps"));
    assert!(model(r#"{"a": 0, "b": 0}"#, "[]").contains("the same id"));
    assert!(model(r#"{"a": 0, "b": -1}"#, "[]").contains("no gaps"));
    assert!(model(r#"{"a": 0, "b": 1}"#, r#"["a b"]"#).contains("names `ab`"));
    assert!(model(r#"{"a": 0, "ab": 1}"#, r#"[["a", "b"]]"#).contains("names `b`"));
    assert!(model(r#"{"a": 0}"#, r#"[["a"]]"#).contains("merge 0 is not a pair"));
    assert!(model(r#"{"a": 0}"#, "3").contains("no `model.merges`"));
    let added = |id: &str, content: &str| {
        let model = r#"{"vocab": {"a": 0}, "merges": []}"#;
        let added = format!(r#"{{"id": {id}, "content": "{content}"}}"#);
        refusal(&format!(r#"{{"model": {model}, "added_tokens": [{added}]}}"#))
    };
    assert!(added("4294967295", "x").contains("leaves a gap"));
    assert!(added("0", "x").contains("contradicts"));
    assert!(added("1", "a").contains("contradicts"));
}
