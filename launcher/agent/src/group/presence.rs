//! Whether the process of an agent is gone, as a connection tells that carries nothing.
//!
//! When a process is killed, its kernel closes its connections: with an end of file or, if something had not been read,
//! with a reset. Anything on the way may send a reset, too, so the coordinator cannot tell from one what has happened.
//! For this it has another connection to each agent, on which nothing is sent: there is nothing that was not read, and
//! nothing that the network could answer with a reset. It ends with an end of file, and with the process.

use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Connections that an agent holds at a time. Callers do not prove anything, and all that they get is this.
const MOST_HELD: usize = 64;
/// Before the next try, if a connection cannot be accepted: there may be too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Of a kernel that closes all connections of a process, between one of them and another.
const CLOSED_TOGETHER: Duration = Duration::from_secs(1);
/// The longest lease, after which the agent is lost in any case.
const LONGEST_WATCH: Duration = Duration::from_secs(60);

/// Holds connections until the other side closes them or sends anything.
pub(super) async fn hold(listener: TcpListener) {
    let mut held = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((mut stream, _)) if held.len() < MOST_HELD => {
                    held.spawn(async move { stream.read(&mut [0]).await.map(drop) });
                }
                // A connection alone shows that this node can be reached.
                Ok(_) => {}
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = held.join_next() => {}
        }
    }
}

/// A connection to an agent.
#[derive(Debug)]
pub(super) struct Presence {
    /// When it has ended as it does with the process.
    ended: JoinHandle<Option<Instant>>,
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.ended.abort();
    }
}

impl Presence {
    /// Connects to an agent that [holds](hold) connections on this port.
    pub(super) fn watch(address: String, port: u16) -> Self {
        Self {
            ended: tokio::spawn(async move {
                let mut stream = TcpStream::connect((address, port)).await.ok()?;
                (stream.read(&mut [0]).await.ok()? == 0).then(Instant::now)
            }),
        }
    }

    /// Waits until the process is gone, another connection of which ends now. False if that cannot be told: there is no
    /// connection, or it has ended long before.
    pub(super) async fn ends(mut self) -> bool {
        let now = Instant::now();
        match timeout(LONGEST_WATCH, &mut self.ended).await {
            Ok(Ok(Some(ended))) => ended + CLOSED_TOGETHER >= now,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn listener() -> (TcpListener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    fn watch(port: u16) -> Presence {
        Presence::watch("127.0.0.1".into(), port)
    }

    #[tokio::test]
    async fn connection_ends_with_what_holds_it() {
        let (listener, port) = listener().await;
        let holding = tokio::spawn(hold(listener));
        let mut presence = watch(port);
        // Not while the other side lives.
        assert!(timeout(Duration::from_millis(200), &mut presence.ended).await.is_err());
        let ends = tokio::spawn(presence.ends());
        holding.abort();
        assert!(timeout(Duration::from_secs(30), ends).await.unwrap().unwrap());
    }

    #[tokio::test]
    async fn nothing_is_told_by_a_port_that_refuses_or_that_held_nothing() {
        let (refusing, port) = listener().await;
        drop(refusing);
        assert!(!watch(port).ends().await);
        // It has accepted the connection, and closed it long before.
        let (listener, port) = listener().await;
        let presence = watch(port);
        drop(listener.accept().await.unwrap());
        sleep(CLOSED_TOGETHER + Duration::from_millis(200)).await;
        assert!(!presence.ends().await);
    }

    #[tokio::test]
    async fn callers_above_the_limit_are_not_held() {
        let (listener, port) = listener().await;
        let _holding = tokio::spawn(hold(listener));
        let mut callers = Vec::new();
        for _ in 0..MOST_HELD {
            callers.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
        }
        let mut last = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        assert_eq!(last.read(&mut [0]).await.unwrap(), 0);
        // One that sends something makes room for another.
        tokio::io::AsyncWriteExt::write_all(&mut callers[0], b"x").await.unwrap();
        assert!(callers[0].read(&mut [0]).await.map_or(true, |read| read == 0));
        let mut next = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        assert!(timeout(Duration::from_millis(200), next.read(&mut [0])).await.is_err());
    }
}
