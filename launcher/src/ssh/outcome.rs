//! Turns the exits of the ssh clients into messages and an exit code. Pure.
//!
//! Every host that fails before the job starts is named with its reason. Afterwards the exit code is that of the job:
//! all agents end with the same one. A connection that is lost while the job runs ends the job, as its host ends its
//! workers.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use xlaunch_spec::exit::ExitCode;
use xlaunch_spec::refusal::Refusal;

use super::wire::NO_INPUT;
use crate::render::text::escape;

/// ssh's own exit code.
const SSH_FAILED: i32 = 255;
/// Exit codes of shells for programs that cannot be executed and that do not exist.
const NOT_STARTED: [i32; 2] = [126, 127];
/// Maximum number of lines of ssh's stderr in a message.
const SHOWN_LINES: usize = 3;

/// The reason why a host is not ready to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The ssh client could not be started.
    NoClient(String),
    /// The ssh client has gone to the background, so the exit code of the host would be lost.
    Background,
    /// ssh, or the host, ended before the host was ready.
    Ended { status: Option<i32>, greeted: bool, stderr: String },
    /// The host has a different build of xlaunch.
    OtherBuild(String),
    /// The host did not answer in time.
    Silent { seconds: u64, stderr: String },
}

/// Messages of ssh for a host that is not up yet or cannot be reached. Unknown host names are not included: they are
/// more often misspelt than late to appear.
const NOT_UP_YET: [&str; 11] = [
    "Connection refused",
    "Connection timed out",
    "Operation timed out",
    "Connection reset by",
    "Connection closed by",
    "No route to host",
    "Network is unreachable",
    "Host is down",
    "Temporary failure in name resolution",
    "kex_exchange_identification",
    "System is booting up",
];

impl Failure {
    /// Returns whether the host may just not be up yet.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Ended { status: Some(SSH_FAILED), greeted: false, stderr } => {
                NOT_UP_YET.iter().any(|text| stderr.contains(text))
            }
            _ => false,
        }
    }

    /// Returns the reason as shown in a line about a host that is waited for.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Ended { stderr, .. } | Self::Silent { stderr, .. } => or_silent(stderr),
            Self::NoClient(error) => escape(error),
            Self::Background => "ssh has gone to the background".into(),
            Self::OtherBuild(other) => escape(other),
        }
    }
}

/// The properties of the launch that messages mention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'a> {
    /// The ssh command.
    pub(super) ssh: &'a [String],
    /// Path of this program.
    pub(super) program: &'a str,
    pub(super) build: &'a str,
}

/// Returns the error for the hosts that failed before the start. `failures` is not empty.
pub(super) fn refusal(failures: &[(&str, Failure)], context: Context<'_>) -> Refusal {
    let lines: Vec<String> = failures.iter().map(|(host, failure)| message(host, failure, context)).collect();
    let exits = || failures.iter().map(|(_, failure)| exit(failure));
    // A host that cannot be reached may come back later; anything else needs a change by the user.
    let code = exits().find(|exit| *exit == ExitCode::Usage).unwrap_or(ExitCode::Rendezvous);
    let mut helps: Vec<String> =
        failures.iter().map(|(host, failure)| help(host, failure, context)).collect();
    helps.dedup_by_key(|help| help.split('`').next().unwrap_or_default().to_owned());
    let helps = helps.iter().map(|help| format!("\nhelp: {help}")).collect::<String>();
    Refusal::new(code, lines.join("\nerror: ") + &helps)
}

fn message(host: &str, failure: &Failure, context: Context<'_>) -> String {
    let program = context.program;
    match failure {
        Failure::NoClient(error) => {
            let client = context.ssh.first().map_or("ssh", String::as_str);
            format!("failed to run `{client}`: {error}")
        }
        Failure::Background => {
            format!("ssh to `{host}` has gone to the background: its exit code would be lost")
        }
        Failure::Ended { status: Some(status), greeted: false, stderr } if NOT_STARTED.contains(status) => {
            format!("`{host}` cannot run `{program}`: {}", or_silent(stderr))
        }
        Failure::Ended { status: Some(SSH_FAILED) | None, stderr, .. } => {
            format!("ssh to `{host}` failed: {}", or_silent(stderr))
        }
        Failure::Ended { status: Some(status), greeted: false, stderr } => {
            format!("`{host}`: `{program}` did not start (exit code {status}): {}", or_silent(stderr))
        }
        Failure::Ended { stderr, .. } => {
            let text = or_silent(stderr);
            format!("`{host}`: {}", text.strip_prefix("error: ").unwrap_or(&text))
        }
        Failure::OtherBuild(other) => {
            format!("`{host}` has xlaunch {} at `{program}`, but this is {}", escape(other), context.build)
        }
        Failure::Silent { seconds, stderr } => {
            let said =
                if stderr.trim().is_empty() { String::new() } else { format!(": {}", or_silent(stderr)) };
            format!("ssh to `{host}` gave no answer within {seconds} s{said}")
        }
    }
}

fn exit(failure: &Failure) -> ExitCode {
    match failure {
        Failure::Ended { status: Some(SSH_FAILED) | None, .. } | Failure::Silent { .. } => {
            ExitCode::Rendezvous
        }
        _ => ExitCode::Usage,
    }
}

fn help(host: &str, failure: &Failure, context: Context<'_>) -> String {
    match failure {
        Failure::NoClient(_) => "give another ssh client with --ssh".into(),
        Failure::Background => {
            let client = context.ssh.first().map_or("ssh", String::as_str);
            format!("give `--ssh '{client} -o ForkAfterAuthentication=no'`, and no `-f`")
        }
        // A host's `RemoteCommand` in ssh's configuration, such as one that opens tmux.
        Failure::Ended { stderr, .. }
            if stderr.contains("Cannot execute command-line and remote command") =>
        {
            let client = context.ssh.first().map_or("ssh", String::as_str);
            format!("give `--ssh '{client} -o RemoteCommand=none'`")
        }
        Failure::Silent { .. } | Failure::Ended { status: Some(SSH_FAILED) | None, .. } => {
            format!("this must work without a prompt: `{} {host} true`", context.ssh.join(" "))
        }
        Failure::Ended { greeted: true, stderr, .. } if stderr.contains(NO_INPUT) => {
            let client = context.ssh.first().map_or("ssh", String::as_str);
            format!("give `--ssh '{client} -o StdinNull=no'`, and no `-n`")
        }
        Failure::Ended { greeted: true, .. } => {
            "all hosts need the same directories under the same paths".into()
        }
        Failure::Ended { .. } | Failure::OtherBuild(_) => {
            format!("all hosts need the same xlaunch under the same path, `{}`", context.program)
        }
    }
}

/// Returns the last lines on stderr, joined to one line.
fn or_silent(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    match lines.get(lines.len().saturating_sub(SHOWN_LINES)..) {
        None | Some([]) => "it printed no reason".into(),
        Some(last) => last.iter().map(|line| escape(line)).collect::<Vec<_>>().join("; "),
    }
}

/// The exits of the hosts of a running job.
#[derive(Debug)]
pub(super) struct Outcomes {
    /// Exit code of each host, by node rank; `None` while it runs.
    exits: Vec<Option<i32>>,
    /// The first connection that was lost while the job ran, by node rank.
    lost: Option<usize>,
}

impl Outcomes {
    pub(super) fn new(hosts: usize) -> Self {
        Self { exits: vec![None; hosts], lost: None }
    }

    /// Records that a host has ended. Returns whether its connection is the first to be lost.
    pub(super) fn ended(&mut self, node: usize, status: Option<ExitStatus>) -> bool {
        let code = status.and_then(|status| status.code());
        // If the job has failed on other hosts, the lost connection may be a consequence.
        let failed = self.exits.iter().flatten().any(|code| *code != 0);
        let is_lost = code.is_none_or(|code| code == SSH_FAILED);
        if let Some(exit) = self.exits.get_mut(node) {
            *exit = Some(code.unwrap_or(SSH_FAILED));
        }
        if is_lost && !failed && self.lost.is_none() {
            self.lost = Some(node);
            return true;
        }
        false
    }

    /// Returns how the launch has failed, for whatever has started it; `None` if it has not. The hosts' own reports are
    /// on stderr.
    pub(super) fn failure<'a>(&self, host: impl Fn(usize) -> Option<&'a str>) -> Option<Refusal> {
        let exit = self.exit();
        let first =
            self.lost.or_else(|| self.exits.iter().position(|code| code.is_some_and(|code| code != 0)));
        let name = host(first?).unwrap_or_default();
        let how = match self.lost {
            Some(_) => "the connection was lost".to_owned(),
            None => format!("exit code {}: {}", exit.code(), exit.meaning()),
        };
        (exit != ExitCode::Done).then(|| Refusal::new(exit, format!("the job failed on `{name}`: {how}")))
    }

    /// Returns the exit code of the launch: that of the lowest node rank that did not succeed.
    pub(super) fn exit(&self) -> ExitCode {
        let failed = self.exits.iter().flatten().find(|code| **code != 0);
        match (self.lost, failed) {
            (Some(_), _) | (None, Some(&SSH_FAILED)) => ExitCode::Rendezvous,
            (None, Some(code)) => exit_code(*code),
            (None, None) => ExitCode::Done,
        }
    }
}

/// Returns the message about a host whose connection was lost, from the exit status of its ssh client.
pub(super) fn lost(host: &str, status: Option<ExitStatus>) -> String {
    let how = match status {
        Some(status) if status.signal().is_some() => format!("its client ended by {status}"),
        _ => "the connection was lost".into(),
    };
    format!("ssh to `{host}` failed: {how}; the other hosts are told to stop")
}

fn exit_code(code: i32) -> ExitCode {
    let other = || u8::try_from(code).map_or(ExitCode::WorkerFailed, ExitCode::Worker);
    ExitCode::from_code(code).unwrap_or_else(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(failures: &[(&str, Failure)]) -> (u8, String) {
        let ssh = ["ssh".to_owned(), "-F".into(), "config".into()];
        let context = Context { ssh: &ssh, program: "/opt/xlaunch", build: "0.2.0" };
        let refusal = refusal(failures, context);
        (refusal.exit.code(), refusal.message)
    }

    fn ended(status: Option<i32>, greeted: bool, stderr: &str) -> Failure {
        Failure::Ended { status, greeted, stderr: stderr.into() }
    }

    #[test]
    fn each_host_that_failed_is_named_with_its_reason() {
        let unknown_key = "No ED25519 host key is known for b.\r\nHost key verification failed.\r\n";
        let (code, message) = refused(&[
            ("b", ended(Some(255), false, unknown_key)),
            ("c", ended(Some(255), false, "ada@c: Permission denied (publickey).\n")),
        ]);
        let expected = "ssh to `b` failed: No ED25519 host key is known for b.; Host key verification failed.\n\
            error: ssh to `c` failed: ada@c: Permission denied (publickey).\n\
            help: this must work without a prompt: `ssh -F config b true`";
        assert_eq!((code, message.as_str()), (69, expected));
    }

    #[test]
    fn missing_or_different_program_and_directory_are_named_with_their_host() {
        let help = "\nhelp: all hosts need the same xlaunch under the same path, `/opt/xlaunch`";
        for (failure, expected) in [
            (
                ended(Some(127), false, "sh: 1: exec: /opt/xlaunch: not found"),
                "`b` cannot run `/opt/xlaunch`: sh: 1: exec: /opt/xlaunch: not found",
            ),
            (
                Failure::OtherBuild("0.1.9".into()),
                "`b` has xlaunch 0.1.9 at `/opt/xlaunch`, but this is 0.2.0",
            ),
            (
                ended(Some(2), false, "error: unknown subcommand `remote`"),
                "`b`: `/opt/xlaunch` did not start (exit code 2): error: unknown subcommand `remote`",
            ),
        ] {
            assert_eq!(refused(&[("b", failure)]), (2, expected.to_owned() + help));
        }
        let (code, message) = refused(&[("b", ended(Some(2), true, "error: directory `/x`: not there\n"))]);
        let expected =
            "`b`: directory `/x`: not there\nhelp: all hosts need the same directories under the same paths";
        assert_eq!((code, message.as_str()), (2, expected));
    }

    #[test]
    fn silent_hosts_and_missing_clients_are_explained() {
        let (code, message) =
            refused(&[("b", Failure::Silent { seconds: 60, stderr: "Password:\n".into() })]);
        assert!(
            code == 69 && message.starts_with("ssh to `b` gave no answer within 60 s: Password:"),
            "{message}"
        );
        let (code, message) = refused(&[("b", Failure::NoClient("No such file".into()))]);
        let expected = "failed to run `ssh`: No such file\nhelp: give another ssh client with --ssh";
        assert_eq!((code, message.as_str()), (2, expected));
        let (code, message) = refused(&[("b", Failure::Background)]);
        let expected = "ssh to `b` has gone to the background: its exit code would be lost\n\
            help: give `--ssh 'ssh -o ForkAfterAuthentication=no'`, and no `-f`";
        assert_eq!((code, message.as_str()), (2, expected));
        let stderr = "Cannot execute command-line and remote command.\r\n";
        let (_, message) = refused(&[("b", ended(Some(255), false, stderr))]);
        assert!(message.ends_with("help: give `--ssh 'ssh -o RemoteCommand=none'`"), "{message}");
        let (_, message) = refused(&[("b", ended(None, false, ""))]);
        assert!(message.starts_with("ssh to `b` failed: it printed no reason"), "{message}");
    }

    #[test]
    fn host_that_is_not_up_yet_is_told_from_one_that_refuses() {
        let transient = |stderr: &str| ended(Some(255), false, stderr).is_transient();
        for stderr in [
            "ssh: connect to host b port 22: Connection refused\r\n",
            "ssh: connect to host b port 22: Connection timed out\r\n",
            "ssh: connect to host b port 22: No route to host\r\n",
            "ssh: Could not resolve hostname b: Temporary failure in name resolution\r\n",
            "kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.1 port 22\r\n",
            "\"System is booting up. Unprivileged users are not permitted to log in yet.\"\n\
             Connection closed by 10.0.0.1",
        ] {
            assert!(transient(stderr), "{stderr}");
        }
        for stderr in [
            "ada@b: Permission denied (publickey).\r\n",
            "Host key verification failed.\r\n",
            "ssh: Could not resolve hostname b: Name or service not known\r\n",
            "",
        ] {
            assert!(!transient(stderr), "{stderr}");
        }
        // The host was reached.
        assert!(!ended(Some(255), true, "Connection closed by b").is_transient());
        assert!(!ended(Some(2), false, "Connection refused").is_transient());
    }

    #[test]
    fn foreign_text_cannot_act_on_the_terminal() {
        let (_, message) = refused(&[("b", ended(Some(255), false, "\x1b[2Jgone"))]);
        assert!(message.contains("\\u{1b}[2Jgone"), "{message}");
    }

    #[test]
    fn exit_code_is_that_of_the_lowest_node_rank_that_failed() {
        let exited = |codes: &[i32]| {
            let mut outcomes = Outcomes::new(codes.len());
            // The last host ends first.
            for (node, code) in codes.iter().enumerate().rev() {
                outcomes.ended(node, Some(ExitStatus::from_raw(code << 8)));
            }
            outcomes.exit().code()
        };
        assert_eq!(exited(&[0, 0]), 0);
        assert_eq!(exited(&[0, 75, 1]), 75);
        assert_eq!(exited(&[143, 143]), 143);
        assert_eq!(exited(&[42, 0]), 42);
        // The connection was lost after the job had failed.
        assert_eq!(exited(&[1, 255, 1]), 1);
    }

    #[test]
    fn lost_connection_decides_the_exit_code() {
        let mut outcomes = Outcomes::new(2);
        assert!(outcomes.ended(1, Some(ExitStatus::from_raw(255 << 8))));
        assert!(!outcomes.ended(0, Some(ExitStatus::from_raw(143 << 8))));
        assert_eq!(outcomes.exit(), ExitCode::Rendezvous);
        let mut killed = Outcomes::new(1);
        assert!(killed.ended(0, Some(ExitStatus::from_raw(9))));
        let line = lost("b", Some(ExitStatus::from_raw(9)));
        assert!(line.starts_with("ssh to `b` failed: its client ended by signal: 9"), "{line}");
    }
}
