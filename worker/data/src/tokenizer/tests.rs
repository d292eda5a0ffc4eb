use serde_json::{Value, json};

use super::decoder::incomplete;
use super::*;

#[test]
fn gpt2_ids_are_those_of_the_reference() {
    let gpt2 = Tokenizer::gpt2();
    assert_eq!((gpt2.name(), gpt2.vocab(), gpt2.end_of_text()), ("gpt2", 50_257, Some(50_256)));
    // Expected values from tiktoken, https://github.com/openai/tiktoken.
    assert_eq!(gpt2.encode("hello world").unwrap(), [31373, 995]);
    assert_eq!(gpt2.encode("<|endoftext|>").unwrap(), [27, 91, 437, 1659, 5239, 91, 29]);
    assert_eq!(gpt2.decode(&[15496, 11, 995, 50256]), "Hello, world<|endoftext|>");
    assert_eq!((gpt2.bytes_of(995), gpt2.bytes_of(50_256)), (Some(b" world".as_slice()), None));
    assert_eq!(gpt2.bytes_of(50_257), None);
}

#[test]
fn bytes_are_ids() {
    let bytes = Tokenizer::bytes();
    assert_eq!((bytes.name(), bytes.vocab(), bytes.end_of_text()), ("bytes", 256, None));
    assert_eq!(bytes.encode("a\u{e9}").unwrap(), [97, 0xc3, 0xa9]);
    assert_eq!(bytes.decode(&[97, 0xc3, 0xa9, 0xff]), "a\u{e9}\u{fffd}");
    assert_eq!(bytes.bytes_of(0xc3), Some([0xc3].as_slice()));
}

#[test]
fn tokenizers_come_back_from_their_files() {
    for tokenizer in [Tokenizer::bytes(), Tokenizer::gpt2()] {
        let json = tokenizer.to_json();
        assert_eq!(Tokenizer::from_json(json.as_bytes()).unwrap().name(), tokenizer.name());
        // The same file formatted by another program is a file like any other.
        let other = Tokenizer::from_json(json.replacen('{', "{ ", 1).as_bytes()).unwrap();
        assert_eq!((other.name(), other.vocab()), ("tokenizer.json", tokenizer.vocab()));
        assert_eq!(other.end_of_text(), tokenizer.end_of_text());
        let text = "It's 12345 \u{e9}\u{4e16}\u{754c}\u{1f980}\t\n\n  x<|endoftext|>";
        assert_eq!(other.encode(text).unwrap(), tokenizer.encode(text).unwrap(), "{}", tokenizer.name());
        assert_eq!(other.decode(&other.encode(text).unwrap()), text);
    }
}

#[test]
fn tokenizer_saved_by_another_program_has_the_same_ids() {
    let file: Value = serde_json::from_str(&pairs(&split(&["."]), &Value::Null)).unwrap();
    let opened = |file: &Value| Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut file = file.clone();
        change(&mut file);
        opened(&file)
    };
    let own = opened(&file);
    let saved = changed(&|file| {
        let merges = file["model"]["merges"].as_array().unwrap().iter();
        let text = |merge: &Value| [&merge[0], &merge[1]].map(|part| part.as_str().unwrap()).join(" ");
        file["model"]["merges"] = merges.map(text).collect();
        file["model"]["ignore_merges"] = false.into();
        file["truncation"] =
            json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0});
    });
    assert!(own.same_ids(&saved) && saved.same_ids(&own));
    let with_added = |content: &str| {
        changed(&|file| {
            let token = json!({"id": own.vocab(), "content": content, "special": true, "single_word": false,
                               "lstrip": false, "rstrip": false, "normalized": false});
            let mut tokens = file["added_tokens"].as_array().cloned().unwrap_or_default();
            tokens.push(token);
            file["added_tokens"] = tokens.into();
        })
    };
    let more = with_added("<new>");
    assert!(more.extends(&own) && !own.extends(&more) && !more.same_ids(&own));
    let other = changed(&|file| file["normalizer"] = json!({"type": "Lowercase"}));
    assert!(!other.extends(&own) && !own.same_ids(&other));
    assert!(other.shares_vocabulary(&own) && own.shares_vocabulary(&more) && more.shares_vocabulary(&own));
    assert!(!with_added("<other>").shares_vocabulary(&more) && !Tokenizer::bytes().shares_vocabulary(&own));
}

#[test]
fn long_texts_have_the_ids_of_the_whole() {
    let gpt2 = Tokenizer::gpt2();
    let words: String = (0..40_000).map(|n| format!("{n} it's  \u{4e16},\n")).collect();
    let encoder = gpt2.inner.encoder.as_ref().unwrap();
    let whole = |text: &str| {
        let mut ids = Vec::new();
        encoder.fast.as_ref().unwrap().encode(text, true, &mut ids).unwrap();
        ids
    };
    assert!(words.len() > 4 * PIECE);
    assert_eq!(gpt2.encode(&words).unwrap(), whole(&words));
    let spaces = format!("a{}x y", " ".repeat(4 << 20));
    assert_eq!(gpt2.encode(&spaces).unwrap(), whole(&spaces));
    let unbroken = "ab".repeat(LONGEST_PIECE);
    assert_eq!(gpt2.decode(&gpt2.encode(&unbroken).unwrap()), unbroken);
}

#[test]
fn pieces_of_a_unigram_model_are_the_most_probable_ones() {
    let bytes = (0..=u8::MAX).map(|byte| json!([format!("<0x{byte:02X}>"), -20.0]));
    let pieces = [("<unk>", 0.0), ("</s>", 0.0), ("\u{2581}", -4.0), ("a", -3.0), ("b", -3.0), ("ab", -5.0)];
    let pieces = pieces.into_iter().chain([("\u{2581}a", -3.5), ("ba", -9.0)]);
    let vocab: Vec<Value> = pieces.map(|(piece, score)| json!([piece, score])).chain(bytes).collect();
    let file = json!({
        "added_tokens": [{
            "id": 1, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false,
        }],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": vocab},
    });
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    assert_eq!((tokenizer.vocab(), tokenizer.end_of_text()), (264, Some(1)));
    let text = "ab ba \u{e9}";
    let ids = [6, 4, 2, 4, 3, 2, 8 + 0xc3, 8 + 0xa9];
    assert_eq!((tokenizer.encode(text).unwrap().as_slice(), tokenizer.decode(&ids)), (&ids[..], text.into()));
    let mut decoder = tokenizer.decoder();
    let parts: String = ids.iter().map(|id| decoder.push(*id)).collect();
    assert_eq!(parts + &decoder.finish(), text);
    // Long texts are cut between words.
    let long = "ab \u{e9}b ".repeat(PIECE / 2);
    let whole = tokenizer.inner.encoder.as_ref().unwrap().exact.encode(&file.to_string(), &long, true);
    assert_eq!(tokenizer.encode(&long).unwrap(), whole.unwrap());
    assert_eq!(tokenizer.cuts().last(b"ab ab", 0), Some(2));
}

#[test]
fn prefix_is_written_before_the_text_alone() {
    let normalizer = r#"{"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}"#;
    let model = r#"{"type": "BPE", "vocab": {"a": 0, "\u2581": 1, "\u2581a": 2}, "merges": ["\u2581 a"]}"#;
    let json = format!(r#"{{"normalizer": {normalizer}, "model": {model}}}"#);
    let tokenizer = Tokenizer::from_json(json.as_bytes()).unwrap();
    assert_eq!(tokenizer.encode("a a").unwrap(), [2, 2]);
    let long = "a ".repeat(PIECE);
    assert_eq!(tokenizer.encode(&long).unwrap(), [&[2].repeat(PIECE)[..], &[1]].concat());
}

#[test]
fn decoder_returns_whole_characters() {
    let text = "a\u{e9}\u{4e16}\u{1f980}!";
    for tokenizer in [Tokenizer::bytes(), Tokenizer::gpt2()] {
        let mut decoder = tokenizer.decoder();
        let parts: Vec<String> =
            tokenizer.encode(text).unwrap().into_iter().map(|id| decoder.push(id)).collect();
        assert_eq!(parts.concat() + &decoder.finish(), text);
    }
    let mut decoder = Tokenizer::bytes().decoder();
    assert_eq!([0xf0, 0x9f, b'a'.into(), 0xff].map(|id| decoder.push(id)), ["", "", "\u{fffd}a", "\u{fffd}"]);
    assert_eq!(decoder.push(0xf0), "");
    assert_eq!(decoder.finish(), "\u{fffd}");
}

#[test]
fn character_that_a_prompt_begins_is_text_if_new_ids_complete_it() {
    let after = |prompt: &[u32], ids: &[u32]| {
        let mut decoder = Tokenizer::bytes().decoder();
        decoder.skip(prompt);
        let texts: Vec<String> =
            ids.iter().map(|id| decoder.settle(*id) + "|" + &decoder.push(*id)).collect();
        texts.join(" ") + &decoder.finish()
    };
    assert_eq!(after(&[0x61, 0xe6, 0x97], &[0xa5, 0x79]), "|\u{65e5} |y");
    assert_eq!(after(&[0x61, 0xe6, 0x97], &[0x79, 0xe6, 0x79]), "|y | \u{fffd}|y");
    assert_eq!(after(&[0x61, 0xe6], &[0x97, 0x79]), "| |y");
    assert_eq!(after(&[0x61, 0xe6], &[0x97]), "|");
    assert_eq!(after(&[0x61, 0xe6], &[]), "");
}

#[test]
fn bytes_after_a_prompt_do_not_rewrite_it() {
    let vocab: serde_json::Map<String, Value> = ["\u{2581}", "\u{2581}b"]
        .map(str::to_owned)
        .into_iter()
        .chain((0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")))
        .enumerate()
        .map(|(id, token)| (token, id.into()))
        .collect();
    let json = json!({
        "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": []},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
    });
    let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
    let ids = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte) + 2).collect::<Vec<u32>>();
    let after = |prompt: &[u32], new: &[u32]| {
        let mut decoder = tokenizer.decoder();
        decoder.skip(prompt);
        let texts: Vec<String> = new.iter().map(|id| decoder.push(*id)).collect();
        texts.concat() + &decoder.finish()
    };
    for start in [&[][..], &[0], &[1]] {
        let prompt = [start, &ids("\u{e9}\u{4e16}\u{1f600}".as_bytes())].concat();
        assert_eq!(
            after(&prompt, &[&ids(&[0x82, 0x9c])[..], &[1]].concat()),
            "\u{fffd}\u{fffd} b",
            "{start:?}"
        );
        assert_eq!(after(&prompt, &[&ids("\u{e9}".as_bytes())[..], &[1]].concat()), "\u{e9} b", "{start:?}");
        assert_eq!(after(&prompt, &[1]), " b", "{start:?}");
        // A character that the prompt begins.
        let prompt = [&prompt[..], &ids(&[0xe4, 0xb8])].concat();
        assert_eq!(after(&prompt, &[&ids(&[0x96])[..], &[1]].concat()), "\u{4e16} b", "{start:?}");
        assert_eq!(after(&prompt, &ids(&[0xff])), "\u{fffd}", "{start:?}");
        assert_eq!(after(&prompt, &[1]), " b", "{start:?}");
    }
    let mut decoder = tokenizer.decoder();
    let mut text: String = ids("\u{e9}\u{4e16}".as_bytes()).iter().map(|id| decoder.push(*id)).collect();
    text += &decoder.end_prompt();
    assert_eq!((text.as_str(), decoder.finish().as_str()), ("\u{e9}\u{4e16}", ""));
}

#[test]
fn texts_of_decoders_are_those_of_all_ids() {
    let back = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
    let (bytes, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let words = ["\u{2581}", "\u{2581}\u{2581}", "a", "\u{2581}b", "\u{e9}", "\u{2581}\u{4e16}", "\u{fffd}"];
    let runs = ["<0x0A>", "<0x20>", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0xA6>", "<0x80>"];
    let vocab: serde_json::Map<String, Value> =
        words.iter().chain(&runs).enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    for decoders in [json!([back, bytes, fuse]), json!([back, bytes, fuse, strip])] {
        let json = json!({
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": []},
            "decoder": {"type": "Sequence", "decoders": decoders},
        });
        let tokenizer = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
        // One id is outside the vocabulary.
        let count = words.len() + runs.len() + 1;
        let mut state = 1_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..5000 {
            let length = next(24);
            let ids: Vec<u32> = (0..length).map(|_| u32::try_from(next(count)).unwrap()).collect();
            let whole = tokenizer.decode(&ids);
            let mut decoder = tokenizer.decoder();
            let parts: String = ids.iter().map(|id| decoder.push(*id)).collect();
            assert_eq!(parts + &decoder.finish(), whole, "{ids:?}");
            // Decoding after a prompt.
            let (prompt, rest) = ids.split_at(next(length + 1));
            let mut decoder = tokenizer.decoder();
            decoder.skip(prompt);
            let parts: String = rest.iter().map(|id| decoder.push(*id)).collect();
            // The text of the prompt is settled, except for a character that it begins.
            let known = |ids: &[u32]| ids.iter().copied().filter(|id| (*id as usize) < count - 1).collect();
            let (mut prompt, rest): (Vec<u32>, Vec<u32>) = (known(prompt), known(rest));
            let run = prompt.iter().rev().take_while(|id| **id as usize >= words.len()).count();
            let bytes: Vec<u8> = prompt[prompt.len() - run..]
                .iter()
                .map(|id| u8::from_str_radix(&runs[*id as usize - words.len()][3..5], 16).unwrap())
                .collect();
            let held = prompt.split_off(prompt.len() - incomplete(&bytes));
            // Texts after other text.
            let before = if prompt.is_empty() { &[][..] } else { &[2] };
            let after = |ids: &[u32]| {
                let text = tokenizer.decode(&[before, ids].concat());
                text.chars().skip(before.len()).collect::<String>()
            };
            let whole = after(&[held.as_slice(), &rest].concat());
            let held = after(&held);
            let common = whole.chars().zip(held.chars()).take_while(|(a, b)| a == b).count();
            assert_eq!(parts + &decoder.finish(), whole.chars().skip(common).collect::<String>(), "{ids:?}");
        }
    }
}

#[test]
fn files_that_are_not_there_are_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Tokenizer::open(&dir.path().display().to_string()).unwrap_err().to_string();
    assert!(open().contains("does not exist"), "{}", open());
    let error = Tokenizer::open("Qwen/Qwen3-0.6B").unwrap_err().to_string();
    assert!(error.contains("`hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B`"), "{error}");
    fs_err::write(dir.path().join("tokenizer.model"), "").unwrap();
    assert!(open().contains("tokenizer.model is not read; convert it in Python"), "{}", open());
    let model = dir.path().join("sp.model");
    fs_err::write(&model, "\n\x05\n\x01a").unwrap();
    let error = Tokenizer::open(&model.display().to_string()).unwrap_err().to_string();
    assert!(error.contains("sp.model: it is not a tokenizer.json; convert it in Python"), "{error}");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    fs_err::write(dir.path().join(crate::TOKENIZER_FILE), pointer).unwrap();
    assert!(open().contains("Git LFS pointer") && open().contains("`git lfs pull`"), "{}", open());
}

/// The ids are those of `AutoTokenizer` in `transformers` 5.
#[test]
fn tokens_of_the_vocabulary_that_other_files_declare_are_added() {
    let ids = |config: Value, map: Value, added: Value, text: &str| {
        let dir = tempfile::tempdir().unwrap();
        let token = json!({"id": 5, "content": "<x>", "special": false, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false});
        let vocab = json!({"a": 0, "b": 1, " ": 2, "<e>": 3, "<t>": 4, "<x>": 5});
        let file = json!({"version": "1.0", "added_tokens": [token],
            "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        for (name, content) in [
            (crate::TOKENIZER_FILE, file),
            ("tokenizer_config.json", config),
            ("special_tokens_map.json", map),
            ("added_tokens.json", added),
        ] {
            fs_err::write(dir.path().join(name), content.to_string()).unwrap();
        }
        let tokenizer = Tokenizer::from_file(&dir.path().join(crate::TOKENIZER_FILE)).unwrap();
        // Prepared data and checkpoints have only this file.
        let copy = Tokenizer::from_json(tokenizer.to_json().as_bytes()).unwrap();
        let ids = tokenizer.encode_prompt(text, false).unwrap();
        assert_eq!((copy.encode_prompt(text, false).unwrap(), copy.vocab()), (ids.clone(), 6), "{text}");
        (ids, tokenizer.end_of_text())
    };
    let none = || json!({});
    let text = "a<x> b<e><t>";
    assert_eq!(ids(none(), none(), none(), text), (vec![0, 5, 2, 1], None));
    assert_eq!(ids(json!({"eos_token": "<e>"}), none(), none(), text), (vec![0, 5, 2, 1, 3], Some(3)));
    let map = || json!({"eos_token": {"content": "<e>"}, "additional_special_tokens": ["<t>", "<n>"]});
    assert_eq!(ids(none(), map(), none(), text), (vec![0, 5, 2, 1, 3, 4], Some(3)));
    assert_eq!(ids(json!({"turn_token": "<t>"}), none(), none(), text), (vec![0, 5, 2, 1, 4], None));
    assert_eq!(ids(none(), none(), json!({"<t>": 4, "<n>": 6}), text), (vec![0, 5, 2, 1, 4], None));
    // One that lists all added tokens, whose ids do not matter.
    let all =
        || json!({"9": {"content": "<t>"}, "5": {"content": "<x>", "rstrip": true, "normalized": false}});
    let config = json!({"added_tokens_decoder": all()});
    assert_eq!(ids(config, map(), json!({"<e>": 3}), text), (vec![0, 5, 1, 4], None));
}

#[test]
fn hostile_files_are_refused() {
    let refusal = |json: &str| Tokenizer::from_json(json.as_bytes()).unwrap_err().to_string();
    let model = |vocab: &str, merges: &str| {
        refusal(&format!(r#"{{"model": {{"type": "BPE", "vocab": {vocab}, "merges": {merges}}}}}"#))
    };
    assert!(refusal("").contains("not valid JSON"));
    assert!(refusal(&"[".repeat(100_000)).contains("recursion limit"));
    assert!(refusal(&format!("[{}1]", "1,".repeat(MAX_TOKENIZER_BYTES as usize / 4))).contains("values"));
    assert!(refusal("[]").contains("not a JSON object"));
    assert!(refusal("{}").contains("no `model`"));
    let word_piece = r###"{"model": {"type": "WordPiece", "continuing_subword_prefix": "##"}}"###;
    assert!(refusal(word_piece).contains("`WordPiece` is not supported"));
    let unigram = |vocab: &str| refusal(&format!(r#"{{"model": {{"type": "Unigram", "vocab": {vocab}}}}}"#));
    assert!(unigram("[]").contains("0 tokens"));
    assert!(unigram(r#"{"a": 0}"#).contains("no `model.vocab`"));
    assert!(unigram(r#"[["a", 0.0], ["b"], 3]"#).contains("not a pair of token and score"));
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

#[test]
fn added_tokens_after_all_others_need_no_ids_of_a_model() {
    let open = |added: &[(u32, &str)]| {
        let token = |(id, content): &(u32, &str)| {
            json!({
                "id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false,
            })
        };
        let added: Vec<Value> = added.iter().map(token).collect();
        let model = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []});
        Tokenizer::from_json(json!({"added_tokens": added, "model": model}).to_string().as_bytes()).unwrap()
    };
    let image = open(&[(2, "<eos>"), (3, "<image>")]);
    assert_eq!((image.end_of_text(), image.vocab(), image.required_vocab()), (Some(2), 4, 3));
    assert_eq!(image.with_end_of_text(None).required_vocab(), 2);
    assert_eq!(open(&[(2, "<image>"), (3, "<eos>")]).required_vocab(), 4);
    for (tokenizer, ids) in [(Tokenizer::bytes(), 256), (Tokenizer::gpt2(), 50_257)] {
        assert_eq!(tokenizer.required_vocab(), ids);
    }
}

/// Builds a file in which every pair of bytes is a token, so that ids reveal the boundaries of words.
fn pairs(pre_tokenizer: &Value, normalizer: &Value) -> String {
    let letter = |byte: u8| tokenizers_fast::utils::byte_level::BYTES_CHAR_LOOKUP[usize::from(byte)];
    let bytes = || (0..=u8::MAX).map(letter);
    let merges: Vec<[String; 2]> =
        bytes().flat_map(|a| bytes().take(48).map(move |b| [a.to_string(), b.to_string()])).collect();
    let tokens = bytes().map(String::from).chain(merges.iter().map(|pair| pair.concat()));
    let vocab: serde_json::Map<String, Value> =
        tokens.enumerate().map(|(id, token)| (token, id.into())).collect();
    json!({
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    })
    .to_string()
}

fn split(patterns: &[&str]) -> Value {
    let splits = patterns.iter().map(|pattern| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    });
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let members: Vec<Value> = splits.chain([bytes]).collect();
    json!({"type": "Sequence", "pretokenizers": members})
}

/// The fast encoder extends the small tables of a file.
#[test]
fn ids_of_files_with_few_tokens_are_those_of_the_exact_encoder() {
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let text = "a<0>b<1><11>!\"! #$%&'(\u{e9}";
    // The second number is that of pairs that are hashed.
    for (merges, hashed) in [(12_288, 0), (768, 0), (300, 12), (300, 13), (256, 0), (0, 0)] {
        let mut file: Value = serde_json::from_str(&pairs(&byte_level, &Value::Null)).unwrap();
        let model = &mut file["model"];
        model["merges"].as_array_mut().unwrap().truncate(merges);
        model["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < 256 + merges as u64);
        for _ in 0..hashed {
            let vocab = model["vocab"].as_object_mut().unwrap();
            let last = vocab.iter().max_by_key(|(_, id)| id.as_u64()).unwrap().0.clone();
            vocab.insert(format!("{last}!"), vocab.len().into());
            model["merges"].as_array_mut().unwrap().push(json!([last, "!"]));
        }
        let vocab = file["model"]["vocab"].as_object().unwrap().len();
        for special in [12, 11] {
            let token = |number: usize| {
                json!({
                    "id": vocab + number, "content": format!("<{number}>"), "special": number < special,
                    "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                })
            };
            file["added_tokens"] = (0..12).map(token).collect();
            let opened = file::open(file.to_string(), &[]).unwrap();
            let exact = opened.exact.encode(&opened.json, text, true).unwrap();
            assert_eq!(exact.iter().any(|id| usize::try_from(*id).unwrap() >= vocab), special == 11);
            let fast = opened.fast.unwrap();
            assert!(fast.takes(text) && !fast.takes("\u{10ffff}"));
            let mut ids = Vec::new();
            fast.encode(text, true, &mut ids).unwrap();
            assert_eq!(ids, exact, "{vocab} tokens, {special} special");
        }
    }
}

/// A sample of all characters, each within words, numbers, punctuation and white space.
#[test]
fn ids_of_the_fast_encoder_are_those_of_the_exact_one() {
    const LLAMA3: &str = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
        r"|\s+(?!\S)|\s+"
    );
    const O200K: &str = concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    let gpt2 =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let nfc = json!({"type": "NFC"});
    let deepseek = split(&tokenizers_fast::utils::DEEPSEEK_PATTERNS);
    let kinds = [
        ("GPT-2", gpt2, Value::Null),
        ("Llama 3", split(&[LLAMA3]), Value::Null),
        ("Qwen", split(&[&LLAMA3.replace("{1,3}", "")]), nfc),
        ("GPT-OSS", split(&[O200K]), Value::Null),
        ("DeepSeek", deepseek, Value::Null),
    ];
    let samples = (0..0x3000).step_by(17).chain((0x3000..0x11_0000).step_by(1009)).filter_map(char::from_u32);
    let samples: Vec<char> = samples.filter(|character| !fast::is_disputed(*character)).collect();
    for (name, pre_tokenizer, normalizer) in kinds {
        let json = pairs(&pre_tokenizer, &normalizer);
        let opened = file::open(json.clone(), &[]).unwrap();
        let fast = opened.fast.unwrap_or_else(|| panic!("{name} has a fast encoder"));
        for characters in samples.chunks(16) {
            let words = characters.iter().map(|c| format!("a{c}b {c}{c} 1{c}2!{c}\n{c}A{c}a '{c}s\n"));
            let text: String = words.collect();
            let mut ids = Vec::new();
            if fast.takes(&text) {
                fast.encode(&text, true, &mut ids).unwrap();
                assert_eq!(ids, opened.exact.encode(&json, &text, true).unwrap(), "{name}: {text}");
            }
        }
    }
}

#[test]
fn texts_that_libraries_take_differently_are_left_to_the_exact_encoder() {
    let nfc = pairs(&split(&[r"\p{N}{1,3}", "\u{4e00}"]), &json!({"type": "NFC"}));
    // This expression is not implemented in code.
    assert!(file::open(nfc, &[]).unwrap().fast.is_none());
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let opened = file::open(pairs(&byte_level, &json!({"type": "NFC"})), &[]).unwrap();
    let fast = opened.fast.unwrap();
    assert!(fast.takes("plain \u{e9} \u{4e16}"));
    // The first text would be composed by the normalizer; the second is a letter since Unicode 17.
    assert!(!fast.takes("e\u{301}") && !fast.takes("\u{88f}"));
}

#[test]
fn slow_expressions_and_panics_are_errors_and_invalid_expressions_are_refused() {
    let slow = Tokenizer::from_json(pairs(&split(&["(a|aa)+$"]), &Value::Null).as_bytes()).unwrap();
    let error = slow.encode(&("a".repeat(200) + "b")).unwrap_err().to_string();
    assert!(error.contains("too many steps"), "{error}");
    let error = Tokenizer::from_json(pairs(&split(&["(unclosed"]), &Value::Null).as_bytes()).unwrap_err();
    assert!(error.to_string().contains("parenthesis"), "{error}");
    // The library divides by this length.
    let fixed = json!({"type": "FixedLength", "length": 0});
    let error = Tokenizer::from_json(pairs(&fixed, &Value::Null).as_bytes()).unwrap_err().to_string();
    assert!(error.contains("`tokenizers` fails on this text: chunk size must be non-zero"), "{error}");
}

#[test]
fn broken_files_beside_a_tokenizer_are_refused() {
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(crate::TOKENIZER_FILE);
    std::fs::write(&file, pairs(&byte_level, &Value::Null)).unwrap();
    let names =
        ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"];
    for name in names {
        let path = dir.path().join(name);
        for text in ["{\"eos_token\": ", "[]", "version https://git-lfs.github.com/spec/v1"] {
            std::fs::write(&path, text).unwrap();
            let error = Tokenizer::from_file(&file).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("not an object of JSON"), "{error}");
        }
        std::fs::remove_file(path).unwrap();
    }
    // Directories of other programs have such files, too.
    std::fs::write(dir.path().join("config.json"), "// settings").unwrap();
    Tokenizer::from_file(&file).unwrap();
}
