//! The job's token: the secret that its nodes share, and the keys derived from it.
//!
//! ```text
//! --token-file, XLAUNCH_TOKEN, or random --> Token --HKDF-SHA256--> key of the coordinator, key of the agents
//! ```
//! Every node derives both keys, so the members of a job trust each other. Two keys are needed nevertheless, so that a
//! message of one role can never be sent back to its author as a message of the other role.
//!
//! The coordinator proves its key before it knows the caller, so any process that reaches the port can test guesses of
//! the token offline. A token must therefore be random. Its length is checked here; its randomness cannot be.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ring::rand::{SecureRandom, SystemRandom};
use ring::{hkdf, hmac};
use xlaunch_spec::exit::ExitCode;
use zeroize::Zeroizing;

/// Environment variable with the token.
pub const TOKEN_VARIABLE: &str = "XLAUNCH_TOKEN";
/// Minimum length of a token in bytes.
pub const MIN_TOKEN_BYTES: usize = 16;
/// Maximum length of a token in bytes.
pub const MAX_TOKEN_BYTES: usize = 4096;

/// Byte order mark, with which some editors of Windows begin a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Number of random bytes in a generated token.
const GENERATED_BYTES: usize = 32;
/// Separates the keys of this protocol version from other uses of the same token.
const KEY_DOMAIN: &[u8] = b"xlaunch group protocol 1";
const COORDINATOR_KEY: &[u8] = b"ed25519 key of the coordinator";
const AGENT_KEY: &[u8] = b"ed25519 key of the agents";

/// The secret that the nodes of a job share. Overwritten when dropped, and never shown.
pub struct Token(Zeroizing<Vec<u8>>);

/// Seeds of the Ed25519 keys of both roles.
pub(super) struct Seeds {
    pub(super) coordinator: Zeroizing<[u8; 32]>,
    pub(super) agent: Zeroizing<[u8; 32]>,
}

/// The reason why there is no usable token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Too few bytes to be a secret.
    #[error(
        "the token in {origin} has {bytes} bytes, expected at least {MIN_TOKEN_BYTES}; make one with \
         `openssl rand -hex 32`"
    )]
    Short {
        /// Source of the token.
        origin: String,
        /// Length of the token.
        bytes: usize,
    },
    /// Too many bytes.
    #[error(
        "the token in {origin} has more than {MAX_TOKEN_BYTES} bytes; make one with `openssl rand -hex 32`"
    )]
    Long {
        /// Source of the token.
        origin: String,
    },
    /// The path leads to a directory.
    #[error("token file `{}` is a directory", .0.display())]
    Directory(PathBuf),
    /// Other users can read the file.
    #[error(
        "token file `{}` is open to other users (mode {mode:04o}); run `chmod 600` on it and use a new token",
        path.display()
    )]
    Readable {
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// The file belongs to another ordinary user, who therefore knows the token.
    #[error("token file `{}` belongs to user {owner}; copy it to a file of your own", path.display())]
    Foreign {
        path: PathBuf,
        /// User id of the owner.
        owner: u32,
    },
    /// The file cannot be read.
    #[error("failed to read token file `{}`: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    /// The system provides no random numbers.
    #[error("failed to generate a token: the system has no random numbers")]
    Random,
}

impl TokenError {
    /// Returns the exit code of `xlaunch` for this error.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Random => ExitCode::Internal,
            _ => ExitCode::Usage,
        }
    }
}

impl Token {
    /// Reads the token from a file that no other user can read. A file of root may be open to a group: administrators
    /// and Kubernetes hand out secrets that way.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is open to other users, belongs to another user, or has no usable token.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let failed = |source| TokenError::File { path: path.into(), source };
        let file = std::fs::File::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        if found.is_dir() {
            return Err(TokenError::Directory(path.into()));
        }
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        let own = rustix::process::geteuid().as_raw();
        if owner != own && owner != 0 {
            return Err(TokenError::Foreign { path: path.into(), owner });
        }
        let others = if owner == 0 && own != 0 { 0o007 } else { 0o077 };
        if mode & others != 0 {
            return Err(TokenError::Readable { path: path.into(), mode });
        }
        // One byte more than allowed, a byte order mark, and two for the end of the line. With this capacity the buffer
        // is never reallocated, which would leave a copy of the token in memory.
        let most = BYTE_ORDER_MARK.len() + MAX_TOKEN_BYTES + 3;
        let mut bytes = Zeroizing::new(Vec::with_capacity(most));
        file.take(most as u64).read_to_end(&mut bytes).map_err(failed)?;
        Self::parse(bytes, &format!("`{}`", path.display()))
    }

    /// Returns the token in [`TOKEN_VARIABLE`], if that is set and not empty.
    ///
    /// # Errors
    /// Fails if the token is too short or too long.
    pub fn from_environment() -> Result<Option<Self>, TokenError> {
        Self::from_variable(TOKEN_VARIABLE)
    }

    /// Returns the token in an environment variable, if that is set and not empty.
    ///
    /// # Errors
    /// Fails if the token is too short or too long.
    pub fn from_variable(name: &str) -> Result<Option<Self>, TokenError> {
        let set = std::env::var_os(name).filter(|value| !value.is_empty());
        set.map(|value| Self::parse(Zeroizing::new(value.into_vec()), name)).transpose()
    }

    /// Accepts a token sent by a parent process, with or without the end of a line; `origin` is for messages.
    ///
    /// # Errors
    /// Fails if the token is too short or too long.
    pub fn from_bytes(bytes: Vec<u8>, origin: &str) -> Result<Self, TokenError> {
        Self::parse(Zeroizing::new(bytes), origin)
    }

    /// Generates a random token of printable characters.
    ///
    /// # Errors
    /// Fails if the system provides no random numbers.
    pub fn generate() -> Result<Self, TokenError> {
        let mut random = Zeroizing::new([0; GENERATED_BYTES]);
        SystemRandom::new().fill(random.as_mut()).map_err(|_| TokenError::Random)?;
        let digit = |nibble: u8| b"0123456789abcdef"[usize::from(nibble & 15)];
        let mut text = Zeroizing::new(Vec::with_capacity(2 * GENERATED_BYTES));
        text.extend(random.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]));
        Ok(Self(text))
    }

    /// Returns the token's bytes, to hand it to another node. Must not be shown or logged.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// Returns whether a caller sent this token, in a time that does not depend on how much of it is right.
    pub fn is(&self, sent: &[u8]) -> bool {
        // Any key does: only the comparison of equally long tags matters.
        let key = hmac::Key::new(hmac::HMAC_SHA256, KEY_DOMAIN);
        hmac::verify(&key, sent, hmac::sign(&key, &self.0).as_ref()).is_ok()
    }

    fn parse(mut bytes: Zeroizing<Vec<u8>>, origin: &str) -> Result<Self, TokenError> {
        // Files of Windows editors have a carriage return before the line feed.
        for end in [b'\n', b'\r'] {
            bytes.pop_if(|last| *last == end);
        }
        if bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        match bytes.len() {
            0..MIN_TOKEN_BYTES => Err(TokenError::Short { origin: origin.into(), bytes: bytes.len() }),
            MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES => Ok(Self(bytes)),
            _ => Err(TokenError::Long { origin: origin.into() }),
        }
    }

    /// Derives the seeds of both keys; `None` if the cryptographic library fails.
    pub(super) fn seeds(&self) -> Option<Seeds> {
        let secret = hkdf::Salt::new(hkdf::HKDF_SHA256, KEY_DOMAIN).extract(&self.0);
        let derive = |role: &[u8]| {
            let mut seed = Zeroizing::new([0; 32]);
            secret.expand(&[role], hkdf::HKDF_SHA256).ok()?.fill(seed.as_mut()).ok()?;
            Some(seed)
        };
        Some(Seeds { coordinator: derive(COORDINATOR_KEY)?, agent: derive(AGENT_KEY)? })
    }
}

impl Seeds {
    /// Creates random seeds, for keys that are known only to this process.
    pub(super) fn random() -> Option<Self> {
        let mut seeds = Self { coordinator: Zeroizing::new([0; 32]), agent: Zeroizing::new([0; 32]) };
        let random = SystemRandom::new();
        random.fill(seeds.coordinator.as_mut()).ok()?;
        random.fill(seeds.agent.as_mut()).ok()?;
        Some(seeds)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn file(dir: &Path, text: &str, mode: u32) -> PathBuf {
        let path = dir.join(format!("token-{mode:o}-{}", text.len()));
        fs_err::write(&path, text).unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn token_is_compared_as_a_whole() {
        let token = Token::from_bytes(SECRET.into(), "test").unwrap();
        assert!(token.is(SECRET.as_bytes()));
        for other in ["", "0123456789abcde", "0123456789abcdeF", "0123456789abcdef0"] {
            assert!(!token.is(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn token_file_is_read_without_the_end_of_its_line() {
        let dir = tempfile::tempdir().unwrap();
        for (end, expected) in [("", 16), ("\n", 16), ("\r\n", 16), ("\n\n", 17)] {
            let text = format!("{SECRET}{end}");
            let token = Token::read(&file(dir.path(), &text, 0o600)).unwrap();
            assert_eq!(token.expose().len(), expected, "{text:?}");
        }
        let longest = "x".repeat(MAX_TOKEN_BYTES);
        assert!(Token::read(&file(dir.path(), &format!("\u{feff}{longest}\r\n"), 0o400)).is_ok());
    }

    #[test]
    fn byte_order_mark_is_not_part_of_a_token() {
        let dir = tempfile::tempdir().unwrap();
        let token = Token::read(&file(dir.path(), &format!("\u{feff}{SECRET}\r\n"), 0o600)).unwrap();
        assert_eq!(token.expose(), SECRET.as_bytes());
    }

    #[test]
    fn short_long_missing_and_open_token_files_are_usage_errors() {
        let dir = tempfile::tempdir().unwrap();
        let long = "x".repeat(MAX_TOKEN_BYTES + 1);
        for (text, mode, problem) in [
            ("0123456789abcde\n", 0o600, "has 15 bytes, expected at least 16; make one with `openssl"),
            ("", 0o600, "has 0 bytes"),
            (&long, 0o600, "more than 4096 bytes"),
            (SECRET, 0o644, "open to other users (mode 0644); run `chmod 600`"),
            (SECRET, 0o640, "mode 0640"),
            (SECRET, 0o602, "mode 0602"),
        ] {
            let error = Token::read(&file(dir.path(), text, mode)).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
            assert!(!error.to_string().contains(SECRET), "{error}");
            assert_eq!(error.exit_code(), ExitCode::Usage);
        }
        let error = Token::read(&dir.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("failed to read token file") && error.contains("No such file"), "{error}");
        fs_err::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = Token::read(dir.path()).unwrap_err();
        assert!(error.to_string().ends_with("` is a directory"), "{error}");
        assert_eq!(error.exit_code(), ExitCode::Usage);
    }

    #[test]
    fn token_is_never_shown() {
        let token = Token::from_bytes(SECRET.into(), "test").unwrap();
        assert_eq!(format!("{token:?}"), "Token");
    }

    #[test]
    fn generated_tokens_differ_and_are_printable() {
        let (one, other) = (Token::generate().unwrap(), Token::generate().unwrap());
        assert_ne!(one.expose(), other.expose());
        assert_eq!(one.expose().len(), 64);
        assert!(one.expose().iter().all(u8::is_ascii_hexdigit));
    }

    #[test]
    fn roles_and_tokens_have_keys_of_their_own_that_never_change() {
        let seeds = |text: &str| Token::from_bytes(text.into(), "test").unwrap().seeds().unwrap();
        let (one, same, other) = (seeds(SECRET), seeds(SECRET), seeds("0123456789abcdeF"));
        assert_eq!(
            (one.coordinator.as_slice(), one.agent.as_slice()),
            (same.coordinator.as_slice(), same.agent.as_slice())
        );
        assert_ne!(one.coordinator, one.agent);
        assert_ne!(one.coordinator, other.coordinator);
        assert_ne!(one.agent, other.agent);
        // Nodes of one protocol version must agree: RFC 5869 with the constants above, computed independently.
        let hex: String = one.agent.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "b6ae5c84ca782f514feda358fd61af9101f9aa0e39a57562c3d6c7af3d621449");
    }
}
