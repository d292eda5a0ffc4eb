//! The hosts of a launch, from `--hosts` or from a host file. Pure.
//!
//! ```text
//! --hosts a,b:4,[fd77::11]:2        # a host file
//!                                   a            # slots: as --nproc-per-node says
//!                                   b slots=4 max_slots=8    # Open MPI, DeepSpeed
//!                                   [fd77::11]:2 # MPICH
//! ```
//! A host that is listed once without slots has no slots. If a host is listed several times, its slots add up, and an
//! entry without slots counts as one slot: PBS and LSF write a line per slot. Node ranks follow the first entry of each
//! host.
//!
//! A host becomes an argument of ssh, so a name that ssh could take for an option is refused.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use xlaunch_spec::command::MAX_NODES;

/// Maximum size of a host file.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 20;

/// A host to start workers on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Name for ssh, possibly with `USER@`; IPv6 without brackets.
    pub(crate) name: String,
    /// Number of workers; `None` if the rest of the command line decides.
    pub(crate) slots: Option<u32>,
}

impl Host {
    /// Returns the name without the user.
    pub(crate) fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, address)| address)
    }

    /// Returns whether the name means a different machine on every host.
    pub(crate) fn is_loopback(&self) -> bool {
        let address = self.address();
        address == "localhost"
            || address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

/// Parses the hosts of `--hosts`.
pub(crate) fn from_list(text: &str) -> Result<Vec<Host>, String> {
    merge(text.split(',').map(|entry| entry_of_list(entry.trim())))
}

/// Parses a host file. Errors begin with the number of the line.
pub(crate) fn from_file(text: &str) -> Result<Vec<Host>, String> {
    // Editors on Windows begin files with a byte order mark.
    let text = text.trim_start_matches('\u{feff}');
    let lines = (1..)
        .zip(text.lines())
        .map(|(number, line): (usize, &str)| (number, line.split('#').next().unwrap_or_default().trim()));
    let entries = lines.filter(|(_, line)| !line.is_empty());
    let hosts = merge(
        entries.map(|(number, line)| entry_of_file(line).map_err(|error| format!("line {number}: {error}"))),
    )?;
    if hosts.is_empty() { Err("names no host".into()) } else { Ok(hosts) }
}

/// A host, and its slots if the entry has them.
type Entry = (String, Option<u32>);

/// Parses `HOST`, `HOST:SLOTS` or `HOST slots=SLOTS`. `max_slots` is for Open MPI, which may start more processes than
/// slots; here it is only checked.
fn entry_of_file(line: &str) -> Result<Entry, String> {
    let (host, attributes) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let (name, mut slots) = entry_of_list(host)?;
    let mut most = None;
    for attribute in attributes.split_whitespace() {
        let (key, number) = attribute.split_once('=').unwrap_or((attribute, ""));
        let (value, noun) = match key {
            "slots" => (&mut slots, "slots"),
            "max_slots" | "max-slots" => (&mut most, "max_slots"),
            _ => {
                return Err(format!(
                    "`{attribute}` after host `{name}`: expected slots=NUMBER or max_slots=NUMBER"
                ));
            }
        };
        if value.replace(parse_slots(&name, number)?).is_some() {
            return Err(format!("host `{name}` has its {noun} twice in one line"));
        }
    }
    match (slots, most) {
        (Some(slots), Some(most)) if slots > most => {
            Err(format!("host `{name}` has {slots} slots, but max_slots={most}"))
        }
        _ => Ok((name, slots)),
    }
}

/// Parses `HOST` or `HOST:SLOTS`; IPv6 with slots needs brackets.
fn entry_of_list(entry: &str) -> Result<Entry, String> {
    let (host, slots) = match entry.rsplit_once(':') {
        // Without brackets, the last group of an IPv6 address would look like slots.
        _ if is_ipv6(after_user(entry)) => (entry.to_owned(), None),
        _ if entry.ends_with(']') => (without_brackets(entry)?, None),
        Some((host, slots)) if host.ends_with(']') => (without_brackets(host)?, Some(slots)),
        Some((host, slots)) => (host.to_owned(), Some(slots)),
        None => (entry.to_owned(), None),
    };
    check_name(&host)?;
    let slots = slots.map(|slots| parse_slots(&host, slots)).transpose()?;
    Ok((host, slots))
}

fn without_brackets(host: &str) -> Result<String, String> {
    let inner = |text: &str| text.strip_prefix('[')?.strip_suffix(']').map(str::to_owned);
    let address = after_user(host);
    match inner(address).filter(|address| is_ipv6(address)) {
        Some(bare) => Ok(host[..host.len() - address.len()].to_owned() + &bare),
        None => Err(format!("`{host}`: expected an IPv6 address in the brackets")),
    }
}

fn after_user(host: &str) -> &str {
    host.rsplit_once('@').map_or(host, |(_, address)| address)
}

/// Returns whether this is an IPv6 address, possibly with a zone such as `%eth0`.
fn is_ipv6(text: &str) -> bool {
    text.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

fn check_name(host: &str) -> Result<(), String> {
    let parts = host.split('@').collect::<Vec<_>>();
    if parts.iter().any(|part| part.is_empty()) || parts.len() > 2 {
        return Err(format!("`{host}` is not a host: expected HOST or USER@HOST"));
    }
    if parts.iter().any(|part| part.starts_with('-')) {
        return Err(format!("`{host}` is not a host: ssh would take it for an option"));
    }
    let colons = if is_ipv6(after_user(host)) { ":" } else { "" };
    let is_allowed = |sign: char| sign.is_alphanumeric() || "_.-%@".contains(sign) || colons.contains(sign);
    if host.len() > 255 || !host.chars().all(is_allowed) {
        return Err(format!(
            "`{}` is not a host: expected a name or address, IPv6 with slots as [ADDRESS]:SLOTS",
            host.escape_default()
        ));
    }
    Ok(())
}

fn parse_slots(host: &str, text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err(format!("host `{host}` has 0 slots: leave it out, or give it at least 1")),
        Ok(slots) => Ok(slots),
        Err(_) => Err(format!("slots of host `{host}`: `{}` is not a number from 1", text.escape_default())),
    }
}

/// Merges the entries into one [`Host`] per name, in the order of the first entries.
fn merge(entries: impl Iterator<Item = Result<Entry, String>>) -> Result<Vec<Host>, String> {
    let mut hosts: Vec<Host> = Vec::new();
    let mut positions: BTreeMap<String, usize> = BTreeMap::new();
    for entry in entries {
        let (name, slots) = entry?;
        if let Some(host) = positions.get(&name).and_then(|at| hosts.get_mut(*at)) {
            let sum = host.slots.unwrap_or(1).checked_add(slots.unwrap_or(1));
            host.slots = Some(sum.ok_or_else(|| format!("host `{name}` has too many slots"))?);
            continue;
        }
        if hosts.len() >= MAX_NODES as usize {
            return Err(format!("has more than {MAX_NODES} hosts"));
        }
        positions.insert(name.clone(), hosts.len());
        hosts.push(Host { name, slots });
    }
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(hosts: Result<Vec<Host>, String>) -> String {
        let host = |host: Host| match host.slots {
            Some(slots) => format!("{}={slots}", host.name),
            None => host.name,
        };
        hosts.unwrap().into_iter().map(host).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn list_names_hosts_with_and_without_slots() {
        for (list, expected) in [
            ("a,b:4", "a b=4"),
            ("node7.cluster, ada@node8:2", "node7.cluster ada@node8=2"),
            ("10.0.0.1:8,fd77::10,[fd77::11],[fd77::12]:2", "10.0.0.1=8 fd77::10 fd77::11 fd77::12=2"),
            ("ada@[fe80::1%eth0]:3,ada@fd77::1", "ada@fe80::1%eth0=3 ada@fd77::1"),
            ("nœud", "nœud"),
        ] {
            assert_eq!(shown(from_list(list)), expected, "{list}");
        }
    }

    #[test]
    fn every_form_of_a_host_file_is_read() {
        let file = "# nodes of rack 3\n\na\nb slots=4  # half\n  c:2\r\n[fd77::11]:8\nd\tslots=1\n";
        assert_eq!(shown(from_file(file)), "a b=4 c=2 fd77::11=8 d=1");
        assert_eq!(
            shown(from_file("a slots=2 max_slots=4\nb max-slots=8\nc max_slots=2 slots=2")),
            "a=2 b c=2"
        );
        // A line per slot, as in PBS_NODEFILE.
        assert_eq!(shown(from_file("n1\nn1\nn2\nn1\nn2\n")), "n1=3 n2=2");
        assert_eq!(shown(from_file("\u{feff}n1\r\nn2 slots=2\r\n")), "n1 n2=2");
    }

    #[test]
    fn slots_of_repeated_hosts_add_up() {
        assert_eq!(shown(from_list("a:2,b,a,a:3,c")), "a=6 b c");
        let refused = from_list("a:4294967295,a").unwrap_err();
        assert_eq!(refused, "host `a` has too many slots");
    }

    #[test]
    fn unusable_hosts_are_refused_with_the_reason() {
        for (list, reason) in [
            ("a,,b", "`` is not a host"),
            ("", "`` is not a host"),
            ("a:0", "host `a` has 0 slots"),
            ("a:x", "slots of host `a`: `x` is not a number"),
            ("a:", "slots of host `a`: `` is not a number"),
            ("a:-1", "slots of host `a`: `-1` is not a number"),
            (":4", "`` is not a host"),
            ("-oProxyCommand=x", "ssh would take it for an option"),
            ("ada@-x", "ssh would take it for an option"),
            ("@a", "expected HOST or USER@HOST"),
            ("a@b@c", "expected HOST or USER@HOST"),
            ("a b", "`a b` is not a host"),
            ("a;reboot", "`a;reboot` is not a host"),
            ("a\nb", "`a\\nb` is not a host"),
            ("[a]:2", "expected an IPv6 address in the brackets"),
            ("fd77:1:2", "IPv6 with slots as [ADDRESS]:SLOTS"),
        ] {
            let error = from_list(list).unwrap_err();
            assert!(error.contains(reason), "{list:?}: {error}");
        }
    }

    #[test]
    fn errors_of_a_host_file_name_the_line() {
        for (file, error) in [
            ("a\nb slots=0\n", "line 2: host `b` has 0 slots: leave it out, or give it at least 1"),
            ("a ncpus=4", "line 1: `ncpus=4` after host `a`: expected slots=NUMBER or max_slots=NUMBER"),
            ("a slots=4 max_slots=2", "line 1: host `a` has 4 slots, but max_slots=2"),
            ("a max_slots=0", "line 1: host `a` has 0 slots: leave it out, or give it at least 1"),
            ("\n\na:2 slots=2", "line 3: host `a` has its slots twice in one line"),
            ("# only this\n", "names no host"),
        ] {
            assert_eq!(from_file(file).unwrap_err(), error);
        }
    }

    #[test]
    fn number_of_hosts_is_bounded() {
        let many: String = (0..=MAX_NODES).map(|n| format!("n{n}\n")).collect();
        assert_eq!(from_file(&many).unwrap_err(), "has more than 65536 hosts");
    }

    #[test]
    fn loopback_names_are_recognised() {
        let is_loopback = |name: &str| from_list(name).unwrap().first().unwrap().is_loopback();
        assert!(["localhost", "127.0.0.2", "::1", "ada@localhost"].into_iter().all(is_loopback));
        assert!(!["localhost2", "10.0.0.1", "fd77::1"].into_iter().any(is_loopback));
    }
}
