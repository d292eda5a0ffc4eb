//! The text of one sequence as it grows: which part may be shown, and whether it contains a stop string. Pure.
//!
//! Text that may be the beginning of a stop string is held back until that is ruled out.

/// Text that is watched for stop strings.
#[derive(Clone, Debug, Default)]
pub(super) struct StopText {
    stops: Vec<String>,
    held: String,
}

/// Result of adding text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    /// Text that may be shown; it precedes any stop string.
    pub(super) text: String,
    /// True if a stop string was found.
    pub(super) stopped: bool,
}

impl StopText {
    pub(super) fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Adds text, and returns the part that may be shown.
    pub(super) fn push(&mut self, text: &str) -> Shown {
        self.held += text;
        if let Some(end) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(end);
            return Shown { text: std::mem::take(&mut self.held), stopped: true };
        }
        let held_back = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - held_back);
        Shown { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// Ends the sequence. Returns the text that was held back.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Returns the length of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).skip(1);
    lengths.filter(|length| text.ends_with(&stop[..*length])).last().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut text = StopText::new(&stops.iter().map(|stop| (*stop).to_owned()).collect::<Vec<_>>());
        let mut shown = Vec::new();
        for piece in pieces {
            let Shown { text, stopped } = text.push(piece);
            shown.push(text);
            if stopped {
                return (shown, true);
            }
        }
        shown.push(text.finish());
        (shown, false)
    }

    #[test]
    fn stop_string_across_pieces_ends_the_text_before_it() {
        let (shown, stopped) = run(&["\n\nQ:"], &["A: yes\n", "\n", "Q", ": no", "more"]);
        assert_eq!((shown.concat().as_str(), stopped), ("A: yes", true));
        // Two cases: the earliest of several stop strings, and one within a single piece.
        assert_eq!(run(&["end", "b"], &["a b end"]), (vec!["a ".into()], true));
    }

    #[test]
    fn text_that_only_begins_like_a_stop_string_is_shown_later() {
        let (shown, stopped) = run(&["aab"], &["xa", "a", "a", "c", "aa"]);
        assert_eq!((shown, stopped), (["x", "", "a", "aac", "", "aa"].map(String::from).to_vec(), false));
        let (shown, stopped) = run(&["ééx"], &["é", "é", "é"]);
        assert_eq!((shown.concat().as_str(), stopped), ("ééé", false));
    }

    #[test]
    fn without_stop_strings_nothing_is_held_back() {
        assert_eq!(run(&[""], &["a", "b"]).0, ["a", "b", ""]);
    }
}
