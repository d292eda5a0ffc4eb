//! Connections over loopback: who gets in, who does not, and what the user is told.

mod limits;
mod munge;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use xlaunch_proto::command::Endpoint;

use super::connect::Reason;
use super::tls::Tls;
use super::{Connection, ListenError, Listener, Security, Token, connect, connect_to_port};

/// For hangs.
const DEADLINE: Duration = Duration::from_secs(60);

fn token(text: &str) -> Token {
    Token::from_bytes(text.into(), "test").unwrap()
}

fn with_token() -> Security {
    Security::from_token(&token("0123456789abcdef")).unwrap()
}

fn with_other_token() -> Security {
    Security::from_token(&token("0123456789abcdeg")).unwrap()
}

/// Listens on a free port of 127.0.0.1.
fn listen(security: Security) -> (Listener, u16) {
    let listener = Listener::bind(&[(Ipv4Addr::LOCALHOST, 0).into()], security).unwrap();
    let port = listener.addresses()[0].port();
    (listener, port)
}

/// Serves gRPC until the test ends; every connection that was yielded is counted.
fn serve(listener: Listener) -> mpsc::UnboundedReceiver<SocketAddr> {
    let (yielded, connections) = mpsc::unbounded_channel();
    let incoming = listener.incoming().map(move |stream| {
        use tonic::transport::server::Connected;
        let _ = yielded.send(stream.as_ref().unwrap().connect_info().peer);
        stream
    });
    let (_, health) = tonic_health::server::health_reporter();
    tokio::spawn(tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming));
    connections
}

fn start(security: Security) -> (u16, mpsc::UnboundedReceiver<SocketAddr>) {
    let (listener, port) = listen(security);
    (port, serve(listener))
}

async fn call(connection: &Connection) -> Result<(), tonic::Status> {
    let request = HealthCheckRequest { service: String::new() };
    HealthClient::new(connection.channel.clone()).check(request).await.map(drop)
}

async fn dial(port: u16, security: &Security) -> Result<Connection, Reason> {
    let connected = connect_to_port("127.0.0.1", port, security);
    tokio::time::timeout(DEADLINE, connected).await.unwrap().map_err(|error| error.reason)
}

#[tokio::test]
async fn call_works_with_the_token_and_without_security_over_both_families() {
    for security in [with_token(), Security::Insecure] {
        let both: [SocketAddr; 2] = [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()];
        let listener = Listener::bind(&both, security.clone()).unwrap();
        let addresses = listener.addresses();
        let mut connections = serve(listener);
        for address in addresses {
            let connection =
                connect_to_port(&address.ip().to_string(), address.port(), &security).await.unwrap();
            call(&connection).await.unwrap();
            assert_eq!((connection.peer, connection.local.ip()), (address, address.ip()));
            assert_eq!(connections.recv().await.unwrap(), connection.local);
        }
    }
}

#[tokio::test]
async fn name_with_addresses_that_refuse_is_connected_by_another_one() {
    // `localhost` usually has ::1 first, where nothing listens.
    let (port, _connections) = start(with_token());
    let connection = connect_to_port("localhost", port, &with_token()).await.unwrap();
    call(&connection).await.unwrap();
}

#[tokio::test]
async fn another_token_is_refused_and_named() {
    let (port, mut connections) = start(with_token());
    let error = connect_to_port("127.0.0.1", port, &with_other_token()).await.unwrap_err();
    assert!(matches!(error.reason, Reason::WrongToken), "{error:?}");
    assert!(!error.is_transient());
    let message = error.to_string();
    assert!(
        message.starts_with(&format!("failed to connect to the coordinator at 127.0.0.1:{port}: its token"))
    );
    assert!(
        message.contains("give all nodes the same `--token-file`") && !message.contains('\n'),
        "{message}"
    );
    assert!(connections.try_recv().is_err());
}

#[test]
fn keys_are_never_shown() {
    assert_eq!(format!("{:?}", with_token()), "Token(Tls)");
}

#[tokio::test]
async fn key_of_the_other_role_is_refused_by_both_sides() {
    let impostor = || Security::Token(Arc::new(Tls::impostor(&token("0123456789abcdef"))));
    let (port, _connections) = start(impostor());
    assert!(matches!(dial(port, &with_token()).await, Err(Reason::WrongToken)));
    let (port, mut connections) = start(with_token());
    // The alert may be lost: the coordinator closes while the impostor still sends.
    assert!(matches!(dial(port, &impostor()).await, Err(Reason::WrongToken | Reason::Closed(_))));
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn caller_without_token_is_told_that_tls_is_expected() {
    let (port, mut connections) = start(with_token());
    assert!(matches!(dial(port, &Security::Insecure).await, Err(Reason::WantsTls)));
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn caller_with_token_is_told_that_the_coordinator_has_none() {
    let (port, mut connections) = start(Security::Insecure);
    assert!(matches!(dial(port, &with_token()).await, Err(Reason::NotTls)));
    assert!(connections.try_recv().is_err());
}

#[tokio::test]
async fn other_programs_are_recognised() {
    async fn answering(answer: &'static [u8]) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(answer).await;
                let _ = stream.shutdown().await;
                let _ = stream.read(&mut [0; 4096]).await;
            }
        });
        port
    }
    let http = answering(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert!(matches!(dial(http, &with_token()).await, Err(Reason::NotTls)));
    assert!(matches!(dial(http, &Security::Insecure).await, Err(Reason::Foreign)));
    let silent = answering(b"").await;
    for security in [with_token(), Security::Insecure] {
        assert!(matches!(dial(silent, &security).await, Err(Reason::Closed(_))));
    }
}

#[tokio::test]
async fn missing_coordinator_is_a_transient_error() {
    let (listener, port) = listen(with_token());
    drop(listener);
    let error = connect_to_port("127.0.0.1", port, &with_token()).await.unwrap_err();
    assert!(matches!(error.reason, Reason::Refused) && error.is_transient(), "{error:?}");
    let error = connect_to_port("name.invalid", 29400, &with_token()).await.unwrap_err();
    assert!(matches!(error.reason, Reason::Resolve(_)) && error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("name.invalid:29400: the name does not resolve"), "{error}");
}

#[tokio::test]
async fn ports_of_other_jobs_are_skipped_by_both_sides() {
    let endpoint = |ports: &[u16]| Endpoint { host: "127.0.0.1".into(), ports: ports.to_vec() };
    let (other, _other_job) = start(with_other_token());
    let (reserved, free) = listen(Security::Insecure);
    drop(reserved);
    // Nothing listens yet: the other job's refusal must not end the attempts.
    let error = connect(&endpoint(&[other, free]), &with_token()).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let listener = Listener::bind_host(&endpoint(&[other, free]), with_token()).await.unwrap();
    assert_eq!(listener.addresses(), [SocketAddr::from((Ipv4Addr::LOCALHOST, free))]);
    let _connections = serve(listener);
    let connection = connect(&endpoint(&[other, free]), &with_token()).await.unwrap();
    assert_eq!(connection.peer.port(), free);
    let error = Listener::bind_host(&endpoint(&[other, free]), with_token()).await.unwrap_err();
    assert!(matches!(&error, ListenError::InUse(addresses) if addresses.len() == 2), "{error}");
    assert!(
        error
            .to_string()
            .contains(&format!("failed to listen on 127.0.0.1:{other}, 127.0.0.1:{free}: another"))
    );
}

/// Sends bytes and waits until the connection is closed.
async fn send_raw(port: u16, bytes: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    // The listener may close the connection meanwhile.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let closed = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut Vec::new())).await;
    closed.unwrap().unwrap_or_default();
}

/// What an agent sends to a coordinator while it connects and makes a call.
async fn recorded_connection(coordinator: u16, security: &Security) -> Vec<u8> {
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = proxy.local_addr().unwrap().port();
    let recording = tokio::spawn(async move {
        let (agent, _) = proxy.accept().await.unwrap();
        let (mut from_agent, mut to_agent) = agent.into_split();
        let (mut answers, mut out) =
            TcpStream::connect(("127.0.0.1", coordinator)).await.unwrap().into_split();
        let back = tokio::spawn(async move { tokio::io::copy(&mut answers, &mut to_agent).await });
        let (mut sent, mut chunk) = (Vec::new(), [0; 4096]);
        while let Ok(read @ 1..) = from_agent.read(&mut chunk).await {
            sent.extend(&chunk[..read]);
            out.write_all(&chunk[..read]).await.unwrap();
        }
        back.abort();
        sent
    });
    let connection = dial(port, security).await.unwrap();
    call(&connection).await.unwrap();
    drop(connection);
    recording.await.unwrap()
}

#[tokio::test]
async fn replayed_handshake_is_refused() {
    let (port, mut connections) = start(with_token());
    let recorded = recorded_connection(port, &with_token()).await;
    connections.recv().await.unwrap();
    assert!(recorded.len() > 200);
    send_raw(port, &recorded).await;
    assert!(connections.try_recv().is_err());
    // The listener is unharmed.
    call(&dial(port, &with_token()).await.unwrap()).await.unwrap();
}
