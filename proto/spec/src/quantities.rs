//! Parses and formats times, sizes, counts and lists of numbers for users.

use std::borrow::Borrow;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// The forms of a time that [`parse_time`] accepts, for messages.
pub const TIME_FORMS: &str = "90s, 30m, 4h, 2d, 1h30m, HH:MM:SS or D-HH:MM:SS";
/// The forms of a size that [`parse_bytes`] accepts, for messages.
pub const SIZE_FORMS: &str = "a number with K, M, G or T, such as 32G";

const TIME_UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3600), ('m', 60), ('s', 1)];
const SIZE_UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// Parses a time such as `4h`, `1h30m`, or in Slurm's forms `HH:MM:SS` and `D-HH:MM:SS`.
///
/// # Errors
/// The text has none of these forms, or the time is zero.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let time = parse_span(text).filter(|time| !time.is_zero());
    time.ok_or_else(|| format!("`{text}` is not a time; expected one such as {TIME_FORMS}"))
}

/// Parses a time in the forms of [`parse_time`], or zero.
pub fn parse_span(text: &str) -> Option<Duration> {
    let seconds = if text.contains(':') { clock_seconds(text) } else { unit_seconds(text) };
    seconds.map(Duration::from_secs)
}

/// Parses a decimal number of seconds.
pub fn parse_seconds(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.trim().parse().ok()?).ok()
}

/// Converts a number of seconds that another process has sent. Values that are not a time become zero.
pub fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or_default()
}

/// Parses numbers with units, each unit smaller than the previous one.
fn unit_seconds(text: &str) -> Option<u64> {
    let (mut seconds, mut rest, mut units) = (0_u64, text, &TIME_UNITS[..]);
    loop {
        let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
        let (number, unit) = (rest[..end].parse::<u32>().ok()?, rest[end..].trim_start());
        let at = units.iter().position(|(known, _)| unit.starts_with(*known))?;
        seconds = seconds.checked_add(u64::from(number).checked_mul(units[at].1)?)?;
        (rest, units) = (&unit[1..], &units[at + 1..]);
        if rest.is_empty() {
            return Some(seconds);
        }
    }
}

fn clock_seconds(text: &str) -> Option<u64> {
    let (days, clock) = text.split_once('-').map_or((Some(0), text), |(days, clock)| (number(days), clock));
    let parts: Vec<u64> = clock.split(':').map(number).collect::<Option<_>>()?;
    let [hours, minutes, seconds] = parts[..] else { return None };
    if minutes > 59 || seconds > 59 || (text.contains('-') && hours > 23) {
        return None;
    }
    let hours = days?.checked_mul(24)?.checked_add(hours)?;
    hours.checked_mul(3600)?.checked_add(minutes * 60 + seconds)
}

/// Parses digits only: `parse` would also accept a sign.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Formats a time in the largest units that show it exactly, such as `1h30m`.
pub fn time_text(time: Duration) -> String {
    let mut rest = time.as_secs();
    let mut text = String::new();
    for (unit, seconds) in TIME_UNITS {
        // 36h is easier to compare with a limit of 24h than 1d12h, but 2d is easier to read than 48h.
        if unit == 'd' && !rest.is_multiple_of(seconds) {
            continue;
        }
        if rest >= seconds {
            text += &format!("{}{unit}", rest / seconds);
            rest %= seconds;
        }
    }
    if text.is_empty() { "0s".into() } else { text }
}

/// Formats a time in seconds roughly, as `7s`, `3m05s` or `2h04m`.
pub fn rough_time_text(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shown to people")]
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        s if s < 60 => format!("{s}s"),
        s if s < 3600 => format!("{}m{:02}s", s / 60, s % 60),
        s => format!("{}h{:02}m", s / 3600, s / 60 % 60),
    }
}

/// Parses a size such as `32G`, `512M` or `32GiB`, in powers of 1024.
///
/// # Errors
/// The text is not a size, or is 0.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let parse = || {
        let bare = text.strip_suffix("iB").or_else(|| text.strip_suffix('B')).unwrap_or(text);
        let unit = bare.chars().last()?.to_ascii_uppercase();
        let (_, shift) = SIZE_UNITS.iter().find(|(known, _)| *known == unit)?;
        number(&bare[..bare.len() - 1])?.checked_mul(1 << shift).filter(|bytes| *bytes > 0)
    };
    parse().ok_or_else(|| format!("`{text}` is not a size; expected {SIZE_FORMS}"))
}

/// Formats a size for people, such as `12 GiB` or `1.5 GiB`.
pub fn bytes_text(bytes: u64) -> String {
    let (unit, shift) = match bytes {
        0x100_0000_0000.. => ("TiB", 40),
        0x4000_0000.. => ("GiB", 30),
        _ => ("MiB", 20),
    };
    let tenths = (u128::from(bytes) * 10) >> shift;
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        tenth => format!("{}.{tenth} {unit}", tenths / 10),
    }
}

/// Formats a needed size and a smaller available one, precisely enough that they differ.
pub fn shortage_texts(needed: u64, present: u64) -> [String; 2] {
    let texts = [needed, present].map(bytes_text);
    if texts[0] == texts[1] { [needed, present].map(|bytes| format!("{bytes} bytes")) } else { texts }
}

/// Formats a count with its noun, such as `1 row` or `2 rows`. The plural of the noun ends with `s`.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Formats a number with three significant digits, such as `812`, `46.1K` or `1.38M`.
pub fn count_text(value: f64) -> String {
    let (value, unit) = match value {
        v if v < 1e3 => (v, ""),
        v if v < 1e6 => (v / 1e3, "K"),
        v if v < 1e9 => (v / 1e6, "M"),
        v => (v / 1e9, "G"),
    };
    let digits = if unit.is_empty() || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}{unit}")
}

/// Parses `N` or `FIRST-LAST`.
pub fn parse_range<T: FromStr + PartialOrd>(text: &str) -> Option<RangeInclusive<T>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.parse().ok()?..=last.parse().ok()?;
    (!range.is_empty()).then_some(range)
}

/// Formats ascending numbers as ranges, such as `0-2, 5`.
pub fn ranges_text(numbers: impl IntoIterator<Item: Borrow<u32>>) -> String {
    let mut ranges: Vec<RangeInclusive<u32>> = Vec::new();
    for number in numbers.into_iter().map(|number| *number.borrow()) {
        match ranges.last_mut() {
            Some(range) if range.end() + 1 == number => *range = *range.start()..=number,
            _ => ranges.push(number..=number),
        }
    }
    let text = |range: &RangeInclusive<u32>| match (range.start(), range.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// Formats ascending ranks, such as `rank 3` or `ranks 0-2, 5`.
pub fn ranks_text(ranks: impl IntoIterator<Item: Borrow<u32>>) -> String {
    let ranges = ranges_text(ranks);
    let is_single = ranges.bytes().all(|byte| byte.is_ascii_digit());
    format!("{} {ranges}", if is_single { "rank" } else { "ranks" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_kind_is_singular() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "row")), ["0 rows", "1 row", "2 rows"]);
    }

    #[test]
    fn lists_of_ranks_are_compressed_to_ranges() {
        assert_eq!(ranks_text([3]), "rank 3");
        assert_eq!(ranks_text([0, 1, 2]), "ranks 0-2");
        assert_eq!(ranks_text([0, 2, 3, 9]), "ranks 0, 2-3, 9");
    }

    #[test]
    fn counts_and_rough_times_are_abbreviated() {
        let counts = [7.0, 812.4, 46_123.0, 461_000.0, 1_384_000.0];
        assert_eq!(counts.map(count_text), ["7", "812", "46.1K", "461K", "1.38M"]);
        assert_eq!([7.2, 185.0, 7440.0].map(rough_time_text), ["7s", "3m05s", "2h04m"]);
    }

    #[test]
    fn sizes_that_differ_never_look_the_same() {
        assert_eq!(shortage_texts(3 << 30, 2 << 30), ["3 GiB", "2 GiB"]);
        assert_eq!(shortage_texts((1 << 20) + 5, 1 << 20), ["1048581 bytes", "1048576 bytes"]);
        assert_eq!(shortage_texts(4096, 0), ["4096 bytes", "0 bytes"]);
    }

    #[test]
    fn times_have_units_or_are_clock_times() {
        for (text, seconds) in [
            ("90s", 90),
            ("30m", 1800),
            ("4h", 14_400),
            ("2d", 172_800),
            ("1h30m", 5400),
            ("1d2h3m4s", 93_784),
            ("01:02:03", 3723),
            ("100:00:00", 360_000),
            ("1-02:00:00", 93_600),
        ] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in [
            "",
            "5",
            "0s",
            "-1h",
            "1.5h",
            "30m1h",
            "1h1h",
            "10:20",
            "1:60:00",
            "1-24:00:00",
            "x:y:z",
            "+1s",
            "4H",
        ] {
            let error = parse_time(text).unwrap_err();
            assert!(error.contains("4h") && error.contains("D-HH:MM:SS"), "{error}");
        }
        assert!(parse_time("99999999999999999999h").is_err() && parse_time("9999999999999999999d").is_err());
    }

    #[test]
    fn times_are_shown_as_they_are_written() {
        for text in ["90s", "4h", "1h30m", "2d", "36h", "30m", "1m30s"] {
            let shown = time_text(parse_time(text).unwrap());
            assert_eq!(shown, if text == "90s" { "1m30s" } else { text });
        }
        assert_eq!(time_text(Duration::ZERO), "0s");
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [("32G", 32 << 30), ("512M", 512 << 20), ("1TiB", 1 << 40), ("7kB", 7 << 10)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "32", "G", "1.5G", "0G", "-1G", "99999999999T", "é"] {
            assert!(parse_bytes(text).unwrap_err().contains("32G"), "{text}");
        }
        assert_eq!(
            [12 << 30, 3 << 29, 5 << 20, 2 << 40].map(bytes_text),
            ["12 GiB", "1.5 GiB", "5 MiB", "2 TiB"]
        );
    }
}
