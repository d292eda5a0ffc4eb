//! Slurm's compressed lists of hosts: `login,gpu[001-003,7],rack[0-1]n[0-3]`.
//!
//! Invariants: an item's hosts are counted before they are expanded, so that any text yields at most [`MAX_NODES`]
//! hosts with names of at most [`MAX_NAME_BYTES`]. Brackets do not nest, so there is no recursion.

use xlaunch_spec::command::MAX_NODES;
use xlaunch_spec::quantities::parse_range;

use super::MAX_HOSTS_BYTES;

/// Maximum length of a host name in DNS.
const MAX_NAME_BYTES: usize = 253;

/// A part of a host's name.
enum Part<'a> {
    Text(&'a str),
    /// Ranges: first number, last number, and minimum number of digits.
    Numbers(Vec<(u64, u64, usize)>),
}

/// Returns the hosts in the order of the list.
pub(super) fn expand(list: &str) -> Result<Vec<String>, String> {
    if list.len() > MAX_HOSTS_BYTES {
        return Err(format!("the list of hosts is longer than {MAX_HOSTS_BYTES} bytes"));
    }
    let mut hosts = Vec::new();
    for item in items(list)? {
        let parts = parts(item)?;
        let count = count(&parts).and_then(|count| count.checked_add(hosts.len() as u64));
        if count.is_none_or(|count| count > u64::from(MAX_NODES)) {
            return Err(format!("the list has more than {MAX_NODES} hosts"));
        }
        if length(&parts) > MAX_NAME_BYTES {
            return Err(format!("a name of a host is longer than {MAX_NAME_BYTES} bytes"));
        }
        append(&parts, &mut hosts);
    }
    Ok(hosts)
}

/// Splits at commas outside brackets.
fn items(list: &str) -> Result<Vec<&str>, String> {
    let (mut items, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, sign) in list.char_indices() {
        match sign {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return Err("brackets do not match".into()),
            ',' if !inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("brackets do not match".into());
    }
    items.push(&list[start..]);
    Ok(items)
}

fn parts(item: &str) -> Result<Vec<Part<'_>>, String> {
    if item.is_empty() {
        return Err("a host has no name".into());
    }
    let (mut parts, mut rest) = (Vec::new(), item);
    while let Some((text, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').ok_or("brackets do not match")?;
        parts.push(name(text)?);
        parts.push(Part::Numbers(ranges.split(',').map(range).collect::<Result<_, _>>()?));
        rest = after;
    }
    parts.push(name(rest)?);
    Ok(parts)
}

fn name(text: &str) -> Result<Part<'_>, String> {
    let valid = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if valid { Ok(Part::Text(text)) } else { Err("expected names of hosts such as gpu[0-3,7]".into()) }
}

/// Parses `N` or `FIRST-LAST`. `08` sets the minimum number of digits to two.
fn range(text: &str) -> Result<(u64, u64, usize), String> {
    let is_unsigned = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    let range = parse_range(text).filter(|_| is_unsigned);
    let range = range.ok_or("expected ranges such as 0-3 between the brackets")?;
    Ok((*range.start(), *range.end(), text.find('-').unwrap_or(text.len())))
}

/// Returns the number of hosts of an item; `None` if it overflows.
fn count(parts: &[Part<'_>]) -> Option<u64> {
    parts.iter().try_fold(1_u64, |hosts, part| match part {
        Part::Text(_) => Some(hosts),
        Part::Numbers(ranges) => {
            let numbers = ranges.iter().try_fold(0_u64, |all, (first, last, _)| {
                all.checked_add(last.checked_sub(*first)?.checked_add(1)?)
            })?;
            hosts.checked_mul(numbers)
        }
    })
}

/// Returns the length of the longest name.
fn length(parts: &[Part<'_>]) -> usize {
    let digits = |(_, last, width): &(u64, u64, usize)| last.to_string().len().max(*width);
    let part = |part: &Part<'_>| match part {
        Part::Text(text) => text.len(),
        Part::Numbers(ranges) => ranges.iter().map(digits).max().unwrap_or(0),
    };
    parts.iter().map(part).sum()
}

/// Writes all combinations; the numbers of the last brackets change fastest.
fn append(parts: &[Part<'_>], hosts: &mut Vec<String>) {
    let mut names = vec![String::new()];
    for part in parts {
        match part {
            Part::Text(text) => names.iter_mut().for_each(|name| name.push_str(text)),
            Part::Numbers(ranges) => {
                let numbers = || {
                    ranges.iter().flat_map(|&(first, last, width)| (first..=last).map(move |n| (n, width)))
                };
                names = names
                    .iter()
                    .flat_map(|name| numbers().map(move |(number, width)| format!("{name}{number:0width$}")))
                    .collect();
            }
        }
    }
    hosts.append(&mut names);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hosts_are_written_in_the_order_of_their_ranks() {
        for (list, hosts) in [
            ("h0", "h0"),
            ("h[0-1]", "h0 h1"),
            ("gpu[001-003,7],login", "gpu001 gpu002 gpu003 gpu7 login"),
            ("n[08-10]", "n08 n09 n10"),
            ("n[8-10].rack-2", "n8.rack-2 n9.rack-2 n10.rack-2"),
            ("r[0-1]n[0-1]", "r0n0 r0n1 r1n0 r1n1"),
            ("b,a,b", "b a b"),
        ] {
            assert_eq!(expand(list).unwrap().join(" "), hosts, "{list}");
        }
    }

    #[test]
    fn malformed_lists_are_refused() {
        for list in [
            "", "a,", ",a", "a[", "a]", "a[0-1", "a[[0]]", "a[]", "a[2-1]", "a[x]", "a[0-1-2]", "a b",
            "a[+1]", "a;b",
        ] {
            assert!(expand(list).is_err(), "{list:?}");
        }
    }

    #[test]
    fn short_texts_that_mean_many_hosts_are_refused_at_once() {
        let many = "n[0-99]".repeat(60);
        for list in
            ["n[0-65536]", "n[0-999999999999999999]", "a[0-999]b[0-999]c[0-999]", "n[0-65535],m", &many]
        {
            assert!(expand(list).unwrap_err().contains("more than 65536 hosts"), "{list}");
        }
        assert_eq!(expand("n[0-65535]").unwrap().len(), 65_536);
        // Every one of the many hosts would have a long name.
        let long = format!("{}[0-65535]", "x".repeat(300));
        assert!(expand(&long).unwrap_err().contains("longer than 253 bytes"));
        assert!(expand(&"n,".repeat(600_000)).unwrap_err().contains("longer than 1048576 bytes"));
    }

    /// Formats a list as Slurm does: consecutive numbers of one prefix in brackets.
    fn compress(hosts: &[(String, Vec<(u32, u32)>)]) -> String {
        let item = |(prefix, ranges): &(String, Vec<(u32, u32)>)| {
            let ranges = ranges.iter().map(|(first, more)| match more {
                0 => format!("{first:03}"),
                more => format!("{first:03}-{:03}", first + more),
            });
            format!("{prefix}[{}]", ranges.collect::<Vec<_>>().join(","))
        };
        hosts.iter().map(item).collect::<Vec<_>>().join(",")
    }

    proptest! {
        #[test]
        fn expansion_inverts_compression(
            hosts in prop::collection::vec(
                ("[a-z][a-z0-9-]{0,8}", prop::collection::vec((0..2000_u32, 0..20_u32), 1..4)), 1..5
            )
        ) {
            let expected: Vec<String> = hosts.iter().flat_map(|(prefix, ranges)| {
                ranges.iter().flat_map(move |(first, more)| {
                    (*first..=first + more).map(move |number| format!("{prefix}{number:03}"))
                })
            }).collect();
            prop_assert_eq!(expand(&compress(&hosts)).unwrap(), expected);
        }

        #[test]
        fn any_text_is_expanded_within_bounds_or_refused(list in "[a-c0-9,\\[\\]-]{0,200}") {
            if let Ok(hosts) = expand(&list) {
                prop_assert!(hosts.len() <= 65_536 && hosts.iter().all(|host| host.len() <= MAX_NAME_BYTES));
            }
        }
    }
}
