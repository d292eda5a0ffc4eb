//! JSON as Python's `json` module reads and writes it.
//!
//! `minijinja` has integers of up to 128 bits, and prints floating-point numbers without an exponent. Numbers that it
//! would change are values of their own, which print as in Python; templates cannot calculate with them.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use minijinja::value::{Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// Floating-point numbers that are printed without an exponent.
const PLAIN_FLOATS: std::ops::Range<f64> = 1e-4..1e16;
/// Integers below this number fit into 64 bits.
const FIRST_LONG_INTEGER: f64 = 9_223_372_036_854_775_808.0;

/// A number that `minijinja` would change.
pub(super) struct Number {
    text: String,
    pub(super) is_integer: bool,
}

impl fmt::Debug for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Object for Number {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// Returns a field that has a value.
pub(super) fn field(value: &Value, name: &str) -> Option<Value> {
    value.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

/// Parses JSON. Equal keys of a row or of a message are refused; of those inside of values, the last one counts.
pub(crate) fn parse_json(text: &str) -> serde_json::Result<Value> {
    let read = |numbers: &Numbers<'_>| {
        let mut json = serde_json::Deserializer::from_str(text);
        let value = numbers.deserialize(&mut json)?;
        json.end().map(|()| value)
    };
    let numbers = Numbers::default();
    let value = read(&numbers)?;
    if !numbers.rounded.get() {
        return Ok(value);
    }
    read(&Numbers { literals: literals(text), ..Numbers::default() })
}

/// Place of a value in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Row,
    Field,
    /// An element of a list that is a field, such as a message.
    Element,
    Deeper,
}

/// Reads values. `serde_json` reads integers of more than 64 bits as floating-point numbers.
#[derive(Default)]
struct Numbers<'a> {
    /// All numbers of the text, in order; empty in the first pass, which finds out whether they are needed.
    literals: Vec<&'a str>,
    /// Number of literals before the next number.
    next: Cell<usize>,
    /// Place of the next value.
    place: Cell<Place>,
    rounded: Cell<bool>,
}

impl Numbers<'_> {
    fn float(&self, value: f64) -> Value {
        let literal = self.literals.get(self.next.replace(self.next.get() + 1));
        match literal.filter(|literal| !literal.contains(['.', 'e', 'E'])) {
            Some(integer) => self::integer(integer),
            None => {
                let is_negative_zero = value == 0.0 && value.is_sign_negative();
                if self.literals.is_empty() && (is_negative_zero || value.abs() >= FIRST_LONG_INTEGER) {
                    self.rounded.set(true);
                }
                if value == 0.0 || PLAIN_FLOATS.contains(&value.abs()) {
                    return Value::from(value);
                }
                Value::from_object(Number { text: float(value), is_integer: false })
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for &Numbers<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &Numbers<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        self.next.set(self.next.get() + 1);
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        self.next.set(self.next.get() + 1);
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(self.float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        let place = self.place.get();
        self.place.set(if place == Place::Field { Place::Element } else { Place::Deeper });
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        self.place.set(place);
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let (mut pairs, mut keys) = (Vec::new(), HashSet::new());
        let place = self.place.get();
        self.place.set(if place == Place::Row { Place::Field } else { Place::Deeper });
        while let Some((key, value)) = map.next_entry_seed(self, self)? {
            if matches!(place, Place::Row | Place::Element) && !keys.insert(key.clone()) {
                let key = key.to_string();
                return Err(A::Error::custom(format!("the key `{}` is there twice", key.escape_debug())));
            }
            pairs.push((key, value));
        }
        self.place.set(place);
        Ok(Value::from_pairs(pairs))
    }
}

/// Returns the numbers in a text of JSON.
fn literals(json: &str) -> Vec<&str> {
    let (mut found, mut at, bytes) = (Vec::new(), 0, json.as_bytes());
    while let Some(byte) = bytes.get(at) {
        let start = at;
        at += 1;
        match byte {
            b'"' => {
                while let Some(byte) = bytes.get(at).filter(|byte| **byte != b'"') {
                    at += if *byte == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
                at += bytes[at..].iter().take_while(|byte| is_part(byte)).count();
                found.push(&json[start..at]);
            }
            _ => {}
        }
    }
    found
}

fn integer(literal: &str) -> Value {
    match (literal.parse::<i128>(), literal.parse::<u128>()) {
        (Ok(value), _) => Value::from(value),
        (_, Ok(value)) => Value::from(value),
        _ => Value::from_object(Number { text: literal.into(), is_integer: true }),
    }
}

/// Options of `tojson`, as `transformers` defines it.
struct Dump {
    /// White space of one level; `None` writes a single line.
    indent: Option<String>,
    separators: [String; 2],
    ascii: bool,
    sort: bool,
}

/// Python's `json.dumps(value, ensure_ascii=False)`, which writes a space after `:` and `,`.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(i64::try_from(indent)?).unwrap_or(0)),
        }),
        None => None,
    };
    let separators = match options.get::<Option<Value>>("separators")?.filter(|pair| !pair.is_none()) {
        Some(pair) => {
            let part = |index| {
                Ok::<_, Error>(pair.get_item_by_index(index)?.to_str().unwrap_or_default().to_string())
            };
            [part(0)?, part(1)?]
        }
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(String::from),
    };
    let ascii = options.get::<Option<bool>>("ensure_ascii")? == Some(true);
    let sort = options.get::<Option<bool>>("sort_keys")? == Some(true);
    // Unknown options would otherwise be ignored silently.
    options.assert_all_used()?;
    let mut out = String::new();
    Dump { indent, separators, ascii, sort }.value(value, 0, &mut out)?;
    Ok(out)
}

impl Dump {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let object = value.as_object();
                let mut pairs: Vec<(Value, Value)> =
                    object.and_then(|object| object.try_iter_pairs()).into_iter().flatten().collect();
                if self.sort {
                    pairs.sort_by(|(one, _), (other, _)| one.cmp(other));
                }
                let write = |(key, value): &(Value, Value), out: &mut String| {
                    match key.as_str() {
                        Some(key) => self.text(key, out),
                        None => self.text(&scalar(key)?, out),
                    }
                    out.push_str(&self.separators[1]);
                    self.value(value, depth + 1, out)
                };
                self.items(['{', '}'], &pairs, depth, out, write)?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                let write = |item: &Value, out: &mut String| self.value(item, depth + 1, out);
                self.items(['[', ']'], &items, depth, out, write)?;
            }
            _ => out.push_str(&scalar(value)?),
        }
        Ok(())
    }

    fn items<T>(
        &self,
        [open, close]: [char; 2],
        items: &[T],
        depth: usize,
        out: &mut String,
        write: impl Fn(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let begin_line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.separators[0]);
            }
            begin_line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            begin_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn text(&self, text: &str, out: &mut String) {
        let is_escaped = |character: char| {
            matches!(character, '"' | '\\' | '\0'..='\x1f') || self.ascii && !(' '..='~').contains(&character)
        };
        let mut rest = text;
        out.push('"');
        while let Some((at, character)) = rest.char_indices().find(|(_, character)| is_escaped(*character)) {
            out.push_str(&rest[..at]);
            rest = &rest[at + character.len_utf8()..];
            match character {
                '"' | '\\' => out.extend(['\\', character]),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                _ => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
            }
        }
        out.push_str(rest);
        out.push('"');
    }
}

/// Returns a number, a truth value or `null`.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(value.is_true().to_string()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => Ok(float(f64::try_from(value.clone())?)),
        ValueKind::Undefined => {
            // A template that writes a field without checking for it would otherwise write `null`.
            Err(Error::new(ErrorKind::UndefinedError, "`tojson` of a value that the row does not have"))
        }
        _ if value.downcast_object_ref::<Number>().is_some() => Ok(value.to_string()),
        kind => Err(Error::new(ErrorKind::BadSerialization, format!("`tojson` of a {kind}"))),
    }
}

/// Python's `repr` of a floating-point number.
pub(super) fn float(value: f64) -> String {
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

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    use super::*;

    fn rendered(template: &str, value: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", to_json);
        environment.render_str(template, context! { value => parse_json(value).unwrap() }).unwrap()
    }

    #[test]
    fn values_are_written_as_by_json_dumps() {
        let value =
            r#"{"b": [1, 2.0, 1e22, 1e-7, {}], "a": {"c": "é\u0001\b\n\"🙂\u007f", "d": null, "e": []}}"#;
        let json = |options: &str| rendered(&format!("{{{{ value | tojson({options}) }}}}"), value);
        let expected =
            "{'b': [1, 2.0, 1e+22, 1e-07, {}], 'a': {'c': 'é\\u0001\\b\\n\\\"🙂\x7f', 'd': null, 'e': []}}";
        let expected = expected.replace('\'', "\"");
        assert_eq!(json(""), expected);
        assert_eq!(
            json("separators=(',', ':'), sort_keys=true, ensure_ascii=true"),
            r#"{"a":{"c":"\u00e9\u0001\b\n\"\ud83d\ude42\u007f","d":null,"e":[]},"b":[1,2.0,1e+22,1e-07,{}]}"#
        );
        let lines = "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}";
        let small = r#"{"a": [1, {}], "b": []}"#;
        assert_eq!(rendered("{{ value | tojson(indent=2) }}", small), lines);
        assert_eq!(rendered("{{ value | tojson(indent='\t') }}", small), lines.replace("  ", "\t"));
        let keys = "{{ {1: 2, none: 3, 'a': (true, value[1:])} | tojson }}";
        assert_eq!(rendered(keys, "[1, 2]"), r#"{"1": 2, "null": 3, "a": [true, [2]]}"#);
    }

    #[test]
    fn numbers_are_those_of_python() {
        let many = format!("1{}", "0".repeat(50));
        for (json, python) in [
            ("18446744073709551615", "18446744073709551615"),
            ("18446744073709551616", "18446744073709551616"),
            ("-9223372036854775809", "-9223372036854775809"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("12345678901234567890.0", "1.2345678901234567e+19"),
            ("1e16", "1e+16"),
            ("9999999999999998.0", "9999999999999998.0"),
            ("1e-5", "1e-05"),
            ("0.0001", "0.0001"),
            (&many, &many),
        ] {
            // The numbers before it are read twice, and strings hold none.
            let list = format!(r#"[1, -2, {{"a\"3": "4\\", "b": 5e0}}, {json}, 1.5]"#);
            let template = "{{ value[3] | tojson }} {{ value[3] }}{{ value[4] ~ value[2].b ~ value[3] }} \
                            {{ [value[3]] }}";
            assert_eq!(rendered(template, &list), format!("{python} {python}1.55.0{python} [{python}]"));
        }
        let sum = "{{ value + 1 }} {{ value > 1 }}";
        assert_eq!(rendered(sum, "18446744073709551616"), "18446744073709551617 True");
    }

    #[test]
    fn equal_keys_are_refused_in_rows_and_messages_only() {
        let inner = r#"{"a": {"b": 1, "c": 2, "b": 3}}"#;
        assert_eq!(rendered("{{ value.a }}", inner), "{'b': 3, 'c': 2}");
        assert_eq!(rendered("{{ value[0].a }}", &format!("[{inner}]")), "{'b': 3, 'c': 2}");
        assert_eq!(rendered("{{ value.m[0].a }}", &format!(r#"{{"m": [{inner}]}}"#)), "{'b': 3, 'c': 2}");
        for twice in [r#"{"a": 1, "b": 2, "a": 3}"#, r#"{"a": [{"b": {}}, {"b": 1, "b": 1}]}"#] {
            let error = parse_json(twice).unwrap_err().to_string();
            assert!(error.contains("` is there twice"), "{twice}: {error}");
        }
        parse_json(r#"[{"a": [{"b": 1}, {"b": 1}]}, {"a": 1, "a": 2}]"#).unwrap();
    }
}
