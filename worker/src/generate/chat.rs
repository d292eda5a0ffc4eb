//! Turns chats into prompts with the model's own template, rendered like Python's `transformers` does.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::Serializer;

use crate::inherited::Inherited;

/// Tokens that templates refer to by name.
const TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];
const SECONDS_PER_DAY: u64 = 86_400;

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
    environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
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

/// Formats the date and time in UTC, in the notation of C's `strftime`.
fn strftime(format: &str, now: SystemTime) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (days, time) = (seconds / SECONDS_PER_DAY, seconds % SECONDS_PER_DAY);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[usize::try_from(days % 7).unwrap_or(0)]);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        out += &match characters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{:02}", time / 3600),
            Some('M') => format!("{:02}", time / 60 % 60),
            Some('S') => format!("{:02}", time % 60),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some(other) => other.to_string(),
            None => String::new(),
        };
    }
    out
}

/// Returns year, month and day for a number of days since 1970-01-01.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
    fn dates_are_those_of_the_calendar() {
        let at = |seconds: u64| strftime("%d %b %Y %A %H:%M", UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "01 Jan 1970 Thursday 00:00");
        assert_eq!(at(951_782_400 + 3661), "29 Feb 2000 Tuesday 01:01");
        assert_eq!(at(1_735_689_599), "31 Dec 2024 Tuesday 23:59");
    }
}
