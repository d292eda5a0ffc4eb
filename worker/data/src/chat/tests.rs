//! The templates of public families in short form, with the texts of which every token counts.

mod weights;

use super::*;
use crate::Tokenizer;

const CHATML: &str = include_str!("testdata/chatml.jinja");
const CHATML_GENERATION: &str = include_str!("testdata/chatml_generation.jinja");
const QWEN3: &str = include_str!("testdata/qwen3.jinja");
const LLAMA3: &str = include_str!("testdata/llama3.jinja");
const MISTRAL: &str = include_str!("testdata/mistral.jinja");
const GEMMA: &str = include_str!("testdata/gemma.jinja");
const PHI3: &str = include_str!("testdata/phi3.jinja");
const SMOLLM3: &str = include_str!("testdata/smollm3.jinja");
const ZEPHYR: &str = include_str!("testdata/zephyr.jinja");
const OLMO2: &str = include_str!("testdata/olmo2.jinja");
const GRANITE: &str = include_str!("testdata/granite.jinja");
const DEEPSEEK: &str = include_str!("testdata/deepseek.jinja");
/// Takes content as a list only.
const PARTS: &str = include_str!("testdata/parts.jinja");
/// Takes a string or a list.
const EITHER: &str = include_str!("testdata/either.jinja");

/// Tokens that include the white space after them.
const WIDE: [&str; 2] = ["<|end|>", "<|assistant|>"];
const ADDED: [&str; 17] = [
    "<|assistant|>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|end_of_text|>",
    "<think>",
    "</think>",
];

/// Returns a tokenizer of bytes with added tokens.
fn tokenizer() -> Tokenizer {
    // GPT-2's characters for bytes.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut shifted = 0x100..;
    let mut character = |byte: u32| {
        let code = if printable(byte) { byte } else { shifted.next().unwrap() };
        char::from_u32(code).unwrap().to_string()
    };
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..256_u32).map(|byte| (character(byte), byte.into())).collect();
    let token = |(index, content): (usize, &&str)| {
        serde_json::json!({
            "id": 256 + index, "content": content, "special": true, "single_word": false, "lstrip": false,
            "rstrip": WIDE.contains(content), "normalized": false,
        })
    };
    let added: Vec<serde_json::Value> = ADDED.iter().enumerate().map(token).collect();
    let words = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let file = serde_json::json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": words, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(file.to_string().as_bytes()).unwrap()
}

fn encoder(template: &str, max_tokens: Option<usize>) -> ChatEncoder {
    encoder_for(template, max_tokens, false)
}

fn encoder_for(template: &str, max_tokens: Option<usize>, preferences: bool) -> ChatEncoder {
    let dir = tempfile::tempdir().unwrap();
    let eos = if template == PHI3 || template == OLMO2 { "<|endoftext|>" } else { "</s>" };
    let config = serde_json::json!({"bos_token": "<s>", "eos_token": {"content": eos}});
    fs_err::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    fs_err::write(dir.path().join("t.jinja"), template).unwrap();
    let tokenizer_path = dir.path().display().to_string();
    let templates = Templates::find(&tokenizer_path, Some(&dir.path().join("t.jinja"))).unwrap();
    ChatEncoder::new(tokenizer(), &templates, max_tokens, preferences)
}

fn encode(encoder: &ChatEncoder, row: &str) -> Result<Outcome, String> {
    encoder.encode(&parse_json(row).unwrap())
}

/// Returns the texts of consecutive tokens of which every one counts for the loss.
fn supervised(document: &Document) -> Vec<String> {
    let pairs: Vec<(u32, bool)> = document.ids.iter().copied().zip(document.mask.iter().copied()).collect();
    let runs = pairs.chunk_by(|one, other| one.1 == other.1).filter(|run| run[0].1);
    runs.map(|run| tokenizer().decode(&run.iter().map(|(id, _)| *id).collect::<Vec<_>>())).collect()
}

fn trained_on(template: &str, row: &str) -> Result<Vec<String>, String> {
    match encode(&encoder(template, None), row)? {
        Outcome::Document { document, truncated: false, .. } => {
            assert_eq!(document.ids.len(), document.mask.len());
            Ok(supervised(&document))
        }
        other => panic!("{other:?}"),
    }
}

const PLAIN: &str = r#"{"messages": [
    {"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Hello. é"},
    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long."}]}"#;
const TOOLS: &str = r#"{"messages": [
    {"role": "user", "content": "How warm is it in Bonn?"},
    {"role": "assistant", "content": null, "tool_calls": [
        {"type": "function", "function": {"name": "heat", "arguments": {"city": "Bonn", "at": 1.0}}}]},
    {"role": "tool", "content": "12"}, {"role": "assistant", "content": "12 degrees."}],
    "tools": [{"type": "function", "function": {"name": "heat"}}]}"#;

fn without_schemas(row: &str) -> String {
    row.split_once(",\n    \"tools\"").unwrap().0.to_owned() + "}"
}

#[test]
fn answers_and_their_last_tokens_count_for_the_loss() {
    for (template, end) in [
        (CHATML, "<|im_end|>"),
        (CHATML_GENERATION, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>"),
        (PHI3, "<|end|>"),
        (ZEPHYR, "</s>"),
        (OLMO2, "<|endoftext|>"),
        (GRANITE, "<|end_of_text|>"),
        (DEEPSEEK, "</s>"),
        (PARTS, "<|im_end|>"),
        (EITHER, "<|im_end|>"),
    ] {
        let expected = ["Hello. é", "So long."].map(|text| format!("{text}{end}"));
        assert_eq!(trained_on(template, PLAIN).unwrap(), expected, "{end}");
    }
    // A space before each answer, or thoughts before the last one.
    assert_eq!(trained_on(MISTRAL, PLAIN).unwrap(), [" Hello. é</s>", " So long.</s>"]);
    let thoughts = "<think>\n\n</think>\n\nSo long.<|im_end|>";
    assert_eq!(trained_on(QWEN3, PLAIN).unwrap(), ["Hello. é<|im_end|>", thoughts]);
    // The template decides what belongs to an answer.
    let whole = ["Hello. é", "So long."].map(|text| format!("<|im_start|>assistant\n{text}<|im_end|>\n"));
    assert_eq!(trained_on(SMOLLM3, PLAIN).unwrap(), whole);
}

#[test]
fn calls_of_tools_count_and_their_results_do_not() {
    let call = r#""heat", "arguments": {"city": "Bonn", "at": 1.0}}"#;
    for (template, expected) in [
        (
            QWEN3,
            [
                format!("<tool_call>\n{{\"name\": {call}\n</tool_call><|im_end|>"),
                "<think>\n\n</think>\n\n12 degrees.<|im_end|>".into(),
            ],
        ),
        (
            LLAMA3,
            [
                format!("{{\"name\": {}<|eot_id|>", call.replace("arguments", "parameters")),
                "12 degrees.<|eot_id|>".into(),
            ],
        ),
        (MISTRAL, [format!("[TOOL_CALLS] [{{\"name\": {call}]</s>"), " 12 degrees.</s>".into()]),
        (GRANITE, [format!("<|tool_call|>[{{\"name\": {call}]<|end_of_text|>"), "12 degrees.<|end_of_text|>".into()]),
        (
            SMOLLM3,
            [
                format!("<|im_start|>assistant\n<tool_call>{{\"name\": {call}</tool_call><|im_end|>\n"),
                "<|im_start|>assistant\n12 degrees.<|im_end|>\n".into(),
            ],
        ),
        (
            DEEPSEEK,
            [
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>heat\n{\"city\": \"Bonn\", \"at\": 1.0}<｜tool▁call▁end｜>\
                 <｜tool▁calls▁end｜></s>"
                    .into(),
                "12 degrees.</s>".into(),
            ],
        ),
    ] {
        // These templates write no schemas, or only in a system message.
        let writes_schemas = ![LLAMA3, DEEPSEEK].contains(&template);
        let row = if writes_schemas { TOOLS } else { &without_schemas(TOOLS) };
        assert_eq!(trained_on(template, row).unwrap(), expected);
    }
}

#[test]
fn tools_that_the_template_leaves_out_are_refused() {
    let tools = TOOLS.replace("null", "\"\"");
    let error = trained_on(CHATML, &tools).unwrap_err();
    assert!(error.contains("writes nothing of `tools`") && error.contains("--chat-template FILE"), "{error}");
    let error = trained_on(CHATML, &without_schemas(&tools)).unwrap_err();
    assert!(error.contains("writes nothing of `messages[1].tool_calls`"), "{error}");
    trained_on(QWEN3, &without_schemas(&tools)).unwrap();
    // A template that writes the schemas, but no calls.
    let error = trained_on(&format!("{{{{ tools | tojson }}}}{CHATML}"), &tools).unwrap_err();
    assert!(error.contains("writes nothing of `messages[1].tool_calls`"), "{error}");
    // Keys without tools, as the rows of tables have them.
    let plain =
        PLAIN.replace("]}", "], \"tools\": []}").replace("Hello. é\"", "Hello. é\", \"tool_calls\": []");
    assert_eq!(trained_on(CHATML, &plain).unwrap(), ["Hello. é<|im_end|>", "So long.<|im_end|>"]);
}

#[test]
fn messages_whose_role_the_template_does_not_know_are_refused() {
    let row = |role: &str, content: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "Hi"}}, {{"role": "{role}", "content": "{content}"}},
                {{"role": "assistant", "content": "Hello."}}]}}"#
        )
    };
    for role in ["developer", "function", "Assistant"] {
        let error = trained_on(QWEN3, &row(role, "Be brief.")).unwrap_err();
        let expected =
            format!("writes nothing of `messages[1]`, whose role is `{role}`\nhelp: use a template");
        assert!(error.contains(&expected), "{error}");
        trained_on(CHATML, &row(role, "Be brief.")).unwrap();
        trained_on(QWEN3, &row(role, "")).unwrap();
    }
    trained_on(QWEN3, &row("tool", "12 degrees")).unwrap();
}

#[test]
fn content_in_parts_is_written_as_the_template_does() {
    let row = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content":
        [{"type": "text", "text": "Hel "}, {"type": "text", "text": "lo."}]}]}"#;
    for (template, expected) in [(CHATML, "Hel lo."), (PARTS, "Hel lo."), (EITHER, "Hel, lo.")] {
        assert_eq!(trained_on(template, row).unwrap(), [format!("{expected}<|im_end|>")]);
    }
    let pictures =
        "{% for m in messages %}{% for part in m.content %}{{ part.image }}{% endfor %}{% endfor %}";
    let error = trained_on(pictures, PLAIN).unwrap_err();
    assert!(error.contains("writes nothing of the user's text"), "{error}");
}

#[test]
fn thoughts_that_the_template_leaves_out_do_not_count() {
    let row = r#"{"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHello."},
        {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "<think>\nno\n</think>\n\nSo long."}]}"#;
    let last = "<think>\nno\n</think>\n\nSo long.<|im_end|>";
    assert_eq!(trained_on(QWEN3, row).unwrap(), ["Hello.<|im_end|>", last]);
    assert_eq!(trained_on(DEEPSEEK, row).unwrap(), ["\n\nHello.</s>", "\n\nSo long.</s>"]);
}

#[test]
fn white_space_that_belongs_to_a_special_token_does_not_count() {
    let row = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " \n Hello. "}]}"#;
    assert_eq!(trained_on(PHI3, row).unwrap(), ["Hello. <|end|>"]);
    assert_eq!(trained_on(CHATML, row).unwrap(), [" \n Hello. <|im_end|>"]);
}

#[test]
fn mask_that_is_not_certain_is_refused() {
    // The system message moves to the last message of the user.
    let moving = "{% for m in messages %}{% if m.role == 'user' and loop.last or m.role == 'user' and \
                  messages[loop.index0 + 2] is not defined %}{{ messages[0].content }}{% endif %}\
                  {% if m.role != 'system' %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}";
    let row = r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"}]}"#;
    let error = trained_on(moving, row).unwrap_err();
    assert!(error.contains("messages[2]") && error.contains("not a beginning of the whole chat"), "{error}");
    assert!(error.contains("`generation` blocks (--chat-template FILE)"), "{error}");
    // One that rejects chats that end with the user.
    let complete = "{% if messages[-1].role != 'assistant' %}\n{{ raise_exception('no answer') }}{% endif %}\
                    {% for m in messages %}{{ m.content }}{% endfor %}";
    let error = trained_on(complete, PLAIN).unwrap_err();
    assert!(error.contains("messages[1]") && error.contains("no answer (line 2 of the template)"), "{error}");
    // One without generation blocks for this chat.
    let nothing = "{% for m in messages %}{{ m.content }}{% if m.role == 'x' %}{% generation %}{% endgeneration %}\
                   {% endif %}{% endfor %}";
    assert!(trained_on(nothing, PLAIN).unwrap_err().contains("no token to train on"));
    // Two characters that are one token.
    let gpt2 = {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        fs_err::write(&path, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
        ChatEncoder::new(Tokenizer::gpt2(), &Templates::find("gpt2", Some(&path)).unwrap(), None, false)
    };
    let joined =
        r#"{"messages": [{"role": "user", "content": "th"}, {"role": "assistant", "content": "e"}]}"#;
    assert!(encode(&gpt2, joined).unwrap_err().contains("a token spans"));
}

#[test]
fn rows_of_other_forms_are_chats_or_texts() {
    let same = [
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": null},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]}], "tools": ""}"#,
    ];
    let encoder = encoder(CHATML, None);
    let first = encode(&encoder, same[0]).unwrap();
    assert!(matches!(&first, Outcome::Document { document, .. } if supervised(document) == ["b<|im_end|>"]));
    for row in same {
        assert_eq!(encode(&encoder, row).unwrap(), first, "{row}");
    }
    // A system message beside the others, which may be the first of them as well.
    let whole = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}], "system": ""}"#;
    let system = encode(&encoder, whole).unwrap();
    assert_ne!(system, first);
    for row in [
        r#"{"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
        r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}],
            "system": "s"}"#,
        r#"{"system_prompt": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
        r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "system": "s",
            "chat_template_kwargs": {}}"#,
        &whole.replace(r#""system": """#, r#""system": "s""#),
    ] {
        assert_eq!(encode(&encoder, row).unwrap(), system, "{row}");
    }
    // Answers in a prompt do not count.
    let row = r#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]}"#;
    assert_eq!(trained_on(CHATML, row).unwrap(), ["d<|im_end|>"]);
    assert_eq!(trained_on(CHATML_GENERATION, row).unwrap(), ["d<|im_end|>"]);
    // Answers of weight 0 do not, as in OpenAI's format.
    let weights = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 1}]}"#;
    let sharegpt = r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0.0},
        {"from": "human", "value": "c", "weight": null}, {"from": "gpt", "value": "d"}]}"#;
    for (row, template) in
        [(weights, CHATML), (weights, CHATML_GENERATION), (sharegpt, CHATML), (sharegpt, CHATML_GENERATION)]
    {
        assert_eq!(trained_on(template, row).unwrap(), ["d<|im_end|>"], "{row}");
    }
    assert!(
        trained_on(CHATML, &weights.replace(": 0}", ": 0.5}"))
            .unwrap_err()
            .contains("`messages[1].weight` is 0.5")
    );
    // Keys of other trainers for the same are not read.
    for (from, to, at) in [
        (": 0}", ": false}", "`messages[1].train` is False"),
        (": 0.0}", ": 0}", "`conversations[1].train` is 0"),
    ] {
        let text = if from == ": 0}" { weights } else { sharegpt };
        let other = text.replace(&format!("\"weight\"{from}"), &format!("\"train\"{to}"));
        let error = trained_on(CHATML, &other).unwrap_err();
        assert!(error.contains(at) && error.contains("\"weight\": 0"), "{error}");
        assert!(trained_on(CHATML, &other.replace(to, ": true}")).is_ok());
        assert!(trained_on(CHATML, &other.replace("train", "masked").replace(to, ": true}")).is_err());
    }
    for wrong in
        [r#""train": "False""#, r#""loss_weight": 0.5"#, r#""loss_mask": [0]"#, r#""train_detail": [{}]"#]
    {
        let error = trained_on(CHATML, &weights.replace("\"weight\": 0", wrong)).unwrap_err();
        assert!(error.contains("which is not read") && error.contains("\"weight\": 0"), "{error}");
    }
    assert!(trained_on(CHATML, &weights.replace("\"weight\": 0", "\"loss_weight\": 1.0")).is_ok());
    assert!(
        trained_on(CHATML, &weights.replace(": 1}", ": 0}")).unwrap_err().contains("no token to train on")
    );
    // The end-of-text token follows a text, unless it is there.
    let ends = "<|endoftext|>";
    assert_eq!(trained_on(CHATML, r#"{"prompt": "ab", "completion": " c"}"#).unwrap(), [format!(" c{ends}")]);
    assert_eq!(trained_on(CHATML, r#"{"text": "abc<|endoftext|>"}"#).unwrap(), [format!("bc{ends}")]);
    for empty in ["null", r#"{"text": ""}"#] {
        assert_eq!(encode(&encoder, empty).unwrap(), Outcome::Empty);
    }
}

#[test]
fn further_fields_of_a_row_are_variables_of_the_template() {
    let prefix = "{{ style }}{% if not date is defined %}!{% endif %}{% for d in documents or [] %}<{{ d.title }}>\
                  {% endfor %}{% for _ in range(2) %}.{% endfor %}";
    let fields = r#"{"style": false, "date": null, "documents": [{"title": "t"}], "range": 7, "eos_token": "x",
        "add_generation_prompt": true, "#;
    let row = PLAIN.replacen('{', fields, 1);
    for template in [CHATML, CHATML_GENERATION] {
        let expected = trained_on(template, PLAIN).unwrap();
        let template = format!("{prefix}{template}");
        assert_eq!(trained_on(&template, &row).unwrap(), expected);
        let texts = [(PLAIN, "!.."), (row.as_str(), "False!<t>..")].map(|(row, beginning)| {
            let Outcome::Document { document, .. } = encode(&encoder(&template, None), row).unwrap() else {
                panic!("no document");
            };
            tokenizer().decode(&document.ids).strip_prefix(beginning).map(String::from)
        });
        assert!(texts[0].is_some() && texts[0] == texts[1], "{texts:?}");
    }
    // Tools are left out although the template reads another field.
    let with_tools = row.replacen('{', r#"{"tools": [{"name": "f"}], "#, 1);
    assert!(
        trained_on(&format!("{prefix}{CHATML}"), &with_tools).unwrap_err().contains("nothing of `tools`")
    );
}

#[test]
fn generation_blocks_belong_to_the_message_that_adds_them() {
    let template = "{% for m in messages %}{% if m.role == 'assistant' %}{% for part in m.content.split('|') if part %}\
                    {% generation %}{{ part }};{% endgeneration %}{% endfor %}{% else %}{{ m.content }}{% endif %}\
                    {% endfor %}";
    let row = |first: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "Q"}},
            {{"role": "assistant", "content": "{first}", "weight": 0}},
            {{"role": "user", "content": "Q"}}, {{"role": "tool", "content": "Q"}},
            {{"role": "assistant", "content": "b|c"}}]}}"#
        )
    };
    assert_eq!(trained_on(template, &row("a")).unwrap(), ["b;c;"]);
    assert_eq!(trained_on(template, &row("a|d|e")).unwrap(), ["b;c;"]);
    // As many blocks as answers, which is by chance.
    let error = trained_on(template, &row("")).unwrap_err();
    assert!(error.contains("`weight` 0: messages[1] adds 0 of them"), "{error}");
    // Blocks of a message that another one changes.
    let last = "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}\
                {% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    assert!(trained_on(last, &row("a")).unwrap_err().contains("messages[3] adds -1 of them"));
}

#[test]
fn numbers_of_any_length_are_written_as_they_are() {
    let template = "{{ messages[0].content }}{{ tools | tojson }}{% generation %}{{ messages[1].n ~ messages[1].x }}\
                    {% endgeneration %}";
    let row = r#"{"messages": [{"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "n": 123456789012345678901234567890, "x": 1e-5}],
        "tools": "[{\"maximum\": 18446744073709551616}]"}"#;
    assert_eq!(trained_on(template, row).unwrap(), ["123456789012345678901234567890 1e-05".replace(' ', "")]);
    let Outcome::Document { document, .. } = encode(&encoder(template, None), row).unwrap() else { panic!() };
    assert!(tokenizer().decode(&document.ids).contains(r#"[{"maximum": 18446744073709551616}]"#));
}

#[test]
fn thoughts_have_the_names_and_the_order_of_transformers() {
    let template = "{{ messages[0].content }}{% generation %}{{ messages[1] | list | join(' ') }}\
                    {{ messages[1].thinking }}{{ messages[1].reasoning_content }}{% endgeneration %}";
    for (thoughts, expected) in [
        (r#""reasoning": "r""#, "thinking role reasoning content reasoning_contentrr"),
        (r#""thinking": "r""#, "thinking role content reasoning_contentrr"),
        (r#""reasoning_content": "r""#, "thinking role reasoning_content contentrr"),
        (r#""thinking": "t", "reasoning_content": "r""#, "thinking role reasoning_content contenttr"),
    ] {
        let answer = format!(r#"{{"role": "assistant", {thoughts}, "content": "A"}}"#);
        let row = format!(r#"{{"messages": [{{"role": "user", "content": "Q"}}, {answer}]}}"#);
        assert_eq!(trained_on(template, &row).unwrap(), [expected]);
    }
}

#[test]
fn chats_with_tokens_that_have_no_id_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        serde_json::json!({"added_tokens_decoder": {"9": {"content": "<new>"}}, "eos_token": "</s>"});
    fs_err::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    fs_err::write(dir.path().join("t.jinja"), CHATML).unwrap();
    let path = dir.path().display().to_string();
    let templates = Templates::find(&path, Some(&dir.path().join("t.jinja"))).unwrap();
    let encoder = ChatEncoder::new(tokenizer(), &templates, None, false);
    encode(&encoder, PLAIN).unwrap();
    let error = encode(&encoder, &PLAIN.replace("Hello.", "a<new>")).unwrap_err();
    assert!(error.contains("names a token `<new>`, which has no id"), "{error}");
}

#[test]
fn special_tokens_without_content_are_no_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let config = serde_json::json!({"bos_token": {"content": ""}, "unk_token": "", "eos_token": "</s>"});
    fs_err::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let file = dir.path().join("t.jinja");
    fs_err::write(&file, format!("{{{{ bos_token }}}}{CHATML}")).unwrap();
    let templates = Templates::find(&dir.path().display().to_string(), Some(&file)).unwrap();
    let Ok(Outcome::Document { document, .. }) =
        encode(&ChatEncoder::new(tokenizer(), &templates, None, false), PLAIN)
    else {
        panic!("the chat is refused");
    };
    assert_eq!(supervised(&document), trained_on(CHATML, PLAIN).unwrap());
}

#[test]
fn rows_of_instructions_are_chats() {
    let encoder = encoder(CHATML, None);
    let chat = |turns: &[(&str, &str)]| {
        let turns = turns.iter().map(|(role, text)| format!(r#"{{"role": "{role}", "content": "{text}"}}"#));
        let row = format!(r#"{{"messages": [{}]}}"#, turns.collect::<Vec<_>>().join(", "));
        encode(&encoder, &row).unwrap()
    };
    for (row, turns) in [
        (
            // `text` is the same with the words that Alpaca puts around it.
            r#"{"instruction": "a", "input": "b", "output": "c", "text": "Below is a: b c"}"#,
            &[("user", r"a\nb"), ("assistant", "c")][..],
        ),
        (r#"{"instruction": "a", "input": "", "output": "c"}"#, &[("user", "a"), ("assistant", "c")]),
        (r#"{"instruction": "", "input": "b", "output": "c"}"#, &[("user", "b"), ("assistant", "c")]),
        (
            r#"{"instruction": "a", "input": null, "output": "c", "system": "s", "history": [["d", "e"]]}"#,
            &[("system", "s"), ("user", "d"), ("assistant", "e"), ("user", "a"), ("assistant", "c")],
        ),
    ] {
        assert_eq!(encode(&encoder, row).unwrap(), chat(turns), "{row}");
    }
    for (row, reason) in [
        (r#"{"instruction": "", "output": "c"}"#, "`instruction` is empty"),
        (r#"{"instruction": "a", "output": ""}"#, "`output` is empty"),
        (r#"{"instruction": "a", "output": 1}"#, "`output` is a number"),
        (r#"{"instruction": "a", "input": 1, "output": "c"}"#, "`input` is a number"),
        (r#"{"instruction": "a", "history": [["d"]], "output": "c"}"#, "`history` is not a list of pairs"),
        (r#"{"instruction": "a", "response": "c"}"#, "`instruction` and `output`, or `text`, only"),
    ] {
        let error = trained_on(CHATML, row).unwrap_err();
        assert!(error.contains(reason), "{row}: {error}");
    }
}

#[test]
fn rows_that_are_no_chats_are_refused() {
    let message = |role: &str| format!(r#"{{"role": "{role}", "content": "a"}}"#);
    let chat = |messages: &str| format!(r#"{{"messages": [{messages}]}}"#);
    for (row, reason) in [
        ("[]".into(), "the row is a sequence"),
        (r#"{"question": "a"}"#.into(), "only `question`"),
        (chat(""), "the chat has no messages"),
        (r#"{"messages": "a"}"#.into(), "`messages` is a string; expected a list"),
        (chat("1"), "`messages[0]` is a number"),
        (chat(r#"{"content": "a"}"#), "`messages[0]` has no `role`"),
        (chat(r#"{"role": 1, "content": "a"}"#), "`messages[0].role` is a number"),
        (chat(r#"{"role": "user"}"#), "`messages[0]` has no `content`"),
        (chat(r#"{"role": "user", "content": 1}"#), "`messages[0].content` is a number"),
        (
            chat(r#"{"role": "user", "content": [{"type": "image"}]}"#),
            "of type `image`; only `text` is supported",
        ),
        (chat(r#"{"from": "human", "value": "a"}"#), "expected `role` and `content`"),
        (r#"{"conversations": [{"from": "bot", "value": "a"}]}"#.into(), "`conversations[0].from` is `bot`"),
        (chat(&message("assistant")), "starts with the assistant"),
        (chat(&message("system")), "only system messages"),
        (chat(&message("user")), "no message of the role `assistant`"),
        (r#"{"prompt": "a"}"#.into(), "no `completion`"),
        (r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#.into(), "rename `chosen` to `completion`"),
        (r#"{"chosen": [], "rejected": []}"#.into(), "use --preferences in place of --chat"),
        (r#"{"prompt": "a", "completion": []}"#.into(), "expected two strings or two lists"),
        (r#"{"prompt": "a", "completion": ""}"#.into(), "`completion` is empty"),
        (r#"{"text": 1}"#.into(), "`text` is a number"),
        (format!(r#"{{"system": 1, "messages": [{}]}}"#, message("user")), "`system` is a number"),
        (
            format!(r#"{{"system": "s", "messages": [{}]}}"#, message("system")),
            "a `system` and another message of that role",
        ),
        (
            format!(r#"{{"chat_template_kwargs": {{"a": 1}}, "messages": [{}]}}"#, message("user")),
            "`chat_template_kwargs` is not supported",
        ),
        (
            format!(r#"{{"tools": "x", "messages": [{}]}}"#, message("user")),
            "`tools` is a string, but not of JSON",
        ),
        (
            format!(r#"{{"tools": [{{}}, "{{}}"], "messages": [{}]}}"#, message("user")),
            "`tools[1]` is a string; expected an object with the schema of a tool",
        ),
    ] {
        let error = trained_on(CHATML, &row).unwrap_err();
        assert!(error.contains(reason), "{row}: {error}");
    }
    let unknown = chat(&[message("user"), message("human"), message("assistant")].join(","));
    assert!(trained_on(MISTRAL, &unknown).unwrap_err().contains("the role human is not supported (line 15"));
}

#[test]
fn long_chats_lose_whole_turns_at_their_end() {
    let outcome = |max: usize| encode(&encoder(CHATML, Some(max)), PLAIN).unwrap();
    let first = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\nHello. é<|im_end|>\n";
    let whole =
        format!("{first}<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSo long.<|im_end|>\n");
    let length = |text: &str| tokenizer().encode_prompt(text, false).unwrap().len();
    for (max, expected) in [(length(&whole), &whole[..]), (length(&whole) - 1, first), (length(first), first)]
    {
        let Outcome::Document { document, truncated, .. } = outcome(max) else { panic!("dropped at {max}") };
        assert_eq!((tokenizer().decode(&document.ids).as_str(), truncated), (expected, expected == first));
        assert!(document.mask.contains(&true));
    }
    assert_eq!(outcome(length(first) - 1), Outcome::Dropped);
}

/// A linear congruential generator: the same chats in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }

    fn text(&mut self) -> String {
        const PIECES: [&str; 12] = [
            "a",
            " b",
            "\n",
            "<|im_end|>",
            "<|im_start|>assistant\n",
            "é",
            "🙂",
            "\"",
            "</s>",
            "<think>",
            "  ",
            "{{ x }}",
        ];
        (0..self.below(8)).map(|_| PIECES[self.below(PIECES.len())]).collect()
    }
}

#[test]
fn derived_masks_equal_those_of_generation_blocks() {
    let (derived, marked) = (encoder(CHATML, None), encoder(CHATML_GENERATION, None));
    let mut random = Random(1);
    for _ in 0..300 {
        let mut messages = vec![serde_json::json!({"role": "user", "content": random.text()})];
        for _ in 0..random.below(9) {
            let role = ["user", "assistant", "tool", "assistant"][random.below(4)];
            messages.push(serde_json::json!({"role": role, "content": random.text()}));
        }
        messages.push(serde_json::json!({"role": "assistant", "content": random.text()}));
        let row = serde_json::json!({ "messages": messages }).to_string();
        assert_eq!(encode(&derived, &row).unwrap(), encode(&marked, &row).unwrap(), "{row}");
    }
}

#[test]
fn parts_of_a_row_that_would_be_lost_are_refused() {
    let row = |more: &str, of_answer: &str| {
        let answer = format!(r#"{{"role": "assistant", "content": "b"{of_answer}}}"#);
        format!(r#"{{"messages": [{{"role": "user", "content": "a"}}, {answer}]{more}}}"#)
    };
    for (row, expected) in [
        (row(r#", "images": ["a.png"]"#, ""), "`images` is not read"),
        (row(r#", "functions": [{"name": "f"}]"#, ""), "write them as `tools`"),
        (row("", r#", "audio": {"id": "1"}"#), "`messages[1].audio` is not read"),
        (row("", r#", "function_call": {"name": "f"}"#), "write it as `tool_calls`"),
        (
            r#"{"image": "a.jpg", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#
                .into(),
            "`image` is not read",
        ),
        (r#"{"prompt": "a", "completion": "b", "system": "s"}"#.into(), "not read beside a `prompt`"),
        (r#"{"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}"#.into(), "not read beside a `prompt`"),
        (r#"{"messages": null}"#.into(), "no field of the row has a value"),
        (r#"{"messages": [null]}"#.into(), "`messages[0]` is null; expected an object"),
    ] {
        let error = trained_on(CHATML, &row).unwrap_err();
        assert!(error.contains(expected), "{row}: {error}");
    }
    for row in [
        row(r#", "images": [], "functions": null"#, r#", "audio": null"#),
        r#"{"text": "a", "image": "https://a"}"#.into(),
    ] {
        assert!(trained_on(CHATML, &row).is_ok(), "{row}");
    }
}

/// Returns the texts of both answers, with those that count in brackets.
fn pair(row: &str) -> Result<[String; 2], String> {
    let encoder = encoder_for(CHATML, Some(60), true);
    match encode(&encoder, row)? {
        Outcome::Pair { documents, .. } => {
            assert_eq!(documents[0].hash, documents[1].hash, "both are in the same split");
            Ok(documents.map(|document| {
                let text = |(id, counts): (&u32, &bool)| {
                    let text = tokenizer().decode(&[*id]);
                    if *counts { format!("[{text}]") } else { text }
                };
                let text: String = document.ids.iter().zip(&document.mask).map(text).collect();
                text.replace("][", "").replace("<|im_start|>", "<").replace("<|im_end|>", ">")
            }))
        }
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn pairs_of_answers_are_read_with_and_without_a_prompt_of_their_own() {
    let user = r#"{"role": "user", "content": "Hi"}"#;
    let answer = |text: &str| format!(r#"{{"role": "assistant", "content": "{text}"}}"#);
    let (better, worse) = (answer("Yo."), answer("No."));
    let expected = ["<user\nHi>\n<assistant\n[Yo.>]\n", "<user\nHi>\n<assistant\n[No.>]\n"].map(String::from);
    let whole = format!(r#""chosen": [{user}, {better}], "rejected": [{user}, {worse}]"#);
    for row in [
        format!(r#"{{"prompt": [{user}], "chosen": [{better}], "rejected": [{worse}]}}"#),
        format!("{{{whole}}}"),
        // As in UltraFeedback, whose `messages` are those of the better answer.
        format!(r#"{{"prompt": "Hi", {whole}, "messages": [{user}, {better}], "score_chosen": 8.5}}"#),
    ] {
        assert_eq!(pair(&row).unwrap(), expected, "{row}");
    }
    // Texts, as in Anthropic's data. The space before an answer belongs to it.
    let texts = ["Q: a? A:[ yes<|endoftext|>]", "Q: a? A:[ no<|endoftext|>]"].map(String::from);
    assert_eq!(pair(r#"{"chosen": "Q: a? A: yes", "rejected": "Q: a? A: no"}"#).unwrap(), texts);
    assert_eq!(pair(r#"{"prompt": "Q: a? A:", "chosen": " yes", "rejected": " no"}"#).unwrap(), texts);
    // Whole words, also where answers begin with the same letters or one begins the other.
    let (that, the) = (r"Q: a? A: That", r"Q: a? A: The");
    assert_eq!(
        pair(&format!(r#"{{"chosen": "{that}", "rejected": "{the}"}}"#)).unwrap(),
        ["Q: a? A:[ That<|endoftext|>]", "Q: a? A:[ The<|endoftext|>]"]
    );
    assert_eq!(
        pair(r#"{"chosen": "Q: a?\nyes", "rejected": "Q: a?\nyes, yes"}"#).unwrap(),
        ["Q: a?\n[yes<|endoftext|>]", "Q: a?\n[yes, yes<|endoftext|>]"]
    );
    // Without spaces, as in Chinese.
    assert_eq!(
        pair(r#"{"chosen": "Q:a?A:yes", "rejected": "Q:a?A:no"}"#).unwrap(),
        ["Q:a?A:[yes<|endoftext|>]", "Q:a?A:[no<|endoftext|>]"]
    );
    // A question beside lists that begin with the answer, or that repeat it.
    for row in [
        format!(r#"{{"prompt": "Hi", "chosen": [{better}], "rejected": [{worse}]}}"#),
        format!(r#"{{"prompt": [{user}], {whole}}}"#),
        // As in LLaMA-Factory's data.
        r#"{"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Yo."},
            "rejected": {"from": "gpt", "value": "No."}}"#
            .into(),
        r#"{"instruction": "Hi", "input": "", "chosen": "Yo.", "rejected": "No."}"#.into(),
    ] {
        assert_eq!(pair(&row).unwrap(), expected, "{row}");
    }
    // A chat that begins another one.
    let both =
        format!(r#"{{"chosen": [{user}, {better}], "rejected": [{user}, {better}, {user}, {worse}]}}"#);
    assert_eq!(pair(&both).unwrap()[0], expected[0]);
    // Everything after the common messages is an answer.
    let long = format!(r#"{{"chosen": [{user}, {better}, {user}, {worse}], "rejected": [{user}, {worse}]}}"#);
    assert!(pair(&long).unwrap()[0].contains("[Yo.>]\n<user\nHi>\n<assistant\n[No.>]"));
}

#[test]
fn pairs_that_cannot_be_compared_are_refused() {
    let user = r#"{"role": "user", "content": "Hi"}"#;
    let long = "x".repeat(100);
    for (row, reason) in [
        (
            r#"{"prompt": "a", "completion": "b"}"#.into(),
            "the row has no `chosen`, only `prompt`, `completion`\nhelp: name the better answer `chosen`",
        ),
        (r#"{"prompt": "a", "chosen": "b"}"#.into(), "the row has no `rejected`"),
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": "b"}"#.into(),
            "are the same\nhelp: leave such rows out",
        ),
        (r#"{"prompt": "a", "chosen": "b", "rejected": ""}"#.into(), "`rejected` is empty"),
        (r#"{"chosen": "b", "rejected": ["c"]}"#.into(), "`chosen` is a string and `rejected` a sequence"),
        (r#"["b", "c"]"#.into(), "expected an object with `chosen` and `rejected`"),
        (
            format!(r#"{{"chosen": [{user}], "rejected": [{user}, {user}]}}"#),
            "`chosen` and `rejected` do not begin with the same message\nhelp: begin both with the question",
        ),
        (
            r#"{"question": "Who?", "chosen": "I am A.", "rejected": "I am B."}"#.into(),
            "`question` is not read beside answers that are strings\nhelp: rename it to `prompt`",
        ),
        (r#"{"chosen": "yes", "rejected": "no"}"#.into(), "help: write the question as `prompt`"),
        (r#"{"chosen": "yes", "rejected": "yesterday"}"#.into(), "help: write the question as `prompt`"),
        (
            format!(r#"{{"prompt": [{user}], "chosen": [{user}], "rejected": [{user}, {user}]}}"#),
            "`chosen` is empty",
        ),
        (format!(r#"{{"prompt": "a", "chosen": "b", "rejected": "{long}"}}"#), "Dropped"),
    ] {
        let error = pair(&row).unwrap_err();
        assert!(error.contains(reason), "{row}: {error}");
    }
}
