//! Decides which refused callers are named to the user of the coordinator's node. Pure: time is an argument.
//!
//! A node that is refused tries again or is started again, and a port scanner never stops. The same caller is therefore
//! named once per [`REPEAT_INTERVAL`], and at most [`MAX_CALLERS_NAMED`] callers within that time. Further refusals are
//! counted, and the next line reports their number.

use std::time::{Duration, Instant};

const REPEAT_INTERVAL: Duration = Duration::from_secs(30);
const MAX_CALLERS_NAMED: usize = 8;
const MAX_LINE_CHARS: usize = 400;

/// Lines shown within the last [`REPEAT_INTERVAL`].
#[derive(Debug, Default)]
pub struct RefusalLog {
    lines: Vec<(Instant, String)>,
    unnamed: u64,
}

impl RefusalLog {
    /// Records that `who` was refused. Returns the line for the user, or `None` if the refusal is only counted.
    pub fn refused(&mut self, who: &str, why: &str, now: Instant) -> Option<String> {
        self.lines.retain(|(at, _)| now < *at + REPEAT_INTERVAL);
        let line = format!("refused {who}: {why}");
        let line: String = line.chars().filter(|c| !c.is_control()).take(MAX_LINE_CHARS).collect();
        if self.lines.len() >= MAX_CALLERS_NAMED || self.lines.iter().any(|(_, said)| *said == line) {
            self.unnamed += 1;
            return None;
        }
        let others = match std::mem::take(&mut self.unnamed) {
            0 => String::new(),
            1 => " (1 more was refused before)".to_owned(),
            count => format!(" ({count} more were refused before)"),
        };
        self.lines.push((now, line.clone()));
        Some(line + &others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_that_tries_again_is_named_every_30_s_with_the_number_of_tries() {
        let (mut log, start) = (RefusalLog::default(), Instant::now());
        let mut refused =
            |who: &str, after: u64| log.refused(who, "its token differs", start + Duration::from_secs(after));
        assert_eq!(refused("10.0.0.1", 0).unwrap(), "refused 10.0.0.1: its token differs");
        assert_eq!(refused("10.0.0.1", 29), None);
        assert_eq!(
            refused("10.0.0.2", 29).unwrap(),
            "refused 10.0.0.2: its token differs (1 more was refused before)"
        );
        assert_eq!(refused("10.0.0.1", 30).unwrap(), "refused 10.0.0.1: its token differs");
    }

    #[test]
    fn flood_of_callers_is_counted() {
        let (mut log, start) = (RefusalLog::default(), Instant::now());
        let lines = (0..1000).filter_map(|n| log.refused(&n.to_string(), "it does not use TLS\n", start));
        assert_eq!(lines.count(), MAX_CALLERS_NAMED);
        let later = log.refused("h1", "x", start + REPEAT_INTERVAL).unwrap();
        assert_eq!(later, "refused h1: x (992 more were refused before)");
    }
}
