//! Rewrites the source of a template for `minijinja`. Pure.
//!
//! `generation` blocks become calls, as in `transformers`, macros get all variables that Jinja passes on to them, and
//! loops check what they iterate over.

use std::collections::BTreeSet;
use std::ops::Range;

/// Name of the function that takes the place of `generation` blocks.
pub(super) const GENERATION: &str = "xlaunch_generation";
/// Name of the function that checks the sequences of loops: `minijinja` has loops over `none`, which Jinja rejects.
pub(super) const ITERABLE: &str = "xlaunch_iterable";

/// Methods of Python's dictionaries. `object.items` is the method there, and the key in `minijinja`.
pub(super) const METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// Words of the template language that are not variables.
const CONSTANTS_AND_OPERATORS: [&str; 13] =
    ["true", "True", "false", "False", "none", "None", "and", "or", "not", "in", "is", "if", "else"];

/// Returns the source for `minijinja`, and whether it has `generation` blocks.
pub(super) fn rewrite(template: &str) -> (String, bool) {
    let tags = tags(template);
    // `minijinja` passes only variables that it finds in the body of a macro or a call on to it. It overlooks
    // namespaces that are only assigned to, everything in front of a slice, as in `text[1:]` and
    // `messages[loop.index:]`, and variables that the body replaces, as in `{% set text = text + 'a' %}`.
    let names: BTreeSet<&str> =
        tags.iter().flat_map(|tag| assigned(word(&template[tag.clone()]))).chain(["loop"]).collect();
    let read: String = names.iter().map(|name| format!("{{{{ {name} }}}}")).collect();
    // White space after a body's first tag is treated as that tag says, that within it as after any tag.
    let body = |start: &str, end: &str| format!("{start} %}}{{% if false %}}{read}{{% endif {end}");
    let mut out = String::with_capacity(template.len());
    let (mut copied, mut found) = (0, false);
    for place in tags {
        let tag = &template[place.clone()];
        out.push_str(&template[copied..place.start]);
        copied = place.end;
        let (start, end) = tag.split_at(tag.trim_end_matches(['%', '}', '-', '+']).len());
        match split_word(word(tag)).0 {
            "generation" => {
                out.push_str(&body(&start.replacen("generation", &format!("call {GENERATION}()"), 1), end));
                found = true;
            }
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endcall", 1)),
            "macro" | "call" => out.push_str(&body(start, end)),
            "for" => match sequence(tag) {
                Some(Range { start, end }) => {
                    out.extend([&tag[..start], " ", ITERABLE, "(", &tag[start..end], ") ", &tag[end..]]);
                }
                None => out.push_str(tag),
            },
            // Jinja keeps a line feed after this tag, unless the tag says otherwise.
            "raw" if template[copied..].starts_with('\n') && !tag.ends_with("-%}") => {
                out.extend([tag, "\n"]);
            }
            _ => out.push_str(tag),
        }
    }
    (out + &template[copied..], found)
}

/// Returns the name and the line of a method that is not called, as in `tool.items`. Attributes of a namespace are
/// not methods.
pub(super) fn uncalled_method(template: &str) -> Option<(&str, usize)> {
    let places = code(template);
    let namespace = |place: &Range<usize>| {
        let (name, value) = word(&template[place.clone()]).strip_prefix("set ")?.split_once('=')?;
        value.trim_start().starts_with("namespace").then(|| name.trim())
    };
    let namespaces: BTreeSet<&str> = places.iter().filter_map(namespace).collect();
    places.into_iter().find_map(|place| {
        let code = &template[place.clone()];
        let (at, name) =
            outside_of_strings(code).filter(|(_, character)| *character == '.').find_map(|(at, _)| {
                let (name, rest) = split_word(&code[at + 1..]);
                let object = code[..at].rsplit(|character| !is_of_word(character) && character != '.').next();
                let is_method = METHODS.contains(&name) && !rest.trim_start().starts_with('(');
                (is_method && !namespaces.contains(object?)).then_some((at, name))
            })?;
        Some((name, template[..place.start + at].matches('\n').count() + 1))
    })
}

/// Returns the places of block tags, in order.
fn tags(template: &str) -> Vec<Range<usize>> {
    let is_tag = |place: &Range<usize>| template[place.clone()].starts_with("{%");
    code(template).into_iter().filter(is_tag).collect()
}

/// Returns the places of block tags and expressions, in order, outside of comments and `raw` blocks.
pub(super) fn code(template: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = template[at..].find('{').map(|offset| at + offset) {
        let rest = &template[start..];
        at = start
            + match rest.as_bytes().get(1) {
                Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
                Some(b'{') => code_len(rest, "}}"),
                Some(b'%') => code_len(rest, "%}"),
                _ => 1,
            };
        let code = &template[start..at];
        if code.starts_with("{{") {
            found.push(start..at);
        } else if code.starts_with("{%") && code.ends_with("%}") {
            found.push(start..at);
            if word(code) == "raw" {
                at = template[at..].find("endraw").map_or(template.len(), |end| at + end);
            }
        }
    }
    found
}

/// Returns the length of an expression or a tag: up to `close`, outside of strings.
fn code_len(code: &str, close: &str) -> usize {
    let end = outside_of_strings(code).find(|(at, _)| code[*at..].starts_with(close));
    end.map_or(code.len(), |(at, _)| at + close.len())
}

/// Returns the characters of an expression or a tag that are not part of a string.
fn outside_of_strings(code: &str) -> impl Iterator<Item = (usize, char)> {
    let mut quote = None;
    let mut characters = code.char_indices();
    std::iter::from_fn(move || {
        loop {
            let (at, character) = characters.next()?;
            match quote {
                Some(_) if character == '\\' => drop(characters.next()),
                Some(open) if character == open => quote = None,
                Some(_) => {}
                None if ['"', '\''].contains(&character) => quote = Some(character),
                None => return Some((at, character)),
            }
        }
    })
}

/// Returns the place of what a `for` tag iterates over: from `in` up to a condition, `recursive`, or the end.
fn sequence(tag: &str) -> Option<Range<usize>> {
    const OPEN: usize = "{%".len();
    let tag = tag.strip_suffix("%}")?.trim_end_matches(['-', '+']);
    let (mut start, mut depth) = (None, 0_usize);
    for (at, character) in outside_of_strings(&tag[OPEN..]).map(|(at, character)| (at + OPEN, character)) {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ if depth > 0 || tag[..at].ends_with(is_of_word) => {}
            _ => match (split_word(&tag[at..]).0, start) {
                ("in", None) => start = Some(at + "in".len()),
                ("if" | "recursive", Some(start)) => return Some(start..at),
                _ => {}
            },
        }
    }
    Some(start?..tag.len())
}

/// Returns what a tag contains.
fn word(tag: &str) -> &str {
    tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim()
}

/// Splits a text after the name that it begins with.
fn split_word(text: &str) -> (&str, &str) {
    text.split_at(text.find(|character| !is_of_word(character)).unwrap_or(text.len()))
}

fn is_of_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

/// Returns the variables that a tag gives values to, and perhaps others.
fn assigned(tag: &str) -> impl Iterator<Item = &str> {
    let (kind, rest) = split_word(tag);
    let targets = match kind {
        "set" => rest.split_once('=').map_or(rest, |(targets, _)| targets),
        "for" => rest.split_once(" in ").map_or("", |(targets, _)| targets),
        "macro" | "with" => rest,
        "call" if rest.starts_with('(') => rest.split_once(')').map_or("", |(targets, _)| targets),
        _ => "",
    };
    let names = targets.split([',', '(', ')']).map(|target| split_word(target.trim()).0);
    names.filter(|name| {
        let first = name.chars().next();
        first.is_some_and(|first| !first.is_ascii_digit()) && !CONSTANTS_AND_OPERATORS.contains(name)
    })
}
