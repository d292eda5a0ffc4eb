//! Functions of Python that templates expect: methods of strings, `strftime`, and the way values are printed.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::ops::RangeInclusive;

use chrono::NaiveDateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter, filters};
use minijinja_contrib::pycompat::unknown_method_callback;
use unicode_categories::UnicodeCategories;

use super::json::{self, Number};

/// Characters that end lines; a carriage return and a line feed end one line.
const LINE_ENDS: [char; 10] =
    ['\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}'];

/// Digits that are not decimal (Unicode's `Numeric_Type=Digit`), such as superscripts.
const OTHER_DIGITS: [RangeInclusive<char>; 20] = [
    '\u{b2}'..='\u{b3}',
    '\u{b9}'..='\u{b9}',
    '\u{1369}'..='\u{1371}',
    '\u{19da}'..='\u{19da}',
    '\u{2070}'..='\u{2070}',
    '\u{2074}'..='\u{2079}',
    '\u{2080}'..='\u{2089}',
    '\u{2460}'..='\u{2468}',
    '\u{2474}'..='\u{247c}',
    '\u{2488}'..='\u{2490}',
    '\u{24ea}'..='\u{24ea}',
    '\u{24f5}'..='\u{24fd}',
    '\u{24ff}'..='\u{24ff}',
    '\u{2776}'..='\u{277e}',
    '\u{2780}'..='\u{2788}',
    '\u{278a}'..='\u{2792}',
    '\u{10a40}'..='\u{10a43}',
    '\u{10e60}'..='\u{10e68}',
    '\u{11052}'..='\u{1105a}',
    '\u{1f100}'..='\u{1f10a}',
];

/// Methods of strings that `minijinja` and its own emulation of Python lack, or that treat white space otherwise.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return unknown_method_callback(state, value, name, arguments);
    };
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            Ok(strip(text, name, characters).into())
        }
        "split" | "rsplit" => {
            let (separator, most, options): (Option<&str>, Option<i64>, Kwargs) = from_args(arguments)?;
            let (separator, most) = (separator.or(options.get("sep")?), most.or(options.get("maxsplit")?));
            options.assert_all_used()?;
            if separator == Some("") {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{name}: the separator is empty"),
                ));
            }
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            let mut parts = parts(text, separator, most, name == "rsplit");
            if name == "rsplit" {
                parts.reverse();
            }
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(arguments)?;
            let keep = keep.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            Ok(lines(text, keep).into_iter().map(Value::from).collect())
        }
        "isspace" => {
            let () = from_args(arguments)?;
            Ok((!text.is_empty() && text.chars().all(is_space)).into())
        }
        "isdecimal" | "isdigit" => {
            let () = from_args(arguments)?;
            let is_other = |character: char| OTHER_DIGITS.iter().any(|range| range.contains(&character));
            let is_digit = |character: char| {
                character.is_number_decimal_digit() || name == "isdigit" && is_other(character)
            };
            Ok((!text.is_empty() && text.chars().all(is_digit)).into())
        }
        "title" => {
            let () = from_args(arguments)?;
            Ok(title(text).into())
        }
        "join" => {
            let (parts,): (&Value,) = from_args(arguments)?;
            let parts: Vec<Value> = parts.try_iter()?.collect();
            let texts: Option<Vec<&str>> = parts.iter().map(Value::as_str).collect();
            let other = || Error::new(ErrorKind::InvalidOperation, "join: not all elements are strings");
            Ok(texts.ok_or_else(other)?.join(text).into())
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "partition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if before.len() == text.len() { "" } else { separator };
            Ok(Tuple::from([before, found, after].map(Value::from)).into())
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if after.len() == text.len() { "" } else { separator };
            Ok(Tuple::from([before, found, after].map(Value::from)).into())
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Removes some characters, or white space, at the ends that a method is named for.
fn strip<'a>(text: &'a str, method: &str, characters: Option<&str>) -> &'a str {
    let is_stripped = |character: char| match characters {
        Some(characters) => characters.contains(character),
        None => is_space(character),
    };
    let text = if method == "rstrip" { text } else { text.trim_start_matches(is_stripped) };
    if method == "lstrip" { text } else { text.trim_end_matches(is_stripped) }
}

/// Splits a text at up to `most` separators, or runs of white space. `from_end`: at the last ones, in reverse order.
fn parts<'a>(text: &'a str, separator: Option<&str>, most: usize, from_end: bool) -> Vec<&'a str> {
    if let Some(separator) = separator {
        let count = most.saturating_add(1);
        return if from_end {
            text.rsplitn(count, separator).collect()
        } else {
            text.splitn(count, separator).collect()
        };
    }
    let side = if from_end { "rstrip" } else { "lstrip" };
    let (mut parts, mut rest) = (Vec::new(), strip(text, side, None));
    while !rest.is_empty() {
        let (part, other) = match (from_end, parts.len() < most) {
            (_, false) => (rest, ""),
            (false, true) => rest.split_at(rest.find(is_space).unwrap_or(rest.len())),
            (true, true) => {
                let (other, part) = rest.split_at(rest.trim_end_matches(|other| !is_space(other)).len());
                (part, other)
            }
        };
        parts.push(part);
        rest = strip(other, side, None);
    }
    parts
}

fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let (line, end) = rest.split_at(rest.find(LINE_ENDS).unwrap_or(rest.len()));
        let length = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        let (with_end, next) = rest.split_at(line.len() + length);
        lines.push(if keep_ends { with_end } else { line });
        rest = next;
    }
    lines
}

/// Python's `str.title`: letters after other characters than letters are capitals.
fn title(text: &str) -> String {
    let (mut out, mut in_word) = (String::with_capacity(text.len()), false);
    for character in text.chars() {
        if in_word {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        in_word = character.is_lowercase() || character.is_uppercase();
    }
    out
}

/// Jinja's filter `trim`.
pub(super) fn trim(value: &Value, characters: Option<&str>) -> Result<String, Error> {
    Ok(strip(&text(value)?, "strip", characters).to_owned())
}

/// Jinja's filter `escape`, with the entities of Python's `markupsafe`.
pub(super) fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let (text, mut out) = (text(value)?, String::new());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    Ok(Value::from_safe_string(out))
}

/// Jinja's filter `default`.
pub(super) fn default(value: Value, positional: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let mut positional = positional.0.into_iter();
    let other = argument(&mut positional, &options, "default_value", "".into())?;
    let boolean = argument(&mut positional, &options, "boolean", false.into())?;
    if positional.next().is_some() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    options.assert_all_used()?;
    Ok(if value.is_undefined() || boolean.is_true() && !value.is_true() { other } else { value })
}

/// Jinja's filter `int`.
pub(super) fn int(
    state: &State<'_, '_>,
    value: &Value,
    positional: Rest<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let mut positional = positional.0.into_iter();
    let default = argument(&mut positional, &options, "default", 0.into())?;
    let base = argument(&mut positional, &options, "base", 10.into())?;
    if is_integer(value) {
        return Ok(value.clone());
    }
    filters::int(state, &readable(value)?, Some(default), Some(base.try_into()?), options)
}

/// Jinja's filter `float`.
pub(super) fn float(
    state: &State<'_, '_>,
    value: &Value,
    positional: Rest<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let default = argument(&mut positional.0.into_iter(), &options, "default", 0.0.into())?;
    if is_float(value) {
        return Ok(value.clone());
    }
    filters::float(state, &readable(value)?, Some(default), options)
}

/// Returns a value without white space around it. Numbers that `minijinja` cannot read, such as `1_000`, are refused:
/// it would take the default.
fn readable(value: &Value) -> Result<Value, Error> {
    let is_unread = |character: char| character == '_' || !character.is_ascii() && character.is_numeric();
    let text = value.as_str().map(|text| strip(text, "strip", None));
    if text.map_or(value.downcast_object_ref::<Number>().is_some(), |text| text.contains(is_unread)) {
        let reason = format!("conversion of {} to a number is not supported", self::text(value)?);
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    Ok(text.map_or_else(|| value.clone(), Value::from))
}

/// Returns the next positional argument, or that of this name. `None` is a value, unlike for other optional arguments.
fn argument(
    positional: &mut impl Iterator<Item = Value>,
    options: &Kwargs,
    name: &str,
    default: Value,
) -> Result<Value, Error> {
    match positional.next() {
        Some(value) => Ok(value),
        None if options.has(name) => options.get(name),
        None => Ok(default),
    }
}

/// Jinja's filter `indent`.
pub(super) fn indent(
    text: &str,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.or(options.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let spaces = match width.as_str() {
        Some(spaces) => spaces.to_owned(),
        None => " ".repeat(usize::try_from(width)?),
    };
    let text = text.to_owned() + "\n";
    let mut out = if first { spaces.clone() } else { String::new() };
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
            out.push_str(if blank || !line.is_empty() { &spaces } else { "" });
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Python's `str`, and Jinja's filter `string`.
pub(super) fn text(value: &Value) -> Result<Cow<'_, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(text.into()),
        None if value.is_undefined() => Ok("".into()),
        None => {
            let mut text = String::new();
            repr(value, &mut text)?;
            Ok(text.into())
        }
    }
}

/// Jinja's test `sequence`: what has a length and elements, mappings included.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Undefined | String | Seq | Iterable | Map)
}

/// Jinja's test `integer`.
pub(super) fn is_integer(value: &Value) -> bool {
    value.is_integer() || value.downcast_object_ref::<Number>().is_some_and(|number| number.is_integer)
}

/// Jinja's test `number`.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Bool | ValueKind::Number)
        || value.downcast_object_ref::<Number>().is_some()
}

/// Jinja's test `float`.
pub(super) fn is_float(value: &Value) -> bool {
    value.kind() != ValueKind::Bool && is_number(value) && !is_integer(value)
}

/// Prints a value as Python does: `True`, `None`, `1e+20`, `{'key': ['text']}`.
pub(super) fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool
        | ValueKind::None
        | ValueKind::Number
        | ValueKind::Map
        | ValueKind::Seq
        | ValueKind::Iterable => out.write_str(&text(value)?).map_err(Error::from),
        _ => escape_formatter(out, state, value),
    }
}

/// Python's `repr` of a value of JSON.
fn repr(value: &Value, out: &mut String) -> Result<(), Error> {
    let mut first = true;
    let mut separate = |out: &mut String| out.push_str(if std::mem::take(&mut first) { "" } else { ", " });
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => {
            let number = f64::try_from(value.clone())?;
            out.push_str(&json::float(number));
        }
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Map => {
            out.push('{');
            for key in value.try_iter()? {
                separate(out);
                repr(&key, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.is_tuple();
            out.push(if is_tuple { '(' } else { '[' });
            for item in value.try_iter()? {
                separate(out);
                repr(&item, out)?;
            }
            out.push_str(match (is_tuple, value.len()) {
                (true, Some(1)) => ",)",
                (true, _) => ")",
                _ => "]",
            });
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if character == quote => out.extend(['\\', quote]),
            _ if is_printable(character) => out.push(character),
            _ => {
                let _ = match u32::from(character) {
                    code @ ..=0xff => write!(out, "\\x{code:02x}"),
                    code @ ..=0xffff => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Returns whether Python's `repr` writes a character as it is.
fn is_printable(character: char) -> bool {
    if character.is_ascii() {
        return !character.is_ascii_control();
    }
    // In front of a text, `escape_debug` also escapes marks, which are printable.
    ["a", character.encode_utf8(&mut [0; 4])].concat().escape_debug().nth(1) == Some(character)
}

/// Python's `now.strftime(format)` of a time without a time zone, as `datetime.now()` is.
pub(super) fn strftime(format: &str, now: NaiveDateTime) -> Result<String, Error> {
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
    use minijinja::{Environment, context};

    use super::super::json::parse_json;
    use super::*;

    fn rendered(template: &str, value: &str) -> String {
        let mut environment = Environment::new();
        environment.set_formatter(print);
        environment.set_unknown_method_callback(method);
        environment.add_filter("trim", trim);
        environment.add_filter("indent", indent);
        environment.add_filter("default", default);
        environment.add_filter("int", int);
        environment.add_filter("float", float);
        environment.add_filter("string", |value: &Value| text(value).map(Cow::into_owned));
        environment.render_str(template, context! { value => parse_json(value).unwrap() }).unwrap()
    }

    #[test]
    fn values_are_printed_as_by_python() {
        let value = r#"{"a": [true, null, "it's", "'\"\n\\", 0.1, 100000000000000000.0, 7]}"#;
        assert_eq!(
            rendered("{{ value }} {{ value.a[0] }} {{ none }} {{ 'é' }}", value),
            r#"{'a': [True, None, "it's", '\'"\n\\', 0.1, 1e+17, 7]} True None é"#
        );
        let texts =
            "['\u{a0}\u{200b}\u{ad}\u{7f}\u{85}', '\u{2028}\u{e000}\u{e0001}\u{378}', 'e\u{301}\u{1f642}']";
        let texts = &texts.replace('\'', "\"");
        let python = r"['\xa0\u200b\xad\x7f\x85', '\u2028\ue000\U000e0001\u0378', 'e".to_owned()
            + "\u{301}\u{1f642}']";
        assert_eq!(rendered("{{ value }}{{ value | string }}", texts), python.repeat(2));
        assert_eq!(
            rendered("{{ value[1:] }} {{ (value[0], 1e-7) }} {{ (1,) }}", r#"["\u007f", "a"]"#),
            r"['a'] ('\x7f', 1e-07) (1,)"
        );
        assert_eq!(
            rendered("{{ 1e16 | string }} {{ [1e-7] | string }} {{ x | string }}", "1"),
            "1e+16 [1e-07] "
        );
    }

    #[test]
    fn texts_are_cut_as_by_python() {
        let value =
            "\" \u{1c}a\u{1f} b\u{a0}c\r\n\"".replace("\u{1c}", "\\u001c").replace("\u{1f}", "\\u001f");
        let value = value.replace("\r\n", "\\r\\n");
        for (template, expected) in [
            ("value.strip()", "'a\\x1f b\\xa0c'"),
            ("value | trim", "'a\\x1f b\\xa0c'"),
            ("value.rstrip()", "' \\x1ca\\x1f b\\xa0c'"),
            ("value.lstrip()", "'a\\x1f b\\xa0c\\r\\n'"),
            ("'xaxb'.strip('xb')", "'a'"),
            ("value.split()", "'a', 'b', 'c'"),
            ("value.split(none, 1)", "'a', 'b\\xa0c\\r\\n'"),
            ("value.rsplit(maxsplit=1)", "' \\x1ca\\x1f b', 'c'"),
            ("'a-b-c'.split('-', maxsplit=1)", "'a', 'b-c'"),
            ("'a-b-c'.rsplit('-', 1)", "'a-b', 'c'"),
            ("'a-b-c'.rsplit(sep='-')", "'a', 'b', 'c'"),
            ("''.split()", ""),
            ("''.split('-')", "''"),
            ("'a\rb\r\n\nc\u{2028}\x1dd\n'.splitlines()", "'a', 'b', '', 'c', '', 'd'"),
            ("'a\rb\r\nc'.splitlines(keepends=true)", "'a\\r', 'b\\r\\n', 'c'"),
            ("'\x1c'.isspace()", "True"),
            ("'tool_result of_É1a'.title()", "'Tool_Result Of_É1A'"),
            (
                "'7\u{663}'.isdigit(), '7\u{b2}'.isdigit(), '\u{bd}'.isdigit(), ''.isdigit()",
                "True, True, False, False",
            ),
            ("'7\u{663}'.isdecimal(), '7\u{b2}'.isdecimal(), '\u{bd}'.isnumeric()", "True, False, True"),
            (
                "' 7 ' | int, '7.9' | int, 'x' | int, [] | int, 'x' | int(3), 'ff' | int(base=16)",
                "7, 7, 0, 0, 3, 255",
            ),
            ("'x' | float, ' 7 ' | float, 'x' | float(default=none), none | int", "0.0, 7.0, None, 0"),
            ("'a=b'.partition('=')", "'a', '=', 'b'"),
            ("x | default, x | default('a'), x | default(default_value='b')", "'', 'a', 'b'"),
            (
                "'' | default('a'), '' | default('a', true), false | default('a', boolean=true)",
                "'', 'a', 'a'",
            ),
            ("none | default('a'), 'b' | default('a', boolean=true)", "None, 'b'"),
            (
                "x | default(none), x | default(default_value=none), '' | default(none, true)",
                "None, None, None",
            ),
            ("'-'.join(value.split())", "'a-b-c'"),
            ("'a\n\nb\n' | indent(2)", "'a\\n\\n  b\\n'"),
            ("'a\n\nb' | indent('> ', true, blank=true)", "'> a\\n> \\n> b'"),
            ("'' | indent(first=true)", "'    '"),
        ] {
            let list = rendered(&format!("{{{{ [{template}] }}}}"), &value);
            assert_eq!(list.trim_matches(['[', ']', '(', ')']), expected, "{template}");
        }
    }

    #[test]
    fn values_that_are_not_strings_are_rejected_where_python_does() {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(method);
        environment.add_filter("indent", indent);
        environment.add_filter("default", default);
        environment.add_filter("int", int);
        let value = parse_json("1e20").unwrap();
        for template in [
            "x | indent",
            "3 | indent",
            "','.join(['a', 1])",
            "','.join([none])",
            "x | default(1, 2, 3)",
            "'1_000' | int",
            "value | int",
        ] {
            let context = context! { value => value.clone() };
            environment.render_str(&format!("{{{{ {template} }}}}"), context).unwrap_err();
        }
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
