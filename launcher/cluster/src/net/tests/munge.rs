//! Authentication by munge: with scripts in place of its programs, and with a real munged if available.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;
use crate::net::MungeError;
use crate::net::munge::{Munge, Refusal};

/// Encodes by writing the output that `unmunge` is to print, for the user who runs the test.
const MUNGE: &str = "printf 'UID:   someone (%s)\\n\\n' \"$(id -u)\"; cat";
/// Same, as if another user had made the credential.
const MUNGE_OF_OTHER: &str = "printf 'UID:   someone (4242)\\n\\n'; cat";
const UNMUNGE: &str = "cat";

/// Security with scripts in place of munge's programs.
fn scripts(dir: &Path, munge: &str, unmunge: &str) -> Security {
    let script = |name: &str, text: &str| {
        let path = dir.join(name);
        // Another process writes the file: a test that starts a program at the same time would inherit the descriptor,
        // and a file that is open for writing cannot be executed.
        let mut command = Command::new("sh");
        command.args(["-c", "printf '%s' \"$1\" > \"$0\"; chmod 700 \"$0\""]).arg(&path);
        assert!(command.arg(format!("#!/bin/sh\n{text}\n")).status().unwrap().success());
        path
    };
    with_programs(Munge::new(script("munge", munge), script("unmunge", unmunge)))
}

fn with_programs(munge: Munge) -> Security {
    Security::Munge(Arc::new((Tls::ephemeral().unwrap(), munge)))
}

fn dirs() -> [tempfile::TempDir; 2] {
    [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]
}

#[tokio::test]
async fn same_user_gets_in() {
    let [one, other] = dirs();
    let (port, _connections) = start(scripts(one.path(), MUNGE, UNMUNGE));
    call(&dial(port, &scripts(other.path(), MUNGE, UNMUNGE)).await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn other_user_is_refused_by_both_sides() {
    let [one, other] = dirs();
    let good = scripts(one.path(), MUNGE, UNMUNGE);
    let bad = scripts(other.path(), MUNGE_OF_OTHER, UNMUNGE);
    let (port, mut connections) = start(good.clone());
    let refused = dial(port, &bad).await.unwrap_err();
    assert!(matches!(refused, Reason::Munge(MungeError::Refused(Refusal::OtherUser))), "{refused:?}");
    assert!(connections.try_recv().is_err());
    let (port, mut connections) = start(bad);
    let refused = dial(port, &good).await.unwrap_err();
    assert!(matches!(refused, Reason::Munge(MungeError::OtherUser { uid: 4242 })), "{refused:?}");
    assert!(connections.try_recv().is_err());
}

/// The texts and exit codes are those of unmunge 0.5.
#[tokio::test]
async fn refusal_says_whether_clocks_keys_or_munged_are_the_problem() {
    for (text, exit, expected, words) in [
        ("Expired credential", 15, Refusal::Clock, "the clocks of the two hosts differ"),
        ("Rewound credential", 16, Refusal::Clock, "the clocks of the two hosts differ"),
        ("Invalid credential", 8, Refusal::OtherKey, "give all nodes the same `munge.key`"),
        (
            "Failed to access \"/run/munge/munge.socket.2\"",
            6,
            Refusal::Broken,
            "check that munged runs there",
        ),
    ] {
        let [one, other] = dirs();
        let unmunge = format!("cat >/dev/null; echo 'unmunge: Error: {text}' >&2; exit {exit}");
        let (port, mut connections) = start(scripts(one.path(), MUNGE, &unmunge));
        let refused = dial(port, &scripts(other.path(), MUNGE, UNMUNGE)).await.unwrap_err();
        let is_expected = matches!(&refused, Reason::Munge(MungeError::Refused(it)) if *it == expected);
        assert!(is_expected && refused.to_string().contains(words), "{text}: {refused:?}: {refused}");
        assert!(connections.try_recv().is_err());
    }
}

/// A process in the middle has a TLS channel with agent and coordinator each, and relays their messages.
#[tokio::test]
async fn relayed_credential_is_refused() {
    let [one, other] = dirs();
    let (port, mut connections) = start(scripts(one.path(), MUNGE, UNMUNGE));
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let relay_port = relay.local_addr().unwrap().port();
    tokio::spawn(async move {
        let tls = Tls::ephemeral().unwrap();
        let (agent, _) = relay.accept().await.unwrap();
        let mut agent = tokio_rustls::TlsAcceptor::from(tls.acceptor_config()).accept(agent).await.unwrap();
        let coordinator = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let mut coordinator =
            tls.connector().connect(Tls::server_name().unwrap(), coordinator).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut agent, &mut coordinator).await;
    });
    let refused = dial(relay_port, &scripts(other.path(), MUNGE, UNMUNGE)).await.unwrap_err();
    assert!(matches!(refused, Reason::Munge(MungeError::Refused(Refusal::OtherChannel))), "{refused:?}");
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn credential_of_a_caller_with_huge_length_or_own_role_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (port, mut connections) = start(scripts(dir.path(), MUNGE, UNMUNGE));
    for message in [&b"\xff\xffMUNGE"[..], b"\0\0", b"\0\x05UID: ", b"\0\x1eUID: root (0)\n\nxlaunch group 1"]
    {
        let tls = Tls::ephemeral().unwrap();
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let mut stream = tls.connector().connect(Tls::server_name().unwrap(), stream).await.unwrap();
        stream.write_all(message).await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut answer)).await.unwrap();
        assert!(read.is_err() || !answer.contains(&1), "{answer:?}");
    }
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn token_of_one_side_does_not_pass_for_munge() {
    let dir = tempfile::tempdir().unwrap();
    let munge = scripts(dir.path(), MUNGE, UNMUNGE);
    let (port, _connections) = start(with_token());
    let refused = dial(port, &munge).await.unwrap_err();
    assert!(matches!(refused, Reason::WrongToken), "{refused:?}");
    let (port, mut connections) = start(munge);
    assert!(matches!(dial(port, &with_token()).await, Err(Reason::WrongToken)));
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn unusable_programs_are_named_with_what_to_do() {
    let missing = Munge::new("/nonexistent/munge".into(), "/nonexistent/unmunge".into());
    let error = missing.check().await.unwrap_err().to_string();
    for part in ["`/nonexistent/munge` is not installed", "--token-file", "--rdzv-insecure"] {
        assert!(error.contains(part), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let check = |munge: &str| {
        let Security::Munge(pair) = scripts(dir.path(), munge, UNMUNGE) else { unreachable!() };
        async move { pair.1.check().await.unwrap_err().to_string() }
    };
    let error = check("echo 'munge: Error: Failed to access \"/run/munge\"' >&2; exit 6").await;
    assert!(error.contains("munge`: Failed to access \"/run/munge\"; check that munged runs"), "{error}");
    let error = check("exec sleep 1000").await;
    assert!(error.contains("did not end within 4 s"), "{error}");
    let error = check("head -c 100000 /dev/zero | tr '\\0' x").await;
    assert!(error.contains("malformed") || error.contains("failed"), "{error}");
}

/// A munged for this test alone.
struct Munged(Child);

impl Drop for Munged {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Munged {
    fn start(dir: &Path) -> Option<Self> {
        let path = |name: &str| dir.join(name).display().to_string();
        fs_err::write(dir.join("key"), Token::generate().unwrap().expose()).unwrap();
        fs_err::set_permissions(dir.join("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
        let places = [
            ("socket", "socket"),
            ("key-file", "key"),
            ("log-file", "log"),
            ("pid-file", "pid"),
            ("seed-file", "seed"),
        ];
        let options = places.map(|(option, name)| format!("--{option}={}", path(name)));
        let found = ["munged", "/usr/sbin/munged"].into_iter().find_map(|program| {
            let mut command = Command::new(program);
            command.args(["--foreground", "--force"]).args(&options);
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
        });
        let munged = Self(found?);
        let start = std::time::Instant::now();
        while !dir.join("socket").exists() {
            assert!(start.elapsed() < DEADLINE, "munged did not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(munged)
    }
}

#[tokio::test]
async fn real_munge_admits_hosts_with_the_same_key() {
    let [one, other] = dirs();
    let (Some(_first), Some(_second)) = (Munged::start(one.path()), Munged::start(other.path())) else {
        eprintln!("not run: real_munge_admits_hosts_with_the_same_key: needs munge (Debian package `munge`)");
        return;
    };
    let with = |dir: &Path| {
        let socket = dir.join("socket").display().to_string();
        let program = |name: &str| format!("exec {name} --socket={socket} \"$@\"");
        scripts(dir, &program("munge"), &program("unmunge"))
    };
    let security = with(one.path());
    let (port, mut connections) = start(security.clone());
    call(&dial(port, &security).await.unwrap()).await.unwrap();
    connections.recv().await.unwrap();
    // A host with another key.
    let refused = dial(port, &with(other.path())).await.unwrap_err();
    assert!(matches!(refused, Reason::Munge(MungeError::Refused(Refusal::OtherKey))), "{refused:?}");
    assert!(connections.try_recv().is_err());
}
