//! Renders chats with a model's own template, as Python's `transformers` does.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use chrono::{Local, NaiveDateTime};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, context};

use super::content::ContentForms;
use super::literals::rewrite_escapes;
use super::rewrite::{GENERATION, ITERABLE, METHODS, rewrite, uncalled_method};
use super::{ASSISTANT, json, python, row};

/// Name of the template in its environment.
const NAME: &str = "chat template";
/// Field of a message with the tools that it calls.
const TOOL_CALLS: &str = "tool_calls";
/// First of the private-use characters that mark the ends of `generation` blocks, and their number.
const GENERATION_MARKS: Range<u32> = 0x10_f000..0x10_ff00;

/// A chat template that is ready to render.
#[derive(Clone)]
pub struct Template {
    environment: Environment<'static>,
    tokens: BTreeMap<String, String>,
    has_generation: bool,
    content: ContentForms,
}

/// A part of a chat that a template writes nothing of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeftOut {
    Tools,
    /// The message with this index, whose role the template does not know.
    Message(usize, String),
    /// The calls of the message with this index.
    Calls(usize),
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tools => write!(f, "the chat template writes nothing of `tools`"),
            Self::Message(index, role) => {
                let role = role.escape_debug();
                write!(f, "the chat template writes nothing of `messages[{index}]`, whose role is `{role}`")
            }
            Self::Calls(index) => {
                write!(f, "the chat template writes nothing of `messages[{index}].{TOOL_CALLS}`")
            }
        }
    }
}

/// A rendered chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) text: String,
    /// Byte ranges of the output of `generation` blocks, in order.
    pub(crate) spans: Vec<Range<usize>>,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("has_generation", &self.has_generation).finish_non_exhaustive()
    }
}

impl Template {
    /// Compiles a template. `tokens` are special tokens by name, such as `bos_token`. The template sees the current
    /// time as that of this call, so that all chats are rendered alike.
    ///
    /// # Errors
    /// The reason, with the line, if the template is not valid.
    pub fn new(source: &str, tokens: impl IntoIterator<Item = (String, String)>) -> Result<Self, String> {
        Self::at(source, tokens, Local::now().naive_local())
    }

    fn at(
        source: &str,
        tokens: impl IntoIterator<Item = (String, String)>,
        now: NaiveDateTime,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(python::print);
        environment.add_filter("tojson", json::to_json);
        environment.add_filter("trim", python::trim);
        environment.add_filter("escape", python::escape);
        environment.add_filter("e", python::escape);
        environment.add_filter("indent", python::indent);
        environment.add_filter("default", python::default);
        environment.add_filter("d", python::default);
        environment.add_filter("int", python::int);
        environment.add_filter("float", python::float);
        environment.add_filter("string", |value: &Value| python::text(value).map(Cow::into_owned));
        // Jinja lacks these, or has others of these names.
        for filter in ["attr", "bool", "chain", "lines", "pprint", "split", "zip"] {
            environment.remove_filter(filter);
        }
        for test in ["endingwith", "safe", "startingwith"] {
            environment.remove_test(test);
        }
        environment.remove_global("debug");
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("number", python::is_number);
        environment.add_test("integer", python::is_integer);
        environment.add_test("float", python::is_float);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function(ITERABLE, |sequence: Value| {
            if sequence.is_none() {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "`for` over none, which is not iterable",
                ));
            }
            // Without a length, `loop` has neither `last` nor `length`.
            let has_length = sequence.kind() != ValueKind::String && sequence.len().is_some();
            Ok(if has_length { sequence } else { sequence.try_iter()?.collect() })
        });
        environment.add_function("strftime_now", move |format: String| python::strftime(&format, now));
        environment.add_function(GENERATION, |state: &mut State<'_, '_>, options: Kwargs| {
            let body: Value = options.get("caller")?;
            body.call(state, &[])
        });
        // Jinja ends the lines of a template with line feeds, whatever the file has.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        if let Some((name, line)) = uncalled_method(&source) {
            return Err(format!(
                "the chat template is not valid: `.{name}` without a call is a method in Jinja; write `.{name}()`, or \
                 `['{name}']` for the key (line {line} of the template)"
            ));
        }
        let invalid = |reason: String| format!("the chat template is not valid: {reason}");
        let (source, has_generation) = rewrite(&rewrite_escapes(&source).map_err(invalid)?);
        environment.add_template_owned(NAME, source).map_err(|error| invalid(reason(&error)))?;
        let tokens = tokens.into_iter().collect();
        let none = Value::from(());
        let content = ContentForms::of(&|chat| render(&environment, &tokens, chat, &none, false).ok());
        Ok(Self { environment, tokens, has_generation, content })
    }

    /// Returns whether the template marks the text of the assistant with `{% generation %}`.
    pub(crate) fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Returns a special token that was passed to [`Template::new`].
    pub(crate) fn token(&self, name: &str) -> Option<&str> {
        self.tokens.get(name).map(String::as_str)
    }

    /// Renders a chat of `messages`, a list of objects with `role` and `content`, up to the point where the model
    /// answers. `variables` are further ones by name, or none.
    ///
    /// # Errors
    /// The reason, if these are not messages, a variable has the name of a special token or a function, or the template
    /// rejects them.
    pub fn render_prompt(&self, messages: &Value, variables: &Value) -> Result<String, String> {
        let is_own = |name: &str| {
            self.tokens.contains_key(name) || self.environment.globals().any(|(global, _)| global == name)
        };
        let names: Vec<Value> = variables.try_iter().into_iter().flatten().collect();
        if let Some(name) = names.iter().filter_map(Value::as_str).find(|name| is_own(name)) {
            return Err(format!("the variable `{name}` of the chat template is the model's own"));
        }
        let messages = self.adapted(&row::messages(messages, "messages")?)?;
        let text = self.render(&Value::from(messages.clone()), variables, true)?;
        self.check_complete(&messages, variables, true, &text).map_err(|left_out| left_out.to_string())?;
        Ok(text)
    }

    /// Refuses a chat that is rendered to the same `text` without its tools, without a call of them, or without a
    /// message of a role that the template may not know: the model would see, or learn to write, nothing in its place.
    pub(crate) fn check_complete(
        &self,
        messages: &[Value],
        variables: &Value,
        prompt: bool,
        text: &str,
    ) -> Result<(), LeftOut> {
        let is_same = |messages: &[Value], variables: &Value| {
            let rendered = self.render(&Value::from(messages.to_vec()), variables, prompt);
            rendered.is_ok_and(|rendered| rendered == text)
        };
        let has_tools = json::field(variables, row::TOOLS).is_some_and(|tools| tools.is_true());
        if has_tools && is_same(messages, &context! { tools => (), ..variables.clone() }) {
            return Err(LeftOut::Tools);
        }
        for (index, message) in messages.iter().enumerate() {
            let is_known = ["system", "user", ASSISTANT].iter().any(|role| row::has_role(message, role));
            if !is_known && message.get_attr("content").is_ok_and(|content| content.is_true()) {
                let mut without = messages.to_vec();
                without.remove(index);
                if is_same(&without, variables) {
                    let role = message.get_attr("role").unwrap_or_default().to_string();
                    return Err(LeftOut::Message(index, role));
                }
            }
            let calls = message.get_attr(TOOL_CALLS).unwrap_or_default();
            if !row::has_role(message, ASSISTANT) || calls.len().is_none_or(|len| len == 0) {
                continue;
            }
            let mut without = messages.to_vec();
            let keys =
                message.try_iter().into_iter().flatten().filter(|key| key.as_str() != Some(TOOL_CALLS));
            let pairs = keys.map(|key| (key.clone(), message.get_item(&key).unwrap_or_default()));
            without[index] = Value::from_pairs(pairs);
            if is_same(&without, variables) {
                return Err(LeftOut::Calls(index));
            }
        }
        Ok(())
    }

    /// Returns messages with their content in forms that the template writes.
    ///
    /// # Errors
    /// The reason, if it writes none.
    pub(crate) fn adapted(&self, messages: &[Value]) -> Result<Vec<Value>, String> {
        messages.iter().map(|message| self.content.adapt(message)).collect()
    }

    /// Returns whether the template has this word, which may be the name of a variable.
    pub(crate) fn has_word(&self, name: &str) -> bool {
        let is_part = |character: char| character.is_alphanumeric() || character == '_';
        let template = self.environment.get_template(NAME);
        template.is_ok_and(|template| template.source().split(|c| !is_part(c)).any(|word| word == name))
    }

    /// Renders a chat of [adapted](Self::adapted) messages. `variables` are further ones by name, such as the schemas
    /// of tools, or none.
    pub(crate) fn render(&self, messages: &Value, variables: &Value, prompt: bool) -> Result<String, String> {
        render(&self.environment, &self.tokens, messages, variables, prompt)
    }

    /// Renders a chat, and finds the output of `generation` blocks.
    ///
    /// Each block is written between two characters that the chat does not contain. They are removed again, and what
    /// is left must be the chat as rendered without them: a template may change the output of a block.
    pub(crate) fn render_marked(&self, messages: &Value, variables: &Value) -> Result<Marked, String> {
        let text = self.render(messages, variables, false)?;
        let unused = |mark: &char| !text.contains(*mark);
        let mut marks = GENERATION_MARKS.filter_map(char::from_u32).filter(unused);
        let (Some(open), Some(close)) = (marks.next(), marks.next()) else {
            return Err("the chat contains all private-use characters from U+10F000 to U+10FEFF".into());
        };
        let mut environment = self.environment.clone();
        environment.add_function(GENERATION, move |state: &mut State<'_, '_>, options: Kwargs| {
            let body: Value = options.get("caller")?;
            let body = body.call(state, &[])?;
            Ok::<_, Error>(Value::from(format!("{open}{body}{close}")))
        });
        let marked = render(&environment, &self.tokens, messages, variables, false)?;
        match unmark(&marked, open, close) {
            Some(found) if found.text == text => Ok(found),
            _ => Err("the chat template changes or nests the output of its `generation` blocks, so their place in the \
                      text is unknown"
                .into()),
        }
    }
}

fn render(
    environment: &Environment<'_>,
    tokens: &BTreeMap<String, String>,
    messages: &Value,
    variables: &Value,
    prompt: bool,
) -> Result<String, String> {
    let values = context! { messages => messages.clone(), add_generation_prompt => prompt };
    // The first value of a name counts. A row may have fields of any name, also of functions.
    let values = context! {
        ..values,
        ..Value::from(Serde(tokens)),
        ..Value::from_pairs(environment.globals()),
        ..variables.clone(),
        ..context! { tools => (), documents => () }
    };
    let template = environment.get_template(NAME).map_err(|error| error.to_string())?;
    template.render(values).map_err(|error| {
        let problem = if is_unsupported(&error) {
            "xlaunch does not support the chat template"
        } else {
            "the chat template rejects the messages"
        };
        format!("{problem}: {}", reason(&error))
    })
}

/// Returns whether the cause is something that a template uses and that is missing here, whatever the messages are.
fn is_unsupported(error: &Error) -> bool {
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest | ErrorKind::UnknownFunction => true,
        // Messages may have a string where the template expects a dictionary.
        ErrorKind::UnknownMethod => {
            detail.strip_prefix("string has no method named ").is_some_and(|name| !METHODS.contains(&name))
        }
        ErrorKind::InvalidOperation => {
            detail.starts_with("tried to use % operator on unsupported types string")
        }
        _ => false,
    }
}

/// Describes an error with its line in the template.
fn reason(error: &Error) -> String {
    let detail = error.detail().filter(|detail| !detail.is_empty());
    let what = match (error.kind(), detail) {
        // Messages of the template itself.
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

/// Removes marks, which must enclose texts that are not nested.
fn unmark(marked: &str, open: char, close: char) -> Option<Marked> {
    let mut found = Marked { text: String::with_capacity(marked.len()), spans: Vec::new() };
    let mut start = None;
    for character in marked.chars() {
        if character == open {
            if start.replace(found.text.len()).is_some() {
                return None;
            }
        } else if character == close {
            found.spans.push(start.take()?..found.text.len());
        } else {
            found.text.push(character);
        }
    }
    start.is_none().then_some(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tokens() -> Vec<(String, String)> {
        [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(name, token)| (name.into(), token.into())).into()
    }

    fn rendered(template: &str, messages: &serde_json::Value) -> Result<String, String> {
        Template::new(template, tokens())?.render(&Value::from(Serde(messages)), &Value::from(()), true)
    }

    fn spans(template: &str, messages: &serde_json::Value) -> Result<(String, Vec<String>), String> {
        let template = Template::new(template, tokens()).unwrap();
        let found = template.render_marked(&Value::from(Serde(messages)), &Value::from(()))?;
        let spans = found.spans.iter().map(|span| found.text[span.clone()].to_owned()).collect();
        Ok((found.text, spans))
    }

    #[test]
    fn templates_are_rendered_as_in_python() {
        let messages =
            json!([{"role": "system", "content": " Be <brief>. "}, {"role": "user", "content": "Hi"}]);
        let chatml = "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + \
                      message.content.strip() + '<|im_end|>\\n' }}\n{%- endfor %}\n{% if add_generation_prompt %}\
                      {{ '<|im_start|>assistant\\n' }}{% endif %}";
        assert_eq!(
            rendered(chatml, &messages).unwrap(),
            "<|im_start|>system\nBe <brief>.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        );
        let tokens =
            "{{ bos_token }}{% generation %}{{ messages[1] | tojson }}{% endgeneration %}{{ eos_token }}";
        assert_eq!(rendered(tokens, &messages).unwrap(), "<s>{\"content\": \"Hi\", \"role\": \"user\"}</s>");
        let methods = "{{ 'a-b-c'.rsplit('-', 1) }} {{ 'a--b'.rsplit('--')[-1] }} {{ 'a=b=c'.partition('=')[2] }} \
                       {{ 'a=b=c'.rpartition('=')[0] }} {{ 'ab'.removeprefix('a') }} {{ 'ab'.removesuffix('b') }} \
                       {{ 'a'.partition('=')[0] }}{{ 'a'.rpartition('=')[2] }} {{ 'a b'.split()[1] }}";
        assert_eq!(rendered(methods, &messages).unwrap(), "['a-b', 'c'] b b=c a=b b a aa b");
        let escapes = r#"{{ '\a' + "\v" }}{% if true %}{{ "\U0001F600 \u00e9\d" }}{% endif %}"#;
        assert_eq!(rendered(escapes, &messages).unwrap(), "\u{7}\u{b}\u{1f600} \u{e9}\\d");
        let escaped = "{{ \"<a href='b/c'>&\\\"\" | escape }} {{ '<' | e | e }}";
        assert_eq!(rendered(escaped, &messages).unwrap(), "&lt;a href=&#39;b/c&#39;&gt;&amp;&#34; &lt;");
        let iterable =
            "{{ tools is iterable }} {{ messages is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }}";
        assert_eq!(rendered(iterable, &messages).unwrap(), "False True True False");
    }

    #[test]
    fn lines_of_a_template_end_with_line_feeds() {
        let messages = json!([{"role": "user", "content": "a\r\nb"}]);
        let template = "<user>\r\n{{ messages[0].content }}\r{% if true %}\r\nc{% endif %}";
        assert_eq!(rendered(template, &messages).unwrap(), "<user>\na\r\nb\nc");
    }

    #[test]
    fn white_space_around_raw_blocks_is_that_of_jinja() {
        let messages = json!([{"role": "user", "content": "a"}]);
        for (template, expected) in [
            ("{% raw %}\n{{ a }}\n{% endraw %}\nb", "\n{{ a }}\nb"),
            ("{%- raw -%}\n{{ a }}\n{%- endraw %}\nb", "{{ a }}b"),
            ("{% raw %} {{ a }}\n\n{% endraw %}b", " {{ a }}\n\nb"),
        ] {
            assert_eq!(
                rendered(&format!("{{{{ messages[0].content }}}}{template}"), &messages).unwrap()[1..],
                *expected
            );
        }
    }

    #[test]
    fn objects_are_printed_in_the_order_of_their_keys() {
        let messages =
            serde_json::from_str(r#"[{"role": "user", "content": "a", "call": {"to": "b", "in": 1}}]"#)
                .unwrap();
        let template = Template::new("{{ messages[0].call }} {{ messages[0] | tojson }}", tokens()).unwrap();
        assert_eq!(
            template.render_prompt(&messages, &Value::from(())).unwrap(),
            r#"{'to': 'b', 'in': 1} {"role": "user", "content": "a", "call": {"to": "b", "in": 1}}"#
        );
    }

    #[test]
    fn keys_of_the_loss_do_not_matter_to_a_prompt() {
        let messages =
            serde_json::from_str(r#"[{"role": "assistant", "content": "a", "train": false}]"#).unwrap();
        let template = Template::new("{{ messages[0].content }}", tokens()).unwrap();
        assert_eq!(template.render_prompt(&messages, &Value::from(())).unwrap(), "a");
    }

    #[test]
    fn prompts_have_further_variables_except_names_of_tokens_and_functions() {
        let messages = serde_json::from_str(r#"[{"role": "user", "content": "a"}]"#).unwrap();
        let template = "{{ messages[0].content }}{{ eos_token }}\
                        {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}";
        let template = Template::new(template, tokens()).unwrap();
        let render = |variables: Value| template.render_prompt(&messages, &variables);
        for none in [Value::from(()), Value::default()] {
            assert_eq!(render(none).unwrap(), "a</s>");
        }
        assert_eq!(render(context! { enable_thinking => false }).unwrap(), "a</s><think></think>");
        assert_eq!(render(context! { enable_thinking => true, other => 1 }).unwrap(), "a</s>");
        for refused in [context! { eos_token => "x" }, context! { raise_exception => 1 }] {
            assert!(render(refused).unwrap_err().ends_with("of the chat template is the model's own"));
        }
    }

    #[test]
    fn prompts_with_tool_calls_that_the_template_leaves_out_are_refused() {
        let messages = serde_json::from_str(
            r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"name": "f"}]},
                {"role": "tool", "content": "c"}]"#,
        )
        .unwrap();
        let none = Value::from(());
        let prompt =
            |template: &str| Template::new(template, tokens()).unwrap().render_prompt(&messages, &none);
        let error = prompt("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap_err();
        assert_eq!(error, "the chat template writes nothing of `messages[1].tool_calls`");
        let template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | length }}{% endfor %}";
        assert_eq!(prompt(template).unwrap(), "a0b1c0");
    }

    /// Jinja takes the method, even where there is such a key.
    #[test]
    fn methods_that_are_not_called_are_refused() {
        let messages = json!([{"role": "user", "content": "a", "items": {"type": "b"}}]);
        for template in [
            "\n{{ messages[0].items }}",
            "\n{% for item in messages[0].items %}{{ item }}{% endfor %}",
            "\n{% if messages[0].items is defined %}a{% endif %}",
            "{% set items = messages[0] %}\n{{ '.values' ~ items .items.type }}",
            "{% set n = namespace(m=messages[0]) %}\n{{ n.m.items }}",
        ] {
            let error = rendered(template, &messages).unwrap_err();
            assert!(error.contains("`.items` without a call"), "{template}: {error}");
            assert!(error.contains("`['items']`") && error.contains("(line 2 "), "{template}: {error}");
        }
        let called = "{% set n = namespace(items='x') %}{% set n.items = n.items ~ 'y' %}{{ n.items }}\
                      {% for key, value in messages[0].items () %}{{ key[0] }}{% endfor %}\
                      {{ messages[0]['items'].type }}\
                      {{ '.items' }}{# a.items #}{% raw %}{{ a.items }}{% endraw %}.items";
        assert_eq!(rendered(called, &messages).unwrap(), "xycirb.items{{ a.items }}.items");
    }

    #[test]
    fn errors_name_the_line_of_the_template() {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let error = |template: &str| rendered(template, &messages).unwrap_err();
        let refusing =
            "{# a comment #}\n{% if true %}\n{{ raise_exception('roles must alternate') }}{% endif %}";
        assert_eq!(
            error(refusing),
            "the chat template rejects the messages: roles must alternate (line 3 of the template)"
        );
        let inside = "\n{% generation %}\n{{ raise_exception('no') }}{% endgeneration %}";
        assert!(error(inside).contains("no (line 3 of the template)"), "{}", error(inside));
        assert!(error("a\n{{ messages[3].content.x }}").contains("(line 2 of the template)"));
        let missing = error("{{ messages[0].tool_calls | tojson }}");
        assert!(missing.contains("`tojson` of a value that the row does not have"), "{missing}");
        assert!(error("{{ messages[0] | attr('role') }}").contains("attr is unknown"));
        let invalid = error("\n\n{% if %}");
        assert!(invalid.contains("is not valid: syntax error") && invalid.contains("line 3"), "{invalid}");
    }

    #[test]
    fn loops_over_none_are_errors_as_in_jinja() {
        let messages = json!([{"role": "user", "content": "a b", "calls": null, "list": [3, 1]}]);
        for template in [
            "\n{% for tool in tools %}{{ tool }}{% endfor %}",
            "{% set m = messages[0] %}\n{%- for call in m.calls -%} x {%- else -%} y {%- endfor -%}",
            "{% for m in messages %}\n{% for x in m['calls'] if x is not in m recursive %}x{% endfor %}{% endfor %}",
            "{% macro f(x) %}\n{% for y in x %}y{% endfor %}{% endmacro %}{{ f(none) }}",
        ] {
            let error = rendered(template, &messages).unwrap_err();
            assert!(error.contains("`for` over none") && error.contains("(line 2 "), "{template}: {error}");
        }
        for (template, expected) in [
            (
                "{% for x in nothing %}x{% endfor %}{% for x in messages[0].nothing %}x{% else %}y{% endfor %}",
                "y",
            ),
            ("{% for x in messages[0].list if x in [1, 2] %}{{ x }}{{ loop.last }}{% endfor %}", "1True"),
            ("{%for k,v in {'in': 1, '}': '%}'}.items()-%} {{ k ~ v }}{% endfor %}", "in1}%}"),
            ("{% for x in [1, [2]] recursive %}{{ x if x is integer else loop(x) }}{% endfor %}", "12"),
            ("{% for x in (messages[0].list if true else none) %}{{ x }}{% endfor %}", "31"),
            ("{% for x\n  in\n  messages[0].content.split() %}{{ x }}{{ loop.length }}{% endfor %}", "a2b2"),
            ("{% for m in messages %}{% for x in m.list[loop.index:] %}{{ x }}{% endfor %}{% endfor %}", "1"),
            // The length of a string and of a generator.
            (
                "{% for c in 'a\u{e9}' %}{{ c }}{{ loop.length ~ loop.revindex ~ loop.last }}{% endfor %}",
                "a22Falseé21True",
            ),
            ("{% for c in ('abc' | reverse)[:2] %}{{ c }}{% if loop.last %}.{% endif %}{% endfor %}", "cb."),
            (
                "{% for x in messages[0].list | map('string') | reverse %}{{ x ~ loop.revindex0 }}{% endfor %}",
                "1130",
            ),
        ] {
            assert_eq!(rendered(template, &messages).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn what_jinja_lacks_is_unknown() {
        let messages = json!([{"role": "user", "content": "a,b"}]);
        for template in [
            "{{ messages[0].content | split(',') }}",
            "{{ messages[0].content is startingwith('a') }}",
            "{{ debug() }}",
            "{{ messages[0].content.zfill(3) }}",
            "{{ '%s' % messages[0].content }}",
        ] {
            let error = rendered(template, &messages).unwrap_err();
            assert!(error.starts_with("xlaunch does not support the chat template: "), "{template}: {error}");
        }
        // Messages may be at fault for these.
        for template in
            ["{{ messages[0].content.items() }}", "{{ messages[0].calls.strip() }}", "{{ 1 % 'a' }}"]
        {
            let error = rendered(template, &messages).unwrap_err();
            assert!(error.starts_with("the chat template rejects the messages: "), "{template}: {error}");
        }
    }

    /// The texts are those of Python's Jinja.
    #[test]
    fn macros_and_calls_see_variables_that_they_take_a_slice_of_or_replace() {
        let messages = json!([
            {"role": "system", "content": "S"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "abc"}
        ]);
        for (template, expected) in [
            ("{% macro f() %}{{ x[1:] }}{% endmacro %}{{ f() }}", "bcd"),
            ("{% macro f(y) %}{{ x[::-1] }}{{ y[:2] }}{% endmacro %}{{ f('qrs') }}", "dcbaqr"),
            ("{% macro f(y=x[1:]) %}{{ y }}{% endmacro %}{{ f() }}", "bcd"),
            ("{% macro f() %}{% set x = x[1:] %}{{ x }}{% endmacro %}{{ f() }}{{ x }}", "bcdabcd"),
            ("{% macro f() %}{% set x = x ~ '1' %}{{ x }}{% endmacro %}{{ f() }}", "abcd1"),
            ("{%- macro f() -%}\n {{ x[3:] }}\n{%- endmacro -%}\n{% set x = 'b1234' %}{{ f() }}", "34"),
            (
                "{% macro w() %}[{{ caller() }}]{% endmacro %}{% for m in messages %}{% call w() %}{{ x[1:] }}\
                 {{ m.content[:2] }}{{ messages[1:] | length }}{% endcall %}{% endfor %}",
                "[bcdS2][bcdhe2][bcdab2]",
            ),
            (
                "{% set n = namespace(y='abc') %}{% macro f() %}{{ n.y[1:] }}{% set n.y = 'z' %}{% endmacro %}{{ f() }}\
                 {{ n.y }}",
                "bcz",
            ),
            (
                "{% for m in messages %}{% macro f() %}{{ m.content[1:] }}|{% endmacro %}{{ f() }}{% endfor %}",
                "|ello|bc|",
            ),
            (
                "{% macro f(a) %}{% macro g() %}{{ a[1:] }}{% endmacro %}{{ g() }}{% endmacro %}{{ f('xyz') }}",
                "yz",
            ),
            // Texts that look like tags.
            (
                "{% raw %}{% macro f() %}{% endraw %}{# {% macro g() %} #}{{ '{% macro' }}{% set y = '%}' %}{{ y }}",
                "{% macro f() %}{% macro%}",
            ),
        ] {
            let template = format!("{{% set x = 'abcd' %}}{template}");
            assert_eq!(rendered(&template, &messages).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn generation_blocks_are_found_in_loops_and_macros_and_beside_any_character() {
        let messages = json!([
            {"role": "user", "content": "\u{10f000}hé"}, {"role": "assistant", "content": " \u{10f002}a "},
            {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
        ]);
        let template = "{%- macro say(text) -%}\n    {%- generation %}{{ text.strip() }}{{ eos_token }}\
                        {%- endgeneration %}\n{%- endmacro %}\
                        {%- for message in messages %}\n  {%- if message.role == 'assistant' %}\n    \
                        {{- say(message.content) }}{{ loop.index }}\n  {%- else %}\n    \
                        {{- message.content + '|' }}\n  {%- endif %}\n{%- endfor %}";
        let (text, found) = spans(template, &messages).unwrap();
        assert_eq!(text, "\u{10f000}hé|\u{10f002}a</s>2b|c</s>4");
        assert_eq!(found, ["\u{10f002}a</s>", "c</s>"]);
        let in_loop = "{% for message in messages %}{% generation %}\n{{ loop.index }}{{ message.role[0] }}\n\
                       {% endgeneration %}{% endfor %}";
        let (text, found) = spans(in_loop, &messages).unwrap();
        assert_eq!((text.as_str(), found.len()), ("1u\n2a\n3u\n4a\n", 4));
        // White space after tags, and a namespace that a block only assigns to.
        let counted = "{% set n = namespace(last=0) %}{% for message in messages %}{% generation %}\n  \
                       {%- set n.last = loop.index %}\n  \
                       {{ message.role[0] }}\n{% endgeneration +%}\n{% endfor %}{{ n.last }}";
        let (text, found) = spans(counted, &messages).unwrap();
        assert_eq!((text.as_str(), found[0].as_str()), ("  u\n\n  a\n\n  u\n\n  a\n\n4", "  u\n"));
        // An inner loop whose sequence depends on the loop around the block.
        let inner = "{% for message in messages %}{% generation %}{% for later in messages[loop.index:] %}\
                     {{ later.role[0] }}{% endfor %}|{% endgeneration %}{% endfor %}";
        assert_eq!(spans(inner, &messages).unwrap().0, "aua|ua|a||");
        // Variables that a block only takes a part of.
        let part = "{% set greeting, n = 'xyz', 1 %}{% macro say(word, end='!') %}{% generation %}{{ word[1:] }}\
                    {{ end[:1] }}{% endgeneration %}{% endmacro %}{% for message in messages[1:2] %}\
                    {% set text = message.content %}{% generation %}{{ text[1:] }}{{ greeting[::2] }}\
                    {{ message.role[:2] }}{% for later in messages[n:] %}.{% endfor %}{% endgeneration %}{% endfor %}\
                    {{ say('abc') }}";
        assert_eq!(spans(part, &messages).unwrap().0, "\u{10f002}a xzas...bc!");
        let changed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x.strip() }}";
        assert!(spans(changed, &messages).unwrap_err().contains("changes or nests"));
    }
}
