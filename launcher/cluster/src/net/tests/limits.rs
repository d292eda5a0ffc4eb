//! Callers that are not agents: silent, slow, or sending arbitrary bytes.

use std::time::Instant;

use tokio::task::JoinSet;
use xlaunch_host::spawn::raise_open_file_limit;

use super::*;
use crate::net::callers::{MAX_PENDING, MAX_WAITING};
use crate::net::listener::HANDSHAKE_TIMEOUT;

const SILENT_CALLERS: usize = 1000;
/// Time for all agents to get in, against hangs only: a thousand handshakes take minutes on a machine that is busy with
/// other work.
const ALL_DEADLINE: Duration = Duration::from_secs(1200);

async fn silent_callers(port: u16, count: usize) -> Vec<TcpStream> {
    raise_open_file_limit();
    let mut callers = Vec::with_capacity(count);
    for _ in 0..count {
        callers.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    callers
}

/// Dials again and again, as agents do: on a busy machine, one of a thousand may be displaced.
async fn dial_until_connected(port: u16, security: Security) -> Connection {
    loop {
        match dial(port, &security).await {
            Ok(connection) => return connection,
            Err(Reason::Closed(_) | Reason::Stalled) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

async fn dial_all(port: u16, security: &Security, count: usize) -> Vec<Connection> {
    raise_open_file_limit();
    let mut agents = JoinSet::new();
    for _ in 0..count {
        let security = security.clone();
        agents.spawn(dial_until_connected(port, security));
    }
    tokio::time::timeout(ALL_DEADLINE, agents.join_all()).await.unwrap()
}

fn is_open(stream: &TcpStream) -> bool {
    let mut byte = [0];
    matches!(stream.try_read(&mut byte), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_get_in_while_a_thousand_callers_are_silent() {
    for security in [with_token(), Security::Insecure] {
        let (port, _connections) = start(security.clone());
        let silent = silent_callers(port, SILENT_CALLERS).await;
        let start = Instant::now();
        let agents = dial_all(port, &security, 50).await;
        // Less than the time for which the callers could have kept the listener busy: 1000 / 64 x 5 s = 78 s.
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
        for agent in &agents {
            call(agent).await.unwrap();
        }
        let open = silent.iter().filter(|stream| is_open(stream)).count();
        assert!(open <= MAX_PENDING + MAX_WAITING, "{open}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_agents_get_in_at_once() {
    let (port, mut connections) = start(with_token());
    let agents = dial_all(port, &with_token(), 1000).await;
    for _ in &agents {
        connections.recv().await.unwrap();
    }
}

#[tokio::test]
async fn slow_handshake_is_dropped() {
    let check = async |security: Security| {
        let (port, mut connections) = start(security.clone());
        let recorded = recorded_connection(port, &security).await;
        connections.recv().await.unwrap();
        let start = Instant::now();
        let (mut reader, mut writer) = TcpStream::connect(("127.0.0.1", port)).await.unwrap().into_split();
        let drip = tokio::spawn(async move {
            for byte in recorded {
                if writer.write_all(&[byte]).await.is_err() {
                    return;
                }
                tokio::time::sleep(HANDSHAKE_TIMEOUT / 20).await;
            }
        });
        let _ = tokio::time::timeout(DEADLINE, reader.read_to_end(&mut Vec::new())).await.unwrap();
        let elapsed = start.elapsed();
        assert!(elapsed < 4 * HANDSHAKE_TIMEOUT, "{elapsed:?}");
        drip.abort();
        assert!(connections.try_recv().is_err());
    };
    tokio::join!(check(with_token()), check(Security::Insecure));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arbitrary_bytes_do_no_harm() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % below as u64).unwrap()
    };
    let (port, mut connections) = start(with_token());
    let recorded = recorded_connection(port, &with_token()).await;
    connections.recv().await.unwrap();
    let mut callers = JoinSet::new();
    for round in 0..300 {
        let bytes: Vec<u8> = match round % 3 {
            0 => (0..random(3000)).map(|_| u8::try_from(random(256)).unwrap()).collect(),
            // A TLS handshake record with random contents and a random length in its header.
            1 => {
                let mut bytes: Vec<u8> =
                    (0..5 + random(20_000)).map(|_| u8::try_from(random(256)).unwrap()).collect();
                bytes[..3].copy_from_slice(&[22, 3, 1]);
                bytes
            }
            _ => {
                let mut bytes = recorded.clone();
                let at = random(bytes.len());
                bytes[at] ^= 1 << random(8);
                bytes.truncate(1 + random(bytes.len()));
                bytes
            }
        };
        callers.spawn(async move { send_raw(port, &bytes).await });
    }
    callers.join_all().await;
    assert!(connections.try_recv().is_err());
    call(&dial(port, &with_token()).await.unwrap()).await.unwrap();
}
