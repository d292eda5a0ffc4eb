//! Functions of Python that templates expect: `json.dumps`, `strftime`, and the way values are printed.

use std::fmt::Write as _;
use std::io;

use chrono::NaiveDateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

/// Options of `tojson`, as `transformers` defines it.
struct JsonOptions {
    indent: Option<usize>,
    separators: (String, String),
    ascii: bool,
}

/// Python's `json.dumps(value, ensure_ascii=False)`, which writes a space after `:` and `,`.
pub(super) fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Value> = options.get("separators")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    // Unknown options would otherwise be ignored silently.
    options.assert_all_used()?;
    if value.is_undefined() {
        // A template that writes a field without checking for it would otherwise write `null`.
        return Err(Error::new(ErrorKind::UndefinedError, "`tojson` of a value that the row does not have"));
    }
    let separators = match separators.filter(|value| !value.is_none()) {
        Some(pair) => {
            let part = |index| {
                Ok::<_, Error>(pair.get_item_by_index(index)?.to_str().unwrap_or_default().to_string())
            };
            (part(0)?, part(1)?)
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let value = if sort == Some(true) { sorted(&value)? } else { value };
    let mut out = Vec::new();
    let spaces = " ".repeat(indent.unwrap_or(0));
    let options = JsonOptions { indent, separators, ascii: ascii == Some(true) };
    let formatter = Dumps { options: &options, pretty: PrettyFormatter::with_indent(spaces.as_bytes()) };
    let failed = |error: String| Error::new(ErrorKind::BadSerialization, error);
    value
        .serialize(&mut Serializer::with_formatter(&mut out, formatter))
        .map_err(|error| failed(error.to_string()))?;
    String::from_utf8(out).map_err(|error| failed(error.to_string()))
}

/// Methods of strings that `minijinja` and its own emulation of Python lack.
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
            Ok([before, found, after].map(Value::from).into_iter().collect())
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if after.len() == text.len() { "" } else { separator };
            Ok([before, found, after].map(Value::from).into_iter().collect())
        }
        "rsplit" => {
            let (separator, most): (&str, Option<usize>) = from_args(arguments)?;
            let mut parts: Vec<&str> = match most {
                Some(most) => text.rsplitn(most.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

/// Returns the value with the keys of all maps in order.
fn sorted(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()? {
                pairs.push((key.clone(), sorted(&value.get_item(&key)?)?));
            }
            pairs.sort_by(|(one, _), (other, _)| one.cmp(other));
            Ok(Value::from_pairs(pairs))
        }
        ValueKind::Seq => {
            Ok(Value::from(value.try_iter()?.map(|item| sorted(&item)).collect::<Result<Vec<_>, _>>()?))
        }
        _ => Ok(value.clone()),
    }
}

struct Dumps<'a> {
    options: &'a JsonOptions,
    /// Writes line feeds and indents.
    pretty: PrettyFormatter<'a>,
}

impl Dumps<'_> {
    /// Writes what stands before an element or a key.
    fn separate<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if self.options.indent.is_none() {
            return if first { Ok(()) } else { out.write_all(self.options.separators.0.as_bytes()) };
        }
        if !first {
            out.write_all(self.options.separators.0.as_bytes())?;
        }
        // The first element of a list gets no comma.
        self.pretty.begin_array_value(out, true)
    }
}

impl Formatter for Dumps<'_> {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, out: &mut W, text: &str) -> io::Result<()> {
        if !self.options.ascii {
            return out.write_all(text.as_bytes());
        }
        for unit in text.encode_utf16() {
            match u8::try_from(unit).ok().filter(u8::is_ascii) {
                Some(byte) => out.write_all(&[byte])?,
                None => write!(out, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.pretty.begin_array(out)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        if self.options.indent.is_some() { self.pretty.end_array(out) } else { out.write_all(b"]") }
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.separate(out, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.pretty.end_array_value(out)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.pretty.begin_object(out)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        if self.options.indent.is_some() { self.pretty.end_object(out) } else { out.write_all(b"}") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.separate(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.options.separators.1.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.pretty.end_object_value(out)
    }
}

/// Python's `repr` of a floating-point number.
fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Prints a value as Python does: `True`, `None`, `1e+20`, `{'key': ['text']}`.
pub(super) fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool | ValueKind::None | ValueKind::Number | ValueKind::Map | ValueKind::Seq => {
            let mut text = String::new();
            repr(value, &mut text)?;
            out.write_str(&text).map_err(Error::from)
        }
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
            out.push_str(&float(number));
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
        ValueKind::Seq if !value.is_tuple() => {
            out.push('[');
            for item in value.try_iter()? {
                separate(out);
                repr(&item, out)?;
            }
            out.push(']');
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
            control if control.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(control));
            }
            other => {
                if other == quote {
                    out.push('\\');
                }
                out.push(other);
            }
        }
    }
    out.push(quote);
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
    use minijinja::Environment;

    use super::*;

    fn rendered(template: &str, value: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", to_json);
        environment.set_formatter(print);
        let value: Value = serde_json::from_str(value).unwrap();
        environment.render_str(template, minijinja::context! { value }).unwrap()
    }

    #[test]
    fn values_are_written_as_by_json_dumps() {
        let value = r#"{"b": [1, 2.0, 1e22, 1e-7, {}], "a": {"c": "é\u0001\n\"🙂", "d": null, "e": []}}"#;
        let json = |options: &str| rendered(&format!("{{{{ value | tojson({options}) }}}}"), value);
        let expected =
            r#"{"b": [1, 2.0, 1e+22, 1e-07, {}], "a": {"c": "é\u0001\n\"🙂", "d": null, "e": []}}"#;
        assert_eq!(json(""), expected);
        assert_eq!(
            json("separators=(',', ':'), sort_keys=true, ensure_ascii=true"),
            r#"{"a":{"c":"\u00e9\u0001\n\"\ud83d\ude42","d":null,"e":[]},"b":[1,2.0,1e+22,1e-07,{}]}"#
        );
        let lines = "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}";
        assert_eq!(rendered("{{ value | tojson(indent=2) }}", r#"{"a": [1, {}], "b": []}"#), lines);
    }

    #[test]
    fn values_are_printed_as_by_python() {
        let value = r#"{"a": [true, null, "it's", "'\"\n\\", 0.1, 100000000000000000.0, 7]}"#;
        assert_eq!(
            rendered("{{ value }} {{ value.a[0] }} {{ none }} {{ 'é' }}", value),
            r#"{'a': [True, None, "it's", '\'"\n\\', 0.1, 1e+17, 7]} True None é"#
        );
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
