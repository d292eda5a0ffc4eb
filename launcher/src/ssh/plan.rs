//! The description of what each host runs: its command line, environment and directory. Pure.
//!
//! Node ranks are the positions of the hosts, and the coordinator listens on the first host, so a host needs only
//! ordinary flags in front of the user's.
//!
//! Environment: sshd's login environment, plus the variables below, plus those of `--export`. The variables below make
//! a launch on other hosts behave as on this one, where directory and program have the same paths: search paths of
//! programs and libraries, and settings of the communication libraries. Other variables may be secrets, or describe
//! this host (`CUDA_VISIBLE_DEVICES`).

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use xlaunch_proto::env;

use super::hosts::Host;
use super::wire::{Description, Token};

/// Variables that are sent to the hosts.
const EXPORTED: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"];
/// Prefixes of further variables that are sent to the hosts.
const EXPORTED_PREFIXES: [&str; 10] =
    ["NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "PYTHON", "OMP_", "PET_", "XLAUNCH_"];
/// Exceptions: an agent sets these for its workers, so they belong to a launch around this one. This launch has its own
/// token, and that of `xlaunch serve` is a secret of this host.
const OF_OUTER_LAUNCH: [&str; 10] = [
    env::TOKEN,
    env::SERVE_TOKEN,
    env::ACTIVITY_FD,
    env::AGENT_SOCKET,
    env::ATTEMPT,
    env::DEVICE,
    env::HEARTBEAT,
    env::JOB_ID,
    env::SCOPE,
    env::SNAPSHOT_FDS,
];
/// Exceptions: variables for torchrun's flags that `--hosts` itself sets.
const OF_THE_GROUP: [&str; 8] = [
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_LOCAL_ADDR",
    "PET_STANDALONE",
];
/// Variables with which users choose the labels of lines themselves.
const LABEL_VARIABLES: [&str; 2] = ["PET_LOG_LINE_PREFIX_TEMPLATE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"];

/// Range of the coordinator's port: below the ephemeral ports of Linux (from 32768), and above those of common
/// services.
const COORDINATOR_PORTS: std::ops::Range<u16> = 20_000..29_000;

/// A launch on several hosts, as its command line describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SshLaunch {
    /// Hosts in the order of their node ranks; not empty.
    pub(crate) hosts: Vec<Host>,
    /// Program and arguments of the ssh client.
    pub(crate) ssh: Vec<String>,
    /// Maximum time for all hosts to accept connections.
    pub(crate) join_timeout: Duration,
    /// Names of further variables to send to the hosts.
    pub(crate) export: Vec<String>,
    /// The name by which this program was called.
    pub(crate) called_as: &'static str,
    /// The command line without the flags about hosts.
    pub(crate) arguments: Vec<OsString>,
    /// True if the user has chosen the coordinator's endpoint.
    pub(crate) has_endpoint: bool,
    /// True if lines of workers may be preceded by their rank.
    pub(crate) labels_ranks: bool,
}

/// The properties of the launching process that the launch uses.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) directory: OsString,
    pub(super) environment: BTreeMap<OsString, OsString>,
    pub(super) random: [u8; 32],
    /// True if standard output is a terminal.
    pub(super) terminal: bool,
}

impl SshLaunch {
    /// Returns the descriptions of all hosts.
    ///
    /// # Errors
    /// A variable to export is not set.
    pub(super) fn descriptions(&self, origin: &Origin) -> Result<Vec<Description>, String> {
        let environment = self.environment(&origin.environment)?;
        let several = self.hosts.len() > 1;
        let describe = |(rank, host): (usize, &Host)| Description {
            directory: origin.directory.clone(),
            environment: environment.clone(),
            token: several.then(|| Token(hexadecimal(&origin.random))),
            called_as: self.called_as.into(),
            arguments: [self.flags(rank, host, origin), self.arguments.clone()].concat(),
        };
        Ok(self.hosts.iter().enumerate().map(describe).collect())
    }

    /// Returns the flags to insert in front of the user's arguments.
    fn flags(&self, rank: usize, host: &Host, origin: &Origin) -> Vec<OsString> {
        // Even for one host, as the flag takes precedence over every other source of the number of nodes.
        let mut flags = vec![format!("--nnodes={}", self.hosts.len())];
        if self.hosts.len() > 1 {
            flags.push(format!("--node-rank={rank}"));
            flags.push("--rdzv-backend=static".into());
            if let (false, Some(first)) = (self.has_endpoint, self.hosts.first()) {
                let (address, port) = (first.address(), coordinator_port(&origin.random));
                flags.push(if address.contains(':') {
                    format!("--rdzv-endpoint=[{address}]:{port}")
                } else {
                    format!("--rdzv-endpoint={address}:{port}")
                });
            }
        }
        // The hosts write to pipes, and by default an agent labels lines only on a terminal.
        let chosen = LABEL_VARIABLES.iter().any(|name| origin.environment.contains_key(OsStr::new(name)));
        if self.hosts.len() > 1 && self.labels_ranks && origin.terminal && !chosen {
            flags.push("--log-line-prefix-template=[${rank}] ".into());
        }
        flags.extend(host.slots.map(|slots| format!("--nproc-per-node={slots}")));
        flags.into_iter().map(OsString::from).collect()
    }

    fn environment(&self, own: &BTreeMap<OsString, OsString>) -> Result<Vec<(OsString, OsString)>, String> {
        if let Some(name) = self.export.iter().find(|name| !own.contains_key(OsStr::new(name))) {
            return Err(format!("--export {name}: this variable is not set"));
        }
        let is_requested = |name: &OsStr| self.export.iter().any(|export| name == OsStr::new(export));
        let chosen = own.iter().filter(|(name, _)| is_exported(name) || is_requested(name));
        Ok(chosen.map(|(name, value)| (name.clone(), value.clone())).collect())
    }
}

/// Returns whether a variable is sent to the hosts without `--export`.
fn is_exported(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let is_known =
        EXPORTED.contains(&name) || EXPORTED_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    is_known && !OF_OUTER_LAUNCH.contains(&name) && !OF_THE_GROUP.contains(&name)
}

/// Returns the list of variables that are sent to the hosts, as in the documentation.
#[cfg(test)]
fn exported() -> String {
    let names = EXPORTED.iter().map(|name| format!("`{name}`"));
    names.chain(EXPORTED_PREFIXES.iter().map(|prefix| format!("`{prefix}*`"))).collect::<Vec<_>>().join(", ")
}

/// Returns a random port, so that jobs that start on one host at the same time rarely take the same one.
fn coordinator_port(random: &[u8]) -> u16 {
    let number = random.iter().rev().take(2).fold(0, |number, byte| number << 8 | u16::from(*byte));
    COORDINATOR_PORTS.start + number % (COORDINATOR_PORTS.end - COORDINATOR_PORTS.start)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the command that ssh runs on a host, as one word: ssh passes it to the user's login shell there.
pub(super) fn remote_command(program: &OsStr) -> OsString {
    // `exec` leaves no shell waiting on the host.
    let command = [b"exec ", quote(program.as_bytes()).as_slice(), b" remote"].concat();
    OsString::from_vec(command)
}

/// Quotes a word for POSIX shells, csh and fish.
fn quote(word: &[u8]) -> Vec<u8> {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+,:@%".contains(byte);
    if !word.is_empty() && word.iter().all(is_plain) {
        return word.to_vec();
    }
    let mut quoted = b"'".to_vec();
    for byte in word {
        match byte {
            b'\'' => quoted.extend(b"'\\''"),
            // fish treats a backslash as an escape even within quotes, so it is written outside of them.
            b'\\' => quoted.extend(b"'\\\\'"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::ssh::hosts;

    fn launch(hosts: &str) -> SshLaunch {
        SshLaunch {
            hosts: hosts::from_list(hosts).unwrap(),
            ssh: vec!["ssh".into()],
            join_timeout: Duration::from_secs(600),
            export: Vec::new(),
            called_as: "xlaunch",
            arguments: vec!["--max-restarts=2".into(), "train.py".into(), "a b".into()],
            has_endpoint: false,
            labels_ranks: true,
        }
    }

    fn origin(variables: &[(&str, &str)]) -> Origin {
        let environment = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        Origin { directory: "/home/ada/run 7".into(), environment, random: [7; 32], terminal: false }
    }

    fn lines(launch: &SshLaunch) -> Vec<String> {
        let descriptions = launch.descriptions(&origin(&[])).unwrap();
        let line = |description: &Description| {
            let words = description.arguments.iter().map(|word| word.to_str().unwrap());
            words.collect::<Vec<_>>().join(" ")
        };
        descriptions.iter().map(line).collect()
    }

    #[test]
    fn hosts_get_rank_endpoint_and_slots_before_the_users_arguments() {
        let port = 20_000 + 7 * 256 + 7;
        let group = |rank| {
            format!("--nnodes=2 --node-rank={rank} --rdzv-backend=static --rdzv-endpoint=[fd77::1]:{port}")
        };
        let rest = "--max-restarts=2 train.py a b";
        let expected = [format!("{} {rest}", group(0)), format!("{} --nproc-per-node=4 {rest}", group(1))];
        assert_eq!(lines(&launch("ada@fd77::1,b:4")), expected);
        let chosen = SshLaunch { has_endpoint: true, ..launch("a,b") };
        assert!(lines(&chosen).iter().all(|line| !line.contains("--rdzv-endpoint")), "{chosen:?}");
    }

    #[test]
    fn lines_on_a_terminal_are_labelled_with_ranks() {
        let first = |launch: &SshLaunch, variables: &[(&str, &str)]| {
            let origin = Origin { terminal: true, ..origin(variables) };
            launch.descriptions(&origin).unwrap()[0].arguments.clone()
        };
        let label = OsString::from("--log-line-prefix-template=[${rank}] ");
        assert!(first(&launch("a,b"), &[]).contains(&label));
        assert!(!first(&launch("a,b"), &[("PET_LOG_LINE_PREFIX_TEMPLATE", "x")]).contains(&label));
        assert!(!first(&launch("a"), &[]).contains(&label));
        assert!(!first(&SshLaunch { labels_ranks: false, ..launch("a,b") }, &[]).contains(&label));
    }

    #[test]
    fn one_host_is_a_launch_on_one_node() {
        assert_eq!(lines(&launch("a:3")), ["--nnodes=1 --nproc-per-node=3 --max-restarts=2 train.py a b"]);
        assert_eq!(launch("a").descriptions(&origin(&[])).unwrap()[0].token, None);
    }

    #[test]
    fn token_is_random_equal_on_all_hosts_and_in_no_argument() {
        let several = launch("a,b,c");
        let descriptions = several.descriptions(&origin(&[])).unwrap();
        let token = descriptions[0].token.clone().unwrap();
        assert_eq!(token.0.len(), 64);
        assert!(descriptions.iter().all(|description| description.token.as_ref() == Some(&token)));
        assert!(!format!("{descriptions:?}").contains(&token.0));
        let other = Origin { random: [8; 32], ..origin(&[]) };
        assert_ne!(several.descriptions(&other).unwrap()[0].token, Some(token));
    }

    #[test]
    fn coordinator_port_is_outside_the_range_of_clients() {
        for random in [[0; 32], [255; 32], [128; 32]] {
            assert!(COORDINATOR_PORTS.contains(&coordinator_port(&random)));
        }
    }

    #[test]
    fn settings_of_libraries_are_exported_and_secrets_are_not() {
        let given = [
            ("PATH", "/opt/venv/bin:/bin"),
            ("NCCL_DEBUG", "INFO"),
            ("PYTHONPATH", "lib"),
            ("PET_MAX_RESTARTS", "3"),
            ("XLAUNCH_TRAIN_LR", "1"),
            ("WANDB_API_KEY", "k"),
            // Not exported, although their prefixes are.
            ("PET_NODE_RANK", "3"),
            ("XLAUNCH_TOKEN", "t"),
            ("XLAUNCH_SERVE_TOKEN", "t"),
            ("XLAUNCH_SCOPE", "s"),
            ("HOME", "/home/ada"),
            ("AWS_SECRET_ACCESS_KEY", "k"),
        ];
        let exported = |export: &[&str]| {
            let export = export.iter().map(|name| (*name).to_owned()).collect();
            let launch = SshLaunch { export, ..launch("a") };
            launch.descriptions(&origin(&given)).map(|descriptions| {
                let names = descriptions[0].environment.iter().map(|(name, _)| name.to_str().unwrap());
                names.collect::<Vec<_>>().join(" ")
            })
        };
        let default = "NCCL_DEBUG PATH PET_MAX_RESTARTS PYTHONPATH";
        assert_eq!(exported(&[]), Ok(format!("{default} XLAUNCH_TRAIN_LR")));
        let with_key = exported(&["WANDB_API_KEY", "PATH"]);
        assert_eq!(with_key, Ok(format!("{default} WANDB_API_KEY XLAUNCH_TRAIN_LR")));
        assert_eq!(exported(&["NO_SUCH"]), Err("--export NO_SUCH: this variable is not set".into()));
    }

    #[test]
    fn shells_read_the_quoted_path_as_it_is() {
        for path in [
            "/usr/bin/xlaunch",
            "/home/a b/x",
            "/it's/\"x\"",
            "/back\\slash\\'",
            "/$HOME/`x`/*",
            "/日本\n/x",
            "/~x/!y",
        ] {
            let command = remote_command(OsStr::new(path)).into_string().unwrap();
            let words = command.strip_prefix("exec ").unwrap();
            let output = Command::new("sh").arg("-c").arg(format!("printf '%s|' {words}")).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{path}|remote|"));
        }
        assert_eq!(remote_command(OsStr::new("/usr/bin/xlaunch")), "exec /usr/bin/xlaunch remote");
    }

    #[test]
    fn documents_list_the_exported_variables() {
        let page =
            include_str!("../../../docs/several-nodes.md").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(page.contains(&exported()), "docs/several-nodes.md should list {}", exported());
    }
}
