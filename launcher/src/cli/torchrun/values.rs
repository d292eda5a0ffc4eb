//! Parsers for the values of flags. Their errors say what was expected.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::time::Duration;

use xlaunch_spec::command::{
    Backend, Binding, MAX_NODES, MAX_NPROC, MAX_TIMEOUT, NodeCount, Nproc, PerRank, Signal, Streams,
};
use xlaunch_spec::quantities::parse_seconds;

pub(super) fn whole(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "expected a whole number".into())
}

/// Parses the number of workers, or the devices to count.
pub(super) fn nproc(text: &str) -> Result<Nproc, String> {
    match text {
        "auto" => Ok(Nproc::Auto),
        "gpu" => Ok(Nproc::Gpu),
        "cpu" => Ok(Nproc::Cpu),
        "xpu" => Err("XPUs are not counted; give their number".into()),
        _ => match whole(text) {
            Ok(count) if (1..=MAX_NPROC).contains(&count) => Ok(Nproc::Count(count)),
            _ => Err(format!("expected a number from 1 to {MAX_NPROC}, auto, gpu or cpu")),
        },
    }
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = parse_seconds(text).filter(|seconds| *seconds <= MAX_TIMEOUT);
    seconds.ok_or_else(|| format!("expected a number of seconds, at most {}", MAX_TIMEOUT.as_secs()))
}

/// Parses a TCP port; `None` for 0, which means any free port.
pub(super) fn port(text: &str) -> Result<Option<u16>, String> {
    let port: u16 = text.trim().parse().map_err(|_| "expected a port from 0 (a free one) to 65535")?;
    Ok((port != 0).then_some(port))
}

/// Parses `HOST`, `HOST:PORT` or `[IPv6]:PORT`. An empty host is this host. As in torchrun, spaces may surround it, and
/// brackets may be missing if the port cannot be the last group of the address, as in `::1:29500`.
pub(super) fn endpoint(text: &str) -> Result<(String, Option<u16>), String> {
    let text = text.trim();
    let (host, number) = match text.rsplit_once(':') {
        Some((host, number)) if !text.ends_with(']') => (host, port(number)?),
        _ => (text, None),
    };
    let bare = address(host)?;
    let is_ipv6 = |text: &str| text.parse::<Ipv6Addr>().is_ok();
    if bare == host && host.contains(':') && (!is_ipv6(host) || is_ipv6(text)) {
        return Err("expected HOST:PORT, with an IPv6 address in brackets".into());
    }
    Ok((if bare.is_empty() { "127.0.0.1".into() } else { bare }, number))
}

/// Parses a host name or address; IPv6 with or without brackets.
pub(super) fn address(text: &str) -> Result<String, String> {
    let bare = text.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(text);
    let is_valid = bare.chars().all(|sign| sign.is_alphanumeric() || "_.:-%".contains(sign));
    if is_valid { Ok(bare.into()) } else { Err("expected a host name or address".into()) }
}

/// Parses a number of nodes, `N` or `MIN:MAX`.
pub(super) fn nodes(text: &str) -> Result<NodeCount, String> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (whole(least), whole(most)) {
        (Ok(min), Ok(max)) if 0 < min && min <= max && max <= MAX_NODES => Ok(NodeCount { min, max }),
        _ => Err(format!("expected a number of nodes, N or MIN:MAX, from 1 to {MAX_NODES}")),
    }
}

pub(super) fn backend(text: &str) -> Result<Backend, String> {
    match text {
        "static" => Ok(Backend::Static),
        "c10d" => Ok(Backend::Dynamic),
        "etcd" | "etcd-v2" => {
            Err("etcd is not supported; expected static or c10d, which need no server".into())
        }
        _ => Err("plug-ins in Python are not supported; expected static or c10d".into()),
    }
}

/// Parses the endpoint of a group. Without a port, the backend's default port applies.
pub(crate) fn group_endpoint(text: &str) -> Result<(String, Option<u16>), String> {
    let text = text.trim();
    if text.rsplit_once(':').map_or(text, |(host, _)| host).is_empty() {
        return Err("expected HOST:PORT; the host is missing".into());
    }
    let (host, port) = endpoint(text)?;
    let has_port = !text.ends_with(']') && text.contains(':');
    match (port, has_port) {
        (None, true) => Err("expected a port from 1 to 65535: all nodes must know it".into()),
        _ => Ok((host, port)),
    }
}

/// Parses `key=value,key=value`.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=')?;
        Some((key.trim().to_owned(), value.trim().to_owned())).filter(|(key, _)| !key.is_empty())
    };
    let pairs = text.split(',').filter(|part| !part.trim().is_empty()).map(pair).collect::<Option<_>>();
    pairs.ok_or_else(|| "expected KEY=VALUE, separated by commas".into())
}

/// Parses a boolean, in the spellings that torchrun accepts.
pub(super) fn truth(text: &str) -> Result<bool, String> {
    match text.to_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(true),
        "0" | "false" | "f" | "no" | "n" => Ok(false),
        _ => Err("expected true or false".into()),
    }
}

/// Parses the number of workers of the built-in trainer; `None` means one per GPU, or 1 without GPUs. A worker on the
/// CPU uses all cores, so `cpu`, which Kubeflow sets on nodes without GPUs, does not mean one worker per core.
pub(super) fn trainer_workers(text: &str) -> Result<Option<u32>, String> {
    match text {
        "auto" | "gpu" | "cpu" => Ok(None),
        _ => whole(text).map(Some).map_err(|_| "expected a whole number, auto, gpu or cpu".into()),
    }
}

/// Checks the name of a start method of torchrun, which has no effect.
pub(super) fn start_method(text: &str) -> Result<(), String> {
    if ["spawn", "fork", "forkserver"].contains(&text) {
        Ok(())
    } else {
        Err("expected spawn, fork or forkserver".into())
    }
}

pub(super) fn logs_specs(text: &str) -> Result<(), String> {
    if text == "default" {
        Ok(())
    } else {
        Err("plug-ins in Python are not supported; expected default".into())
    }
}

pub(super) fn binding(text: &str) -> Result<Binding, String> {
    match text {
        "node" => Ok(Binding::Node),
        "socket" => Ok(Binding::Socket),
        "exclusive" => Ok(Binding::Exclusive),
        "core-complex" => Ok(Binding::CoreComplex),
        _ => Err("expected node, socket, exclusive or core-complex".into()),
    }
}

/// Parses names of Python modules, such as `torch,torch.distributed`.
pub(super) fn modules(text: &str) -> Result<Vec<String>, String> {
    let is_identifier = |part: &str| {
        !part.starts_with(|sign: char| sign.is_numeric())
            && !part.is_empty()
            && part.chars().all(|sign| sign == '_' || sign.is_alphanumeric())
    };
    let is_module = |name: &&str| name.split('.').all(is_identifier);
    let names = text.split(',').map(str::trim);
    let modules = names.map(|name| Some(name).filter(is_module).map(str::to_owned)).collect::<Option<_>>();
    modules
        .ok_or_else(|| "expected a comma-separated list of Python modules, such as torch,transformers".into())
}

pub(super) fn exit_codes(text: &str) -> Result<BTreeSet<i32>, String> {
    let code = |part: &str| part.trim().parse::<u8>().ok().filter(|code| *code > 0).map(i32::from);
    let codes = text.split(',').map(code).collect::<Option<_>>();
    codes.ok_or_else(|| "expected a comma-separated list of exit codes from 1 to 255".into())
}

pub(super) fn signals(text: &str) -> Result<Vec<Signal>, String> {
    let found = text.split(',').map(|name| Signal::parse(name.trim())).collect::<Option<_>>();
    let names = || Signal::ALL.map(Signal::name).join(", ");
    found.ok_or_else(|| format!("expected a comma-separated list of {}", names()))
}

pub(super) fn ranks(text: &str) -> Result<BTreeSet<u32>, String> {
    let ranks: Result<_, _> = text.split(',').map(whole).collect();
    ranks.map_err(|_| "expected a comma-separated list of local ranks, such as 0,1".into())
}

/// Parses `3` for all ranks, or `0:3,1:2` for some of them.
pub(super) fn streams(text: &str) -> Result<PerRank, String> {
    let expected =
        || "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or a comma-separated list of RANK:STREAMS";
    let streams = |digit: &str| match digit.trim() {
        "0" => Ok(Streams { stdout: false, stderr: false }),
        "1" => Ok(Streams { stdout: true, stderr: false }),
        "2" => Ok(Streams { stdout: false, stderr: true }),
        "3" => Ok(Streams { stdout: true, stderr: true }),
        _ => Err(expected()),
    };
    if !text.contains(':') {
        return Ok(PerRank { all: streams(text)?, ranks: BTreeMap::new() });
    }
    let mut ranks = BTreeMap::new();
    for part in text.split(',') {
        let (rank, digit) = part.split_once(':').ok_or_else(expected)?;
        ranks.insert(whole(rank).map_err(|_| expected())?, streams(digit)?);
    }
    Ok(PerRank { all: Streams::default(), ranks })
}

/// Parses a comma-separated list; `,,` is a comma within an item.
pub(super) fn words(text: &str) -> Result<Vec<String>, String> {
    let mut words = vec![String::new()];
    let mut signs = text.chars().peekable();
    while let Some(sign) = signs.next() {
        match words.last_mut() {
            Some(word) if sign != ',' || signs.next_if_eq(&',').is_some() => word.push(sign),
            _ => words.push(String::new()),
        }
    }
    // An empty filter would match every line.
    words.retain(|word| !word.is_empty());
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_decimal_and_bounded() {
        assert_eq!(seconds(" 2.5 "), Ok(Duration::from_millis(2500)));
        for text in ["-1", "1e18", "1e300", "inf", "nan", "", "5s"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn streams_apply_to_all_ranks_or_to_some() {
        let both = Streams { stdout: true, stderr: true };
        let per_rank = streams("0:3,12:2").unwrap();
        assert_eq!(
            [0, 1, 12].map(|rank| per_rank.of(rank)),
            [both, Streams::default(), Streams { stdout: false, stderr: true }]
        );
        assert_eq!(streams("3").unwrap().of(7), both);
        for text in ["4", "", "0:", "0:1,", "a:1", "0:1:2", "1,2"] {
            assert!(streams(text).is_err(), "{text}");
        }
    }

    #[test]
    fn host_and_port_of_an_endpoint_are_optional() {
        for (text, host, port) in [
            ("node7:29400", "node7", Some(29400)),
            (" node7:29400\n", "node7", Some(29400)),
            ("localhost:0", "localhost", None),
            ("node7", "node7", None),
            (":29400", "127.0.0.1", Some(29400)),
            ("[::1]:29400", "::1", Some(29400)),
            ("[::1]", "::1", None),
            ("::1:29400", "::1", Some(29400)),
            ("fd77:0:0:0:0:0:0:11:6000", "fd77:0:0:0:0:0:0:11", Some(6000)),
        ] {
            assert_eq!(endpoint(text).unwrap(), (host.into(), port), "{text}");
        }
        for text in ["fd77::1:6000", "::1", "1:2:29400", "host:port", "host:70000", "a/b:1"] {
            assert!(endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn double_comma_is_a_comma_within_a_word() {
        assert_eq!(words("apple,,pie,orange,").unwrap(), ["apple,pie", "orange"]);
        assert!(words("").unwrap().is_empty());
    }

    #[test]
    fn preloaded_modules_are_dotted_names() {
        assert_eq!(modules("torch, torch.nn_2").unwrap(), ["torch", "torch.nn_2"]);
        for text in ["", "torch,", "a..b", "3d", "train.py -x", "../a"] {
            assert!(modules(text).is_err(), "{text}");
        }
    }

    #[test]
    fn nodes_are_a_number_or_a_range() {
        for (text, min, max) in
            [("1", 1, 1), ("1:1", 1, 1), ("4", 4, 4), ("1:4", 1, 4), ("65536", 65536, 65536)]
        {
            assert_eq!(nodes(text), Ok(NodeCount { min, max }), "{text}");
        }
        for text in ["0", "0:2", "1:2:3", "4:1", "many", "", "65537", "-1"] {
            assert!(nodes(text).unwrap_err().contains("MIN:MAX"), "{text}");
        }
    }

    #[test]
    fn group_endpoint_has_a_fixed_port_or_none() {
        for (text, host, port) in [
            ("h", "h", None),
            ("h:7", "h", Some(7)),
            (" [::1]:7 ", "::1", Some(7)),
            ("[fd77::1]", "fd77::1", None),
            ("[::1]:7", "::1", Some(7)),
            ("fd77::1:29400", "fd77::1", Some(29400)),
        ] {
            assert_eq!(group_endpoint(text), Ok((host.into(), port)), "{text}");
        }
        for text in ["h:0", "[::1]:0", "fd77::1:6000", "h:70000", "h:", ":29400", " "] {
            assert!(group_endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn configuration_of_the_rendezvous_is_a_list_of_pairs() {
        let found = pairs("timeout=5, is_host=1,").unwrap();
        assert_eq!(found, [("timeout".into(), "5".into()), ("is_host".into(), "1".into())]);
        assert!(pairs("").unwrap().is_empty());
        assert!(["a", "=1", "a=1,b"].iter().all(|text| pairs(text).is_err()));
        assert_eq!((truth("True"), truth("n")), (Ok(true), Ok(false)));
        assert!(truth("2").is_err());
    }
}
