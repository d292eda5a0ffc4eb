//! Finds Python exceptions on stderr and in the error file of torch's `record` decorator.

use std::fmt;

use serde::Deserialize;

/// Headers of the traceback of an exception, and of that of a group of them (PEP 654).
const TRACEBACK: &str = "Traceback (most recent call last)";
const GROUP_TRACEBACK: &str = "  + Exception Group Traceback (most recent call last)";

/// An uncaught exception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exception {
    /// The first line of the message, such as `ValueError: too large`.
    pub(super) line: String,
    /// The innermost frame of the user's code.
    pub(super) place: Option<Place>,
}

/// A line in the user's code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) file: String,
    pub(super) line: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}", self.file, self.line)
    }
}

/// torch's error file. In older versions of torch the message is a string.
#[derive(Deserialize)]
struct ErrorFile {
    message: Message,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Text(String),
    Full {
        message: Option<String>,
        #[serde(rename = "extraInfo")]
        extra: Option<Extra>,
    },
}

#[derive(Deserialize)]
struct Extra {
    py_callstack: Option<String>,
}

/// Returns the exception in an error file, if it can be parsed.
pub(super) fn from_error_file(file: &str) -> Option<Exception> {
    let (message, stack) = match serde_json::from_str::<ErrorFile>(file).ok()?.message {
        Message::Text(text) => (Some(text), None),
        Message::Full { message, extra } => (message, extra.and_then(|extra| extra.py_callstack)),
    };
    let lines: Vec<String> = stack.unwrap_or_default().lines().map(Into::into).collect();
    let traced = exception(&lines);
    let line = message.as_deref().and_then(|message| message.lines().find(|line| !line.trim().is_empty()));
    match (line, traced) {
        (_, Some(traced)) => Some(traced),
        (Some(line), None) => Some(Exception { line: line.trim().into(), place: None }),
        (None, None) => None,
    }
}

/// Returns the exception of the last traceback in these lines.
pub(super) fn exception(lines: &[String]) -> Option<Exception> {
    let lines: Vec<&str> = lines.iter().map(|line| without_rank(line)).collect();
    match lines.iter().rposition(|line| is_header(line)) {
        Some(begin) if lines[begin].starts_with(GROUP_TRACEBACK) => group(&lines[begin + 1..]),
        _ => traced(&lines),
    }
}

/// Returns an exception group, and the first of its exceptions, whose traceback is the next block of lines.
fn group(lines: &[&str]) -> Option<Exception> {
    let mut blocks = lines.split(|line| line.trim_start().starts_with("+-"));
    let block = |lines: &[&str]| -> Option<Exception> {
        let inner = lines.iter().map(|line| line.trim_start().strip_prefix('|').unwrap_or(line));
        traced(&inner.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>())
    };
    let group = block(blocks.next()?)?;
    let Some(first) = blocks.next().and_then(block) else { return Some(group) };
    let line = format!("{}, the first of which is {}", group.line, first.line);
    Some(Exception { line, place: first.place.or(group.place) })
}

/// Returns the exception of the last traceback that is not in a group.
fn traced(lines: &[&str]) -> Option<Exception> {
    let deepest = lines.iter().rposition(|line| frame(line).is_some())?;
    let indented = |line: &&str| line.starts_with([' ', '\t']) || line.is_empty();
    let after = &lines[deepest + 1..];
    let at = after.iter().position(|line| !indented(line))?;
    let line = after[at];
    // A warning also prints a line that looks like a frame, but no exception follows.
    let name = line.split([':', ' ']).next().unwrap_or(line);
    let known = name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '.')
        && name.rsplit('.').next().is_some_and(|class| class.starts_with(char::is_uppercase))
        && (line.len() == name.len() || line[name.len()..].starts_with(':'));
    if !known {
        return None;
    }
    let trace = lines[..=deepest].iter().rposition(|line| !indented(line)).map_or(0, |at| at + 1);
    let frames: Vec<Place> = lines[trace..=deepest].iter().filter_map(|line| frame(line)).collect();
    let place = frames.iter().rev().find(|place| is_users(&place.file)).cloned();
    Some(Exception { line: line.trim_end().into(), place })
}

/// Returns the index of the line at which the last traceback begins.
pub(super) fn last_traceback(lines: &[String]) -> Option<usize> {
    lines.iter().rposition(|line| is_header(without_rank(line)))
}

fn is_header(line: &str) -> bool {
    line.starts_with(TRACEBACK) || line.starts_with(GROUP_TRACEBACK)
}

/// Returns the lines before the messages of an abort, which are that of C++ and faulthandler's stacks. The frames of
/// these stacks look like those of a traceback.
pub(super) fn before_abort(lines: &[String]) -> &[String] {
    let begins = |line: &&String| {
        let line = without_rank(line);
        line.starts_with("terminate called ") || line.starts_with("Fatal Python error: ")
    };
    let end = lines.iter().take_while(|line| !begins(line)).count();
    &lines[..end]
}

/// Returns the innermost frame of the user's code in a crash report of faulthandler, which lists frames innermost
/// first. The frame is that of the crashed thread, which need not be listed first.
pub(super) fn fault(lines: &[String]) -> Option<Place> {
    let thread = |start| lines.iter().position(|line| line.starts_with(start) && line.ends_with("first):"));
    let begin = thread("Current thread").or_else(|| thread("Thread "))?;
    let stack = lines[begin + 1..].iter().take_while(|line| line.starts_with(' '));
    stack.filter_map(|line| frame(line)).find(|place| is_users(&place.file))
}

/// Parses a frame such as `  File "train.py", line 12, in main`.
fn frame(line: &str) -> Option<Place> {
    let (file, rest) = line.trim_start().strip_prefix("File \"")?.split_once("\", line ")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    line.starts_with(' ').then(|| Place { file: file.into(), line: rest[..digits].into() })
}

/// Returns whether the file belongs to the user: neither to Python's library nor to an installed package.
fn is_users(file: &str) -> bool {
    let installed = ["/site-packages/", "/dist-packages/", "/lib/python3"];
    !file.starts_with('<') && !installed.iter().any(|part| file.contains(part))
}

/// Removes the prefix `[rank0]: ` that torch adds to the lines of a traceback after the rendezvous.
pub(super) fn without_rank(line: &str) -> &str {
    let inner = line.strip_prefix("[rank").and_then(|rest| rest.split_once("]: "));
    match inner {
        Some((number, rest)) if number.chars().all(|c| c.is_ascii_digit()) => rest,
        _ if line.starts_with("[rank") && line.ends_with("]:") => "",
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(Into::into).collect()
    }

    fn seen(text: &str) -> Option<(String, Option<String>)> {
        let place = |place: Place| format!("{}:{}", place.file, place.line);
        exception(&lines(text)).map(|found| (found.line, found.place.map(place)))
    }

    #[test]
    fn place_is_the_innermost_frame_of_the_users_code() {
        let text = "\
step 1
Traceback (most recent call last):
  File \"/home/u/train.py\", line 7, in <module>
    main()
  File \"/home/u/model.py\", line 40, in main
    loss = f(x)
           ^^^^
  File \"/usr/lib/python3/dist-packages/torch/nn/functional.py\", line 3029, in f
    return g(x)
  [Previous line repeated 9 more times]
RuntimeError: shapes do not match:
  3 and 4
";
        let expected =
            ("RuntimeError: shapes do not match:".to_string(), Some("/home/u/model.py:40".to_string()));
        assert_eq!(seen(text), Some(expected.clone()));
        let ranked: String = text.lines().map(|line| format!("[rank12]: {line}\n")).collect();
        assert_eq!(seen(&ranked), Some(expected));
    }

    #[test]
    fn group_is_named_with_its_first_exception() {
        let text = "\
step 1
  + Exception Group Traceback (most recent call last):
  |   File \"/w/a.py\", line 6, in <module>
  |     asyncio.run(main())
  |   File \"/usr/lib/python3.11/asyncio/taskgroups.py\", line 145, in __aexit__
  |     raise me from None
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File \"/w/a.py\", line 2, in bad
    |     raise ValueError(\"one\")
    | ValueError: one
    +---------------- 2 ----------------
    | KeyError: 'two'
    +------------------------------------
";
        let group = "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)";
        let first = format!("{group}, the first of which is ValueError: one");
        assert_eq!(seen(text), Some((first.clone(), Some("/w/a.py:2".into()))));
        let ranked: String = text.lines().map(|line| format!("[rank3]: {line}\n")).collect();
        assert_eq!(seen(&ranked), Some((first, Some("/w/a.py:2".into()))));
        // An exception that was never raised has no traceback.
        let (before, after) = text.split_once("    | Traceback").unwrap();
        let text = format!("{before}    | ValueError: one\n{}", after.split_once("one\n").unwrap().1);
        assert_eq!(seen(&text), Some((group.into(), Some("/w/a.py:6".into()))));
        assert_eq!(last_traceback(&lines(&text)), Some(1));
    }

    #[test]
    fn last_traceback_is_used() {
        let text = "\
Traceback (most recent call last):
  File \"a.py\", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File \"b.py\", line 2, in <module>
    raise pkg.Odd
pkg.errors.Odd
";
        assert_eq!(seen(text), Some(("pkg.errors.Odd".into(), Some("b.py:2".into()))));
    }

    #[test]
    fn syntax_error_has_a_place_and_a_warning_is_not_an_exception() {
        let text = "  File \"/t.py\", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n";
        assert_eq!(seen(text), Some(("SyntaxError: invalid syntax".into(), Some("/t.py:3".into()))));
        assert_eq!(seen("  File \"/t.py\", line 3, in f\nstep 7 done\n"), None);
        assert_eq!(seen("no traceback at all\n"), None);
    }

    #[test]
    fn fault_is_in_the_users_code_of_the_current_thread() {
        let text = "\
Fatal Python error: Aborted

Thread 0x00007f01 (most recent call first):
  File \"/home/u/loader.py\", line 3 in wait

Current thread 0x00007f02 (most recent call first):
  File \"/usr/lib/python3.11/threading.py\", line 9 in join
  File \"/home/u/train.py\", line 12 in load_batch
  File \"/home/u/train.py\", line 30 in <module>
";
        let place = fault(&lines(text)).unwrap();
        assert_eq!((place.file.as_str(), place.line.as_str()), ("/home/u/train.py", "12"));
        let only_thread = text.replace("Current thread", "Other");
        assert_eq!(fault(&lines(&only_thread)).unwrap().line, "3");
    }

    #[test]
    fn error_file_is_read_in_both_formats() {
        let full = r#"{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack":
            "Traceback (most recent call last):\n  File \"/w/t.py\", line 9, in main\n    f()\nValueError: bad\n",
            "timestamp": "1795236635"}}}"#;
        let place = Place { file: "/w/t.py".into(), line: "9".into() };
        let expected = Exception { line: "ValueError: bad".into(), place: Some(place) };
        assert_eq!(from_error_file(full), Some(expected));
        let text = Exception { line: "it broke".into(), place: None };
        assert_eq!(from_error_file(r#"{"message": "it broke\nhere"}"#), Some(text));
        assert_eq!(from_error_file(r#"{"message": {}}"#), None);
        assert_eq!(from_error_file("not json"), None);
    }
}
