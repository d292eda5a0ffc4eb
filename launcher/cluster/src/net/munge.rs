//! Authentication by munge, for clusters where Slurm has set it up and the job has no token.
//!
//! ```text
//! agent --TLS, any keys-- coordinator          both now know the channel's id, and no third process does
//!   |<---- ready ------------------------------|
//!   |----- credential of (agent, id) ---------->|  unmunge: same user? same id?
//!   |<---- accepted, credential of (coordinator, id) --|
//! ```
//! munge proves to any host of the cluster which user made a credential. With the id of the TLS channel inside, a
//! credential is worthless on any other channel: a process in the middle has a separate channel with each side, and the
//! two have different ids. The role inside keeps a credential from being sent back to its author.
//!
//! Credentials are made and checked by the programs `munge` and `unmunge`, so that no library has to be linked.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::process::Command;
use tokio::sync::Semaphore;

use super::TlsError;
use super::tls::ChannelId;

const PROGRAM_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum number of simultaneous programs: a host may have fewer cores than callers.
const MAX_PROGRAMS: usize = 16;
/// A credential with a short payload has about 250 bytes.
const MAX_CREDENTIAL_BYTES: usize = 4096;
const MAX_CREDENTIAL_OUTPUT_BYTES: u64 = 8192;
const MAX_MESSAGE_CHARS: usize = 200;

const REFUSED: u8 = 0;
const ACCEPTED: u8 = 1;
/// Sent at once, so that the agent can tell it from the alert that a coordinator with a token sends.
const READY: u8 = 2;

/// The reason why authentication by munge failed.
#[derive(Debug, thiserror::Error)]
pub enum MungeError {
    /// The program is not installed.
    #[error(
        "munge is not available: `{program}` is not installed; install it on all nodes, give them a token \
         (`--token-file`, `XLAUNCH_TOKEN`), or use `--rdzv-insecure` on a trusted network"
    )]
    Missing { program: String },
    /// A program reports an error.
    #[error(
        "munge failed: `{program}`: {message}; check that munged runs on all nodes with the same key and synchronised \
         clocks, or give them a token (`--token-file`, `XLAUNCH_TOKEN`)"
    )]
    Failed {
        program: String,
        /// First line of its error output.
        message: String,
    },
    /// A program did not end in time.
    #[error("munge failed: `{program}` did not end within {} s; check that munged runs", PROGRAM_TIMEOUT.as_secs())]
    TimedOut { program: String },
    /// The other side belongs to another user.
    #[error("the other side runs as user {uid}; run all nodes of a job as one user")]
    OtherUser {
        /// User id of the other side.
        uid: u32,
    },
    /// The credential was made for another connection or role.
    #[error(
        "the other side sent a munge credential that was made for another connection; there may be a proxy in between"
    )]
    OtherChannel,
    /// The coordinator did not accept the credential.
    #[error("it refused this node's munge credential: {0}")]
    Refused(Refusal),
    /// The message does not belong to this protocol.
    #[error("the other side sent a malformed munge credential")]
    Malformed,
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// There are no keys for TLS.
    #[error(transparent)]
    Tls(TlsError),
}

/// The reason why a coordinator did not accept a credential, sent as a byte after [`REFUSED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Refusal {
    /// No reason given, as by a coordinator of version 0.2.0.
    #[error("run all nodes as one user, with the same munge key and synchronised clocks")]
    Unknown = 0,
    /// The credential cannot be decoded.
    #[error("the munge keys of the two hosts differ; give all nodes the same `munge.key`")]
    OtherKey = 1,
    /// The credential's time is too far in the past or in the future.
    #[error("the clocks of the two hosts differ by more than munge allows; synchronise them")]
    Clock = 2,
    /// The credential belongs to another user.
    #[error("it was made by another user; run all nodes of a job as one user")]
    OtherUser = 3,
    /// The credential was made for another connection or role.
    #[error("it was made for another connection; there may be a proxy in between")]
    OtherChannel = 4,
    /// munged does not work on the coordinator's host.
    #[error("munge failed on the coordinator's host; check that munged runs there")]
    Broken = 5,
}

impl Refusal {
    const ALL: [Self; 6] =
        [Self::Unknown, Self::OtherKey, Self::Clock, Self::OtherUser, Self::OtherChannel, Self::Broken];

    fn of(error: &MungeError) -> Self {
        match error {
            // Matches the texts of munge's error codes.
            MungeError::Failed { message, .. } => match message.to_ascii_lowercase() {
                text if text.contains("expired") || text.contains("rewound") => Self::Clock,
                text if text.contains("invalid credential") => Self::OtherKey,
                _ => Self::Broken,
            },
            MungeError::OtherUser { .. } => Self::OtherUser,
            MungeError::OtherChannel => Self::OtherChannel,
            MungeError::Missing { .. } | MungeError::TimedOut { .. } => Self::Broken,
            _ => Self::Unknown,
        }
    }

    fn from_byte(byte: u8) -> Self {
        Self::ALL.into_iter().find(|refusal| *refusal as u8 == byte).unwrap_or(Self::Unknown)
    }
}

impl MungeError {
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Io(_) | Self::Refused(Refusal::Broken))
    }
}

/// The programs of munge.
#[derive(Clone, Debug)]
pub struct Munge {
    munge: PathBuf,
    unmunge: PathBuf,
    slots: Arc<Semaphore>,
}

#[derive(Clone, Copy)]
enum Role {
    Agent,
    Coordinator,
}

impl Munge {
    /// Uses the programs found in `PATH`.
    pub(super) fn installed() -> Self {
        Self::new("munge".into(), "unmunge".into())
    }

    pub(super) fn new(munge: PathBuf, unmunge: PathBuf) -> Self {
        Self { munge, unmunge, slots: Arc::new(Semaphore::new(MAX_PROGRAMS)) }
    }

    /// Makes and decodes a credential, to find out whether munge works here.
    pub(super) async fn check(&self) -> Result<(), MungeError> {
        let channel = [0; 32];
        let credential = self.encode(Role::Agent, &channel).await?;
        self.verify(&credential, Role::Agent, &channel).await
    }

    /// The coordinator's side of a channel: accepts an agent of the same user, or of root.
    pub(super) async fn authenticate_agent<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: &mut S,
        channel: &ChannelId,
    ) -> Result<(), MungeError> {
        stream.write_u8(READY).await?;
        stream.flush().await?;
        let credential = receive(stream).await?;
        if let Err(error) = self.verify(&credential, Role::Agent, channel).await {
            stream.write_all(&[REFUSED, Refusal::of(&error) as u8]).await?;
            stream.shutdown().await?;
            return Err(error);
        }
        let own = self.encode(Role::Coordinator, channel).await?;
        stream.write_u8(ACCEPTED).await?;
        send(stream, &own).await
    }

    /// An agent's side of a channel: accepts a coordinator of the same user, or of root.
    pub(super) async fn authenticate_coordinator<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: &mut S,
        channel: &ChannelId,
    ) -> Result<(), MungeError> {
        if stream.read_u8().await? != READY {
            return Err(MungeError::Malformed);
        }
        let own = self.encode(Role::Agent, channel).await?;
        send(stream, &own).await?;
        match stream.read_u8().await? {
            ACCEPTED => {}
            REFUSED => {
                let reason = stream.read_u8().await.unwrap_or_default();
                return Err(MungeError::Refused(Refusal::from_byte(reason)));
            }
            _ => return Err(MungeError::Malformed),
        }
        let credential = receive(stream).await?;
        self.verify(&credential, Role::Coordinator, channel).await
    }

    async fn encode(&self, role: Role, channel: &ChannelId) -> Result<Vec<u8>, MungeError> {
        let output = self.run(&self.munge, &[], payload(role, channel).as_bytes()).await?;
        let credential = output.trim_ascii();
        match credential.len() {
            1..=MAX_CREDENTIAL_BYTES => Ok(credential.to_vec()),
            _ => Err(MungeError::Malformed),
        }
    }

    async fn verify(&self, credential: &[u8], role: Role, channel: &ChannelId) -> Result<(), MungeError> {
        let output = self.run(&self.unmunge, &["--keys=UID"], credential).await?;
        let (uid, found) = decoded(&output).ok_or(MungeError::Malformed)?;
        if uid != 0 && uid != rustix::process::geteuid().as_raw() {
            return Err(MungeError::OtherUser { uid });
        }
        if found != payload(role, channel).as_bytes() {
            return Err(MungeError::OtherChannel);
        }
        Ok(())
    }

    /// Runs a program and returns its output if it succeeds.
    async fn run(&self, program: &Path, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>, MungeError> {
        let name = || program.display().to_string();
        // The semaphore is never closed, so this does not fail.
        let _slot = self.slots.acquire().await;
        let mut command = Command::new(program);
        command.args(arguments).env("LC_ALL", "C").kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => MungeError::Missing { program: name() },
            _ => MungeError::Failed { program: name(), message: error.to_string() },
        })?;
        let work = async {
            if let Some(mut stdin) = child.stdin.take() {
                // A program that ends early gives the reason in its output.
                let _ = stdin.write_all(input).await;
            }
            let (stdout, stderr) = tokio::join!(read(child.stdout.take()), read(child.stderr.take()));
            let status = child.wait().await?;
            if status.success() {
                Ok(stdout)
            } else {
                Err(MungeError::Failed { program: name(), message: first_line(&stderr) })
            }
        };
        let done = tokio::time::timeout(PROGRAM_TIMEOUT, work).await;
        done.unwrap_or_else(|_| Err(MungeError::TimedOut { program: name() }))
    }
}

/// Text about a refused credential for the user of the coordinator's node.
pub(super) fn refused_credential(error: &MungeError) -> String {
    match Refusal::of(error) {
        Refusal::Broken | Refusal::Unknown => error.to_string(),
        refusal => format!("its munge credential is not accepted: {refusal}"),
    }
}

fn payload(role: Role, channel: &ChannelId) -> String {
    let role = match role {
        Role::Agent => "agent",
        Role::Coordinator => "coordinator",
    };
    let channel: String = channel.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("xlaunch group 1 {role} {channel}")
}

/// Parses user and payload from the output of `unmunge --keys=UID`: `UID: name (1000)`, an empty line, the payload.
fn decoded(output: &[u8]) -> Option<(u32, &[u8])> {
    let end = output.windows(2).position(|pair| pair == b"\n\n")?;
    let head = std::str::from_utf8(&output[..end]).ok()?;
    let value = head.lines().find_map(|line| line.strip_prefix("UID:"))?;
    let number = value.trim().trim_end_matches(')');
    let number = number.rsplit_once('(').map_or(number, |(_, number)| number);
    Some((number.parse().ok()?, &output[end + 2..]))
}

async fn read(output: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(output) = output {
        // A read error just ends the output.
        let _ = output.take(MAX_CREDENTIAL_OUTPUT_BYTES).read_to_end(&mut bytes).await;
    }
    bytes
}

/// Returns the first line for a message, shortened and without control characters.
fn first_line(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("failed without a message");
    let line =
        line.trim_start_matches("munge: ").trim_start_matches("unmunge: ").trim_start_matches("Error: ");
    line.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect()
}

async fn send<S: AsyncWrite + Unpin>(stream: &mut S, credential: &[u8]) -> Result<(), MungeError> {
    let length = u16::try_from(credential.len()).map_err(|_| MungeError::Malformed)?;
    stream.write_u16(length).await?;
    stream.write_all(credential).await?;
    Ok(stream.flush().await?)
}

async fn receive<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Vec<u8>, MungeError> {
    let length = usize::from(stream.read_u16().await?);
    if length == 0 || length > MAX_CREDENTIAL_BYTES {
        return Err(MungeError::Malformed);
    }
    let mut credential = vec![0; length];
    stream.read_exact(&mut credential).await?;
    Ok(credential)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_payload_are_found_in_the_output_of_unmunge() {
        for (output, expected) in [
            ("UID:             root (0)\n\npay\n\nload", Some((0, "pay\n\nload"))),
            ("UID:             1000\n\nx", Some((1000, "x"))),
            ("STATUS:  Success (0)\nUID:   a (b) (7)\n\n", Some((7, ""))),
            ("UID:             root\n\nx", None),
            ("UID:             root (0)\n", None),
            ("GID:             root (0)\n\nUID: root (0)\n\n", None),
            ("", None),
        ] {
            let expected = expected.map(|(uid, text)| (uid, text.as_bytes()));
            assert_eq!(decoded(output.as_bytes()), expected, "{output:?}");
        }
    }

    #[test]
    fn message_of_a_program_is_one_printable_line() {
        let text = b"\nunmunge: Error: Replayed \x1b[31mcredential\nmore";
        assert_eq!(first_line(text), "Replayed [31mcredential");
        assert_eq!(first_line(b""), "failed without a message");
    }
}
