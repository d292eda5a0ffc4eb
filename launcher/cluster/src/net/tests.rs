//! Connections over loopback: which callers get in, which are refused, and what the user is told.

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
use xlaunch_spec::command::Endpoint;

use super::connect::{Reason, connect_to};
use super::tls::Tls;
use super::{Connection, Dialed, Dialer, ListenError, Listener, Security, Token, Urgency};

/// Limit that turns a hang into a failure.
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

/// Serves gRPC until the test ends. Sends the address of every connection that the listener yields.
fn serve(listener: Listener) -> mpsc::UnboundedReceiver<SocketAddr> {
    let (yielded, connections) = mpsc::unbounded_channel();
    let incoming = listener.incoming(mpsc::unbounded_channel().0).map(move |stream| {
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
    let address = (Ipv4Addr::LOCALHOST, port).into();
    tokio::time::timeout(DEADLINE, connect_to(address, security, || {})).await.unwrap()
}

/// Dials until a connection is made, no later attempt can succeed, or every candidate has failed.
async fn connect(endpoint: &Endpoint, security: &Security) -> Result<Connection, String> {
    let mut dialer = Dialer::new(endpoint.clone(), security.clone());
    let dialing = async {
        loop {
            if let Dialed::Connected(connection) = dialer.next(Urgency::Joining).await {
                return Ok(connection);
            }
            if let Some(error) = dialer.take_final_error() {
                return Err(format!("final: {error}"));
            }
            if dialer.is_exhausted() {
                return Err(dialer.problem());
            }
        }
    };
    tokio::time::timeout(DEADLINE, dialing).await.unwrap()
}

fn endpoint(ports: &[u16]) -> Endpoint {
    Endpoint { host: "127.0.0.1".into(), ports: ports.to_vec() }
}

#[tokio::test]
async fn call_works_with_the_token_and_without_security_over_both_families() {
    for security in [with_token(), Security::Insecure] {
        let both: [SocketAddr; 2] = [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()];
        let listener = Listener::bind(&both, security.clone()).unwrap();
        let addresses = listener.addresses();
        let mut connections = serve(listener);
        for address in addresses {
            let connection = connect_to(address, &security, || {}).await.unwrap();
            call(&connection).await.unwrap();
            assert_eq!((connection.peer, connection.local.ip()), (address, address.ip()));
            assert_eq!(connections.recv().await.unwrap(), connection.local);
        }
    }
}

#[tokio::test]
async fn next_address_of_a_name_is_tried_if_one_refuses() {
    // `localhost` usually resolves to ::1 first, where nothing listens.
    let (port, _connections) = start(with_token());
    let connection =
        connect(&Endpoint { host: "localhost".into(), ports: vec![port] }, &with_token()).await.unwrap();
    call(&connection).await.unwrap();
}

#[tokio::test]
async fn another_token_is_refused_and_named() {
    let (port, mut connections) = start(with_token());
    let error = connect(&endpoint(&[port]), &with_other_token()).await.unwrap_err();
    let message = error.strip_prefix("final: ").unwrap();
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
    let not_tls = dial(http, &with_token()).await.unwrap_err();
    assert!(
        matches!(not_tls, Reason::NotTls) && not_tls.to_string().contains("another program listens there")
    );
    assert!(matches!(dial(http, &Security::Insecure).await, Err(Reason::Foreign)));
    let silent = answering(b"").await;
    for security in [with_token(), Security::Insecure] {
        assert!(matches!(dial(silent, &security).await, Err(Reason::Closed(_))));
    }
}

#[tokio::test]
async fn dialer_waits_for_a_missing_coordinator() {
    let (listener, port) = listen(with_token());
    drop(listener);
    let error = connect(&endpoint(&[port]), &with_token()).await.unwrap_err();
    assert!(error.contains(&format!("at 127.0.0.1:{port}: connection refused; check the port")), "{error}");
    assert!(error.contains("the address is this host's own"), "{error}");
    let unknown = Endpoint { host: "name.invalid".into(), ports: vec![29400] };
    let error = connect(&unknown, &with_token()).await.unwrap_err();
    assert!(error.contains("name.invalid:29400: the name does not resolve"), "{error}");
    assert!(
        error.ends_with("; give `--rdzv-endpoint` a name or an address that all nodes can use"),
        "{error}"
    );
}

#[tokio::test]
async fn ports_of_other_jobs_are_skipped_by_both_sides() {
    let own = || with_token().for_job("slurm-1.0");
    // The other job has another token, or uses the same user's munge: it is told apart before authentication.
    let (other, _other_job) = start(with_other_token().for_job("slurm-2.0"));
    let (reserved, free) = listen(Security::Insecure);
    drop(reserved);
    // No coordinator listens yet: the refusal by the other job's must not end the attempts.
    let error = connect(&endpoint(&[other, free]), &own()).await.unwrap_err();
    assert!(!error.starts_with("final") && error.contains("the coordinator of another job"), "{error}");
    let listener = Listener::bind_host(&endpoint(&[other, free]), own()).await.unwrap();
    assert_eq!(listener.addresses(), [SocketAddr::from((Ipv4Addr::LOCALHOST, free))]);
    let _connections = serve(listener);
    let connection = connect(&endpoint(&[other, free]), &own()).await.unwrap();
    assert_eq!(connection.peer.port(), free);
    let error = Listener::bind_host(&endpoint(&[other, free]), with_token()).await.unwrap_err();
    assert!(matches!(&error, ListenError::InUse(addresses) if addresses.len() == 2), "{error}");
    assert!(
        error
            .to_string()
            .contains(&format!("failed to listen on 127.0.0.1:{other}, 127.0.0.1:{free}: another"))
    );
}

#[tokio::test]
async fn refused_token_is_final_although_other_ports_refuse_connections() {
    let (port, _connections) = start(with_other_token().for_job("slurm-1.0"));
    let (reserved, free) = listen(Security::Insecure);
    drop(reserved);
    let error = connect(&endpoint(&[port, free]), &with_token().for_job("slurm-1.0")).await.unwrap_err();
    assert!(error.starts_with("final: ") && error.contains("its token differs"), "{error}");
    // A launch of version 0.2.0 names no job, and learns the difference from the reply to its greeting.
    let (port, _connections) = start(with_token().for_job("slurm-1.0"));
    call(&dial(port, &with_token()).await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn silent_process_on_the_first_port_does_not_delay_the_next() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, _connections) = start(with_token());
    let ports = [silent.local_addr().unwrap().port(), port];
    let mut dialer = Dialer::new(endpoint(&ports), with_token());
    for _ in 0..3 {
        // This process keeps the connection open, so the dialer would wait for it.
        let Dialed::Connected(connection) = dialer.next(Urgency::Joining).await else { panic!("{dialer:?}") };
        assert_eq!(connection.peer.port(), port);
        dialer.restart();
    }
}

#[tokio::test]
async fn callers_that_are_refused_are_named_with_the_reason() {
    let refused_by = |coordinator: Security, caller: Security| async move {
        let (listener, port) = listen(coordinator);
        let (notices, mut lines) = mpsc::unbounded_channel();
        let _incoming = listener.incoming(notices);
        dial(port, &caller).await.unwrap_err();
        tokio::time::timeout(DEADLINE, lines.recv()).await.unwrap().unwrap()
    };
    for (coordinator, caller, reason) in [
        (with_token(), with_other_token(), "its token differs"),
        (with_token(), Security::Insecure, "it does not use TLS"),
        (Security::Insecure, with_token(), "this job has no token"),
    ] {
        let line = refused_by(coordinator, caller).await;
        assert!(line.starts_with("refused a caller at 127.0.0.1: ") && line.contains(reason), "{line}");
    }
}

/// Sends bytes and waits until the connection is closed.
async fn send_raw(port: u16, bytes: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    // The listener may already have closed the connection.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let closed = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut Vec::new())).await;
    closed.unwrap().unwrap_or_default();
}

/// Records the bytes that an agent sends to a coordinator while it connects and makes a call.
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
    // The listener still works.
    call(&dial(port, &with_token()).await.unwrap()).await.unwrap();
}
