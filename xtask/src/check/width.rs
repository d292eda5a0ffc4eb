//! Width of lines.

use std::path::Path;

use crate::violation::Violation;

const MAX_COLUMNS: usize = 120;

/// Returns whether a line may be wider: tables and links in Markdown cannot be wrapped, and test data, promtool series
/// and CSS rules stay on one line.
fn cannot_wrap(file: &Path, line: &str) -> bool {
    let is_data = file.components().any(|part| part.as_os_str() == "testdata");
    if is_data
        || file
            .extension()
            .is_some_and(|extension| extension == "css" || extension == "js" || extension == "yml")
    {
        return true;
    }
    let markdown = file.extension().is_some_and(|extension| extension == "md");
    markdown && (line.trim_start().starts_with('|') || line.contains("](http"))
}

pub(super) fn check(file: &Path, text: &str) -> Vec<Violation> {
    let lines = (1..).zip(text.lines());
    let wide = lines.filter(|(_, line)| line.chars().count() > MAX_COLUMNS && !cannot_wrap(file, line));
    wide.map(|(number, line)| Violation::new(file, number, format!("{} columns", line.chars().count())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_above_the_limit_are_reported_but_for_tables() {
        let (fits, wide) = ("ä".repeat(120), "ä".repeat(121));
        let text = format!("{fits}\n{wide}\n| {wide} |\n");
        let lines = |file: &str| -> Vec<usize> {
            check(Path::new(file), &text).into_iter().map(|violation| violation.line).collect()
        };
        assert_eq!((lines("a.rs"), lines("a.md")), (vec![2, 3], vec![2]));
    }
}
