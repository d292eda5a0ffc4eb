//! Turns chats into prompts with the model's own template, rendered like Python's `transformers` does.

use std::collections::BTreeMap;

use chrono::format::{Item, StrftimeItems};
use chrono::{Local, NaiveDateTime};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::Serializer;

use crate::inherited::Inherited;

/// Tokens that templates refer to by name.
const TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// Renders a chat as a prompt, up to the point where the model answers. `messages` are objects with `role` and
/// `content`.
///
/// # Errors
/// The reason, if there is no template or it rejects these messages.
pub(super) fn render(inherited: &Inherited, messages: &serde_json::Value) -> Result<String, String> {
    let template = inherited.chat_template().ok_or("the model has no chat template")?;
    let template = without_generation_tags(template);
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format, Local::now().naive_local()));
    let values = context! {
        messages => Value::from(Serde(messages)),
        add_generation_prompt => true,
        tools => Value::from(()),
        documents => Value::from(()),
    };
    let tokens = TOKENS.iter().filter_map(|name| Some((*name, inherited.token(name)?)));
    let tokens: BTreeMap<&str, &str> = tokens.collect();
    let values = context! { ..Value::from(Serde(tokens)), ..values };
    let rendered = environment.render_str(&template, values);
    rendered.map_err(|error| format!("the model's chat template rejects the messages: {error}"))
}

/// Removes tags that mark the text of the assistant for training in Python. They do not change the text.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|end| start + end + 2) else { break };
        let tag = &rest[start..end];
        let word = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim();
        out.push_str(&rest[..start]);
        out.push_str(&match word {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        });
        rest = &rest[end..];
    }
    out + rest
}

/// Python's `json.dumps(value, ensure_ascii=False)`, which writes a space after `:` and `,`.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let spaces = " ".repeat(width);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter)).map_err(failed)?;
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)).map_err(failed)?,
    }
    // Unknown options, such as separators, would otherwise be ignored silently.
    options.assert_all_used()?;
    String::from_utf8(out).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

/// Python's `now.strftime(format)` of a time without a time zone, as `datetime.now()` is.
fn strftime(format: &str, now: NaiveDateTime) -> Result<String, Error> {
    let mut here = String::with_capacity(format.len());
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        match (character, (character == '%').then(|| characters.next()).flatten()) {
            // Microseconds.
            ('%', Some('f')) => here += "%6f",
            // Empty without a time zone.
            ('%', Some('z' | 'Z')) => {}
            ('%', Some(directive)) => here.extend(['%', directive]),
            (other, _) => here.push(other),
        }
    }
    let items: Vec<Item<'_>> = StrftimeItems::new(&here).collect();
    if items.contains(&Item::Error) {
        let reason = format!("strftime_now: {format:?} is not a format of dates");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    Ok(now.format_with_items(items.into_iter()).to_string())
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use serde_json::json;

    use super::*;

    fn rendered(template: &str, messages: &serde_json::Value) -> Result<String, String> {
        let config = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        let tokenizer_config = config.as_object().unwrap().clone();
        render(&Inherited { tokenizer_config, ..Inherited::default() }, messages)
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
        let refusing = "{{ raise_exception('roles must alternate') }}";
        assert!(rendered(refusing, &messages).unwrap_err().contains("roles must alternate"));
        assert!(render(&Inherited::default(), &messages).unwrap_err().contains("no chat template"));
    }

    #[test]
    fn dates_are_written_as_in_python() {
        let at = |seconds: i64, format: &str| {
            strftime(format, DateTime::from_timestamp(seconds, 5_006_000).unwrap().naive_utc()).unwrap()
        };
        let format = "%d %b %Y %A %H:%M";
        assert_eq!(at(0, format), "01 Jan 1970 Thursday 00:00");
        assert_eq!(at(951_782_400 + 3661, format), "29 Feb 2000 Tuesday 01:01");
        assert_eq!(at(1_735_689_599, format), "31 Dec 2024 Tuesday 23:59");
        assert_eq!(at(0, "%-d/%m %I %p %j %f%z%Z 100%%"), "1/01 12 AM 001 005006 100%");
        for format in ["%", "%Q", "%d %!"] {
            strftime(format, NaiveDateTime::default()).unwrap_err();
        }
    }
}
