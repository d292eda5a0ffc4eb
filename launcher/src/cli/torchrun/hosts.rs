//! `--hosts`, `--hostfile`, `--ssh` and `--export`: a launch over ssh. The hosts get the rest of the command line.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use super::line::{Line, Target};
use super::{Name, values};
use crate::ssh::hosts::{self, Host};
use crate::ssh::plan::SshLaunch;

/// The flags of this module; hosts do not get them.
const FLAGS: [&str; 4] = ["hosts", "hostfile", "ssh", "export"];
/// Flags that would contradict the hosts, and why.
const CONTRADICTING: [(&str, &str); 9] = [
    ("nnodes", "the hosts are the nodes"),
    ("node-rank", "hosts have their rank by position"),
    ("standalone", "it is for a single node"),
    ("rdzv-backend", "the hosts are fixed, so it is static"),
    ("master-addr", "the first host has rank 0; --rdzv-endpoint HOST:PORT chooses another address"),
    ("master-port", "a port is chosen; --rdzv-endpoint HOST:PORT chooses another"),
    ("local-addr", "it differs between hosts; --interface NAME can be the same"),
    ("token-file", "a token is generated"),
    ("rdzv-insecure", "a token is generated"),
];
/// The client, unless the user names another command.
const SSH: &str = "ssh";
/// Options of OpenSSH. It must not ask questions, because there are many clients and the job has the terminal; and it
/// must notice soon that a host is off or has disappeared. They follow the user's options: if an option is given twice,
/// the first one applies, and all of them take precedence over configuration files.
const SSH_OPTIONS: [&str; 9] = [
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=20",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=6",
];

/// Default of `join_timeout` in `--rdzv-conf`.
const DEFAULT_JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// The hosts of a launch.
#[derive(Debug)]
pub(super) enum Hosts {
    Others(SshLaunch),
    /// This host: `localhost` alone needs no ssh, only a launch with these arguments.
    This(Vec<OsString>),
}

/// Returns whether the command line has flags of this module.
pub(super) fn are_given(line: &Line) -> bool {
    line.given.iter().any(|given| FLAGS.contains(&given.flag.name))
}

/// Returns the launch on the hosts that the command line names.
pub(super) fn launch(name: Name, line: &Line) -> Result<Hosts, String> {
    let hosts = read_hosts(line)?;
    for given in &line.given {
        if let Some((_, why)) = CONTRADICTING.iter().find(|(flag, _)| *flag == given.flag.name) {
            return Err(format!("{} cannot be combined with a list of hosts: {why}", given.written));
        }
    }
    check_slots(line, &hosts)?;
    let arguments = arguments(name, line);
    if let [host] = hosts.as_slice()
        && host.name == "localhost"
    {
        let slots = host.slots.map(|slots| OsString::from(format!("--nproc-per-node={slots}")));
        let flags = std::iter::once(OsString::from("--nnodes=1")).chain(slots);
        return Ok(Hosts::This(flags.chain(arguments).collect()));
    }
    if let Some(host) = hosts.iter().find(|host| hosts.len() > 1 && host.is_loopback()) {
        return Err(format!(
            "host `{}` with other hosts: they cannot reach it under this name; give this machine's name",
            host.name
        ));
    }
    let is_set = |name: &str| line.given.iter().any(|given| given.flag.name == name);
    Ok(Hosts::Others(SshLaunch {
        hosts,
        ssh: ssh(line)?,
        join_timeout: join_timeout(line)?,
        export: export(line)?,
        called_as: name.word(),
        arguments,
        has_endpoint: is_set("rdzv-endpoint"),
        labels_ranks: !matches!(line.target, Some(Target::Trainer(_))) && !is_set("tee"),
    }))
}

fn read_hosts(line: &Line) -> Result<Vec<Host>, String> {
    let given: Vec<_> =
        line.given.iter().filter(|given| ["hosts", "hostfile"].contains(&given.flag.name)).collect();
    let (given, value) = match given.as_slice() {
        [given] => (given, given.value.as_deref().unwrap_or_default()),
        [] => {
            let names = line.given.iter().filter(|given| FLAGS.contains(&given.flag.name));
            let mut names: Vec<&str> = names.map(|given| given.written.as_str()).collect();
            let mut seen = BTreeSet::new();
            names.retain(|name| seen.insert(*name));
            return Err(format!("{} can be used only with --hosts or --hostfile", names.join(" and ")));
        }
        [first, second, ..] if first.flag.name == second.flag.name => {
            return Err(format!("{} is given twice; list all hosts in one", first.written));
        }
        _ => return Err("--hosts and --hostfile cannot be combined".into()),
    };
    let source = format!("{} {}", given.written, value.display());
    let hosts = match given.flag.name {
        "hosts" => hosts::from_list(value.to_str().ok_or_else(|| format!("{source}: expected UTF-8"))?),
        _ => read_file(Path::new(value)).and_then(|text| hosts::from_file(&text)),
    };
    hosts.map_err(|error| format!("{source}: {error}"))
}

fn read_file(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let read = file.take(hosts::MAX_FILE_BYTES + 1).read_to_string(&mut text);
    match read.map_err(|error| error.to_string())? {
        length if length as u64 > hosts::MAX_FILE_BYTES => {
            Err(format!("is larger than {} bytes", hosts::MAX_FILE_BYTES))
        }
        _ => Ok(text),
    }
}

/// Refuses a number of workers for all hosts that contradicts the slots of one of them.
fn check_slots(line: &Line, hosts: &[Host]) -> Result<(), String> {
    let Some(given) = line.last("nproc-per-node") else { return Ok(()) };
    let nproc = given.value.as_deref().unwrap_or_default();
    match hosts.iter().find(|host| host.slots.is_some_and(|slots| nproc != OsStr::new(&slots.to_string()))) {
        Some(Host { name, slots }) => Err(format!(
            "{} {} and the {} slots of host `{name}` contradict each other: give one of them",
            given.written,
            nproc.display(),
            slots.unwrap_or_default()
        )),
        None => Ok(()),
    }
}

fn ssh(line: &Line) -> Result<Vec<String>, String> {
    let words = match line.last("ssh") {
        None => vec![SSH.to_owned()],
        Some(given) => {
            let text = given.value.as_deref().unwrap_or_default();
            let words = text.to_str().and_then(shlex::split).filter(|words| !words.is_empty());
            words.ok_or_else(|| {
                format!("--ssh {}: expected a command, quoted as for a shell", text.display())
            })?
        }
    };
    // Programs other than OpenSSH may not know these options.
    let options = SSH_OPTIONS.iter().filter(|_| is_openssh(&words)).map(|option| (*option).to_owned());
    Ok(words.iter().cloned().chain(options).collect())
}

/// Returns whether a command runs OpenSSH, perhaps through another program: `sshpass -e ssh -F cluster.conf`.
fn is_openssh(words: &[String]) -> bool {
    let is_client = |word: &String| word == SSH || word.ends_with("/bin/ssh");
    words.first().is_some_and(|first| Path::new(first).file_name() == Some(OsStr::new(SSH)))
        || words.iter().any(is_client)
}

/// Returns the time for all hosts to accept connections, which is the time for all nodes to join.
fn join_timeout(line: &Line) -> Result<Duration, String> {
    let Some(given) = line.last("rdzv-conf") else { return Ok(DEFAULT_JOIN_TIMEOUT) };
    let text = given.value.as_deref().and_then(OsStr::to_str).unwrap_or_default();
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    // The last one applies, as it does on the hosts.
    let value = pairs.rev().find(|(key, _)| ["join_timeout", "timeout"].contains(&key.trim()));
    let seconds = value.map(|(_, seconds)| values::seconds(seconds.trim())).transpose();
    // The hosts parse the other keys.
    let seconds = seconds.map_err(|error| format!("{} {text}: {error}", given.written))?;
    Ok(seconds.unwrap_or(DEFAULT_JOIN_TIMEOUT))
}

fn export(line: &Line) -> Result<Vec<String>, String> {
    let given = line.given.iter().filter(|given| given.flag.name == "export");
    let name = |value: &OsStr| match value.to_str() {
        Some(name) if !name.is_empty() && !name.contains('=') => Ok(name.to_owned()),
        _ => Err(format!("--export {}: expected the name of a variable", value.display())),
    };
    given.map(|given| name(given.value.as_deref().unwrap_or_default())).collect()
}

/// Returns the command line without the flags of this module. Flags have their full names, with their values attached.
fn arguments(name: Name, line: &Line) -> Vec<OsString> {
    let mut arguments = Vec::new();
    for given in line.given.iter().filter(|given| !FLAGS.contains(&given.flag.name)) {
        let mut argument = OsString::from(format!("--{}", given.flag.name));
        if let Some(value) = &given.value {
            argument.push("=");
            argument.push(value);
        }
        arguments.push(argument);
    }
    match &line.target {
        // For torchrun, `--` only ends the flags.
        Some(Target::Script(argv)) if name == Name::Torchrun => {
            arguments.push("--".into());
            arguments.extend(argv.iter().cloned());
        }
        Some(Target::Script(argv)) => arguments.extend(argv.iter().cloned()),
        Some(Target::Program(argv)) => {
            arguments.push("--".into());
            arguments.extend(argv.iter().cloned());
        }
        Some(Target::Trainer(config)) => arguments.push(config.clone()),
        None => {}
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: Name, words: &[&str]) -> Result<Hosts, String> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        launch(name, &Line::read(name, &words).unwrap())
    }

    fn others(name: Name, words: &[&str]) -> SshLaunch {
        match read(name, words).unwrap() {
            Hosts::Others(launch) => launch,
            Hosts::This(_) => panic!("a local launch"),
        }
    }

    #[test]
    fn hosts_get_the_rest_of_the_command_line_with_the_same_meaning() {
        for (name, words, expected) in [
            (
                Name::Xlaunch,
                vec!["--hosts", "a,b", "--nproc", "2", "-r3", "x.py", "--hosts", "mine"],
                vec!["--nproc-per-node=2", "--redirects=3", "x.py", "--hosts", "mine"],
            ),
            (
                Name::Xlaunch,
                vec![
                    "t.toml",
                    "--hosts=a",
                    "--set",
                    "train.lr=1",
                    "--resume",
                    "--export",
                    "A",
                    "--ssh=my ssh",
                ],
                vec!["--set=train.lr=1", "--resume", "t.toml"],
            ),
            (Name::Xlaunch, vec!["-m", "--hosts", "a", "pkg", "-x"], vec!["--module", "pkg", "-x"]),
            (
                Name::Xlaunch,
                vec!["--hosts", "a", "--", "sh", "-c", "echo \"it's\"\n"],
                vec!["--", "sh", "-c", "echo \"it's\"\n"],
            ),
            (
                Name::Torchrun,
                vec!["--hosts", "a", "--role=-x", "--", "-s", "y"],
                vec!["--role=-x", "--", "-s", "y"],
            ),
        ] {
            let launch = others(name, &words);
            assert_eq!(launch.arguments, expected, "{words:?}");
            // Parsing the arguments again gives the same flags and the same target.
            let (first, second) = (
                Line::read(name, &launch.arguments).unwrap(),
                Line::read(name, &words.iter().map(OsString::from).collect::<Vec<_>>()).unwrap(),
            );
            assert_eq!(first.target, second.target);
            assert!(!are_given(&first));
        }
    }

    #[test]
    fn own_options_follow_those_of_the_users_ssh_command() {
        let words = |value: &str| others(Name::Xlaunch, &["--hosts=a", "--ssh", value, "x.py"]).ssh.join(" ");
        let options =
            "-T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=5 -o ServerAliveCountMax=6";
        assert_eq!(others(Name::Xlaunch, &["--hosts=a", "x.py"]).ssh.join(" "), format!("ssh {options}"));
        for (given, expected) in [
            ("ssh -F 'my config' -p 22", "ssh -F my config -p 22"),
            ("/opt/openssh/ssh -o ServerAliveInterval=1", "/opt/openssh/ssh -o ServerAliveInterval=1"),
            ("sshpass -e /usr/bin/ssh -i key", "sshpass -e /usr/bin/ssh -i key"),
        ] {
            assert_eq!(words(given), format!("{expected} {options}"));
        }
        assert_eq!(words("tsh ssh-of-teleport"), "tsh ssh-of-teleport");
    }

    #[test]
    fn hosts_are_tried_until_the_join_timeout() {
        let timeout = |conf: &[&str]| {
            others(Name::Xlaunch, &[&["--hosts=a"][..], conf, &["x.py"]].concat()).join_timeout.as_secs()
        };
        assert_eq!((timeout(&[]), timeout(&["--rdzv-conf=join_timeout=5,is_host=0"])), (600, 5));
        let refused = read(Name::Xlaunch, &["--hosts=a", "--rdzv-conf=join_timeout=soon", "x.py"]);
        assert!(refused.unwrap_err().contains("join_timeout=soon"));
    }

    #[test]
    fn localhost_alone_needs_no_ssh() {
        let local = |list: &str| match read(Name::Xlaunch, &["--hosts", list, "x.py"]).unwrap() {
            Hosts::This(arguments) => arguments,
            Hosts::Others(launch) => panic!("{launch:?}"),
        };
        assert_eq!(local("localhost"), ["--nnodes=1", "x.py"]);
        assert_eq!(local("localhost:2,localhost"), ["--nnodes=1", "--nproc-per-node=3", "x.py"]);
        assert_eq!(others(Name::Xlaunch, &["--hosts", "ada@localhost", "x.py"]).hosts.len(), 1);
    }

    #[test]
    fn host_file_is_read_and_named_in_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        let flag = format!("--hostfile={}", path.display());
        let missing = read(Name::Xlaunch, &[&flag, "x.py"]).unwrap_err();
        assert!(missing.starts_with(&format!("--hostfile {}: No such file", path.display())), "{missing}");
        fs_err::write(&path, "a slots=2\nb\n").unwrap();
        let hosts = others(Name::Xlaunch, &[&flag, "x.py"]).hosts;
        let named: Vec<_> = hosts.iter().map(|host| (host.name.as_str(), host.slots)).collect();
        assert_eq!(named, [("a", Some(2)), ("b", None)]);
        fs_err::write(&path, "a\n-x\n").unwrap();
        let refused = read(Name::Xlaunch, &[&flag, "x.py"]).unwrap_err();
        assert!(refused.contains("hosts: line 2: `-x` is not a host"), "{refused}");
        fs_err::write(&path, " ".repeat((1 << 20) + 1)).unwrap();
        let refused = read(Name::Xlaunch, &[&flag, "x.py"]).unwrap_err();
        assert!(refused.contains("is larger than 1048576 bytes"), "{refused}");
    }

    #[test]
    fn contradictions_are_refused() {
        for (words, error) in [
            ("--ssh x --export A a.py", "--ssh and --export can be used only with --hosts or --hostfile"),
            ("--export A --export B a.py", "--export can be used only with --hosts"),
            ("--hosts a --hosts b a.py", "--hosts is given twice"),
            ("--hosts a --hostfile b a.py", "--hosts and --hostfile cannot be combined"),
            (
                "--hosts a,b --nnodes 2 a.py",
                "--nnodes cannot be combined with a list of hosts: the hosts are",
            ),
            ("--hosts a --standalone a.py", "--standalone cannot be combined with a list of hosts"),
            ("--hosts a:4 --nproc 2 a.py", "--nproc 2 and the 4 slots of host `a` contradict each other"),
            ("--hosts a,localhost a.py", "host `localhost` with other hosts: they cannot reach it"),
            ("--hosts a --export A=b a.py", "--export A=b: expected the name of a variable"),
            ("--hosts a --ssh= a.py", "--ssh : expected a command"),
            ("--hosts a --ssh=' a.py", "--ssh ': expected a command, quoted as for a shell"),
        ] {
            let refused = read(Name::Xlaunch, &words.split(' ').collect::<Vec<_>>()).unwrap_err();
            assert!(refused.starts_with(error), "{words}: {refused}");
        }
        assert_eq!(others(Name::Xlaunch, &["--hosts=a:4", "--nproc=4", "a.py"]).hosts[0].slots, Some(4));
    }
}
