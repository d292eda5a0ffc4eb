//! Tells whether an agent's process is gone, by means of an idle connection.
//!
//! The kernel closes the connections of a killed process: with an end of file or, if the process left data unread, with
//! a reset. Middleboxes send resets too, so after a reset the coordinator cannot tell what has happened. It therefore
//! keeps a second connection to each agent on which nothing is ever sent: no data can be left unread, and there is
//! nothing that the network could answer with a reset. It ends with an end of file, together with the process.

use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Maximum number of connections that an agent holds at a time. Callers are not authenticated; all they get is a held
/// connection.
const MOST_HELD: usize = 64;
/// Pause after a failed accept, for example with too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A kernel closes all connections of a process within this time.
const CLOSED_TOGETHER: Duration = Duration::from_secs(1);
/// The longest lease; after it, the agent counts as lost in any case.
const LONGEST_WATCH: Duration = Duration::from_secs(60);

/// Accepts connections and holds each until the other side closes it or sends anything.
pub(super) async fn hold(listener: TcpListener) {
    let mut held = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((mut stream, _)) if held.len() < MOST_HELD => {
                    held.spawn(async move { stream.read(&mut [0]).await.map(drop) });
                }
                // Over the limit: the connection is dropped, but its being accepted showed that this node can be
                // reached.
                Ok(_) => {}
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = held.join_next() => {}
        }
    }
}

/// An idle connection to an agent.
#[derive(Debug)]
pub(super) struct Presence {
    /// Time at which the connection ended with an end of file; `None` if it ended in another way.
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

    /// Waits until the process is known to be gone, given that another of its connections ends now. Returns false if
    /// that cannot be told: there is no idle connection, or it ended long before.
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
    async fn connection_ends_with_its_holder() {
        let (listener, port) = listener().await;
        let holding = tokio::spawn(hold(listener));
        let mut presence = watch(port);
        // Nothing ends while the other side lives.
        assert!(timeout(Duration::from_millis(200), &mut presence.ended).await.is_err());
        let ends = tokio::spawn(presence.ends());
        holding.abort();
        assert!(timeout(Duration::from_secs(30), ends).await.unwrap().unwrap());
    }

    #[tokio::test]
    async fn port_that_refuses_or_closed_long_before_proves_nothing() {
        let (refusing, port) = listener().await;
        drop(refusing);
        assert!(!watch(port).ends().await);
        // This one accepted the connection and closed it long before.
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
        // A caller that sends something makes room for another.
        tokio::io::AsyncWriteExt::write_all(&mut callers[0], b"x").await.unwrap();
        assert!(callers[0].read(&mut [0]).await.map_or(true, |read| read == 0));
        let mut next = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        assert!(timeout(Duration::from_millis(200), next.read(&mut [0])).await.is_err());
    }
}
